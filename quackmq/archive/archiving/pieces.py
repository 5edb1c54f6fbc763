"""The input and output of building a file: plain values between the broker and the file builder.

`quackmq.archive.archiving.file_maker` builds files with pyarrow, which the broker does not load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quackmq.archive.manifest import ArchiveFile, Quarantined
from quackmq.model.topic import AbortedTransaction, OffsetTime
from quackmq.records.batch import Buffer


class Piece(NamedTuple):
    """A part of a log. `data` are whole batches. The first of them may begin before `offset`; only
    records from `offset` on count. `times` has (offset, time) wherever the append time changes. If
    the batches are known to be undecodable, `poison` is the reason, and no attempt is made."""

    data: Buffer
    offset: int
    aborted: tuple[AbortedTransaction, ...]
    times: Sequence[OffsetTime]
    poison: str | None = None


class UnknownProducers(NamedTuple):
    """The builder took nothing of a piece: it needs the names of these producers first."""

    producer_ids: frozenset[int]


class Progress(NamedTuple):
    """How far a file has come. Everything before `position` was examined. `end` is where the file
    would end now (its beginning, if it has no content)."""

    position: int
    end: int
    is_full: bool


class QuarantinedBatch(NamedTuple):
    """An undecodable batch: its entry in the manifest, and its bytes."""

    line: Quarantined
    data: bytes


class BuiltFile(NamedTuple):
    file: ArchiveFile
    data: Buffer
    aside: tuple[QuarantinedBatch, ...]
