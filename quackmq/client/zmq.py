"""put, get, subscribe, unsubscribe over ZeroMQ.

    with ZmqClient("127.0.0.1:5555", "donald", directory="ids") as client:
        client.subscribe("ducks")
        client.put("ducks", "quack")
        message = client.get("ducks")
        print(message.id, message.text)

**Getting, exactly once.** A message is sent again until its id is named with the next `get`, so
what matters is what the client still knows of it after a crash. Three ways:

- *With a directory*, the id is on disk, synced, before `get` returns its message: a message is
  never returned twice, nor is one skipped. If the program crashes with a message in hand, that one
  was returned, and may have gone unprocessed.
- *Without one*, the id goes with the process: the message in hand at a crash is returned again.
- *With the program's own store*: `get(topic, after=id)` names an id that the program kept, best in
  the transaction that holds what it made of the message. Then each message is processed exactly
  once, through any crash. Before the first message `after` is BEFORE_THE_FIRST.

**Putting, exactly once.** A `put` that returned is on disk at the broker. One that raised
QuackTimeout may be or not: a plain one put again may then be there twice. Numbered puts
(`put(topic, content, sequence=n)`, numbers growing, each client name with its own) can be repeated:
what the broker has, it drops. `last_sequence` tells after a crash where to go on.

No call takes longer than its timeout: it raises QuackTimeout, which says what it waited for. All
errors are of the one tree, `quackmq.errors`.

Who may call: any thread; calls of one object are made one after the other. A name is used by one
client at a time.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Final, NamedTuple, Self

from quackmq.client.zeromq.last_ids import LastIds
from quackmq.client.zeromq.req_socket import Asking, Deadline
from quackmq.errors import InvalidRequest, QuackTimeout
from quackmq.model.subscription import check_name
from quackmq.model.topic import check_topic_name
from quackmq.protocols.zmq.codec.queue_language import (
    NONE_YET,
    Get,
    Got,
    LastSequence,
    Put,
    Request,
    Subscribe,
    Unsubscribe,
    encode_request,
    read_answer,
)

DEFAULT_TIMEOUT_S: Final = 5.0
#: What a program that keeps the last id itself names before it has one.
BEFORE_THE_FIRST: Final = NONE_YET


class ZmqMessage(NamedTuple):
    """A message. Its id is a token to be given back as it is."""

    id: str
    topic: str
    content: bytes

    @property
    def text(self) -> str:
        """The content as UTF-8; UnicodeDecodeError where another door put bytes that are none."""
        return self.content.decode()


class ZmqClient:
    def __init__(
        self,
        address: str,
        name: str,
        *,
        directory: str | os.PathLike[str] | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """`address` is HOST:PORT, or tcp://HOST:PORT. Subscriptions, and the numbers of puts, are
        kept by the broker under `name`. `timeout` is in seconds, for every call."""
        check_name(name)
        self.name = name
        self._asking = Asking(address)
        self._timeout_s = timeout
        self._lock = threading.Lock()
        self._ids = LastIds(directory, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._asking.close()
            self._ids.close()

    # --- calls ------------------------------------------------------------------------------

    def put(self, topic: str, content: str | bytes, *, sequence: int | None = None) -> None:
        """Add a message to a topic; bytes have to be UTF-8.

        client.put("ducks", "quack")
        client.put("ducks", "quack", sequence=7)    # may be repeated, and is there once
        """
        put = Put(self.name, topic, _utf8(content), sequence)
        if sequence is not None and sequence < 0:
            raise InvalidRequest(f"{sequence} is no sequence: they are whole numbers from 0 on")
        self._ask(put, "the broker to take a message")

    def get(
        self, topic: str, *, timeout: float | None = None, after: str | None = None
    ) -> ZmqMessage:
        """The next message of a topic that this client has subscribed to, waiting for it. With
        `after`, the one behind the message of that id: for programs that keep the id themselves.

            message = client.get("ducks", timeout=60)
            message = client.get("ducks", after=kept_id)
        """
        with self._lock:
            last = self._ids.get(topic) if after is None else after
            get = Get(self.name, topic, None if last == BEFORE_THE_FIRST else last)
            deadline = Deadline(self._timeout_s if timeout is None else timeout)
            # The broker waits a while and then says that there is none.
            while (got := self._exchange(get, deadline, "a message")) is None:
                if deadline.left_ms() <= 0:
                    raise self._timed_out(get, deadline, "a message")
            assert isinstance(got, Got), "the codec gives nothing else for it"
            if after is None:
                self._ids.put(topic, got.id)
            return ZmqMessage(got.id, topic, got.content)

    def subscribe(self, topic: str) -> bool:
        """What is put from now on is this client's to get, until it unsubscribes. True if that is
        new, False if it was so before.

            client.subscribe("ducks")
        """
        with self._lock:
            subscribe = Subscribe(self.name, topic)
            is_new = bool(self._exchange(subscribe, Deadline(self._timeout_s), "the broker"))
            if is_new:
                self._ids.forget(topic)
            return is_new

    def unsubscribe(self, topic: str) -> None:
        """The subscription ends, with what it has not got. UnknownSubscription.

        client.unsubscribe("ducks")
        """
        with self._lock:
            unsubscribe = Unsubscribe(self.name, topic)
            self._exchange(unsubscribe, Deadline(self._timeout_s), "the broker")
            self._ids.forget(topic)

    def last_sequence(self, topic: str) -> int | None:
        """The sequence of the last numbered put of this client that the broker holds; None if it
        holds none.

            next_sequence = (client.last_sequence("ducks") or 0) + 1
        """
        held = self._ask(LastSequence(self.name, topic), "the broker")
        assert held is None or isinstance(held, int), "the codec gives nothing else for it"
        return held

    # --- how they are made --------------------------------------------------------------------

    def _ask(self, request: Request, waits_for: str) -> Got | bool | int | None:
        with self._lock:
            return self._exchange(request, Deadline(self._timeout_s), waits_for)

    def _exchange(
        self, request: Request, deadline: Deadline, waits_for: str
    ) -> Got | bool | int | None:
        check_topic_name(request.topic)
        answer = self._asking.ask(encode_request(request), deadline.left_ms())
        if answer is None:
            raise self._timed_out(request, deadline, waits_for)
        return read_answer(request, answer)

    def _timed_out(self, request: Request, deadline: Deadline, waits_for: str) -> QuackTimeout:
        what = encode_request(request).split(b" ", 1)[0].decode()
        text = f"{what} {request.topic}: waited {deadline.timeout_s:g} s for {waits_for}"
        text += f", for {self.name} at {self._asking.address}"
        if isinstance(request, Put):
            text += "; whether it was taken is not known"
            text += "" if request.sequence is None else ": put it again with the same sequence"
        return QuackTimeout(text)


def _utf8(content: str | bytes) -> bytes:
    try:
        if isinstance(content, str):
            return content.encode()
        content.decode()
    except UnicodeError as error:
        raise InvalidRequest(f"a message that is put over ZeroMQ is UTF-8: {error}") from None
    return content
