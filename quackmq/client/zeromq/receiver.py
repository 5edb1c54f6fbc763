"""The receiving half of a reliable subscriber: a thread with its sockets and unfinished messages.

The thread has a SUB socket for messages to all subscribers, a REP socket for messages that the
proxy sends again, and a REQ socket for acknowledgements, which are sent in batches. A message is
new, in hand (buffered, or returned by `get` and not finished), or done:

    arrives by new                  in hand      done
    SUB        in hand              dropped      dropped, acknowledged again
    REP        in hand, `not_yet`   `not_yet`    `ack_received`

If there is no room for another message in hand, a new one is dropped; the proxy sends it again.

Any thread may call the public methods.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import zmq

from quackmq import limits as shared_limits
from quackmq.client import limits
from quackmq.client.deadline import Deadline
from quackmq.client.zeromq.received_offsets import ProcessedOffsets
from quackmq.errors import ClientClosed, InvalidRequest, QuackError
from quackmq.model.subscription import parse_message_id
from quackmq.protocols.zmq.codec.proxy_language import (
    Data,
    Received,
    client_subscription,
    encode_data_received,
    encode_not_yet,
    encode_request,
    ids_subscription,
    parse_data,
    parse_ids_subscription,
    read_reply,
)
from quackmq.protocols.zmq.codec.words import encode_error

log = logging.getLogger(__name__)

#: Repeat an acknowledgement after this time without a reply.
_RETRY_S: Final = 3.0
#: How long `close` may take to send the last acknowledgements.
_FAREWELL_S: Final = 1.0
#: How long a closing socket may take to send its last reply.
_LINGER_MS: Final = 200
_WAKE: Final = b"!"


class ProxyMessage(NamedTuple):
    """A message. A repeated message has the same id."""

    id: str
    topic: str
    content: bytes
    partition: int
    offset: int

    @property
    def text(self) -> str:
        """The content decoded as UTF-8. Raises UnicodeDecodeError for other bytes."""
        return self.content.decode()


class Receiver:
    def __init__(
        self,
        proxy: str,
        name: str,
        directory: str | os.PathLike[str] | None,
        listen: str | None,
    ) -> None:
        self._proxy = proxy
        self._name = name
        self._processed = ProcessedOffsets(directory, name)
        #: Guards the fields below; notified of each message.
        self._changed = threading.Condition()
        self._inbox: deque[ProxyMessage] = deque()
        self._in_hand: dict[str, None] = {}
        self._in_hand_bytes = 0
        #: Subscribed topics; messages of other topics are dropped.
        self._topics: set[str] = set()
        #: The ids to acknowledge, by topic.
        self._acks: dict[str, dict[str, None]] = {}
        #: Requests to the thread: (subscribe or unsubscribe, topic, port of the XPUB socket).
        self._commands: deque[tuple[bool, str, int]] = deque()
        self._is_closing = False
        self._failure: BaseException | None = None
        self._context = zmq.Context()
        try:
            self._sockets = _Sockets(self._context, proxy, listen)
        except BaseException:
            self._context.destroy(linger=0)
            self._processed.close()
            raise
        self.address = self._sockets.address
        self._thread = threading.Thread(target=self._run, name=f"proxy of {name}", daemon=True)
        self._thread.start()

    # --- for any thread ----------------------------------------------------------------

    @contextmanager
    def expecting(self, topic: str) -> Iterator[None]:
        """Accept messages of a topic while the subscription is requested: missed messages may
        arrive before the answer."""
        with self._changed:
            was_subscribed = topic in self._topics
            self._topics.add(topic)
        try:
            yield
        except BaseException:
            if not was_subscribed:
                with self._changed:
                    self._forget(topic)
            raise

    def subscribe(self, topic: str, port: int) -> None:
        """Subscribe at the XPUB socket with this port."""
        with self._changed:
            self._check()
            self._commands.append((True, topic, port))
            self._sockets.wake()

    def unsubscribe(self, topic: str) -> None:
        """Drop the topic's buffered messages, and unsubscribe at the XPUB socket. Raises
        ClientClosed."""
        with self._changed:
            self._check()
            self._forget(topic)
            self._commands.append((False, topic, 0))
            self._sockets.wake()

    def get(self, deadline: Deadline) -> ProxyMessage:
        """Return the next message; wait for it. It stays in hand until `done`. Raises QuackTimeout
        or ClientClosed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._inbox or self._is_closing or self._failure is not None,
                min(deadline.remaining_s(), threading.TIMEOUT_MAX),
            )
            self._check()
            if not self._inbox:
                raise deadline.timeout_error(f"a message for {self._name}, from {self._proxy}")
            return self._inbox.popleft()

    def put_back(self, message: ProxyMessage) -> None:
        """Let the next `get` return this message again, unless it is done."""
        with self._changed:
            if message.id not in self._in_hand:
                return
            if message.topic in self._topics:
                self._inbox.appendleft(message)
                self._changed.notify_all()
            else:
                self._release(message)

    def done(self, message: ProxyMessage) -> None:
        """Mark a message as done, then acknowledge it. Raises ClientClosed or UnusableDirectory,
        and then the message is not done."""
        topic_id, position = parse_message_id(message.id)
        with self._changed:
            self._check()
        self._processed.add(topic_id, position)
        with self._changed:
            if message.id in self._in_hand:
                self._release(message)
            self._acks.setdefault(message.topic, {})[message.id] = None
            if not self._is_closing:
                self._sockets.wake()

    def flush(self, deadline: Deadline) -> None:
        """Wait until the broker has all acknowledgements. Raises QuackTimeout."""
        with self._changed:
            is_flushed = self._changed.wait_for(
                lambda: not self._acks or self._is_closing or self._failure is not None,
                min(deadline.remaining_s(), threading.TIMEOUT_MAX),
            )
            self._check()
            if not is_flushed:
                raise deadline.timeout_error(
                    f"{self._proxy} to receive the acknowledgements of {self._name}"
                )

    def close(self) -> None:
        """Close the sockets, after at most a second for the last acknowledgements. Waiting calls
        raise ClientClosed."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._sockets.wake()
            self._changed.notify_all()
        self._thread.join()
        self._context.destroy(linger=0)
        self._processed.close()

    def _check(self) -> None:
        """Raise QuackError if the thread has failed, or ClientClosed after `close`."""
        if self._failure is not None:
            raise QuackError(f"the subscriber {self._name} failed: {self._failure}")
        if self._is_closing:
            raise ClientClosed("the client is closed")

    def _forget(self, topic: str) -> None:
        """Drop everything about a topic except messages that `get` has returned. The caller holds
        the lock."""
        self._topics.discard(topic)
        self._acks.pop(topic, None)
        for message in [each for each in self._inbox if each.topic == topic]:
            self._inbox.remove(message)
            self._release(message)

    def _release(self, message: ProxyMessage) -> None:
        """Count a message as no longer in hand. The caller holds the lock."""
        del self._in_hand[message.id]
        self._in_hand_bytes -= len(message.content)

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        """Handle events until `close`, then send the remaining acknowledgements. The body of the
        thread."""
        try:
            while not self._is_closing:
                self._run_once(None)
            deadline = time.monotonic() + _FAREWELL_S
            while (self._acks or self._sockets.unanswered) and time.monotonic() < deadline:
                self._run_once(deadline)
        except BaseException as error:
            # No caller sees an error of this thread: store it, and let waiting calls raise it.
            log.exception("the subscriber %s failed", self._name)
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            self._sockets.close()

    def _run_once(self, deadline: float | None) -> None:
        """Wait for the next event and handle it."""
        self._run_commands()
        self._acknowledge()
        sockets = self._sockets
        for ready in sockets.poll(deadline):
            if ready is sockets.control:
                ready.recv()  # it only wakes this thread; the next turn does the work
            elif ready is sockets.rep:
                ready.send(self._reply(ready.recv_multipart()))
            elif ready is sockets.sub:
                self._on_message(ready.recv_multipart())
            else:
                self._on_acknowledged(ready.recv_multipart())

    def _run_commands(self) -> None:
        """Subscribe and unsubscribe as other threads have requested: only this thread may use the
        sockets."""
        with self._changed:
            commands, self._commands = self._commands, deque()
        for is_subscribe, topic, port in commands:
            if is_subscribe:
                self._sockets.subscribe(self._name, topic, port)
            else:
                self._sockets.sub.unsubscribe(ids_subscription(topic))

    def _on_message(self, frames: list[bytes]) -> None:
        """Buffer a message from the SUB socket: topic, content, id. Ignore messages of another
        form."""
        if len(frames) != 3:
            return
        first, body, token = frames
        try:
            topic = parse_ids_subscription(first)
            if topic is not None:
                self._accept(topic, token.decode("ascii", "replace"), body)
        except QuackError as error:
            log.warning("%s ignores an invalid message from %s: %s", self._name, self._proxy, error)

    def _reply(self, frames: list[bytes]) -> bytes:
        """Return the reply to a message that was sent to the REP socket."""
        try:
            data = parse_data(frames[-1])
            if data.client != self._name:
                raise InvalidRequest(f"this subscriber is {self._name}, not {data.client}")
            return self._reply_to_data(data)
        except QuackError as error:
            return encode_error(error.code, str(error))

    def _reply_to_data(self, data: Data) -> bytes:
        if self._accept(data.topic, data.id, data.content):
            return encode_data_received(data)
        return encode_not_yet(data)

    def _accept(self, topic: str, token: str, content: bytes) -> bool:
        """Return whether a message is done. A new one is buffered if there is room."""
        topic_id, position = parse_message_id(token)
        with self._changed:
            # In this order: a message is marked as done before it leaves `_in_hand`.
            if token in self._in_hand:
                return False
            # The acknowledgement did not reach the proxy, or it would not send the message again.
            if self._processed.has(topic_id, position):
                self._acks.setdefault(topic, {})[token] = None
                return True
            if topic in self._topics and self._has_room(len(content)):
                message = ProxyMessage(token, topic, content, *position)
                self._in_hand[token] = None
                self._in_hand_bytes += len(content)
                self._inbox.append(message)
                self._changed.notify_all()
            return False

    def _has_room(self, size: int) -> bool:
        """Return whether another message of this size may be in hand. A single message always may,
        even if it exceeds the bound; otherwise it could never be received."""
        if not self._in_hand:
            return True
        return (
            len(self._in_hand) < limits.CLIENT_PROXY_MESSAGES
            and self._in_hand_bytes + size <= limits.CLIENT_PROXY_BYTES
        )

    def _acknowledge(self) -> None:
        """Send acknowledgements, unless the reply to an earlier request is missing."""
        if not self._sockets.can_send():
            return
        with self._changed:
            if not self._acks:
                return
            topic, ids = next(iter(self._acks.items()))
            first_ids = tuple(ids)[: shared_limits.PROXY_IDS]
        self._sockets.send_request(Received(self._name, topic, first_ids))

    def _on_acknowledged(self, frames: list[bytes]) -> None:
        """Remove the ids from the pending acknowledgements, whatever the proxy answered. The marks
        in the answer say before which offsets all messages are acknowledged."""
        request = self._sockets.take_answered()
        if request is None:
            return
        try:
            tokens = read_reply(request, frames[-1])
            assert isinstance(tokens, tuple), "the codec returns a tuple for Received"
            marks = [parse_message_id(str(token)) for token in tokens]
        except QuackError as error:
            # The proxy sends these messages again, and then this client acknowledges them again.
            log.debug("acknowledgements of %s: %s", request.topic, error)
            marks = []
        with self._changed:
            # `unsubscribe` may have removed the topic since the request was sent.
            ids = self._acks.get(request.topic, {})
            for token in request.ids:
                ids.pop(token, None)
            if not ids:
                self._acks.pop(request.topic, None)
            self._changed.notify_all()
        for topic_id, position in marks:
            self._processed.add_before(topic_id, position)


class _Sockets:
    """The sockets. Only the receiving thread uses them, except `wake`, which any thread calls
    while it holds the lock."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], proxy: str, listen: str | None):
        self._context = context
        self._proxy = proxy
        self._waker = context.socket(zmq.PAIR)
        self._waker.bind("inproc://wake")
        self.control = context.socket(zmq.PAIR)
        self.control.connect("inproc://wake")
        self.rep = context.socket(zmq.REP)
        self.address = _bind(self.rep, proxy, listen)
        self.sub = context.socket(zmq.SUB)
        self.sub.ipv6 = True
        self._xpub = ""
        self._req: zmq.Socket[bytes] | None = None
        self.unanswered: Received | None = None
        self._sent_at = 0.0
        self._poller = zmq.Poller()
        for each in (self.control, self.rep, self.sub):
            self._poller.register(each, zmq.POLLIN)

    def wake(self) -> None:
        """Wake the receiving thread. The caller holds the receiver's lock."""
        try:
            self._waker.send(_WAKE, zmq.NOBLOCK)
        except zmq.Again:
            return  # enough wake-ups are queued

    def poll(self, deadline: float | None) -> list[zmq.Socket[bytes]]:
        """Return the sockets that have input."""
        ends = [] if deadline is None else [deadline]
        if self.unanswered is not None:
            ends.append(self._sent_at + _RETRY_S)
        wait_ms = None
        if ends:
            # `int` rounds down; + 1 avoids waking just before the time and polling in a tight loop.
            wait_ms = max(0, int((min(ends) - time.monotonic()) * 1000) + 1)
        return [ready for ready, _ in self._poller.poll(wait_ms)]

    def subscribe(self, name: str, topic: str, port: int) -> None:
        """Subscribe at the XPUB socket, whose port may have changed."""
        address = f"{self._proxy.rpartition(':')[0]}:{port}"
        if port and address != self._xpub:
            if self._xpub:
                self.sub.disconnect(self._xpub)
            else:
                # This subscription tells the proxy the name of the client. Later connections repeat
                # it.
                self.sub.subscribe(client_subscription(name))
            self.sub.connect(address)
            self._xpub = address
        self.sub.subscribe(ids_subscription(topic))

    def can_send(self) -> bool:
        """Return whether no request waits for its reply. After `_RETRY_S`, stop waiting and close
        the REQ socket, because it cannot send again without its reply."""
        if self.unanswered is not None and time.monotonic() - self._sent_at >= _RETRY_S:
            self._close_req()
        return self.unanswered is None

    def send_request(self, request: Received) -> None:
        """Send a request on the REQ socket; open the socket if necessary."""
        if self._req is None:
            self._req = self._context.socket(zmq.REQ)
            self._req.linger = 0
            self._req.ipv6 = True
            self._req.connect(self._proxy)
            self._poller.register(self._req, zmq.POLLIN)
        self.unanswered, self._sent_at = request, time.monotonic()
        self._req.send(encode_request(request))

    def take_answered(self) -> Received | None:
        """Return the request that was just answered; None if it was given up before."""
        request, self.unanswered = self.unanswered, None
        return request

    def close(self) -> None:
        self._close_req()
        for each in (self.control, self.rep, self.sub):
            each.close(linger=_LINGER_MS)

    def _close_req(self) -> None:
        """Close the REQ socket and forget its request. The next request opens another socket."""
        self.unanswered = None
        if self._req is not None:
            self._poller.unregister(self._req)
            self._req.close()
            self._req = None


def _bind(missed: zmq.Socket[bytes], proxy: str, listen: str | None) -> str:
    """Bind the socket; return its address as seen from the proxy. Raises InvalidRequest."""
    try:
        if listen is None:
            host = _own_host(proxy)
            missed.ipv6 = ":" in host
            shown = f"[{host}]" if missed.ipv6 else host
            return f"tcp://{shown}:{missed.bind_to_random_port(f'tcp://{shown}')}"
        missed.ipv6 = "[" in listen
        missed.bind(f"tcp://{listen}")
        bound, _, chosen = str(missed.getsockopt_string(zmq.LAST_ENDPOINT)).rpartition(":")
        # A wildcard is no address to connect to. The star lets the proxy use the address that it
        # sees.
        is_any = bound.removeprefix("tcp://") in ("0.0.0.0", "[::]", "*")
        return f"tcp://*:{chosen}" if is_any else f"{bound}:{chosen}"
    except (zmq.ZMQError, zmq.ZMQBindError, OSError, UnicodeError) as error:
        raise InvalidRequest(f"cannot listen on {listen or 'a free port'}: {error}") from error


def _own_host(proxy: str) -> str:
    """Return the local address that routes to the proxy; nothing is sent. Raises InvalidRequest."""
    host, _, port = proxy.removeprefix("tcp://").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= 65_535:
        raise InvalidRequest(f"{proxy} is not the address of a proxy: write HOST:PORT")
    addresses = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
