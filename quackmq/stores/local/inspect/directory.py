"""Reads a data directory as it is, without a broker and without changing a byte.

An `Inspection` sees the same as recovery: the checkpoint, the journal after it up to its end or up
to damage, and segments as they would be after recovery (segments.py). Damage does not end it:
invalid data becomes a finding, and the rest is read all the same.

Promised: nothing is written. StoreLocked, NewerFormat, UnusableDirectory and OSError say that the
directory could not be read. Not promised: that bytes without a checksum are intact; `verify` checks
all the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from quackmq.disk.interface import read_all
from quackmq.disk.real import Disk
from quackmq.errors import DamagedStore, UnusableDirectory
from quackmq.model.topic import PartitionKey
from quackmq.stores import limits
from quackmq.stores.catalog import Catalog
from quackmq.stores.local.files import checkpoint
from quackmq.stores.local.files.checkpoint import CheckpointHeader
from quackmq.stores.local.files.format import (
    FRAME_HEADER_BYTES,
    FRAME_MAGIC,
    AppendEntry,
    Descriptor,
    Frame,
    entries,
    parse_frame,
)
from quackmq.stores.local.files.journal import (
    Damage,
    JournalLocation,
    Scan,
    good_frames,
    read_slot,
    slot_path,
)
from quackmq.stores.local.files.packs import NOTHING_PACKED
from quackmq.stores.local.inspect.findings import Finding, Kind
from quackmq.stores.local.inspect.segments import OfflineSegments
from quackmq.stores.local.open import LOCK_PATH, holds_data
from quackmq.stores.local.options import LocalOptions
from quackmq.stores.local.recovery import (
    META_PATH,
    Meta,
    Recovered,
    read_checkpoint,
    read_meta,
    replay,
)
from quackmq.stores.local.segmented_log import SegmentedLog


class FrameAt(NamedTuple):
    """A good frame of the journal, and where it lies."""

    location: JournalLocation
    frame: Frame
    #: Whether it is after the checkpoint: recovery would replay it.
    is_after_checkpoint: bool


class Inspection:
    """The state of a directory. Not thread-safe. Takes the directory's lock, shared with other
    readers, and holds it until the disk is closed."""

    def __init__(self, disk: Disk) -> None:
        """Raises StoreLocked, NewerFormat, UnusableDirectory, OSError."""
        self.disk = disk
        self.findings: list[Finding] = []
        #: None if the file is damaged.
        self.meta: Meta | None = None
        self.checkpoint: CheckpointHeader | None = None
        self.catalog = Catalog()
        self.logs: dict[PartitionKey, SegmentedLog] = {}
        #: Frames that recovery would replay.
        self.frames = 0
        #: From frames after damage: where their batches lie in segments.
        self.unreplayed: list[Descriptor] = []
        self.packed = NOTHING_PACKED
        self.segments = OfflineSegments(disk)
        disk.lock(LOCK_PATH)
        self._load()

    def close(self) -> None:
        self.segments.close()

    @property
    def damaged(self) -> bool:
        return any(finding.kind is Kind.DAMAGE for finding in self.findings)

    def _load(self) -> None:
        """Read the metadata, the checkpoint and the journal; turn damage into findings."""
        try:
            self.meta = read_meta(self.disk)
            if self.meta is None:
                self._report_missing_meta()
        except DamagedStore as error:
            self._report_damage(META_PATH, str(error))
        options = LocalOptions()
        try:
            decoded = read_checkpoint(self.disk, options)
            self.checkpoint, self.catalog, self.logs, self.packed = decoded
            # Only now is it known which bytes lie in packs.
            self.segments.close()
            self.segments = OfflineSegments(self.disk, self.packed)
        except DamagedStore as error:
            self._report_damage(checkpoint.PATH, str(error))
            return
        if not self.checkpoint.clean:
            self._replay(self.checkpoint, options)

    def _report_missing_meta(self) -> None:
        """Report lost metadata. Raises UnusableDirectory if there is no data either."""
        if not holds_data(self.disk):
            raise UnusableDirectory(
                f"there is no {META_PATH}: this is not a QuackMQ directory, or its creation was "
                "interrupted and it has no data yet"
            )
        self._report_damage(META_PATH, "the file is missing: restore it from a backup")

    def _report_damage(self, path: str, what: str, start: int = 0) -> None:
        """Report damage from `start` to the end of a file."""
        # The finding names the path itself.
        what = what.removeprefix(f"{path}: ").removeprefix(f"{path} is damaged: ")
        size = self.size(path)
        if size is None:
            self.findings.append(Finding(Kind.DAMAGE, path, what))
        else:
            self.findings.append(Finding(Kind.DAMAGE, path, what, start, size))

    def size(self, path: str) -> int | None:
        """Return the size of a file; None if it is missing."""
        try:
            file = self.disk.open(path)
        except FileNotFoundError:
            return None
        try:
            return file.size()
        finally:
            file.close()

    # --- the journal --------------------------------------------------------------------------

    def _replay(self, header: CheckpointHeader, options: LocalOptions) -> None:
        """Apply the journal after the checkpoint, as recovery would."""
        path, position = slot_path(header.location.slot), header.location.position
        if self.meta is None:
            what = f"its frames cannot be identified without {META_PATH}"
            self.findings.append(Finding(Kind.NOTE, path, what, position, self.size(path)))
            return
        recovered = Recovered(self.meta, header, self.catalog, self.logs)
        damage = None
        try:
            damage = replay(self.disk, options, recovered)
        except DamagedStore as error:
            self._report_damage(path, str(error), position)
        self.frames = recovered.replayed_frames
        for write in recovered.writes:
            self.segments.add_write(write)
        if damage is not None:
            self._examine_after(damage, self.meta, header.run)
        elif not self.damaged:
            self._examine_end(recovered, self.meta)

    def _examine_after(self, damage: Damage, meta: Meta, run: int) -> None:
        """Examine the frames after damage. They cannot be replayed, but they, and the batches that
        they refer to, may be damaged too."""
        next_damage: Damage | None = damage
        while next_damage is not None:
            self._report_lost_frames(next_damage)
            scan = Scan(
                self.disk,
                slots=meta.slots,
                start=next_damage.resumes,
                run=run,
                number=next_damage.last_number + 1,
                salt=meta.salt,
            )
            for frame in scan.frames():
                self._add_unreplayed(frame, scan.location)
            next_damage = scan.damage

    def _report_lost_frames(self, damage: Damage) -> None:
        """Add a finding for each range of bytes that held the lost frames."""
        what = (
            f"frames {damage.first_number} to {damage.last_number} of the journal were on disk "
            "and are now damaged; they held acknowledged data"
        )
        for slot, start, end in damage.ranges:
            path = slot_path(slot)
            if end:
                self.findings.append(Finding(Kind.DAMAGE, path, what, start, end))
            else:
                self.findings.append(Finding(Kind.DAMAGE, path, f"the file is missing: {what}"))

    def _add_unreplayed(self, frame: Frame, location: JournalLocation) -> None:
        """Record where the batches that a frame refers to lie. Add a finding if the frame cannot be
        decoded."""
        try:
            self.unreplayed += [
                entry.descriptor
                for entry in entries(frame.payload)
                if isinstance(entry, AppendEntry) and entry.data is None
            ]
        except DamagedStore as error:
            path, start = slot_path(location.slot), location.position
            finding = Finding(Kind.DAMAGE, path, str(error), start, start + frame.size)
            self.findings.append(finding)

    def _examine_end(self, recovered: Recovered, meta: Meta) -> None:
        """Add a note if recovery would discard frames at the end of the journal."""
        end = recovered.header
        path = slot_path(end.location.slot)
        if recovered.discarded_frames:
            what = (
                f"{recovered.discarded_frames} frames from number {end.frame} on were never known "
                f"to be on disk (sync = {end.sync}), and will be discarded"
            )
            finding = Finding(Kind.NOTE, path, what, end.location.position, self.size(path))
            self.findings.append(finding)
            return
        # The last frame may have started the next slot, if it did not fit.
        for location in (end.location, JournalLocation((end.location.slot + 1) % meta.slots, 0)):
            if _has_broken_frame(self.disk, location, meta.salt):
                path, position = slot_path(location.slot), location.position
                what = (
                    f"frame {end.frame}, the last one, is incomplete, as after a crash during its "
                    "write. It was not acknowledged, and will be discarded"
                )
                self.findings.append(Finding(Kind.NOTE, path, what, position, self.size(path)))

    def journal(self) -> Iterator[FrameAt | Finding]:
        """Yield every good frame in the journal's slots, in the order of their bytes, and the
        findings between them."""
        meta = self.meta
        if meta is None:
            return
        for slot in range(meta.slots):
            path = slot_path(slot)
            slot_findings = [finding for finding in self.findings if finding.path == path]
            slot_findings.sort(key=lambda finding: finding.start or 0)
            for position, frame in good_frames(read_slot(self.disk, slot), 0, meta.salt):
                while slot_findings and (slot_findings[0].start or 0) <= position:
                    yield slot_findings.pop(0)
                yield FrameAt(
                    JournalLocation(slot, position), frame, self._is_after_checkpoint(frame)
                )
            yield from slot_findings

    def _is_after_checkpoint(self, frame: Frame) -> bool:
        """Return whether recovery would replay a frame: it follows the checkpoint, in the same
        run."""
        header = self.checkpoint
        if header is None or header.clean:
            return False
        return frame.run == header.run and frame.number >= header.frame


def _has_broken_frame(disk: Disk, location: JournalLocation, salt: int) -> bool:
    """Return whether the bytes at a location begin as a frame does but are not a good frame."""
    try:
        file = disk.open(slot_path(location.slot))
    except FileNotFoundError:
        return False
    try:
        if read_all(file, len(FRAME_MAGIC), location.position) != FRAME_MAGIC:
            return False
        length = FRAME_HEADER_BYTES + limits.JOURNAL_FRAME_BYTES
        return parse_frame(read_all(file, length, location.position), 0, salt) is None
    finally:
        file.close()
