"""A subscriber that polls: `getentry` by number, over the line listener (Q5)."""

from __future__ import annotations

from quackmq.model.policy import Policy
from quackmq.protocols.line.settings import LineSettings
from tests.kit.support import START_MS, Clock
from tests.protocols.kafka.client import on_both_loops
from tests.protocols.line.peers import TESTER, Peer, served


async def numbers(peer: Peer, topic: str, last: int = 0) -> list[int]:
    """The numbers that a subscriber gets one after the other, and the answer that ends them."""
    found: list[int] = []
    while not found or found[-1] > 0:
        answer = await peer.ask(f"getentry {topic} {found[-1] if found else last}")
        assert answer.startswith(f"entry {topic} "), answer
        found.append(int(answer.split(" ")[2]))
    return found


@on_both_loops
async def test_q5_a_polling_subscriber_gets_entries_by_number_without_a_subscription() -> None:
    clock = Clock()
    async with served(now_ms=clock) as running:
        donald = await running.publisher("donald", "1")
        daisy = await running.subscriber("daisy")
        assert await daisy.ask("getentry 1 0") == "entry 1 0", "nothing was ever published"
        assert await donald.ask("topic 1 [Ducks win]") == "successful"
        clock.advance(5)
        assert await donald.ask(r"topic 1 [two\nlines]") == "successful"
        await running.put("1", b"")
        assert await daisy.ask("getentry 1 0") == f"entry 1 1 {START_MS} donald [Ducks win]"
        assert await daisy.ask("getentry 1 1") == rf"entry 1 2 {START_MS + 5} donald [two\nlines]"
        assert await daisy.ask("getentry 1 2") == f"entry 1 3 {START_MS + 5} - []"
        assert await daisy.ask("getentry 1 3") == "entry 1 -3"
        assert await daisy.ask("getentry 1 99") == "entry 1 -3"
        daisy.say("getentry 1 0", "getentry 1 3", "terminate")
        heard = [await daisy.hears() for _ in range(3)]
        assert heard[1:] == ["entry 1 -3", "terminate"], "answers come in the order of requests"
        assert await running.broker.subscriptions(TESTER) == []


@on_both_loops
async def test_q5_entries_that_left_the_queue_give_way_to_the_next_newer_one() -> None:
    clock = Clock()
    async with served(now_ms=clock) as running:
        await running.topic("news", Policy(live_entries=3, live_for_ms=1_000))
        donald = await running.publisher("donald", "news")
        daisy = await running.subscriber("daisy")
        for content in "abcd":
            assert await donald.ask(f"topic news [{content}]") == "successful"
        assert await numbers(daisy, "news") == [2, 3, 4, -4], "MAXENTRIES is three"
        clock.advance(1_000)
        assert await numbers(daisy, "news") == [-4], "all are older than δ"
        assert await donald.ask("topic news [e]") == "successful"
        assert await numbers(daisy, "news", last=1) == [5, -5]


@on_both_loops
async def test_q5_a_topic_of_its_own_quacksize_rejects_larger_entries() -> None:
    async with served(LineSettings(entry_bytes=10)) as running:
        await running.topic("short", Policy(entry_bytes=5))
        await running.topic("long", Policy(entry_bytes=20))
        donald = await running.publisher("donald", "short", "long")
        assert await donald.ask("topic short [quack]") == "successful"
        assert await donald.ask("topic short [quacks]") == "reject" and donald.reason.startswith(
            "record_too_large: "
        )
        assert await donald.ask("topic long [quack quac]") == "successful"
        assert await donald.ask("topic long [quack quack]") == "reject", "line's own"
        assert await running.values("short") == [b"quack"]


@on_both_loops
async def test_an_entry_that_is_too_long_for_a_line_comes_as_its_size() -> None:
    async with served(LineSettings(entry_bytes=10)) as running:
        await running.topic("1")
        await running.put("1", b"a" * 11, b"b" * 10)
        daisy = await running.subscriber("daisy")
        assert (await daisy.ask("getentry 1 0")).endswith(" - 11")
        assert (await daisy.ask("getentry 1 1")).endswith(f" - [{'b' * 10}]")


@on_both_loops
async def test_a_subscriber_may_poll_while_entries_are_pushed_to_it() -> None:
    async with served() as running:
        await running.topic("pushed", Policy(live_entries=100))
        await running.topic("polled")
        await running.put("pushed", b"a", b"b")
        await running.put("polled", b"x")
        daisy = await running.subscriber("daisy", "pushed")
        assert await daisy.hears() == "topic pushed [a]"
        assert (await daisy.ask("getentry polled 0")).endswith(" - [x]")
        assert await daisy.ask("getentry none 0") == "reject" and daisy.reason.startswith(
            "unknown_topic: "
        )
        assert await daisy.ask("successful") == "topic pushed [b]", "the answer still counts"
        daisy.say("successful", "getentry none 0")
        assert await daisy.hears() == "reject" and daisy.reason.startswith("unknown_topic: ")
        await running.put("pushed", b"c")
        assert await daisy.hears() == "topic pushed [c]", "a rejected request stops no delivery"


@on_both_loops
async def test_each_partition_is_a_queue_with_numbers_of_its_own() -> None:
    async with served() as running:
        await running.topic("1", partitions=2)
        donald = await running.publisher("donald", "1")
        for content in "abc":  # they go to the partitions in turn
            assert await donald.ask(f"topic 1 [{content}]") == "successful"
        daisy = await running.subscriber("daisy")
        assert (await daisy.ask("getentry 1 1")).endswith("[c]")
        assert (await daisy.ask("getentry 1 0 1")).endswith("[b]")
        assert await daisy.ask("getentry 1 1 1") == "entry 1 -1"
        assert await daisy.ask("getentry 1 0 2") == "reject" and daisy.reason.startswith(
            "unknown_partition: "
        )


@on_both_loops
async def test_only_a_subscriber_that_has_ended_its_list_may_poll() -> None:
    async with served() as running:
        donald = await running.publisher("donald", "1")
        assert await donald.ask("getentry 1 0") == "reject"
        daisy = await running.peer()
        for line in ("sub daisy connect", "end"):
            assert await daisy.ask(line) == "accept"
        assert await daisy.ask("getentry 1 0") == "reject"
        assert await daisy.ask("end") == "accept"
        assert await daisy.ask("getentry 1 0") == "entry 1 0"
