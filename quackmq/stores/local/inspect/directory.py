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
    Place,
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
from quackmq.stores.local.partition_log import PartitionLog
from quackmq.stores.local.recovery import (
    META_PATH,
    Meta,
    Recovered,
    read_checkpoint,
    read_meta,
    replay,
)


class FrameAt(NamedTuple):
    place: Place
    frame: Frame
    #: Whether it is after the checkpoint: recovery would replay it.
    behind_checkpoint: bool


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
        self.logs: dict[PartitionKey, PartitionLog] = {}
        #: Frames that recovery would replay.
        self.frames = 0
        #: From frames after damage: where their batches lie in segments.
        self.stranded: list[Descriptor] = []
        self.packed = NOTHING_PACKED
        self.contents = OfflineSegments(disk)
        disk.lock(LOCK_PATH)
        self._look()

    def close(self) -> None:
        self.contents.close()

    @property
    def damaged(self) -> bool:
        return any(finding.kind is Kind.DAMAGE for finding in self.findings)

    def _look(self) -> None:
        try:
            self.meta = read_meta(self.disk)
            if self.meta is None:
                self._miss_meta()
        except DamagedStore as error:
            self._damage(META_PATH, str(error))
        options = LocalOptions()
        try:
            decoded = read_checkpoint(self.disk, options)
            self.checkpoint, self.catalog, self.logs, self.packed = decoded
            self.contents.close()
            self.contents = OfflineSegments(self.disk, self.packed)
        except DamagedStore as error:
            self._damage(checkpoint.PATH, str(error))
            return
        if not self.checkpoint.clean:
            self._replay(self.checkpoint, options)

    def _miss_meta(self) -> None:
        if not holds_data(self.disk):
            raise UnusableDirectory(
                f"there is no {META_PATH}: this is not a QuackMQ directory, or its creation was "
                "interrupted and it has no data yet"
            )
        self._damage(META_PATH, "the file is missing: restore it from a backup")

    def _damage(self, path: str, what: str, start: int = 0) -> None:
        """Report damage from `start` to the end of a file."""
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

    def _replay(self, standing: CheckpointHeader, options: LocalOptions) -> None:
        path, position = slot_path(standing.place.slot), standing.place.position
        if self.meta is None:
            what = f"its frames cannot be identified without {META_PATH}"
            self.findings.append(Finding(Kind.NOTE, path, what, position, self.size(path)))
            return
        recovered = Recovered(self.meta, standing, self.catalog, self.logs)
        damage = None
        try:
            damage = replay(self.disk, options, recovered)
        except DamagedStore as error:
            self._damage(path, str(error), position)
        self.frames = recovered.frames
        for write in recovered.writes:
            self.contents.overlay(write)
        if damage is not None:
            self._go_on_behind(damage, self.meta, standing.run)
        elif not self.damaged:
            self._look_at_the_end(recovered, self.meta)

    def _go_on_behind(self, damage: Damage, meta: Meta, run: int) -> None:
        """Examine the frames after damage. They cannot be replayed, but they, and the batches that
        they refer to, may be damaged too."""
        following: Damage | None = damage
        while following is not None:
            self._name(following)
            scan = Scan(
                self.disk,
                slots=meta.slots,
                start=following.resumes,
                run=run,
                number=following.last_number + 1,
                salt=meta.salt,
            )
            for frame in scan.frames():
                self._strand(frame, scan.place)
            following = scan.damage

    def _name(self, damage: Damage) -> None:
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

    def _strand(self, frame: Frame, place: Place) -> None:
        try:
            self.stranded += [
                entry.descriptor
                for entry in entries(frame.payload)
                if isinstance(entry, AppendEntry) and entry.data is None
            ]
        except DamagedStore as error:
            path, start = slot_path(place.slot), place.position
            finding = Finding(Kind.DAMAGE, path, str(error), start, start + frame.size)
            self.findings.append(finding)

    def _look_at_the_end(self, recovered: Recovered, meta: Meta) -> None:
        end = recovered.standing
        path = slot_path(end.place.slot)
        if recovered.abandoned:
            what = (
                f"{recovered.abandoned} frames from number {end.frame} on were never known to be "
                f"on disk (sync = {end.sync}), and will be discarded"
            )
            finding = Finding(Kind.NOTE, path, what, end.place.position, self.size(path))
            self.findings.append(finding)
            return
        for place in (end.place, Place((end.place.slot + 1) % meta.slots, 0)):
            if _begins_frame(self.disk, place, meta.salt):
                path, position = slot_path(place.slot), place.position
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
            wrong = [finding for finding in self.findings if finding.path == path]
            wrong.sort(key=lambda finding: finding.start or 0)
            for position, frame in good_frames(read_slot(self.disk, slot), 0, meta.salt):
                while wrong and (wrong[0].start or 0) <= position:
                    yield wrong.pop(0)
                yield FrameAt(Place(slot, position), frame, self._is_behind(frame))
            yield from wrong

    def _is_behind(self, frame: Frame) -> bool:
        standing = self.checkpoint
        if standing is None or standing.clean:
            return False
        return frame.run == standing.run and frame.number >= standing.frame


def _begins_frame(disk: Disk, place: Place, salt: int) -> bool:
    """Return whether bytes that are not a frame begin like one."""
    try:
        file = disk.open(slot_path(place.slot))
    except FileNotFoundError:
        return False
    try:
        if read_all(file, len(FRAME_MAGIC), place.position) != FRAME_MAGIC:
            return False
        length = FRAME_HEADER_BYTES + limits.JOURNAL_FRAME_BYTES
        return parse_frame(read_all(file, length, place.position), 0, salt) is None
    finally:
        file.close()
