"""Publishers: `successful` when an entry is kept, `retry` when there is no room, `reject` else."""

from __future__ import annotations

import asyncio

import pytest

from quackmq.broker import QueueEntry, TopicQueue
from quackmq.model.policy import Policy, WhenFull
from quackmq.protocols.line import limits as line_limits
from quackmq.protocols.line.records import End
from tests.kit.support import Clock, let_others_run
from tests.kit.waiting import soon, until
from tests.protocols.kafka.client import on_both_loops
from tests.protocols.line.peers import TESTER, SlowStore, served

#: A topic of two entries, which live for a minute.
SMALL = Policy(live_entries=2, live_for_ms=60_000, when_full=WhenFull.WAIT)


@on_both_loops
async def test_q9_an_entry_is_answered_when_it_is_durable_and_not_before() -> None:
    store = SlowStore()
    async with served(store=store) as running:
        donald = await running.publisher("donald", "1")
        donald.say("topic 1 [a]", "topic 1 [b]")
        await until(lambda: store.appends == 1)
        await let_others_run(50)
        assert store.appends == 1, "one at a time"
        (record,) = running.listener.records()
        assert record.entries == 0
        store.released.set()
        assert [await donald.hears(), await donald.hears()] == ["successful", "successful"]
        assert await running.values("1") == [b"a", b"b"]


@on_both_loops
async def test_q6_a_full_topic_makes_the_publisher_retry_and_its_other_topics_go_on() -> None:
    clock = Clock()
    async with served(now_ms=clock) as running:
        await running.topic("full", SMALL)
        donald = await running.publisher("donald", "full", "other")
        for content in "ab":
            assert await donald.ask(f"topic full [{content}]") == "successful"
        for _ in range(3):
            assert await donald.ask("topic full [c]") == "retry"
            assert await donald.ask("topic other [x]") == "successful"
        (record,) = running.listener.records()
        assert (record.entries, record.retries) == (5, 3)
        clock.advance(60_001)
        await running.broker.clean()
        assert await donald.ask("topic full [c]") == "successful"
        assert await running.values("full") == [b"a", b"b", b"c"], "what was not taken was not kept"


@on_both_loops
async def test_q6_a_full_topic_is_nobody_elses_trouble() -> None:
    """M9 too: topics do not block each other."""
    async with served() as running:
        await running.topic("full", SMALL)
        donald = await running.publisher("donald", "full")
        for content in "ab":
            assert await donald.ask(f"topic full [{content}]") == "successful"
        donald.say(*["topic full [c]"] * 200)
        other = await running.publisher("daisy", "other")
        assert await other.ask("topic other [x]") == "successful"
        for _ in range(200):
            assert await donald.hears() == "retry"


@on_both_loops
async def test_a_topic_that_refuses_when_it_is_full_rejects() -> None:
    async with served() as running:
        await running.topic("full", Policy(live_entries=1, when_full=WhenFull.REFUSE))
        await running.topic("lonely", Policy(needs_subscriber=True))
        donald = await running.publisher("donald", "full", "lonely")
        assert await donald.ask("topic full [a]") == "successful"
        assert await donald.ask("topic full [b]") == "reject"
        assert await donald.ask("topic lonely [a]") == "reject"
        await running.subscriber("daisy", "lonely")
        assert await donald.ask("topic lonely [a]") == "successful"


@on_both_loops
async def test_a_topic_that_was_deleted_comes_to_life_again_or_is_rejected() -> None:
    async with served() as running:
        donald = await running.publisher("donald", "1")
        assert await donald.ask("topic 1 [a]") == "successful"
        await running.broker.delete_topic(TESTER, "1")
        assert await donald.ask("topic 1 [b]") == "successful"
        assert await running.values("1") == [b"b"]


@on_both_loops
async def test_many_connections_may_publish_under_one_id() -> None:
    async with served() as running:
        peers = [await running.publisher("donald", "1") for _ in range(20)]
        for number, peer in enumerate(peers):
            peer.say(f"topic 1 [{number}]")
        for peer in peers:
            assert await peer.hears() == "successful"
        assert sorted(map(int, await running.values("1"))) == list(range(20))


@on_both_loops
async def test_a_closing_broker_answers_the_entry_that_is_on_its_way() -> None:
    store = SlowStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_limits, "LINE_DRAIN_MS", 60_000)  # machines can be busy
        async with served(store=store) as running:
            donald = await running.publisher("donald", "1")
            donald.say("topic 1 [a]", "topic 1 [b]")
            await until(lambda: store.appends == 1)
            closing = asyncio.create_task(running.listener.close())
            await until(lambda: running.listener.is_closing)
            store.released.set()
            heard = [await donald.hears() for _ in range(3)]
            assert heard == ["successful", "terminate", ""], "what comes behind it is not begun"
            await donald.close()
            await soon(closing)
            assert await running.values("1") == [b"a"]


@on_both_loops
async def test_a_publisher_that_goes_leaves_what_it_has_begun_and_harms_nobody() -> None:
    store = SlowStore()
    async with served(store=store) as running:
        donald = await running.publisher("donald", "1")
        donald.say("topic 1 [a]")
        await until(lambda: store.appends == 1)
        donald.writer.transport.abort()
        store.released.set()
        await until(lambda: running.listener.ended_connections())
        daisy = await running.publisher("daisy", "1")
        assert await daisy.ask("topic 1 [b]") == "successful"
        assert await running.values("1") == [b"a", b"b"]
        (ended,) = running.listener.ended_connections()
        assert ended.end is End.GONE


@on_both_loops
async def test_an_entry_may_be_any_bytes() -> None:
    async with served() as running:
        donald = await running.publisher("donald", "1")
        daisy = await running.subscriber("daisy", "1")
        content = bytes(range(256)) + b"\\n\n"
        written = content.replace(b"\\", b"\\\\").replace(b"\n", b"\\n")
        donald.write(b"topic 1 [" + written + b"]\n")
        assert await donald.hears() == "successful"
        assert await running.values("1") == [content]
        line = await soon(daisy.reader.readline())
        assert line == b"topic 1 [" + written.replace(b"\r", b"\\r").replace(b"\0", b"\\0") + b"]\n"


@on_both_loops
async def test_entries_of_a_topic_of_several_partitions_take_turns() -> None:
    async with served() as running:
        await running.topic("1", partitions=2)
        donald = await running.publisher("donald", "1")
        for content in "abcd":
            assert await donald.ask(f"topic 1 [{content}]") == "successful"
        assert await running.values("1", 0) == [b"a", b"c"]
        assert await running.values("1", 1) == [b"b", b"d"]
        await running.broker.alter_topic(TESTER, "1", partitions=3)
        for content in "efgh":
            assert await donald.ask(f"topic 1 [{content}]") == "successful"
        assert len(await running.values("1", 2)) == 1
        await running.broker.delete_topic(TESTER, "1")
        for content in "xyz":
            assert await donald.ask(f"topic 1 [{content}]") == "successful"
        assert await running.values("1") == [b"x", b"y", b"z"]


@on_both_loops
async def test_q5_an_entry_is_kept_with_the_id_of_its_publisher() -> None:
    async with served() as running:
        donald = await running.publisher("donald", "1")
        assert await donald.ask("topic 1 [a]") == "successful"
        entry = await TopicQueue(running.broker, "1").getentry(0)
        assert isinstance(entry, QueueEntry)
        assert (entry.number, entry.publisher_id, entry.content) == (1, "donald", b"a")
