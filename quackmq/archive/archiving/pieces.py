"""The input and output of building a file: plain values between the broker and the file builder.

`quackmq.archive.archiving.file_maker` builds files with pyarrow, which the broker does not load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quackmq.archive.manifest import ArchiveFile, Quarantined
from quackmq.model.topic import AbortedTransaction, OffsetTime
from quackmq.records.batch import Buffer


class LogPiece(NamedTuple):
    """A part of a log. `data` are whole batches. The first of them may begin before `offset`; only
    records from `offset` on count. `times` has (offset, time) wherever the append time changes. If
    the batches are known to be undecodable, `undecodable_reason` is set, and the builder does not
    try to decode them."""

    data: Buffer
    offset: int
    aborted: tuple[AbortedTransaction, ...]
    times: Sequence[OffsetTime]
    undecodable_reason: str | None = None


class UnknownProducers(NamedTuple):
    """The builder added nothing of a piece: it needs the names of these producers first."""

    producer_ids: frozenset[int]


class BuildProgress(NamedTuple):
    """The state of an unfinished file. Everything before `position` was examined. `end` is where
    the file would end now (its beginning, if it has no content)."""

    position: int
    end: int
    is_full: bool


class QuarantinedBatch(NamedTuple):
    """An undecodable batch: its entry in the manifest, and its bytes."""

    entry: Quarantined
    data: bytes


class BuiltFile(NamedTuple):
    """A finished file: its entry in the manifest, its bytes, and the batches to quarantine."""

    file: ArchiveFile
    data: Buffer
    quarantined: tuple[QuarantinedBatch, ...]
