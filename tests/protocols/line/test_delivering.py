"""Subscribers: one entry at a time, in turns, what is live; and those who do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from quackmq.model.policy import Policy
from quackmq.protocols.line.records import End
from quackmq.protocols.line.settings import LineSettings
from tests.kit.support import Clock
from tests.kit.waiting import until
from tests.protocols.kafka.client import on_both_loops
from tests.protocols.line.peers import TESTER, Peer, served

MINUTE = Policy(live_for_ms=60_000)


@on_both_loops
async def test_q10_the_next_entry_comes_when_the_last_was_answered() -> None:
    async with served() as running:
        daisy = await running.subscriber("daisy", "1")
        await running.put("1", b"a", b"b", b"c")
        assert await daisy.hears() == "topic 1 [a]"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(daisy.reader.readexactly(1), 0.05)
        daisy.say("successful")
        assert await daisy.receives(2) == ["topic 1 [b]", "topic 1 [c]"]


@on_both_loops
async def test_q10_the_proxy_goes_round_its_topics() -> None:
    async with served() as running:
        daisy = await running.subscriber("daisy", "1", "2", "3")
        assert await daisy.ask("terminate") == "terminate"
        await running.put("1", b"a", b"b", b"c", b"d")
        await running.put("2", b"x", b"y")
        await running.put("3", b"z")
        daisy = await running.subscriber("daisy", "1", "2", "3")
        assert await daisy.receives(7) == [
            "topic 1 [a]",
            "topic 2 [x]",
            "topic 3 [z]",
            "topic 1 [b]",
            "topic 2 [y]",
            "topic 1 [c]",
            "topic 1 [d]",
        ]


@on_both_loops
async def test_q10_entries_that_are_old_by_then_are_skipped_and_counted() -> None:
    clock = Clock()
    async with served(now_ms=clock) as running:
        await running.topic("1", MINUTE)
        daisy = await running.subscriber("daisy", "1")
        await running.put("1", b"a", b"b", b"c")
        assert await daisy.hears() == "topic 1 [a]"
        clock.advance(120_000)
        await running.put("1", b"d")
        daisy.say("successful")
        assert await daisy.hears() == "topic 1 [d]"
        (record,) = running.listener.records()
        assert record.skipped == 2
        assert await running.values("1") == [b"a", b"b", b"c", b"d"], "all of it is history"


@on_both_loops
async def test_a_newcomer_gets_what_is_live_and_where_nothing_gets_old_what_comes() -> None:
    clock = Clock()
    async with served(now_ms=clock) as running:
        await running.topic("aging", MINUTE)
        await running.topic("ageless")
        await running.put("aging", b"old")
        clock.advance(120_000)
        await running.put("aging", b"young")
        await running.put("ageless", b"before")
        daisy = await running.subscriber("daisy", "aging", "ageless")
        assert await daisy.receives(1) == ["topic aging [young]"]
        await running.put("ageless", b"after")
        assert await daisy.receives(1) == ["topic ageless [after]"]


@on_both_loops
async def test_every_entry_is_brought_if_the_listener_is_told_so() -> None:
    clock = Clock()
    async with served(LineSettings(reading="every"), now_ms=clock) as running:
        await running.topic("1", MINUTE)
        daisy = await running.subscriber("daisy", "1")
        await running.put("1", b"a", b"b")
        assert await daisy.hears() == "topic 1 [a]"
        clock.advance(120_000)
        daisy.say("successful")
        assert await daisy.receives(1) == ["topic 1 [b]"]


@on_both_loops
async def test_a_subscription_stays_and_goes_on_with_what_was_not_acknowledged() -> None:
    async with served() as running:
        daisy = await running.subscriber("daisy", "1")
        await running.put("1", b"a", b"b")
        assert await daisy.receives(1) == ["topic 1 [a]"]
        assert await daisy.hears() == "topic 1 [b]"
        daisy.writer.transport.abort()
        await until(lambda: running.listener.ended_connections())
        await running.put("1", b"c")
        daisy = await running.subscriber("daisy", "1")
        assert sorted(await daisy.receives(2)) == ["topic 1 [b]", "topic 1 [c]"]


@on_both_loops
async def test_terminate_with_an_entry_in_hand_leaves_it_unacknowledged() -> None:
    async with served() as running:
        daisy = await running.subscriber("daisy", "1")
        await running.put("1", b"a")
        assert await daisy.hears() == "topic 1 [a]"
        assert await daisy.ask("terminate") == "terminate"
        daisy = await running.subscriber("daisy", "1")
        assert await daisy.receives(1) == ["topic 1 [a]"]


# --- silence ---------------------------------------------------------------------------------


@on_both_loops
async def test_q10_a_silent_subscriber_is_dead_and_its_subscription_stays() -> None:
    async with served(LineSettings(answer_ms=50)) as running:
        silent = await running.subscriber("silent", "1")
        await running.put("1", b"a")
        assert await silent.hears() == "topic 1 [a]"
        assert await silent.hears() == "terminate"
        assert await silent.hears() == ""
        (ended,) = running.listener.ended_connections()
        assert (ended.record.id, ended.end) == ("silent", End.DEAD)
        (subscription,) = await running.broker.subscriptions(TESTER, name="silent")
        assert subscription.topic_name == "1"
        again = await running.subscriber("silent", "1")
        assert await again.receives(1) == ["topic 1 [a]"]


@on_both_loops
async def test_q3_a_silent_subscriber_costs_the_others_nothing() -> None:
    async with served() as running:
        silent = await running.subscriber("silent", "1")
        others = [await running.subscriber(f"other{number}", "1") for number in range(5)]
        await running.put("1", *(b"%d" % number for number in range(100)))
        wanted = [f"topic 1 [{number}]" for number in range(100)]
        for received in await asyncio.gather(*(other.receives(100) for other in others)):
            assert received == wanted
        assert await silent.hears() == "topic 1 [0]"


@on_both_loops
async def test_a_subscriber_without_anything_to_answer_may_be_silent() -> None:
    async with served(LineSettings(answer_ms=20)) as running:
        daisy = await running.subscriber("daisy", "1")
        probe = await running.subscriber("probe", "2")
        await running.put("2", b"a")
        assert await probe.is_hung_up(), "more than the time has passed"
        await running.put("1", b"a")
        assert await daisy.receives(1) == ["topic 1 [a]"]


# --- one connection a name -------------------------------------------------------------------


@on_both_loops
async def test_a_newer_connection_of_a_subscriber_takes_over() -> None:
    async with served() as running:
        older = await running.subscriber("daisy", "1")
        await running.put("1", b"a", b"b")
        assert await older.hears() == "topic 1 [a]"
        newer = await running.subscriber("daisy", "1")
        assert await older.hears() == "terminate"
        assert await older.hears() == ""
        assert sorted(await newer.receives(2)) == ["topic 1 [a]", "topic 1 [b]"]
        (record,) = running.listener.records()
        assert record.id == "daisy"
        (ended,) = running.listener.ended_connections()
        assert ended.end is End.REPLACED


@on_both_loops
async def test_of_many_connections_of_one_subscriber_one_is_left_and_is_served() -> None:
    async with served() as running:
        peers = [await running.peer() for _ in range(10)]
        for peer in peers:
            peer.say("sub daisy connect", "end", "sub daisy topic 1", "end")
        await until(lambda: len(running.listener.ended_connections()) == 9)
        await until(lambda: len(running.listener.records()) == 1)
        await running.put("1", b"a")
        heard = [[line async for line in _lines(peer)] for peer in peers]
        assert sum("topic 1 [a]" in lines for lines in heard) == 1


async def _lines(peer: Peer) -> AsyncIterator[str]:
    while line := await peer.hears():
        yield line
        if line.startswith("topic"):
            return


# --- topics that change ----------------------------------------------------------------------


@on_both_loops
async def test_a_deleted_topic_is_no_longer_served_and_the_others_are() -> None:
    async with served() as running:
        daisy = await running.subscriber("daisy", "1", "2")
        await running.broker.delete_topic(TESTER, "1")
        await running.put("2", b"a")
        assert await daisy.receives(1) == ["topic 2 [a]"]


@on_both_loops
async def test_who_unsubscribes_elsewhere_is_no_longer_served() -> None:
    async with served() as running:
        daisy = await running.subscriber("daisy", "1", "2")
        await running.broker.unsubscribe(TESTER, "daisy", "1")
        await running.put("1", b"a")
        await running.put("2", b"b")
        assert await daisy.receives(1) == ["topic 2 [b]"]


@on_both_loops
async def test_entries_of_all_partitions_are_brought_also_of_new_ones() -> None:
    async with served() as running:
        await running.topic("1", partitions=3)
        daisy = await running.subscriber("daisy", "1")
        await running.put("1", *(b"%d" % number for number in range(30)))
        wanted = [f"topic 1 [{number}]" for number in range(30)]
        assert sorted(await daisy.receives(30)) == sorted(wanted)
        await running.broker.alter_topic(TESTER, "1", partitions=5)
        await running.put("1", *(b"%d" % number for number in range(30)))
        assert sorted(await daisy.receives(30)) == sorted(wanted)


@on_both_loops
async def test_an_entry_too_long_for_a_line_is_left_out_and_the_next_one_comes() -> None:
    async with served(LineSettings(entry_bytes=16)) as running:
        daisy = await running.subscriber("daisy", "1")
        await running.put("1", b"a", b"x" * 17, b"b")
        assert await daisy.receives(2) == ["topic 1 [a]", "topic 1 [b]"]
        (record,) = running.listener.records()
        assert record.left_out == 1
