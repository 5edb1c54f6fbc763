"""What a publisher meets at a full topic, by `when_full`."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import pytest

from quackmq.broker import Broker
from quackmq.broker import limits as broker_limits
from quackmq.errors import (
    BrokerClosing,
    RecordTooLarge,
    StoreReadOnly,
    TopicFull,
    UnknownTopic,
)
from quackmq.model.policy import Policy, WhenFull
from quackmq.model.topic import AppendResult, OffsetTime, PartitionKey, TimeKind
from quackmq.stores.memory import MemoryStore
from tests.broker.support import (
    CALLER,
    NAME,
    TOPIC,
    FailingStore,
    SlowStore,
    get,
    get_all,
    key_of,
    open_broker,
    publish,
    publish_each,
    values_in,
    values_of,
)
from tests.kit import effort
from tests.kit.support import Clock, batch_of, let_others_run
from tests.kit.waiting import until


def three(when_full: WhenFull, **others: Any) -> Policy:
    return Policy(live_entries=3, when_full=when_full, **others)


def start_publish(
    broker: Broker, *values: bytes, partition: int = 0
) -> asyncio.Future[AppendResult]:
    call = broker.publish(CALLER, broker.topic(TOPIC), partition, batch_of(*values))
    return asyncio.ensure_future(call)


# --- archive ------------------------------------------------------------------------------------


async def test_by_default_there_is_always_room_and_all_history_stays() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=three(WhenFull.ARCHIVE, live_for_ms=10))
        await publish_each(broker, b"a", b"b", b"c", b"d", b"e")
        await broker.clean()
        assert await values_in(broker) == [b"a", b"b", b"c", b"d", b"e"]


# --- refuse -------------------------------------------------------------------------------------


async def test_a_full_topic_refuses_and_names_itself() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=three(WhenFull.REFUSE))
        await publish(broker, b"a", b"b")
        with pytest.raises(TopicFull, match=f"{TOPIC}.*3"):
            await publish(broker, b"c", b"d")
        await publish(broker, b"c")
        with pytest.raises(TopicFull):
            await publish(broker, b"d")
        assert await values_in(broker) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("when_full", [WhenFull.REFUSE, WhenFull.WAIT])
async def test_a_repeat_to_a_full_topic_is_answered_like_the_first(when_full: WhenFull) -> None:
    batch = batch_of(b"a", b"b", b"c", producer_id=7, producer_epoch=0, base_sequence=0)
    async with open_broker(full_topic_wait_ms=0) as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=three(when_full))
        first = await broker.publish(CALLER, topic, 0, batch)
        repeat = await broker.publish(CALLER, topic, 0, batch)
        assert repeat == first._replace(repeated=True)
        with pytest.raises(TopicFull):
            await publish(broker, b"d")


async def test_every_partition_is_full_for_itself() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2, policy=three(WhenFull.REFUSE))
        await publish(broker, b"a", b"b", b"c", partition=0)
        await publish(broker, b"a", b"b", b"c", partition=1)
        with pytest.raises(TopicFull):
            await publish(broker, b"d", partition=1)


async def test_entries_that_expire_make_room() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        policy = three(WhenFull.REFUSE, live_for_ms=1000)
        await broker.create_topic(CALLER, TOPIC, policy=policy)
        await publish(broker, b"a")
        clock.advance(500)
        await publish(broker, b"b", b"c")
        clock.advance(499)
        with pytest.raises(TopicFull):
            await publish(broker, b"d")
        clock.advance(1)
        await publish(broker, b"d")
        with pytest.raises(TopicFull):
            await publish(broker, b"e")
        # What has left the live window is history, and stays.
        assert await values_in(broker) == [b"a", b"b", b"c", b"d"]


async def test_what_all_have_consumed_makes_room_at_once() -> None:
    async with open_broker() as broker:
        policy = three(WhenFull.REFUSE, keep_until_consumed=True)
        await broker.create_topic(CALLER, TOPIC, policy=policy)
        await broker.subscribe(CALLER, NAME, TOPIC, "beginning")
        await publish(broker, b"a", b"b", b"c")
        first = await get(broker)
        with pytest.raises(TopicFull):
            await publish(broker, b"d")
        await get(broker, first)
        await publish(broker, b"d")
        with pytest.raises(TopicFull):
            await publish(broker, b"e")


async def test_what_is_on_its_way_to_the_store_counts() -> None:
    store = SlowStore(Clock())
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=three(WhenFull.REFUSE))
        first = start_publish(broker, b"a", b"b")
        await until(lambda: store.appends == 1)
        with pytest.raises(TopicFull):
            broker.publish(CALLER, broker.topic(TOPIC), 0, batch_of(b"c", b"d"))
        store.released.set()
        await first
        await publish(broker, b"c")


async def test_a_repeat_takes_no_room() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=three(WhenFull.REFUSE))
        batch = batch_of(b"a", producer_id=7, producer_epoch=0, base_sequence=0)
        await broker.publish(CALLER, topic, 0, batch)
        assert (await broker.publish(CALLER, topic, 0, batch)).repeated
        await publish(broker, b"b", b"c")


async def test_a_failed_append_takes_no_room() -> None:
    store = FailingStore(Clock())
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=three(WhenFull.REFUSE))
        await publish(broker, b"a")
        store.append_error = StoreReadOnly("the disk is full")
        with pytest.raises(StoreReadOnly):
            await publish(broker, b"b", b"c")
        store.append_error = None
        await publish(broker, b"b", b"c")


@pytest.mark.parametrize("when_full", [WhenFull.REFUSE, WhenFull.WAIT])
async def test_a_batch_that_never_fits_is_refused_for_good(when_full: WhenFull) -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=three(when_full))
        with pytest.raises(RecordTooLarge, match="never fits"):
            await publish(broker, b"a", b"b", b"c", b"d")


async def test_a_restart_forgets_neither_what_is_live_nor_what_has_expired() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    async with open_broker(store, clock) as broker:
        policy = three(WhenFull.REFUSE, live_for_ms=1000)
        await broker.create_topic(CALLER, TOPIC, policy=policy)
        await publish(broker, b"a")
        clock.advance(500)
        await publish(broker, b"b", b"c")
    async with open_broker(store, clock) as broker:
        with pytest.raises(TopicFull):
            await publish(broker, b"d")
        clock.advance(500)
        await broker.clean()
        await publish(broker, b"d")
        with pytest.raises(TopicFull):
            await publish(broker, b"e")
        clock.advance(500)
        await broker.clean()
        await publish(broker, b"e", b"f")
        with pytest.raises(TopicFull):
            await publish(broker, b"g")


# --- wait ---------------------------------------------------------------------------------------


async def test_a_publisher_waits_until_entries_expire() -> None:
    clock = Clock()
    async with open_broker(clock=clock, clean_interval_ms=1) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=three(WhenFull.WAIT, live_for_ms=1000))
        await publish(broker, b"a", b"b", b"c")
        waiting = start_publish(broker, b"d")
        await let_others_run()
        assert not waiting.done()
        clock.advance(1000)
        assert (await waiting).base_offset == 3


async def test_a_publisher_is_woken_by_a_trim() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=three(WhenFull.WAIT))
        await publish(broker, b"a", b"b", b"c")
        waiting = start_publish(broker, b"d")
        await let_others_run()
        assert not waiting.done()
        await broker.trim(CALLER, key_of(topic), 1)
        assert (await waiting).base_offset == 3


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        (three(WhenFull.WAIT, keep_until_consumed=True), [b"b", b"c", b"d"]),
        (three(WhenFull.WAIT_UNTIL_CONSUMED), [b"a", b"b", b"c", b"d"]),
    ],
)
async def test_a_publisher_is_woken_by_the_last_subscriber_that_consumes(
    policy: Policy, left: list[bytes]
) -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=policy)
        await broker.subscribe(CALLER, "fast", TOPIC)
        await broker.subscribe(CALLER, "slow", TOPIC)
        await publish(broker, b"a", b"b", b"c")
        waiting = start_publish(broker, b"d")
        await get_all(broker, name="fast")
        await let_others_run()
        assert not waiting.done()
        last = await get(broker, name="slow")
        assert (await get(broker, last, name="slow")).record.value == b"b"
        await waiting
        await broker.clean()
        assert await values_in(broker) == left


async def test_a_subscriber_that_leaves_lets_publishers_in() -> None:
    async with open_broker() as broker:
        policy = three(WhenFull.WAIT, keep_until_consumed=True)
        await broker.create_topic(CALLER, TOPIC, policy=policy)
        await broker.subscribe(CALLER, "fast", TOPIC)
        await broker.subscribe(CALLER, "slow", TOPIC)
        await publish(broker, b"a", b"b", b"c")
        await get_all(broker, name="fast")
        waiting = start_publish(broker, b"d")
        await let_others_run()
        assert not waiting.done()
        await broker.unsubscribe(CALLER, "slow", TOPIC)
        await waiting


async def test_publishers_are_admitted_in_the_order_in_which_they_came() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=three(WhenFull.WAIT))
        await publish(broker, b"0", b"1", b"2")
        # The second would fit before the first, and still waits its turn.
        waiting = [start_publish(broker, b"3", b"4", b"5"), start_publish(broker, b"6")]
        await let_others_run()
        await broker.trim(CALLER, key_of(topic), 1)
        await let_others_run()
        assert not any(publisher.done() for publisher in waiting)
        await broker.trim(CALLER, key_of(topic), 3)
        assert (await waiting[0]).base_offset == 3
        late = start_publish(broker, b"7")
        await broker.trim(CALLER, key_of(topic), 6)
        assert [(await publisher).base_offset for publisher in (waiting[1], late)] == [6, 7]


async def test_waiting_has_an_end() -> None:
    async with open_broker(full_topic_wait_ms=5) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=three(WhenFull.WAIT))
        await publish(broker, b"a", b"b", b"c")
        with pytest.raises(TopicFull, match="waited 5 ms"):
            await publish(broker, b"d")
        assert await values_in(broker) == [b"a", b"b", b"c"]


async def test_a_broker_that_lets_nobody_wait_still_takes_what_there_is_room_for() -> None:
    async with open_broker(full_topic_wait_ms=0) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=three(WhenFull.WAIT))
        await publish(broker, b"a", b"b", b"c")
        with pytest.raises(TopicFull):
            await publish(broker, b"d")


async def test_one_that_gives_up_lets_a_smaller_one_in() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=three(WhenFull.WAIT))
        await publish(broker, b"a", b"b")
        large = start_publish(broker, b"c", b"d")
        small = start_publish(broker, b"e")
        await let_others_run()
        assert not small.done()
        large.cancel()
        assert (await small).base_offset == 2
        assert await values_in(broker) == [b"a", b"b", b"e"]


async def test_other_topics_and_partitions_do_not_notice() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2, policy=three(WhenFull.WAIT))
        await broker.create_topic(CALLER, "other", policy=three(WhenFull.WAIT))
        await publish(broker, b"a", b"b", b"c")
        waiting = start_publish(broker, b"d")
        await let_others_run()
        await publish(broker, b"x", partition=1)
        await publish(broker, b"y", topic="other")
        assert not waiting.done()
        waiting.cancel()


async def test_the_bytes_of_one_who_waits_are_its_own() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=three(WhenFull.WAIT))
        await publish(broker, b"a", b"b", b"c")
        buffer = bytearray(batch_of(b"d").view)
        batch = batch_of(b"d")._replace(view=memoryview(buffer))
        waiting = asyncio.ensure_future(broker.publish(CALLER, topic, 0, batch))
        buffer[:] = bytes(len(buffer))
        await let_others_run()
        await broker.trim(CALLER, key_of(topic), 3)
        await waiting
        assert await values_in(broker) == [b"d"]


async def test_closing_ends_the_wait_for_room() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=three(WhenFull.WAIT))
        await publish(broker, b"a", b"b", b"c")
        waiting = start_publish(broker, b"d")
        await let_others_run()
    with pytest.raises(BrokerClosing):
        await waiting


async def test_deleting_the_topic_ends_the_wait_for_room() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=three(WhenFull.WAIT))
        await publish(broker, b"a", b"b", b"c")
        waiting = start_publish(broker, b"d")
        await let_others_run()
        await broker.delete_topic(CALLER, TOPIC)
        with pytest.raises(UnknownTopic):
            await waiting


@pytest.mark.parametrize(
    ("policy", "is_refused"),
    [
        (Policy(), False),
        (Policy(live_entries=4, when_full=WhenFull.WAIT), False),
        (Policy(live_entries=3, when_full=WhenFull.DROP_OLDEST), False),
        (Policy(live_entries=3, when_full=WhenFull.REFUSE), True),
    ],
)
async def test_another_policy_decides_anew_about_those_who_wait(
    policy: Policy, is_refused: bool
) -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=three(WhenFull.WAIT))
        await publish(broker, b"a", b"b", b"c")
        waiting = start_publish(broker, b"d")
        await let_others_run()
        await broker.alter_topic(CALLER, TOPIC, policy=policy)
        if is_refused:
            with pytest.raises(TopicFull):
                await waiting
        else:
            assert (await waiting).base_offset == 3


async def test_only_so_many_publishers_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=three(WhenFull.WAIT))
        await publish(broker, b"a", b"b", b"c")
        monkeypatch.setattr(broker_limits, "WAITING_PUBLISHERS", 1)
        waiting = start_publish(broker, b"d")
        with pytest.raises(TopicFull, match="1 publishers"):
            await publish(broker, b"e")
        monkeypatch.setattr(broker_limits, "WAITING_PUBLISHERS", 10)
        monkeypatch.setattr(broker_limits, "WAITING_PUBLISH_BYTES", 100)
        with pytest.raises(TopicFull):
            await publish(broker, b"e")
        waiting.cancel()
        await let_others_run()


class _SlowOffsets(MemoryStore):
    """What a partition has to know before it can admit anybody takes its time, or fails."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.go_on = asyncio.Event()
        self.error: Exception | None = None

    async def offset_for_time(
        self, key: PartitionKey, time_ms: int, kind: TimeKind = "timestamp"
    ) -> OffsetTime | None:
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        return await super().offset_for_time(key, time_ms, kind)


async def _two_live_entries(store: MemoryStore, clock: Clock) -> None:
    async with open_broker(store, clock) as broker:
        await broker.create_topic(CALLER, TOPIC)
        await publish(broker, b"a", b"b")
        await broker.alter_topic(CALLER, TOPIC, policy=three(WhenFull.REFUSE, live_for_ms=1000))


async def test_the_first_publishers_after_a_restart_keep_their_order() -> None:
    clock = Clock()
    store = _SlowOffsets(clock)
    await _two_live_entries(store, clock)
    async with open_broker(store, clock) as broker:
        first, second = start_publish(broker, b"c"), start_publish(broker, b"d")
        await let_others_run()
        assert not first.done() and not second.done()
        store.go_on.set()
        assert (await first).base_offset == 2
        with pytest.raises(TopicFull):
            await second


async def test_a_store_that_cannot_say_what_is_live_fails_publishers_and_is_asked_again() -> None:
    clock = Clock()
    store = _SlowOffsets(clock)
    await _two_live_entries(store, clock)
    async with open_broker(store, clock) as broker:
        store.error = StoreReadOnly("no")
        store.go_on.set()
        with pytest.raises(StoreReadOnly):
            await publish(broker, b"c")
        store.error = None
        assert await publish(broker, b"c") == 2


@pytest.mark.parametrize("seed", range(effort.of(20)))
async def test_whatever_happens_entries_are_few_in_order_and_never_doubled(seed: int) -> None:
    """Publishers come and give up, entries go, policies change: whoever was answered is in the log
    once, in the order of the calls, and nobody waits where there is room."""
    chance = random.Random(seed)
    clock = Clock()
    policies = [
        three(WhenFull.WAIT),
        three(WhenFull.WAIT, live_for_ms=50),
        three(WhenFull.REFUSE),
        Policy(live_entries=5, when_full=WhenFull.WAIT),
        Policy(),
    ]
    async with open_broker(clock=clock) as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=policies[0])
        publishers: list[asyncio.Future[AppendResult]] = []
        for number in range(150):
            action = chance.random()
            if action < 0.5:
                try:
                    publishers.append(start_publish(broker, b"%d" % number))
                except TopicFull:
                    pass
            elif action < 0.65 and publishers:
                chance.choice(publishers).cancel()
            elif action < 0.85:
                offsets = await broker.offsets(CALLER, key_of(topic))
                await broker.trim(
                    CALLER, key_of(topic), chance.randint(offsets.first, offsets.next)
                )
            elif action < 0.95:
                clock.advance(chance.randrange(60))
                await broker.clean()
            else:
                await broker.alter_topic(CALLER, TOPIC, policy=chance.choice(policies))
            if chance.random() < 0.5:
                await let_others_run(chance.randrange(5))
        await broker.alter_topic(CALLER, TOPIC, policy=Policy())
        outcomes = await asyncio.gather(*publishers, return_exceptions=True)
        answered = [each.base_offset for each in outcomes if not isinstance(each, BaseException)]
        assert answered == sorted(set(answered))
        for outcome in outcomes:
            assert isinstance(outcome, AppendResult | TopicFull | asyncio.CancelledError)
        assert await publish(broker, b"last") >= len(answered)


# --- drop the oldest ----------------------------------------------------------------------------


async def test_a_full_topic_drops_its_oldest_before_it_answers() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=three(WhenFull.DROP_OLDEST))
        await publish_each(broker, b"a", b"b", b"c", b"d")
        assert await values_in(broker) == [b"b", b"c", b"d"]
        await publish(broker, b"e", b"f", b"g", b"h", b"i")
        assert await values_in(broker) == [b"g", b"h", b"i"]


async def test_many_publishers_at_once_leave_the_newest() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=three(WhenFull.DROP_OLDEST))
        await asyncio.gather(*(publish(broker, b"%d" % number) for number in range(50)))
        assert await values_in(broker) == [b"47", b"48", b"49"]


async def test_a_slow_subscriber_goes_on_at_the_beginning_and_hears_what_it_lost() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=three(WhenFull.DROP_OLDEST))
        await broker.subscribe(CALLER, NAME, TOPIC)
        await publish_each(broker, *(b"%d" % number for number in range(10)))
        message = await get(broker)
        assert (message.record.value, message.lost) == (b"7", 7)
        assert await get(broker) == message, "sent again, it says the same"
        rest = await get_all(broker, message)
        assert values_of(rest) == [b"8", b"9"]
        assert [each.lost for each in rest] == [0, 0]


async def test_entries_that_have_expired_are_not_dropped_for_new_ones() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        policy = three(WhenFull.DROP_OLDEST, live_for_ms=1000)
        await broker.create_topic(CALLER, TOPIC, policy=policy)
        await publish_each(broker, b"a", b"b", b"c")
        clock.advance(1000)
        await publish_each(broker, b"d", b"e", b"f")
        assert await values_in(broker) == [b"a", b"b", b"c", b"d", b"e", b"f"]
        await publish(broker, b"g")
        assert await values_in(broker) == [b"e", b"f", b"g"]


async def test_a_publish_stands_where_dropping_fails_and_the_cleaner_makes_up_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = FailingStore(Clock())
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=three(WhenFull.DROP_OLDEST))
        store.trim_error = StoreReadOnly("no more room")
        with caplog.at_level(logging.ERROR):
            await publish_each(broker, b"a", b"b", b"c", b"d", b"e")
        assert [record.message.count(TOPIC) for record in caplog.records] == [1], "told once"
        assert len(await values_in(broker)) == 5
        store.trim_error = None
        await broker.clean()
        assert await values_in(broker) == [b"c", b"d", b"e"]


async def test_a_topic_that_is_told_to_drop_later_drops_at_the_next_cleaning() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await publish_each(broker, b"a", b"b", b"c", b"d", b"e")
        await broker.alter_topic(CALLER, TOPIC, policy=three(WhenFull.DROP_OLDEST))
        await broker.clean()
        assert await values_in(broker) == [b"c", b"d", b"e"]
