"""The order of delivery: increasing, what was not answered first, and the topics in turn (Q10)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

import pytest

from quackmq.broker import Reading, Terms
from quackmq.errors import StorageError
from quackmq.model.leases import Leases
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, AppendResult, Cursor, StatePut
from quackmq.protocols.line import limits as line_limits
from quackmq.protocols.line.settings import LineSettings
from quackmq.protocols.line.subscriber import Subscriber
from quackmq.stores.memory import MemoryStore
from tests.kit.support import Clock
from tests.kit.waiting import until
from tests.protocols.kafka.client import on_both_loops
from tests.protocols.line.peers import Peer, Served, served

AGED = Policy(live_for_ms=60_000)
READINGS: tuple[Reading, ...] = ("live", "every", "newest")


def lines(topic: str, *numbers: int) -> list[str]:
    return [f"topic {topic} [{number}]" for number in numbers]


async def put_numbers(running: Served, topic: str, first: int, end: int) -> None:
    await running.put(topic, *(b"%d" % number for number in range(first, end)))


async def gone(running: Served, peer: Peer) -> None:
    """The peer goes without a word, and the broker has noticed."""
    ended = len(running.listener.ended_connections())
    peer.writer.transport.abort()
    await until(lambda: len(running.listener.ended_connections()) > ended)


async def away(running: Served, name: str, *topics: str) -> None:
    """A subscription without a connection."""
    peer = await running.subscriber(name, *topics)
    assert await peer.ask("terminate") == "terminate"


# --- one topic -------------------------------------------------------------------------------


@on_both_loops
@pytest.mark.parametrize("reading", ["live", "every"])
async def test_q10_what_was_published_while_a_subscriber_was_away_comes_in_order(
    reading: Reading,
) -> None:
    async with served(LineSettings(reading=reading)) as running:
        await running.topic("1", AGED)
        await away(running, "daisy", "1")
        await put_numbers(running, "1", 0, 350)
        daisy = await running.subscriber("daisy", "1")
        first = await daisy.receives(200)
        await put_numbers(running, "1", 350, 360)
        assert [*first, *await daisy.receives(160)] == lines("1", *range(360))


@on_both_loops
async def test_q13_the_newest_hundred_come_first_under_their_own_name() -> None:
    async with served(LineSettings(reading="newest")) as running:
        await running.topic("1", AGED)
        await away(running, "daisy", "1")
        await put_numbers(running, "1", 0, 350)
        daisy = await running.subscriber("daisy", "1")
        hundreds = [*range(250, 350), *range(150, 250), *range(50, 150), *range(50)]
        assert await daisy.receives(350) == lines("1", *hundreds)


@on_both_loops
async def test_q10_numbers_increase_also_where_old_entries_are_skipped() -> None:
    clock = Clock()
    async with served(now_ms=clock) as running:
        await running.topic("1", AGED)
        daisy = await running.subscriber("daisy", "1")
        await put_numbers(running, "1", 0, 10)
        assert await daisy.receives(2) == lines("1", 0, 1)
        clock.advance(40_000)
        await put_numbers(running, "1", 10, 14)
        assert await daisy.receives(1) == lines("1", 2)
        assert await daisy.hears() == "topic 1 [3]"
        clock.advance(30_000)
        daisy.say("successful")
        assert await daisy.receives(4) == lines("1", 10, 11, 12, 13)
        (record,) = running.listener.records()
        assert record.skipped == 6


@on_both_loops
@pytest.mark.parametrize("reading", READINGS)
async def test_after_a_reconnect_the_unanswered_entry_comes_first_also_under_load(
    reading: Reading,
) -> None:
    async with served(LineSettings(reading=reading)) as running:
        daisy = await running.subscriber("daisy", "1")
        await put_numbers(running, "1", 0, 2)
        assert await daisy.receives(1) == lines("1", 0)
        assert await daisy.hears() == "topic 1 [1]"
        for number in range(2, 40):
            await gone(running, daisy)
            await put_numbers(running, "1", number, number + 1)
            daisy = await running.subscriber("daisy", "1")
            assert await daisy.hears() == "topic 1 [1]", f"{number} entries were published"
        daisy.say("successful")
        assert await daisy.receives(1) == lines("1", 2)


@on_both_loops
async def test_an_unanswered_entry_that_is_old_by_then_is_skipped() -> None:
    clock = Clock()
    async with served(now_ms=clock) as running:
        await running.topic("1", AGED)
        daisy = await running.subscriber("daisy", "1")
        await put_numbers(running, "1", 0, 1)
        assert await daisy.hears() == "topic 1 [0]"
        await gone(running, daisy)
        clock.advance(120_000)
        await put_numbers(running, "1", 1, 2)
        daisy = await running.subscriber("daisy", "1")
        assert await daisy.receives(1) == lines("1", 1)


# --- several topics --------------------------------------------------------------------------


@on_both_loops
async def test_q10_the_turn_goes_to_the_next_topic_after_the_very_first_entry() -> None:
    async with served() as running:
        daisy = await running.subscriber("daisy", "1", "2", "3")
        await put_numbers(running, "1", 0, 1)
        assert await daisy.hears() == "topic 1 [0]"
        await put_numbers(running, "1", 1, 3)
        await put_numbers(running, "3", 0, 2)
        await put_numbers(running, "2", 0, 1)
        await until(lambda: _lag(running) == 6)
        daisy.say("successful")
        assert await daisy.receives(5) == [
            *("topic 2 [0]", "topic 3 [0]", "topic 1 [1]", "topic 3 [1]", "topic 1 [2]")
        ]


def _lag(running: Served) -> int:
    (connection,) = running.listener.connections
    assert isinstance(connection._handler, Subscriber)
    topics = connection._handler._topics.values()
    return sum(topic.channel.lag() for topic in topics)


@on_both_loops
@pytest.mark.parametrize("reading", ["live", "every"])
async def test_q10_topics_take_turns_while_a_subscriber_catches_up(reading: Reading) -> None:
    async with served(LineSettings(reading=reading)) as running:
        names = ("1", "2", "3")
        for name in names:
            await running.topic(name, AGED)
        await away(running, "daisy", *names)
        for name in names:
            await put_numbers(running, name, 0, 120)
        daisy = await running.subscriber("daisy", *names)
        wanted = [line for number in range(120) for name in names for line in lines(name, number)]
        assert await daisy.receives(360) == wanted


@on_both_loops
@pytest.mark.parametrize("reading", READINGS)
async def test_the_unanswered_entry_comes_before_all_topics_and_the_turn_goes_on_behind_it(
    reading: Reading,
) -> None:
    async with served(LineSettings(reading=reading)) as running:
        daisy = await running.subscriber("daisy", "1", "2", "3")
        await put_numbers(running, "2", 0, 1)
        assert await daisy.hears() == "topic 2 [0]"
        await gone(running, daisy)
        for name in ("1", "2", "3"):
            await put_numbers(running, name, 1, 2)
        daisy = await running.subscriber("daisy", "1", "2", "3")
        assert await daisy.receives(4) == [
            *("topic 2 [0]", "topic 3 [1]", "topic 1 [1]", "topic 2 [1]")
        ]


# --- crashes ---------------------------------------------------------------------------------


@on_both_loops
async def test_with_durable_acks_a_crash_repeats_only_the_entry_in_flight() -> None:
    store = LastingStore()
    settings = LineSettings(durable_acks=True)
    async with served(settings, store=store) as running:
        daisy = await running.subscriber("daisy", "1", "2")
        for name in ("1", "2"):
            await put_numbers(running, name, 0, 20)
        for number in range(10):
            assert await daisy.receives(1) == lines("1", number)
            assert await daisy.hears() == f"topic 2 [{number}]"
            assert await durable_marks(running, store) == {"1": number + 1, "2": number}
            daisy.say("successful")
        assert await daisy.hears() == "topic 1 [10]"
        # Another broker finds what one that dies here would have left.
        async with served(settings, store=store) as after:
            heir = await after.subscriber("daisy", "1", "2")
            assert await heir.receives(2) == ["topic 1 [10]", "topic 2 [10]"]


@on_both_loops
async def test_with_durable_acks_the_next_entry_waits_until_the_answer_is_on_disk(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(line_limits, "LINE_SAVE_RETRY_MS", 1)
    store = FullDisk()
    async with served(LineSettings(durable_acks=True), store=store) as running:
        daisy = await running.subscriber("daisy", "1")
        await put_numbers(running, "1", 0, 3)
        store.is_full = True
        assert await daisy.receives(1) == lines("1", 0)
        await until(lambda: store.refused >= 3)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(daisy.reader.readexactly(1), 0.05)
        store.is_full = False
        assert await daisy.receives(2) == lines("1", 1, 2)
    assert caplog.text.count("sub daisy waits, its answer cannot be saved: it is full") == 1


class FullDisk(MemoryStore):
    """It takes no states while it is full."""

    is_full = False
    refused = 0

    def append(
        self,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> Awaitable[list[AppendResult]]:
        if states and self.is_full:
            self.refused += 1
            raise StorageError("it is full")
        return super().append(appends, cursors, states)


class LastingStore(MemoryStore):
    """It outlives its brokers."""

    async def close(self) -> None:
        return


async def durable_marks(running: Served, store: MemoryStore) -> dict[str, int]:
    """The offset before which all is acknowledged, by topic, as a crash would leave it."""
    names = {str(topic.id): name for name, topic in running.broker.topics().items()}
    return {
        names[key.split("/")[1]]: Leases.decode(state.value, Terms(), 0).low_water_mark
        for key, state in (await store.states("leases/")).items()
        if state.value is not None
    }


@on_both_loops
async def test_a_subscription_of_an_earlier_version_opens_and_goes_on_in_order() -> None:
    """It was live when that meant the newest first, and had postponed what is older."""
    store = LastingStore()
    async with served(LineSettings(reading="newest"), store=store) as running:
        await running.topic("1", AGED)
        await away(running, "daisy", "1")
        await put_numbers(running, "1", 0, 350)
        daisy = await running.subscriber("daisy", "1")
        assert await daisy.receives(10) == lines("1", *range(250, 260))
        assert await daisy.ask("terminate") == "topic 1 [260]"
        key = f"pushed/{running.broker.topics()['1'].id}/daisy"
    written = (
        b'{"terms": {"reading": "live", "lease_ms": 40000, "outstanding": 10000, "window": 100}, '
        b'"start": "beginning", "created_ms": 1}'
    )
    await store.put_state(key, written, (await store.state(key)).version)
    async with served(store=store) as running:
        daisy = await running.subscriber("daisy", "1")
        wanted = [260, *range(250), *range(261, 350)]
        assert await daisy.receives(340) == lines("1", *wanted)
