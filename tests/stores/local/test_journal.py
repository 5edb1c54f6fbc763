"""The journal: frames come back in order; its end, and damage before it, are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from quackmq.disk.real import RealDisk
from quackmq.stores.local.files.format import FRAME_HEADER_BYTES, Sync, encode_frame, frame_bytes
from quackmq.stores.local.files.journal import (
    DIRECTORY,
    Journal,
    JournalLocation,
    Scan,
    SlotRange,
    slot_path,
)
from tests.stores.local.directories import flip

SALT = 99
SLOTS = 4
SLOT_BYTES = 2048
#: With its header, one boundary long.
SHORT = b"x" * 100
#: Two boundaries long.
LONG = b"y" * 600
START = JournalLocation(0, 0)


class Written:
    """A journal, and frames written to it as a store does: each synced before the next."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.disk = RealDisk(directory)
        self.disk.make_directory(DIRECTORY)
        self.journal = Journal(self.disk, slot_bytes=SLOT_BYTES, slots=SLOTS, start=START, number=1)

    def write(self, *payloads: bytes, run: int = 1, synced: bool = True) -> list[JournalLocation]:
        locations = []
        for payload in payloads:
            number = self.journal.next_number
            location = self.journal.reserve(frame_bytes(len(payload)))
            assert location is not None
            synced_through = number - 1 if synced else 0
            frame = encode_frame(Sync.ALWAYS, run, number, synced_through, [payload], SALT)
            self.journal.write(location, frame)
            self.journal.sync()
            self.journal.advance(location, len(frame))
            locations.append(location)
        return locations

    def damage(self, location: JournalLocation) -> None:
        flip(self.directory / slot_path(location.slot), location.position + FRAME_HEADER_BYTES)

    def scan(self, start: JournalLocation = START, number: int = 1, run: int = 1) -> Scan:
        return Scan(self.disk, slots=SLOTS, start=start, run=run, number=number, salt=SALT)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


def numbers(scan: Scan) -> list[int]:
    return [frame.number for frame in scan.frames()]


# --- writing ---------------------------------------------------------------------------------


def test_a_frame_that_does_not_fit_starts_the_next_slot(written: Written) -> None:
    assert written.write(SHORT, LONG, LONG) == [
        JournalLocation(0, 0),
        JournalLocation(0, 512),
        JournalLocation(1, 0),
    ]


def test_no_slot_is_written_over_before_a_checkpoint_covers_it(written: Written) -> None:
    written.write(*[LONG] * 2 * SLOTS)
    assert written.journal.reserve(frame_bytes(len(LONG))) is None
    written.journal.release(JournalLocation(1, 0))
    assert written.journal.reserve(frame_bytes(len(LONG))) == JournalLocation(0, 0)


# --- reading ---------------------------------------------------------------------------------


def test_frames_come_back_in_order_over_all_slots(written: Written) -> None:
    written.write(SHORT, LONG, LONG, SHORT, LONG)
    scan = written.scan()
    payloads = [bytes(frame.payload) for frame in scan.frames()]
    assert payloads == [SHORT, LONG, LONG, SHORT, LONG]
    assert (scan.location, scan.number, scan.damage) == (written.journal.next_location, 6, None)


def test_reading_starts_where_a_checkpoint_says(written: Written) -> None:
    locations = written.write(SHORT, SHORT, SHORT)
    assert numbers(written.scan(locations[1], number=2)) == [2, 3]


def test_an_empty_journal_has_no_frames(written: Written) -> None:
    scan = written.scan()
    assert (numbers(scan), scan.location, scan.number, scan.damage) == ([], START, 1, None)


def test_the_ring_goes_round(written: Written) -> None:
    written.write(*[LONG] * 2 * SLOTS)
    written.journal.release(JournalLocation(2, 0))
    written.write(LONG, LONG, LONG)
    scan = written.scan(JournalLocation(2, 0), number=5)
    assert numbers(scan) == list(range(5, 12))
    assert (scan.location, scan.damage) == (JournalLocation(1, 1024), None)


def test_frames_of_an_earlier_run_are_not_taken_for_new_ones(written: Written) -> None:
    written.write(SHORT, SHORT, SHORT)
    written.journal.next_location, written.journal.next_number = START, 1
    written.write(SHORT, run=2)
    scan = written.scan(run=2)
    assert (numbers(scan), scan.damage) == ([1], None)


def test_bytes_published_to_look_like_a_frame_are_not_taken_for_one(written: Written) -> None:
    forged = encode_frame(Sync.ALWAYS, 1, 3, 2, [b"forged"], SALT + 1)
    # Behind the entry of 472 bytes the forged frame lies on a boundary.
    [location] = written.write(b"z" * 472 + forged)
    written.damage(location)
    scan = written.scan()
    assert (numbers(scan), scan.damage) == ([], None)


# --- the end and damage ----------------------------------------------------------------------


def test_a_last_frame_that_is_not_whole_is_cut_off(written: Written) -> None:
    locations = written.write(SHORT, SHORT, SHORT)
    written.damage(locations[2])
    scan = written.scan()
    assert numbers(scan) == [1, 2]
    assert (scan.location, scan.number, scan.damage) == (locations[2], 3, None)


def test_a_bad_frame_before_a_good_one_is_damage_and_named(written: Written) -> None:
    locations = written.write(SHORT, LONG, SHORT)
    written.damage(locations[1])
    scan = written.scan()
    assert numbers(scan) == [1]
    assert scan.damage is not None
    assert scan.damage.ranges == (SlotRange(0, 512, 1536),)
    assert str(scan.damage) == "journal/0, bytes 512 to 1536 (frame 2)"
    assert scan.damage.resumes == locations[2]


def test_several_bad_frames_in_a_row_are_one_damage(written: Written) -> None:
    locations = written.write(SHORT, SHORT, SHORT, SHORT)
    written.damage(locations[1])
    written.damage(locations[2])
    scan = written.scan()
    assert numbers(scan) == [1]
    assert str(scan.damage) == "journal/0, bytes 512 to 1536 (frames 2 to 3)"


def test_reading_can_go_on_behind_damage(written: Written) -> None:
    locations = written.write(SHORT, SHORT, SHORT, SHORT, SHORT)
    written.damage(locations[0])
    written.damage(locations[2])
    first = written.scan()
    assert numbers(first) == []
    assert first.damage is not None
    second = written.scan(first.damage.resumes, number=first.damage.last_number + 1)
    assert numbers(second) == [2]
    assert second.damage is not None
    assert second.damage.ranges == (SlotRange(0, 1024, 1536),)
    third = written.scan(second.damage.resumes, number=second.damage.last_number + 1)
    assert (numbers(third), third.damage) == ([4, 5], None)


def test_damage_at_the_beginning_of_a_slot_is_named_there(written: Written) -> None:
    locations = written.write(SHORT, LONG, LONG, SHORT)
    assert locations[2] == JournalLocation(1, 0)
    written.damage(locations[2])
    scan = written.scan()
    assert numbers(scan) == [1, 2]
    assert scan.damage is not None
    assert scan.damage.ranges == (SlotRange(1, 0, 1024),)


def test_damage_over_a_slots_end_is_named_in_both_slots(written: Written) -> None:
    locations = written.write(SHORT, LONG, LONG, SHORT)
    written.damage(locations[1])
    written.damage(locations[2])
    scan = written.scan()
    assert numbers(scan) == [1]
    assert scan.damage is not None
    assert scan.damage.ranges == (SlotRange(0, 512, 1536), SlotRange(1, 0, 1024))


def test_a_slot_that_is_missing_between_others_is_damage(written: Written) -> None:
    written.write(LONG, LONG, LONG, LONG, LONG)
    (written.directory / slot_path(1)).unlink()
    scan = written.scan()
    assert numbers(scan) == [1, 2]
    assert str(scan.damage) == "journal/1, which is missing or empty, (frames 3 to 4)"


def test_frames_never_known_to_be_synced_are_no_damage_when_one_is_missing(
    written: Written,
) -> None:
    locations = written.write(SHORT, SHORT, SHORT, SHORT, synced=False)
    written.damage(locations[1])
    scan = written.scan()
    assert numbers(scan) == [1]
    assert (scan.damage, scan.discarded_frames) == (None, 2)
