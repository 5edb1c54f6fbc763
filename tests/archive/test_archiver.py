"""From the log to the archive (Q7, Q8): what goes, when, what stays, and through what memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from quackmq import limits
from quackmq.archive import limits as archive_limits
from quackmq.archive.archiving.buffers import Buffers, FilledBuffer
from quackmq.archive.archiving.builder import LocalFileBuilder
from quackmq.archive.archiving.pieces import BuildProgress, LogPiece, UnknownProducers
from quackmq.errors import UnknownTopic
from quackmq.model.log_transactions import Marker
from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey
from tests.archive.pond import pond, put_some
from tests.kit.support import START_MS
from tests.kit.waiting import until

# --- what goes -----------------------------------------------------------------------------------


async def test_all_that_is_put_goes_to_the_archive_and_out_of_the_log(tmp_path: Path) -> None:
    """Q8: the archive holds the complete history."""
    async with pond(tmp_path / "data") as home:
        key = await home.create("ducks")
        put = await put_some(home, key, 50)
        done = await home.archiver.archive("ducks")
        assert (done.files, done.records) == (1, 50)
        assert home.ranges(key) == [(0, 50)]
        assert await home.log_begins(key) == 50
        assert await home.values(key) == put
        put[await home.put(key, b"live")] = b"live"
        assert await home.values(key) == put


async def test_rows_say_when_they_were_appended_and_by_whom(tmp_path: Path) -> None:
    async with pond(tmp_path / "data") as home:
        key = await home.create("ducks")
        home.publishers[7] = "mill"
        await home.put(key, b"plain")
        home.clock.advance(5_000)
        await home.begin(key, 7, 0, b"named")
        await home.begin(key, 8, 0, b"nameless")
        for producer_id in (7, 8):
            await home.end(key, producer_id, Marker.COMMIT)
        await home.archiver.archive()
        (file,) = (tmp_path / "data/archive/ducks/0").glob("*.parquet")
        rows = pq.read_table(file).select(["value", "append_time", "publisher", "producer_id"])
        seconds = [time.timestamp() - START_MS / 1000 for time in rows["append_time"].to_pylist()]
        assert seconds == [0, 5, 5]
        assert rows["publisher"].to_pylist() == [None, "mill", None]
        assert rows["producer_id"].to_pylist() == [None, 7, 8]


async def test_what_is_not_decided_stays_in_the_log(tmp_path: Path) -> None:
    async with pond(tmp_path / "data") as home:
        key = await home.create("ducks")
        await home.put(key, b"before")
        await home.begin(key, 7, 0, b"open")
        await home.put(key, b"behind")
        await home.archiver.archive()
        assert home.ranges(key) == [(0, 1)]
        await home.end(key, 7, Marker.COMMIT)
        await home.archiver.archive()
        assert home.ranges(key) == [(0, 1), (1, 3)]
        assert await home.values(key) == {0: b"before", 1: b"open", 2: b"behind"}


async def test_aborted_records_are_left_out_and_no_file_ends_in_a_hole(tmp_path: Path) -> None:
    async with pond(tmp_path / "data") as home:
        key = await home.create("ducks")
        await home.begin(key, 7, 0, b"aborted")
        await home.put(key, b"kept")
        await home.begin(key, 7, 1, b"aborted too")
        await home.end(key, 7, Marker.ABORT)
        await home.archiver.archive()
        assert home.ranges(key) == [(0, 2)]
        assert home.manifest(key).records == 1
        assert await home.log_begins(key) == 2
        assert await home.values(key, 0) == {1: b"kept"}
        # The marker is passed over, and is in the range of the next file.
        await home.put(key, b"later")
        await home.archiver.archive()
        assert home.ranges(key) == [(0, 2), (2, 5)]
        assert await home.values(key) == {1: b"kept", 4: b"later"}


async def test_a_hole_alone_makes_no_file_and_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = Policy(archive_after_ms=0, archive_bytes=1)
    async with pond(tmp_path / "data") as home:
        key = await home.create("ducks", at_once)
        await home.begin(key, 7, 0, b"aborted")
        await home.end(key, 7, Marker.ABORT)
        assert await home.archiver.archive_due()
        assert home.ranges(key) == []
        assert not await home.archiver.archive_due(), "the hole is due again"
        await home.put(key, b"kept")
        assert await home.archiver.archive_due()
        assert home.ranges(key) == [(0, 3)]


async def test_of_a_batch_that_was_trimmed_in_its_middle_only_the_rest_is_archived(
    tmp_path: Path,
) -> None:
    async with pond(tmp_path / "data") as home:
        key = await home.create("ducks")
        await home.put(key, b"0", b"1", b"2", b"3")
        await home.store.trim(key, 2)
        await home.archiver.archive()
        assert home.ranges(key) == [(2, 4)]
        assert await home.values(key) == {2: b"2", 3: b"3"}


async def test_a_backlog_becomes_files_of_a_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_limits, "ARCHIVE_NEW_FILE_BYTES", 2_000)
    monkeypatch.setattr(archive_limits, "ARCHIVE_ROW_GROUP_ROWS", 20)
    monkeypatch.setattr(archive_limits, "ARCHIVE_GROUP_BATCHES", 5)
    monkeypatch.setattr(archive_limits, "ARCHIVE_FILL_BYTES", 2_000)
    monkeypatch.setattr(archive_limits, "ARCHIVER_READ_BYTES", 1_000)
    async with pond(tmp_path / "data") as home:
        key = await home.create("ducks")
        put = await put_some(home, key, 200)
        done = await home.archiver.archive()
        ranges = home.ranges(key)
        assert len(ranges) == done.files > 3
        assert ranges[0][0] == 0 and ranges[-1][1] == 200
        assert await home.values(key) == put
        assert await home.log_begins(key) == 200


async def test_a_turn_ends_when_much_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_limits, "ARCHIVE_RUN_BYTES", 3_000)
    monkeypatch.setattr(archive_limits, "ARCHIVE_FILL_BYTES", 1_000)
    monkeypatch.setattr(archive_limits, "ARCHIVER_READ_BYTES", 1_000)
    async with pond(tmp_path / "data") as home:
        key = await home.create("ducks")
        put = await put_some(home, key, 100)
        await home.archiver.archive()
        assert len(home.ranges(key)) > 1
        assert await home.values(key) == put


async def test_between_two_pieces_it_pauses_while_somebody_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q8: archiving does not hold publishing up; and all of it is archived in the end."""
    monkeypatch.setattr(archive_limits, "ARCHIVE_FILL_BYTES", 500)
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        if seconds:
            pauses.append(seconds)
        await sleep(0)

    async with pond(tmp_path / "data") as home:
        key = await home.create("ducks")
        put = await put_some(home, key, 50)
        monkeypatch.setattr(asyncio, "sleep", noted)
        await home.archiver.archive("ducks")
        assert not pauses, "nobody publishes"
        put |= await put_some(home, key, 50)
        monkeypatch.setattr(type(home.store), "pending_bytes", 1)
        done = await home.archiver.archive("ducks")
        assert done.records == 50
        assert len(pauses) >= 3
        assert max(pauses) <= archive_limits.ARCHIVE_PAUSE_MS / 1000
        assert await home.values(key) == put


# --- when ----------------------------------------------------------------------------------------


async def test_a_partition_is_archived_when_enough_of_it_is_ready(tmp_path: Path) -> None:
    async with pond(tmp_path / "data") as home:
        key = await home.create("ducks", Policy(archive_bytes=2_000, archive_after_ms=None))
        await put_some(home, key, 15)
        assert not await home.archiver.archive_due()
        assert 1_000 < home.archiver.state().backlog_bytes < 2_000
        await put_some(home, key, 15)
        assert await home.archiver.archive_due()
        assert home.ranges(key) == [(0, 30)]
        assert home.archiver.state().backlog_bytes == 0
        await put_some(home, key, 15)
        assert not await home.archiver.archive_due(), "what is archived counts again"


async def test_a_partition_is_archived_when_its_oldest_is_old_enough(tmp_path: Path) -> None:
    """By when it was appended, whatever its own timestamp says."""
    async with pond(tmp_path / "data") as home:
        key = await home.create("ducks", Policy(archive_after_ms=10_000))
        await home.put(key, b"first")
        home.clock.advance(9_999)
        await home.put(key, b"second")
        assert not await home.archiver.archive_due()
        home.clock.advance(1)
        assert await home.archiver.archive_due()
        assert home.ranges(key) == [(0, 2)]
        await home.put(key, b"third")
        home.clock.advance(9_999)
        assert not await home.archiver.archive_due()
        home.clock.advance(1)
        assert await home.archiver.archive_due()
        assert home.ranges(key) == [(0, 2), (2, 3)]


async def test_a_topic_without_thresholds_is_archived_only_when_told_to(tmp_path: Path) -> None:
    async with pond(tmp_path / "data") as home:
        key = await home.create("ducks", Policy(archive_after_ms=None, archive_bytes=None))
        await put_some(home, key, 10)
        home.clock.advance(10**12)
        assert not await home.archiver.archive_due()
        assert (await home.archiver.archive("ducks")).records == 10


async def test_topics_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long backlog of one keeps no other waiting for more than a file."""
    monkeypatch.setattr(archive_limits, "ARCHIVE_RUN_BYTES", 1)
    monkeypatch.setattr(archive_limits, "ARCHIVE_FILL_BYTES", 500)
    monkeypatch.setattr(archive_limits, "ARCHIVER_READ_BYTES", 500)
    begun: list[str] = []

    class Watched(LocalFileBuilder):
        def begin(self, key: PartitionKey, topic: str, first_offset: int) -> None:
            begun.append(topic)
            super().begin(key, topic, first_offset)

    # Looking for others between any two turns does not change whose turn it is.
    monkeypatch.setattr(archive_limits, "ARCHIVE_CHECK_MS", 0.001)
    async with pond(tmp_path / "data", file_builder=Watched()) as home:
        for name in ("ducks", "geese"):
            key = await home.create(name, Policy(archive_bytes=1))
            await put_some(home, key, 30)
        await home.archiver.archive_due()
        assert begun[:6] == ["ducks", "geese"] * 3
        assert home.archiver.state().backlog_bytes == 0


async def test_an_archiver_that_runs_finds_what_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_limits, "ARCHIVE_CHECK_MS", 1)
    async with pond(tmp_path / "data") as home:
        running = asyncio.create_task(home.archiver.run())
        key = await home.create("ducks", Policy(archive_bytes=1))
        put = await put_some(home, key, 20)
        await until(lambda: home.is_archived_to(key, 20))
        assert await home.values(key) == put
        running.cancel()
        await asyncio.wait([running])


async def test_every_partition_is_looked_at_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_limits, "ARCHIVE_CHECKS", 3)
    async with pond(tmp_path / "data") as home:
        keys = [await home.create(f"ducks-{n}", Policy(archive_bytes=1)) for n in range(10)]
        for key in keys:
            await home.put(key, b"quack")
        for _ in range(5):
            await home.archiver.archive_due()
        assert all(home.ranges(key) == [(0, 1)] for key in keys)


async def test_many_changed_partitions_are_noted_in_portions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_limits, "ARCHIVE_CHECKS", 0)
    monkeypatch.setattr(archive_limits, "ARCHIVE_CHECKS_PER_STEP", 2)
    async with pond(tmp_path / "data") as home:
        for number in range(10):
            await home.put(await home.create(f"ducks-{number}"), b"quack")
        for topic in home.archiver._topics().values():
            home.archiver.follow(topic)
        home.archiver._unchecked.clear()
        checking = asyncio.create_task(home.archiver._check_partitions())
        seen = [0]
        while not checking.done():
            await asyncio.sleep(0)
            seen.append(len(home.archiver._unchecked))
        assert seen[-1] == 10
        assert all(after - before <= 2 for before, after in pairwise(seen))


async def test_a_topic_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with pond(tmp_path / "data") as home:
        with pytest.raises(UnknownTopic, match="geese"):
            await home.archiver.archive("geese")


# --- buffers -------------------------------------------------------------------------------------


async def test_one_buffer_is_filled_while_the_other_becomes_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q8: double buffering. The file_builder waits with each piece until the next one is filled."""
    monkeypatch.setattr(archive_limits, "ARCHIVE_FILL_BYTES", 500)
    monkeypatch.setattr(archive_limits, "ARCHIVER_READ_BYTES", 500)
    filled: list[int] = []
    changed = threading.Condition()
    fill = Buffers.fill

    async def counted(self: Buffers, *arguments: Any) -> FilledBuffer:
        got = await fill(self, *arguments)
        with changed:
            filled.append(got.next_offset)
            changed.notify_all()
        return got

    class Waiting(LocalFileBuilder):
        pieces = 0

        def add(
            self, piece: LogPiece, publishers: Mapping[int, str | None]
        ) -> BuildProgress | UnknownProducers:
            self.pieces += 1
            with changed:
                assert changed.wait_for(
                    lambda: len(filled) > self.pieces or filled[-1] == 40, timeout=30
                )
            return super().add(piece, publishers)

    monkeypatch.setattr(Buffers, "fill", counted)
    file_builder = Waiting()
    async with pond(tmp_path / "data", file_builder=file_builder) as home:
        key = await home.create("ducks")
        put = await put_some(home, key, 40)
        await home.archiver.archive()
        assert file_builder.pieces > 3
        assert await home.values(key) == put


async def test_all_buffers_together_are_two_however_many_topics_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_limits, "ARCHIVE_FILL_BYTES", 300)
    monkeypatch.setattr(archive_limits, "ARCHIVER_READ_BYTES", 300)
    seen: set[int] = set()

    class Watched(LocalFileBuilder):
        def add(
            self, piece: LogPiece, publishers: Mapping[int, str | None]
        ) -> BuildProgress | UnknownProducers:
            assert isinstance(piece.data, memoryview)
            seen.add(id(piece.data.obj))
            return super().add(piece, publishers)

    async with pond(tmp_path / "data", file_builder=Watched()) as home:
        keys = [await home.create(f"ducks-{number}") for number in range(20)]
        for key in keys:
            await put_some(home, key, 10)
        await home.archiver.archive()
        assert len(seen) == archive_limits.ARCHIVE_BUFFERS == 2
        assert all(home.ranges(key) == [(0, 10)] for key in keys)


async def test_a_batch_larger_than_a_buffer_should_hold_goes_through_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_limits, "ARCHIVE_FILL_BYTES", 1_000)
    monkeypatch.setattr(archive_limits, "ARCHIVER_READ_BYTES", 100)
    async with pond(tmp_path / "data") as home:
        key = await home.create("ducks")
        large = bytes(limits.BATCH_BYTES - 200)
        put = {await home.put(key, value): value for value in (b"small", large, b"small")}
        await home.archiver.archive()
        assert home.ranges(key) == [(0, 3)]
        assert await home.values(key) == put
