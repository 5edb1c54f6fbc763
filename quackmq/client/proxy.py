"""Clients of the reliable proxy, on pyzmq: each message exactly once, despite failures.

    with ReliableSubscriber("127.0.0.1:5558", "huey", directory="done") as subscriber:
        subscriber.subscribe("ducks")
        message = subscriber.get(timeout=60)

    with ReliablePublisher("127.0.0.1:5558", "daisy") as publisher:
        publisher.publish("ducks", b"quack")

The address is that of the proxy's REP socket; the proxy tells clients where its XPUB socket is.

**Receiving.** The broker keeps the subscription under the subscriber's name until `unsubscribe`. It
sends each message until it is acknowledged, despite crashes of the broker or the subscriber. The
client recognises repeats by their id and does not return them again. When a message is
acknowledged depends on how `get` is called:

- with `directory`: the client stores the id there before `get` returns the message, and then
  acknowledges it. Each message is returned at most once in the life of the directory. If the
  program dies before it has processed the message, the message is lost to it.
- without a directory: the message is acknowledged by the next call of `get`. Acknowledgements are
  sent in batches, and nothing waits for them. After a crash, the last message is returned again,
  and so are earlier ones whose acknowledgements did not reach the broker. `flush` waits until they
  have.
- with `get(hold=True)`: the message is acknowledged by `done(message)`, and stored if there is a
  directory. If the program dies before that, the message is returned again.

Messages may arrive out of order, because missed messages are sent again later. Partition and offset
give the original order.

**Publishing.** `publish` returns when the message is on disk at the broker. Messages are numbered
and sent again until the broker answers; the broker drops repeats. After a QuackTimeout the outcome
is unknown: publish the message again with the same number, before any other to that topic.

All errors are QuackErrors. Only one client at a time may use a name; any thread may call it.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Final

from quackmq import limits
from quackmq.client.closing import ClosedOnExit
from quackmq.client.deadline import Deadline
from quackmq.client.locks import locked
from quackmq.client.zeromq.receiver import ProxyMessage, Receiver
from quackmq.client.zeromq.req_socket import ReqSocket
from quackmq.errors import InvalidRequest, QuackTimeout, Unreachable
from quackmq.model.offset_notes import offset_for_number
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
    read_reply,
)

__all__ = ["ProxyMessage", "ReliablePublisher", "ReliableSubscriber"]

DEFAULT_TIMEOUT_S: Final = 5.0
#: A publisher repeats a request after this time: the broker may have restarted.
_RETRY_S: Final = 1.0
#: A subscriber waits longer, because the broker first tries for some seconds to connect to it.
_HELLO_RETRY_S: Final = limits.PROXY_CONNECT_MS / 1000 + 1.0
_PAUSE_S: Final = 0.1


class _ProxyClient(ClosedOnExit):
    """Common part: a name, and a REQ socket to the proxy."""

    def __init__(self, address: str, name: str, timeout: float) -> None:
        check_name(name)
        Deadline(timeout)  # it checks the number; this object is not used
        self.name = name
        self._timeout_s = timeout
        self._lock = threading.Lock()
        self._req_socket = ReqSocket(address)

    def close(self) -> None:
        """Close the client. A call that waits in another thread raises ClientClosed."""
        self._req_socket.end_wait()
        with self._lock:
            self._req_socket.close()

    def _locked(self, deadline: Deadline) -> locked:
        """Return a block in which no other call runs. Raises QuackTimeout."""
        return locked(self._lock, f"another call of {self.name} to end", deadline)

    def _exchange(
        self, request: Request, deadline: Deadline, retry_s: float | None = None
    ) -> Welcome | tuple[str, ...] | int | None:
        """Send a request and return the reply. With `retry_s`, repeat the request at that interval
        until there is a reply. Raises QuackTimeout.
        """
        check_topic_name(request.topic)
        frame = encode_request(request)
        while True:
            remaining_s = deadline.remaining_s()
            wait_s = remaining_s if retry_s is None else min(remaining_s, retry_s)
            reply = self._req_socket.request(frame, wait_s)
            if reply is not None:
                return read_reply(request, reply)
            if deadline.has_passed():
                raise self._timeout_error(request, deadline)

    def _timeout_error(self, request: Request, deadline: Deadline) -> QuackTimeout:
        """Return the error for a missing reply. For a message, it says how to publish it again."""
        verb = encode_request(request).split(b" ", 1)[0].decode()
        text = f"{verb} {request.topic}: waited {deadline.duration_text()} for the proxy at "
        text += f"{self._req_socket.address}, for {self.name}"
        if isinstance(request, Publish):
            text += f"; its outcome is unknown: publish it again with number={request.number}"
        return QuackTimeout(text)


class ReliableSubscriber(_ProxyClient):
    def __init__(
        self,
        address: str,
        name: str,
        *,
        directory: str | os.PathLike[str] | None = None,
        listen: str | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """`address` is HOST:PORT of the proxy. The proxy sends missed messages to a REP socket
        of this client: at `listen`, HOST:PORT, or by default at a free port of the local address
        that routes to the proxy. `timeout` is in seconds, for every call."""
        super().__init__(address, name, timeout)
        #: Serialises `get` calls. `subscribe` does not need it, so a waiting `get` does not block
        #: `subscribe`.
        self._get_lock = threading.Lock()
        self._last_returned: ProxyMessage | None = None
        self._acknowledges_at_get = directory is not None
        self._receiver = Receiver(self._req_socket.address, name, directory, listen)

    def close(self) -> None:
        """Close the client; waiting calls end. Unacknowledged messages go to the next client of
        this name."""
        self._receiver.close()
        super().close()

    def subscribe(self, topic: str) -> bool:
        """Subscribe to messages published from now on, until `unsubscribe`. Return True if the
        subscription is new. A subscribed client also has to call this, once for every object, to
        tell the broker its address. Raises NotAllowed or Unreachable.

            subscriber.subscribe("ducks")
        """
        deadline = Deadline(self._timeout_s)
        with self._locked(deadline), self._receiver.expecting(topic):
            welcome = self._hello(topic, deadline)
            self._receiver.subscribe(topic, welcome.xpub_port)
            return welcome.is_new

    def unsubscribe(self, topic: str) -> None:
        """End the subscription; unread messages are dropped. Raises UnknownSubscription.

        subscriber.unsubscribe("ducks")
        """
        deadline = Deadline(self._timeout_s)
        with self._locked(deadline):
            self._exchange(Goodbye(self.name, topic), deadline)
            self._receiver.unsubscribe(topic)

    def _hello(self, topic: str, deadline: Deadline) -> Welcome:
        """Subscribe at the proxy and return its reply. Try again until the deadline if the proxy
        cannot connect to this client. Raises Unreachable or QuackTimeout."""
        hello = Hello(self.name, topic, self._receiver.address)
        while True:
            try:
                welcome = self._exchange(hello, deadline, _HELLO_RETRY_S)
                assert isinstance(welcome, Welcome), "the codec returns Welcome for Hello"
                return welcome
            except Unreachable:
                # This client does listen at its address, so the failure may be temporary.
                if deadline.remaining_s() <= _RETRY_S:
                    raise
                time.sleep(_PAUSE_S)

    def get(self, *, timeout: float | None = None, hold: bool = False) -> ProxyMessage:
        """Return the next message of any subscribed topic; wait for it. Raises QuackTimeout.

        message = subscriber.get(timeout=60)
        """
        deadline = Deadline(self._timeout_s if timeout is None else timeout)
        with locked(self._get_lock, f"another get of {self.name} to end", deadline):
            # Without a directory, this call acknowledges the message of the last call.
            if self._last_returned is not None:
                self._receiver.done(self._last_returned)
                self._last_returned = None
            message = self._receiver.get(deadline)
            if hold:
                return message
            if self._acknowledges_at_get:
                try:
                    self._receiver.done(message)
                except BaseException:
                    # Its id may not be on disk, so the program must get it again.
                    self._receiver.put_back(message)
                    raise
            else:
                self._last_returned = message
            return message

    def done(self, message: ProxyMessage) -> None:
        """Acknowledge a message from `get(hold=True)`; with a directory, its id is on disk when
        this returns.

        subscriber.done(message)
        """
        self._receiver.done(message)

    def flush(self, *, timeout: float | None = None) -> None:
        """Wait until the broker has all acknowledgements. Messages whose acknowledgements it does
        not have when the process ends are delivered again. Raises QuackTimeout.

            subscriber.flush()
        """
        self._receiver.flush(Deadline(self._timeout_s if timeout is None else timeout))


class ReliablePublisher(_ProxyClient):
    def __init__(self, address: str, name: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """`address` is HOST:PORT of the proxy. The broker stores the last number under `name`."""
        super().__init__(address, name, timeout)
        #: The next number by topic.
        self._next: dict[str, int] = {}

    def publish(self, topic: str, content: bytes | str, *, number: int | None = None) -> int:
        """Publish a message and return its number. With an explicit number, you can repeat a
        message, even after a crash, and the broker stores it once; numbers must grow. After a
        QuackTimeout the outcome is unknown.

            publisher.publish("ducks", "quack")
            publisher.publish("ducks", "quack", number=7)
        """
        if number is not None:
            offset_for_number(number)  # raises InvalidRequest for an invalid number
        try:
            body = content.encode() if isinstance(content, str) else content
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"a text must be encodable as UTF-8: {error}") from None
        deadline = Deadline(self._timeout_s)
        with self._locked(deadline):
            if number is None:
                number = self._next_number(topic, deadline)
            # Whatever the outcome, the number is not used for another message.
            self._next[topic] = max(number + 1, self._next.get(topic, 0))
            self._exchange(Publish(self.name, topic, number, body), deadline, _RETRY_S)
            return number

    def last_number(self, topic: str) -> int | None:
        """Return the number of this publisher's last message at the broker; None before the first.

        publisher.last_number("ducks")
        """
        deadline = Deadline(self._timeout_s)
        with self._locked(deadline):
            return self._last_number(topic, deadline)

    def _next_number(self, topic: str, deadline: Deadline) -> int:
        """Return the next number for a topic. Ask the proxy for the last one if this object has
        published nothing to the topic."""
        if topic not in self._next:
            last = self._last_number(topic, deadline)
            self._next[topic] = 0 if last is None else last + 1
        return self._next[topic]

    def _last_number(self, topic: str, deadline: Deadline) -> int | None:
        last = self._exchange(LastPublished(self.name, topic), deadline, _RETRY_S)
        assert last is None or isinstance(last, int), "the codec returns a number or None"
        return last
