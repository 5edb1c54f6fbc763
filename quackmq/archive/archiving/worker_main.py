"""The process that builds files of the archive for a broker, and the protocol between the two.

It has one connection, to the broker that started it, and ends with it. This works even if the
broker is killed, since the system then closes the other end. It receives one step at a time
(`FileBuilder`), does it at low priority, and responds. It opens no files.

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
    """One end of the connection. Raises OSError and EOFError if the other end has closed, or does
    not respond in time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, message: object, data: Sequence[Buffer] = ()) -> None:
        """Send a message and its data. The data is not pickled, and not copied into one buffer."""
        pickled = pickle.dumps(message)
        lengths = _LENGTHS.pack(len(pickled), sum(map(len, data)))
        self._socket.sendall(lengths + pickled)
        for part in data:
            self._socket.sendall(part)

    def receive(self) -> tuple[Any, memoryview]:
        """Wait for a message; return it with its data."""
        message_bytes, data_bytes = _LENGTHS.unpack(self._receive(_LENGTHS.size))
        message = pickle.loads(self._receive(message_bytes))
        return message, self._receive(data_bytes)

    def close(self) -> None:
        self._socket.close()

    def _receive(self, length: int) -> memoryview:
        """Return exactly `length` bytes. Raises EOFError if the connection ends before."""
        data = memoryview(bytearray(length))
        received = 0
        while received < length:
            count = self._socket.recv_into(data[received:])
            if not count:
                raise EOFError("the other end has closed the connection")
            received += count
        return data


def main(descriptor: int) -> None:
    """Serve the broker at the other end of a connected socket until the socket is closed."""
    import quackmq.archive.archiving.file_maker  # noqa: F401  (slow to load: do it before "ready")

    os.nice(limits.ARCHIVE_WORKER_NICENESS)
    channel = Channel(socket.socket(fileno=descriptor))
    file_builder = LocalFileBuilder()
    try:
        channel.send("ready")  # the broker may have been killed meanwhile
        while True:
            request, data = channel.receive()
            channel.send(*_execute(file_builder, request, data))
    except (EOFError, OSError):
        # The broker has closed the connection, or has died: this process has nothing else to do.
        return


def _execute(
    file_builder: LocalFileBuilder, request: Any, data: memoryview
) -> tuple[tuple[str, object], list[Buffer]]:
    """Execute a request; return its response and the data to send with it. An error becomes a
    response."""
    step, *arguments = request
    try:
        if step == "add":
            piece, publishers = arguments
            return ("done", file_builder.add(piece._replace(data=data), publishers)), []
        if step == "begin":
            file_builder.begin(*arguments)
            return ("done", None), []
        file, content, quarantined = file_builder.finish(*arguments)
    except Exception as error:  # any error: the broker reports it, and this process continues
        return ("failed", f"{type(error).__name__}: {error}"), []
    entries = [batch.entry for batch in quarantined]
    return ("done", (file, entries)), [content, *(batch.data for batch in quarantined)]
