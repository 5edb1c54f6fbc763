"""The distributed queue's two libraries: a producer and a consumer, over HTTP, nothing but Python.

    producer = Producer()
    me = producer.register_producer("ducks")
    producer.enqueue(me, "ducks", "quack")

    consumer = Consumer()
    consumer.register_consumer("ducks")
    consumer.dequeue("ducks")

Each method also has the name that the queue's description gives it: `RegisterProducer`, `Enqueue`,
`Dequeue` and so on, and the errors are `myProducerError` and `myConsumerError` too.

Promised: no call takes longer than its timeout. A call whose answer is lost, because a connection
broke or the broker was away for a while, is asked again within that time where that is safe:

- `enqueue` numbers its messages, so the broker knows a repeat. If it fails in the end, the message
  may be in the queue or not; enqueued once more (the same text, as the producer's next one) it
  keeps its number and is there once.
- `dequeue` names the last message received, and the broker sends one again until it is named. With
  a directory, the consumer's id and its last ids are on disk before a message is returned: another
  process goes on behind it, and no message is returned twice.
- A registration is not asked again once it may have been heard, since each makes a new id.

Not promised: that two programs may use one producer id at the same time. Both would number, and
where that shows, the later one is told so.

Who may call: any thread; calls of one object are made one after the other.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self
from urllib.parse import quote, urlencode, urlsplit

from quackmq.client import limits
from quackmq.client.files.durable import replace
from quackmq.errors import QuackError, UnusableDirectory

DEFAULT_PORT: Final = 8002
DEFAULT_ADDRESS: Final = f"127.0.0.1:{DEFAULT_PORT}"
#: Named as the last message before there is one.
BEFORE_THE_FIRST: Final = ""
#: What `QueueError.reason` says where no answer came.
UNREACHABLE: Final = "unreachable"
NO_ANSWER: Final = "no_answer"
#: And where a number that was never used before is taken.
CLASH: Final = "producer_id_in_use"


class QueueError(QuackError):
    """`reason` is the broker's code for what went wrong; `unreachable` if it could not be asked,
    and `no_answer` if it did not say. `in_doubt` tells whether it may have done what it was asked
    to: also a broker that fails, or closes, may have begun."""

    code = "queue_error"

    def __init__(self, message: str, reason: str, *, in_doubt: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.in_doubt = in_doubt


class ProducerError(QueueError):
    code = "producer_error"


class ConsumerError(QueueError):
    code = "consumer_error"


class _Library:
    """What both have in common."""

    _error: type[QueueError]

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float = limits.QUEUE_TIMEOUT_MS / 1000,
    ) -> None:
        """`timeout` in seconds, for each call; `address` as `HOST:PORT` or a URL."""
        self._lock = threading.RLock()
        self._broker = _Broker(address, timeout, self._error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection. The next call makes another."""
        with self._lock:
            self._broker.close()

    def list_topics(self) -> list[str]:
        """The names of all topics."""
        answer = self._ask(_Request("GET", "/topics"))
        return [str(name) for name in answer["topics"]]

    ListTopics = list_topics

    def _ask(self, request: _Request) -> dict[str, Any]:
        with self._lock:
            return self._broker.ask(request).answer


class Producer(_Library):
    """Puts messages into queues, under an id for each.

    with Producer() as producer:
        me = producer.register_producer("ducks")
        producer.enqueue(me, "ducks", "quack")
    """

    _error = ProducerError

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float = limits.QUEUE_TIMEOUT_MS / 1000,
    ) -> None:
        super().__init__(address, timeout=timeout)
        self._next: dict[tuple[str, str], int] = {}
        self._unsure: dict[tuple[str, str], _Unsure] = {}

    def create_topic(self, topic: str) -> int:
        """A new topic; 0, or a ProducerError if it is there already."""
        parameters = {"topic_name": topic}
        self._ask(_Request("POST", "/topics", parameters, done_already="topic_exists"))
        return 0

    def register_producer(self, topic: str) -> str:
        """An id to put messages into a topic with; the topic comes to life if it is not there. For
        another topic register again: each id is for one."""
        request = _Request("POST", "/producer/register", {"topic": topic}, may_repeat=False)
        with self._lock:
            producer_id = str(self._ask(request)["producer_id"])
            self._next[producer_id, topic] = 0
            return producer_id

    def enqueue(
        self, producer_id: str, topic: str, message: str, *, sequence: int | None = None
    ) -> int:
        """Put a message into a topic; 0 when it is on disk there.

        Give `sequence` to number messages yourself, upwards: then what was in doubt when a process
        died can be enqueued again by the next one, and is there once.
        """
        place = (producer_id, topic)
        with self._lock:
            unsure = self._unsure.pop(place, None)
            if unsure is not None and unsure.message != message:
                unsure = None
            number = sequence
            if number is None:
                number = self._next_number(place) if unsure is None else unsure.number
            self._next[place] = max(self._next.get(place, 0), number + 1)
            try:
                tried = self._broker.ask(_produce(producer_id, topic, message, number))
            except BaseException as error:
                is_clear = isinstance(error, ProducerError) and not error.in_doubt
                if unsure is not None or not is_clear:
                    self._unsure[place] = _Unsure(message, number)
                raise
            is_new = sequence is None and unsure is None and not tried.in_doubt
            if is_new and tried.answer["repeated"]:
                del self._next[place]
                raise ProducerError(
                    f"the message was not added: somebody else uses {producer_id} too and has "
                    f"taken number {number}; register a producer for each program",
                    CLASH,
                )
            return 0

    def last_sequence(self, producer_id: str, topic: str) -> int | None:
        """The number of the last message that the broker holds of this producer; None before the
        first."""
        path = f"/v1/topics/{quote(topic, '')}/publishers/{quote(producer_id, '')}"
        last = self._ask(_Request("GET", path))["last_sequence"]
        return None if last is None else int(last)

    def _next_number(self, place: tuple[str, str]) -> int:
        if place not in self._next:
            # Registered by somebody else, perhaps by this program when it ran before.
            last = self.last_sequence(*place)
            self._next[place] = 0 if last is None else last + 1
        return self._next[place]

    CreateTopic = create_topic
    RegisterProducer = register_producer
    Enqueue = enqueue


class Consumer(_Library):
    """Takes messages from topics, from each in order, at its own pace.

        with Consumer(directory="my-consumer") as consumer:
            consumer.register_consumer("ducks")
            print(consumer.dequeue("ducks"))

    One consumer may register for many topics. `id` is its name at the broker, where its place in
    each topic is kept. With `directory`, which one process uses at a time, a new process goes on as
    the same consumer.
    """

    _error = ConsumerError

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float = limits.QUEUE_TIMEOUT_MS / 1000,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(address, timeout=timeout)
        self._file = None if directory is None else Path(directory) / "consumer.json"
        self.id: str | None = None
        #: By topic, the last message received; None before the first.
        self._last_ids: dict[str, str | None] = {}
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._load(self._file)

    @property
    def topics(self) -> list[str]:
        """Those that it has registered for."""
        return list(self._last_ids)

    def register_consumer(self, topic: str) -> str:
        """Subscribe to a topic, from here on; the consumer's id, the same for all its topics. A
        topic that this consumer has, as a file may tell, it just goes on with."""
        with self._lock:
            if self.id is not None and topic in self._last_ids:
                return self.id
            parameters: dict[str, object] = {"topic": topic}
            if self.id is not None:
                parameters["consumer_id"] = self.id
            request = _Request(
                "POST",
                "/consumer/register",
                parameters,
                may_repeat=self.id is not None,
                done_already="already_subscribed",
            )
            self.id = str(self._ask(request).get("consumer_id", self.id))
            self._remember(topic, None)
            return self.id

    def dequeue(self, topic: str) -> str:
        """The next message. A ConsumerError if there is none."""
        with self._lock:
            last_id = self._last_ids.get(topic) or BEFORE_THE_FIRST
            answer = self._ask(
                _Request("GET", "/consumer/consume", {**self._me(topic), "last_id": last_id})
            )
            # The id counts once it is on disk: else the message would be behind, and not returned.
            self._remember(topic, str(answer["message_id"]))
            return _text(answer)

    def size(self, topic: str) -> int:
        """How many messages are still to come."""
        with self._lock:
            parameters = self._me(topic)
            if (last_id := self._last_ids.get(topic)) is not None:
                parameters["last_id"] = last_id
            return int(self._ask(_Request("GET", "/size", parameters))["size"])

    def _me(self, topic: str) -> dict[str, object]:
        if self.id is None:
            raise ConsumerError(
                "this consumer has registered for no topic: call register_consumer first",
                "not_registered",
            )
        return {"consumer_id": self.id, "topic": topic}

    def _load(self, file: Path) -> None:
        try:
            kept = json.loads(file.read_bytes())
            self.id = str(kept["consumer_id"])
            self._last_ids = {str(topic): last_id for topic, last_id in kept["last_ids"].items()}
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConsumerError(f"{file} is no consumer's file: {error!r}", "bad_file") from error

    def _remember(self, topic: str, last_id: str | None) -> None:
        last_ids = {**self._last_ids, topic: last_id}
        if self._file is not None:
            try:
                kept = json.dumps({"consumer_id": self.id, "last_ids": last_ids}).encode()
                replace(self._file, self._file.with_suffix(".new"), kept)
            except OSError as error:
                raise ConsumerError(
                    f"{self._file} cannot be written: {error.strerror}", UnusableDirectory.code
                ) from error
        self._last_ids = last_ids

    RegisterConsumer = register_consumer
    Dequeue = dequeue
    Size = size


#: The errors as the queue's description names them.
myProducerError = ProducerError
myConsumerError = ConsumerError


def _produce(producer_id: str, topic: str, message: str, number: int) -> _Request:
    parameters = {"producer_id": producer_id, "topic": topic, "message": message}
    return _Request("POST", "/producer/produce", {**parameters, "sequence": number})


def _text(answer: Mapping[str, Any]) -> str:
    """A message's text. Other programs may have put bytes that are none: those stay themselves, as
    Python does it with names of files."""
    message = str(answer["message"] or "")
    if answer.get("encoding") == "base64":
        return base64.b64decode(message).decode(errors="surrogateescape")
    return message


# --- asking ---------------------------------------------------------------------------------------


class _Unsure(NamedTuple):
    """A message that may be in its topic, and its number."""

    message: str
    number: int


class _Request(NamedTuple):
    """`may_repeat`: asking twice does no harm. `done_already` is the broker's code for "there is
    one": to a repeat that means that the first was heard."""

    method: str
    path: str
    parameters: Mapping[str, object] = {}
    may_repeat: bool = True
    done_already: str = ""


class _Tried(NamedTuple):
    """What came of asking. `reason` is "" where it was done; `is_passing`: what went wrong may soon
    be over; `in_doubt`: it may have been done all the same, or before."""

    reason: str
    trouble: str
    answer: dict[str, Any] = {}
    is_passing: bool = False
    in_doubt: bool = False


class _Broker:
    """The broker at the other end of one connection, which is made anew when it breaks."""

    def __init__(self, address: str, timeout_s: float, error: type[QueueError]) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._error = error
        url = urlsplit(address if "//" in address else f"//{address}")
        try:
            host, port = url.hostname, url.port
        except ValueError:
            host = port = None
        if not host or url.scheme not in ("", "http") or url.path not in ("", "/"):
            raise error(f"{address!r} is no HOST:PORT of an HTTP door", "invalid_setting")
        self._connection = http.client.HTTPConnection(host, port or DEFAULT_PORT)

    def close(self) -> None:
        self._connection.close()

    def ask(self, request: _Request) -> _Tried:
        """The answer to a request; raises the library's error for a failure, and for none."""
        deadline = time.monotonic() + self._timeout_s
        in_doubt = was_heard = False
        while True:
            was_open = self._connection.sock is not None
            tried = self._try(request, deadline)
            if not tried.reason or (in_doubt and tried.reason == request.done_already):
                return tried._replace(in_doubt=in_doubt)
            in_doubt = in_doubt or tried.in_doubt
            was_heard = was_heard or tried.reason == NO_ANSWER
            if not tried.is_passing:
                raise self._error(tried.trouble, tried.reason, in_doubt=in_doubt)
            if was_heard and not request.may_repeat:
                raise self._no_answer(request, tried.trouble)
            if was_open and tried.reason == NO_ANSWER:
                continue  # most likely it had been closed while nobody asked
            if time.monotonic() + limits.QUEUE_PAUSE_MS / 1000 >= deadline:
                if was_heard:
                    raise self._no_answer(request, tried.trouble)
                trouble = f"{self._what(request)}: {tried.trouble}"
                raise self._error(trouble, tried.reason, in_doubt=in_doubt)
            time.sleep(limits.QUEUE_PAUSE_MS / 1000)

    def _try(self, request: _Request, deadline: float) -> _Tried:
        try:
            self._connect(deadline)
        except OSError as error:
            return _Tried(UNREACHABLE, f"the broker cannot be reached: {error}", is_passing=True)
        try:
            status, answer = self._exchange(request)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._connection.close()
            trouble = f"the connection broke: {error!r}"
            return _Tried(NO_ANSWER, trouble, is_passing=True, in_doubt=True)
        except BaseException:
            self._connection.close()  # the answer that may still come is not that of the next
            raise
        if status < HTTPStatus.BAD_REQUEST:
            return _Tried("", "", answer)
        trouble = str(answer.get("message") or answer.get("detail") or answer)
        is_passing = status == HTTPStatus.SERVICE_UNAVAILABLE
        in_doubt = status >= HTTPStatus.INTERNAL_SERVER_ERROR
        return _Tried(str(answer.get("code", status)), trouble, answer, is_passing, in_doubt)

    def _connect(self, deadline: float) -> None:
        """With half of the whole time for one try, so that one that hangs is not the only one."""
        left_s = max(deadline - time.monotonic(), limits.QUEUE_PAUSE_MS / 1000)
        self._connection.timeout = min(left_s, self._timeout_s / 2)
        if self._connection.sock is None:
            self._connection.connect()
        self._connection.sock.settimeout(self._connection.timeout)

    def _exchange(self, request: _Request) -> tuple[int, dict[str, Any]]:
        path, body, headers = request.path, None, {}
        if request.method == "GET":
            if request.parameters:
                path = f"{path}?{urlencode(request.parameters)}"
        else:
            body = json.dumps(request.parameters).encode()
            headers = {"Content-Type": "application/json"}
        self._connection.request(request.method, path, body, headers)
        response = self._connection.getresponse()
        data = response.read(limits.QUEUE_ANSWER_BYTES + 1)
        if len(data) > limits.QUEUE_ANSWER_BYTES:
            raise ValueError(f"an answer of more than {limits.QUEUE_ANSWER_BYTES} bytes")
        answer = json.loads(data)
        if not isinstance(answer, dict):
            raise ValueError(f"an answer that is no object: {data[:100]!r}")
        return response.status, answer

    def _no_answer(self, request: _Request, trouble: str) -> QueueError:
        return self._error(
            f"{self._what(request)} was not answered, so it may be done or not; {trouble} "
            f"(the timeout is {self._timeout_s:g} s)",
            NO_ANSWER,
            in_doubt=True,
        )

    def _what(self, request: _Request) -> str:
        return f"{request.method} {request.path} at {self._address}"
