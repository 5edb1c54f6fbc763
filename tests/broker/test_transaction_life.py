"""Transactions over time: what a restart finds, when time is up, what happens meanwhile."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from quackmq.broker import TransactionState
from quackmq.broker import limits as broker_limits
from quackmq.errors import (
    BrokerClosing,
    ConcurrentTransactions,
    InvalidProducerIdMapping,
    InvalidTransactionState,
    ProducerFenced,
    StoreReadOnly,
    TopicFull,
    UnknownTopic,
    UnknownTransactionalId,
)
from quackmq.model.policy import Policy, WhenFull
from quackmq.model.topic import Append
from quackmq.stores.memory import MemoryStore
from tests.broker.flock import Pond, in_virtual_time
from tests.broker.support import (
    CALLER,
    TOPIC,
    FailingStore,
    SlowStore,
    key_of,
    open_broker,
    publish,
    values_in,
)
from tests.broker.transacting import (
    ID,
    OTHER_TOPIC,
    TIMEOUT_MS,
    Transactor,
    committed_values,
    stable,
    state_of,
    topics,
)
from tests.kit.support import Clock, batch_of, let_others_run
from tests.kit.waiting import until

# --- restarts ------------------------------------------------------------------------------


async def test_an_open_transaction_is_found_again_and_goes_on(pond: Pond, implicit: bool) -> None:
    async with pond.open() as broker:
        await topics(broker)
        duck = Transactor(broker, implicit=implicit)
        await duck.init()
        await duck.send(b"a")
        await duck.send(b"b", topic=OTHER_TOPIC)
    async with pond.open() as broker:
        duck.broker = broker
        found = broker.transactions.describe(CALLER, ID)
        assert found.state is TransactionState.ONGOING
        assert {key.topic_id for key in found.partitions} == {
            broker.topic(TOPIC).id,
            broker.topic(OTHER_TOPIC).id,
        }
        await duck.send(b"c", partition=1)
        await duck.commit()
        assert await committed_values(broker) == [b"a"]
        assert await committed_values(broker, partition=1) == [b"c"]
        assert await committed_values(broker, OTHER_TOPIC) == [b"b"]


async def test_what_was_added_before_a_restart_may_be_written_to_after_it(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        duck = Transactor(broker, implicit=False)
        await duck.init()
        await duck.add(key_of(broker.topic(TOPIC)))
    async with pond.open() as broker:
        duck.broker = broker
        await duck.write(b"a")
        await duck.commit()
        assert await committed_values(broker) == [b"a"]
        with pytest.raises(InvalidTransactionState):
            await duck.write(b"b")


@pytest.mark.parametrize("had_committed", [False, True])
async def test_what_was_added_before_a_restart_and_not_written_to_can_be_aborted(
    pond: Pond, had_committed: bool
) -> None:
    async with pond.open() as broker:
        await topics(broker)
        duck = Transactor(broker, implicit=False)
        await duck.init()
        if had_committed:
            await duck.send(b"a")
            await duck.commit()
        await duck.add(key_of(broker.topic(TOPIC), 1))
    async with pond.open() as broker:
        duck.broker = broker
        await duck.abort()
        with pytest.raises(InvalidTransactionState):
            await duck.commit()


async def test_a_crash_leaves_an_open_transaction_open_and_an_ended_one_ended(
    tmp_path: Path, implicit: bool
) -> None:
    directory, crashed = tmp_path / "pond", tmp_path / "crashed"
    pond = Pond("local", directory, Clock())
    async with pond.open() as broker:
        await topics(broker)
        ended, opened = (Transactor(broker, name, implicit=implicit) for name in ("one", "two"))
        await ended.init()
        await opened.init()
        await ended.send(b"a")
        await ended.commit()
        await opened.send(b"b")
        shutil.copytree(directory, crashed)
    async with Pond("local", crashed, Clock()).open() as broker:
        opened.broker = broker
        assert await committed_values(broker) == [b"a"]
        assert state_of(broker, "one") is TransactionState.COMPLETE_COMMIT
        assert state_of(broker, "two") is TransactionState.ONGOING
        await opened.commit()
        assert await committed_values(broker) == [b"a", b"b"]


async def test_what_is_open_of_a_producer_that_nobody_knows_is_aborted(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        key = key_of(broker.topic(TOPIC))
    async with pond.open_store() as store:
        batch = batch_of(
            b"lost", producer_id=99, producer_epoch=3, base_sequence=0, transactional=True
        )
        await store.append([Append(key, batch)])
        assert (await store.offsets(key)).stable == 0
    async with pond.open() as broker:
        assert await stable(broker) == 2
        assert await committed_values(broker) == []


# --- time ----------------------------------------------------------------------------------


@in_virtual_time
async def test_a_transaction_that_takes_too_long_is_aborted_and_its_producer_fenced() -> None:
    async with open_broker() as broker:
        await topics(broker)
        duck = Transactor(broker)
        producer_id, epoch = await duck.init(timeout_ms=5_000)
        await duck.send(b"a")
        await asyncio.sleep(4.9)
        assert await stable(broker) == 0
        await asyncio.sleep(0.2)
        assert await stable(broker) == 2
        assert state_of(broker) is TransactionState.COMPLETE_ABORT
        for call in (duck.commit(), duck.write(b"b"), duck.init(named=True)):
            with pytest.raises(ProducerFenced):
                await call
        assert await duck.init() == (producer_id, epoch + 2)
        assert await committed_values(broker) == []


@in_virtual_time
async def test_every_transaction_has_its_own_time() -> None:
    async with open_broker() as broker:
        await topics(broker)
        duck = Transactor(broker)
        await duck.init(timeout_ms=5_000)
        for value in (b"a", b"b", b"c"):
            await duck.send(value)
            await asyncio.sleep(4)
            await duck.commit()
        await asyncio.sleep(100)
        assert await committed_values(broker) == [b"a", b"b", b"c"]
        await duck.send(b"d")  # idle time is nobody's
        await duck.commit()


@in_virtual_time
async def test_a_transaction_without_any_record_also_times_out() -> None:
    async with open_broker() as broker:
        await topics(broker)
        duck = Transactor(broker, implicit=False)
        await duck.init(timeout_ms=5_000)
        await duck.add(key_of(broker.topic(TOPIC)))
        await asyncio.sleep(6)
        with pytest.raises(ProducerFenced):
            await duck.write(b"a")


@in_virtual_time
async def test_time_begins_anew_after_a_restart() -> None:
    store = MemoryStore(Clock())
    async with open_broker(store) as broker:
        await topics(broker)
        duck = Transactor(broker)
        await duck.init(timeout_ms=5_000)
        await duck.send(b"a")
        await asyncio.sleep(4)
    async with open_broker(store) as broker:
        await asyncio.sleep(4)
        assert state_of(broker) is TransactionState.ONGOING
        await asyncio.sleep(2)
        assert state_of(broker) is TransactionState.COMPLETE_ABORT


@in_virtual_time
async def test_an_abort_that_fails_is_tried_again() -> None:
    store = FailingStore(Clock())
    async with open_broker(store) as broker:
        await topics(broker)
        duck = Transactor(broker)
        await duck.init(timeout_ms=5_000)
        await duck.send(b"a")
        store.append_error = StoreReadOnly("the disk is full")
        with pytest.raises(StoreReadOnly):
            await duck.commit()
        await asyncio.sleep(6)
        assert state_of(broker) is TransactionState.ONGOING
        store.append_error = None
        await asyncio.sleep(broker_limits.TRANSACTION_ABORT_AGAIN_MS / 1000)
        assert state_of(broker) is TransactionState.COMPLETE_ABORT


@in_virtual_time
async def test_an_end_that_fails_can_be_asked_for_again() -> None:
    store = FailingStore(Clock())
    async with open_broker(store) as broker:
        await topics(broker)
        duck = Transactor(broker)
        await duck.init()
        await duck.send(b"a")
        store.append_error = StoreReadOnly("the disk is full")
        with pytest.raises(StoreReadOnly):
            await duck.commit()
        store.append_error = None
        await duck.commit()
        assert await committed_values(broker) == [b"a"]


@in_virtual_time
async def test_an_id_that_is_not_used_is_forgotten() -> None:
    clock = Clock()
    async with open_broker(MemoryStore(clock), clock) as broker:
        await topics(broker)
        idle, busy = Transactor(broker, "idle"), Transactor(broker, "busy")
        await idle.init()
        await busy.init(timeout_ms=broker_limits.TRANSACTION_MAX_MS)
        await busy.send(b"a")
        clock.advance(broker_limits.TRANSACTIONAL_ID_EXPIRY_MS + 1)
        await broker.clean()
        with pytest.raises(UnknownTransactionalId):
            broker.transactions.describe(CALLER, "idle")
        with pytest.raises(InvalidProducerIdMapping):
            await idle.write(b"x")
        await busy.commit()
        fresh = await broker.transactions.init(CALLER, "idle", TIMEOUT_MS, *idle.producer)
        assert fresh.epoch == 0 and fresh.producer_id != idle.producer.producer_id


# --- topics that go, and full ones ------------------------------------------------------------


async def test_a_transaction_ends_without_the_topics_that_were_deleted(
    pond: Pond, implicit: bool
) -> None:
    async with pond.open() as broker:
        await topics(broker)
        duck = Transactor(broker, implicit=implicit)
        await duck.init()
        await duck.send(b"a")
        await duck.send(b"b", topic=OTHER_TOPIC)
        gone = key_of(broker.topic(OTHER_TOPIC))
        assert await duck.send_offsets({gone: 5}) == [None]
        await broker.delete_topic(CALLER, OTHER_TOPIC)
        described = broker.transactions.describe(CALLER, ID)
        assert described.partitions == (key_of(broker.topic(TOPIC)),)
        await duck.commit()
        assert await committed_values(broker) == [b"a"]
        (outcome,) = await broker.transactions.add_partitions(CALLER, duck.ref, [gone])
        assert isinstance(outcome, UnknownTopic)


async def test_a_topic_may_go_while_a_transaction_ends(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        duck = Transactor(broker)
        await duck.init()
        for value in range(5):
            await duck.send(b"%d" % value)
            await duck.send(b"%d" % value, topic=OTHER_TOPIC)
            await asyncio.gather(duck.commit(), broker.delete_topic(CALLER, OTHER_TOPIC))
            await broker.create_topic(CALLER, OTHER_TOPIC)
        assert await committed_values(broker) == [b"%d" % value for value in range(5)]
        assert await committed_values(broker, OTHER_TOPIC) == []


@in_virtual_time
async def test_a_batch_that_waits_for_room_does_not_outlive_its_transaction() -> None:
    policy = Policy(live_entries=1, when_full=WhenFull.WAIT)
    async with open_broker(full_topic_wait_ms=60_000) as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=policy)
        await publish(broker, b"full")
        duck = Transactor(broker, implicit=False)
        await duck.init()
        await duck.add(key_of(topic))
        late = asyncio.ensure_future(duck.write(b"late"))
        await let_others_run()
        await duck.abort()
        await duck.add(key_of(topic))  # the next one writes to the same partition
        await broker.trim(CALLER, key_of(topic), 2)
        with pytest.raises(InvalidTransactionState):
            await late
        assert await values_in(broker) == []


async def test_a_full_topic_refuses_within_a_transaction_as_without() -> None:
    policy = Policy(live_entries=1, when_full=WhenFull.REFUSE)
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=policy)
        duck = Transactor(broker)
        await duck.init()
        await publish(broker, b"full")
        with pytest.raises(TopicFull):
            await duck.send(b"x")
        await duck.abort()


# --- at the same time ------------------------------------------------------------------------


async def test_nothing_gets_into_a_transaction_that_is_being_ended() -> None:
    store = SlowStore(Clock())
    store.released.set()
    async with open_broker(store) as broker:
        await topics(broker)
        duck = Transactor(broker)
        await duck.init()
        await duck.send(b"a")
        store.released.clear()
        ending = asyncio.ensure_future(duck.commit())
        await until(lambda: store.appends == 3)  # the beginning, the batch, and the end
        with pytest.raises(ConcurrentTransactions):
            await duck.write(b"b")
        adding = asyncio.ensure_future(duck.add(key_of(broker.topic(TOPIC), 1)))
        store.released.set()
        await ending
        with pytest.raises(ProducerFenced):  # it waited for its turn, and named the epoch before
            await adding
        assert await committed_values(broker) == [b"a"]


async def test_an_end_is_carried_through_also_if_its_caller_goes_away() -> None:
    store = SlowStore(Clock())
    store.released.set()
    async with open_broker(store) as broker:
        await topics(broker)
        duck = Transactor(broker)
        await duck.init()
        await duck.send(b"a")
        store.released.clear()
        ending = asyncio.ensure_future(duck.commit())
        await until(lambda: store.appends == 3)
        ending.cancel()
        await asyncio.wait([ending])
        store.released.set()
        await until(lambda: state_of(broker) is TransactionState.COMPLETE_COMMIT)


async def test_many_instances_that_begin_at_once_leave_one(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        ducks = [Transactor(broker) for _ in range(20)]
        producers = await asyncio.gather(*(duck.init() for duck in ducks))
        assert len(set(producers)) == 20
        assert len({producer.producer_id for producer in producers}) == 1
        last = max(ducks, key=lambda duck: duck.producer.epoch)
        for duck in ducks:
            if duck is not last:
                with pytest.raises(ProducerFenced):
                    await duck.write(b"x")
        await last.send(b"a")
        await last.commit()


async def test_a_broker_that_closes_leaves_transactions_for_the_next_start(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        duck = Transactor(broker)
        await duck.init()
        await duck.send(b"a")
    for call in (duck.commit(), duck.init(), duck.add()):
        with pytest.raises(BrokerClosing):
            await call
    with pytest.raises(BrokerClosing):
        await duck.write(b"b")
    async with pond.open() as broker:
        duck.broker = broker
        await duck.commit()
        assert await committed_values(broker) == [b"a"]
