"""Present a pair of pipes as one transport: one pipe for reading, the other for writing.

A connection can use it like a socket's transport, for all methods that connections call. The
transport is lost when both pipes are closed, by the peer or by us.

Call it only from the event loop.
"""

from __future__ import annotations

import asyncio
import os
import stat
from typing import Any, Protocol, cast


class Receiver(Protocol):
    """The asyncio protocol that the pipes serve."""

    def connection_made(self, transport: Any) -> None: ...

    def data_received(self, data: bytes) -> None: ...

    def eof_received(self) -> bool: ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def connection_lost(self, error: Exception | None) -> None: ...


class Pipes:
    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self._read_transport: asyncio.ReadTransport | None = None
        self._write_transport: asyncio.WriteTransport | None = None
        self._is_closing = False
        self._wrote_eof = False
        self._is_connected = False

    async def connect(self, read_fd: int, write_fd: int) -> None:
        """Take ownership of both file descriptors and start reading. If one is not a pipe, close
        both and raise ValueError.
        """
        loop = asyncio.get_running_loop()
        read_file, write_file = os.fdopen(read_fd, "rb", 0), os.fdopen(write_fd, "wb", 0)
        try:
            for fd in (read_fd, write_fd):
                _check_is_pipe(fd)
            await loop.connect_write_pipe(lambda: _WritePipe(self), write_file)
            await loop.connect_read_pipe(lambda: _ReadPipe(self), read_file)
        except BaseException:
            read_file.close()
            self.abort()
            if self._write_transport is None:
                write_file.close()
            raise

    # --- called by a connection ---------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if self._write_transport is not None:
            self._write_transport.set_write_buffer_limits(high, low)

    def write(self, data: bytes) -> None:
        if self._write_transport is not None:
            self._write_transport.write(data)

    def get_write_buffer_size(self) -> int:
        return 0 if self._write_transport is None else self._write_transport.get_write_buffer_size()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Send EOF to the peer after all written bytes; reading continues."""
        self._wrote_eof = True
        if self._write_transport is not None and not self._write_transport.is_closing():
            self._write_transport.close()

    def pause_reading(self) -> None:
        if self._read_transport is not None and not self._read_transport.is_closing():
            self._read_transport.pause_reading()

    def resume_reading(self) -> None:
        if self._read_transport is not None and not self._read_transport.is_closing():
            self._read_transport.resume_reading()

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True
        self.write_eof()
        self._close_reading()

    def abort(self) -> None:
        """Close both pipes at once and discard unsent bytes."""
        self._is_closing = True
        write_transport = self._write_transport
        # If everything is written, the close is already under way, and abort() would close twice.
        if write_transport is not None and (
            not write_transport.is_closing() or write_transport.get_write_buffer_size() > 0
        ):
            write_transport.abort()
        self._close_reading()

    # --- called by the two pipes --------------------------------------------------------------

    def write_pipe_opened(self, transport: asyncio.WriteTransport) -> None:
        self._write_transport = transport

    def read_pipe_opened(self, transport: asyncio.ReadTransport) -> None:
        """Report the connection: `connect` opens this pipe last."""
        self._read_transport = transport
        self._is_connected = True
        self.receiver.connection_made(self)
        # The peer has closed its end while the other pipe was opened.
        if self._write_transport is None:
            self._close_reading()

    def write_pipe_lost(self, error: Exception | None) -> None:
        """End the connection if both pipes are closed, or close the other one."""
        self._write_transport = None
        if not self._is_connected:
            return  # the receiver does not know the pipes yet
        if self._read_transport is None:
            self.receiver.connection_lost(error)
        elif not self._wrote_eof:
            self._close_reading()  # the peer can read no response

    def read_pipe_lost(self, error: Exception | None) -> None:
        self._read_transport = None
        if self._write_transport is None:
            self.receiver.connection_lost(error)

    def _close_reading(self) -> None:
        if self._read_transport is not None and not self._read_transport.is_closing():
            self._read_transport.close()


def _check_is_pipe(fd: int) -> None:
    """Raise ValueError unless it is a pipe or a socket: uvloop aborts the process for a file."""
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        raise ValueError(f"file descriptor {fd} is neither a pipe nor a socket")


class _ReadPipe(asyncio.Protocol):
    def __init__(self, pipes: Pipes) -> None:
        self._pipes = pipes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._pipes.read_pipe_opened(cast(asyncio.ReadTransport, transport))

    def data_received(self, data: bytes) -> None:
        self._pipes.receiver.data_received(data)

    def eof_received(self) -> bool:
        self._pipes.receiver.eof_received()
        return False  # this pipe is done; the other one may still be written to

    def connection_lost(self, error: Exception | None) -> None:
        self._pipes.read_pipe_lost(error)


class _WritePipe(asyncio.BaseProtocol):
    def __init__(self, pipes: Pipes) -> None:
        self._pipes = pipes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._pipes.write_pipe_opened(cast(asyncio.WriteTransport, transport))

    def pause_writing(self) -> None:
        self._pipes.receiver.pause_writing()

    def resume_writing(self) -> None:
        self._pipes.receiver.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._pipes.write_pipe_lost(error)
