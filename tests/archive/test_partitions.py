"""Manifests by partition: one change at a time, pins, what fails, what a crash leaves, deletion."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
import traceback
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from quackmq.archive import layout as files
from quackmq.archive import limits as archive_limits
from quackmq.archive import manifest
from quackmq.archive.manifest import Manifest
from quackmq.disk.interface import Disk
from quackmq.errors import (
    BrokerClosing,
    DamagedData,
    InvalidRequest,
    LimitReached,
    OffsetOutOfRange,
    StorageError,
    UnknownPartition,
    UnknownTopic,
)
from quackmq.model.topic import PartitionKey
from tests.archive.archiving import archive, topic_of
from tests.archive.home import VALUES, FailingDisk, Home, flip
from tests.kit.support import let_others_run
from tests.stores.calls import read_one


@pytest_asyncio.fixture
async def home(tmp_path: Path) -> AsyncIterator[Home]:
    home = Home(tmp_path)
    await home.open()
    yield home
    await home.store.close()


# --- changes ---------------------------------------------------------------------------------


async def test_what_a_change_commits_counts_at_once_and_after_a_restart(home: Home) -> None:
    key = await home.filled()
    assert home.registry.manifest(key) is None
    made = await archive(home.store, key, 4)
    assert (made.version, made.first_offset, made.next_offset) == (1, 0, 4)
    assert home.registry.manifest(key) == made
    await archive(home.store, key, 9)
    assert await home.first_in_log(key) == 9
    assert await home.values(key) == VALUES
    await home.reopen()
    again = home.registry.manifest(key)
    assert again is not None and (again.version, again.next_offset) == (2, 9)
    assert await home.values(key) == VALUES


async def test_changes_of_one_partition_come_one_after_the_other(home: Home) -> None:
    key = await home.filled()
    await archive(home.store, key, 9)
    versions: list[int] = []

    def trimmed(present: manifest.Manifest) -> manifest.Manifest:
        versions.append(present.version)
        return manifest.trim(present, present.first_offset + 1)

    await asyncio.gather(*(home.registry.change(key, trimmed) for _ in range(8)))
    assert versions == list(range(1, 9))
    assert (await home.store.offsets(key)).first == 8


async def test_what_make_raises_changes_nothing(home: Home) -> None:
    key = await home.filled()
    made = await archive(home.store, key, 4)

    def refuse(present: manifest.Manifest) -> manifest.Manifest:
        raise InvalidRequest("no")

    done = list(home.disk.done)
    with pytest.raises(InvalidRequest):
        await home.registry.change(key, refuse, [("x", b"x")])
    assert await home.registry.change(key, lambda present: present) is made
    assert home.disk.done == done


async def test_a_change_brings_just_the_files_that_it_lists(home: Home) -> None:
    key = await home.filled()
    await archive(home.store, key, 4)
    for data in ([("_quarantined-00000000000000000000-00000001.batch", b"x")], [("other", b"x")]):
        with pytest.raises(InvalidRequest):
            await home.registry.change(key, lambda present: manifest.trim(present, 1), data)
    with pytest.raises(InvalidRequest):
        await home.registry.change(key, lambda present: manifest.empty(key, "ducks", 0))
    with pytest.raises(UnknownPartition):
        await home.registry.change(PartitionKey(key.topic_id, 1), lambda present: present)


async def test_a_change_is_carried_out_also_if_nobody_waits_for_it(home: Home) -> None:
    key = await home.filled()
    await archive(home.store, key, 9)
    change = asyncio.create_task(
        home.registry.change(key, lambda present: manifest.trim(present, 3))
    )
    await asyncio.sleep(0)
    change.cancel()
    with pytest.raises(asyncio.CancelledError):
        await change
    await home.at_rest()
    present = home.registry.manifest(key)
    assert present is not None and present.first_offset == 3
    await home.reopen()
    assert home.registry.manifest(key) == present


# --- pins and sweeping -----------------------------------------------------------------------


async def test_what_is_dropped_is_removed_when_no_pin_has_it(home: Home) -> None:
    key = await home.filled()
    await archive(home.store, key, 4)
    pins = [home.registry.pin(key), home.registry.pin(key)]
    before = home.names()
    await archive(home.store, key, 9)
    await home.store.trim(key, 9)
    await home.at_rest()
    assert home.names() == before
    assert pins[0].manifest.next_offset == 4
    assert len(home.registry.reader.read(pins[0].manifest, 0, 10**6).batches) == 1
    pins[0].release()
    pins[0].release()
    await home.at_rest()
    assert home.names() == before
    with pins[1]:
        pass
    await home.at_rest()
    assert home.names() == ["_manifest.json"]


async def test_pins_are_bounded_and_come_back(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_limits, "ARCHIVE_PINS", 2)
    key = await home.filled()
    await archive(home.store, key, 4)
    held = [home.registry.pin(key), home.registry.pin(key)]
    with pytest.raises(LimitReached):
        home.registry.pin(key)
    held.pop().release()
    home.registry.pin(key).release()
    with pytest.raises(UnknownPartition):
        home.registry.pin(PartitionKey(key.topic_id, 5))


async def test_what_a_crash_left_is_swept_at_the_next_opening(home: Home) -> None:
    key = await home.filled()
    await archive(home.store, key, 4)
    kept = home.names()
    orphan = manifest.file_name(4, 2)
    for name in (orphan, f"_new-{orphan}", "_new-_manifest.json", "notes.txt"):
        home.path("ducks", "0", name).write_bytes(b"half")
    await home.reopen()
    assert home.names() == sorted([*kept, "notes.txt"])


# --- what fails ------------------------------------------------------------------------------


async def test_a_change_that_fails_at_any_step_counts_for_nothing_and_can_be_made_again(
    home: Home,
) -> None:
    """No room, no permission: the log is kept, and it catches up by itself."""
    key = await home.filled()
    await archive(home.store, key, 2)
    for step in range(len(["rename the file", "sync", "rename the manifest", "sync"])):
        present = home.registry.manifest(key)
        assert present is not None
        home.disk.done.clear()
        home.disk.fails_at = step
        with pytest.raises(StorageError) as failed:
            await archive(home.store, key, 5)
        assert isinstance(failed.value.__cause__, OSError)
        now = home.registry.manifest(key)
        assert now is not None
        assert (now.files, now.next_offset) == (present.files, 2)
        assert now.version == present.version + 1, "the name of what failed is given again"
        assert await home.first_in_log(key) == 2
        assert await home.values(key) == VALUES
    home.disk.fails_at = None
    await archive(home.store, key, 5)
    await home.at_rest()
    assert len(home.names()) == 3, "what failed left something behind"
    assert await home.first_in_log(key) == 5
    await home.reopen()
    assert await home.values(key) == VALUES


async def test_the_manifest_that_a_failed_change_left_is_as_good_as_the_one_before(
    home: Home,
) -> None:
    """Its last step fails, so its manifest is in place; the next opening takes it up."""
    key = await home.filled()
    await archive(home.store, key, 2)
    home.disk.done.clear()
    home.disk.fails_at = 3
    with pytest.raises(StorageError):
        await archive(home.store, key, 5)
    assert home.disk.done[-1] == "sync archive/ducks/0"
    home.disk.fails_at = None
    await home.reopen()
    present = home.registry.manifest(key)
    assert present is not None and (present.version, present.next_offset) == (2, 5)
    assert await home.first_in_log(key) == 5
    assert await home.values(key) == VALUES


async def test_what_a_failed_change_left_brings_nothing_back_that_was_trimmed(home: Home) -> None:
    key = await home.filled()
    await archive(home.store, key, 0)
    home.disk.done.clear()
    home.disk.fails_at = 3
    with pytest.raises(StorageError):
        await archive(home.store, key, 5)
    home.disk.fails_at = None
    assert await home.store.trim(key, 3) == 3
    await home.reopen()
    assert (await home.store.offsets(key)).first == 3
    assert await home.values(key) == VALUES[3:]


async def test_a_partition_whose_archive_cannot_be_begun_is_trimmed_all_the_same(
    home: Home,
) -> None:
    """Nothing of it is archived: letting go of the log may be what makes room."""
    key = await home.filled()
    home.disk.fails_at = 0
    with pytest.raises(StorageError):
        await archive(home.store, key, 4)
    assert list(home.registry.problems()) == [key]
    assert await home.store.trim(key, 3) == 3
    assert isinstance((await read_one(home.store, key, 2)).error, OffsetOutOfRange)
    home.disk.fails_at = None
    made = await archive(home.store, key, 6)
    assert (made.first_offset, made.next_offset) == (3, 6)
    assert home.registry.problems() == {}
    assert await home.values(key) == VALUES[3:]


async def test_files_that_cannot_be_removed_are_removed_later(home: Home) -> None:
    key = await home.filled()
    await archive(home.store, key, 4)
    home.disk.done.clear()
    home.disk.fails_at = len(["sync", "rename manifest", "sync"])
    await home.store.trim(key, 4)
    await home.at_rest()
    assert home.disk.done[-1].startswith("remove ")
    assert len(home.names()) == 2
    home.disk.fails_at = None
    await home.reopen()
    assert home.names() == ["_manifest.json"]


# --- log and archive in step -----------------------------------------------------------------


async def test_a_log_that_was_not_trimmed_is_at_the_next_opening(home: Home) -> None:
    key = await home.filled()
    await archive(home.store, key, 6, trims=False)
    assert await home.first_in_log(key) == 0
    await home.reopen()
    assert await home.first_in_log(key) == 6
    assert await home.values(key) == VALUES


async def test_the_log_is_not_let_go_of_where_the_archive_is_damaged(home: Home) -> None:
    key = await home.filled()
    made = await archive(home.store, key, 6, trims=False)
    flip(home.path("ducks", "0", made.files[0].name), 10)
    await home.reopen()
    assert isinstance(home.registry.problem(key), DamagedData)
    assert await home.first_in_log(key) == 0
    assert await home.values(key) == VALUES


async def test_a_trim_that_reached_only_the_archive_reaches_the_log_at_the_next_opening(
    home: Home,
) -> None:
    key = await home.filled()
    await archive(home.store, key, 4)
    await home.registry.change(key, lambda present: manifest.trim(present, 7))
    assert (await home.store.offsets(key)).first == 7
    part = await read_one(home.store, key, 6)
    assert isinstance(part.error, OffsetOutOfRange) and not part.chunks
    await home.reopen()
    assert await home.first_in_log(key) == 7
    assert await home.values(key) == VALUES[7:]


async def test_an_empty_archive_begins_where_the_log_does_without_a_write(home: Home) -> None:
    key = await home.filled()
    await home.registry.open_partition(await topic_of(home.store, key), key, 0)
    done = list(home.disk.done)
    assert await home.store.trim(key, 3) == 3
    assert await home.store.trim(key, 5) == 5
    assert home.disk.done == done
    made = await archive(home.store, key, 7)
    assert (made.first_offset, made.next_offset) == (5, 7)
    await home.store.trim(key, 7)
    await home.store.trim(key, 8)
    await home.reopen()
    present = home.registry.manifest(key)
    assert present is not None and present.next_offset == 8
    assert (await archive(home.store, key)).files[0].first_offset == 8


async def test_what_is_missing_between_archive_and_log_is_named(home: Home) -> None:
    """As after an old copy of the archive was put in the place of the present one."""
    key = await home.filled()
    await archive(home.store, key, 3)
    shutil.copytree(home.path(), home.root / "copy")
    await archive(home.store, key, 6)
    await home.store.close()
    shutil.rmtree(home.path())
    shutil.copytree(home.root / "copy", home.path())
    shutil.rmtree(home.root / "copy")
    await home.open()
    assert "the records between are missing" in str(home.registry.problem(key))
    assert list(home.registry.problems()) == [key]
    assert (await home.store.offsets(key)).first == 0
    for offset in (3, 5):
        part = await read_one(home.store, key, offset)
        assert isinstance(part.error, DamagedData) and part.error.next_offset == 6
    assert (await read_one(home.store, key, 0)).error is None
    assert (await read_one(home.store, key, 6)).error is None
    with pytest.raises(DamagedData):
        await archive(home.store, key)
    with pytest.raises(DamagedData):
        await home.store.trim(key, 2)
    assert await home.store.trim(key, 6) == 6
    assert home.registry.problem(key) is None
    await archive(home.store, key)
    await home.reopen()
    assert await home.values(key) == VALUES[6:]


# --- damage ----------------------------------------------------------------------------------


async def test_a_damaged_manifest_keeps_nobody_from_opening_and_its_log_is_served(
    home: Home,
) -> None:
    key = await home.filled()
    other = await home.filled("geese")
    for each in (key, other):
        await archive(home.store, each, 4)
    flip(home.path("ducks", "0", "_manifest.json"), 30)
    mended = home.path("ducks", "0", "_manifest.json").read_bytes()
    await home.reopen()
    assert list(home.registry.problems()) == [key]
    assert await home.values(other) == VALUES
    assert (await home.store.offsets(key)).first == 4
    part = await read_one(home.store, key, 4)
    assert part.error is None and part.chunks
    part = await read_one(home.store, key, 1)
    assert isinstance(part.error, DamagedData) and part.error.next_offset == 4
    for call in (home.store.trim(key, 6), archive(home.store, key)):
        with pytest.raises(DamagedData):
            await call
    await home.store.trim_log(key, 10)
    assert await home.first_in_log(key) == 4
    # Put right while the broker runs, it is taken up by whoever archives next.
    flip(home.path("ducks", "0", "_manifest.json"), 30)
    assert home.path("ducks", "0", "_manifest.json").read_bytes() != mended
    await archive(home.store, key)
    assert home.registry.problems() == {}
    assert await home.values(key) == VALUES


async def test_what_is_wrong_takes_no_more_memory_each_time_that_it_is_told(home: Home) -> None:
    """An error that is raised again keeps the frames of every time before."""
    key = await home.filled()
    await archive(home.store, key, 4)
    await home.store.close()
    flip(home.path("ducks", "0", "_manifest.json"), 20)
    await home.open()
    problem = home.registry.problem(key)
    assert problem is not None
    depths = []
    for _ in range(20):
        with pytest.raises(DamagedData):
            await home.store.trim(key, 2)
        depths.append(len(list(traceback.walk_tb(problem.__traceback__))))
    assert len(set(depths)) == 1


async def test_a_missing_manifest_is_damage_where_the_log_has_no_more_what_is_in_the_files(
    home: Home,
) -> None:
    key = await home.filled()
    await archive(home.store, key, 4)
    os.remove(home.path("ducks", "0", "_manifest.json"))
    names = home.names()
    await home.reopen()
    assert "no _manifest.json" in str(home.registry.problem(key))
    assert home.names() == names


async def test_files_that_never_got_a_manifest_are_made_again(home: Home) -> None:
    key = await home.filled()
    await archive(home.store, key, 4, trims=False)
    os.remove(home.path("ducks", "0", "_manifest.json"))
    await home.reopen()
    assert home.registry.problem(key) is None
    await archive(home.store, key, 6)
    assert await home.values(key) == VALUES


async def test_an_archive_that_cannot_be_read_keeps_the_log_and_is_taken_up_later(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await home.filled()
    await archive(home.store, key, 4)
    await home.store.close()
    real_list = FailingDisk.list

    def refuse(disk: FailingDisk, path: str) -> list[str]:
        if path == files.ARCHIVE:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real_list(disk, path)

    monkeypatch.setattr(FailingDisk, "list", refuse)
    await home.open()
    assert home.registry.failure is not None
    assert type((await read_one(home.store, key, 0)).error) is StorageError  # not to be gone over
    assert (await read_one(home.store, key, 4)).error is None
    for call in (home.store.trim(key, 6), archive(home.store, key)):
        with pytest.raises(StorageError):
            await call
    monkeypatch.setattr(FailingDisk, "list", real_list)
    topic = await topic_of(home.store, key)
    opening = home.registry.open_partition
    await asyncio.gather(opening(topic, key, 0), opening(topic, key, 0))
    await archive(home.store, key)
    assert home.registry.problem(key) is None
    assert await home.values(key) == VALUES


async def test_while_an_archive_is_taken_up_later_nothing_counts_as_gone(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partitions are opened one after the other. Who asks for what is archived in one of them is
    not told that it was let go of, and no log is trimmed as if there were no archive."""
    keys = [await home.filled(name) for name in ("ducks", "geese")]
    for key in keys:
        await archive(home.store, key, 4)
    await home.store.close()
    real_scan, real_open = files.scan_archive, files.open_partition
    is_opening, may_open = threading.Event(), threading.Event()

    def refuse(*_: object) -> files.ArchiveScan:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), files.ARCHIVE)

    def open_late(
        disk: Disk, key: PartitionKey, topic: str, first_offset: int, manifest_name: str
    ) -> Manifest:
        is_opening.set()
        may_open.wait()
        return real_open(disk, key, topic, first_offset, manifest_name)

    monkeypatch.setattr(files, "scan_archive", refuse)
    await home.open()
    monkeypatch.setattr(files, "scan_archive", real_scan)
    monkeypatch.setattr(files, "open_partition", open_late)
    topic = await topic_of(home.store, keys[0])
    opening = asyncio.create_task(home.registry.open_partition(topic, keys[0], 0))
    try:
        while not is_opening.is_set():
            await asyncio.sleep(0)
        for key in keys:
            assert type((await read_one(home.store, key, 0)).error) is StorageError
        trimming = [asyncio.create_task(home.store.trim(key, 6)) for key in keys]
        await let_others_run()
    finally:
        may_open.set()
    await opening
    await asyncio.gather(*trimming, return_exceptions=True)
    for key, trimmed in zip(keys, trimming, strict=True):
        assert home.registry.problem(key) is None
        is_trimmed = trimmed.exception() is None
        assert await home.values(key) == VALUES[6 if is_trimmed else 0 :]


async def test_a_directory_that_does_not_say_whose_it_is_is_left_alone(home: Home) -> None:
    key = await home.filled()
    await archive(home.store, key, 4)
    home.path("ducks", "_topic.json").write_bytes(b"{}")
    names = home.names()
    await home.reopen()
    assert isinstance(home.registry.problem(key), DamagedData)
    assert home.names() == names
    await home.store.delete_topic(key.topic_id)
    assert home.names() == names


# --- topics ----------------------------------------------------------------------------------


async def test_the_archive_of_a_deleted_topic_is_removed(home: Home) -> None:
    key = await home.filled()
    other = await home.filled("geese")
    for each in (key, other):
        await archive(home.store, each, 4)
    await home.store.delete_topic(key.topic_id)
    assert os.listdir(home.path()) == ["geese"]
    assert home.registry.manifest(key) is None
    with pytest.raises(UnknownTopic):
        await home.store.offsets(key)
    assert isinstance((await read_one(home.store, key, 0)).error, UnknownTopic)


async def test_a_topic_made_anew_inherits_nothing(home: Home) -> None:
    key = await home.filled()
    await archive(home.store, key, 4)
    await home.store.inner.delete_topic(key.topic_id)  # and the process ends before the rest
    again = await home.filled()
    await home.reopen()
    assert home.registry.manifest(again) is None
    assert not os.listdir(home.path())
    await archive(home.store, again, 5)
    assert await home.values(again) == VALUES


async def test_a_name_is_taken_also_if_its_last_topic_left_its_archive(home: Home) -> None:
    key = await home.filled()
    await archive(home.store, key, 4)
    await home.store.inner.delete_topic(key.topic_id)
    again = await home.filled()
    await archive(home.store, again, 5)
    assert os.listdir(home.path()) == ["ducks"]
    assert await home.values(again) == VALUES


async def test_a_topic_that_goes_while_it_is_archived_leaves_nothing(home: Home) -> None:
    for turns in range(12):
        key = await home.filled()
        archiving = asyncio.create_task(archive(home.store, key, 4))
        await let_others_run(turns * 5)
        await home.store.delete_topic(key.topic_id)
        (outcome,) = await asyncio.gather(archiving, return_exceptions=True)
        assert isinstance(outcome, manifest.Manifest | UnknownTopic | UnknownPartition)
        await home.at_rest()
        assert not home.path().exists() or not os.listdir(home.path())


async def test_nothing_is_opened_for_a_topic_that_is_gone(home: Home) -> None:
    key = await home.filled()
    topic = await topic_of(home.store, key)
    await home.store.delete_topic(key.topic_id)
    with pytest.raises(UnknownTopic):
        await home.registry.open_partition(topic, key, 0)
    assert not home.path().exists()
    assert not home.registry


# --- the end ---------------------------------------------------------------------------------


async def test_closing_finishes_what_was_begun_and_takes_nothing_more(home: Home) -> None:
    key = await home.filled()
    await archive(home.store, key, 9)
    pin = home.registry.pin(key)
    change = asyncio.create_task(
        home.registry.change(key, lambda present: manifest.trim(present, 9))
    )
    await asyncio.sleep(0)
    await home.store.close()
    assert (await change).first_offset == 9
    pin.release()
    with pytest.raises(BrokerClosing):
        await home.registry.change(key, lambda present: present)
    with pytest.raises(BrokerClosing):
        home.registry.pin(key)
    await home.open()
    assert home.names() == ["_manifest.json"]
