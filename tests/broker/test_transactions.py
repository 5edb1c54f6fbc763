"""Transactions: what becomes visible when, how they begin and end, who is fenced, bounds."""

from __future__ import annotations

import pytest

from quackmq.broker import Broker, ProducerEpoch, ProducerRef, TransactionState
from quackmq.broker import limits as broker_limits
from quackmq.broker.transactions.state import encode_id_state, state_key
from quackmq.errors import (
    InvalidProducerIdMapping,
    InvalidRequest,
    InvalidTransactionState,
    InvalidTransactionTimeout,
    LimitReached,
    OutOfOrderSequence,
    ProducerFenced,
    UnknownPartition,
    UnknownTransactionalId,
)
from quackmq.model.log_transactions import Marker, read_marker
from quackmq.model.topic import PartitionKey, Read
from quackmq.model.transactional_id import LAST_EPOCH, TransactionalIdState
from quackmq.records.batch import Batch
from tests.broker.flock import Pond
from tests.broker.support import (
    CALLER,
    TOPIC,
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
from tests.kit.support import batch_of, batches_of

# --- what becomes visible ------------------------------------------------------------------


async def test_nothing_of_a_transaction_is_seen_before_it_is_committed(
    pond: Pond, implicit: bool
) -> None:
    async with pond.open() as broker:
        await topics(broker)
        duck = Transactor(broker, implicit=implicit)
        await duck.init()
        await duck.send(b"a", b"b")
        await duck.send(b"c", topic=OTHER_TOPIC, partition=1)
        assert await committed_values(broker) == []
        assert await values_in(broker) == [b"a", b"b"], "who reads everything sees it"
        await duck.commit()
        assert await committed_values(broker) == [b"a", b"b"]
        assert await committed_values(broker, OTHER_TOPIC, 1) == [b"c"]


async def test_what_is_aborted_is_never_seen(pond: Pond, implicit: bool) -> None:
    async with pond.open() as broker:
        await topics(broker)
        duck = Transactor(broker, implicit=implicit)
        await duck.init()
        await duck.send(b"gone")
        await publish(broker, b"plain")
        await duck.abort()
        await duck.send(b"kept")
        assert await committed_values(broker) == [b"plain"]
        await duck.commit()
        assert await committed_values(broker) == [b"plain", b"kept"]
    async with pond.open() as broker:
        assert await committed_values(broker) == [b"plain", b"kept"]


async def test_what_is_published_behind_an_open_transaction_waits_for_it(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        first, second = Transactor(broker, "first"), Transactor(broker, "second")
        await first.init()
        await second.init()
        await first.send(b"1")
        await second.send(b"2")
        await publish(broker, b"plain")
        await second.commit()
        assert await committed_values(broker) == []
        assert await stable(broker) == 0
        await first.abort()
        assert await committed_values(broker) == [b"2", b"plain"]
        assert await stable(broker) == 5


async def test_every_partition_of_a_transaction_gets_its_marker(pond: Pond, implicit: bool) -> None:
    async with pond.open() as broker:
        await topics(broker)
        duck = Transactor(broker, implicit=implicit)
        producer_id, epoch = await duck.init()
        await duck.send(b"a")
        await duck.send(b"b", topic=OTHER_TOPIC)
        await duck.commit()
        for name in (TOPIC, OTHER_TOPIC):
            marker = await last_batch(broker, name)
            assert read_marker(marker) is Marker.COMMIT
            assert marker.producer_id == producer_id
            assert marker.producer_epoch == (epoch + 1 if implicit else epoch)


async def last_batch(broker: Broker, topic: str) -> Batch:
    key = key_of(broker.topic(topic))
    (part,) = await broker.read(CALLER, [Read(key, 0, 2**20)], max_bytes=2**20)
    return batches_of(part.chunks)[-1]


# --- beginning and ending ------------------------------------------------------------------


async def test_the_newer_way_takes_an_epoch_a_transaction(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        duck = Transactor(broker)
        producer_id, epoch = await duck.init()
        assert epoch == 0
        await duck.send(b"a")
        assert await duck.commit() == (producer_id, 1)
        await duck.send(b"b")
        assert await duck.abort() == (producer_id, 2)


async def test_the_older_way_keeps_the_epoch_and_goes_on_counting(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        duck = Transactor(broker, implicit=False)
        producer = await duck.init()
        for value in (b"a", b"b", b"c"):
            await duck.send(value)
            assert await duck.commit() == producer
        assert await committed_values(broker) == [b"a", b"b", b"c"]


async def test_a_repeated_end_is_answered_like_the_first(pond: Pond, implicit: bool) -> None:
    async with pond.open() as broker:
        await topics(broker)
        duck = Transactor(broker, implicit=implicit)
        await duck.init()
        await duck.send(b"a")
        before = duck.ref
        after = await duck.commit()
        end = broker.transactions.end
        assert await end(CALLER, before, True, bump_epoch=implicit) == after
        with pytest.raises(InvalidTransactionState):
            await end(CALLER, before, False, bump_epoch=implicit)
        offsets = await broker.offsets(CALLER, key_of(broker.topic(TOPIC)))
        assert offsets.next == 2, "one marker, not two"
    async with pond.open() as broker:
        assert await broker.transactions.end(CALLER, before, True, bump_epoch=implicit) == after


async def test_an_end_without_a_beginning_is_refused(pond: Pond) -> None:
    async with pond.open() as broker:
        duck = Transactor(broker, implicit=False)
        with pytest.raises(InvalidProducerIdMapping):
            await duck.commit()
        await duck.init()
        for end in (duck.commit, duck.abort):
            with pytest.raises(InvalidTransactionState):
                await end()
        with pytest.raises(InvalidTransactionState):
            await broker.transactions.end(CALLER, duck.ref, True, bump_epoch=True)
        assert await broker.transactions.end(CALLER, duck.ref, False, bump_epoch=True) == (
            duck.producer.producer_id,
            1,
        )


async def test_a_partition_that_was_not_added_is_not_written_to_in_the_older_way() -> None:
    async with open_broker() as broker:
        await topics(broker)
        duck = Transactor(broker, implicit=False)
        await duck.init()
        with pytest.raises(InvalidTransactionState):
            await duck.write(b"too early")
        await duck.send(b"a")
        with pytest.raises(InvalidTransactionState):
            await duck.write(b"elsewhere", partition=1)
        await duck.commit()
        with pytest.raises(InvalidTransactionState):
            await duck.write(b"too late")
        assert await values_in(broker, partition=1) == []


async def test_partitions_are_added_all_or_none() -> None:
    async with open_broker() as broker:
        await topics(broker)
        duck = Transactor(broker, implicit=False)
        await duck.init()
        key = key_of(broker.topic(TOPIC))
        wrong = [key, key._replace(partition=9)]
        outcomes = await broker.transactions.add_partitions(CALLER, duck.ref, wrong)
        assert outcomes[0] is None and isinstance(outcomes[1], UnknownPartition)
        assert state_of(broker) is TransactionState.EMPTY
        with pytest.raises(InvalidTransactionState):
            await duck.write(b"a")


async def test_a_batch_without_a_transactional_id_or_of_another_producer_is_refused() -> None:
    async with open_broker() as broker:
        await topics(broker)
        duck = Transactor(broker)
        await duck.init()
        topic = broker.topic(TOPIC)
        batch = batch_of(
            b"x", producer_id=99, producer_epoch=0, base_sequence=0, transactional=True
        )
        for transactional_id, error in (
            (None, InvalidRequest),
            (ID, InvalidProducerIdMapping),
            ("nobody", InvalidProducerIdMapping),
        ):
            with pytest.raises(error):
                broker.transactions.admit(CALLER, batch, topic, 0, transactional_id, implicit=True)
        with pytest.raises(InvalidTransactionState):
            await broker.publish(CALLER, topic, 0, batch)


async def test_a_refused_batch_leaves_a_transaction_that_can_be_aborted(implicit: bool) -> None:
    async with open_broker() as broker:
        await topics(broker)
        duck = Transactor(broker, implicit=implicit)
        await duck.init()
        await duck.send(b"a")
        gap = batch_of(
            b"x",
            producer_id=duck.producer.producer_id,
            producer_epoch=duck.producer.epoch,
            base_sequence=7,
            transactional=True,
        )
        topic = broker.topic(TOPIC)
        broker.transactions.admit(CALLER, gap, topic, 0, ID, implicit=implicit)
        with pytest.raises(OutOfOrderSequence):
            await broker.publish(CALLER, topic, 0, gap)
        await duck.abort()
        assert await committed_values(broker) == []


# --- fencing -------------------------------------------------------------------------------


async def test_a_second_instance_aborts_what_is_open_and_fences_the_first(
    pond: Pond, implicit: bool
) -> None:
    async with pond.open() as broker:
        await topics(broker)
        zombie, duck = (Transactor(broker, implicit=implicit) for _ in range(2))
        await zombie.init()
        await zombie.send(b"lost")
        assert await duck.init() == (zombie.producer.producer_id, zombie.producer.epoch + 1)
        assert await stable(broker) == 2
        for call in (
            zombie.write(b"x"),
            zombie.add(key_of(broker.topic(TOPIC))),
            zombie.commit(),
            zombie.abort(),
            zombie.init(named=True),
            zombie.send_offsets({key_of(broker.topic(TOPIC)): 1}),
        ):
            with pytest.raises(ProducerFenced):
                await call
        await duck.send(b"kept")
        await duck.commit()
        assert await committed_values(broker) == [b"kept"]


async def test_a_producer_that_names_its_epoch_goes_on_with_the_next(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        duck = Transactor(broker)
        producer_id, epoch = await duck.init()
        named = broker.transactions.init(CALLER, ID, TIMEOUT_MS, producer_id, epoch)
        assert await named == (producer_id, epoch + 1)
        again = broker.transactions.init(CALLER, ID, TIMEOUT_MS, producer_id, epoch)
        assert await again == (producer_id, epoch + 1), "a repeat takes no epoch"
    async with pond.open() as broker:
        again = broker.transactions.init(CALLER, ID, TIMEOUT_MS, producer_id, epoch)
        assert await again == (producer_id, epoch + 1)
        other = await broker.transactions.init(CALLER, ID, TIMEOUT_MS)
        assert other == (producer_id, epoch + 2)
        with pytest.raises(ProducerFenced):
            await broker.transactions.init(CALLER, ID, TIMEOUT_MS, producer_id, epoch + 1)


async def test_a_late_beginning_does_not_abort_what_its_successor_has_open() -> None:
    async with open_broker() as broker:
        await topics(broker)
        zombie, duck = Transactor(broker), Transactor(broker)
        await zombie.init()
        await duck.init()
        await duck.send(b"kept")
        with pytest.raises(ProducerFenced):
            await zombie.init(named=True)
        await duck.commit()
        assert await committed_values(broker) == [b"kept"]


async def test_a_producer_whose_epochs_are_used_up_gets_another_id(
    pond: Pond, implicit: bool
) -> None:
    async with pond.open() as broker:
        await topics(broker)
    standing = TransactionalIdState(41, LAST_EPOCH - 2, TransactionState.EMPTY, TIMEOUT_MS, 0)
    async with pond.open_store() as store:
        await store.put_state(state_key(ID), encode_id_state(standing), 0)
    async with pond.open() as broker:
        duck = Transactor(broker, implicit=implicit)
        assert await duck.init() == (41, LAST_EPOCH - 1), "the last that clients are given"
        await duck.send(b"a")
        before = duck.ref
        after = await duck.commit()
        if not implicit:
            assert after == before[1:]
            after = await duck.init()
        assert after.producer_id != 41
        assert after.epoch == 0
        if implicit:
            assert await broker.transactions.end(CALLER, before, True, bump_epoch=True) == after
        await duck.send(b"b")
        await duck.commit()
        assert await committed_values(broker) == [b"a", b"b"]


async def test_the_last_epoch_still_can_be_fenced(pond: Pond) -> None:
    standing = TransactionalIdState(41, LAST_EPOCH - 1, TransactionState.EMPTY, TIMEOUT_MS, 0)
    async with pond.open_store() as store:
        await store.put_state(state_key(ID), encode_id_state(standing), 0)
    async with pond.open() as broker:
        await topics(broker)
        zombie = Transactor(broker)
        zombie.producer = ProducerEpoch(41, LAST_EPOCH - 1)
        await zombie.send(b"lost")
        duck = Transactor(broker)
        producer = await duck.init()
        assert producer.producer_id != 41
        assert (await last_batch(broker, TOPIC)).producer_epoch == LAST_EPOCH
        with pytest.raises(InvalidProducerIdMapping):
            await zombie.write(b"x")
        assert await committed_values(broker) == []


# --- looking, and bounds -----------------------------------------------------------------------


async def test_transactions_are_listed_and_described(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        assert broker.transactions.all(CALLER) == []
        one, two = Transactor(broker, "one"), Transactor(broker, "two")
        await one.init()
        await two.init(timeout_ms=7_000)
        await two.send(b"a", partition=1)
        listed = {each.transactional_id: each for each in broker.transactions.all(CALLER)}
        assert listed["one"].state is TransactionState.EMPTY
        assert listed["one"].started_ms is None
        two_described = broker.transactions.describe(CALLER, "two")
        assert two_described == listed["two"]
        assert two_described == (
            "two",
            TransactionState.ONGOING,
            *two.producer,
            7_000,
            pond.clock.now_ms,
            (PartitionKey(broker.topic(TOPIC).id, 1),),
        )
        with pytest.raises(UnknownTransactionalId):
            broker.transactions.describe(CALLER, "three")
        key = key_of(broker.topic(TOPIC), 1)
        producers = await broker.producers(CALLER, key)
        assert producers[two.producer.producer_id].epoch == two.producer.epoch


@pytest.mark.parametrize("timeout_ms", [-1, 0, broker_limits.TRANSACTION_MAX_MS + 1])
async def test_a_timeout_has_bounds(timeout_ms: int) -> None:
    async with open_broker() as broker:
        with pytest.raises(InvalidTransactionTimeout):
            await Transactor(broker).init(timeout_ms=timeout_ms)


@pytest.mark.parametrize("transactional_id", ["", "x" * 256, "\udcff"])
async def test_a_transactional_id_has_bounds(transactional_id: str) -> None:
    async with open_broker() as broker:
        with pytest.raises(InvalidRequest):
            await Transactor(broker, transactional_id).init()
        with pytest.raises(InvalidRequest):
            broker.transactions.describe(CALLER, transactional_id)


@pytest.mark.parametrize("name", ["a/b/c", "7/x", "ütf", "x" * 255])
async def test_any_other_text_can_be_a_transactional_id(pond: Pond, name: str) -> None:
    async with pond.open() as broker:
        await topics(broker)
        duck = Transactor(broker, name)
        await duck.init()
        assert await duck.send_offsets({key_of(broker.topic(TOPIC)): 1}, group=name) == [None]
    async with pond.open() as broker:
        assert state_of(broker, name) is TransactionState.ONGOING
        assert broker.transactions.pending_offsets(CALLER, name)


async def test_ids_and_partitions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_limits, "TRANSACTIONAL_IDS", 2)
    monkeypatch.setattr(broker_limits, "TRANSACTION_PARTITIONS", 1)
    async with open_broker() as broker:
        await topics(broker)
        one, two, three = (Transactor(broker, name) for name in ("one", "two", "three"))
        await one.init()
        await two.init()
        with pytest.raises(LimitReached):
            await three.init()
        await one.send(b"a")
        with pytest.raises(LimitReached):
            await one.send(b"b", partition=1)
        await one.commit()
        assert await committed_values(broker) == [b"a"]


async def test_nobody_is_known_by_asking(pond: Pond) -> None:
    async with pond.open() as broker:
        nobody = ProducerRef("nobody", 1, 0)
        with pytest.raises(InvalidProducerIdMapping):
            await broker.transactions.add_partitions(CALLER, nobody, [])
        with pytest.raises(InvalidProducerIdMapping):
            await broker.transactions.end(CALLER, nobody, True, bump_epoch=True)
        assert broker.transactions.all(CALLER) == []
