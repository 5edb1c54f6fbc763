"""Blocking programs on the simulated network, each in a thread that runs in lock-step (side.py).

A program outlives the broker. It stops only where it waits: it hands the wait to the loop and goes
on with the result. If the broker dies meanwhile, the wait fails as it would on a real machine, and
the program goes on beside the next broker. A program can be killed at each wait and at each
operation on its files (client_files.py).

The client libraries run unchanged on what is patched here: sockets of `http.client`, the clock, and
the REQ socket, which pyzmq implements in C.
"""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from quackmq.client import deadline, queue, zmq
from quackmq.errors import ClientClosed
from tests.protocols.zmq.peers import Raw
from tests.simulation.loop import Clock
from tests.simulation.network import NetworkLoop
from tests.simulation.protocol_clients import LOST
from tests.simulation.side import Side, running

_programs: dict[Side, Program] = {}


class Killed(BaseException):
    """The program dies here. No code of the program catches this for good."""


class Program:
    """One process. `main` is called with it, again and again until it is stopped."""

    def __init__(self, name: str, main: Callable[[Program], None]) -> None:
        self.name = name
        self._main = main
        self._side = Side(self._run)
        #: What the program waits for, and the error of this wait if the broker dies.
        self._wait: tuple[Callable[[], Awaitable[Any]], OSError | None] | None = None
        self._result: Any = None
        self._error: OSError | None = None
        self.is_stopping = False
        self.is_dead = False
        #: The chance that it dies at a wait.
        self.kill_chance = 0.0
        #: Releases what the system releases when a process dies.
        self.on_death: Callable[[], None] = lambda: None
        self.loop: NetworkLoop | None = None
        #: The connections of the present process.
        self.writers: list[asyncio.StreamWriter] = []

    @property
    def has_ended(self) -> bool:
        return self._side.ended

    async def drive(self, loop: NetworkLoop) -> None:
        """Let the program run, until it ends or this task is cancelled with the broker."""
        _programs[self._side] = self
        if self.loop is not loop:
            self.loop = loop
            self.writers.clear()  # they have died with the last broker
        if self._wait is not None:
            self._result, self._error = None, self._wait[1]
            self._wait = None
        while not self._side.resume():
            try:
                self._result = await self._take_wait()()
            except OSError as error:
                self._error = error
            except EOFError:  # asyncio's error for an answer that is cut short
                self._error = ConnectionResetError()
            self._wait = None
        if self._side.error is not None:
            raise self._side.error

    def _take_wait(self) -> Callable[[], Awaitable[Any]]:
        assert self._wait is not None
        return self._wait[0]

    def end(self) -> None:
        """Kill the program for good, so that its thread ends."""
        self.is_stopping = self.is_dead = True
        while self._side.begun and not self._side.ended:
            self._side.resume()

    # --- called in the program's thread -------------------------------------------------------

    def wait(
        self, begin: Callable[[], Awaitable[Any]], if_broker_dies: OSError | None = None
    ) -> Any:
        """Let the loop wait; return the result. Raise OSError, or Killed."""
        assert self.loop is not None
        self.die_perhaps(self.kill_chance)
        self._wait = (begin, if_broker_dies)
        self._side.pause()
        result, error = self._result, self._error
        self._result = self._error = None
        self.die_perhaps(self.kill_chance)
        if error is not None:
            raise error
        return result

    def sleep(self, seconds: float) -> None:
        self.wait(lambda: asyncio.sleep(seconds))

    def die_perhaps(self, chance: float) -> None:
        assert self.loop is not None
        if self.is_dead or self.loop.source.random() < chance:
            self.is_dead = True
            raise Killed

    def _run(self) -> None:
        """Run the program; start it again after its death."""
        while not self.is_stopping:
            try:
                self._main(self)
                self.sleep(0.01)
            except Killed:
                assert self.loop is not None
                self.loop.counts["programs killed"] += 1
                for writer in self.writers:
                    writer.close()  # as the system does
                self.writers.clear()
                self.on_death()
                self.is_dead = False


def running_program() -> Program:
    """Return the program whose thread runs."""
    side = running()
    assert side is not None, "the loop has no blocking calls"
    return _programs[side]


# --- sockets --------------------------------------------------------------------------------------


class BlockingSocket:
    """A socket as `http.client` uses it."""

    def __init__(self, program: Program, address: tuple[str, int], timeout: float) -> None:
        """Connect. Raise OSError."""
        self._program = program
        self._loop = program.loop
        self._timeout_s = timeout
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

        async def connect() -> None:
            async with asyncio.timeout(timeout):
                self._reader, self._writer = await asyncio.open_connection(*address)
                program.writers.append(self._writer)

        program.wait(connect, ConnectionRefusedError("the broker died"))

    def setsockopt(self, *_: object) -> None:
        return

    def settimeout(self, seconds: float) -> None:
        self._timeout_s = seconds

    def sendall(self, data: bytes) -> None:
        self._check_alive()

        async def send() -> None:
            self._writer.write(data)
            async with asyncio.timeout(self._timeout_s):
                await self._writer.drain()

        self._program.wait(send, ConnectionResetError("the broker died"))

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_RawReader(self))

    def receive(self, most_bytes: int) -> bytes:
        self._check_alive()

        async def receive() -> bytes:
            async with asyncio.timeout(self._timeout_s):
                return await self._reader.read(most_bytes)

        data: bytes = self._program.wait(receive, ConnectionResetError("the broker died"))
        return data

    def close(self) -> None:
        if self._loop is self._program.loop:
            self._writer.close()

    def _check_alive(self) -> None:
        if self._loop is not self._program.loop:
            raise ConnectionResetError("the broker died")


class _RawReader(io.RawIOBase):
    def __init__(self, blocking: BlockingSocket) -> None:
        self._socket = blocking

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._socket.receive(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class BlockingReqSocket:
    """Like `ReqSocket`: one request, and one answer or none in time."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._program = running_program()
        self._peer: Raw | None = None
        self._loop: NetworkLoop | None = None
        self._is_closed = False

    def request(self, frame: bytes, wait_s: float) -> bytes | None:
        if self._is_closed:
            raise ClientClosed("the client is closed")
        program = self._program
        try:
            answer: bytes = program.wait(
                lambda: self._exchange(frame, wait_s), ConnectionResetError("the broker died")
            )
        except OSError:
            self.drop()
            return None
        return answer

    def end_wait(self) -> None:
        self._is_closed = True

    def close(self) -> None:
        self._is_closed = True
        self.drop()

    def drop(self) -> None:
        if self._peer is not None and self._loop is self._program.loop:
            self._peer.writer.close()
        self._peer = None

    async def _exchange(self, frame: bytes, wait_s: float) -> bytes:
        """Connect if necessary, for as long as it takes, and exchange. Raise TimeoutError. As with
        libzmq, a request whose connection is lost has no answer."""
        if self._loop is not self._program.loop:
            self._peer = None
        self._loop = self._program.loop
        assert self._loop is not None
        async with asyncio.timeout(wait_s):
            while self._peer is None:
                self._peer = await self._connect()
            try:
                return await self._peer.ask(frame)
            except LOST:
                await asyncio.sleep(wait_s)
        raise TimeoutError

    async def _connect(self) -> Raw | None:
        host, port = self.address.split(":")
        try:
            streams = await asyncio.open_connection(host, int(port))
        except ConnectionError:
            await asyncio.sleep(0.1)
            return None
        self._program.writers.append(streams[1])
        try:
            return await Raw(*streams).hello()
        except LOST:
            streams[1].close()
            await asyncio.sleep(0.1)
            return None


@contextmanager
def blocking_calls(clock: Clock) -> Iterator[None]:
    """Let the client libraries wait in virtual time, on simulated sockets."""

    def connect(address: tuple[str, int], timeout: float, *_: object) -> BlockingSocket:
        return BlockingSocket(running_program(), address, timeout)

    time = SimpleNamespace(
        monotonic=lambda: clock.seconds, sleep=lambda seconds: running_program().sleep(seconds)
    )
    with (
        mock.patch.object(socket, "create_connection", connect),
        mock.patch.object(queue, "time", time),
        mock.patch.object(deadline, "time", time),
        mock.patch.object(zmq, "ReqSocket", BlockingReqSocket),
    ):
        yield
