"""The archiver looks at partitions that have changed, or whose time has come, and at few others."""

from __future__ import annotations

from pathlib import Path

import pytest

from quackmq.archive import limits as archive_limits
from quackmq.archive.archiving.archiver import Archiver
from quackmq.errors import StorageError
from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey, Topic
from tests.archive.pond import NEVER, Pond, pond

TOPICS = 30
AFTER_MS = 10_000
LATER = Policy(archive_after_ms=AFTER_MS, archive_bytes=2_000)


async def followed(home: Pond) -> list[PartitionKey]:
    """Topics with a record each, all of which were looked at."""
    keys = [await home.create(f"topic-{number}", LATER) for number in range(TOPICS)]
    for topic in (await home.store.topics()).values():
        home.archiver.follow(topic)
    for key in keys:
        await home.put(key, b"x")
    assert not await home.archiver.archive_due()
    return keys


def looked_at(home: Pond, monkeypatch: pytest.MonkeyPatch) -> list[PartitionKey]:
    looks: list[PartitionKey] = []
    real = Archiver._check_partition

    async def noted(archiver: Archiver, name: str, key: PartitionKey) -> None:
        looks.append(key)
        await real(archiver, name, key)

    monkeypatch.setattr(Archiver, "_check_partition", noted)
    monkeypatch.setattr(archive_limits, "ARCHIVE_ROTATION_CHECKS", 0)
    return looks


async def test_partitions_in_which_nothing_happens_are_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pond(tmp_path / "data") as home:
        keys = await followed(home)
        looks = looked_at(home, monkeypatch)
        assert not await home.archiver.archive_due()
        assert looks == []
        await home.put(keys[7], b"y")
        assert not await home.archiver.archive_due()
        assert looks == [keys[7]]
        await home.put(keys[8], bytes(3_000))
        assert await home.archiver.archive_due()
        assert set(looks) == {keys[7], keys[8]}
        assert home.ranges(keys[8]) == [(0, 2)]


async def test_each_is_archived_when_its_time_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pond(tmp_path / "data") as home:
        keys = await followed(home)
        looks = looked_at(home, monkeypatch)
        home.clock.advance(AFTER_MS - 1)
        assert not await home.archiver.archive_due()
        assert looks == []
        home.clock.advance(1)
        assert await home.archiver.archive_due()
        assert [home.ranges(key) for key in keys] == [[(0, 1)]] * TOPICS
        assert home.archiver.state().backlog_bytes == 0


async def test_entries_are_archived_soon_after_they_are_no_longer_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pond(tmp_path / "data") as home:
        looks = looked_at(home, monkeypatch)
        by_age = await home.create("by-age", Policy(live_for_ms=60_000, archive_after_live_ms=500))
        by_count = await home.create("by-count", Policy(live_entries=2, archive_after_live_ms=500))
        for topic in (await home.store.topics()).values():
            home.archiver.follow(topic)
        for key in (by_age, by_count):
            await home.put(key, b"1", b"2")
        assert not await home.archiver.archive_due()
        home.clock.advance(59_800)
        await home.put(by_count, b"3")
        assert not await home.archiver.archive_due()
        looks.clear()
        home.clock.advance(499)
        assert not await home.archiver.archive_due()
        assert looks == [], "one entry left 499 ms ago, the others 299 ms ago"
        home.clock.advance(1)
        assert await home.archiver.archive_due()
        assert (home.ranges(by_age), home.ranges(by_count)) == ([], [(0, 3)])
        home.clock.advance(200)
        assert await home.archiver.archive_due()
        assert home.ranges(by_age) == [(0, 2)]
        await home.put(by_age, b"3")
        assert not await home.archiver.archive_due(), "each entry has its own time"
        assert await home.values(by_count) == {0: b"1", 1: b"2", 2: b"3"}


async def test_a_topic_that_is_archived_no_longer_is_not_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pond(tmp_path / "data") as home:
        keys = await followed(home)
        altered = await home.store.alter_topic(keys[3].topic_id, policy=NEVER)
        home.topics[altered.name] = altered
        home.archiver.follow(altered)
        home.clock.advance(AFTER_MS)
        looks = looked_at(home, monkeypatch)
        assert await home.archiver.archive_due()
        assert home.ranges(keys[3]) == []
        looks.clear()
        home.clock.advance(10 * archive_limits.ARCHIVE_RETRY_MS)
        assert not await home.archiver.archive_due()
        assert looks == []


async def test_a_topic_with_another_policy_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pond(tmp_path / "data") as home:
        keys = await followed(home)
        looks = looked_at(home, monkeypatch)
        altered: Topic = await home.store.alter_topic(
            keys[3].topic_id, policy=Policy(archive_after_ms=0, archive_bytes=1)
        )
        home.topics[altered.name] = altered
        home.archiver.follow(altered)
        assert await home.archiver.archive_due()
        assert set(looks) == {keys[3]}
        assert home.ranges(keys[3]) == [(0, 1)]


async def test_one_that_failed_is_tried_again_in_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pond(tmp_path / "data") as home:
        keys = await followed(home)
        looked_at(home, monkeypatch)
        await home.put(keys[0], bytes(3_000))
        with monkeypatch.context() as failing:

            async def fail(*_: object) -> None:
                raise StorageError("not now")

            failing.setattr(Archiver, "_archive_next_file", fail)
            await home.archiver.archive_due()
        assert home.archiver.state().failing == 1
        assert not await home.archiver.archive_due()
        home.clock.advance(archive_limits.ARCHIVE_RETRY_MS)
        assert await home.archiver.archive_due()
        assert home.ranges(keys[0]) == [(0, 2)]


async def test_the_backlog_is_the_sum_over_all_partitions(tmp_path: Path) -> None:
    async with pond(tmp_path / "data") as home:
        keys = await followed(home)
        states = home.archiver._state_by_partition

        def added_up() -> int:
            return sum(each.backlog_bytes for each in states.values())

        assert home.archiver.state().backlog_bytes == added_up() > 0
        await home.archiver.archive("topic-0")
        await home.archiver.archive_due()
        assert home.archiver.state().backlog_bytes == added_up()
        home.archiver.forget((await home.store.topics())["topic-1"])
        assert keys[1] not in states
        assert home.archiver.state().backlog_bytes == added_up()
