"""Work that is bounded a step is done as a whole in the end, and what is shown is bounded alone."""

from __future__ import annotations

import json

import pytest

from quackmq import limits
from quackmq.broker import limits as broker_limits
from quackmq.errors import StorageError
from quackmq.model.offset_notes import RECEIPTS_TOPIC
from quackmq.model.policy import Policy
from quackmq.model.subscription import Losses, OffsetRange
from quackmq.stores.memory import MemoryStore
from tests.broker.flock import Pond, commit
from tests.broker.pushed_peer import peer_of, pushed, values
from tests.broker.putting import read
from tests.broker.support import (
    CALLER,
    NAME,
    TOPIC,
    FailingStore,
    get_all,
    key_of,
    open_broker,
    publish,
    publish_each,
    values_in,
)
from tests.kit.limits import home_of
from tests.kit.support import Clock


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHANGES_AT_ONCE", "SHOWN_FAILURES", "CLEANED_GROUPS"):
        monkeypatch.setattr(home_of(name), name, 2)
    monkeypatch.setattr(broker_limits, "PUSHED_FLUSH_BYTES", 1)
    for name in ("TAKEN_ENTRIES", "PAGE_RECORDS", "RECEIPT_TIMES"):
        monkeypatch.setattr(home_of(name), name, 3)


async def test_a_topic_goes_with_all_its_subscriptions() -> None:
    store = MemoryStore()
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, TOPIC)
        for number in range(5):
            await broker.subscribe(CALLER, f"by-id-{number}", TOPIC)
            await pushed(broker, name=f"pushed-{number}")
        await broker.delete_topic(CALLER, TOPIC)
        left = [key for key in await store.states("") if "by-id" in key or "pushed" in key]
        assert left == []
        assert await store.cursors() == {}


async def test_every_topic_is_cleaned_and_those_that_cannot_be_are_shown_until_they_can() -> None:
    clock = Clock()
    store = FailingStore(clock)
    async with open_broker(store, clock) as broker:
        names = [f"topic-{number}" for number in range(5)]
        for name in names:
            await broker.create_topic(CALLER, name, policy=Policy(keep_for_ms=10))
            await publish(broker, b"old", topic=name)
        clock.advance(10)
        store.trim_error = StorageError("the disk is broken")
        await broker.clean()
        assert len(broker.retention_failures()) == 2, "of five that cannot be cleaned"
        store.trim_error = None
        await broker.clean()
        assert broker.retention_failures() == []
        assert [await values_in(broker, name) for name in names] == [[]] * 5


async def test_every_group_that_has_expired_goes() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        for number in range(5):
            await commit(broker, {key_of(topic): 1}, group=f"group-{number}")
        clock.advance(limits.GROUP_EXPIRY_MS + broker_limits.GROUP_EXPIRY_INTERVAL_MS)
        await broker.clean()
        assert broker.groups.all(CALLER) == []


async def test_what_is_acknowledged_in_many_partitions_is_kept_as_a_whole(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=5)
        await pushed(broker)
        for partition in range(5):
            await publish(broker, b"%d" % partition, partition=partition)
        async with peer_of(broker) as peer:
            peer.ack(await peer.wait(5))
    async with pond.open() as broker, peer_of(broker) as peer:
        assert await peer.take_all() == []
        assert peer.channel.counts().acked == 5


async def test_entries_are_lent_and_pages_are_read_some_at_a_time() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        letters = [bytes([letter]) for letter in b"abcdefgh"]
        async with peer_of(broker) as peer:
            await publish(broker, *letters)
            first = await peer.wait(3)
            assert values(first + await peer.wait(5)) == letters
            assert len(first) == 3
        pages = [await read(broker)]
        while pages[-1].next_offset < len(letters):
            pages.append(await read(broker, pages[-1].next_offset))
        assert [len(page.messages) for page in pages] == [3, 3, 2]


async def test_a_receipt_tells_some_append_times_in_even_distance() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC)
        await broker.subscribe(CALLER, NAME, TOPIC, "beginning", receipts=True)
        await broker.subscribe(CALLER, "other", TOPIC, "beginning")
        for letter in (b"a", b"b", b"c", b"d", b"e", b"f", b"g"):
            await publish_each(broker, letter)
            clock.advance(1)
        last = (await get_all(broker, name="other"))[-1]
        await broker.commit(CALLER, NAME, TOPIC, last.id)
        taken = json.loads((await values_in(broker, RECEIPTS_TOPIC))[-1])
        assert [offset for offset, _ in taken["append_times"]] == [0, 3, 6]
        assert (taken["first_offset"], taken["next_offset"]) == (0, 7)


async def test_of_many_losses_the_first_ranges_are_named_and_all_are_counted() -> None:
    losses = Losses()
    for number in range(limits.LOST_RANGES + 5):
        losses.add(10 * number, 10 * number + 3)
    assert losses.count == 3 * (limits.LOST_RANGES + 5)
    assert len(losses.ranges()) == limits.LOST_RANGES
    assert losses.ranges()[0] == OffsetRange(0, 3)
