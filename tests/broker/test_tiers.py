"""Retention over log and archive: nothing goes that a policy keeps, all that it lets go of goes,
whatever is archived, merged, trimmed and restarted meanwhile. Beside the broker stands a plain
model of what should be there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from quackmq import limits
from quackmq.archive.layout import partition_path
from quackmq.broker import Broker
from quackmq.broker import limits as broker_limits
from quackmq.errors import QuackError
from quackmq.model.policy import Policy, WhenFull
from tests.broker.support import (
    CALLER,
    NAME,
    TOPIC,
    get,
    get_all,
    key_of,
    publish,
    publish_each,
    values_in,
)
from tests.broker.tier_model import MANUAL, Run, Step, Steps, Truth, run_until_restart
from tests.broker.tiers import Tiers
from tests.kit import effort
from tests.kit.support import batch_of, let_others_run
from tests.kit.waiting import soon


@pytest.fixture(autouse=True)
def exact_times(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory, all times are exact; and every cleaning does all that can be done."""
    monkeypatch.setattr(broker_limits, "ARCHIVE_CUT_MS", 0)
    if "tmp_path" not in request.fixturenames:
        monkeypatch.setattr(limits, "REGION_MS", 1)


# --- one by one ----------------------------------------------------------------------------------


async def test_age_reaches_into_the_archive_and_cuts_files() -> None:
    tiers = Tiers()
    async with tiers.broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_for_ms=1000, **MANUAL))
        key = key_of(topic)
        for value in (b"a", b"b", b"c", b"d"):
            await publish(broker, value)
            tiers.clock.advance(100)
        await tiers.archive(key, 3)
        tiers.clock.advance(600)
        await broker.clean()
        assert await values_in(broker) == [b"b", b"c", b"d"]
        manifest = tiers.manifest(key)
        assert (manifest.first_offset, manifest.edge) == (1, manifest.files[0])
        tiers.clock.advance(200)
        await broker.clean()
        assert await values_in(broker) == [b"d"]
        assert tiers.manifest(key).files == ()
        tiers.clock.advance(100)
        await broker.clean()
        assert await values_in(broker) == []
        assert await publish(broker, b"e") == 4


async def test_the_age_of_what_is_archived_is_known_after_a_restart() -> None:
    tiers = Tiers()
    async with tiers.broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_for_ms=1000, **MANUAL))
        for value in (b"a", b"b", b"c"):
            await publish(broker, value)
            tiers.clock.advance(300)
        await tiers.archive(key_of(topic), 2)
    async with tiers.broker() as broker:
        for left in ([b"a", b"b", b"c"], [b"b", b"c"], [b"c"], []):
            await broker.clean()
            assert await values_in(broker) == left
            tiers.clock.advance(300)


async def test_an_age_that_the_archive_has_from_a_region_errs_towards_keeping(
    tmp_path: Path,
) -> None:
    tiers = Tiers(tmp_path)
    async with tiers.broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_for_ms=1000, **MANUAL))
        await publish(broker, b"a")
        tiers.clock.advance(900)
        await publish(broker, b"b")
    async with tiers.broker() as broker:  # which knows of the log by its index alone
        await tiers.archive(key_of(topic))
        tiers.clock.advance(500)
        await broker.clean()
        assert b"b" in await values_in(broker)
        tiers.clock.advance(500 + limits.REGION_MS)
        await broker.clean()
        assert await values_in(broker) == []


async def test_a_file_that_is_missing_is_not_taken_for_old() -> None:
    """Somebody may put it back."""
    tiers = Tiers()
    async with tiers.broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_for_ms=1000, **MANUAL))
        key = key_of(topic)
        for value in (b"a", b"b", b"c", b"d"):
            await publish(broker, value)
            await tiers.archive(key)
            tiers.clock.advance(300)
        await publish(broker, b"e")
        files = tiers.manifest(key).files
    path = f"{partition_path(TOPIC, 0)}/{files[2].name}"
    content = tiers.disk.files.pop(path)
    async with tiers.broker() as broker:
        tiers.clock.advance(300)  # a and b are old, c and d are not
        await broker.clean()
        assert tiers.manifest(key).files == files[2:]
        tiers.disk.files[path] = content
        assert await values_in(broker) == [b"c", b"d", b"e"]
        del tiers.disk.files[path]
        tiers.clock.advance(500)
        await broker.clean()
        assert tiers.manifest(key).files == ()


async def test_bytes_count_as_they_lie_in_each_tier_and_whole_files_go() -> None:
    tiers = Tiers()
    async with tiers.broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=Policy(**MANUAL))
        key = key_of(topic)
        values = [bytes([65 + number]) * 100 for number in range(8)]
        for number, value in enumerate(values):
            await publish(broker, value)
            if number % 2:
                await tiers.archive(key)
        files = tiers.manifest(key).files
        await publish(broker, b"new" * 50)
        in_log = batch_of(b"new" * 50).size
        keep_bytes = files[-1].size + in_log
        await broker.alter_topic(CALLER, TOPIC, policy=Policy(keep_bytes=keep_bytes, **MANUAL))
        await broker.clean()
        assert tiers.manifest(key).files == files[-1:]
        assert await values_in(broker) == [*values[-2:], b"new" * 50]
        # With the last file gone there has to be enough as well.
        more = Policy(keep_bytes=in_log + 1, **MANUAL)
        await broker.alter_topic(CALLER, TOPIC, policy=more)
        await broker.clean()
        assert len(await values_in(broker)) == 3
        await publish(broker, b"x")
        await broker.clean()
        assert await values_in(broker) == [b"new" * 50, b"x"]


async def test_no_archived_row_is_read_to_count_bytes() -> None:
    tiers = Tiers()
    async with tiers.broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_bytes=1, **MANUAL))
        await publish_each(broker, b"a" * 100, b"b" * 100)
        await tiers.archive(key_of(topic))
        await publish(broker, b"c")
        tiers.disk.reads.clear()
        await broker.clean()
        assert await values_in(broker) == [b"c"]
        assert tiers.disk.reads == []


async def test_what_grows_by_being_archived_is_looked_at_without_anything_published() -> None:
    tiers = Tiers()
    async with tiers.broker() as broker:
        one = batch_of(b"a").size
        policy = Policy(keep_bytes=3 * one, **MANUAL)
        topic = await broker.create_topic(CALLER, TOPIC, policy=policy)
        key = key_of(topic)
        await publish_each(broker, b"a", b"b", b"c")
        await broker.clean()
        assert len(await values_in(broker)) == 3
        await tiers.archive(key, 1)
        await tiers.archive(key, 2)
        await broker.clean()
        # A file of one record takes more than the log's three batches.
        assert await values_in(broker) == [b"b", b"c"]


async def test_a_message_lives_in_the_archive_until_every_subscriber_has_taken_it() -> None:
    """D3, with Q8's archive."""
    tiers = Tiers()
    async with tiers.broker() as broker:
        policy = Policy(keep_until_consumed=True, **MANUAL)
        topic = await broker.create_topic(CALLER, TOPIC, policy=policy)
        for name in ("one", "two"):
            await broker.subscribe(CALLER, name, TOPIC)
        await publish_each(broker, b"a", b"b", b"c")
        await tiers.archive(key_of(topic), 2)
        assert broker.consumers_left(CALLER, key_of(topic), range(3)) == [2, 2, 2]
        assert len(await get_all(broker, name="one")) == 3
        await broker.clean()
        assert await values_in(broker) == [b"a", b"b", b"c"]
        message = await get(broker, name="two")
        await get(broker, message, name="two")
        await broker.clean()
        assert await values_in(broker) == [b"b", b"c"]
        assert tiers.manifest(key_of(topic)).first_offset == 1


async def test_a_hold_over_archived_bytes_has_its_bound_too() -> None:
    tiers = Tiers()
    async with tiers.broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        await broker.subscribe(CALLER, NAME, TOPIC)
        for value in (b"a", b"b"):
            await publish(broker, value * 100)
            await tiers.archive(key_of(topic))
        hold_bytes = tiers.manifest(key_of(topic)).files[1].size
        policy = Policy(keep_until_consumed=True, hold_bytes=hold_bytes, **MANUAL)
        await broker.alter_topic(CALLER, TOPIC, policy=policy)
        await broker.clean()
        message = await get(broker)
        assert (message.record.value, message.lost) == (b"b" * 100, 1)


async def test_a_file_is_cut_now_and_then_and_goes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_limits, "ARCHIVE_CUT_MS", 5_000)
    tiers = Tiers()
    async with tiers.broker() as broker:
        policy = Policy(keep_until_consumed=True, **MANUAL)
        topic = await broker.create_topic(CALLER, TOPIC, policy=policy)
        await broker.subscribe(CALLER, NAME, TOPIC)
        await publish_each(broker, b"a", b"b", b"c", b"d")
        await tiers.archive(key_of(topic))
        left = []
        last = None
        for _ in range(3):
            last = await get(broker, last)
            await broker.clean()
            left.append(len(await values_in(broker)))
        assert left == [4, 3, 3], "the first is outstanding, the second cut waits"
        tiers.clock.advance(5_000)
        await broker.clean()
        assert len(await values_in(broker)) == 2
        await get_all(broker, last)
        await broker.clean()
        assert await values_in(broker) == []


async def test_dropping_the_oldest_out_of_an_archive_waits_for_the_cleaner() -> None:
    tiers = Tiers()
    async with tiers.broker() as broker:
        policy = Policy(live_entries=3, when_full=WhenFull.DROP_OLDEST, **MANUAL)
        topic = await broker.create_topic(CALLER, TOPIC, policy=policy)
        key = key_of(topic)
        await publish_each(broker, b"a", b"b", b"c")
        await tiers.archive(key, 2)
        version = tiers.manifest(key).version
        await publish_each(broker, b"d", b"e")
        assert tiers.manifest(key).version == version
        await broker.clean()
        assert await values_in(broker) == [b"c", b"d", b"e"]
        await publish(broker, b"f")
        assert await values_in(broker) == [b"d", b"e", b"f"], "the log is cut at once"


async def test_who_publishes_does_not_wait_while_the_cleaner_waits_for_the_archive() -> None:
    tiers = Tiers()
    async with tiers.broker() as broker:
        policy = Policy(live_entries=3, when_full=WhenFull.DROP_OLDEST, **MANUAL)
        topic = await broker.create_topic(CALLER, TOPIC, policy=policy)
        await publish_each(broker, b"a", b"b", b"c")
        await tiers.archive(key_of(topic), 2)
        await publish_each(broker, b"d", b"e")
        tiers.disk.is_free.clear()
        cleaning = asyncio.create_task(broker.clean())
        await let_others_run()
        try:
            await soon(publish(broker, b"f"))
            assert not cleaning.done()
        finally:
            tiers.disk.is_free.set()
        await cleaning
        await broker.clean()
        assert await values_in(broker) == [b"d", b"e", b"f"]


async def test_an_archive_that_cannot_be_cut_is_named_and_keeps_no_other_topic_back() -> None:
    tiers = Tiers()
    async with tiers.broker() as broker:
        for name in ("bad", "good"):
            policy = Policy(keep_for_ms=0, **MANUAL)
            await broker.create_topic(CALLER, name, policy=policy)
            await publish(broker, b"a", topic=name)
        await tiers.archive(key_of(broker.topic("bad")))
        tiers.disk.error = OSError(28, "no room")
        await broker.clean()
        (failure,) = broker.retention_failures()
        assert (failure.topic_name, failure.partition) == ("bad", 0)
        assert "no room" in str(failure.error)
        assert await values_in(broker, "good") == []
        tiers.disk.error = None
        await broker.clean()
        assert broker.retention_failures() == []
        assert await values_in(broker, "bad") == []


# --- anything in any order -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(effort.of(30)))
async def test_exactly_what_the_policy_lets_go_of_goes_from_every_tier(seed: int) -> None:
    """Q7, Q8, D3, M4."""
    await _run(seed, Tiers(), is_exact=True)


@pytest.mark.parametrize("seed", range(100, 100 + effort.of(8)))
async def test_nothing_goes_that_the_policy_keeps_where_indexes_tell_less(
    seed: int, tmp_path: Path
) -> None:
    """On disk, ages and sizes of the log are those of regions, and err towards keeping."""
    await _run(seed, Tiers(tmp_path), is_exact=False)


async def _run(seed: int, tiers: Tiers, is_exact: bool) -> None:
    steps = Steps(seed)
    truth = Truth(steps.policy)
    left = iter(steps)
    is_over = False
    while not is_over:
        async with tiers.broker() as broker:
            run = await _begun(tiers, truth, broker, is_exact)
            is_over = await run_until_restart(run, left)


async def _begun(tiers: Tiers, truth: Truth, broker: Broker, is_exact: bool) -> Run:
    topic = broker.topics().get(TOPIC)
    if topic is None:
        topic = await broker.create_topic(CALLER, TOPIC, policy=truth.policy)
    return Run(tiers, truth, broker, key_of(topic), is_exact)


# --- and crashes in between ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(200, 200 + effort.of(6)))
async def test_a_crash_while_something_goes_takes_nothing_else_along(
    seed: int, tmp_path: Path
) -> None:
    steps, chosen = Steps(seed), random.Random(seed)
    truth = Truth(steps.policy)
    tiers = Tiers(tmp_path, fails=True)
    left = iter(steps)
    is_over = False
    while not is_over:
        async with tiers.broker() as broker:
            run = await _begun(tiers, truth, broker, is_exact=False)
            await _check_after_crash(run)
            is_over = await _run_until_crash(run, left, chosen)


async def _run_until_crash(run: Run, steps: Iterator[Step], chosen: random.Random) -> bool:
    """Whether the steps are at their end."""
    for step in steps:
        if step[0] == "restart":
            return False
        if step[0] in ("archive", "merge", "trim", "clean") and chosen.random() < 0.4:
            await _crash_in(run, step, chosen.randint(1, 12))
            return False
        await run.take(step)
    return True


async def _crash_in(run: Run, step: Step, operations: int) -> None:
    """Begin a step whose disk fails after so many operations. Either has come to pass what it does
    or not, and what it does has its bounds."""
    truth, now_ms = run.truth, run.tiers.clock()
    truth.may_begin_at = truth.first
    if step[0] == "clean":
        truth.may_begin_at = truth.expected_first(now_ms, run.units())
    elif step[0] == "trim":
        truth.may_begin_at = run.trimmed_by(step[1])
    disk = run.tiers.failing_disk
    assert disk is not None
    disk.fail_at = disk.operations + operations
    with suppress(QuackError, OSError):
        await run.begin(step)


async def _check_after_crash(run: Run) -> None:
    truth = run.truth
    first = (await run.broker.offsets(CALLER, run.key)).first
    assert truth.first <= first <= max(truth.first, truth.may_begin_at)
    truth.first = first
    await run.check()
