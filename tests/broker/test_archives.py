"""The archive as listeners see it: plans keep files, what is offered is compared before it is
taken."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from quackmq import limits
from quackmq.archive import layout as archive_files
from quackmq.archive.manifest import offered_name
from quackmq.broker import limits as broker_limits
from quackmq.errors import (
    BrokerClosing,
    InvalidRequest,
    LimitReached,
    QuackError,
    StateChanged,
    UnknownFile,
    UnknownPartition,
    UnknownPlan,
    UnknownTopic,
)
from quackmq.model.topic import PartitionKey, Read
from tests.archive.merging import settled
from tests.broker.archives import BY_HAND, beside, names_in
from tests.broker.support import CALLER, TOPIC, key_of, poison_batch, publish, values_in
from tests.kit.support import offsets_and_values
from tests.kit.waiting import until

HOUR_MS = 3_600_000
FOUR = [[b"a", b"b"], [b"c", b"d"], [b"e", b"f"], [b"g", b"h"]]
VALUES = [value for some in FOUR for value in some]


# --- listing -------------------------------------------------------------------------------------


async def test_what_is_archived_is_listed_with_where_the_log_goes_on(tmp_path: Path) -> None:
    async with beside(tmp_path) as here:
        await here.broker.create_topic(CALLER, TOPIC, partitions=2)
        await here.archive_each([b"a", b"b"], [b"c"])
        await publish(here.broker, b"d", b"e")
        found = await here.archive.describe(CALLER, TOPIC)
        assert found.directory == str(tmp_path / "archive" / TOPIC)
        assert found.next_partition is None
        first, second = found.partitions
        assert (first.first_offset, first.next_offset) == (0, 3)
        assert (first.log_first_offset, first.end_offset) == (3, 5)
        assert [file.records for file in first.files] == [2, 1]
        assert first.version == 2 and first.problem is None and first.log_bytes > 0
        assert (second.version, second.files, second.first_offset, second.end_offset) == (
            *(0, (), 0),
            0,
        )
        assert await values_in(here.broker) == [b"a", b"b", b"c", b"d", b"e"]
        with pytest.raises(UnknownTopic):
            await here.archive.describe(CALLER, "geese")


async def test_a_long_list_comes_in_pages_of_whole_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_limits, "ARCHIVE_PAGE_FILES", 3)
    async with beside(tmp_path) as here:
        await here.broker.create_topic(CALLER, TOPIC, partitions=4)
        for partition, files in enumerate((2, 1, 4, 1)):
            for _ in range(files):
                await publish(here.broker, b"x", partition=partition)
                await here.archive.archive(CALLER, TOPIC)
        plan = await here.archive.plan(CALLER, TOPIC, HOUR_MS)
        pages: list[list[int]] = []
        start: int | None = 0
        while start is not None:
            page = await here.archive.describe(CALLER, TOPIC, start)
            _, held = await here.archive.describe_plan(CALLER, plan.id, start)
            assert held == page
            pages.append([each.partition for each in page.partitions])
            start = page.next_partition
        assert pages == [[0, 1], [2], [3]]


# --- plans ---------------------------------------------------------------------------------------


async def test_a_plan_keeps_its_files_through_merging_and_trimming(tmp_path: Path) -> None:
    async with beside(tmp_path) as here:
        await here.broker.create_topic(CALLER, TOPIC)
        await here.archive_each(*FOUR)
        plan = await here.archive.plan(CALLER, TOPIC, HOUR_MS)
        _, held = await here.archive.describe_plan(CALLER, plan.id)
        old = [file.name for file in held.partitions[0].files]
        assert (await here.archive.merge(CALLER, TOPIC)).merges == 1
        await here.broker.trim(CALLER, key_of(here.broker.topic(TOPIC)), 8)
        directory = await here.directory()
        await settled(here.store.registry)
        assert set(old) <= set(names_in(directory))
        assert (await here.listed()).files == ()
        _, again = await here.archive.describe_plan(CALLER, plan.id)
        assert again == held
        data = here.archive.file(CALLER, TOPIC, 0, old[0])
        assert await data.read(0, 4) == b"PAR1"
        data.close()
        await here.archive.release(CALLER, plan.id)
        await settled(here.store.registry)
        assert not set(old) & set(names_in(directory))
        with pytest.raises(UnknownFile):
            here.archive.file(CALLER, TOPIC, 0, old[0])
        with pytest.raises(UnknownPlan, match="plan again"):
            await here.archive.release(CALLER, plan.id)


async def test_a_plan_is_over_when_its_lease_is_unless_it_is_renewed(tmp_path: Path) -> None:
    async with beside(tmp_path) as here:
        await here.broker.create_topic(CALLER, TOPIC)
        await here.archive_each([b"a"])
        short = await here.archive.plan(CALLER, TOPIC, 1)
        kept = await here.archive.plan(CALLER, TOPIC, 1)
        renewed = await here.archive.renew(CALLER, kept.id, HOUR_MS)
        assert renewed.expires_ms > kept.expires_ms
        await until(lambda: short.id not in {each.id for each in here.archive.plans(CALLER)})
        assert [each.id for each in here.archive.plans(CALLER)] == [kept.id]
        with pytest.raises(UnknownPlan):
            await here.archive.renew(CALLER, short.id, HOUR_MS)


async def test_plans_are_bounded_in_number_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_limits, "ARCHIVE_PLANS", 2)
    async with beside(tmp_path) as here:
        await here.broker.create_topic(CALLER, TOPIC, partitions=3)
        for for_ms in (0, -1, limits.ARCHIVE_PLAN_MS + 1):
            with pytest.raises(InvalidRequest):
                await here.archive.plan(CALLER, TOPIC, for_ms)
        with pytest.raises(UnknownPartition):
            await here.archive.plan(CALLER, TOPIC, 1, [3])
        some = await here.archive.plan(CALLER, TOPIC, HOUR_MS, [2, 0, 2])
        assert some.partitions == (0, 2)
        await here.archive.plan(CALLER, TOPIC, HOUR_MS)
        with pytest.raises(LimitReached):
            await here.archive.plan(CALLER, TOPIC, HOUR_MS)
        await here.archive.release(CALLER, some.id)
        await here.archive.plan(CALLER, TOPIC, HOUR_MS)


@pytest.mark.sweep
async def test_a_plan_has_no_gap_between_files_and_log_while_archiving_goes_on(
    tmp_path: Path,
) -> None:
    async with beside(tmp_path) as here:
        await here.broker.create_topic(CALLER, TOPIC)

        async def go_on() -> None:
            for number in range(20):
                await publish(here.broker, b"%d" % number)
                await here.archive.archive(CALLER, TOPIC)

        going = asyncio.create_task(go_on())
        plans = 0
        while not going.done():
            plan = await here.archive.plan(CALLER, TOPIC, HOUR_MS)
            _, held = await here.archive.describe_plan(CALLER, plan.id)
            (part,) = held.partitions
            assert part.log_first_offset <= part.next_offset <= part.end_offset
            await here.archive.release(CALLER, plan.id)
            plans += 1
            await asyncio.sleep(0)
        await going
        assert plans > 1


# --- what is offered -----------------------------------------------------------------------------


async def test_files_that_are_offered_take_the_place_of_others(tmp_path: Path) -> None:
    async with beside(tmp_path) as here:
        await here.broker.create_topic(CALLER, TOPIC)
        await here.archive_each(*FOUR)
        plan = await here.archive.plan(CALLER, TOPIC, HOUR_MS, offers=True)
        before = await here.listed()
        old = [file.name for file in before.files[:3]]
        name = await here.offer(plan.id, here.rows(old), 0, 6)
        # What is archived meanwhile does no harm.
        await here.archive_each([b"i"])
        after = await here.archive.replace(CALLER, TOPIC, 0, before.version, old, [name])
        assert [(file.first_offset, file.records) for file in after.files] == [
            (0, 6),
            (6, 2),
            (8, 1),
        ]
        assert await values_in(here.broker) == [*VALUES, b"i"]
        await here.archive.release(CALLER, plan.id)
        await settled(here.store.registry)
        directory = await here.directory()
        assert names_in(directory) == [*(file.name for file in after.files), "_manifest.json"]
        with pytest.raises(UnknownPlan):
            await here.archive.replace(CALLER, TOPIC, 0, before.version, old, [name])
    async with beside(tmp_path) as again:
        assert (await again.listed()).files == after.files


async def test_what_is_offered_and_not_taken_goes_with_its_plan(tmp_path: Path) -> None:
    async with beside(tmp_path) as here:
        await here.broker.create_topic(CALLER, TOPIC)
        await here.archive_each(*FOUR)
        directory = await here.directory()
        there = names_in(directory)
        plan = await here.archive.plan(CALLER, TOPIC, HOUR_MS, offers=True)
        other = await here.archive.plan(CALLER, TOPIC, HOUR_MS, offers=True)
        await here.offer(plan.id, [], 0, 8)
        kept = await here.offer(other.id, [], 0, 8)
        await here.archive.merge(CALLER, TOPIC)
        await here.archive.release(CALLER, plan.id)
        await until(lambda: offered_name(plan.id, "1") not in names_in(directory))
        assert kept in names_in(directory)
    async with beside(tmp_path) as here:
        assert len(names_in(directory)) == 2 < len(there)


async def test_a_plan_that_ends_while_its_files_are_compared_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with beside(tmp_path) as here:
        await here.broker.create_topic(CALLER, TOPIC)
        await here.archive_each(*FOUR)
        before = await here.listed()
        old = [file.name for file in before.files]
        plan = await here.archive.plan(CALLER, TOPIC, HOUR_MS, offers=True)
        name = await here.offer(plan.id, here.rows(old), 0, 8)
        compared = here.archive._compare_offered

        async def while_it_ends(*asked: Any) -> Any:
            found = await compared(*asked)
            await here.archive.release(CALLER, plan.id)
            return found

        monkeypatch.setattr(here.archive, "_compare_offered", while_it_ends)
        with pytest.raises(UnknownPlan):
            await here.archive.replace(CALLER, TOPIC, 0, before.version, old, [name])
        directory = await here.directory()
        await until(lambda: name not in names_in(directory))
        assert await here.listed() == before
        assert await values_in(here.broker) == VALUES


def less(rows: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    return rows[:-1]


def more(rows: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    return [*rows[:-1], pa.concat_batches([rows[-1].slice(0, 1), rows[-1]])]


def other_value(rows: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    names = rows[0].schema.names
    columns = [rows[0].column(name) for name in names]
    columns[names.index("value")] = pa.array([b"z"] * rows[0].num_rows, pa.binary())
    return [pa.record_batch(columns, schema=rows[0].schema), *rows[1:]]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (less, "8 records cannot be replaced by 6"),
        (other_value, "differs from 0+-0+1.parquet at offset 0"),
    ],
)
async def test_what_is_not_the_same_records_is_refused(
    tmp_path: Path,
    change: Callable[[list[pa.RecordBatch]], list[pa.RecordBatch]],
    complaint: str,
) -> None:
    async with beside(tmp_path) as here:
        await here.broker.create_topic(CALLER, TOPIC)
        await here.archive_each(*FOUR)
        before = await here.listed()
        plan = await here.archive.plan(CALLER, TOPIC, HOUR_MS, offers=True)
        old = [file.name for file in before.files]
        name = await here.offer(plan.id, change(here.rows(old)), 0, 8)
        with pytest.raises(InvalidRequest, match=complaint):
            await here.archive.replace(CALLER, TOPIC, 0, before.version, old, [name])
        assert (await here.listed()).files == before.files
        assert await values_in(here.broker) == VALUES


async def test_other_offsets_in_as_many_records_are_refused(tmp_path: Path) -> None:
    """A hole that moved: the number of records is right."""
    async with beside(tmp_path) as here:
        await here.broker.create_topic(CALLER, TOPIC)
        await here.archive_each([b"a", b"b", b"c"])
        before = await here.listed()
        (rows,) = here.rows([before.files[0].name])
        await here.broker.create_topic(CALLER, "geese", policy=BY_HAND)
        plan = await here.archive.plan(CALLER, TOPIC, HOUR_MS, offers=True)
        names = rows.schema.names
        columns = [rows.column(name) for name in names]
        columns[names.index("offset")] = pa.array([0, 1, 5], pa.int64())
        moved = pa.record_batch(columns, schema=rows.schema)
        name = await here.offer(plan.id, [moved], 0, 6)
        with pytest.raises(InvalidRequest, match="cannot be replaced"):
            await here.archive.replace(
                CALLER, TOPIC, 0, before.version, [before.files[0].name], [name]
            )


@pytest.mark.parametrize("flip", [8, 500, -2])
async def test_a_file_that_is_damaged_is_refused(tmp_path: Path, flip: int) -> None:
    async with beside(tmp_path) as here:
        await here.broker.create_topic(CALLER, TOPIC)
        await here.archive_each(*FOUR)
        before = await here.listed()
        plan = await here.archive.plan(CALLER, TOPIC, HOUR_MS, offers=True)
        old = [file.name for file in before.files]
        name = await here.offer(plan.id, here.rows(old), 0, 8)
        path = await here.directory() / name
        data = bytearray(path.read_bytes())
        data[flip] ^= 0x55
        path.write_bytes(data)
        with pytest.raises(InvalidRequest):
            await here.archive.replace(CALLER, TOPIC, 0, before.version, old, [name])
        assert (await here.listed()).files == before.files


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1PAR1", b"\xff" * 4_000 + b"PAR1"])
async def test_what_is_no_file_of_the_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    async with beside(tmp_path) as here:
        await here.broker.create_topic(CALLER, TOPIC)
        await here.archive_each(*FOUR)
        plan = await here.archive.plan(CALLER, TOPIC, HOUR_MS, offers=True)
        name = offered_name(plan.id, "1")
        (await here.directory() / name).write_bytes(content)
        old = [file.name for file in (await here.listed()).files]
        with pytest.raises(InvalidRequest):
            await here.archive.replace(CALLER, TOPIC, 0, 4, old, [name])


async def test_another_partitions_file_and_names_of_nobody_are_refused(tmp_path: Path) -> None:
    async with beside(tmp_path) as here:
        topic = await here.broker.create_topic(CALLER, TOPIC, partitions=2)
        await here.archive_each(*FOUR)
        before = await here.listed()
        old = [file.name for file in before.files]
        plan = await here.archive.plan(CALLER, TOPIC, HOUR_MS, offers=True)
        reading = await here.archive.plan(CALLER, TOPIC, HOUR_MS)
        foreign = await here.offer(
            plan.id, here.rows(old), 0, 8, key=PartitionKey(topic.id, 1), word="foreign"
        )
        name = await here.offer(plan.id, here.rows(old), 0, 8)
        refused: list[tuple[list[str], list[str], type[QuackError]]] = [
            (old, [foreign], InvalidRequest),
            (old, [offered_name(plan.id, "none")], InvalidRequest),
            (old, [offered_name(reading.id, "1")], InvalidRequest),
            (old, [offered_name("0" * 32, "1")], UnknownPlan),
            (old, ["../../secret"], InvalidRequest),
            (old, [before.files[0].name], InvalidRequest),
            (old, [name, name], InvalidRequest),
            (old[::-1], [name], InvalidRequest),
            (["x"], [name], InvalidRequest),
            (old, [], InvalidRequest),
        ]
        for olds, news, error in refused:
            with pytest.raises(error):
                await here.archive.replace(CALLER, TOPIC, 0, before.version, olds, news)
        await here.archive.merge(CALLER, TOPIC)
        with pytest.raises(StateChanged, match="plan again"):
            await here.archive.replace(CALLER, TOPIC, 0, before.version, old, [name])
        assert await values_in(here.broker) == VALUES


# --- health, and the end -------------------------------------------------------------------------


async def test_a_batch_that_nobody_can_open_is_named_in_the_state(tmp_path: Path) -> None:
    async with beside(tmp_path) as here:
        topic = await here.broker.create_topic(CALLER, TOPIC)
        await publish(here.broker, b"a")
        await here.broker.publish(CALLER, topic, 0, poison_batch(b"x", b"y"))
        await here.archive.archive(CALLER, TOPIC)
        state = here.archive.state(CALLER)
        assert (state.quarantined, state.problems) == (1, ())
        (named,) = state.kept_aside
        assert named.startswith(f"topic {TOPIC}, partition 0: offsets 1 to 2 cannot be decoded")


async def test_an_offset_out_of_range_is_told_with_the_range_of_both_tiers(tmp_path: Path) -> None:
    async with beside(tmp_path) as here:
        await here.broker.create_topic(CALLER, TOPIC)
        await here.archive_each(*FOUR)
        end = (await here.broker.offsets(CALLER, key_of(here.broker.topic(TOPIC)))).next
        read = Read(key_of(here.broker.topic(TOPIC)), 99, 1000)
        (part,) = await here.broker.read(CALLER, [read], max_bytes=1000)
        assert str(part.error) == f"offset 99 is not between 0 and {end}"


async def test_a_damaged_file_is_told_and_keeps_nobody_from_publishing(tmp_path: Path) -> None:
    async with beside(tmp_path) as here:
        await here.broker.create_topic(CALLER, TOPIC)
        await here.archive_each(*FOUR)
        assert here.archive.state(CALLER).problems == ()
        damaged = (await here.listed()).files[1].name
        path = await here.directory() / damaged
        data = bytearray(path.read_bytes())
        data[20] ^= 1
        path.write_bytes(data)
        assert (await here.archive.merge(CALLER, TOPIC)).merges == 0
        state = here.archive.state(CALLER)
        assert len(state.problems) == 1 and damaged in state.problems[0]
        here.broker.check_writable()
        await publish(here.broker, b"i")


async def test_merging_goes_on_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_limits, "MERGE_INTERVAL_MS", 1)
    async with beside(tmp_path) as here:
        await here.broker.create_topic(CALLER, TOPIC)
        await here.archive_each(*FOUR)
        await until(lambda: here.archive.state(CALLER).merged.merges > 0)
        assert await values_in(here.broker) == VALUES


@pytest.mark.sweep
async def test_readers_from_the_beginning_notice_nothing_of_archiving_and_merging(
    tmp_path: Path,
) -> None:
    async with beside(tmp_path) as here:
        await here.broker.create_topic(CALLER, TOPIC)
        key = key_of(here.broker.topic(TOPIC))
        rounds = 24

        async def go_on() -> None:
            for number in range(rounds):
                await publish(here.broker, *(b"%d" % (number * 5 + each) for each in range(5)))
                await here.archive.archive(CALLER, TOPIC)
                if number % 4 == 3:
                    await here.archive.merge(CALLER, TOPIC)

        going = asyncio.create_task(go_on())
        reads = 0
        while not going.done() or not reads:
            end = (await here.broker.offsets(CALLER, key)).next
            offset = 0
            while offset < end:
                (part,) = await here.broker.read(CALLER, [Read(key, offset, 100)], max_bytes=100)
                assert part.error is None
                found = [each for each in offsets_and_values(part) if each[0] >= offset]
                assert found == [(at, b"%d" % at) for at in range(offset, offset + len(found))]
                assert found
                offset += len(found)
            reads += 1
            await asyncio.sleep(0)
        await going
        merged = here.archive.state(CALLER).merged
        assert merged.merges > 1 and len((await here.listed()).files) < rounds // 2


async def test_a_deleted_topic_goes_with_its_archive_and_its_plans_do_no_harm(
    tmp_path: Path,
) -> None:
    async with beside(tmp_path) as here:
        await here.broker.create_topic(CALLER, TOPIC)
        await here.archive_each(*FOUR)
        plan = await here.archive.plan(CALLER, TOPIC, HOUR_MS, offers=True)
        name = (await here.listed()).files[0].name
        await here.broker.delete_topic(CALLER, TOPIC)
        await here.broker.create_topic(CALLER, TOPIC)
        with pytest.raises(UnknownFile):
            here.archive.file(CALLER, TOPIC, 0, name)
        await here.archive_each([b"new"])
        await here.archive.release(CALLER, plan.id)
        assert await values_in(here.broker) == [b"new"]


async def test_an_archive_that_outlives_its_topic_is_told_until_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with beside(tmp_path) as here:
        await here.broker.create_topic(CALLER, TOPIC)
        await here.archive_each([b"x"])

        def refused(*_: object) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "archive")

        with monkeypatch.context() as patch:
            patch.setattr(archive_files, "remove_topic", refused)
            await here.broker.delete_topic(CALLER, TOPIC)
            for _ in range(2):
                (problem,) = here.archive.state(CALLER).problems
                assert f"topic {TOPIC} was deleted" in problem and "Permission denied" in problem
                await here.store.registry.remove_left_behind()
        await here.store.registry.remove_left_behind()
        assert here.archive.state(CALLER).problems == ()
        assert names_in(tmp_path / "archive") == []


async def test_a_broker_that_closed_answers_no_more(tmp_path: Path) -> None:
    async with beside(tmp_path) as here:
        await here.broker.create_topic(CALLER, TOPIC)
        await here.archive.plan(CALLER, TOPIC, HOUR_MS)
        await here.broker.close()
        assert here.archive.plans(CALLER) == []
        with pytest.raises(BrokerClosing):
            await here.archive.describe(CALLER, TOPIC)
