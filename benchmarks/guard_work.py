"""The operations that the guard counts, each done once per call, over a socket of its own.

An operation is over when its client has every answer. The broker may have work left then, such as
writing records to a segment: the guard waits until the broker sleeps before it reads its counters.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Final

import zmq

from benchmarks.broker import ask
from benchmarks.push_peers import LinePeer
from benchmarks.requests import kafka_fetch, kafka_put, kafka_put_answer
from benchmarks.streams import WAIT_SECONDS, connect, receive_exactly, receive_frame, receive_until

SMALL: Final = b"x" * 100
LARGE: Final = bytes(range(256)) * 4_000
AT_ONCE: Final = 64

Operation = Callable[[], None]


class Work:
    """Clients of every protocol, connected to one broker. Use as a context manager."""

    def __init__(self, listeners: dict[str, str]) -> None:
        self._listeners = listeners
        self._open = ExitStack()

        #: By name, in the order of the table. Each is a call that connects and returns the
        #: operation. It connects late, because the broker closes connections that are quiet.
        self.operations: dict[str, Callable[[], Operation]] = {
            "produce, one batch of 100 B": partial(self._produce, "small", SMALL),
            f"produce, {AT_ONCE} batches of 100 B at once": partial(
                self._produce, "many", SMALL, AT_ONCE
            ),
            "produce, one batch of 1 MB": partial(self._produce, "large", LARGE),
            "fetch of 100 B": partial(self._fetch, "fetched", SMALL),
            "fetch of 1 MB": partial(self._fetch, "fetched-large", LARGE),
            "HTTP put of 100 B": partial(self._http_put, "put"),
            "ZeroMQ REQ/REP put of 100 B": partial(self._zmq_put, "asked"),
            "line entry of 100 B, pushed to one subscriber": partial(self._push, "pushed"),
        }

    def __enter__(self) -> Work:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def _produce(self, topic: str, value: bytes, count: int = 1) -> Operation:
        ask(f"http://{self._listeners['http']}/v1/topics", {"name": topic, "partitions": 1})
        stream, request = self._connect("kafka"), kafka_put(topic, value) * count
        expected = kafka_put_answer(topic)

        def produce() -> None:
            stream.sendall(request)
            for _ in range(count):
                answer = receive_frame(stream)
                assert answer.startswith(expected), f"a produce was refused: {answer!r}"

        return produce

    def _fetch(self, topic: str, value: bytes) -> Operation:
        self._produce(topic, value)()
        stream, request = self._connect("kafka"), kafka_fetch({topic: 0}, len(value) + 1_000)

        def fetch() -> None:
            stream.sendall(request)
            answer = receive_frame(stream)
            assert len(answer) > len(value), f"a fetch brought nothing: {answer!r}"

        return fetch

    def _http_put(self, topic: str) -> Operation:
        stream, address = self._connect("http"), self._listeners["http"]
        body = json.dumps({"value": SMALL.decode()}).encode()
        head = (
            f"POST /v1/topics/{topic}/messages HTTP/1.1\r\nHost: {address}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        request = head.encode() + body

        def put() -> None:
            stream.sendall(request)
            head, body = receive_until(stream, b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 20"), f"a put was refused: {head!r}"
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            receive_exactly(stream, length - len(body))

        return put

    def _zmq_put(self, topic: str) -> Operation:
        context = self._open.enter_context(zmq.Context())
        peer = self._open.enter_context(context.socket(zmq.REQ))
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.RCVTIMEO, int(WAIT_SECONDS * 1000))
        peer.connect(f"tcp://{self._listeners['zmq']}")
        request = b"PUT guard %s %s" % (topic.encode(), SMALL)

        def put() -> None:
            peer.send(request)
            answer = peer.recv()
            assert answer.startswith(b"PUT "), f"a put was refused: {answer!r}"

        return put

    def _push(self, topic: str) -> Operation:
        publisher, subscriber = (
            self._open.enter_context(closing(LinePeer(self._listeners["line"], role, role, topic)))
            for role in ("pub", "sub")
        )
        entry = b"topic %s [%s]\n" % (topic.encode(), SMALL)

        def push() -> None:
            publisher.socket.sendall(entry)
            receive_until(publisher.socket, b"\n")
            receive_until(subscriber.socket, b"\n")
            subscriber.socket.sendall(b"successful\n")

        return push

    def _connect(self, listener: str) -> socket.socket:
        return self._open.enter_context(connect(self._listeners[listener]))
