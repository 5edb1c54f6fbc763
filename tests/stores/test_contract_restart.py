"""The store contract, over every store that survives a restart: what is there afterwards.

The other contract suites run over these stores too with a restart after every change. Here are
restarts in their own right. Crashes are the business of the simulation.
"""

from __future__ import annotations

import pytest

from quackmq.errors import OutOfOrderSequence, ProducerFenced, UnknownTopic
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, PartitionKey, State
from tests.kit.support import Clock, batch_of
from tests.stores.calls import (
    append,
    append_values,
    cursor,
    new_partition,
    new_partitions,
    read_all,
)
from tests.stores.conftest import Restarting


async def test_an_empty_store_is_the_same_one_afterwards(restarting: Restarting) -> None:
    cluster_id = (await restarting.open()).cluster_id
    store = await restarting.reopen()
    assert store.cluster_id == cluster_id
    assert await store.topics() == {}


async def test_everything_is_there_after_any_number_of_restarts(
    restarting: Restarting, clock: Clock
) -> None:
    store = await restarting.open()
    keys = await new_partitions(store, 3, "news")
    sport = await new_partition(store, "sport")
    topics = await store.topics()
    for n, key in enumerate([*keys, sport]):
        await append_values(store, key, b"first %d" % n, b"second %d" % n)
    await store.trim(sport, 1)
    await store.append([Append(keys[0], batch_of(b"third"))], [cursor("reader", keys[0], 2)])
    await store.put_state("key", b"value", 0)
    await store.put_state("key", b"changed", 1)
    for _ in range(3):
        store = await restarting.reopen()
        clock.advance(1000)
        assert await store.topics() == topics
        assert await read_all(store, keys[0]) == [(0, b"first 0"), (1, b"second 0"), (2, b"third")]
        assert await read_all(store, keys[2]) == [(0, b"first 2"), (1, b"second 2")]
        assert await read_all(store, sport) == [(1, b"second 3")]
        assert await store.cursors() == {
            cursor("reader", keys[0], 2).key: cursor("reader", keys[0], 2)
        }
        assert await store.states("") == {"key": State(b"changed", 2)}


async def test_offsets_go_on_where_they_ended(restarting: Restarting) -> None:
    store = await restarting.open()
    key = await new_partition(store)
    epoch = (await store.offsets(key)).epoch
    for n in range(4):
        assert (await append_values(store, key, b"a", b"b")).base_offset == 2 * n
        if n == 2:
            await store.trim(key, 6)
        store = await restarting.reopen()
        assert (await store.offsets(key)).epoch >= epoch
        epoch = (await store.offsets(key)).epoch
    assert (await store.offsets(key))[:2] == (6, 8)


async def test_producers_are_remembered(restarting: Restarting) -> None:
    store = await restarting.open()
    key = await new_partition(store)
    numbered = [
        batch_of(b"%d" % n, producer_id=5, producer_epoch=2, base_sequence=n) for n in range(4)
    ]
    first = await append(store, key, numbered[0])
    await append(store, key, numbered[1])
    await store.trim(key, 2)
    store = await restarting.reopen()
    assert await append(store, key, numbered[0]) == first._replace(first_offset=2, repeated=True)
    with pytest.raises(OutOfOrderSequence):
        await append(store, key, numbered[3])
    with pytest.raises(ProducerFenced):
        await append(
            store, key, batch_of(b"late", producer_id=5, producer_epoch=1, base_sequence=0)
        )
    assert (await append(store, key, numbered[2])).base_offset == 2
    store = await restarting.reopen()
    assert (await append(store, key, numbered[2])).repeated is True
    assert await read_all(store, key) == [(2, b"2")]


async def test_a_deleted_topic_stays_away_and_one_made_anew_inherits_nothing(
    restarting: Restarting,
) -> None:
    store = await restarting.open()
    old = await new_partition(store)
    await append_values(store, old, b"old")
    await store.set_cursors([cursor("reader", old, 1)])
    await store.delete_topic(old.topic_id)
    store = await restarting.reopen()
    assert (await store.topics(), await store.cursors()) == ({}, {})
    with pytest.raises(UnknownTopic):
        await store.offsets(old)
    new = await new_partition(store)
    assert new.topic_id != old.topic_id
    assert (await store.offsets(new))[:3] == (0, 0, 0)
    await append_values(store, new, b"new")
    store = await restarting.reopen()
    assert await read_all(store, new) == [(0, b"new")]
    with pytest.raises(UnknownTopic):
        await store.offsets(old)


async def test_alterations_stay(restarting: Restarting) -> None:
    store = await restarting.open()
    topic = await store.create_topic("news", 1, Policy())
    altered = await store.alter_topic(topic.id, partitions=2, policy=Policy(live_entries=3))
    store = await restarting.reopen()
    assert await store.topics() == {"news": altered}
    assert (await append_values(store, PartitionKey(topic.id, 1), b"a")).base_offset == 0


async def test_what_is_written_while_closing_is_there_if_it_was_answered(
    restarting: Restarting,
) -> None:
    store = await restarting.open()
    key = await new_partition(store)
    begun = [store.append([Append(key, batch_of(b"%d" % n))]) for n in range(10)]
    store = await restarting.reopen()
    answers = [(await answer)[0] for answer in begun]
    assert [answer.base_offset for answer in answers] == list(range(10))
    assert await read_all(store, key) == [(n, b"%d" % n) for n in range(10)]
