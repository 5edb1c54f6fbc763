"""The process that builds files of the archive for a broker, and the protocol between the two.

It has one connection, to the broker that started it, and ends with it. This works even if the
broker is killed, since the system then closes the other end. It receives one step at a time
(`FileBuilder`), does it at low priority, and answers. It opens no files.

    | bytes of the message  u32 | bytes of data  u64 | the message, pickled | data |

Both ends have the same version and user. No bytes from a client are ever unpickled: batches travel
as data.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final

from quackmq.archive import limits
from quackmq.archive.archiving.builder import LocalFileBuilder
from quackmq.records.batch import Buffer

_LENGTHS: Final = struct.Struct(">IQ")


class Channel:
    """One end of the connection. Raises OSError and EOFError if the other end is gone, or does not
    answer in time."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: object, data: Sequence[Buffer] = ()) -> None:
        pickled = pickle.dumps(message)
        lengths = _LENGTHS.pack(len(pickled), sum(map(len, data)))
        self._end.sendall(lengths + pickled)
        for part in data:
            self._end.sendall(part)

    def receive(self) -> tuple[Any, memoryview]:
        message_bytes, data_bytes = _LENGTHS.unpack(self._receive(_LENGTHS.size))
        message = pickle.loads(self._receive(message_bytes))
        return message, self._receive(data_bytes)

    def close(self) -> None:
        self._end.close()

    def _receive(self, length: int) -> memoryview:
        data = memoryview(bytearray(length))
        got = 0
        while got < length:
            count = self._end.recv_into(data[got:])
            if not count:
                raise EOFError("the other end of the connection is gone")
            got += count
        return data


def main(descriptor: int) -> None:
    """Serve the broker at the other end of a connected socket until it is gone."""
    import quackmq.archive.archiving.file_maker  # noqa: F401  (what takes its time to load, before it is ready)

    os.nice(limits.ARCHIVE_WORKER_NICENESS)
    channel = Channel(socket.socket(fileno=descriptor))
    workshop = LocalFileBuilder()
    try:
        channel.send("ready")  # the broker may have been killed meanwhile
        while True:
            request, data = channel.receive()
            channel.send(*_carry_out(workshop, request, data))
    except (EOFError, OSError):
        return


def _carry_out(
    workshop: LocalFileBuilder, request: Any, data: memoryview
) -> tuple[tuple[str, object], list[Buffer]]:
    """Execute a request; return its answer and data."""
    step, *arguments = request
    try:
        if step == "add":
            piece, publishers = arguments
            return ("done", workshop.add(piece._replace(data=data), publishers)), []
        if step == "begin":
            workshop.begin(*arguments)
            return ("done", None), []
        file, content, aside = workshop.finish(*arguments)
    except Exception as error:  # any error: the broker reports it, and this process continues
        return ("failed", f"{type(error).__name__}: {error}"), []
    lines = [one.line for one in aside]
    return ("done", (file, lines)), [content, *(one.data for one in aside)]
