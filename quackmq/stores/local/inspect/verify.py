"""Checks every byte of a data directory that is covered by a checksum or a count.

Which data covers which bytes: `quackmq.json` and the checkpoint have their own checksums. A frame's
checksum covers the frame. The checkpoint gives the number of entries in each index (of regions, of
aborted transactions), and each entry has a checksum. An index entry, the checkpoint or a frame
covers a region of a segment; a batch's checksum covers the batch. A damaged region is examined
batch by batch, so that the report names the batch and not the region.

Promised: every damaged range is reported once, and no intact bytes are called damaged. In one case
the cause is unknown: the last frame of a directory that was not closed may have been torn by a
crash or damaged later. It is reported as a note.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from quackmq.errors import CorruptBatch
from quackmq.model.topic import PartitionKey
from quackmq.records import codec
from quackmq.records.batch import Batch
from quackmq.stores.local.files import checkpoint, packs
from quackmq.stores.local.files.format import REGION_ENTRY_BYTES
from quackmq.stores.local.files.journal import DIRECTORY as JOURNAL_DIRECTORY
from quackmq.stores.local.files.journal import slot_path
from quackmq.stores.local.files.segment import DIRECTORY as LOG_DIRECTORY
from quackmq.stores.local.files.segment import Segment
from quackmq.stores.local.inspect.directory import Inspection
from quackmq.stores.local.inspect.findings import Finding, Kind, join_adjacent
from quackmq.stores.local.inspect.segments import ScannedRange
from quackmq.stores.local.open import LOCK_PATH
from quackmq.stores.local.recovery import META_PATH

_INDEX_NAME: Final = re.compile(r"(\d+)-(\d{20})\.index")
_TOPIC_DIRECTORY: Final = re.compile(r"[0-9a-f]{32}")
#: In the same directory, but not part of the store: `quackmq archive verify` checks it.
_ARCHIVE: Final = "archive"
_ORPHAN: Final = "nothing refers to this file"
#: Larger than any offset.
_NO_END: Final = 2**63


@dataclass(slots=True)
class Tally:
    """How much was examined so far, and how many findings there are."""

    partitions: int = 0
    segments: int = 0
    batches: int = 0
    bytes: int = 0
    frames: int = 0
    damage: int = 0
    poison: int = 0
    notes: int = 0


class Verification:
    """Checks a directory; for one use. It calls `progress` with the bytes examined so far and the
    total."""

    def __init__(
        self,
        inspection: Inspection,
        *,
        deep: bool = False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """With `deep`, also decode every batch, to find those that were published broken."""
        self.tally = Tally(frames=inspection.frames)
        self._inspection = inspection
        self._deep = deep
        self._progress = progress
        self._total = sum(log.size for log in inspection.logs.values())

    def findings(self) -> Iterator[Finding]:
        """Yield all findings, each as soon as it is known."""
        for finding in map(self._add_pack_ranges, join_adjacent(self._findings())):
            match finding.kind:
                case Kind.DAMAGE:
                    self.tally.damage += 1
                case Kind.POISON:
                    self.tally.poison += 1
                case Kind.NOTE:
                    self.tally.notes += 1
            yield finding

    def _add_pack_ranges(self, finding: Finding) -> Finding:
        """Return the finding with the packs in which the bytes lie, where users look for them."""
        if finding.start is None or finding.end is None:
            return finding
        pack_ranges = self._inspection.segments.describe_pack_ranges(
            finding.path, finding.start, finding.end
        )
        if not pack_ranges:
            return finding
        return replace(finding, what=f"{finding.what} (in {pack_ranges})")

    def _findings(self) -> Iterator[Finding]:
        """Yield all findings, adjacent ones not joined yet: of the directory and the journal, of
        all segments, then about files that nothing refers to."""
        inspection = self._inspection
        yield from inspection.findings
        for log in inspection.logs.values():
            self.tally.partitions += 1
            self.tally.segments += len(log.segments)
            for scanned in inspection.segments.scan_log(log):
                yield from self._examine_range(scanned)
            for segment in log.segments:
                yield from inspection.segments.damaged_aborted(segment)
        for chunk in inspection.unreplayed:
            yield from self._examine_range(inspection.segments.scan_chunk(chunk))
        if inspection.checkpoint is None:
            yield from self._without_checkpoint()
        # After damage it is not known which files are needed.
        elif not inspection.damaged:
            yield from self._find_orphans()

    def _examine_range(self, scanned: ScannedRange) -> Iterator[Finding]:
        """Count the batches and bytes of a range, report progress, and yield the findings there."""
        self.tally.batches += len(scanned.good)
        self.tally.bytes += len(scanned.content)
        self._progress(self.tally.bytes, self._total)
        yield from scanned.bad
        if self._deep:
            yield from _find_poison(scanned)

    # --- bytes that nothing covers --------------------------------------------------------------

    def _without_checkpoint(self) -> Iterator[Finding]:
        """Yield the damage of all segments in the directory. Without a checkpoint the end of an
        index is unknown, so only entries that are followed by a good one are called damaged."""
        disk = self._inspection.disk
        for directory in filter(_TOPIC_DIRECTORY.fullmatch, disk.list(LOG_DIRECTORY)):
            for name in disk.list(f"{LOG_DIRECTORY}/{directory}"):
                match = _INDEX_NAME.fullmatch(name)
                if match is not None:
                    key = PartitionKey(uuid.UUID(directory), int(match[1]))
                    yield from self._examine_without_checkpoint(Segment(key, int(match[2])))

    def _examine_without_checkpoint(self, segment: Segment) -> Iterator[Finding]:
        """Yield the damage of a segment before its last good batch."""
        self.tally.segments += 1
        size = self._inspection.size(segment.index_path)
        segment.indexed_count = (size or 0) // REGION_ENTRY_BYTES
        unconfirmed: list[Finding] = []
        for scanned in self._inspection.segments.scan_segment(segment, _NO_END):
            unconfirmed += self._examine_range(scanned)
            if scanned.good:
                yield from unconfirmed
                unconfirmed.clear()

    def _find_orphans(self) -> Iterator[Finding]:
        """Yield a note about each file in the directory that nothing refers to."""
        inspection = self._inspection
        slots = inspection.meta.slots if inspection.meta is not None else 0
        topics = {f"{LOG_DIRECTORY}/{topic_id.hex}" for topic_id in inspection.catalog.topics_by_id}
        segments = [segment for log in inspection.logs.values() for segment in log.segments]
        expected_paths = {
            META_PATH,
            LOCK_PATH,
            checkpoint.PATH,
            JOURNAL_DIRECTORY,
            LOG_DIRECTORY,
            _ARCHIVE,
        }
        expected_paths |= {slot_path(slot) for slot in range(slots)} | topics
        expected_paths |= {path for segment in segments for path in segment.paths}
        expected_paths |= {packs.DIRECTORY, *map(packs.pack_path, inspection.packed.sizes)}
        directories = ("", JOURNAL_DIRECTORY, LOG_DIRECTORY, packs.DIRECTORY, *sorted(topics))
        for directory in directories:
            for name in inspection.disk.list(directory):
                path = f"{directory}/{name}" if directory else name
                if path not in expected_paths:
                    yield Finding(Kind.NOTE, path, _ORPHAN)


def _find_poison(scanned: ScannedRange) -> Iterator[Finding]:
    """Yield the batches whose checksum is right and that cannot be decoded."""
    for span in scanned.good:
        start, end = scanned.position + span.position, scanned.position + span.position + span.size
        batch = Batch.peek(scanned.content[span.position : span.position + span.size])
        try:
            for _ in codec.open_batch(batch):
                pass
        except CorruptBatch as error:
            yield Finding(
                Kind.POISON,
                scanned.path,
                f"the batch is as it was published, but cannot be decoded: {error}",
                start,
                end,
                span.base_offset,
                span.next_offset,
            )
