"""Looking into a directory without a broker: the sound is shown, each damaged range is named."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from crc32c import crc32c

from quackmq.disk.real import RealDisk, RealFile
from quackmq.errors import NewerFormat, StoreLocked, UnusableDirectory
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, PartitionKey
from quackmq.records.batch import CRC_START, Batch
from quackmq.stores.local import LocalOptions
from quackmq.stores.local.files.format import FRAME_HEADER_BYTES, REGION_ENTRY_BYTES
from quackmq.stores.local.inspect.directory import FrameAt, Inspection
from quackmq.stores.local.inspect.findings import Finding, Kind, join_adjacent
from quackmq.stores.local.inspect.segments import StoredBatch
from quackmq.stores.local.inspect.verify import Verification
from tests.kit.support import batch_of
from tests.stores.calls import append
from tests.stores.local.directories import (
    REFERENCED,
    SMALL,
    closed,
    content_of,
    crashed,
    fill,
    flip,
    indexes_of,
    leave_crashed,
    open_store,
    segments_of,
)


@contextmanager
def inspection_of(directory: Path, disk: RealDisk | None = None) -> Iterator[Inspection]:
    disk = disk or RealDisk(directory, read_only=True)
    try:
        inspection = Inspection(disk)
        yield inspection
        inspection.close()
    finally:
        disk.close()


def found_in(directory: Path, *, deep: bool = False, disk: RealDisk | None = None) -> list[Finding]:
    with inspection_of(directory, disk) as inspection:
        return list(Verification(inspection, deep=deep).findings())


def damage_in(directory: Path) -> list[tuple[str, int | None, int | None]]:
    return [
        (finding.path, finding.start, finding.end)
        for finding in found_in(directory)
        if finding.kind is Kind.DAMAGE
    ]


def name_of(path: Path, directory: Path) -> str:
    return str(path.relative_to(directory))


def offsets_in(directory: Path, key: PartitionKey, offset: int = 0) -> list[int]:
    return [base_offset for base_offset, _ in batches_in(directory, key, offset)]


def batches_in(directory: Path, key: PartitionKey, offset: int = 0) -> list[tuple[int, bytes]]:
    with inspection_of(directory) as inspection:
        found = inspection.segments.batches(inspection.logs[key], offset)
        held = [each.batch for each in found if isinstance(each, StoredBatch)]
        return [(batch.base_offset, bytes(batch.view)) for batch in held]


def frames_in(directory: Path) -> list[FrameAt]:
    with inspection_of(directory) as inspection:
        return [each for each in inspection.journal() if isinstance(each, FrameAt)]


# --- sound directories -----------------------------------------------------------------------


async def test_a_store_that_was_closed_is_seen_as_it_is(tmp_path: Path) -> None:
    key = await closed(tmp_path / "data", 20)
    with inspection_of(tmp_path / "data") as inspection:
        assert (inspection.findings, inspection.damaged, inspection.frames) == ([], False, 0)
        assert inspection.checkpoint is not None and inspection.checkpoint.clean
        assert set(inspection.catalog.topics) == {"ducks"}
        log = inspection.logs[key]
        assert (log.first_offset, log.high_watermark) == (0, 20)
    assert offsets_in(tmp_path / "data", key) == list(range(20))
    assert found_in(tmp_path / "data", deep=True) == []


@pytest.mark.parametrize("options", [SMALL, LocalOptions()], ids=["small", "default"])
async def test_after_a_crash_a_store_is_seen_as_recovery_would_leave_it(
    tmp_path: Path, options: LocalOptions
) -> None:
    key = await crashed(tmp_path / "data", 20, options)
    assert offsets_in(tmp_path / "data", key) == list(range(20))
    assert found_in(tmp_path / "data", deep=True) == []


async def test_what_only_the_journal_holds_is_seen_where_the_segments_have_nothing(
    tmp_path: Path,
) -> None:
    key = await crashed(tmp_path / "data", 4, LocalOptions())
    for path in segments_of(tmp_path / "data"):
        path.unlink()
    assert offsets_in(tmp_path / "data", key) == [0, 1, 2, 3]
    assert damage_in(tmp_path / "data") == []


async def test_batches_are_given_from_the_one_that_holds_an_offset(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    key = PartitionKey((await store.create_topic("ducks", 1, Policy())).id, 0)
    for _ in range(10):
        await append(store, key, batch_of(b"1", b"2", b"3"))
    await store.close()
    for offset in range(31):
        expected = list(range(offset // 3 * 3, 30, 3))
        assert offsets_in(tmp_path / "data", key, offset) == expected


async def test_a_look_changes_nothing_and_opens_nothing_for_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await crashed(tmp_path / "data", 20)
    before = content_of(tmp_path / "data")
    plain_open = os.open

    def open_for_reading(path: str, flags: int, *more: int, **others: int) -> int:
        assert flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT | os.O_TRUNC) == 0, path
        return plain_open(path, flags, *more, **others)

    monkeypatch.setattr(os, "open", open_for_reading)
    assert found_in(tmp_path / "data", deep=True) == []
    monkeypatch.undo()
    assert content_of(tmp_path / "data") == before


async def test_a_disk_for_reading_refuses_every_change(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"quack")
    disk = RealDisk(tmp_path, read_only=True)
    for change in (
        lambda: disk.open("other", create=True),
        lambda: disk.make_directory("other"),
        lambda: disk.rename("file", "other"),
        lambda: disk.remove("file"),
    ):
        with pytest.raises(OSError) as caught:
            change()
        assert caught.value.errno == errno.EROFS
    assert content_of(tmp_path) == {"file": b"quack"}


# --- directories that cannot be looked at ----------------------------------------------------


async def test_a_directory_in_use_is_not_looked_at(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    with pytest.raises(StoreLocked, match=rf"in use by a broker \(process {os.getpid()}\)"):
        found_in(tmp_path / "data")
    await store.close()
    assert found_in(tmp_path / "data") == []


async def test_what_is_no_store_is_not_looked_at(tmp_path: Path) -> None:
    for half_made in ("lock", "checkpoint"):
        (tmp_path / half_made).write_bytes(b"")
        with pytest.raises(UnusableDirectory, match=r"no quackmq\.json"):
            found_in(tmp_path)


async def test_a_newer_format_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "quackmq.json").write_text('{"format": 9}')
    with pytest.raises(NewerFormat):
        found_in(tmp_path)


async def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    await closed(tmp_path / "data", 20)
    forbidden = segments_of(tmp_path / "data")[1].name

    class ForbiddingDisk(RealDisk):
        def open(self, path: str, *, create: bool = False) -> RealFile:
            if path.endswith(forbidden):
                raise PermissionError(errno.EACCES, "not allowed", path)
            return super().open(path, create=create)

    disk = ForbiddingDisk(tmp_path / "data", read_only=True)
    with pytest.raises(PermissionError):
        found_in(tmp_path / "data", disk=disk)


# --- every kind of damage --------------------------------------------------------------------


@pytest.mark.parametrize("leave", [closed, crashed])
async def test_a_flipped_bit_anywhere_is_named_where_it_is(tmp_path: Path, leave: object) -> None:
    """Not in the journal of a store that was closed, of which nothing is needed; not in the last
    frame of one that was not, which a crash may have torn; and not in bytes of a segment that the
    journal has too, and recovery would write again."""
    assert leave in (closed, crashed)
    directory = tmp_path / "data"
    key = await (closed if leave is closed else crashed)(directory, 20)
    sound = batches_in(directory, key)
    locations = [
        (path, position)
        for path in (directory / "checkpoint", directory / "quackmq.json")
        for position in (0, 1, 30, 60)
    ]
    for path in [*segments_of(directory), *indexes_of(directory)]:
        locations += [(path, position) for position in range(5, path.stat().st_size, 37)]
    frames = [each for each in frames_in(directory) if each.is_after_checkpoint]
    for (slot, position), frame, _ in frames[:-1]:
        path = directory / "journal" / str(slot)
        inside = range(position, position + FRAME_HEADER_BYTES + len(frame.payload), 50)
        locations += [(path, each) for each in inside]
    for path, position in locations:
        flip(path, position)
        ranges = damage_in(directory)
        if not ranges and leave is crashed and path.suffix == ".log":
            assert batches_in(directory, key) == sound
            flip(path, position)
            continue
        flip(path, position)
        assert len(ranges) == 1, (path, position, ranges)
        name, start, end = ranges[0]
        assert name == name_of(path, directory)
        assert start is not None and end is not None and start <= position < end
    assert damage_in(directory) == []


async def test_a_damaged_batch_is_named_with_its_offsets_and_the_others_are_given(
    tmp_path: Path,
) -> None:
    key = await closed(tmp_path / "data", 20)
    path = segments_of(tmp_path / "data")[0]
    flip(path, 80)
    [finding] = found_in(tmp_path / "data")
    assert str(finding) == (
        f"damage: {name_of(path, tmp_path / 'data')}, bytes 75 to 150, offsets 1 to 1: "
        "the checksum is wrong"
    )
    assert offsets_in(tmp_path / "data", key) == [0, *range(2, 20)]


async def test_all_damage_is_named_however_much_there_is(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    await crashed(directory, 20, replace(SMALL, journal_slot_bytes=64 * 1024))
    segments = segments_of(directory)
    frames = frames_in(directory)
    # Frame 5 is about offset 3, so what comes later is known from frames behind damage alone.
    spoilt = [frames[4], frames[8], frames[9]]
    for (slot, position), _, _ in spoilt:
        flip(directory / "journal" / str(slot), position + FRAME_HEADER_BYTES)
    referenced = max(segments, key=lambda path: path.stat().st_size)
    flip(referenced, referenced.stat().st_size - 1)
    first, second, third = (frame.location.position for frame in spoilt)
    assert damage_in(directory)[:2] == [
        ("journal/0", first, first + spoilt[0].frame.size),
        ("journal/0", second, third + spoilt[2].frame.size),
    ]
    assert name_of(referenced, directory) in {path for path, _, _ in damage_in(directory)}


async def test_what_lies_before_damage_in_the_journal_is_still_seen(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    key = await crashed(directory, 6, LocalOptions())
    (slot, position), _, _ = frames_in(directory)[4]
    flip(directory / "journal" / str(slot), position)
    with inspection_of(directory) as inspection:
        assert inspection.damaged
        assert inspection.frames == 4
        assert inspection.logs[key].high_watermark == 3
    assert offsets_in(directory, key) == [0, 1, 2]


async def test_a_damaged_index_costs_nothing_but_its_entries(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    key = await closed(directory, 40)
    path = max(indexes_of(directory), key=lambda path: path.stat().st_size)
    flip(path, 0)
    assert damage_in(directory) == [(name_of(path, directory), 0, REGION_ENTRY_BYTES)]
    assert offsets_in(directory, key) == list(range(40))
    for each in indexes_of(directory):
        each.write_bytes(b"")
    assert len(damage_in(directory)) == len(indexes_of(directory))
    assert offsets_in(directory, key) == list(range(40))


async def test_damage_under_a_damaged_index_is_named_too(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    await closed(directory, 40)
    index = indexes_of(directory)[0]
    segment = index.with_suffix(".log")
    flip(index, 0)
    flip(segment, 80)
    assert [path for path, _, _ in damage_in(directory)] == [
        name_of(index, directory),
        name_of(segment, directory),
    ]


@pytest.mark.parametrize("kind", ["log", "index"])
async def test_a_missing_file_is_one_finding(tmp_path: Path, kind: str) -> None:
    directory = tmp_path / "data"
    await closed(directory, 40)
    path = (segments_of if kind == "log" else indexes_of)(directory)[1]
    size = path.stat().st_size
    path.unlink()
    [finding] = found_in(directory)
    assert (finding.path, finding.start, finding.end) == (name_of(path, directory), 0, size)
    assert finding.what == "the file is missing"


async def test_a_file_that_was_cut_is_one_finding(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    key = await closed(directory, 40)
    path = segments_of(directory)[1]
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:80])
    [finding] = found_in(directory)
    assert (finding.start, finding.end) == (75, size)
    assert finding.what == "the file ends at byte 80"
    assert finding.first_offset is not None and finding.next_offset is not None
    lost = range(finding.first_offset, finding.next_offset)
    assert offsets_in(directory, key) == [offset for offset in range(40) if offset not in lost]


async def test_bytes_that_the_device_cannot_give_are_damage(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    await closed(directory, 40)
    broken = segments_of(directory)[1]

    class BrokenFile(RealFile):
        def read_some(self, length: int, position: int) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    class BrokenDisk(RealDisk):
        def open(self, path: str, *, create: bool = False) -> RealFile:
            if path.endswith(broken.name):
                return BrokenFile(os.open(self._path(path), os.O_RDONLY))
            return super().open(path, create=create)

    [finding] = found_in(directory, disk=BrokenDisk(directory, read_only=True))
    assert (finding.path, finding.start) == (name_of(broken, directory), 0)
    assert finding.what == "it cannot be read (Input/output error)"


async def test_a_slot_of_the_journal_that_is_missing_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    await crashed(directory, 4)
    (directory / "journal" / "0").unlink()
    [finding] = found_in(directory)
    assert (finding.kind, finding.path) == (Kind.DAMAGE, "journal/0")


async def test_a_missing_first_file_is_damage_where_there_is_data(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    await crashed(directory, 4)
    (directory / "quackmq.json").unlink()
    findings = found_in(directory)
    assert [(each.kind, each.path) for each in findings] == [
        (Kind.DAMAGE, "quackmq.json"),
        (Kind.NOTE, "journal/0"),
    ]
    assert "cannot be identified without quackmq.json" in findings[1].what


async def test_without_a_checkpoint_damage_is_still_named_where_something_good_is_behind_it(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "data"
    await closed(directory, 40)
    segment = segments_of(directory)[0]
    index = indexes_of(directory)[2]
    (directory / "checkpoint").unlink()
    assert damage_in(directory) == [("checkpoint", None, None)]
    flip(segment, 80)
    flip(index, 0)
    assert damage_in(directory) == [
        ("checkpoint", None, None),
        (name_of(segment, directory), 75, 150),
        (name_of(index, directory), 0, REGION_ENTRY_BYTES),
    ]


# --- what is strange and no damage -----------------------------------------------------------


async def test_a_torn_last_frame_is_noted(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    await crashed(directory, 4, LocalOptions())
    (slot, position), _, _ = frames_in(directory)[-1]
    path = directory / "journal" / str(slot)
    path.write_bytes(path.read_bytes()[: position + 100])
    [finding] = found_in(directory)
    assert (finding.kind, finding.path) == (Kind.NOTE, name_of(path, directory))
    assert (finding.start, finding.end) == (position, position + 100)
    assert "frame 5, the last one, is incomplete" in finding.what


async def test_frames_that_were_never_synced_are_noted(tmp_path: Path) -> None:
    running, directory = tmp_path / "running", tmp_path / "data"
    store = await open_store(running, replace(SMALL, sync="os"))
    key = PartitionKey((await store.create_topic("ducks", 1, Policy())).id, 0)
    for value in (b"1", REFERENCED, b"3"):
        await store.append([Append(key, batch_of(value))])
    leave_crashed(running, directory)
    await store.close()
    for path in segments_of(directory):
        path.write_bytes(b"")
    [finding] = found_in(directory)
    assert finding.kind is Kind.NOTE
    assert "2 frames from number 3 on were never known to be on disk (sync = os)" in finding.what


async def test_files_that_belong_to_nothing_are_noted(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    key = await closed(directory, 4)
    names = ["checkpoint.new", "journal/17", "log/nobody", f"log/{key.topic_id.hex}/9-1.log"]
    for name in names:
        (directory / name).write_bytes(b"?")
    findings = found_in(directory)
    assert [each.path for each in findings] == names
    assert {each.kind for each in findings} == {Kind.NOTE}


async def test_a_batch_that_nobody_can_decode_is_poison_and_no_damage(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    store = await open_store(directory)
    key = await fill(store, 2)
    await append(store, key, undecodable())
    await store.close()
    assert found_in(directory) == []
    [finding] = found_in(directory, deep=True)
    assert (finding.kind, finding.first_offset, finding.next_offset) == (Kind.POISON, 2, 3)
    assert "cannot be decoded" in finding.what


def undecodable() -> Batch:
    """A batch with a good checksum that says zstd of bytes that are none."""
    data = bytearray(batch_of(b"quack").view)
    data[22] |= 4
    struct.pack_into(">I", data, 17, crc32c(data[CRC_START:]))
    return Batch.parse(data)


# --- what is counted -------------------------------------------------------------------------


async def test_a_verification_counts_what_it_looked_at(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    await closed(directory, 40)
    flip(segments_of(directory)[0], 80)
    size = sum(path.stat().st_size for path in segments_of(directory))
    told: list[tuple[int, int]] = []
    with inspection_of(directory) as inspection:
        verification = Verification(inspection, progress=lambda *each: told.append(each))
        assert len(list(verification.findings())) == 1
        tally = verification.tally
    assert (tally.partitions, tally.segments) == (1, len(segments_of(directory)))
    assert (tally.batches, tally.bytes, tally.damage) == (39, size, 1)
    assert told == sorted(told) and told[-1] == (size, size)


async def test_findings_side_by_side_become_one_if_they_say_the_same() -> None:
    first = Finding(Kind.DAMAGE, "file", "bad", 0, 10, 0, 5)
    second = Finding(Kind.DAMAGE, "file", "bad", 10, 30, 5, 9)
    apart = Finding(Kind.DAMAGE, "file", "bad", 40, 50, 20, 21)
    other = Finding(Kind.DAMAGE, "file", "worse", 50, 60, 21, 22)
    whole = Finding(Kind.DAMAGE, "file", "bad", 0, 30, 0, 9)
    assert list(join_adjacent([first, second, apart, other])) == [whole, apart, other]
    assert list(join_adjacent([first, "batch", second])) == [first, "batch", second]
