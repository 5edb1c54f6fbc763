"""Blocking sockets that receive whole answers."""

from __future__ import annotations

import socket
from typing import Final

from benchmarks.processes import HOST

#: Everything that is measured takes less, even on a busy machine.
WAIT_SECONDS: Final = 120.0
_RECEIVE_BYTES: Final = 1 << 16
_LENGTH_BYTES: Final = 4


def connect(address: str) -> socket.socket:
    """Return a connection that sends small requests at once."""
    port = int(address.rpartition(":")[2])
    stream = socket.create_connection((HOST, port), WAIT_SECONDS)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


def answer(stream: socket.socket, request: bytes) -> bytes:
    """Send a Kafka request; return the answer without its length."""
    stream.sendall(request)
    return receive_frame(stream)


def receive_frame(stream: socket.socket) -> bytes:
    """Return a Kafka response without its length."""
    return receive_exactly(stream, int.from_bytes(receive_exactly(stream, _LENGTH_BYTES), "big"))


def receive_exactly(stream: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        received += _receive(stream, size - len(received))
    return bytes(received)


def receive_until(stream: socket.socket, end: bytes) -> tuple[bytes, bytes]:
    """Return what came before the first `end`, and what came behind it."""
    received = b""
    while end not in received:
        received += _receive(stream, _RECEIVE_BYTES)
    before, _, behind = received.partition(end)
    return before, behind


def _receive(stream: socket.socket, size: int) -> bytes:
    if not (part := stream.recv(size)):
        raise ConnectionError("the broker closed the connection")
    return part
