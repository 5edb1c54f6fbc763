"""Puts that a publisher numbers: a repeat is known, through crashes and however it comes (R6)."""

from __future__ import annotations

import asyncio

import pytest

from quackmq import limits
from quackmq.broker import Put
from quackmq.broker import limits as broker_limits
from quackmq.errors import (
    InvalidRequest,
    LimitReached,
    OutOfOrderSequence,
    StoreReadOnly,
    TopicFull,
    UnknownTopic,
)
from quackmq.model.offset_notes import GREATEST_NUMBER, offset_for_number, publisher_group
from tests.broker.flock import Pond, commit, outcome_of
from tests.broker.putting import ONE, WAITS, ZERO, numbered, put, read, record
from tests.broker.support import (
    CALLER,
    NAME,
    TOPIC,
    FailingStore,
    SlowStore,
    get_all,
    key_of,
    open_broker,
    values_in,
)
from tests.broker.transacting import Transactor
from tests.kit.support import Clock
from tests.kit.tables import each
from tests.kit.waiting import until


async def test_what_has_a_number_that_is_held_is_a_repeat(pond: Pond) -> None:
    async with pond.open() as broker:
        assert await outcome_of(broker.messages.last_sequence(CALLER, TOPIC, "quill")) is not None
        first = await numbered(broker, 0, b"a")
        again = await numbered(broker, 0, b"a")
        assert again == Put(first.ids, repeated=True)
        await numbered(broker, 7, b"b")  # a gap is fine
        assert await numbered(broker, 6, b"late") == Put((), repeated=True)
        assert await broker.messages.last_sequence(CALLER, TOPIC, "quill") == 7
        assert await broker.messages.last_sequence(CALLER, TOPIC, "other") is None
        assert not (await numbered(broker, 0, b"c", publisher="other")).repeated
        assert await values_in(broker) == [b"a", b"b", b"c"]


async def test_numbers_outlive_a_restart(pond: Pond) -> None:
    async with pond.open() as broker:
        await numbered(broker, 41, b"a")
    async with pond.open() as broker:
        assert await broker.messages.last_sequence(CALLER, TOPIC, "quill") == 41
        assert await numbered(broker, 41, b"a") == Put((), repeated=True)
        assert not (await numbered(broker, 42, b"b")).repeated
        assert await values_in(broker) == [b"a", b"b"]


async def test_numbers_go_with_their_topic(pond: Pond) -> None:
    async with pond.open() as broker:
        await numbered(broker, 5, b"a")
        await broker.delete_topic(CALLER, TOPIC)
        with pytest.raises(UnknownTopic):
            await broker.messages.last_sequence(CALLER, TOPIC, "quill")
        assert not (await numbered(broker, 5, b"b")).repeated
        assert await broker.messages.last_sequence(CALLER, TOPIC, "quill") == 5


async def test_a_numbered_put_to_several_partitions_is_one_unit(pond: Pond) -> None:
    async with pond.open(default_partitions=2) as broker:
        for _ in range(2):
            await broker.messages.put(
                CALLER,
                TOPIC,
                [record(b"a", ZERO), record(b"b", ONE), record(b"c", ZERO)],
                publisher="quill",
                sequence=3,
            )
        held = [await values_in(broker, partition=each) for each in (0, 1)]
        assert held == [[b"a", b"c"], [b"b"]]


async def test_puts_of_one_publisher_at_once_are_taken_in_order(pond: Pond) -> None:
    async with pond.open() as broker:
        values = [b"%d" % number for number in range(20)]
        answers = await asyncio.gather(
            *(numbered(broker, number, value) for number, value in enumerate(values))
        )
        assert await values_in(broker) == values
        assert not any(answer.repeated for answer in answers)


async def test_a_repeat_waits_for_its_first() -> None:
    store = SlowStore(Clock())
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, TOPIC)
        first = asyncio.create_task(numbered(broker, 0, b"a"))
        again = asyncio.create_task(numbered(broker, 0, b"a"))
        await until(lambda: store.appends > 0)
        asked = asyncio.create_task(broker.messages.last_sequence(CALLER, TOPIC, "quill"))
        await asyncio.sleep(0)
        are_done = again.done(), asked.done()
        store.released.set()
        assert are_done == (False, False)
        assert await again == Put((await first).ids, repeated=True)
        assert await asked == 0
        assert store.appends == 1


async def test_a_publisher_that_goes_away_leaves_a_put_that_is_carried_through() -> None:
    store = SlowStore(Clock())
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, TOPIC)
        leaving = asyncio.create_task(numbered(broker, 0, b"a"))
        await until(lambda: store.appends > 0)
        leaving.cancel()
        store.released.set()
        assert (await numbered(broker, 0, b"a")).repeated
        assert await values_in(broker) == [b"a"]


async def test_a_put_that_failed_is_not_held_and_fails_those_that_wait_behind_it() -> None:
    """Were those behind it taken, it would look like a repeat when it comes again."""
    async with open_broker(full_topic_wait_ms=50) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=WAITS)
        await broker.subscribe(CALLER, NAME, TOPIC)
        await put(broker, b"a", b"b")
        fifth = asyncio.create_task(outcome_of(numbered(broker, 5, b"five")))
        sixth = asyncio.create_task(outcome_of(numbered(broker, 6, b"six")))
        again = asyncio.create_task(outcome_of(numbered(broker, 5, b"five")))
        assert isinstance(await fifth, TopicFull)
        assert isinstance(await sixth, OutOfOrderSequence)
        assert isinstance(await again, TopicFull)
        assert await broker.messages.last_sequence(CALLER, TOPIC, "quill") is None
        await get_all(broker)
        assert not (await numbered(broker, 5, b"five")).repeated
        assert not (await numbered(broker, 6, b"six")).repeated
        assert await values_in(broker) == [b"a", b"b", b"five", b"six"]


async def test_an_append_that_fails_leaves_the_number_as_it_was() -> None:
    store = FailingStore(Clock())
    async with open_broker(store) as broker:
        await numbered(broker, 0, b"a")
        store.append_error = StoreReadOnly("full")
        with pytest.raises(StoreReadOnly):
            await numbered(broker, 1, b"b")
        store.append_error = None
        assert await broker.messages.last_sequence(CALLER, TOPIC, "quill") == 0
        assert not (await numbered(broker, 1, b"b")).repeated
        assert await values_in(broker) == [b"a", b"b"]


@each(
    ("publisher", "sequence"),
    [
        ("quill", None),
        (None, 1),
        ("", 1),
        ("q" * limits.NAME_BYTES, 1),
        ("\ud800", 1),
        ("quill", -1),
        ("quill", GREATEST_NUMBER + 1),
    ],
)
async def test_a_name_or_number_that_cannot_be_is_refused(
    publisher: str | None, sequence: int | None
) -> None:
    async with open_broker() as broker:
        with pytest.raises(InvalidRequest):
            await broker.messages.put(
                CALLER, TOPIC, [record(b"x")], publisher=publisher, sequence=sequence
            )
        assert TOPIC not in broker.topics(), "nothing comes to life by it"


async def test_the_greatest_number_is_one() -> None:
    async with open_broker() as broker:
        await numbered(broker, GREATEST_NUMBER, b"last")
        assert await broker.messages.last_sequence(CALLER, TOPIC, "quill") == GREATEST_NUMBER


async def test_a_publisher_s_numbers_outlive_the_offsets_of_a_group_and_expire_at_last() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await numbered(broker, 3, b"a")
        assert [each.name for each in broker.groups.all(CALLER)] == ["publisher:quill"]
        clock.advance(limits.GROUP_EXPIRY_MS + broker_limits.GROUP_EXPIRY_INTERVAL_MS)
        await broker.clean()
        assert await broker.messages.last_sequence(CALLER, TOPIC, "quill") == 3
        clock.advance(broker_limits.PUBLISHER_EXPIRY_MS)
        await broker.clean()
        assert await broker.messages.last_sequence(CALLER, TOPIC, "quill") is None


async def test_numbers_of_transactions_and_of_puts_are_the_same_ones(
    pond: Pond, implicit: bool
) -> None:
    """The Python client numbers what it puts by a transaction, other listeners by `put`."""
    async with pond.open() as broker:
        await numbered(broker, 6, b"six")
        client = Transactor(broker, implicit=implicit)
        await client.init()
        await client.send(b"seven")
        numbers = {key_of(broker.topic(TOPIC)): offset_for_number(7)}
        assert await client.send_offsets(numbers, publisher_group("quill")) == [None]
        assert await broker.messages.last_sequence(CALLER, TOPIC, "quill") == 6, "not committed yet"
        await client.commit()
        assert await numbered(broker, 7, b"seven") == Put((), repeated=True)
        await numbered(broker, 8, b"eight")
        page = await read(broker)
        assert [each.record.value for each in page.messages] == [b"six", b"seven", b"eight"]
    async with pond.open() as broker:
        assert await broker.messages.last_sequence(CALLER, TOPIC, "quill") == 8


async def test_numbers_of_transactions_expire_as_those_of_puts() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC)
        client = Transactor(broker)
        await client.init()
        numbers = {key_of(broker.topic(TOPIC)): offset_for_number(7)}
        await client.send_offsets(numbers, publisher_group("quill"))
        await client.commit()
        for left, expected in ((broker_limits.PUBLISHER_EXPIRY_MS - 1, 7), (1, None)):
            clock.advance(left + broker_limits.GROUP_EXPIRY_INTERVAL_MS * (expected is None))
            await broker.clean()
            assert await broker.messages.last_sequence(CALLER, TOPIC, "quill") == expected


async def test_publishers_without_end_do_not_use_up_the_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_limits, "PUBLISHERS", 2)
    async with open_broker() as broker:
        for publisher in ("quill", "feather"):
            await numbered(broker, 0, b"a", publisher)
        with pytest.raises(LimitReached, match="publishers"):
            await numbered(broker, 0, b"a", "down")
        await numbered(broker, 1, b"b")
        await commit(broker, {key_of(broker.topic(TOPIC)): 1})
        await broker.groups.delete(CALLER, publisher_group("feather"))
        await numbered(broker, 0, b"c", "down")
        assert await values_in(broker) == [b"a", b"a", b"b", b"c"]


async def test_no_subscription_takes_the_place_of_a_publisher_s_numbers() -> None:
    async with open_broker() as broker:
        await numbered(broker, 3, b"a")
        with pytest.raises(InvalidRequest, match="reserved for publishers"):
            await broker.subscribe(CALLER, "publisher:quill", TOPIC)
