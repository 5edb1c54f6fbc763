"""A network in virtual time: TCP as servers and clients of asyncio see it.

`NetworkLoop` has `create_server` and `create_connection`, so `asyncio.open_connection` and the
product's own servers run on it unchanged. It also has Unix sockets and pipes (local_channels.py).
What the seed decides:

- where the bytes of a stream are split, and how long each piece takes;
- how many bytes a connection holds that the receiver has not read;
- a link that delivers nothing for seconds;
- a reset, which both ends notice at different times. It discards what was on its way.

As in TCP, bytes arrive complete, in order and once, until a reset. A half-closed connection still
delivers in the other direction. An end that closes although bytes are unread, or that gets bytes
after it has closed, resets the connection.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final

from tests.simulation.local_channels import Pipe, ReadEnd, UnixListener, WriteEnd
from tests.simulation.loop import Clock, VirtualLoop
from tests.simulation.platter import Counts

_HOST: Final = "127.0.0.1"
#: What a stream reader may hold; asyncio's own transports have the same default.
_HIGH_WATER_BYTES: Final = 64 * 1024
_PIECES: Final = (1, 2, 7, 100, 1_000, 100_000)
_STALL_SECONDS: Final = (0.5, 5.0, 20.0)


@dataclass(frozen=True)
class Weather:
    """What a network does to each piece of bytes that it delivers."""

    resets: float = 0.0
    stalls: float = 0.0
    splits: float = 0.3
    delay_seconds: float = 0.0005
    #: Connections that take as long to open as a stalled link.
    slow_connects: float = 0.0


CALM: Final = Weather(splits=0.0)
#: Whether connections that this task opens are undisturbed.
_IS_CALM: Final = ContextVar("is_calm", default=False)


def make_weather(source: random.Random) -> Weather:
    return Weather(
        resets=source.choice((0.0, 0.0, 0.002, 0.01)),
        stalls=source.choice((0.0, 0.0, 0.002, 0.01)),
        splits=source.choice((0.0, 0.3, 0.9)),
        delay_seconds=source.choice((0.0001, 0.001, 0.02)),
    )


class NetworkLoop(VirtualLoop):
    """A virtual loop with a network. Each connection gets the weather that is set when it opens."""

    def __init__(
        self, clock: Clock, source: random.Random, weather: Weather, counts: Counts
    ) -> None:
        super().__init__(clock, source)
        self.source = source
        self.weather = weather
        self.counts = counts
        self._listeners: dict[int, _Listener] = {}
        self._unix_listeners: dict[str, UnixListener] = {}
        #: By the number of either end.
        self._pipes: dict[int, Pipe] = {}
        self._ends: list[End] = []
        self._pipe_ends: list[ReadEnd | WriteEnd] = []
        self._ports = count(40_000)

    @contextmanager
    def calm(self) -> Iterator[None]:
        """Connections that are opened within this block are never disturbed, nor those of tasks
        that are created within it, nor those to a listener that is opened within it."""
        token = _IS_CALM.set(True)
        try:
            yield
        finally:
            _IS_CALM.reset(token)

    async def create_server(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], host: str, port: int, *, backlog: int = 100
    ) -> _Listener:
        if not port:
            port = next(self._ports)
        if port in self._listeners:
            raise OSError(98, f"port {port} is in use")
        listener = self._listeners[port] = _Listener(self, protocol_factory, host, port)
        listener.is_calm = _IS_CALM.get()
        return listener

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], host: str, port: int, **_: object
    ) -> tuple[End, Any]:
        listener = self._listeners.get(port)
        is_calm = _IS_CALM.get() or (listener is not None and listener.is_calm)
        weather = CALM if is_calm else self.weather
        await asyncio.sleep(self.source.random() * weather.delay_seconds)
        if weather.slow_connects and self.source.random() < weather.slow_connects:
            self.counts["connections that opened slowly"] += 1
            await asyncio.sleep(self.source.choice(_STALL_SECONDS))
        listener = self._listeners.get(port)
        if listener is None:
            raise ConnectionRefusedError(111, f"nobody listens at {host}:{port}")
        self.counts["connections"] += 1
        own_address = (_HOST, next(self._ports))
        return self._connect(
            protocol_factory(), listener.factory(), weather, own_address, (host, port)
        )

    def _connect(
        self,
        here: Any,
        there: Any,
        weather: Weather,
        own_address: tuple[str, int],
        address: tuple[str, int],
    ) -> tuple[End, Any]:
        """Open a connection between two protocols; return the end of the first."""
        near, far = End(self, here, weather), End(self, there, weather)
        self._ends += near, far
        near.join(far, own_address, address)
        far.join(near, address, own_address)
        far.begin()
        near.begin()
        return near, here

    async def create_unix_server(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], *, sock: Any, backlog: int = 100
    ) -> UnixListener:
        listener = self._unix_listeners[sock.path] = UnixListener(self, protocol_factory, sock)
        return listener

    async def create_unix_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], path: str, **_: object
    ) -> tuple[End, Any]:
        """Connect within the machine: nothing is lost there, and nothing stalls."""
        await asyncio.sleep(0)
        listener = self._unix_listeners.get(path)
        if listener is None:
            raise ConnectionRefusedError(111, f"nobody listens at {path}")
        self.counts["connections to a Unix socket"] += 1
        weather = replace(self.weather, resets=0.0, stalls=0.0)
        return self._connect(protocol_factory(), listener.factory(), weather, ("", 0), (path, 0))

    def pipe(self) -> tuple[int, int]:
        """Return numbers of the reading and of the writing end of a new pipe."""
        read_fd, write_fd = next(self._ports), next(self._ports)
        self._pipes[read_fd] = self._pipes[write_fd] = Pipe(self)
        return read_fd, write_fd

    async def connect_read_pipe(self, protocol_factory: Any, pipe: Any) -> tuple[ReadEnd, Any]:
        opened, protocol = self._pipes[pipe.fd], protocol_factory()
        end = opened.reader = ReadEnd(opened, protocol)
        self._pipe_ends.append(end)
        await asyncio.sleep(0)
        protocol.connection_made(end)
        end.schedule()
        return end, protocol

    async def connect_write_pipe(self, protocol_factory: Any, pipe: Any) -> tuple[WriteEnd, Any]:
        opened, protocol = self._pipes[pipe.fd], protocol_factory()
        end = opened.writer = WriteEnd(opened, protocol)
        self._pipe_ends.append(end)
        protocol.connection_made(end)
        await asyncio.sleep(0)
        return end, protocol

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> list[Any]:
        return [(2, 1, 6, "", (_HOST, port or 0))]

    def kill(self) -> None:
        for end in (*self._ends, *self._pipe_ends):
            end.vanish()
        super().kill()

    def open_connections(self, protocol_type: type) -> int:
        """Return how many ends with such a protocol are open."""
        return sum(
            isinstance(end.get_protocol(), protocol_type) for end in self._ends if end.is_open
        )

    def forget(self, port: int) -> None:
        self._listeners.pop(port, None)

    def forget_unix(self, path: str) -> None:
        self._unix_listeners.pop(path, None)


def end_of(writer: asyncio.StreamWriter) -> End:
    """Return the simulated end of a stream."""
    end = writer.transport
    assert isinstance(end, End)
    return end


class _Listener:
    """Stands for asyncio's server and for its one socket."""

    def __init__(self, loop: NetworkLoop, factory: Callable[[], Any], host: str, port: int) -> None:
        self._loop = loop
        self.factory = factory
        self._address = (host, port)
        self.sockets = (self,)
        #: Whether the network disturbs no connection to it.
        self.is_calm = False

    def getsockname(self) -> tuple[str, int]:
        return self._address

    def close(self) -> None:
        self._loop.forget(self._address[1])

    async def wait_closed(self) -> None:
        return


class _Socket:
    """A socket whose options change nothing here. No queue of an operating system is behind it."""

    def fileno(self) -> int:
        raise OSError(95, "this socket has no descriptor")

    def setsockopt(self, *_: object) -> None:
        return


class End(asyncio.Transport):
    """One end of a connection, as its protocol sees it."""

    def __init__(self, loop: NetworkLoop, protocol: Any, weather: Weather) -> None:
        super().__init__()
        self._loop = loop
        self._protocol = protocol
        self._weather = weather
        self._other: End = self
        self.address = self._peer_address = ("", 0)
        #: Written here and not yet taken by the network.
        self._outbox = bytearray()
        #: On its way here, or arrived and unread; at most `_room` bytes.
        self._inbox = bytearray()
        self._room = loop.source.choice((64, 4_096, 200_000))
        self._high, self._low = _HIGH_WATER_BYTES, _HIGH_WATER_BYTES // 4
        self._is_paused = self._is_closing = self._is_lost = self._is_scheduled = False
        self._has_paused_writing = False
        #: Whether this end will send nothing more, and whether the other end got to know it.
        self._has_eof = self._is_eof_sent = False
        #: Whether the other end will send nothing more, and whether the protocol was told.
        self._is_eof_here = self._is_eof_told = False

    def join(self, other: End, address: tuple[str, int], peer_address: tuple[str, int]) -> None:
        self._other, self.address, self._peer_address = other, address, peer_address

    def begin(self) -> None:
        self._protocol.connection_made(self)

    def vanish(self) -> None:
        """End with the process, without telling anybody."""
        self._is_closing = self._is_lost = True

    # --- what a protocol uses -----------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        found = {"peername": self._peer_address, "sockname": self.address, "socket": _Socket()}
        return found.get(name, default)

    def get_protocol(self) -> Any:
        return self._protocol

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def is_closing(self) -> bool:
        return self._is_closing

    @property
    def is_open(self) -> bool:
        return not self._is_lost

    def is_reading(self) -> bool:
        return not self._is_paused and not self._is_closing

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        self._schedule()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = _HIGH_WATER_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return len(self._outbox)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def can_write_eof(self) -> bool:
        return True

    def write(self, data: Any) -> None:
        if self._has_eof:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._is_lost:
            return
        self._outbox += data
        self._push()
        if len(self._outbox) > self._high and not self._has_paused_writing:
            self._has_paused_writing = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        if not self._has_eof and not self._is_lost:
            self._has_eof = True
            self._push()

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._push()

    def abort(self) -> None:
        self._is_closing = True
        self._reset(None)

    # --- the network --------------------------------------------------------------------------

    def _push(self) -> None:
        """Give the network as many bytes as it takes, and then the end of the stream."""
        other = self._other
        if self._is_lost:
            return
        if other._is_lost or other._is_closing and self._outbox:
            if self._outbox:
                self._reset(BrokenPipeError("the other end is closed"))
            elif self._is_closing:
                self._lose(None)
            return
        size = min(len(self._outbox), max(0, other._room - len(other._inbox)))
        if size:
            other._inbox += self._outbox[:size]
            del self._outbox[:size]
            other._schedule()
        if self._has_paused_writing and len(self._outbox) <= self._low:
            self._has_paused_writing = False
            self._loop.call_soon(self._resume_writing)
        if self._is_closing and not self._outbox and self._inbox:
            # TCP resets a connection whose closing end has unread bytes.
            self._reset(None)
            return
        if not self._outbox and (self._has_eof or self._is_closing) and not self._is_eof_sent:
            self._is_eof_sent = True
            other._is_eof_here = True
            other._schedule()
        if self._is_closing and not self._outbox:
            self._lose(None)

    def _resume_writing(self) -> None:
        if not self._is_lost and not self._has_paused_writing:
            self._protocol.resume_writing()

    def _schedule(self) -> None:
        if self._is_scheduled or self._is_paused or self._is_closing or self._is_lost:
            return
        if not self._inbox and (not self._is_eof_here or self._is_eof_told):
            return
        self._is_scheduled = True
        source, weather = self._loop.source, self._weather
        delay = source.random() * weather.delay_seconds
        if source.random() < weather.stalls:
            self._loop.counts["links that stalled"] += 1
            delay += source.choice(_STALL_SECONDS)
        self._loop.call_later(delay, self._deliver)

    def _deliver(self) -> None:
        self._is_scheduled = False
        if self._is_paused or self._is_closing or self._is_lost:
            return
        source = self._loop.source
        if source.random() < self._weather.resets:
            self._loop.counts["connections that were reset"] += 1
            self._reset(ConnectionResetError("reset by the network"))
            return
        if not self._inbox:
            self._tell_eof()
            return
        size = len(self._inbox)
        if source.random() < self._weather.splits:
            size = min(size, source.choice(_PIECES))
        if isinstance(self._protocol, asyncio.BufferedProtocol):
            buffer = memoryview(self._protocol.get_buffer(-1))
            size = min(size, len(buffer))
            buffer[:size] = self._inbox[:size]
            del self._inbox[:size]
            self._protocol.buffer_updated(size)
        else:
            data = bytes(self._inbox[:size])
            del self._inbox[:size]
            self._protocol.data_received(data)
        self._other._push()
        self._schedule()

    def _tell_eof(self) -> None:
        self._is_eof_told = True
        if not self._protocol.eof_received():
            self.close()

    def _reset(self, error: Exception | None) -> None:
        """Lose this end now, and the other end soon, without what is on its way."""
        self._outbox.clear()
        self._inbox.clear()
        other = self._other
        if not other._is_lost:
            delay = self._loop.source.random() * self._weather.delay_seconds
            self._loop.call_later(delay, other._on_reset)
        self._lose(error)

    def _on_reset(self) -> None:
        if not self._is_lost:
            self._inbox.clear()
            self._outbox.clear()
            self._is_closing = True
            self._lose(ConnectionResetError("reset by the other end"))

    def _lose(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = self._is_closing = True
            self._loop.call_soon(self._protocol.connection_lost, error)
