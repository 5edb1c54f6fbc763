"""Builds files of the archive, one at a time: in this process, or in a worker process.

Building a file takes much processor time, and much of that holds Python's lock. So a broker uses a
separate process (`quackmq.archive.archiving.worker_main`): then the loop that publishes and
delivers never waits for it. Tests and the simulation, which control the order of everything, build
files in their own process.

All calls block. Call them in the disk's lane "archive", except `close`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from quackmq.archive.archiving.pieces import BuildProgress, BuiltFile, LogPiece, UnknownProducers
from quackmq.errors import StorageError
from quackmq.model.topic import PartitionKey

if TYPE_CHECKING:
    from quackmq.archive.archiving.file_maker import FileMaker


class WorkerDied(StorageError):
    """The worker process died or did not respond, perhaps because of its input. Only the archive
    handles this error; protocols treat it like other StorageErrors."""


class FileBuilder(Protocol):
    """Builds one file at a time. Calls raise StorageError, WorkerDied among them, if the work
    cannot be done at present. After any error the unfinished file is discarded, and another may
    begin.
    """

    def begin(self, key: PartitionKey, topic: str, first_offset: int) -> None:
        """Begin a new file; discard an unfinished one."""

    def add(
        self, piece: LogPiece, publishers: Mapping[int, str | None]
    ) -> BuildProgress | UnknownProducers: ...

    def finish(self, version: int) -> BuiltFile: ...

    def free_memory(self) -> None:
        """Free memory, because there is nothing to do for a while."""

    def close(self) -> None:
        """Stop all work; waiting callers get an error. May be called from the loop at any time."""


class LocalFileBuilder:
    """Builds files in the calling thread."""

    def __init__(self) -> None:
        self._maker: FileMaker | None = None

    def begin(self, key: PartitionKey, topic: str, first_offset: int) -> None:
        from quackmq.archive.archiving.file_maker import FileMaker

        self._maker = FileMaker(key, topic, first_offset)

    def add(
        self, piece: LogPiece, publishers: Mapping[int, str | None]
    ) -> BuildProgress | UnknownProducers:
        assert self._maker is not None, "call begin first"
        return self._maker.add(piece, publishers)

    def finish(self, version: int) -> BuiltFile:
        assert self._maker is not None, "call begin first"
        maker, self._maker = self._maker, None
        return maker.finish(version)

    def free_memory(self) -> None:
        self._maker = None

    def close(self) -> None: ...
