"""The store contract, over every store: transactions, and reading what is committed."""

from __future__ import annotations

import asyncio
import random

import pytest

from quackmq import limits
from quackmq.errors import (
    CorruptBatch,
    InvalidRequest,
    InvalidTransactionState,
    LimitReached,
    OffsetOutOfRange,
    OutOfOrderSequence,
    ProducerFenced,
    QuackError,
    StateChanged,
    UnknownTopic,
)
from quackmq.model import limits as model_limits
from quackmq.model.log_transactions import AbortedTransaction, Marker, marker_batch
from quackmq.model.producer_state import NO_TRANSACTION, Producer
from quackmq.model.topic import Append, PartitionKey, Read, Slice, State, StatePut
from quackmq.records.batch import CONTROL_FLAG, TRANSACTIONAL_FLAG, Batch
from quackmq.stores import limits as stores_limits
from quackmq.stores.contract import Store
from tests.kit import effort
from tests.kit.batches import resealed, sealed
from tests.kit.support import (
    START_MS,
    Clock,
    batch_of,
    batches_of,
    let_others_run,
    offsets_and_values,
)
from tests.kit.waiting import soon
from tests.model.transaction_model import LogModel, Taken
from tests.stores.calls import (
    LONG_MS,
    PLENTY_BYTES,
    append,
    append_values,
    cursor,
    new_partition,
    new_partitions,
    no_such_topic,
    read_all,
)
from tests.stores.conftest import Restarting, keeps_batches, keeps_batches_restarting

ABORT, COMMIT = Marker.ABORT, Marker.COMMIT


def part(
    producer_id: int, sequence: int, *values: bytes, epoch: int = 0, transactional: bool = True
) -> Batch:
    """A batch of a transaction."""
    return batch_of(
        *values or [b"%d of %d" % (sequence, producer_id)],
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=transactional,
    )


def ending(producer_id: int, marker: Marker, epoch: int = 0) -> Batch:
    return Batch.parse(marker_batch(producer_id, epoch, marker, START_MS))


async def read_committed(
    store: Store,
    key: PartitionKey,
    offset: int,
    *,
    max_bytes: int = PLENTY_BYTES,
    min_bytes: int = 1,
    wait_ms: int = 0,
) -> Slice:
    (found,) = await store.read(
        [Read(key, offset, max_bytes, committed=True)],
        max_bytes=PLENTY_BYTES,
        min_bytes=min_bytes,
        wait_ms=wait_ms,
    )
    return found


def shown(found: Slice) -> list[tuple[int, bytes]]:
    """The records of a committed slice that its reader keeps, as Kafka's clients choose them."""
    waiting = sorted(found.aborted, key=lambda aborted: aborted.first_offset)
    skipped: set[int] = set()
    kept: list[tuple[int, bytes]] = []
    for batch in batches_of(found.chunks):
        while waiting and waiting[0].first_offset <= batch.next_offset - 1:
            skipped.add(waiting.pop(0).producer_id)
        if batch.is_control:
            skipped.discard(batch.producer_id)
        elif not (batch.is_transactional and batch.producer_id in skipped):
            kept += offsets_and_values(found._replace(chunks=(batch.view,)))
    return kept


async def read_all_committed(store: Store, key: PartitionKey) -> list[tuple[int, bytes]]:
    offsets = await store.offsets(key)
    offset = offsets.first
    records: list[tuple[int, bytes]] = []
    while offset < offsets.stable:
        found = await read_committed(store, key, offset, max_bytes=200)
        assert found.error is None and found.chunks
        records += [record for record in shown(found) if record[0] >= offset]
        offset = batches_of(found.chunks)[-1].next_offset
    return records


# --- open and stable -------------------------------------------------------------------------


async def test_a_partition_is_stable_up_to_the_first_open_transaction(store: Store) -> None:
    key = await new_partition(store)
    await append_values(store, key, b"plain")
    stable = []
    for batch in (
        part(1, 0),
        part(2, 0),
        part(1, 1),
        ending(1, ABORT),
        batch_of(b"plain"),
        ending(2, COMMIT),
    ):
        await append(store, key, batch)
        stable.append((await store.offsets(key)).stable)
    assert stable == [1, 1, 1, 2, 2, 7]


async def test_what_is_open_is_told_by_partition_and_producer(store: Store) -> None:
    news, sport = await new_partitions(store, 2)
    await append_values(store, news, b"plain")
    await store.append([Append(news, part(1, 0)), Append(sport, part(1, 0))])
    await append(store, sport, part(2, 0))
    await append(store, sport, part(2, 1))
    assert await store.open_transactions() == {news: {1: 1}, sport: {1: 0, 2: 1}}
    assert await store.open_transactions(1) == {news: {1: 1}, sport: {1: 0}}
    assert await store.open_transactions(3) == {}
    await append(store, sport, ending(1, COMMIT))
    assert await store.open_transactions(1) == {news: {1: 1}}


async def test_what_is_on_its_way_to_disk_is_open_already(store: Store) -> None:
    key = await new_partition(store)
    answer = store.append([Append(key, part(1, 0))])
    assert await store.open_transactions(1) == {key: {1: 0}}
    await answer
    both = store.append([Append(key, ending(1, ABORT))])
    assert await store.open_transactions(1) == {}
    await both


async def test_a_deleted_topic_has_nothing_open(store: Store) -> None:
    news, sport = await new_partition(store, "news"), await new_partition(store, "sport")
    await store.append([Append(news, part(1, 0)), Append(sport, part(1, 0))])
    await store.delete_topic(news.topic_id)
    assert await store.open_transactions(1) == {sport: {1: 0}}


async def test_what_is_known_of_producers_is_told(store: Store, clock: Clock) -> None:
    key = await new_partition(store)
    await append(store, key, part(1, 0, b"a", b"b"))
    await append(store, key, part(2, 0, transactional=False))
    clock.advance(5)
    await append(store, key, ending(3, COMMIT, epoch=4))
    known = await store.producers(key)
    assert {id_: (p.epoch, p.transaction_offset) for id_, p in known.items()} == {
        1: (0, 0),
        2: (0, NO_TRANSACTION),
        3: (4, NO_TRANSACTION),
    }
    assert [batch.last_sequence for batch in known[1].batches] == [1]
    assert known[3] == Producer(3, 4, (), clock.now_ms)


# --- the rules of producers ------------------------------------------------------------------


async def test_a_plain_batch_does_not_mix_with_an_open_transaction(store: Store) -> None:
    key, other = await new_partitions(store, 2)
    await append(store, key, part(1, 0))
    with pytest.raises(InvalidTransactionState):
        await append(store, key, part(1, 1, transactional=False))
    await append(store, other, part(1, 0, transactional=False))
    await append(store, key, part(2, 0, transactional=False))
    await append(store, key, ending(1, COMMIT))
    assert (await append(store, key, part(1, 1, transactional=False))).base_offset == 3


async def test_a_marker_takes_no_number_and_repeats_are_known_behind_it(store: Store) -> None:
    key = await new_partition(store)
    await append(store, key, part(1, 0))
    await append(store, key, ending(1, COMMIT))
    again = await append(store, key, part(1, 0))
    assert (again.base_offset, again.repeated) == (0, True)
    assert await store.open_transactions() == {}
    assert (await append(store, key, part(1, 1))).base_offset == 2
    assert await store.open_transactions() == {key: {1: 2}}


async def test_a_marker_of_a_new_epoch_fences_the_old_one(store: Store) -> None:
    key = await new_partition(store)
    await append(store, key, part(1, 0))
    await append(store, key, ending(1, ABORT, epoch=1))
    for batch in (part(1, 0), part(1, 1), ending(1, COMMIT)):
        with pytest.raises(ProducerFenced):
            await append(store, key, batch)
    with pytest.raises(OutOfOrderSequence):
        await append(store, key, part(1, 1, epoch=1))
    assert (await append(store, key, part(1, 0, epoch=1))).base_offset == 2


async def test_a_new_epoch_does_not_go_on_with_an_old_ones_transaction(store: Store) -> None:
    key = await new_partition(store)
    await append(store, key, part(1, 0))
    with pytest.raises(InvalidTransactionState):
        await append(store, key, part(1, 0, epoch=1))


async def test_transactions_and_markers_have_a_producer(store: Store) -> None:
    key = await new_partition(store)
    for flags in (TRANSACTIONAL_FLAG, CONTROL_FLAG, TRANSACTIONAL_FLAG | CONTROL_FLAG):
        nobodys = Batch.parse(sealed(b"", attributes=flags))
        for unit in ([nobodys], [batch_of(b"plain"), nobodys]):
            with pytest.raises(InvalidRequest):
                await store.append([Append(key, batch) for batch in unit])
    assert (await store.offsets(key)).next == 0


async def test_a_control_batch_that_is_no_marker_is_refused(store: Store) -> None:
    key = await new_partition(store)
    await append(store, key, part(1, 0))
    marker = bytearray(ending(1, ABORT).view)
    with pytest.raises(CorruptBatch):
        await append(store, key, Batch.parse(resealed(marker + b"more")))
    assert await store.open_transactions() == {key: {1: 0}}


async def test_a_producer_with_an_open_transaction_is_not_forgotten(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_limits, "PRODUCERS_PER_PARTITION", 2)
    key = await new_partition(store)
    await append(store, key, part(1, 0))
    clock.advance(stores_limits.PRODUCER_EXPIRY_MS + 1)
    for producer_id in (2, 3, 4):
        await append(store, key, part(producer_id, 0, transactional=False))
    assert set(await store.producers(key)) == {1, 4}
    assert (await append(store, key, part(1, 1))).base_offset == 4
    await append(store, key, ending(1, COMMIT))
    await append(store, key, part(5, 0, transactional=False))
    await append(store, key, part(6, 0, transactional=False))
    assert set(await store.producers(key)) == {5, 6}


async def test_open_transactions_are_bounded_a_partition(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_limits, "OPEN_TRANSACTIONS", 2)
    key, other = await new_partitions(store, 2)
    await append(store, key, part(1, 0))
    with pytest.raises(LimitReached):
        await store.append([Append(key, part(2, 0)), Append(key, part(3, 0))])
    await store.append([Append(key, part(2, 0)), Append(other, part(3, 0))])
    with pytest.raises(LimitReached):
        await append(store, key, part(3, 0))
    await append(store, key, part(1, 1))
    await append(store, key, ending(1, COMMIT))
    await append(store, key, part(3, 0))


# --- the end of a transaction, as one unit ---------------------------------------------------


async def test_markers_cursors_and_states_are_put_in_one_unit(store: Store) -> None:
    news, sport = await new_partitions(store, 2)
    await store.append([Append(news, part(1, 0)), Append(sport, part(1, 0))])
    await store.put_state("gone", b"old", 0)
    answers = await store.append(
        [Append(key, ending(1, COMMIT)) for key in (news, sport)],
        [cursor("group", news, 1)],
        [StatePut("transaction", b"done", 0), StatePut("gone", None, 1)],
    )
    assert [answer.base_offset for answer in answers] == [1, 1]
    assert await store.open_transactions() == {}
    assert list(await store.cursors()) == [cursor("group", news, 1).key]
    assert await store.states("") == {"transaction": State(b"done", 1)}


@pytest.mark.parametrize(
    ("bad_state", "error"),
    [
        (StatePut("present", b"", 0), StateChanged),
        (StatePut("absent", b"", 1), StateChanged),
        (StatePut("x" * (limits.STATE_KEY_BYTES + 1), b"", 0), LimitReached),
        (StatePut("large", bytes(limits.STATE_VALUE_BYTES + 1), 0), LimitReached),
        (StatePut("good", b"twice", 0), InvalidRequest),
    ],
)
async def test_one_bad_state_and_nothing_happens(
    store: Store, bad_state: StatePut, error: type[QuackError]
) -> None:
    key = await new_partition(store)
    await append(store, key, part(1, 0))
    await store.put_state("present", b"value", 0)
    with pytest.raises(error):
        await store.append(
            [Append(key, ending(1, COMMIT))],
            [cursor("group", key, 1)],
            [StatePut("good", b"value", 0), bad_state],
        )
    assert await store.open_transactions() == {key: {1: 0}}
    assert (await store.offsets(key)).next == 1
    assert await store.cursors() == {}
    assert set(await store.states("")) == {"present"}


async def test_one_bad_batch_and_no_state_is_put(store: Store) -> None:
    key = await new_partition(store)
    for bad in (Append(no_such_topic(), batch_of(b"")), Append(key, part(1, 0, epoch=-1))):
        with pytest.raises((UnknownTopic, InvalidRequest)):
            await store.append([bad], [cursor("group", key, 0)], [StatePut("key", b"", 0)])
    assert await store.states("") == {}
    assert await store.cursors() == {}


async def test_states_alone_are_put_as_well(store: Store) -> None:
    assert await store.append([], [], [StatePut("key", b"one", 0)]) == []
    assert await store.append([], (), [StatePut("key", b"two", 1)]) == []
    assert await store.state("key") == State(b"two", 2)


async def test_states_put_at_once_are_checked_in_the_order_of_the_calls(store: Store) -> None:
    first = store.append([], (), [StatePut("key", b"first", 0)])
    with pytest.raises(StateChanged):
        await store.append([], (), [StatePut("key", b"second", 0)])
    await first
    assert await store.state("key") == State(b"first", 1)


# --- reading what is committed ---------------------------------------------------------------


async def test_a_committed_read_ends_where_something_is_open(store: Store) -> None:
    key = await new_partition(store)
    await append_values(store, key, b"a", b"b")
    await append(store, key, part(1, 0))
    await append_values(store, key, b"c")
    found = await read_committed(store, key, 0)
    assert offsets_and_values(found) == [(0, b"a"), (1, b"b")]
    assert (found.next_offset, found.stable_offset, found.aborted) == (4, 2, ())
    for offset in (2, 3, 4):
        assert await read_committed(store, key, offset) == Slice(key, (), 0, 0, 4, None, 2)
    assert isinstance((await read_committed(store, key, 5)).error, OffsetOutOfRange)
    assert len(await read_all(store, key)) == 4


@keeps_batches
async def test_what_was_committed_is_shown_and_what_was_aborted_is_named(store: Store) -> None:
    key = await new_partition(store)
    for batch in (
        part(1, 0, b"a1", b"a2"),
        part(2, 0, b"b1"),
        batch_of(b"plain"),
        ending(1, ABORT),
        part(2, 1, b"b2"),
        ending(2, COMMIT),
        part(1, 2, b"a3"),
        ending(1, COMMIT),
    ):
        await append(store, key, batch)
    found = await read_committed(store, key, 0)
    assert found.aborted == (AbortedTransaction(1, 0, 4),)
    assert found.stable_offset == found.next_offset == 9
    kept = [(2, b"b1"), (3, b"plain"), (5, b"b2"), (7, b"a3")]
    assert shown(found) == kept
    assert await read_all_committed(store, key) == kept


@keeps_batches
async def test_only_the_aborted_transactions_that_a_slice_touches_are_named(store: Store) -> None:
    key = await new_partition(store)
    for producer_id in (1, 2, 3):
        await append(store, key, part(producer_id, 0))
        await append(store, key, ending(producer_id, ABORT))
        await append_values(store, key, b"plain")
    assert (await read_committed(store, key, 3)).aborted == (
        AbortedTransaction(2, 3, 4),
        AbortedTransaction(3, 6, 7),
    )
    assert (await read_committed(store, key, 3, max_bytes=1)).aborted == (
        AbortedTransaction(2, 3, 4),
    )
    assert (await read_committed(store, key, 5, max_bytes=1)).aborted == ()
    assert (await read_committed(store, key, 8)).aborted == ()
    uncommitted = await store.read([Read(key, 0, PLENTY_BYTES)], max_bytes=PLENTY_BYTES)
    assert uncommitted[0].aborted == ()
    assert uncommitted[0].stable_offset == 9


async def test_a_committed_read_waits_for_the_decision(store: Store) -> None:
    key = await new_partition(store)
    await append(store, key, part(1, 0, b"one"))
    waiting = asyncio.ensure_future(read_committed(store, key, 0, wait_ms=LONG_MS))
    await let_others_run()
    await append(store, key, part(1, 1, b"two"))
    await append_values(store, key, b"large" * 100)
    await let_others_run()
    assert not waiting.done()
    await append(store, key, ending(1, COMMIT))
    found = await soon(waiting)
    assert found.stable_offset == 4
    assert [offset for offset, _ in shown(found)] == [0, 1, 2]


async def test_a_committed_read_waits_for_another_transaction_to_end(store: Store) -> None:
    key = await new_partition(store)
    await append(store, key, part(1, 0))
    waiting = asyncio.ensure_future(read_committed(store, key, 0, wait_ms=LONG_MS))
    await let_others_run()
    await append(store, key, part(2, 0))
    await append(store, key, ending(1, ABORT))
    found = await soon(waiting)
    assert (found.stable_offset, found.aborted) == (1, (AbortedTransaction(1, 0, 2),))
    assert [batch.base_offset for batch in batches_of(found.chunks)] == [0]


@keeps_batches  # a read of the archive returns what it has, however little
async def test_a_committed_read_waits_for_as_many_bytes_as_it_wants(store: Store) -> None:
    key = await new_partition(store)
    await append(store, key, part(1, 0))
    await append(store, key, ending(1, COMMIT))
    size = batch_of(bytes(100)).size
    waiting = asyncio.ensure_future(
        read_committed(store, key, 2, min_bytes=3 * size, wait_ms=LONG_MS)
    )
    for _ in range(3):
        await let_others_run()
        assert not waiting.done()
        await append_values(store, key, bytes(100))
    assert len(batches_of((await soon(waiting)).chunks)) == 3


async def test_a_read_of_everything_does_not_wait_for_a_decision(store: Store) -> None:
    key, other = await new_partitions(store, 2)
    reads = [Read(key, 0, PLENTY_BYTES), Read(other, 0, PLENTY_BYTES, committed=True)]
    waiting = asyncio.ensure_future(
        store.read(reads, max_bytes=PLENTY_BYTES, min_bytes=1, wait_ms=LONG_MS)
    )
    await let_others_run()
    await append(store, other, part(1, 0))
    await append(store, key, part(1, 0))
    found = await soon(waiting)
    assert [bool(each.chunks) for each in found] == [True, False]


async def test_trimming_into_an_open_transaction_leaves_it_open(store: Store) -> None:
    key = await new_partition(store)
    await append(store, key, part(1, 0, b"a", b"b", b"c"))
    await append(store, key, part(1, 3, b"d"))
    await store.trim(key, 2)
    offsets = await store.offsets(key)
    assert (offsets.first, offsets.stable, offsets.next) == (2, 2, 4)
    assert (await read_committed(store, key, 2)).chunks == ()
    await append(store, key, ending(1, ABORT))
    found = await read_committed(store, key, 2)
    assert found.aborted == (AbortedTransaction(1, 0, 4),)
    assert shown(found) == []
    await store.trim(key, 5)
    await append_values(store, key, b"new")
    assert await read_all_committed(store, key) == [(5, b"new")]


# --- against the definition, across restarts -------------------------------------------------


@keeps_batches_restarting
@pytest.mark.parametrize("seed", range(effort.of(4)))
async def test_open_aborted_and_stable_are_as_defined_whatever_comes(
    restarting: Restarting, seed: int
) -> None:
    chance = random.Random(seed)
    store = await restarting.open()
    keys = await new_partitions(store, 2)
    models = {key: LogModel() for key in keys}
    standing = {(key, id_): (0, 0) for key in keys for id_ in range(3)}  # epoch, next sequence
    for _ in range(60):
        if chance.random() < 0.1:
            store = await restarting.reopen()
        if chance.random() < 0.1:
            key = chance.choice(keys)
            before = chance.randint(0, models[key].next_offset)
            models[key].first_offset = await store.trim(key, before)
        unit = []
        for _ in range(chance.randint(1, 4)):
            key, id_ = chance.choice(keys), chance.randrange(3)
            epoch, sequence = standing[key, id_]
            if chance.random() < 0.4:
                epoch, sequence = chance.choice([(epoch, sequence), (epoch + 1, 0)])
                unit.append(Append(key, ending(id_, chance.choice([ABORT, COMMIT]), epoch)))
            elif chance.random() < 0.2:
                unit.append(Append(key, batch_of(bytes(chance.randrange(100)))))
            else:
                unit.append(
                    Append(key, part(id_, sequence, *[b"v"] * chance.randint(1, 3), epoch=epoch))
                )
                sequence += unit[-1].batch.record_count
            standing[key, id_] = (epoch, sequence)
        for sent, answer in zip(unit, await store.append(unit), strict=True):
            assert not answer.repeated
            models[sent.key].taken.append(Taken.of(sent.batch, answer.base_offset))
        await agrees(store, models)
    await agrees(await restarting.reopen(), models)


async def agrees(store: Store, models: dict[PartitionKey, LogModel]) -> None:
    open_ = {key: model.open for key, model in models.items() if model.open}
    assert await store.open_transactions() == open_
    for key, model in models.items():
        offsets = await store.offsets(key)
        assert (offsets.first, offsets.stable) == (model.first_offset, model.stable)
        assert offsets.next == model.next_offset
        producers = await store.producers(key)
        assert model.open == {
            id_: each.transaction_offset
            for id_, each in producers.items()
            if each.transaction_offset != NO_TRANSACTION
        }
        committed = [offset for offset, _ in await read_all_committed(store, key)]
        assert committed == model.committed()
        if offsets.first < offsets.stable:
            found = await read_committed(store, key, offsets.first)
            last = batches_of(found.chunks)[-1].next_offset - 1
            assert found.aborted == model.aborted_in(offsets.first, last)
