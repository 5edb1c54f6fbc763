"""A pair of pipes as one transport: what is read from one, what is written to the other.

To a connection this looks as a socket's transport does, as far as a connection uses one. It is lost
when both pipes are: each is closed by the peer, or by us.

Who may call: the loop.
"""

from __future__ import annotations

import asyncio
import os
import stat
from typing import Any, Protocol, cast


class Receiver(Protocol):
    """Whoever the pipes are for; what a protocol of asyncio has."""

    def connection_made(self, transport: Any) -> None: ...

    def data_received(self, data: bytes) -> None: ...

    def eof_received(self) -> bool: ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def connection_lost(self, error: Exception | None) -> None: ...


class Pipes:
    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self._reading: asyncio.ReadTransport | None = None
        self._writing: asyncio.WriteTransport | None = None
        self._is_closing = False
        self._wrote_eof = False
        self._has_begun = False

    async def connect(self, read_fd: int, write_fd: int) -> None:
        """Take over both file descriptors, to be closed at the end. ValueError, and they are closed
        now, for what is no pipe."""
        loop = asyncio.get_running_loop()
        read_file, write_file = os.fdopen(read_fd, "rb", 0), os.fdopen(write_fd, "wb", 0)
        try:
            for fd in (read_fd, write_fd):
                _check_is_pipe(fd)
            await loop.connect_write_pipe(lambda: _Writing(self), write_file)
            await loop.connect_read_pipe(lambda: _Reading(self), read_file)
        except BaseException:
            read_file.close()
            self.abort()
            if self._writing is None:
                write_file.close()
            raise

    # --- what a connection calls ------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if self._writing is not None:
            self._writing.set_write_buffer_limits(high, low)

    def write(self, data: bytes) -> None:
        if self._writing is not None:
            self._writing.write(data)

    def get_write_buffer_size(self) -> int:
        return 0 if self._writing is None else self._writing.get_write_buffer_size()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """The peer reads an end, behind all that was written; what it writes is read on."""
        self._wrote_eof = True
        if self._writing is not None and not self._writing.is_closing():
            self._writing.close()

    def pause_reading(self) -> None:
        if self._reading is not None and not self._reading.is_closing():
            self._reading.pause_reading()

    def resume_reading(self) -> None:
        if self._reading is not None and not self._reading.is_closing():
            self._reading.resume_reading()

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True
        self.write_eof()
        self._close_reading()

    def abort(self) -> None:
        self._is_closing = True
        writing = self._writing
        # Where all is written the end is on its way, and asyncio would come to it twice.
        if writing is not None and (
            not writing.is_closing() or writing.get_write_buffer_size() > 0
        ):
            writing.abort()
        self._close_reading()

    # --- what the two pipes call ------------------------------------------------------------

    def writes_by(self, transport: asyncio.WriteTransport) -> None:
        self._writing = transport

    def reads_by(self, transport: asyncio.ReadTransport) -> None:
        self._reading = transport
        self._has_begun = True
        self.receiver.connection_made(self)
        if self._writing is None:
            self._close_reading()

    def lost_writing(self, error: Exception | None) -> None:
        self._writing = None
        if not self._has_begun:
            return  # the receiver is told when it has heard of the pipes at all
        if self._reading is None:
            self.receiver.connection_lost(error)
        elif not self._wrote_eof:
            self._close_reading()  # nobody will read an answer

    def lost_reading(self, error: Exception | None) -> None:
        self._reading = None
        if self._writing is None:
            self.receiver.connection_lost(error)

    def _close_reading(self) -> None:
        if self._reading is not None and not self._reading.is_closing():
            self._reading.close()


def _check_is_pipe(fd: int) -> None:
    """uvloop takes whatever it is given, and aborts the process over a file."""
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        raise ValueError(f"file descriptor {fd} is neither a pipe nor a socket")


class _Reading(asyncio.Protocol):
    def __init__(self, pipes: Pipes) -> None:
        self._pipes = pipes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._pipes.reads_by(cast(asyncio.ReadTransport, transport))

    def data_received(self, data: bytes) -> None:
        self._pipes.receiver.data_received(data)

    def eof_received(self) -> bool:
        self._pipes.receiver.eof_received()
        return False  # this pipe is done; the other one may still be written to

    def connection_lost(self, error: Exception | None) -> None:
        self._pipes.lost_reading(error)


class _Writing(asyncio.BaseProtocol):
    def __init__(self, pipes: Pipes) -> None:
        self._pipes = pipes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._pipes.writes_by(cast(asyncio.WriteTransport, transport))

    def pause_writing(self) -> None:
        self._pipes.receiver.pause_writing()

    def resume_writing(self) -> None:
        self._pipes.receiver.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._pipes.lost_writing(error)
