"""The store contract, over every store: topics, cursors, small state, the end.

Batches are in test_contract_append.py and test_contract_read.py; what outlives a restart, beyond
what these suites test of it in passing (see reopening.py), in test_contract_restart.py.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quackmq import limits
from quackmq.errors import (
    BrokerClosing,
    IllegalTopicName,
    InvalidRequest,
    LimitReached,
    StateChanged,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from quackmq.model.policy import Policy, WhenFull
from quackmq.model.topic import Append, PartitionKey, Read, State, Topic
from quackmq.stores import limits as stores_limits
from quackmq.stores.contract import Store
from tests.kit.support import Clock, batch_of, let_others_run
from tests.kit.tables import each, named
from tests.kit.waiting import soon
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
    read_one,
)

# --- creating topics -------------------------------------------------------------------------


async def test_a_new_store_is_empty(store: Store) -> None:
    assert await store.topics() == {}
    assert await store.cursors() == {}
    assert await store.states("") == {}
    assert store.cluster_id
    assert store.failure is None


async def test_a_new_topic_is_listed_as_it_was_made(store: Store, clock: Clock) -> None:
    policy = Policy(live_for_ms=5_000, live_entries=7, when_full=WhenFull.WAIT, ephemeral=True)
    topic = await store.create_topic("news", 3, policy)
    assert (topic.name, topic.partitions, topic.policy) == ("news", 3, policy)
    assert topic.created_ms == clock.now_ms
    assert await store.topics() == {"news": topic}


async def test_every_partition_of_a_new_topic_is_there_and_empty(store: Store) -> None:
    for key in await new_partitions(store, 3):
        first, end, size, epoch, stable = await store.offsets(key)
        assert (first, end, size, stable) == (0, 0, 0, 0)
        assert epoch >= 0


async def test_topics_have_ids_of_their_own(store: Store) -> None:
    topics = [await store.create_topic(name, 1, Policy()) for name in ("a", "b", "c")]
    assert len({topic.id for topic in topics}) == 3
    assert set(await store.topics()) == {"a", "b", "c"}


async def test_a_taken_name_is_refused_and_its_topic_unharmed(store: Store) -> None:
    topic = await store.create_topic("news", 2, Policy())
    with pytest.raises(TopicExists):
        await store.create_topic("news", 5, Policy(ephemeral=True))
    assert await store.topics() == {"news": topic}


async def test_of_creations_at_the_same_time_one_wins(store: Store) -> None:
    outcomes = await asyncio.gather(
        *(store.create_topic("news", n, Policy()) for n in (1, 2, 3)), return_exceptions=True
    )
    made = [outcome for outcome in outcomes if isinstance(outcome, Topic)]
    refused = [outcome for outcome in outcomes if isinstance(outcome, TopicExists)]
    assert (len(made), len(refused)) == (1, 2)
    assert await store.topics() == {"news": made[0]}


@each("name", ["", ".", "..", "a/b", "new s", "ä", "x" * 250])
async def test_an_illegal_topic_name_is_refused(store: Store, name: str) -> None:
    with pytest.raises(IllegalTopicName):
        await store.create_topic(name, 1, Policy())
    assert await store.topics() == {}


@each("partitions", [0, -1])
async def test_a_topic_without_partitions_is_refused(store: Store, partitions: int) -> None:
    with pytest.raises(InvalidRequest):
        await store.create_topic("news", partitions, Policy())


async def test_topics_and_partitions_are_bounded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "TOPICS", 2)
    monkeypatch.setattr(stores_limits, "PARTITIONS", 7)
    monkeypatch.setattr(limits, "PARTITIONS_PER_TOPIC", 4)
    with pytest.raises(LimitReached):
        await store.create_topic("wide", 5, Policy())
    four = await store.create_topic("four", 4, Policy())
    with pytest.raises(LimitReached):
        await store.create_topic("other-four", 4, Policy())
    two = await store.create_topic("two", 2, Policy())
    with pytest.raises(LimitReached):
        await store.create_topic("third", 1, Policy())
    with pytest.raises(LimitReached):
        await store.alter_topic(four.id, partitions=5)
    with pytest.raises(LimitReached):
        await store.alter_topic(two.id, partitions=4)
    assert await store.topics() == {"four": four, "two": two}
    await store.delete_topic(four.id)
    await store.create_topic("third", 4, Policy())


# --- altering topics -------------------------------------------------------------------------


async def test_a_topic_can_get_more_partitions(store: Store) -> None:
    (key,) = await new_partitions(store, 1)
    await append_values(store, key, b"one", b"two")
    altered = await store.alter_topic(key.topic_id, partitions=3)
    assert altered.partitions == 3
    assert (await store.topics())["news"] == altered
    assert await read_all(store, key) == [(0, b"one"), (1, b"two")]
    assert (await append_values(store, PartitionKey(key.topic_id, 2), b"new")).base_offset == 0
    with pytest.raises(UnknownPartition):
        await store.offsets(PartitionKey(key.topic_id, 3))


async def test_a_topic_can_get_another_policy(store: Store) -> None:
    topic = await store.create_topic("news", 2, Policy(live_entries=5))
    altered = await store.alter_topic(topic.id, policy=Policy(keep_bytes=9))
    assert altered == Topic(topic.id, "news", 2, Policy(keep_bytes=9), topic.created_ms)
    assert await store.topics() == {"news": altered}


async def test_an_alteration_of_nothing_changes_nothing(store: Store) -> None:
    topic = await store.create_topic("news", 2, Policy(live_entries=5))
    assert await store.alter_topic(topic.id) == topic
    assert await store.alter_topic(topic.id, partitions=2) == topic
    assert await store.topics() == {"news": topic}


async def test_a_topic_never_gets_fewer_partitions(store: Store) -> None:
    topic = await store.create_topic("news", 3, Policy())
    with pytest.raises(InvalidRequest):
        await store.alter_topic(topic.id, partitions=2, policy=Policy(ephemeral=True))
    assert await store.topics() == {"news": topic}


# --- deleting topics -------------------------------------------------------------------------


async def test_a_deleted_topic_is_gone_and_the_others_are_not(store: Store) -> None:
    key, other = await new_partition(store, "news"), await new_partition(store, "sport")
    await append_values(store, key, b"one")
    await append_values(store, other, b"two")
    await store.set_cursors([cursor("reader", key, 1), cursor("reader", other, 1)])
    await store.delete_topic(key.topic_id)
    assert set(await store.topics()) == {"sport"}
    assert await read_all(store, other) == [(0, b"two")]
    assert list(await store.cursors()) == [cursor("reader", other, 1).key]


UNKNOWN_TOPIC_CALLS: dict[str, Callable[[Store, PartitionKey], Awaitable[object]]] = {
    "alter": lambda store, key: store.alter_topic(key.topic_id, partitions=9),
    "delete": lambda store, key: store.delete_topic(key.topic_id),
    "append": lambda store, key: append(store, key, batch_of(b"value")),
    "offsets": lambda store, key: store.offsets(key),
    "offset_for_time": lambda store, key: store.offset_for_time(key, 0),
    "trim": lambda store, key: store.trim(key, 0),
    "producers": lambda store, key: store.producers(key),
    "set_cursors": lambda store, key: store.set_cursors([cursor("reader", key, 0)]),
}


async def test_a_topic_that_is_not_there_is_unknown_to_every_call(store: Store) -> None:
    deleted = await new_partition(store)
    await append_values(store, deleted, b"one")
    await store.delete_topic(deleted.topic_id)
    for key in (deleted, no_such_topic()):
        for name, call in UNKNOWN_TOPIC_CALLS.items():
            with named(call=name, key=key), pytest.raises(UnknownTopic):
                await call(store, key)


UNKNOWN_PARTITION_CALLS = {
    name: UNKNOWN_TOPIC_CALLS[name]
    for name in ("append", "offsets", "offset_for_time", "trim", "producers", "set_cursors")
}


async def test_a_partition_that_is_not_there_is_unknown_to_every_call(store: Store) -> None:
    topic = await store.create_topic("news", 2, Policy())
    for partition in (2, -1):
        for name, call in UNKNOWN_PARTITION_CALLS.items():
            with named(call=name, partition=partition), pytest.raises(UnknownPartition):
                await call(store, PartitionKey(topic.id, partition))


async def test_a_topic_made_anew_inherits_nothing(store: Store) -> None:
    old = await new_partition(store)
    numbered: dict[str, Any] = {"producer_id": 5, "producer_epoch": 3}
    await append(store, old, batch_of(b"old", base_sequence=0, **numbered))
    await store.trim(old, 1)
    await store.set_cursors([cursor("reader", old, 1)])
    await store.delete_topic(old.topic_id)
    new = await new_partition(store)
    assert new.topic_id != old.topic_id
    assert (await store.offsets(new))[:3] == (0, 0, 0)
    assert await store.cursors() == {}
    appended = await append(
        store, new, batch_of(b"new", producer_id=5, producer_epoch=0, base_sequence=0)
    )
    assert (appended.base_offset, appended.first_offset, appended.repeated) == (0, 0, False)
    assert await read_all(store, new) == [(0, b"new")]
    with pytest.raises(UnknownTopic):
        await append_values(store, old, b"to the old one")


async def test_of_deletions_at_the_same_time_one_wins(store: Store) -> None:
    key = await new_partition(store)
    outcomes = await asyncio.gather(
        *(store.delete_topic(key.topic_id) for _ in range(3)), return_exceptions=True
    )
    assert sorted(type(outcome).__name__ for outcome in outcomes) == [
        "NoneType",
        "UnknownTopic",
        "UnknownTopic",
    ]


# --- cursors ---------------------------------------------------------------------------------


async def test_a_cursor_is_kept_as_it_was_set(store: Store) -> None:
    key = await new_partition(store)
    for leader_epoch in (-1, 0, 2**31 - 1):
        kept = cursor("reader", key, 17, "a note, ärgerlich", 99, leader_epoch)
        await store.set_cursors([kept])
        assert await store.cursors("reader") == {kept.key: kept}


async def test_a_cursor_moves_both_ways_and_goes(store: Store) -> None:
    key = await new_partition(store)
    for offset in (5, 9, 2):
        await store.set_cursors([cursor("reader", key, offset)])
        assert (await store.cursors("reader"))[cursor("reader", key, 0).key].offset == offset
    await store.set_cursors([cursor("reader", key, None)])
    assert await store.cursors("reader") == {}
    await store.set_cursors([cursor("reader", key, None)])
    assert await store.cursors() == {}


async def test_of_two_settings_of_one_cursor_the_last_holds(store: Store) -> None:
    key = await new_partition(store)
    await store.set_cursors([cursor("reader", key, 1), cursor("reader", key, 2)])
    await asyncio.gather(
        *(store.set_cursors([cursor("writer", key, offset)]) for offset in range(5))
    )
    assert {each.offset for each in (await store.cursors()).values()} == {2, 4}


async def test_cursors_are_found_by_name_and_by_topic(store: Store) -> None:
    news, more_news = await new_partitions(store, 2, "news")
    sport = await new_partition(store, "sport")
    everything = [
        cursor("a", news, 1),
        cursor("a", more_news, 2),
        cursor("a", sport, 3),
        cursor("b", news, 4),
    ]
    await store.set_cursors(everything)

    async def found(name: str | None, topic_id: uuid.UUID | None) -> set[int | None]:
        return {each.offset for each in (await store.cursors(name, topic_id)).values()}

    assert await found(None, None) == {1, 2, 3, 4}
    assert await found("a", None) == {1, 2, 3}
    assert await found(None, news.topic_id) == {1, 2, 4}
    assert await found("a", news.topic_id) == {1, 2}
    assert await found("nobody", None) == await found("b", sport.topic_id) == set()
    assert await found(None, uuid.uuid4()) == set()


async def test_cursors_are_set_all_or_none(store: Store) -> None:
    key = await new_partition(store)
    bad = {
        UnknownTopic: cursor("reader", no_such_topic(), 1),
        UnknownPartition: cursor("reader", PartitionKey(key.topic_id, 1), 1),
        InvalidRequest: cursor("reader", key, -1),
        LimitReached: cursor("reader", key, 1, "x" * (limits.CURSOR_METADATA_BYTES + 1)),
    }
    for error, bad_cursor in bad.items():
        with pytest.raises(error):
            await store.set_cursors([cursor("good", key, 1), bad_cursor])
    with pytest.raises(LimitReached):
        await store.set_cursors([cursor("ä" * (limits.NAME_BYTES // 2 + 1), key, 1)])
    assert await store.cursors() == {}


async def test_cursors_are_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_limits, "CURSORS", 2)
    key = await new_partition(store)
    await store.set_cursors([cursor("a", key, 1), cursor("b", key, 1)])
    with pytest.raises(LimitReached):
        await store.set_cursors([cursor("a", key, 2), cursor("c", key, 1)])
    await store.set_cursors([cursor("a", key, 3), cursor("b", key, None)])
    await store.set_cursors([cursor("c", key, 4)])
    assert {each.offset for each in (await store.cursors()).values()} == {3, 4}


# --- small state -----------------------------------------------------------------------------


async def test_a_state_that_is_not_there_has_version_zero(store: Store) -> None:
    assert await store.state("key") == State(None, 0)


async def test_the_version_grows_by_one_with_each_change(store: Store) -> None:
    for version, value in enumerate([b"first", b"", bytes(range(256))]):
        assert await store.put_state("key", value, version) == State(value, version + 1)
        assert await store.state("key") == State(value, version + 1)


async def test_a_value_can_be_removed_and_be_put_again(store: Store) -> None:
    await store.put_state("key", b"value", 0)
    assert await store.put_state("key", None, 1) == State(None, 0)
    assert await store.state("key") == State(None, 0)
    assert await store.states("") == {}
    assert await store.put_state("key", None, 0) == State(None, 0)
    assert await store.put_state("key", b"again", 0) == State(b"again", 1)


@pytest.mark.parametrize("value", [b"other", None])
async def test_an_expectation_that_does_not_hold_changes_nothing(
    store: Store, value: bytes | None
) -> None:
    with pytest.raises(StateChanged):
        await store.put_state("key", value, 1)
    await store.put_state("key", b"value", 0)
    for version in (0, 2):
        with pytest.raises(StateChanged):
            await store.put_state("key", value, version)
    assert await store.state("key") == State(b"value", 1)


async def test_of_changes_at_the_same_time_one_wins(store: Store) -> None:
    await store.put_state("key", b"value", 0)
    outcomes = await asyncio.gather(
        *(store.put_state("key", bytes([n]), 1) for n in range(3)), return_exceptions=True
    )
    won = [outcome for outcome in outcomes if isinstance(outcome, State)]
    assert len(won) == 1
    assert [type(o) for o in outcomes if o not in won] == [StateChanged, StateChanged]
    assert await store.state("key") == won[0]


@pytest.mark.parametrize("value", [b"other", None])
async def test_who_is_refused_can_read_what_was_in_the_way(
    store: Store, value: bytes | None
) -> None:
    await store.put_state("key", b"value", 0)
    faster = asyncio.create_task(store.put_state("key", value, 1))
    await asyncio.sleep(0)  # it is on its way to disk
    with pytest.raises(StateChanged):
        await store.put_state("key", b"late", 1)
    assert await store.state("key") == await faster


async def test_states_are_found_by_prefix(store: Store) -> None:
    for key in ("a/1", "a/2", "b/1"):
        await store.put_state(key, key.encode(), 0)
    assert await store.states("a/") == {"a/1": State(b"a/1", 1), "a/2": State(b"a/2", 1)}
    assert set(await store.states("")) == {"a/1", "a/2", "b/1"}
    assert await store.states("c") == {}


async def test_states_are_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_limits, "STATE_KEYS", 2)
    largest = b"x" * limits.STATE_VALUE_BYTES
    await store.put_state("a", largest, 0)
    await store.put_state("b", b"", 0)
    with pytest.raises(LimitReached):
        await store.put_state("c", b"", 0)
    with pytest.raises(LimitReached):
        await store.put_state("b", largest + b"x", 1)
    with pytest.raises(LimitReached):
        await store.put_state("k" * (limits.STATE_KEY_BYTES + 1), b"", 0)
    assert await store.put_state("b", b"changed", 1) == State(b"changed", 2)
    await store.put_state("a", None, 1)
    assert await store.put_state("c", b"", 0) == State(b"", 1)


# --- the end ---------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Store, PartitionKey], Awaitable[object]]] = {
    "create_topic": lambda store, key: store.create_topic("other", 1, Policy()),
    "alter_topic": lambda store, key: store.alter_topic(key.topic_id, partitions=2),
    "delete_topic": lambda store, key: store.delete_topic(key.topic_id),
    "topics": lambda store, key: store.topics(),
    "append": lambda store, key: append(store, key, batch_of(b"value")),
    "is_repeat": lambda store, key: asked(store.is_repeat, Append(key, batch_of(b"value"))),
    "producers_of": lambda store, key: asked(store.producers_of, key.topic_id, 5),
    "room": lambda store, key: store.room(),
    "read": lambda store, key: read_one(store, key, 0),
    "offsets": lambda store, key: store.offsets(key),
    "offset_for_time": lambda store, key: store.offset_for_time(key, 0),
    "append_times": lambda store, key: store.append_times(key, 0, 1),
    "least_bytes_between": lambda store, key: store.least_bytes_between(key, 0, 1),
    "trim": lambda store, key: store.trim(key, 0),
    "open_transactions": lambda store, key: store.open_transactions(),
    "producers": lambda store, key: store.producers(key),
    "set_cursors": lambda store, key: store.set_cursors([cursor("reader", key, 0)]),
    "cursors": lambda store, key: store.cursors(),
    "state": lambda store, key: store.state("key"),
    "states": lambda store, key: store.states(""),
    "put_state": lambda store, key: store.put_state("key", b"value", 0),
}


async def asked(question: Callable[..., object], *about: object) -> object:
    return question(*about)


async def test_the_list_of_calls_is_complete() -> None:
    properties = {"failure", "latest_append_ms", "pending_bytes"}
    assert set(CALLS) | {"close"} | properties == Store.__abstractmethods__


async def test_a_closed_store_says_so_to_every_call(store: Store) -> None:
    key = await new_partition(store)
    await store.close()
    for name, call in CALLS.items():
        with named(call=name), pytest.raises(BrokerClosing):
            await call(store, key)


async def test_closing_twice_is_closing_once(store: Store) -> None:
    await store.close()
    await store.close()


async def test_closing_finishes_what_was_begun(store: Store) -> None:
    key = await new_partition(store)
    begun = [store.append([Append(key, batch_of(b"value"))]) for _ in range(3)]
    await store.close()
    answers = [(await soon(append))[0] for append in begun]
    assert [answer.base_offset for answer in answers] == [0, 1, 2]


async def test_closing_ends_reads_that_wait(store: Store) -> None:
    key = await new_partition(store)
    read = asyncio.create_task(
        store.read([Read(key, 0, PLENTY_BYTES)], max_bytes=PLENTY_BYTES, wait_ms=LONG_MS)
    )
    await let_others_run()
    await store.close()
    with pytest.raises(BrokerClosing):
        await soon(read)
