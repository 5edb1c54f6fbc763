"""The clients of the reliable proxy, on pyzmq: every message once, whatever fails in between.

    with ReliableSubscriber("127.0.0.1:5558", "huey", directory="done") as subscriber:
        subscriber.subscribe("ducks")
        message = subscriber.get(timeout=60)

    with ReliablePublisher("127.0.0.1:5558", "daisy") as publisher:
        publisher.publish("ducks", b"quack")

The address is that of the proxy's REP socket; where the XPUB socket is, it says itself.

**Receiving.** The broker keeps the subscription under the subscriber's name until `unsubscribe`,
and sends each message until it is acknowledged, through its own crashes and the subscriber's. What
comes again is known by its id and not returned again. What is acknowledged, and when, depends on
how `get` is called:

- with `directory`: a message is noted there before `get` returns it, and acknowledged then. It is
  returned once in the life of the directory; if the program dies with it in hand, it has gone
  unprocessed.
- without: it is acknowledged when the next one is asked for. Acknowledgements are sent together,
  and nothing waits for them. So after a crash the last message is returned again, and so are those
  just before it whose acknowledgements the broker had not heard; `flush` waits until it has.
- `get(hold=True)`: it is acknowledged by `done(message)`, and noted if there is a directory. If the
  program dies before, it is returned again.

Messages may come in another order than they were published in: what was missed comes later than
what was not. Partition and offset tell where one belongs.

**Publishing.** `publish` returns when the message is on disk at the broker. It is numbered, and
sent again until the broker answers, which drops repeats. After QuackTimeout a message may be there
or not; publishing it again with the same number, before any other to that topic, cannot double it.

All errors are of the one tree, `quackmq.errors`. A name is used by one client at a time, which any
thread may call.
"""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from typing import Final, Self

from quackmq import limits
from quackmq.client.zeromq.receiver import ProxyMessage, Receiving
from quackmq.client.zeromq.req_socket import Asking, Deadline
from quackmq.errors import InvalidRequest, QuackTimeout, Unreachable
from quackmq.model.subscription import check_name
from quackmq.model.topic import check_topic_name
from quackmq.protocols.zmq.codec.proxy_language import (
    Goodbye,
    Hello,
    LastPublished,
    Publish,
    Request,
    Welcome,
    encode_request,
    read_answer,
)

__all__ = ["ProxyMessage", "ReliablePublisher", "ReliableSubscriber"]

DEFAULT_TIMEOUT_S: Final = 5.0
#: A publisher asks again after so long: the broker may have been away.
_AGAIN_MS: Final = 1_000
#: So does a subscriber; the broker tries for some seconds to reach it before it answers.
_HELLO_AGAIN_MS: Final = limits.PROXY_CONNECT_MS + 1_000
_PAUSE_S: Final = 0.1


class _Asking:
    """What both have: a name, and somebody to ask."""

    def __init__(self, address: str, name: str, timeout: float) -> None:
        check_name(name)
        self.name = name
        self._timeout_s = timeout
        self._lock = threading.Lock()
        self._asking = Asking(address)

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

    def _exchange(
        self, request: Request, deadline: Deadline, again_ms: int | None = None
    ) -> Welcome | tuple[str, ...] | int | None:
        """Ask, once or again and again until there is an answer."""
        check_topic_name(request.topic)
        frame = encode_request(request)
        while True:
            left_ms = deadline.left_ms()
            wait_ms = left_ms if again_ms is None else min(left_ms, again_ms)
            answer = self._asking.ask(frame, wait_ms)
            if answer is not None:
                return read_answer(request, answer)
            if deadline.left_ms() <= 0:
                verb = frame.split(b" ", 1)[0].decode()
                text = f"{verb} {request.topic}: waited {deadline.timeout_s:g} s for the proxy at "
                raise QuackTimeout(f"{text}{self._asking.address}, for {self.name}")


class ReliableSubscriber(_Asking):
    def __init__(
        self,
        address: str,
        name: str,
        *,
        directory: str | os.PathLike[str] | None = None,
        listen: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """`address` is HOST:PORT of the proxy. What was missed is sent to a REP socket of ours: at
        `listen`, HOST:PORT, or else at a free port of the address that the way to the proxy begins
        with. `timeout` is in seconds, for every call."""
        super().__init__(address, name, timeout)
        #: Who gets is not in the way of who subscribes.
        self._getting = threading.Lock()
        self._returned: ProxyMessage | None = None
        self._notes_at_once = directory is not None
        self._receiving = Receiving(self._asking.address, name, directory, listen)

    def close(self) -> None:
        """Waits end. What is not acknowledged yet comes again to the next one of this name."""
        self._receiving.close()
        super().close()

    def subscribe(self, topic: str) -> bool:
        """What is published from now on is this subscriber's to get, until it unsubscribes. True if
        that is new; also who was subscribed before says so, once for every object: where it listens
        now. NotAllowed, Unreachable.

            subscriber.subscribe("ducks")
        """
        with self._lock, self._receiving.expecting(topic):
            welcome = self._hello(topic, Deadline(self._timeout_s))
            self._receiving.subscribe(topic, welcome.xpub_port)
            return welcome.is_new

    def unsubscribe(self, topic: str) -> None:
        """The subscription ends, with what has not been got. UnknownSubscription.

        subscriber.unsubscribe("ducks")
        """
        with self._lock:
            self._exchange(Goodbye(self.name, topic), Deadline(self._timeout_s))
            self._receiving.unsubscribe(topic)

    def _hello(self, topic: str, deadline: Deadline) -> Welcome:
        hello = Hello(self.name, topic, self._receiving.address)
        while True:
            try:
                welcome = self._exchange(hello, deadline, _HELLO_AGAIN_MS)
                assert isinstance(welcome, Welcome), "the codec gives nothing else for it"
                return welcome
            except Unreachable:
                # We do listen there, so it may be a bad moment.
                if deadline.left_ms() <= _AGAIN_MS:
                    raise
                time.sleep(_PAUSE_S)

    def get(self, *, timeout: float | None = None, hold: bool = False) -> ProxyMessage:
        """The next message of any topic that was subscribed to, waiting for it. QuackTimeout.

        message = subscriber.get(timeout=60)
        """
        with self._getting:
            if self._returned is not None:
                self._receiving.done(self._returned)
                self._returned = None
            timeout_s = self._timeout_s if timeout is None else timeout
            message = self._receiving.get(timeout_s)
            if hold:
                return message
            if self._notes_at_once:
                try:
                    self._receiving.done(message)
                except BaseException:
                    self._receiving.put_back(message)
                    raise
            else:
                self._returned = message
            return message

    def done(self, message: ProxyMessage) -> None:
        """A message that was got with `hold`; with a directory, that is on disk.

        subscriber.done(message)
        """
        self._receiving.done(message)

    def flush(self, *, timeout: float | None = None) -> None:
        """Wait until the broker has heard of all that is done; what it has not heard of when a
        process ends, comes again to the next one. QuackTimeout.

            subscriber.flush()
        """
        self._receiving.flush(self._timeout_s if timeout is None else timeout)


class ReliablePublisher(_Asking):
    def __init__(self, address: str, name: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """`address` is HOST:PORT of the proxy. Numbers are kept by the broker under `name`."""
        super().__init__(address, name, timeout)
        #: By topic, the number that is next.
        self._next: dict[str, int] = {}

    def publish(self, topic: str, content: bytes | str, *, number: int | None = None) -> int:
        """Publish a message, and return its number. With a number of one's own it may be repeated,
        also after a crash, and is there once; numbers grow. QuackTimeout says that it is not known
        whether it was taken.

            publisher.publish("ducks", "quack")
            publisher.publish("ducks", "quack", number=7)
        """
        if number is not None and number < 0:
            raise InvalidRequest(f"{number} is no number: they are whole numbers from 0 on")
        body = content.encode() if isinstance(content, str) else content
        with self._lock:
            deadline = Deadline(self._timeout_s)
            if number is None:
                number = self._next_number(topic, deadline)
            # Taken or not, it is not used for another message.
            self._next[topic] = max(number + 1, self._next.get(topic, 0))
            self._exchange(Publish(self.name, topic, number, body), deadline, _AGAIN_MS)
            return number

    def last_number(self, topic: str) -> int | None:
        """The number of the last message of this publisher that the broker holds; None before the
        first.

            publisher.last_number("ducks")
        """
        with self._lock:
            return self._last_number(topic, Deadline(self._timeout_s))

    def _next_number(self, topic: str, deadline: Deadline) -> int:
        if topic not in self._next:
            last = self._last_number(topic, deadline)
            self._next[topic] = 0 if last is None else last + 1
        return self._next[topic]

    def _last_number(self, topic: str, deadline: Deadline) -> int | None:
        held = self._exchange(LastPublished(self.name, topic), deadline, _AGAIN_MS)
        assert held is None or isinstance(held, int), "the codec gives nothing else for it"
        return held
