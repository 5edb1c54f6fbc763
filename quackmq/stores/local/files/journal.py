"""The journal: a ring of slots into which every flush cycle writes one frame. The commit point.

Slots are files that are overwritten again and again: overwriting costs a fraction of growing a
file, because only data has to reach the disk. For the same reason a slot grows in large steps, with
zeros after the frame. A slot is reused only after a checkpoint covers all its frames. A frame that
does not fit after the last one starts the next slot; so a reader that finds no good frame looks
there before it decides that the journal ends.

`Journal` is the writing side. The loop reserves a position for a frame and counts frames. The frame
is written and synced in the flush lane, or on the loop if that is fast (`is_prepared`). One frame
is written at a time. `Scan` is the reading side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from quackmq.disk.interface import read_all, write_all
from quackmq.disk.linux_aio import Synced
from quackmq.disk.real import Disk, File
from quackmq.errors import InternalError
from quackmq.stores import limits
from quackmq.stores.local.files.format import FRAME_MAGIC, Frame, parse_frame

DIRECTORY = "journal"


class JournalLocation(NamedTuple):
    """A byte position in a slot."""

    slot: int
    position: int


class Journal:
    """The writing side. The section comments below say where each method may be called."""

    def __init__(
        self, disk: Disk, *, slot_bytes: int, slots: int, start: JournalLocation, number: int
    ):
        self._disk = disk
        self.slot_bytes = slot_bytes
        self._slots = slots
        self._growth_bytes = min(limits.JOURNAL_GROWTH_BYTES, slot_bytes // 4)
        self._files: dict[int, File] = {}
        self._sizes: dict[int, int] = {}
        self._unsynced: set[int] = set()
        #: Where the next frame is written, unless it must start the next slot.
        self.next_location = start
        #: The number of the next frame.
        self.next_number = number
        #: The slot where recovery would start; it must not be overwritten.
        self._oldest_slot = start.slot

    # --- on the loop ------------------------------------------------------------------------

    def reserve(self, size: int) -> JournalLocation | None:
        """Return the position for a frame of `size` bytes; None until a checkpoint frees a slot.
        Raises InternalError if no slot can hold it."""
        if size > self.slot_bytes:
            raise InternalError(
                f"a journal frame of {size} bytes does not fit in a slot of {self.slot_bytes}. "
                "This is a bug: please report it"
            )
        if self.next_location.position + size <= self.slot_bytes:
            return self.next_location
        # The frame does not fit any more: it starts the next slot, unless recovery needs that one.
        slot = (self.next_location.slot + 1) % self._slots
        return None if slot == self._oldest_slot else JournalLocation(slot, 0)

    def advance(self, location: JournalLocation, size: int) -> None:
        """Record that the frame at `location` is committed."""
        self.next_location = JournalLocation(location.slot, location.position + size)
        self.next_number += 1

    def release(self, location: JournalLocation) -> None:
        """Allow older slots to be overwritten: with the new checkpoint, recovery starts here."""
        self._oldest_slot = location.slot

    def is_prepared(self, location: JournalLocation, size: int) -> bool:
        """Return whether the file is open and need not grow. Then writing a frame there is a copy
        to the page cache, and syncing it one write to the disk."""
        return location.position + size <= self._sizes.get(location.slot, 0)

    def sync_soon(self, done: Synced, allow_blocking: bool) -> None:
        """Sync the frame that was just written; all others are synced. `allow_blocking` is as in
        `Disk.sync_soon`."""
        # Exactly one slot: the frame before was synced before this one was written.
        (slot,) = self._unsynced
        self._unsynced.clear()
        self._disk.sync_soon(self._files[slot], done, allow_blocking)

    # --- in the flush lane, or on the loop ----------------------------------------------------

    def write(self, location: JournalLocation, frame: bytes | bytearray) -> None:
        """Write a frame at its reserved location; grow the slot's file if necessary."""
        file = self._files.get(location.slot)
        if file is None:
            file = self._files[location.slot] = self._disk.open(
                slot_path(location.slot), create=True
            )
            # The name of a new slot must be durable before its frames are.
            self._disk.sync_directory(DIRECTORY)
            self._sizes[location.slot] = file.size()
        end = location.position + len(frame)
        if end > self._sizes[location.slot]:
            size = min(self.slot_bytes, end + -end % self._growth_bytes)
            # Zeros after the frame, so that the next frames need not change the length of the file.
            frame = frame + bytes(size - end)
            self._sizes[location.slot] = size
        write_all(file, frame, location.position)
        self._unsynced.add(location.slot)

    def sync(self) -> None:
        """Sync every slot with unsynced frames."""
        for slot in sorted(self._unsynced):
            self._files[slot].sync()
            self._unsynced.discard(slot)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


def slot_path(slot: int) -> str:
    return f"{DIRECTORY}/{slot}"


class SlotRange(NamedTuple):
    """Bytes [start, end) of a slot; `end` is 0 if the file is missing or empty."""

    slot: int
    start: int
    end: int

    def __str__(self) -> str:
        if not self.end:
            return f"{slot_path(self.slot)}, which is missing or empty,"
        return f"{slot_path(self.slot)}, bytes {self.start} to {self.end}"


class Damage(NamedTuple):
    """Bytes that held synced frames and hold none now, and where the next good frame is.

    The ranges are as exact as possible: only its neighbours show where a missing frame began or
    ended."""

    ranges: tuple[SlotRange, ...]
    first_number: int
    last_number: int
    resumes: JournalLocation

    def __str__(self) -> str:
        frames = (
            f"frame {self.first_number}"
            if self.first_number == self.last_number
            else f"frames {self.first_number} to {self.last_number}"
        )
        return f"{' and '.join(map(str, self.ranges))} ({frames})"


class Scan:
    """The frames from a location on, in order. At the end, `location` and `number` are those of the
    next frame to write, and `damage` describes missing frames before one that is still good."""

    def __init__(
        self, disk: Disk, *, slots: int, start: JournalLocation, run: int, number: int, salt: int
    ) -> None:
        self._disk = disk
        self._slots = slots
        self._run = run
        self._salt = salt
        self._data: dict[int, bytes] = {}
        self.location = start
        self.number = number
        self.damage: Damage | None = None
        #: Frames after the end that were written but not all synced (weak modes only).
        self.discarded_frames = 0

    def frames(self) -> Iterator[Frame]:
        """Yield the frames in order. If there is no next frame in a slot, look at the beginning of
        the next slot, where a frame that did not fit starts. At the end, look for later frames to
        tell damage from the end of the journal."""
        slots_advanced = 0
        while True:
            frame = self._frame_at(self.location, self.number)
            # After one round through the ring there is nothing new.
            if frame is None and slots_advanced < self._slots:
                following = JournalLocation((self.location.slot + 1) % self._slots, 0)
                frame = self._frame_at(following, self.number)
                if frame is not None:
                    # The content of that slot is no longer needed.
                    self._data.pop(self.location.slot, None)
                    self.location = following
                    slots_advanced += 1
            if frame is None:
                break
            yield frame
            self.location = JournalLocation(self.location.slot, self.location.position + frame.size)
            self.number += 1
        self._find_later_frames()
        self._data.clear()

    def _frame_at(self, location: JournalLocation, number: int) -> Frame | None:
        """Return the frame at a location; None unless it is of this run and has this number. Slots
        are reused, so good frames of earlier runs may lie there."""
        frame = parse_frame(self._slot(location.slot), location.position, self._salt)
        if frame is None or frame.run != self._run or frame.number != number:
            return None
        return frame

    def _slot(self, slot: int) -> bytes:
        """Return the content of a slot, cached or read."""
        if slot not in self._data:
            self._data[slot] = read_slot(self._disk, slot)
        return self._data[slot]

    def _find_later_frames(self) -> None:
        """Look for later frames of this run. One that was written after the missing frame was
        synced proves that the missing frame existed. Without such proof the journal ends here."""
        later: list[tuple[int, JournalLocation]] = []
        synced_through = 0
        for distance in range(self._slots):
            slot = (self.location.slot + distance) % self._slots
            start = 0 if distance else self.location.position
            is_empty = True
            for position, frame in good_frames(self._slot(slot), start, self._salt):
                is_empty = False
                if frame.run == self._run and frame.number > self.number:
                    later.append((frame.number, JournalLocation(slot, position)))
                    synced_through = max(synced_through, frame.synced_through)
            if distance and not is_empty:
                break  # only a slot that is wholly lost can hide the next one
        self.discarded_frames = len(later)
        if later and synced_through >= self.number:
            number, resumes = min(later)
            ranges = tuple(self._ranges_before(number, resumes))
            self.damage = Damage(ranges, self.number, number - 1, resumes)

    def _ranges_before(self, number: int, resumes: JournalLocation) -> Iterator[SlotRange]:
        """Yield the ranges from the end to the next good frame."""
        slot, start = self.location
        if slot == resumes.slot:
            yield SlotRange(slot, start, resumes.position)
            return
        # If only one frame is missing, and the next slot's beginning is bad, it was there.
        if number > self.number + 1 or not resumes.position:
            if start < len(self._slot(slot)):
                yield SlotRange(slot, start, len(self._slot(slot)))
            while (slot := (slot + 1) % self._slots) != resumes.slot:
                yield SlotRange(slot, 0, len(self._slot(slot)))
        if resumes.position:
            yield SlotRange(resumes.slot, 0, resumes.position)


def good_frames(data: bytes, start: int, salt: int) -> Iterator[tuple[int, Frame]]:
    """Yield every good frame of a slot from a position on, of any run, with its position."""
    position = data.find(FRAME_MAGIC, start)
    while position >= 0:
        frame = None
        if position % limits.JOURNAL_ALIGNMENT == 0:
            frame = parse_frame(data, position, salt)
        if frame is not None:
            yield position, frame
        # The same four bytes may lie in published data. So go on at the next byte unless a good
        # frame was found.
        position = data.find(FRAME_MAGIC, position + (1 if frame is None else frame.size))


def read_slot(disk: Disk, slot: int) -> bytes:
    """Return the whole content of a slot; no bytes if it was never used."""
    try:
        file = disk.open(slot_path(slot))
    except FileNotFoundError:
        return b""
    try:
        return read_all(file, file.size(), 0)
    finally:
        file.close()
