"""A network that loses answers: a relay whose connections are slow, are cut, and say things twice.

What can happen to a piece of a stream, drawn for each:

    requests    late · cut before it, or in its midst · doubled
    answers     late · lost and the connection cut · torn · lost, and nothing more comes, until the
                connection is cut after a while

Bytes of one connection are never doubled in place, since TCP does not do that. Doubled is what a
client or something on the way would ask again: on a connection of its own, perhaps late, the broker
hears once more what it has been asked already, and nobody listens to the answer. What that is
depends on the protocol: over HTTP the last request; over ZeroMQ all that the client said since it
connected, greeting included; over Kafka's protocol the last request if it is a Produce. (Of the
others InitProducerId would fence the client itself, and offsets of a transaction carry no number.)
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from tests.interop.proxy import Link, Proxy

#: Finds, in all that a client has said on a connection, what is to be said again.
Again = Callable[[bytes], bytes]

#: Of so many bytes a connection's requests are remembered; a longer one is not doubled.
REMEMBERED_BYTES: Final = 256 * 1024
LATE_S: Final = 0.02
DOUBLED_LATE_S: Final = 0.2
#: Longer than who asks waits for an answer. There are some who would wait for minutes.
SILENCE_S: Final = 2.5
#: How long a doubled request's connection stays open.
DOUBLED_OPEN_S: Final = 0.2

REQUEST_FAULTS: Final[Mapping[str, float]] = {
    "requests late": 0.01,
    "requests cut off": 0.004,
    "requests torn": 0.003,
    "requests doubled": 0.03,
}
ANSWER_FAULTS: Final[Mapping[str, float]] = {
    "answers late": 0.01,
    "answers lost": 0.01,
    "answers torn": 0.004,
    "silences": 0.001,
}


class Weather:
    """What happens, from a seed, and how often it did. Calm at first. Any thread may ask."""

    def __init__(self, seed: int) -> None:
        self.faults: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._is_calm = True

    def rise(self) -> None:
        """From now on things happen."""
        self._is_calm = False

    def calm(self) -> None:
        """Nothing happens any more."""
        self._is_calm = True

    def draw(self, faults: Mapping[str, float]) -> str:
        """One of them, or "" for none."""
        with self._lock:
            drawn = self._random.random()
            for fault, share in faults.items():
                drawn -= share
                if drawn < 0 and not self._is_calm:
                    self.faults[fault] += 1
                    return fault
        return ""

    def some(self, most: float) -> float:
        with self._lock:
            return self._random.uniform(0, most)


class UnreliableProxy(Proxy):
    def __init__(self, broker_address: str, weather: Weather, again: Again) -> None:
        self._weather = weather
        self._again = again
        super().__init__(broker_address)

    def _join(self, client: socket.socket, broker: socket.socket) -> Link:
        assert self._broker is not None
        return _UnreliableLink(client, broker, self._broker, self._weather, self._again)


class _UnreliableLink(Link):
    def __init__(
        self,
        client: socket.socket,
        broker: socket.socket,
        where: tuple[str, int],
        weather: Weather,
        again: Again,
    ) -> None:
        super().__init__(client, broker)
        self._weather = weather
        self._again = again
        self._where = where
        self._said = bytearray()
        self._is_silent = False

    def pass_on(self, data: bytes, target: socket.socket, *, answers: bool) -> None:
        if answers:
            self._pass_answer(data, target)
        else:
            self._pass_request(data, target)

    def _pass_request(self, data: bytes, target: socket.socket) -> None:
        fault = self._weather.draw(REQUEST_FAULTS)
        if len(self._said) <= REMEMBERED_BYTES:
            self._said += data
        if fault == "requests late":
            time.sleep(self._weather.some(LATE_S))
        elif fault == "requests cut off":
            self.cut()
            return
        elif fault == "requests torn":
            target.sendall(data[: len(data) // 2])
            self.cut()
            return
        target.sendall(data)
        if fault == "requests doubled" and len(self._said) <= REMEMBERED_BYTES:
            double = self._again(bytes(self._said))
            if double:
                late_s = self._weather.some(DOUBLED_LATE_S)
                threading.Thread(target=_say_again, args=(self._where, double, late_s)).start()

    def _pass_answer(self, data: bytes, target: socket.socket) -> None:
        fault = self._weather.draw(ANSWER_FAULTS)
        if fault == "silences":
            self._is_silent = True
            threading.Timer(SILENCE_S, self.cut).start()
        if self._is_silent:
            return
        if fault == "answers late":
            time.sleep(self._weather.some(LATE_S))
        elif fault == "answers lost":
            self.cut()
            return
        elif fault == "answers torn":
            target.sendall(data[: len(data) // 2])
            self.cut()
            return
        target.sendall(data)


def _say_again(where: tuple[str, int], said: bytes, late_s: float) -> None:
    time.sleep(late_s)
    with suppress(OSError), socket.create_connection(where, DOUBLED_OPEN_S) as broker:
        broker.sendall(said)
        deadline = time.monotonic() + DOUBLED_OPEN_S
        while (left_s := deadline - time.monotonic()) > 0:
            broker.settimeout(left_s)
            if not broker.recv(64 * 1024):
                return


# --- what can be said again ---------------------------------------------------------------------


def last_http_request(said: bytes) -> bytes:
    """The last whole one."""
    last, rest = b"", said
    while (end := rest.find(b"\r\n\r\n")) >= 0:
        length = end + 4 + _content_length(rest[:end])
        if length > len(rest):
            break
        last, rest = rest[:length], rest[length:]
    return last


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0


def last_produce_request(said: bytes) -> bytes:
    """The last whole request, if it is a Produce: behind its length, API key 0."""
    last, rest = b"", said
    while len(rest) >= 4:
        length = 4 + int.from_bytes(rest[:4])
        if length > len(rest):
            break
        last, rest = rest[:length], rest[length:]
    return last if last[4:6] == b"\0\0" else b""


def everything(said: bytes) -> bytes:
    return said
