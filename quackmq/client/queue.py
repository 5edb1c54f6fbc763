"""Producer and consumer of the distributed queue, over HTTP, with Python's standard library only.

    producer = Producer()
    me = producer.register_producer("ducks")
    producer.enqueue(me, "ducks", "quack")

    consumer = Consumer()
    consumer.register_consumer("ducks")
    consumer.dequeue("ducks")

Each method also has the name from the queue's specification: `RegisterProducer`, `Enqueue`,
`Dequeue` and so on. The errors are also named `myProducerError` and `myConsumerError`.

No call takes longer than its timeout. If the answer is lost, because a connection broke or the
broker was away for a while, the call is repeated within that time where that is safe:

- `enqueue` numbers its messages, so the broker recognises a repeat. If it finally fails, the
  outcome is unknown. Enqueue the same text again, as the producer's next message: it keeps its
  number, and the broker stores it once.
- `dequeue` names the last message received, and the broker repeats a message until it is named.
  With a directory, the consumer's id and its last ids are on disk before a message is returned:
  another process continues after it, and no message is returned twice.
- A registration that may have reached the broker is not repeated, because each creates a new id.

Two programs must not use one producer id at the same time, because both would assign numbers. The
later one gets an error if a number collides.

Any thread may call; calls of one object run one after the other.
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
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from quackmq import limits as shared_limits
from quackmq.client import limits
from quackmq.client.closing import ClosedOnExit
from quackmq.client.files.durable import replace
from quackmq.client.files.own_directory import OwnDirectory, translating_os_errors
from quackmq.errors import InvalidRequest, QuackError, StoreLocked, UnusableDirectory
from quackmq.model.offset_notes import offset_for_number

DEFAULT_PORT: Final = 8002
DEFAULT_ADDRESS: Final = f"127.0.0.1:{DEFAULT_PORT}"
#: The value of a topic's setting; None means no bound.
Setting = bool | int | str | None
#: The last id before the first message.
BEFORE_THE_FIRST: Final = ""
#: Values of `QueueError.reason` if there was no answer.
UNREACHABLE: Final = "unreachable"
NO_ANSWER: Final = "no_answer"
#: Value of `QueueError.reason` if another program used the number.
CLASH: Final = "producer_id_in_use"


class QueueError(QuackError):
    """`reason` is the broker's error code, `unreachable` if the broker could not be reached, or
    `no_answer`. `in_doubt` tells whether the broker may have executed the request: a broker that
    fails or closes may have begun."""

    code = "queue_error"

    def __init__(self, message: str, reason: str, *, in_doubt: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.in_doubt = in_doubt


class ProducerError(QueueError):
    code = "producer_error"


class ConsumerError(QueueError):
    code = "consumer_error"


class _Library(ClosedOnExit):
    """Common part of producer and consumer."""

    _error: type[QueueError]

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float = limits.QUEUE_TIMEOUT_MS / 1000,
    ) -> None:
        """`timeout` in seconds, for each call; `address` as `HOST:PORT` or a URL."""
        if not _is_positive_number(timeout):
            problem = f"a timeout is a number of seconds above 0, not {timeout!r}"
            raise self._error(problem, "invalid_setting")
        self._lock = threading.RLock()
        # Sockets take no infinite timeout.
        timeout_s = min(timeout, shared_limits.CLIENT_LONGEST_MS / 1000)
        self._broker = _Broker(address, timeout_s, self._error)

    def close(self) -> None:
        """Close the connection. The next call opens another."""
        with self._lock:
            self._broker.close()

    def list_topics(self) -> list[str]:
        """Return the names of all topics."""
        fields = self._send(_Request("GET", "/topics"))
        return [str(name) for name in fields["topics"]]

    ListTopics = list_topics

    def _send(self, request: _Request) -> dict[str, Any]:
        with self._lock:
            return self._broker.send(request).response


class Producer(_Library):
    """Put messages into topics, under one producer id per topic.

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
        self._uncertain: dict[tuple[str, str], _Uncertain] = {}

    def create_topic(self, topic: str, **settings: Setting) -> int:
        """Create a topic; return 0. Raises ProducerError if it exists.

        `settings` are settings of the topic's policy, for example `keep_until_consumed=True`. They
        override the defaults of the topic's name; see `set_topic_defaults`."""
        parameters = {"topic_name": topic, **settings}
        self._send(_Request("POST", "/topics", parameters, exists_code="topic_exists"))
        return 0

    def register_producer(self, topic: str, **settings: Setting) -> str:
        """Return a new producer id for a topic; create the topic if missing, with `settings` as in
        `create_topic`. Each id is for one topic. Raises ProducerError if the topic exists and has
        other settings."""
        parameters = {"topic": topic, **settings}
        request = _Request("POST", "/producer/register", parameters, may_repeat=False)
        with self._lock:
            producer_id = str(self._send(request)["producer_id"])
            self._next[producer_id, topic] = 0
            return producer_id

    def set_topic_defaults(self, pattern: str = "*", **settings: Setting) -> None:
        """Set the settings that new topics get if their names match `pattern`, in which `*` stands
        for any characters and `?` for one. They are durable, and apply to topics that any program
        creates. They replace the defaults that the pattern had.

            producer.set_topic_defaults(needs_subscriber=True, keep_until_consumed=True)
        """
        self._send(_Request("PUT", _default_path(pattern), {"policy": settings}))

    def remove_topic_defaults(self, pattern: str = "*") -> None:
        """Remove the defaults of a pattern. Raises ProducerError if there are none."""
        self._send(_Request("DELETE", _default_path(pattern), exists_code="unknown_topic_default"))

    def topic_defaults(self) -> dict[str, dict[str, Setting]]:
        """Return the settings of new topics, by pattern."""
        fields = self._send(_Request("GET", "/v1/topic-defaults"))
        return {each["pattern"]: each["policy"] for each in fields["topic_defaults"]}

    def enqueue(
        self, producer_id: str, topic: str, message: str, *, sequence: int | None = None
    ) -> int:
        """Put a message into a topic; return 0 when it is on disk there.

        Give `sequence` to assign ascending numbers yourself. Then the next process can enqueue a
        message with an unknown outcome again after a crash, and the broker stores it once.
        """
        key = (producer_id, topic)
        if sequence is not None:
            try:
                offset_for_number(sequence)
            except InvalidRequest as error:
                raise ProducerError(str(error), error.code) from None
        with self._lock:
            # If the last call had an unknown outcome, the same text is its repeat and keeps its
            # number. Another text is a new message.
            uncertain = self._uncertain.pop(key, None)
            if uncertain is not None and uncertain.message != message:
                uncertain = None
            number = sequence
            if number is None:
                number = self._next_number(key) if uncertain is None else uncertain.number
            # Whatever the outcome, the number is not used for another message.
            self._next[key] = max(self._next.get(key, 0), number + 1)
            try:
                attempt = self._broker.send(_make_put_request(producer_id, topic, message, number))
            except BaseException as error:
                # The broker surely has not stored the message only if it refused it. An interrupt,
                # for example, leaves the outcome unknown.
                has_failed = isinstance(error, ProducerError) and not error.in_doubt
                if uncertain is not None or not has_failed:
                    self._uncertain[key] = _Uncertain(message, number)
                raise
            # The broker calls a number repeated although this object has sent it only once. So
            # another program has used it.
            is_new = sequence is None and uncertain is None and not attempt.in_doubt
            if is_new and attempt.response["repeated"]:
                del self._next[key]  # the next call asks the broker for the last number
                raise ProducerError(
                    f"the message was not added: another program also uses {producer_id} and has "
                    f"used number {number}; register a producer for each program",
                    CLASH,
                )
            return 0

    def last_sequence(self, producer_id: str, topic: str) -> int | None:
        """Return the number of this producer's last message at the broker; None before the
        first."""
        path = f"/v1/topics/{quote(topic, '')}/publishers/{quote(producer_id, '')}"
        last = self._send(_Request("GET", path))["last_sequence"]
        return None if last is None else int(last)

    def _next_number(self, key: tuple[str, str]) -> int:
        """Return the next number for a producer id and topic. Ask the broker for the last one if
        this object did not register the id."""
        if key not in self._next:
            # Another program has registered the id, perhaps an earlier run of this one.
            last = self.last_sequence(*key)
            self._next[key] = 0 if last is None else last + 1
        return self._next[key]

    CreateTopic = create_topic
    RegisterProducer = register_producer
    Enqueue = enqueue


class Consumer(_Library):
    """Get messages from topics, in order.

        with Consumer(directory="my-consumer") as consumer:
            consumer.register_consumer("ducks")
            print(consumer.dequeue("ducks"))

    One consumer may register for many topics. `id` is its name at the broker, which stores its
    position in each topic. With `directory`, which only one process at a time may use, a new
    process continues as the same consumer.
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
        self._own_directory: OwnDirectory | None = None
        self.id: str | None = None
        #: The id of the last message received, by topic; None before the first.
        self._last_ids: dict[str, str | None] = {}
        self._open_directory()

    def close(self) -> None:
        """Close the connection, and release the directory for other processes. The next call opens
        both again."""
        with self._lock:
            super().close()
            if self._own_directory is not None:
                self._own_directory.close()
                self._own_directory = None

    @property
    def topics(self) -> list[str]:
        """The topics that this consumer has registered for."""
        return list(self._last_ids)

    def register_consumer(self, topic: str) -> str:
        """Subscribe to a topic, from now on; return the consumer's id, which is the same for all
        its topics. If the consumer (or its file) already has the topic, it continues."""
        with self._lock:
            self._open_directory()
            if self.id is not None and topic in self._last_ids:
                return self.id
            parameters: dict[str, object] = {"topic": topic}
            if self.id is not None:
                parameters["consumer_id"] = self.id
            request = _Request(
                "POST",
                "/consumer/register",
                parameters,
                # Without an id, each request creates another consumer.
                may_repeat=self.id is not None,
                exists_code="already_subscribed",
            )
            try:
                self.id = str(self._send(request).get("consumer_id", self.id))
            except ConsumerError as error:
                # This consumer has registered before, but could not store that.
                if self.id is None or error.reason != request.exists_code:
                    raise
            self._store_last_id(topic, None)
            return self.id

    def dequeue(self, topic: str) -> str:
        """Return the next message. Raises ConsumerError if there is none."""
        with self._lock:
            self._open_directory()
            last_id = self._last_ids.get(topic) or BEFORE_THE_FIRST
            fields = self._send(
                _Request("GET", "/consumer/consume", {**self._identity(topic), "last_id": last_id})
            )
            # The message counts as received only if its id is on disk. So store the id first.
            self._store_last_id(topic, str(fields["message_id"]))
            return _message_text(fields)

    def size(self, topic: str) -> int:
        """Return the number of unread messages."""
        with self._lock:
            self._open_directory()
            parameters = self._identity(topic)
            if (last_id := self._last_ids.get(topic)) is not None:
                parameters["last_id"] = last_id
            return int(self._send(_Request("GET", "/size", parameters))["size"])

    def _identity(self, topic: str) -> dict[str, object]:
        """Return the parameters that name this consumer and a topic. Raises ConsumerError before
        the first registration."""
        if self.id is None:
            raise ConsumerError(
                "this consumer has not registered for a topic: call register_consumer first",
                "not_registered",
            )
        return {"consumer_id": self.id, "topic": topic}

    def _open_directory(self) -> None:
        """Lock the directory and load its file, unless that was done. Raises ConsumerError."""
        if self._file is None or self._own_directory is not None:
            return
        try:
            self._own_directory = OwnDirectory(self._file.parent)
            with translating_os_errors(self._file):
                self._load(self._file)
        except BaseException as error:
            if self._own_directory is not None:
                self._own_directory.close()
                self._own_directory = None
            if isinstance(error, UnusableDirectory | StoreLocked):
                raise ConsumerError(str(error), error.code) from error
            raise

    def _load(self, file: Path) -> None:
        """Load the id and the last ids from the file; a missing file means a new consumer. Raises
        ConsumerError for a file with other content."""
        try:
            content = json.loads(file.read_bytes())
            self.id = str(content["consumer_id"])
            self._last_ids = {str(topic): last_id for topic, last_id in content["last_ids"].items()}
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConsumerError(
                f"{file} is not the file of a consumer ({error!r}): restore it, or use another "
                "directory, as a new consumer",
                "bad_file",
            ) from error

    def _store_last_id(self, topic: str, last_id: str | None) -> None:
        """Store the last id of a topic, on disk if there is a directory. Raises ConsumerError, and
        then nothing has changed."""
        last_ids = {**self._last_ids, topic: last_id}
        if self._file is not None:
            try:
                content = json.dumps({"consumer_id": self.id, "last_ids": last_ids}).encode()
                replace(self._file, self._file.with_suffix(".new"), content)
            except OSError as error:
                raise ConsumerError(
                    f"{self._file} cannot be written: {error.strerror}", UnusableDirectory.code
                ) from error
        self._last_ids = last_ids

    RegisterConsumer = register_consumer
    Dequeue = dequeue
    Size = size


#: The errors under the names of the queue's specification.
myProducerError = ProducerError
myConsumerError = ConsumerError


def _is_positive_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _default_path(pattern: str) -> str:
    return f"/v1/topic-defaults/{quote(pattern, '')}"


def _make_put_request(producer_id: str, topic: str, message: str, number: int) -> _Request:
    parameters = {"producer_id": producer_id, "topic": topic, "message": message}
    return _Request("POST", "/producer/produce", {**parameters, "sequence": number})


def _message_text(fields: Mapping[str, Any]) -> str:
    """Return the text of a message. Bytes that are not UTF-8, put by other programs, are kept as
    surrogate escapes, as Python does with file names."""
    message = str(fields["message"] or "")
    if fields.get("encoding") == "base64":
        return base64.b64decode(message).decode(errors="surrogateescape")
    return message


# --- requests ------------------------------------------------------------------------------------


class _Uncertain(NamedTuple):
    """A message with an unknown outcome, and its number."""

    message: str
    number: int


class _Request(NamedTuple):
    """A request to the broker. `may_repeat`: the request can be sent twice without harm.
    `exists_code` is the broker's error code for "it exists": for a repeat, this means that the
    first request was executed."""

    method: str
    path: str
    parameters: Mapping[str, object] = {}
    may_repeat: bool = True
    exists_code: str = ""


class _Attempt(NamedTuple):
    """The result of one attempt. `reason` is "" on success; `may_retry`: a retry may succeed;
    `in_doubt`: the broker may have executed the request."""

    reason: str
    problem: str
    response: dict[str, Any] = {}
    may_retry: bool = False
    in_doubt: bool = False


class _Broker:
    """A connection to the broker, opened again when it breaks."""

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
            raise error(
                f"{address!r} is not the HOST:PORT of a broker's HTTP listener", "invalid_setting"
            )
        self._connection = http.client.HTTPConnection(host, port or DEFAULT_PORT)

    def close(self) -> None:
        self._connection.close()

    def send(self, request: _Request) -> _Attempt:
        """Send a request and return the result. Raises the library's error for a failure or a
        timeout."""
        deadline = time.monotonic() + self._timeout_s
        in_doubt = was_sent = False
        while True:
            was_open = self._connection.sock is not None
            attempt = self._attempt(request, deadline)
            if not attempt.reason or (in_doubt and attempt.reason == request.exists_code):
                return attempt._replace(in_doubt=in_doubt)
            in_doubt = in_doubt or attempt.in_doubt
            was_sent = was_sent or attempt.reason == NO_ANSWER
            if not attempt.may_retry:
                raise self._error(attempt.problem, attempt.reason, in_doubt=in_doubt)
            if was_sent and not request.may_repeat:
                raise self._no_answer_error(request, attempt.problem)
            if was_open and attempt.reason == NO_ANSWER:
                continue  # the broker had probably closed the idle connection
            if time.monotonic() + limits.QUEUE_PAUSE_MS / 1000 >= deadline:
                if was_sent:
                    raise self._no_answer_error(request, attempt.problem)
                problem = f"{self._describe(request)}: {attempt.problem}"
                raise self._error(problem, attempt.reason, in_doubt=in_doubt)
            time.sleep(limits.QUEUE_PAUSE_MS / 1000)

    def _attempt(self, request: _Request, deadline: float) -> _Attempt:
        """Send a request once and return the result, also for an error. Only interrupts raise."""
        try:
            self._connect(deadline)
        except OSError as error:
            return _Attempt(UNREACHABLE, f"the broker cannot be reached: {error}", may_retry=True)
        try:
            status, fields = self._exchange(request)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._connection.close()
            problem = f"the connection broke: {error!r}"
            return _Attempt(NO_ANSWER, problem, may_retry=True, in_doubt=True)
        except BaseException:
            self._connection.close()  # a late answer must not be taken for that of the next request
            raise
        if status < HTTPStatus.BAD_REQUEST:
            return _Attempt("", "", fields)
        problem = str(fields.get("message") or fields.get("detail") or fields)
        # A broker that starts or closes answers 503. A broker that fails or closes may have begun
        # to execute the request.
        may_retry = status == HTTPStatus.SERVICE_UNAVAILABLE
        in_doubt = status >= HTTPStatus.INTERNAL_SERVER_ERROR
        return _Attempt(str(fields.get("code", status)), problem, fields, may_retry, in_doubt)

    def _connect(self, deadline: float) -> None:
        """Connect within half of the timeout, so that there is time for a second attempt."""
        remaining_s = max(deadline - time.monotonic(), limits.QUEUE_PAUSE_MS / 1000)
        self._connection.timeout = min(remaining_s, self._timeout_s / 2)
        if self._connection.sock is None:
            self._connection.connect()
        self._connection.sock.settimeout(self._connection.timeout)

    def _exchange(self, request: _Request) -> tuple[int, dict[str, Any]]:
        """Send a request over the open connection; return the status and the JSON object of the
        answer. Raises OSError, HTTPException, or ValueError for an invalid answer."""
        path, body, headers = request.path, None, {}
        if request.method == "GET":
            if request.parameters:
                path = f"{path}?{urlencode(request.parameters)}"
        else:
            body = json.dumps(request.parameters).encode()
            headers = {"Content-Type": "application/json"}
        self._connection.request(request.method, path, body, headers)
        response = self._connection.getresponse()
        # One byte more than allowed shows that an answer is too large.
        data = response.read(limits.QUEUE_ANSWER_BYTES + 1)
        if len(data) > limits.QUEUE_ANSWER_BYTES:
            raise ValueError(f"the answer is larger than {limits.QUEUE_ANSWER_BYTES} bytes")
        fields = {} if response.status == HTTPStatus.NO_CONTENT else json.loads(data)
        if not isinstance(fields, dict):
            raise ValueError(f"the answer is not a JSON object: {data[:100]!r}")
        return response.status, fields

    def _no_answer_error(self, request: _Request, problem: str) -> QueueError:
        """Return the error for a request that was sent and not answered."""
        return self._error(
            f"{self._describe(request)} was not answered, so its outcome is unknown; {problem} "
            f"(the timeout is {self._timeout_s:g} s)",
            NO_ANSWER,
            in_doubt=True,
        )

    def _describe(self, request: _Request) -> str:
        return f"{request.method} {request.path} at {self._address}"
