"""A broker whose wall clock jumps: what it stamps, deletes and forgets, and what it says.

Most tests run over a memory store, a local store and a local store with its archive; a restart
opens the same store again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from quackmq import limits
from quackmq.archive.tiered_store import TieredStore
from quackmq.broker import Broker, BrokerSettings, Commit
from quackmq.broker.timekeeping import STATE_KEY
from quackmq.clock import Clock
from quackmq.errors import DamagedStore, StorageError
from quackmq.groups import MemberRef
from quackmq.model.policy import Policy
from quackmq.model.topic import State
from quackmq.records.batch import Record
from quackmq.stores.contract import Store
from quackmq.stores.local import LocalOptions, LocalStore
from quackmq.stores.memory import MemoryStore
from tests.broker.stages import staged
from tests.broker.support import CALLER, NEVER_MS, TOPIC, key_of, publish, values_in
from tests.kit.machine_clock import DAY_MS, HOUR_MS, YEAR_MS, Machine
from tests.kit.support import START_MS, batch_of

WEEK = Policy(keep_for_ms=7 * DAY_MS, archive_after_ms=2 * DAY_MS)


class Home:
    """A machine with a data directory."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.machine = Machine()
        self.kind = kind
        self._directory = directory
        self._memory: MemoryStore | None = None

    @asynccontextmanager
    async def broker(self) -> AsyncIterator[Broker]:
        clock = self.machine.clock()
        store, tiered = await self._open(clock)
        settings = BrokerSettings(clean_interval_ms=NEVER_MS)
        broker = Broker(store, settings, clock, tiered)
        await broker.open()
        try:
            yield broker
        finally:
            await broker.close()
            if self.kind != "memory":
                await store.close()

    async def _open(self, clock: Clock) -> tuple[Store, TieredStore | None]:
        if self.kind == "memory":
            if self._memory is None:
                self._memory = MemoryStore()
            self._memory._committer._clock = clock
            return self._memory, None
        log = await LocalStore.open(self._directory, LocalOptions(sync="os"), clock)
        if self.kind == "local":
            return log, None
        tiered = await TieredStore.open(log, log.disk, clock)
        return tiered, tiered


@pytest.fixture(params=["memory", "local", "tiered"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Home:
    return Home(request.param, tmp_path / "data")


@pytest.fixture
def local(tmp_path: Path) -> Home:
    return Home("local", tmp_path / "data")


async def append_time(broker: Broker, value: bytes) -> int:
    """Publish, and return the time of the append."""
    key = key_of(broker.topic(TOPIC))
    offset = await publish(broker, value)
    (found,) = await broker._store.append_times(key, offset, offset + 1)
    return found.timestamp_ms


async def pass_days(home: Home, broker: Broker, days: int) -> None:
    """Let time pass day by day, with the housekeeping that a broker does meanwhile."""
    for _ in range(days):
        home.machine.pass_ms(DAY_MS)
        await broker.clean()


# --- within one boot --------------------------------------------------------------------------


async def test_one_jump_of_a_year_and_back_neither_freezes_append_times_nor_stops_retention(
    home: Home,
) -> None:
    async with home.broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=WEEK)
        await append_time(broker, b"a")
        home.machine.jump(YEAR_MS)
        assert await append_time(broker, b"b") == START_MS, "it is not a year later"
        await broker.clean()
        assert await values_in(broker) == [b"a", b"b"], "nothing became old"
        home.machine.pass_ms(HOUR_MS)
        home.machine.jump(-YEAR_MS)
        assert await append_time(broker, b"c") == START_MS + HOUR_MS
        await pass_days(home, broker, 6)
        assert await append_time(broker, b"d") == START_MS + HOUR_MS + 6 * DAY_MS
        home.machine.pass_ms(DAY_MS - HOUR_MS)
        await broker.clean()
        assert await values_in(broker) == [b"c", b"d"], "a week has passed for two of them"


async def test_a_wall_clock_that_is_set_back_stops_no_retention(home: Home) -> None:
    async with home.broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=WEEK)
        await append_time(broker, b"a")
        home.machine.jump(-YEAR_MS)
        home.machine.pass_ms(DAY_MS)
        assert await append_time(broker, b"b") == START_MS + DAY_MS
        await pass_days(home, broker, 6)
        assert await values_in(broker) == [b"b"]


async def test_a_jump_expires_no_group_publisher_stage_or_transactional_id(home: Home) -> None:
    async with home.broker() as broker:
        await keep_something_of_each_kind(broker)
        home.machine.jump(YEAR_MS)
        home.machine.pass_ms(HOUR_MS)
        await broker.clean()
        assert await kept_kinds(broker) == ALL_KINDS
        await pass_days(home, broker, 91)
        assert await kept_kinds(broker) == set(), "in their own time they go"


async def test_a_jump_makes_no_producer_forgotten(home: Home) -> None:
    async with home.broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        first = await publish_numbered(broker, 0)
        home.machine.jump(YEAR_MS)
        await publish_numbered(broker, 0, producer_id=8)
        assert await publish_numbered(broker, 0) == first, "a repeat is known as one"
        await broker.timekeeping.confirm(CALLER)
        await publish_numbered(broker, 1, producer_id=8)
        assert await publish_numbered(broker, 0) == first
        assert 7 in await broker._store.producers(key_of(topic))
        await pass_days(home, broker, 8)
        await publish_numbered(broker, 2, producer_id=8)
        assert 7 not in await broker._store.producers(key_of(topic))


async def test_archiving_by_age_goes_by_elapsed_time(tmp_path: Path) -> None:
    home = Home("tiered", tmp_path / "data")
    async with home.broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=WEEK)
        assert broker._archiver is not None
        await append_time(broker, b"a")
        home.machine.jump(YEAR_MS)
        assert not await broker._archiver._is_due(key_of(topic), topic.policy)
        home.machine.jump(-2 * YEAR_MS)
        home.machine.pass_ms(2 * DAY_MS)
        assert await broker._archiver._is_due(key_of(topic), topic.policy)


async def test_live_entries_expire_by_elapsed_time(home: Home) -> None:
    async with home.broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=Policy(live_for_ms=HOUR_MS))
        await publish(broker, b"a")
        live_tails = broker.pushing._live_tails
        home.machine.jump(YEAR_MS)
        assert await live_tails.first_live(topic, 0) == 0
        home.machine.jump(-2 * YEAR_MS)
        home.machine.pass_ms(HOUR_MS)
        assert await live_tails.first_live(topic, 0) == 1


async def test_confirming_a_jump_deletes_nothing_and_corrects_the_time(home: Home) -> None:
    async with home.broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=WEEK)
        await keep_something_of_each_kind(broker)
        await append_time(broker, b"a")
        home.machine.jump(YEAR_MS)
        assert broker.timekeeping.status(CALLER).status == "jumped"
        assert await broker.timekeeping.confirm(CALLER)
        assert broker.timekeeping.status(CALLER).status == "steady"
        assert not await broker.timekeeping.confirm(CALLER), "once is enough"
        assert await append_time(broker, b"b") == home.machine.wall_ms
        await broker.clean()
        assert await values_in(broker) == [b"a", b"b"]
        assert await kept_kinds(broker) == ALL_KINDS
    async with home.broker() as broker:  # a restart knows it still
        home.machine.pass_ms(7 * DAY_MS - 1)
        await broker.clean()
        assert await values_in(broker) == [b"a", b"b"]
        home.machine.pass_ms(limits.CLOCK_STEP_MS)  # at which it is looked at again
        await broker.clean()
        assert await values_in(broker) == []


# --- over restarts ----------------------------------------------------------------------------


async def test_a_jump_during_a_restart_within_a_boot_deletes_nothing_and_pauses_nothing(
    home: Home,
) -> None:
    async with home.broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=WEEK)
        await keep_something_of_each_kind(broker)
        await append_time(broker, b"a")
        await broker.clean()
    home.machine.pass_ms(DAY_MS)
    home.machine.jump(YEAR_MS)
    async with home.broker() as broker:
        assert broker.timekeeping.status(CALLER).status == "jumped"
        assert await append_time(broker, b"b") == START_MS + DAY_MS
        await broker.clean()
        assert await values_in(broker) == [b"a", b"b"]
        await pass_days(home, broker, 6)
        assert await values_in(broker) == [b"b"]


@pytest.mark.parametrize("jump_ms", [YEAR_MS, -YEAR_MS, limits.CLOCK_JUMP_MS + HOUR_MS])
async def test_a_jump_across_boots_pauses_deletion_and_expiry_until_the_clock_is_back(
    home: Home, jump_ms: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with home.broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=WEEK)
        await keep_something_of_each_kind(broker)
        await append_time(broker, b"a")
        await broker.clean()
    home.machine.reboot(HOUR_MS)
    home.machine.jump(jump_ms)
    async with home.broker() as broker:
        assert broker.timekeeping.status(CALLER).status == "paused"
        assert "Nothing is deleted or expired by age" in caplog.text
        assert "quackmq clock confirm" in caplog.text
        await pass_days(home, broker, 8)
        assert await append_time(broker, b"b") == START_MS + 1 + 8 * DAY_MS, (
            "times do not stand still"
        )
        await broker.clean()
        assert await values_in(broker) == [b"a", b"b"]
        assert "group" in await kept_kinds(broker)
        home.machine.jump(-jump_ms)
        await broker.clean()
        await broker.clean()
        assert broker.timekeeping.status(CALLER).status == "steady"
        assert await values_in(broker) == [b"b"]
        assert "group" not in await kept_kinds(broker)
        assert await append_time(broker, b"c") == home.machine.wall_ms


async def test_a_broker_that_was_off_for_a_month_deletes_when_that_is_confirmed(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    async with home.broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=WEEK)
        await append_time(broker, b"a")
        await broker.clean()
    home.machine.reboot(30 * DAY_MS)
    async with home.broker() as broker:
        home.machine.pass_ms(3 * DAY_MS)
        await append_time(broker, b"b")
        await broker.clean()
        assert await values_in(broker) == [b"a", b"b"]
        assert await broker.timekeeping.confirm(CALLER)
        assert "confirmed" in caplog.text
        await broker.clean()
        await broker.clean()
        assert await values_in(broker) == [b"b"], "what came meanwhile is not a month old"
        assert await append_time(broker, b"c") == home.machine.wall_ms
    home.machine.reboot(HOUR_MS)
    async with home.broker() as broker:
        assert broker.timekeeping.status(CALLER).status == "steady"
        assert await values_in(broker) == [b"b", b"c"]
        home.machine.pass_ms(7 * DAY_MS - 2 * HOUR_MS)
        await broker.clean()
        assert await values_in(broker) == [b"b", b"c"], "not a week old, whatever the stamp says"


async def test_a_confirmation_survives_a_crash_right_after_it(home: Home) -> None:
    async with home.broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=WEEK)
        await append_time(broker, b"a")
    home.machine.reboot(30 * DAY_MS)
    async with home.broker() as broker:
        await broker.clean()
        assert await broker.timekeeping.confirm(CALLER)
    async with home.broker() as broker:
        assert broker.timekeeping.status(CALLER).status == "steady"
        await broker.clean()
        assert await values_in(broker) == []


async def test_an_append_while_a_confirmation_is_stored_still_has_the_old_time(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it had the new time, a crash could keep the append and lose the confirmation."""
    async with home.broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=WEEK)
        await append_time(broker, b"a")
        home.machine.jump(YEAR_MS)
        put_state = broker._store.put_state

        async def append_first(key: str, value: bytes | None, version: int) -> State:
            assert await append_time(broker, b"b") == START_MS
            home.machine.pass_ms(3)
            return await put_state(key, value, version)

        monkeypatch.setattr(broker._store, "put_state", append_first)
        assert await broker.timekeeping.confirm(CALLER)
        monkeypatch.undo()
        assert await append_time(broker, b"c") == home.machine.wall_ms
    home.machine.reboot()
    async with home.broker() as broker:
        home.machine.pass_ms(7 * DAY_MS - 4)
        await broker.clean()
        assert await values_in(broker) == [b"a", b"b", b"c"]


async def test_a_confirmation_that_cannot_be_stored_changes_nothing(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with home.broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=WEEK)
        await keep_something_of_each_kind(broker)
        await broker.clean()
        home.machine.jump(YEAR_MS)

        async def fail(key: str, value: bytes | None, version: int) -> State:
            raise StorageError("the disk is full")

        monkeypatch.setattr(broker._store, "put_state", fail)
        with pytest.raises(StorageError, match="the disk is full"):
            await broker.timekeeping.confirm(CALLER)
        monkeypatch.undo()
        assert broker.timekeeping.status(CALLER).status == "jumped"
        assert await append_time(broker, b"a") == START_MS
    home.machine.reboot(HOUR_MS)
    async with home.broker() as broker:
        assert broker.timekeeping.status(CALLER).status == "paused"
        await broker.clean()
        assert await values_in(broker) == [b"a"]
        assert await kept_kinds(broker) == ALL_KINDS


async def test_of_two_confirmations_at_once_one_finds_nothing_to_confirm(home: Home) -> None:
    async with home.broker() as broker:
        home.machine.jump(YEAR_MS)
        both = [broker.timekeeping.confirm(CALLER) for _ in range(2)]
        assert sorted(await asyncio.gather(*both)) == [False, True]
        assert broker.timekeeping.status(CALLER).time_ms == home.machine.wall_ms


async def test_a_pause_survives_a_restart_of_the_process(home: Home) -> None:
    async with home.broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=WEEK)
        await append_time(broker, b"a")
    home.machine.reboot(YEAR_MS)
    async with home.broker() as broker:
        await broker.clean()
    home.machine.pass_ms(8 * DAY_MS)
    async with home.broker() as broker:
        assert broker.timekeeping.status(CALLER).status == "paused"
        await broker.clean()
        assert await values_in(broker) == [b"a"]


async def test_what_came_after_a_long_outage_keeps_its_age_though_the_machine_crashed_at_once(
    home: Home,
) -> None:
    async with home.broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=WEEK)
        await append_time(broker, b"a")
    home.machine.reboot(30 * DAY_MS)
    async with home.broker() as broker:  # which never comes to its housekeeping
        home.machine.pass_ms(1)
        await append_time(broker, b"b")
    home.machine.reboot(HOUR_MS)
    async with home.broker() as broker:
        assert await broker.timekeeping.confirm(CALLER)
        await broker.clean()
        await broker.clean()
        assert await values_in(broker) == [b"b"]


async def test_a_jump_across_the_first_boot_expires_no_group_though_nothing_was_appended(
    home: Home,
) -> None:
    async with home.broker() as broker:  # which never comes to its housekeeping
        topic = await broker.create_topic(CALLER, TOPIC)
        commits = [Commit(key_of(topic), 0, "")]
        assert await broker.groups.commit(CALLER, "group", MemberRef("", -1), commits) == [None]
    home.machine.reboot(YEAR_MS)
    async with home.broker() as broker:
        assert broker.timekeeping.status(CALLER).status == "paused"
        await broker.clean()
        assert [group.name for group in broker.groups.all(CALLER)] == ["group"]


async def test_while_the_clock_is_paused_the_cleaner_does_not_look_again_and_again(
    local: Home,
) -> None:
    home = local
    async with home.broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=WEEK)
        await append_time(broker, b"a")
        home.machine.pass_ms(8 * DAY_MS)
        await append_time(broker, b"b")
    home.machine.reboot(YEAR_MS)
    async with home.broker() as broker:
        await broker.clean()
        await append_time(broker, b"c")
        home.machine.pass_ms(8 * DAY_MS)
        await broker.clean()
        (partition,) = broker._retention._partitions[topic.id]
        now_ms = broker.timekeeping.status(CALLER).time_ms
        assert partition.due_ms == now_ms + limits.CLOCK_STEP_MS
        assert broker._retention._pop_due() == []


async def test_an_outage_of_a_few_days_is_time_that_passed(home: Home) -> None:
    async with home.broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=WEEK)
        await append_time(broker, b"a")
        home.machine.pass_ms(4 * DAY_MS)
        await broker.clean()
    home.machine.reboot(3 * DAY_MS)
    async with home.broker() as broker:
        assert broker.timekeeping.status(CALLER).status == "steady"
        await broker.clean()
        assert await values_in(broker) == []


async def test_a_broker_that_ran_for_a_month_without_an_append_is_not_taken_for_one_that_was_off(
    home: Home,
) -> None:
    async with home.broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await append_time(broker, b"a")
        await pass_days(home, broker, 30)
    home.machine.reboot(HOUR_MS)
    async with home.broker() as broker:
        assert broker.timekeeping.status(CALLER).status == "steady"


async def test_a_store_that_an_older_version_left_a_year_ahead_recovers_when_it_is_confirmed(
    local: Home,
) -> None:
    """Older versions followed the jump: all appends had the time of the jump."""
    home = local
    async with home.broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=WEEK)
        await append_time(broker, b"a")
        home.machine.pass_ms(YEAR_MS)  # what such a version took for elapsed
        await append_time(broker, b"b")
    home.machine.reboot(HOUR_MS - YEAR_MS)
    async with home.broker() as broker:
        await broker.clean()
        assert await values_in(broker) == [b"a", b"b"]
        assert await broker.timekeeping.confirm(CALLER)
        await broker.clean()
        assert await values_in(broker) == [b"a", b"b"], "an hour old by the wall clock"
        first_ms = await append_time(broker, b"c")
        await pass_days(home, broker, 8)
        assert await values_in(broker) == [], "retention goes on"
        assert first_ms < await append_time(broker, b"d"), "and so do append times"


async def test_a_crash_between_two_heartbeats_knows_the_time_of_the_last_append(
    local: Home,
) -> None:
    home = local
    async with home.broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await broker.clean()
        home.machine.pass_ms(limits.CLOCK_KEEP_MS - 1)
        await broker.clean()
        last_ms = await append_time(broker, b"a")
    home.machine.reboot()
    home.machine.jump(-HOUR_MS)
    async with home.broker() as broker:
        assert await append_time(broker, b"b") >= last_ms


async def test_the_time_is_told_to_the_store_at_its_interval_and_not_more_often(
    local: Home,
) -> None:
    home = local
    async with home.broker() as broker:
        await broker.clean()
        before = (await broker._store.state(STATE_KEY)).version
        home.machine.pass_ms(limits.CLOCK_KEEP_MS - 1)
        await broker.clean()
        assert (await broker._store.state(STATE_KEY)).version == before
        home.machine.pass_ms(1)
        await broker.clean()
        assert (await broker._store.state(STATE_KEY)).version == before + 1


@pytest.mark.parametrize("value", [b"{", b"[]", b'{"time_ms": 3}', b'{"gaps": [[1]]}'])
async def test_a_damaged_time_is_named(home: Home, value: bytes) -> None:
    async with home.broker() as broker:
        state = await broker._store.state(STATE_KEY)
        await broker._store.put_state(STATE_KEY, value, state.version)
    with pytest.raises(DamagedStore, match="the time in the store"):
        async with home.broker():
            pass


async def test_every_state_of_the_clock_is_logged_once(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="quackmq.broker.timekeeping")
    async with home.broker() as broker:
        for jump_ms, word in (
            (YEAR_MS, "365.0 days ahead of the broker's clock"),
            (-YEAR_MS, "agree again"),
            (HOUR_MS, "3600 s ahead of the broker's clock"),
            (-HOUR_MS, "agree again"),
        ):
            caplog.clear()
            home.machine.jump(jump_ms)
            await broker.clean()
            await broker.clean()
            assert caplog.text.count(word) == 1


# --- things that expire -----------------------------------------------------------------------

ALL_KINDS = {"group", "publisher", "stage", "transactional id"}


async def keep_something_of_each_kind(broker: Broker) -> None:
    """A group with an offset, a numbered publisher, a stage and a transactional id."""
    topic = await broker.create_topic(CALLER, "kept")
    commits = [Commit(key_of(topic), 0, "")]
    assert await broker.groups.commit(CALLER, "group", MemberRef("", -1), commits) == [None]
    record = Record(0, START_MS, None, b"first")
    await broker.messages.put(CALLER, "kept", [record], publisher="publisher", sequence=1)
    batches = [staged(broker, b"staged", topic="kept")]
    await broker.staging.stage(CALLER, "stage", "part", 0, batches)
    await broker.transactions.init(CALLER, "transactional", 60_000)


async def kept_kinds(broker: Broker) -> set[str]:
    names = {each.name for each in broker.groups.all(CALLER)}
    kinds = {"group": "group" in names}
    kinds["publisher"] = any("publisher" in name for name in names)
    kinds["stage"] = bool(broker.staging.all(CALLER))
    kinds["transactional id"] = bool(broker.transactions.all(CALLER))
    return {kind for kind, is_kept in kinds.items() if is_kept}


async def publish_numbered(broker: Broker, number: int, producer_id: int = 7) -> int:
    batch = batch_of(b"x", producer_id=producer_id, producer_epoch=0, base_sequence=number)
    return (await broker.publish(CALLER, broker.topic(TOPIC), 0, batch)).base_offset
