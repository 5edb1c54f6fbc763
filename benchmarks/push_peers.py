"""Peers of the push listeners, as cheap as Python allows: many in one process, one thread.

    python -m benchmarks.push_peers ADDRESS TOPIC READERS

is `READERS` line subscribers, reader-0 and so on, that take what comes until they are killed.
"""

from __future__ import annotations

import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import zmq

from benchmarks.processes import HOST
from quackmq.protocols.zmq.codec.proxy_language import (
    Hello,
    Received,
    Welcome,
    client_subscription,
    encode_data_received,
    encode_request,
    ids_subscription,
    parse_data,
    read_reply,
)

_ANSWER: Final = b"successful\n"
_HELLO: Final = b"hello"
_RECEIVE_BYTES: Final = 65_536
#: After so long without a word, nothing is on its way.
_QUIET_SECONDS: Final = 1.0
#: Everything that is measured takes less.
PATIENCE_SECONDS: Final = 120.0


class Late(Exception):
    """What should have come did not."""


class LinePeer:
    """A connection that has said hello, and chosen a topic."""

    def __init__(self, address: str, role: str, name: str, topic: str) -> None:
        host, _, port = address.partition(":")
        self.socket = socket.create_connection((host, int(port)), PATIENCE_SECONDS)
        #: What came behind the last answer.
        self.rest = b""
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for line in (f"{role} {name} connect", "end", f"{role} {name} topic {topic}", "end"):
            self.socket.sendall(line.encode() + b"\n")
            answer, _, self.rest = self.socket.recv(_RECEIVE_BYTES).partition(b"\n")
            assert answer == b"accept", f"{line} was answered with {answer!r}"

    def close(self) -> None:
        self.socket.close()


class LineSwarm:
    """Subscribers that answer at once, and one publisher."""

    def __init__(self, address: str, topic: str, subscribers: int, prefix: str = "sub") -> None:
        self._publisher = LinePeer(address, "pub", f"{prefix}-publisher", topic)
        self._peers = [
            LinePeer(address, "sub", f"{prefix}-{number}", topic) for number in range(subscribers)
        ]
        self._line = f"topic {topic} [{'x' * 100}]\n".encode()
        self._selector = selectors.DefaultSelector()
        for peer in (self._publisher, *self._peers):
            peer.socket.setblocking(False)
            is_publisher = peer is self._publisher
            self._selector.register(peer.socket, selectors.EVENT_READ, is_publisher)

    def run(self, entries: int, at_once: int = 1) -> float:
        """Publish so many; return the seconds from the first until the last is answered everywhere.
        The publisher sends `at_once` entries, and then another one after each answer."""
        due = entries * len(self._peers)
        published = received = 0
        sent = min(at_once, entries)
        began = time.perf_counter()
        _send_all(self._publisher.socket, self._line * sent)
        while received < due or published < entries:
            ready = self._selector.select(PATIENCE_SECONDS)
            if not ready:
                raise Late(f"{published} of {entries} published, {received} of {due} received")
            for key, _ in ready:
                peer: socket.socket = key.fileobj  # type: ignore[assignment]
                lines = peer.recv(_RECEIVE_BYTES).count(b"\n")
                if key.data:
                    published += lines
                    more = min(lines, entries - sent)
                    if more:
                        peer.send(self._line * more)
                        sent += more
                else:
                    received += lines
                    peer.send(_ANSWER * lines)
        return time.perf_counter() - began

    def close(self) -> None:
        self._selector.close()
        for peer in (self._publisher, *self._peers):
            peer.close()


def _send_all(peer: socket.socket, data: bytes) -> None:
    """Send through a socket that does not block; what is sent must fit into its buffers."""
    sent = peer.send(data)
    assert sent == len(data), f"{sent} of {len(data)} bytes fit into the buffers"


class SubSwarm:
    """Plain SUB sockets, and a plain PUB that is never far ahead of them."""

    def __init__(self, xsub_address: str, xpub_address: str, topic: str, subscribers: int) -> None:
        self._context = zmq.Context()
        self._topic = topic.encode()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.set_hwm(0)
        self._publisher.connect(f"tcp://{xsub_address}")
        self._poller = zmq.Poller()
        self._peers = []
        for _ in range(subscribers):
            peer = self._context.socket(zmq.SUB)
            peer.set_hwm(0)
            peer.subscribe(self._topic)
            peer.connect(f"tcp://{xpub_address}")
            self._poller.register(peer, zmq.POLLIN)
            self._peers.append(peer)
        self._settle()

    def run(self, entries: int, at_once: int = 50) -> float:
        began = time.perf_counter()
        for start in range(0, entries, at_once):
            count = min(at_once, entries - start)
            for _ in range(count):
                self._publisher.send_multipart([self._topic, b"x" * 100])
            self._receive(count * len(self._peers))
        return time.perf_counter() - began

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _receive(self, due: int) -> None:
        while due > 0:
            ready = self._poller.poll(round(PATIENCE_SECONDS * 1000))
            if not ready:
                raise Late(f"{due} did not come")
            for peer, _ in ready:
                due -= _drain(peer)

    def _settle(self) -> None:
        """Until everybody has heard the publisher: subscribing takes its time."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        silent = set(self._peers)
        while silent:
            if time.monotonic() > deadline:
                raise Late(f"{len(silent)} SUB sockets never heard anything")
            self._publisher.send_multipart([self._topic, _HELLO])
            for peer, _ in self._poller.poll(100):
                _drain(peer)
                silent.discard(peer)


class ProxyClient:
    """A subscriber of the reliable proxy: SUB for what is new, REP for what is sent again, REQ for
    acknowledgements, of which one request is under way at a time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, name: str) -> None:
        self.name = name
        self.sub = context.socket(zmq.SUB)
        self.rep = context.socket(zmq.REP)
        self.req = context.socket(zmq.REQ)
        self.acked: set[str] = set()
        self._address = address
        self._waiting: list[str] = []
        self._asked: Received | None = None

    def subscribe(self, topic: str) -> None:
        port = self.rep.bind_to_random_port(f"tcp://{HOST}")
        self.req.connect(f"tcp://{self._address}")
        hello = Hello(self.name, topic, f"tcp://{HOST}:{port}")
        self.req.send(encode_request(hello))
        welcome = read_reply(hello, self.req.recv())
        assert isinstance(welcome, Welcome), f"hello was answered with {welcome}"
        self.sub.connect(f"tcp://{HOST}:{welcome.xpub_port}")
        self.sub.subscribe(client_subscription(self.name))
        self.sub.subscribe(ids_subscription(topic))

    def heard(self, topic: str) -> None:
        _, _, message_id = self.sub.recv_multipart()
        self._waiting.append(message_id.decode())
        self._ask(topic)

    def heard_again(self) -> None:
        data = parse_data(self.rep.recv())
        self.rep.send(encode_data_received(data))
        self.acked.add(data.id)

    def answered(self, topic: str) -> None:
        assert self._asked is not None, "it has asked"
        read_reply(self._asked, self.req.recv())
        self.acked.update(self._asked.ids)
        self._asked = None
        self._ask(topic)

    def _ask(self, topic: str) -> None:
        if self._asked is None and self._waiting:
            self._asked = Received(self.name, topic, tuple(self._waiting))
            self._waiting = []
            self.req.send(encode_request(self._asked))


class ProxySwarm:
    """Subscribers of the reliable proxy, and one plain PUB."""

    def __init__(self, addresses: Mapping[str, str], topic: str, subscribers: int) -> None:
        """`addresses` are those of the broker's listeners, by name."""
        self._context = zmq.Context()
        self._topic = topic
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.connect(f"tcp://{addresses['xsub']}")
        self._clients = [
            ProxyClient(self._context, addresses["proxy"], f"{topic}-{number}")
            for number in range(subscribers)
        ]
        self._handlers: dict[zmq.Socket[bytes], Callable[[], None]] = {}
        self._poller = zmq.Poller()
        for client in self._clients:
            client.subscribe(topic)
            self._handlers[client.sub] = partial(client.heard, topic)
            self._handlers[client.rep] = client.heard_again
            self._handlers[client.req] = partial(client.answered, topic)
        for each in self._handlers:
            self._poller.register(each, zmq.POLLIN)
        self._settle()

    def run(self, entries: int) -> float:
        """Publish so many; the seconds from the first until all have acknowledged all of them."""
        due = self._acked(min) + entries
        began = time.perf_counter()
        for _ in range(entries):
            self._publisher.send_multipart([self._topic.encode(), b"x" * 100])
        while self._acked(min) < due:
            if not self._handle(PATIENCE_SECONDS):
                raise Late(f"{self._acked(min)} of {due} acknowledged, and nothing comes")
        return time.perf_counter() - began

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _settle(self) -> None:
        """Until the publisher is heard, and all have acknowledged what was: what a PUB socket sends
        before it is connected is lost."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._acked(max):
            if time.monotonic() > deadline:
                raise Late("the publisher was never heard")
            self._publisher.send_multipart([self._topic.encode(), _HELLO])
            self._handle(0.2)
        while self._handle(_QUIET_SECONDS) or self._acked(min) < self._acked(max):
            continue

    def _handle(self, seconds: float) -> bool:
        """Whether anything came."""
        ready = self._poller.poll(round(seconds * 1000))
        for each, _ in ready:
            self._handlers[each]()
        return bool(ready)

    def _acked(self, which: Callable[[Iterable[int]], int]) -> int:
        return which(len(client.acked) for client in self._clients)


def _drain(peer: zmq.Socket[bytes]) -> int:
    """How many entries were there; what came to find out who listens is none."""
    count = 0
    while True:
        try:
            _, body = peer.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return count
        count += body != _HELLO


def read_on(address: str, topic: str, readers: int) -> None:
    """Take whatever comes."""
    selector = selectors.DefaultSelector()
    for number in range(readers):
        peer = LinePeer(address, "sub", f"reader-{number}", topic)
        peer.socket.sendall(_ANSWER * peer.rest.count(b"\n"))
        selector.register(peer.socket, selectors.EVENT_READ, peer)
    print("reading", flush=True)
    while True:
        for key, _ in selector.select():
            peer = key.data
            if lines := peer.socket.recv(_RECEIVE_BYTES).count(b"\n"):
                peer.socket.sendall(_ANSWER * lines)


def middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    read_on(sys.argv[1], sys.argv[2], int(sys.argv[3]))
