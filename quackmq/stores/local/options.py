"""The local store's settings, with their defaults from `limits`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quackmq import limits as shared_limits
from quackmq.stores import limits

SyncMode = Literal["always", "interval", "os"]


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """`sync` says where acknowledged data is: "always": on disk; "interval": on disk within
    `sync_interval_ms`; "os": in the operating system's page cache. The last two survive a crash of
    the broker, but not of the machine."""

    sync: SyncMode = "always"
    sync_interval_ms: int = shared_limits.SYNC_INTERVAL_MS
    segment_bytes: int = shared_limits.SEGMENT_BYTES
    region_bytes: int = shared_limits.REGION_BYTES
    chunk_bytes: int = limits.CHUNK_BYTES
    journal_slot_bytes: int = limits.JOURNAL_SLOT_BYTES
    journal_slots: int = limits.JOURNAL_SLOTS
    journal_inline_bytes: int = limits.JOURNAL_INLINE_BYTES
    checkpoint_bytes: int = limits.CHECKPOINT_BYTES
    tail_bytes: int = limits.TAIL_BYTES
    open_files: int = limits.OPEN_SEGMENT_FILES
    packed_bytes: int = limits.PACKED_BYTES
