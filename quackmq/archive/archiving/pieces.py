"""What goes into a file of the archive, and what comes out: plain values, between the broker and
whoever makes files for it (`quackmq.archive.archiving.file_maker`, which stands on pyarrow; a
broker does not).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quackmq.archive.manifest import ArchiveFile, Quarantined
from quackmq.model.topic import Aborted, OffsetTime
from quackmq.records.batch import Buffer


class Piece(NamedTuple):
    """`data` are whole batches, the first of which may begin before `offset`, from which on they
    count. `times` say from which offset on which append time holds. Where it is known already that
    they cannot be opened, `poison` says why, and nobody tries."""

    data: Buffer
    offset: int
    aborted: tuple[Aborted, ...]
    times: Sequence[OffsetTime]
    poison: str | None = None


class UnknownProducers(NamedTuple):
    """Nothing was taken of a piece: the names of these producers are needed first."""

    producer_ids: frozenset[int]


class Progress(NamedTuple):
    """How far a file has come: everything before `position` was looked at, `end` is where the file
    would end now (its beginning, if there is nothing to put into it)."""

    position: int
    end: int
    is_full: bool


class QuarantinedBatch(NamedTuple):
    """A batch that nobody can open: its line in the manifest, and its bytes."""

    line: Quarantined
    data: bytes


class BuiltFile(NamedTuple):
    file: ArchiveFile
    data: Buffer
    aside: tuple[QuarantinedBatch, ...]
