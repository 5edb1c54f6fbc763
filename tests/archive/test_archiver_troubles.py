"""Archiving where something is in the way: batches that nobody can open, disks without room,
damage; and whatever happens while a file is made."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from quackmq.archive import limits as archive_limits
from quackmq.archive.archiving.builder import LocalFileBuilder, WorkerDied
from quackmq.archive.archiving.pieces import BuildProgress, BuiltFile, LogPiece, UnknownProducers
from quackmq.errors import BrokerClosing, DamagedData, StorageError
from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey, Read, Slice
from quackmq.stores.local import LocalOptions
from tests.archive.pond import NO_PERMISSION, NO_ROOM, pond, put_some
from tests.kit.batches import sealed
from tests.kit.waiting import until

SMALL = LocalOptions(segment_bytes=4_096, region_bytes=512, tail_bytes=1_024)


# --- poison --------------------------------------------------------------------------------------


async def test_a_batch_that_nobody_can_open_is_kept_aside_and_archiving_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with pond(tmp_path / "data") as home:
        key = await home.create("ducks")
        poison = sealed(b"\x01no")
        await home.put(key, b"before")
        at = await home.put_raw(key, poison)
        await home.put(key, b"behind")
        last = await home.put_raw(key, poison)
        with caplog.at_level(logging.WARNING):
            done = await home.archiver.archive()
        assert (done.records, done.quarantined) == (2, 2)
        assert home.archiver.state().done.quarantined == 2
        present = home.manifest(key)
        assert [one.first_offset for one in present.quarantined] == [at, last]
        assert home.ranges(key) == [(0, 4)], "a file may end behind a batch that was kept aside"
        assert await home.log_begins(key) == 4
        assert f"offsets {at} to {at} cannot be decoded" in caplog.text
        raw = (tmp_path / "data/archive/ducks/0" / present.quarantined[0].name).read_bytes()
        assert raw[16:] == poison[16:], "it is kept as it came, but for the broker's stamp"


async def test_poison_that_was_trimmed_in_its_middle_is_kept_aside_for_what_is_left(
    tmp_path: Path,
) -> None:
    async with pond(tmp_path / "data") as home:
        key = await home.create("ducks")
        await home.put_raw(key, sealed(b"\x01no", count=4))
        await home.put(key, b"behind")
        await home.store.trim(key, 2)
        await home.archiver.archive()
        (aside,) = home.manifest(key).quarantined
        assert (aside.first_offset, aside.next_offset) == (2, 4)
        assert home.ranges(key) == [(2, 5)]


async def test_much_poison_ends_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_limits, "ARCHIVE_QUARANTINE_BYTES", 200)
    async with pond(tmp_path / "data") as home:
        key = await home.create("ducks")
        for _ in range(9):
            await home.put_raw(key, sealed(b"\x01no"))
        await home.archiver.archive()
        assert home.ranges(key) == [(0, 4), (4, 8), (8, 9)]
        assert len(home.manifest(key).quarantined) == 9


async def test_a_batch_that_ends_whoever_opens_it_is_found_and_kept_aside(tmp_path: Path) -> None:
    class Mortal(LocalFileBuilder):
        deaths = 0

        def add(
            self, piece: LogPiece, publishers: Mapping[int, str | None]
        ) -> BuildProgress | UnknownProducers:
            if b"deadly" in bytes(piece.data) and piece.undecodable_reason is None:
                self.deaths += 1
                self.free_memory()
                raise WorkerDied("it has ended")
            return super().add(piece, publishers)

    file_builder = Mortal()
    async with pond(tmp_path / "data", file_builder=file_builder) as home:
        key = await home.create("ducks", Policy(archive_bytes=1))
        put = await put_some(home, key, 10)
        put[await home.put(key, b"deadly")] = b"deadly"
        put |= await put_some(home, key, 10)
        for _ in range(5):
            await home.archiver.archive_due()
            home.clock.advance(archive_limits.ARCHIVE_RETRY_MAX_MS)
        assert file_builder.deaths == 2, "once over many batches, once over the one"
        (aside,) = home.manifest(key).quarantined
        assert (aside.first_offset, aside.next_offset) == (10, 11)
        assert "it has ended" in aside.reason
        assert home.ranges(key) == [(0, 10), (10, 21)]
        assert home.archiver.state().failing == 0
        assert await home.values(key) == put, "it is given as it came"


# --- when it cannot ------------------------------------------------------------------------------


async def test_without_room_the_log_is_kept_and_all_is_caught_up_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with pond(tmp_path / "data") as home:
        keys = [await home.create(name, Policy(archive_bytes=1)) for name in ("ducks", "geese")]
        put = {key: await put_some(home, key, 10) for key in keys}
        home.disk.error = NO_ROOM
        await home.archiver.archive_due()
        state = home.archiver.state()
        assert state.no_room is not None and "No space left" in state.no_room
        assert state.backlog_bytes > 0
        assert home.disk.failures == 1, "others try in vain"
        for _ in range(3):
            await home.archiver.archive_due()
        assert home.disk.failures == 1, "nobody waits"
        put[keys[0]][await home.put(keys[0], b"more")] = b"more"
        home.clock.advance(archive_limits.ARCHIVE_RETRY_MAX_MS)
        await home.archiver.archive_due()
        assert home.disk.failures == 2
        assert [await home.log_begins(key) for key in keys] == [0, 0]
        assert [await home.values(key) for key in keys] == list(put.values())
        assert caplog.text.count("could not be archived; its log is kept") == 1, "told too often"
        home.disk.error = None
        home.clock.advance(archive_limits.ARCHIVE_RETRY_MAX_MS)
        await home.archiver.archive_due()
        state = home.archiver.state()
        assert (state.no_room, state.failing, state.backlog_bytes) == (None, 0, 0)
        assert [await home.log_begins(key) for key in keys] == [11, 10]
        assert [await home.values(key) for key in keys] == list(put.values())


async def test_a_topic_deleted_while_there_is_no_room_does_not_end_the_wait_of_the_others(
    tmp_path: Path,
) -> None:
    async with pond(tmp_path / "data") as home:
        for name in ("ducks", "geese"):
            await put_some(home, await home.create(name, Policy(archive_bytes=1)), 10)
        home.disk.error = NO_ROOM
        await home.archiver.archive_due()
        (failed,) = home.archiver.state().failures
        home.archiver.forget(home.topics.pop(failed.topic))
        await home.archiver.archive_due()
        assert home.disk.failures == 1, "the other topic must wait for room"
        assert home.archiver.state().no_room is not None
        (other,) = home.topics
        home.archiver.forget(home.topics.pop(other))
        assert home.archiver.state().no_room is None, "no topic is left that could end the wait"


async def test_a_topic_that_may_not_be_written_keeps_no_other_from_being_archived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with pond(tmp_path / "data") as home:
        ducks, geese = [await home.create(name, Policy(archive_bytes=1)) for name in ("d", "g")]
        put = await put_some(home, ducks, 10)
        await put_some(home, geese, 10)
        home.disk.error, home.disk.where = NO_PERMISSION, "archive/d"
        await home.archiver.archive_due()
        assert home.ranges(geese) == [(0, 10)] and home.ranges(ducks) == []
        (failure,) = home.archiver.state().failures
        assert (failure.topic, failure.partition, failure.attempts) == ("d", 0, 1)
        assert "Permission denied" in failure.reason and "Permission denied" in caplog.text
        home.clock.advance(1_000)
        await home.archiver.archive_due()
        assert home.archiver.state().failures[0].attempts == 2
        home.clock.advance(1_000)
        await home.archiver.archive_due()
        assert home.archiver.state().failures[0].attempts == 2, "the wait does not grow"
        with pytest.raises(StorageError, match="Permission denied"):
            await home.archiver.archive("d")
        home.disk.error = None
        home.clock.advance(archive_limits.ARCHIVE_RETRY_MAX_MS)
        await home.archiver.archive_due()
        assert home.archiver.state().failing == 0
        assert home.ranges(ducks) == [(0, 10)]
        assert await home.values(ducks) == put


async def test_a_log_that_was_not_trimmed_is_trimmed_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pond(tmp_path / "data") as home:
        key = await home.create("ducks", Policy(archive_bytes=1))
        put = await put_some(home, key, 10)

        async def fails(key: PartitionKey, before: int) -> None:
            raise StorageError("the log cannot be trimmed")

        monkeypatch.setattr(home.store, "trim_log", fails)
        await home.archiver.archive_due()
        assert home.ranges(key) == [(0, 10)] and await home.log_begins(key) == 0
        assert home.archiver.state().failing == 1
        monkeypatch.undo()
        home.clock.advance(archive_limits.ARCHIVE_RETRY_MAX_MS)
        await home.archiver.archive_due()
        assert await home.log_begins(key) == 10
        assert await home.values(key) == put
        assert home.ranges(key) == [(0, 10)], "it is archived once"


async def test_damage_in_the_log_stops_its_partition_and_is_named(tmp_path: Path) -> None:
    own_files = dataclasses.replace(SMALL, packed_bytes=0)
    async with pond(tmp_path / "data", options=own_files) as home:
        key = await home.create("ducks", Policy(archive_bytes=1))
        put = await put_some(home, key, 100, size=100)
        await home.store.close()
    segments = sorted((tmp_path / "data/log").rglob("*.log"))
    assert len(segments) > 3
    with segments[1].open("r+b") as file:
        file.seek(300)
        file.write(b"\xff" * 8)
    async with pond(tmp_path / "data", options=own_files) as home:
        await home.archiver.archive_due()
        ((first, end),) = home.ranges(key)
        assert first == 0 < end < 100
        (failure,) = home.archiver.state().failures
        assert failure.code == "damaged_data" and "damaged" in failure.reason
        assert await home.log_begins(key) == end, "what is damaged stays where it is"
        with pytest.raises(DamagedData):
            await home.values(key)
        # Who lets go of the damaged range lets archiving go on.
        (beyond,) = [offset for offset in put if offset > end][5:6]
        await home.store.trim(key, beyond)
        home.clock.advance(archive_limits.ARCHIVE_RETRY_MAX_MS)
        await home.archiver.archive_due()
        assert home.ranges(key) == [(beyond, 100)]
        assert home.archiver.state().failing == 0
        assert await home.values(key) == {n: put[n] for n in put if n >= beyond}


async def test_a_log_that_gives_nothing_is_named_and_not_asked_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pond(tmp_path / "data") as home:
        key = await home.create("ducks", Policy(archive_bytes=1))
        await put_some(home, key, 10)
        asked = 0

        async def nothing(reads: Sequence[Read], **bounds: int) -> list[Slice]:
            nonlocal asked
            asked += 1
            return [Slice(read.key, (), 0, 0, 10) for read in reads]

        with monkeypatch.context() as patched:
            patched.setattr(home.store.inner, "read", nothing)
            await home.archiver.archive_due()
        assert asked == 1
        (failure,) = home.archiver.state().failures
        assert "no batch at offset 0" in failure.reason
        home.clock.advance(archive_limits.ARCHIVE_RETRY_MS)
        await home.archiver.archive_due()
        assert home.ranges(key) == [(0, 10)]


async def test_a_failing_file_builder_is_named_and_tried_again(tmp_path: Path) -> None:
    class Failing(LocalFileBuilder):
        fails = True

        def finish(self, version: int) -> BuiltFile:
            if self.fails:
                raise MemoryError("too much")
            return super().finish(version)

    file_builder = Failing()
    async with pond(tmp_path / "data", file_builder=file_builder) as home:
        key = await home.create("ducks", Policy(archive_bytes=1))
        put = await put_some(home, key, 10)
        await home.archiver.archive_due()
        assert home.archiver.state().failures[0].code == "MemoryError"
        file_builder.fails = False
        home.clock.advance(archive_limits.ARCHIVE_RETRY_MS)
        await home.archiver.archive_due()
        assert home.ranges(key) == [(0, 10)]
        assert await home.values(key) == put


# --- what happens meanwhile ----------------------------------------------------------------------


class Held(LocalFileBuilder):
    """Waits with a file's end until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waiting = threading.Event()
        self.may_go = threading.Event()

    def finish(self, version: int) -> BuiltFile:
        self.is_waiting.set()
        assert self.may_go.wait(timeout=30)
        return super().finish(version)

    async def until_waiting(self) -> None:
        await until(self.is_waiting.is_set)


@pytest.mark.parametrize("before", [3, 7, 10])
async def test_what_retention_trims_while_a_file_is_made_is_not_in_the_archive(
    tmp_path: Path, before: int
) -> None:
    file_builder = Held()
    async with pond(tmp_path / "data", file_builder=file_builder) as home:
        key = await home.create("ducks")
        put = await put_some(home, key, 10)
        archiving = asyncio.create_task(home.archiver.archive())
        await file_builder.until_waiting()
        trimming = asyncio.create_task(home.store.trim(key, before))
        await asyncio.sleep(0)
        file_builder.may_go.set()
        await archiving
        assert await trimming == before
        assert await home.values(key) == {n: value for n, value in put.items() if n >= before}
        await home.archiver.archive()
        assert home.manifest(key).first_offset == before
        assert await home.values(key) == {n: value for n, value in put.items() if n >= before}


async def test_a_topic_deleted_while_its_file_is_made_leaves_nothing(tmp_path: Path) -> None:
    file_builder = Held()
    async with pond(tmp_path / "data", file_builder=file_builder) as home:
        key = await home.create("ducks", Policy(archive_bytes=1))
        await put_some(home, key, 10)
        archiving = asyncio.create_task(home.archiver.archive_due())
        await file_builder.until_waiting()
        deleting = asyncio.create_task(home.store.delete_topic(key.topic_id))
        topic = home.topics.pop("ducks")
        file_builder.may_go.set()
        await deleting
        home.archiver.forget(topic)
        await archiving
        state = home.archiver.state()
        assert (state.failing, state.backlog_bytes) == (0, 0)
        assert not list((tmp_path / "data/archive").rglob("*.parquet"))
        again = await home.create("ducks", Policy(archive_bytes=1))
        put = await put_some(home, again, 5)
        await home.archiver.archive_due()
        assert await home.values(again) == put and home.ranges(again) == [(0, 5)]


async def test_poison_that_retention_trims_while_a_file_is_made_is_not_brought(
    tmp_path: Path,
) -> None:
    file_builder = Held()
    async with pond(tmp_path / "data", file_builder=file_builder) as home:
        key = await home.create("ducks")
        for number in range(3):
            await home.put_raw(key, sealed(b"\x01no"))
            await home.put(key, b"%d" % number)
        archiving = asyncio.create_task(home.archiver.archive())
        await file_builder.until_waiting()
        trimming = asyncio.create_task(home.store.trim(key, 3))
        await asyncio.sleep(0)
        file_builder.may_go.set()
        await archiving
        await trimming
        assert [one.first_offset for one in home.manifest(key).quarantined] == [4]
        assert home.manifest(key).first_offset == 3 and home.archiver.state().failing == 0


async def test_a_topic_deleted_while_its_file_fails_does_not_fail_for_ever(tmp_path: Path) -> None:
    class Gone(Held):
        def finish(self, version: int) -> BuiltFile:
            super().finish(version)
            raise WorkerDied("killed")

    file_builder = Gone()
    async with pond(tmp_path / "data", file_builder=file_builder) as home:
        key = await home.create("ducks", Policy(archive_bytes=1))
        await put_some(home, key, 10)
        archiving = asyncio.create_task(home.archiver.archive_due())
        await file_builder.until_waiting()
        deleting = asyncio.create_task(home.store.delete_topic(key.topic_id))
        home.archiver.forget(home.topics.pop("ducks"))
        file_builder.may_go.set()
        await archiving
        await deleting
        assert home.archiver.state().failing == 0


async def test_an_archiver_that_closes_gives_up_the_file_and_says_so(tmp_path: Path) -> None:
    file_builder = Held()
    async with pond(tmp_path / "data", file_builder=file_builder) as home:
        key = await home.create("ducks")
        await put_some(home, key, 10)
        archiving = asyncio.create_task(home.archiver.archive())
        await file_builder.until_waiting()
        closing = asyncio.create_task(home.archiver.close())
        with pytest.raises(BrokerClosing):
            await archiving
        await closing
        file_builder.may_go.set()
        with pytest.raises(BrokerClosing):
            await home.archiver.archive()
    async with pond(tmp_path / "data") as home:
        assert home.ranges(key) == []
        assert len(await home.values(key)) == 10


async def test_archiving_goes_on_where_whoever_asked_for_it_has_left(tmp_path: Path) -> None:
    file_builder = Held()
    async with pond(tmp_path / "data", file_builder=file_builder) as home:
        key = await home.create("ducks")
        await put_some(home, key, 10)
        archiving = asyncio.create_task(home.archiver.archive())
        await file_builder.until_waiting()
        archiving.cancel()
        await asyncio.wait([archiving])
        file_builder.may_go.set()
        await until(lambda: home.is_archived_to(key, 10))
        assert home.ranges(key) == [(0, 10)]


async def test_what_is_published_while_a_file_is_made_is_published_at_once(tmp_path: Path) -> None:
    file_builder = Held()
    async with pond(tmp_path / "data", file_builder=file_builder) as home:
        key = await home.create("ducks")
        put = await put_some(home, key, 10)
        archiving = asyncio.create_task(home.archiver.archive())
        await file_builder.until_waiting()
        put |= {await home.put(key, b"new"): b"new"}
        assert await home.values(key) == put
        file_builder.may_go.set()
        await archiving
        assert home.ranges(key) == [(0, 10)]
        assert await home.values(key) == put


async def test_a_changed_policy_counts_from_the_next_look(tmp_path: Path) -> None:
    async with pond(tmp_path / "data") as home:
        key = await home.create("ducks", Policy(archive_bytes=1, archive_after_ms=None))
        await put_some(home, key, 10)
        topic = home.topics["ducks"]
        never = Policy(archive_bytes=None, archive_after_ms=None)
        home.topics["ducks"] = dataclasses.replace(topic, policy=never)
        assert not await home.archiver.archive_due()
        home.topics["ducks"] = topic
        assert await home.archiver.archive_due()
