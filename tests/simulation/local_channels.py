"""Unix sockets and pipes of the simulated network.

A pipe carries bytes in one direction. Its reader gets all written bytes and then the end, however
the writer has gone. A writer without a reader fails (EPIPE). Whether it learns that before it
writes depends on the loop: asyncio's tells it, uvloop's does not; here the seed decides.

A Unix socket is a connection as over TCP, without a network that could disturb it. Its file is in
a directory that outlives the process: a killed broker leaves it behind.

The product's own code runs on both: `quackmq.serving.pipes` and `quackmq.serving.unix_socket` with
the parts of `os` and `socket` below.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from quackmq.protocols.line import limits as line_limits
from quackmq.serving import pipes, unix_socket
from tests.simulation.model import Violation

if TYPE_CHECKING:
    from tests.simulation.network import NetworkLoop

_HIGH_WATER_BYTES: Final = 64 * 1024
#: Virtual seconds within which the broker closes its pipes after its peer, even if it has just
#: ended the connection itself and waits for the peer.
_END_SECONDS: Final = 1.0 + line_limits.LINE_LINGER_MS / 1_000
_PIECES: Final = (1, 5, 100, 100_000)


@contextmanager
def local_channels(files: SocketFiles) -> Iterator[None]:
    """Let the broker's code use simulated pipes, and sockets whose files are `files`."""
    sockets = SimpleNamespace(socket=lambda *_: _UnixSocket(files), AF_UNIX=1, SOCK_STREAM=1)
    file_calls = SimpleNamespace(
        lstat=files.stat, stat=files.stat, unlink=files.unlink, strerror=os.strerror
    )
    pipe_calls = SimpleNamespace(
        fdopen=lambda fd, *_: PipeFile(fd), fstat=lambda _: SimpleNamespace(st_mode=stat.S_IFIFO)
    )
    with (
        mock.patch.object(unix_socket, "os", file_calls),
        mock.patch.object(unix_socket, "socket", sockets),
        mock.patch.object(pipes, "os", pipe_calls),
    ):
        yield


# --- Unix sockets ---------------------------------------------------------------------------------


@dataclass
class SocketFiles:
    """The files of Unix sockets by path, each with a number that is never used again."""

    numbers: dict[str, int] = field(default_factory=dict)
    #: The files on whose sockets the present process listens.
    listening: set[int] = field(default_factory=set)
    _next: Iterator[int] = field(default_factory=lambda: count(1))

    def create(self, path: str) -> int:
        if path in self.numbers:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), path)
        self.numbers[path] = next(self._next)
        return self.numbers[path]

    def stat(self, path: str) -> Any:
        if path not in self.numbers:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return SimpleNamespace(st_mode=stat.S_IFSOCK, st_dev=1, st_ino=self.numbers[path])

    def unlink(self, path: str) -> None:
        del self.numbers[path]


class _UnixSocket:
    """A socket that is bound to a file, or that only tests whether somebody listens at one."""

    def __init__(self, files: SocketFiles) -> None:
        self.files = files
        self.path = ""

    def __enter__(self) -> _UnixSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def bind(self, path: str) -> None:
        self.files.create(path)
        self.path = path

    def setblocking(self, _: bool) -> None:
        return

    def connect_ex(self, path: str) -> int:
        is_listening = self.files.numbers[path] in self.files.listening
        return 0 if is_listening else errno.ECONNREFUSED

    def close(self) -> None:
        return


class UnixListener:
    """Stands for asyncio's server at a Unix socket."""

    def __init__(self, loop: NetworkLoop, factory: Callable[[], Any], bound: _UnixSocket) -> None:
        self._loop = loop
        self.factory = factory
        self._bound = bound
        self._number = bound.files.numbers[bound.path]
        bound.files.listening.add(self._number)

    def close(self) -> None:
        self._bound.files.listening.discard(self._number)
        self._loop.forget_unix(self._bound.path)

    async def wait_closed(self) -> None:
        return


# --- pipes ----------------------------------------------------------------------------------------


class Pipe:
    """A pipe, as the system has it. Its ends are transports once they are connected."""

    def __init__(self, loop: NetworkLoop) -> None:
        self.loop = loop
        self.room_bytes = loop.source.choice((64, 4_096, 65_536))
        self.bytes = bytearray()
        self.reader: ReadEnd | None = None
        self.writer: WriteEnd | None = None
        self.is_read_closed = self.is_write_closed = False
        #: Whether a writer learns that its reader has gone before it writes.
        self.tells_writer = loop.source.random() < 0.7

    def close_reading(self) -> None:
        self.is_read_closed = True
        self.bytes.clear()
        if self.writer is not None and self.tells_writer:
            self.loop.call_soon(self.writer.on_reader_gone)

    def close_writing(self) -> None:
        self.is_write_closed = True
        if self.reader is not None:
            self.reader.schedule()


class PipeFile:
    """An open file of a pipe. The loop turns it into a transport."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        return


class _PipeEnd:
    """What both ends have in common."""

    def __init__(self, pipe: Pipe, protocol: Any) -> None:
        self.pipe = pipe
        self._protocol = protocol
        self._is_closing = self._is_lost = False

    def is_closing(self) -> bool:
        return self._is_closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def vanish(self) -> None:
        """End with the process, without telling anybody."""
        self._is_closing = self._is_lost = True

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    def _lose(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = self._is_closing = True
            self.pipe.loop.call_soon(self._protocol.connection_lost, error)


class ReadEnd(_PipeEnd, asyncio.ReadTransport):
    """The reading end. Like asyncio's, it closes itself after the last byte."""

    def __init__(self, pipe: Pipe, protocol: Any) -> None:
        super().__init__(pipe, protocol)
        self._is_paused = self._is_scheduled = False

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        self.schedule()

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self.pipe.close_reading()
            self._lose(None)

    def schedule(self) -> None:
        """Deliver soon what has arrived, or the end."""
        pipe = self.pipe
        if self._is_scheduled or self._is_paused or self._is_closing:
            return
        if pipe.bytes or pipe.is_write_closed:
            self._is_scheduled = True
            pipe.loop.call_later(pipe.loop.source.random() * 0.001, self._deliver)

    def _deliver(self) -> None:
        self._is_scheduled = False
        pipe = self.pipe
        if self._is_paused or self._is_closing:
            return
        if not pipe.bytes:
            self._protocol.eof_received()
            self.close()
            return
        size = min(len(pipe.bytes), pipe.loop.source.choice(_PIECES))
        data = bytes(pipe.bytes[:size])
        del pipe.bytes[:size]
        self._protocol.data_received(data)
        if pipe.writer is not None:
            pipe.writer.push()
        self.schedule()


class WriteEnd(_PipeEnd, asyncio.WriteTransport):
    """The writing end."""

    def __init__(self, pipe: Pipe, protocol: Any) -> None:
        super().__init__(pipe, protocol)
        self._outbox = bytearray()
        self._high, self._low = _HIGH_WATER_BYTES, _HIGH_WATER_BYTES // 4
        self._has_paused_writing = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = _HIGH_WATER_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return len(self._outbox)

    def write(self, data: Any) -> None:
        if self._is_closing:
            return
        self._outbox += data
        self.push()
        if len(self._outbox) > self._high and not self._has_paused_writing:
            self._has_paused_writing = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self.push()

    def close(self) -> None:
        self.write_eof()

    def abort(self) -> None:
        self._fail(None)

    def push(self) -> None:
        """Give the pipe as many bytes as it takes, and then the end."""
        pipe = self.pipe
        if self._is_lost:
            return
        if pipe.is_read_closed and self._outbox:
            self._fail(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)))
            return
        size = min(len(self._outbox), max(0, pipe.room_bytes - len(pipe.bytes)))
        pipe.bytes += self._outbox[:size]
        del self._outbox[:size]
        if pipe.reader is not None:
            pipe.reader.schedule()
        if self._has_paused_writing and len(self._outbox) <= self._low:
            self._has_paused_writing = False
            pipe.loop.call_soon(self._resume_writing)
        if self._is_closing and not self._outbox:
            pipe.close_writing()
            self._lose(None)

    def _resume_writing(self) -> None:
        if not self._is_lost and not self._has_paused_writing:
            self._protocol.resume_writing()

    def on_reader_gone(self) -> None:
        if not self._is_lost:
            self._fail(BrokenPipeError() if self._outbox else None)

    def _fail(self, error: Exception | None) -> None:
        self._outbox.clear()
        self._is_closing = True
        self.pipe.close_writing()
        self._lose(error)


class PipePair(asyncio.Transport):
    """Both ends of a program that talks to the broker over two pipes."""

    def __init__(self, read_end: ReadEnd, write_end: WriteEnd) -> None:
        super().__init__()
        self.read_end = read_end
        self.write_end = write_end

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        self.write_end.write(data)

    def is_closing(self) -> bool:
        return self.write_end.is_closing()

    def close(self) -> None:
        self.write_end.close()
        self.read_end.close()

    def abort(self) -> None:
        self.write_end.abort()
        self.read_end.close()

    @property
    def is_broker_gone(self) -> bool:
        """Whether the broker has closed its ends of both pipes."""
        return self.read_end.pipe.is_write_closed and self.write_end.pipe.is_read_closed


async def open_pipes(
    loop: NetworkLoop, read_fd: int, write_fd: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return streams over two pipes, as a child process has them."""
    reader = asyncio.StreamReader()
    reading = asyncio.StreamReaderProtocol(reader)
    read_end, _ = await loop.connect_read_pipe(lambda: reading, PipeFile(read_fd))
    writing = asyncio.StreamReaderProtocol(asyncio.StreamReader())
    write_end, _ = await loop.connect_write_pipe(lambda: writing, PipeFile(write_fd))
    return reader, asyncio.StreamWriter(PipePair(read_end, write_end), writing, None, loop)


async def leave_pipes(writer: asyncio.StreamWriter, loop: NetworkLoop) -> None:
    """Close the pipes, both at once or one after the other. The broker must close its ends, too."""
    pair = writer.transport
    assert isinstance(pair, PipePair)
    way = loop.source.choice(("both", "reading", "reading", "writing"))
    loop.counts[f"pipes closed first: {way}"] += 1
    if way == "writing":
        pair.write_end.close()
        if not await _comes_true(lambda: pair.read_end.is_lost):
            raise Violation("a broker whose peer sends no more keeps its sending pipe open")
    elif way == "reading":
        pair.read_end.close()
        is_told = pair.read_end.pipe.tells_writer
        if is_told and not await _comes_true(lambda: pair.write_end.pipe.is_read_closed):
            raise Violation("a broker whose peer reads no more keeps its receiving pipe open")
    writer.close()
    if not await _comes_true(lambda: pair.is_broker_gone):
        raise Violation("a broker whose peer has closed its pipes keeps one of its own open")


async def _comes_true(condition: Callable[[], bool]) -> bool:
    """Wait for a condition; return whether it came true in time."""
    for _ in range(int(_END_SECONDS / 0.05)):
        if condition():
            return True
        await asyncio.sleep(0.05)
    return False
