"""A faulty client of the reliable XPUB/XSUB proxy, on raw sockets: `hello`, `goodbye`, messages
over SUB and `data` requests to its own callback address, which it answers once, twice or not at
all.

It publishes numbered messages to the proxy's REP socket, which recognises repeats. The callback
address is a ROUTER socket, because a REP socket cannot leave a request unanswered. When the client
dies, all its sockets are closed; after that it announces a new address.
"""

from __future__ import annotations

import socket
import time

import zmq

from quackmq.cli.broker.address import Address, parse_address
from quackmq.cli.chaos.runner import PendingMessage
from quackmq.cli.chaos.zmq import ANSWER_S, RequestSocket
from quackmq.errors import InvalidRequest, ProtocolError
from quackmq.protocols.zmq.codec.proxy_language import (
    Data,
    Goodbye,
    Hello,
    LastPublished,
    Publish,
    Received,
    Request,
    Welcome,
    client_subscription,
    encode_data_received,
    encode_request,
    ids_subscription,
    parse_data,
    read_reply,
)


class BadProxyClient:
    """A `runner.FaultyClient` for the reliable proxy."""

    def __init__(self, address: str, name: str) -> None:
        try:
            self._address = parse_address(address.removeprefix("tcp://"))
        except ValueError as error:
            raise InvalidRequest(f"{address!r} {error}") from None
        self._name = name
        self._context = zmq.Context()
        self._proxy = RequestSocket(self._context, f"tcp://{self._address}")
        self._topics: dict[str, None] = {}
        #: The next message number by topic; a missing one is requested from the proxy.
        self._numbers: dict[str, int] = {}
        self._sockets: _Sockets | None = None

    def put(self, topic: str, content: bytes, *, times: int, waits: bool) -> int:
        """Publish a numbered message `times` times. Without `waits`, disconnect instead of
        receiving the replies. Return how many messages were acknowledged: 1, because the proxy
        recognises the repeats, or 0."""
        if topic not in self._numbers:
            last = self._request(LastPublished(self._name, topic))
            self._numbers[topic] = 0 if last is None else int(str(last)) + 1
        publish = Publish(self._name, topic, self._numbers[topic], content)
        self._numbers[topic] += 1
        for _ in range(times):
            self._proxy.send(encode_request(publish))
        if not waits:
            self._proxy.disconnect(flushes=True)
            return 0
        for _ in range(times):
            self._receive_reply(publish)
        return 1

    def receive(self, topic: str, wait_s: float) -> PendingMessage | None:
        if not self._topics:
            return None
        return self._open_sockets().receive(wait_s)

    def acknowledge(self, message: PendingMessage, times: int) -> PendingMessage | None:
        """Acknowledge a message `times` times."""
        if self._sockets is None or times == 0:
            return None
        # The reply acknowledges a message that came to the callback address. All other
        # acknowledgements are requests.
        if self._sockets.send_reply(message.id):
            times -= 1
        for _ in range(times):
            self._request(Received(self._name, message.topic, (message.id,)))
        return None

    def subscribe(self, topic: str) -> None:
        """Subscribe to a topic; open the sockets if this is the first subscription."""
        self._topics[topic] = None
        if self._sockets is not None:
            self._introduce(self._sockets, topic)
        else:
            self._open_sockets()

    def unsubscribe(self, topic: str) -> None:
        self._topics.pop(topic, None)
        if self._sockets is not None:
            self._sockets.unsubscribe(topic)
        self._request(Goodbye(self._name, topic))

    def die(self) -> None:
        self._proxy.disconnect()
        sockets, self._sockets = self._sockets, None
        if sockets is not None:
            sockets.close()

    def close(self, *, keeps_subscriptions: bool) -> None:
        """End the subscriptions unless they are kept; close all sockets."""
        try:
            for topic in [] if keeps_subscriptions else list(self._topics):
                self.unsubscribe(topic)
        finally:
            self.die()
            self._context.term()

    def _open_sockets(self) -> _Sockets:
        """Return the sockets that receive messages. Open them, and introduce them to the proxy
        for each topic, if there are none."""
        if self._sockets is None:
            sockets = _Sockets(self._context, self._name, _find_own_host(self._address))
            try:
                for topic in self._topics:
                    self._introduce(sockets, topic)
            except BaseException:
                sockets.close()
                raise
            self._sockets = sockets
        return self._sockets

    def _introduce(self, sockets: _Sockets, topic: str) -> None:
        welcome = self._request(Hello(self._name, topic, sockets.address))
        assert isinstance(welcome, Welcome), "the codec returns Welcome for Hello"
        sockets.subscribe(topic, Address(self._address.host, welcome.xpub_port))

    def _request(self, request: Request) -> Welcome | tuple[str, ...] | int | None:
        self._proxy.send(encode_request(request))
        return self._receive_reply(request)

    def _receive_reply(self, request: Request) -> Welcome | tuple[str, ...] | int | None:
        """Return the parsed reply to a request. Ignore replies to earlier requests. Raise
        QuackTimeout if there is none in time."""
        until_s = time.monotonic() + ANSWER_S
        while True:
            frame = self._proxy.receive_reply(until_s)
            try:
                return read_reply(request, frame)
            except ProtocolError:
                continue  # an answer to an earlier request


class _Sockets:
    """The sockets from one connect to the next disconnect."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], name: str, host: str) -> None:
        self._sub = context.socket(zmq.SUB)
        self._sub.subscribe(client_subscription(name))
        self._xpub: Address | None = None
        self._callback = context.socket(zmq.ROUTER)
        self._callback.bind(f"tcp://{Address(host, 0)}")
        self.address = self._callback.getsockopt_string(zmq.LAST_ENDPOINT)
        #: Unanswered `data` requests by message id, each with its envelope.
        self._unanswered: dict[str, tuple[list[bytes], Data]] = {}

    def subscribe(self, topic: str, xpub: Address) -> None:
        """Subscribe to a topic at the XPUB socket. If the proxy has none (port 0), all messages
        come to the callback address."""
        self._sub.subscribe(ids_subscription(topic))
        if self._xpub is None and xpub.port:
            self._xpub = xpub
            self._sub.connect(f"tcp://{xpub}")

    def unsubscribe(self, topic: str) -> None:
        self._sub.unsubscribe(ids_subscription(topic))

    def receive(self, wait_s: float) -> PendingMessage | None:
        """Return the next message from the callback address or from the SUB socket; None if
        there is none within `wait_s`."""
        poller = zmq.Poller()
        poller.register(self._callback, zmq.POLLIN)
        poller.register(self._sub, zmq.POLLIN)
        ready = dict(poller.poll(round(wait_s * 1000)))
        if self._callback in ready:
            *envelope, frame = self._callback.recv_multipart()
            data = parse_data(frame)
            # A repeated request means that the earlier one was not answered: keep only the last.
            self._unanswered[data.id] = envelope, data
            return PendingMessage(data.topic, data.id, data.content)
        if self._sub in ready:
            first, body, message_id = self._sub.recv_multipart()
            return PendingMessage(first.decode().partition(" ")[2], message_id.decode(), body)
        return None

    def send_reply(self, message_id: str) -> bool:
        """Acknowledge a message that came to the callback address; return False if it did not
        come there."""
        request = self._unanswered.pop(message_id, None)
        if request is None:
            return False
        envelope, data = request
        self._callback.send_multipart([*envelope, encode_data_received(data)])
        return True

    def close(self) -> None:
        self._sub.close(0)
        self._callback.close(0)


def _find_own_host(proxy: Address) -> str:
    """Return this machine's address on the route to the proxy. Connecting a UDP socket sends
    nothing."""
    addresses = socket.getaddrinfo(*proxy, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, socket_address = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(socket_address)
        return str(probe.getsockname()[0])
