"""Where files of the archive are made, one at a time: here, or in a process of its own.

Making a file is work for a processor, and much of it holds Python's lock, so a broker has it done
by a process (`quackmq.archive.archiving.worker_main`): the loop that publishes and delivers is then
never kept waiting for it. Tests and the simulation, which own the order of everything, make files
here.

All of it blocks, and belongs into the disk's lane "archive", but for `close`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from quackmq.archive.archiving.pieces import BuiltFile, Piece, Progress, UnknownProducers
from quackmq.errors import StorageError
from quackmq.model.topic import PartitionKey

if TYPE_CHECKING:
    from quackmq.archive.archiving.file_maker import FileMaker


class WorkerDied(StorageError):
    """Whoever did the work ended over it, or never came to an end: perhaps by what it was given.
    It stays between the archive and its workshops: no door tells it from other StorageErrors."""


class FileBuilder(Protocol):
    """StorageError where the work cannot be done at present, WorkshopGone among them. After any
    error the file that was in the making is gone, and another one may be begun."""

    def begin(self, key: PartitionKey, topic: str, first_offset: int) -> None:
        """A new file; one that was in the making is given up."""

    def add(
        self, piece: Piece, publishers: Mapping[int, str | None]
    ) -> Progress | UnknownProducers: ...

    def finish(self, version: int) -> BuiltFile: ...

    def rest(self) -> None:
        """There is nothing to do for a while: memory is let go of."""

    def close(self) -> None:
        """From the loop, at any moment: whatever goes on ends, and whoever waits is told."""


class LocalFileBuilder:
    """In the thread that calls."""

    def __init__(self) -> None:
        self._maker: FileMaker | None = None

    def begin(self, key: PartitionKey, topic: str, first_offset: int) -> None:
        from quackmq.archive.archiving.file_maker import FileMaker

        self._maker = FileMaker(key, topic, first_offset)

    def add(
        self, piece: Piece, publishers: Mapping[int, str | None]
    ) -> Progress | UnknownProducers:
        assert self._maker is not None, "a file is begun first"
        return self._maker.add(piece, publishers)

    def finish(self, version: int) -> BuiltFile:
        assert self._maker is not None, "a file is begun first"
        maker, self._maker = self._maker, None
        return maker.finish(version)

    def rest(self) -> None:
        self._maker = None

    def close(self) -> None: ...
