"""One connection: the order of its answers, what it may have in flight, and where it stops."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from quackmq import limits
from quackmq.broker import Broker, Caller
from quackmq.model.topic import AppendResult, Read, Slice, Topic
from quackmq.protocols.kafka import limits as kafka_limits
from quackmq.records.batch import Batch
from tests.kit.support import let_others_run, transport_of
from tests.kit.waiting import soon, until
from tests.protocols.kafka.client import (
    FETCH,
    METADATA,
    PRODUCE,
    TESTER,
    Served,
    fetch_fields,
    news,
    on_both_loops,
    only_partition,
    produce_fields,
    served,
)


class HeldBroker(Broker):
    """A broker whose disk is slow: a publish is durable when the test says so."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.held: list[asyncio.Future[AppendResult]] = []
        self.full = False
        self.room_made = asyncio.Event()
        self.reads = 0

    def publish(
        self,
        caller: Caller,
        topic: Topic,
        partition: int,
        batch: Batch,
        *,
        owned: bool = False,
        wait_for_room: bool = True,
    ) -> asyncio.Future[AppendResult]:
        future: asyncio.Future[AppendResult] = asyncio.get_running_loop().create_future()
        self.held.append(future)
        return future

    def release(self, number: int) -> None:
        self.held[number].set_result(AppendResult(number, number + 1, 0, 0))

    @property
    def pending_bytes(self) -> int:
        return limits.PENDING_BYTES + 1 if self.full else 0

    async def room(self) -> None:
        await self.room_made.wait()

    def make_room(self) -> None:
        self.full = False
        self.room_made.set()

    async def read(self, caller: Caller, reads: Sequence[Read], **bounds: Any) -> list[Slice]:
        self.reads += 1
        return await super().read(caller, reads, **bounds)


def held(running: Served) -> HeldBroker:
    assert isinstance(running.broker, HeldBroker)
    return running.broker


# --- order -----------------------------------------------------------------------------------


@on_both_loops
async def test_batches_in_flight_are_all_given_to_the_broker_before_the_first_is_durable() -> None:
    async with served(HeldBroker) as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        for _ in range(20):
            client.send(PRODUCE, 9, **produce_fields(news()))
        await until(lambda: len(held(running).held) == 20)
        for number in range(20):
            held(running).release(number)
        offsets = [only_partition(await client.receive()).base_offset for _ in range(20)]
        assert offsets == list(range(20))


@on_both_loops
async def test_answers_come_in_the_order_of_the_requests_whichever_is_done_first() -> None:
    async with served(HeldBroker) as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        for _ in range(5):
            client.send(PRODUCE, 9, **produce_fields(news()))
        client.send(METADATA, 1, topics=None)
        await until(lambda: len(held(running).held) == 5)
        for number in (4, 2, 3, 0, 1):
            await let_others_run()
            held(running).release(number)
        offsets = [only_partition(await client.receive()).base_offset for _ in range(5)]
        assert offsets == list(range(5))
        assert (await client.receive()).topics[0].name == "news"


@on_both_loops
async def test_a_request_of_another_kind_begins_when_those_before_it_are_answered() -> None:
    async with served(HeldBroker) as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        client.send(PRODUCE, 9, **produce_fields(news()))
        client.send(FETCH, 11, **fetch_fields())
        await until(lambda: len(held(running).held) == 1)
        await let_others_run()
        assert held(running).reads == 0
        held(running).release(0)
        assert only_partition(await client.receive()).error_code == ErrorCode.none
        assert only_partition(await client.receive()).error_code == ErrorCode.none
        assert held(running).reads == 1


@on_both_loops
async def test_a_batch_sent_behind_a_waiting_fetch_of_the_same_connection_wakes_it() -> None:
    async with served() as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        client.send(FETCH, 11, **fetch_fields(wait_ms=60_000))
        client.send(PRODUCE, 9, **produce_fields(news()))
        assert only_partition(await client.receive()).high_watermark == 1
        assert only_partition(await client.receive()).base_offset == 0


@on_both_loops
async def test_a_publish_that_fails_is_answered_and_the_others_too() -> None:
    async with served(HeldBroker) as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        for _ in range(3):
            client.send(PRODUCE, 9, **produce_fields(news()))
        await until(lambda: len(held(running).held) == 3)
        first, second, _ = held(running).held
        first.cancel()
        second.set_exception(ZeroDivisionError("a bug"))
        held(running).release(2)
        codes = [only_partition(await client.receive()).error_code for _ in range(3)]
        assert codes == [
            ErrorCode.not_leader_or_follower,
            ErrorCode.unknown_server_error,
            ErrorCode.none,
        ]


@on_both_loops
async def test_requests_may_come_byte_by_byte() -> None:
    async with served() as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        stream = client.frame(METADATA, 1, topics=None)
        stream += client.frame(PRODUCE, 9, **produce_fields(news()))
        for byte in stream:
            client.writer.write(bytes([byte]))
            await client.writer.drain()
            await asyncio.sleep(0)
        await client.receive_frame()
        await client.receive_frame()
        (name,) = running.broker.topics()
        assert name == "news"


# --- bounds ----------------------------------------------------------------------------------


@on_both_loops
async def test_a_connection_has_a_bounded_number_of_requests_in_flight() -> None:
    most = kafka_limits.KAFKA_REQUESTS_IN_FLIGHT
    async with served(HeldBroker) as running:
        await running.broker.create_topic(TESTER, "news")
        client, other = await running.client(), await running.client()
        for _ in range(most + 50):
            client.send(PRODUCE, 9, **produce_fields(news()))
        await until(lambda: len(held(running).held) == most)
        await other.ask(METADATA, 1, topics=None)
        assert len(held(running).held) == most
        for number in range(most + 50):
            await until(lambda number: len(held(running).held) > number, number)
            held(running).release(number)
            assert only_partition(await client.receive()).base_offset == number


@on_both_loops
async def test_nothing_is_begun_while_the_broker_has_no_room() -> None:
    async with served(HeldBroker) as running:
        await running.broker.create_topic(TESTER, "news")
        clients = [await running.client() for _ in range(3)]
        held(running).full = True
        for client in clients:
            for _ in range(2):
                client.send(PRODUCE, 9, **produce_fields(news()))
            await client.writer.drain()
        await until(lambda: len(running.listener._waiting_for_room) == 3)
        assert held(running).held == []
        held(running).make_room()
        await until(lambda: len(held(running).held) == 6)
        for number in range(6):
            held(running).release(number)
        for client in clients:
            await client.receive()
            await client.receive()


@on_both_loops
async def test_a_store_that_never_has_room_again_still_answers_its_errors() -> None:
    async with served(HeldBroker) as running:
        client = await running.client()
        held(running).full = True
        held(running).room_made.set()
        for _ in range(10):
            part = only_partition(await client.ask(PRODUCE, 9, **produce_fields(news())))
            assert part.error_code == ErrorCode.unknown_topic_or_partition


class FullBroker(Broker):
    """A broker whose store has no room until the broker closes."""

    @property
    def pending_bytes(self) -> int:
        return limits.PENDING_BYTES + 1

    async def room(self) -> None:
        self._lifecycle.check_open()
        await self._lifecycle.wait(asyncio.Event().wait())


@on_both_loops
async def test_a_broker_that_closes_answers_the_requests_that_wait_for_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served(FullBroker) as running:
        await running.broker.create_topic(TESTER, "news")
        clients = [await running.client() for _ in range(2)]
        for client in clients:
            for _ in range(3):
                client.send(PRODUCE, 9, **produce_fields(news()))
            await client.writer.drain()
        await until(lambda: len(running.listener._waiting_for_room) == 2)
        await running.broker.close()
        for client in clients:
            for _ in range(3):
                part = only_partition(await client.receive())
                assert part.error_code == ErrorCode.not_leader_or_follower
        gc.collect()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@on_both_loops
async def test_a_peer_that_takes_no_answers_gets_no_more_of_them_and_holds_up_nobody() -> None:
    async with served(HeldBroker) as running:
        topic = await running.broker.create_topic(TESTER, "news")
        batch = Batch.parse(news(bytes(4 * limits.MIB)))
        for _ in range(3):
            await Broker.publish(running.broker, TESTER, topic, 0, batch)
        slow, other = await running.client(), await running.client()
        transport_of(slow.writer).pause_reading()
        for _ in range(12):
            slow.send(FETCH, 11, **fetch_fields())
        await until(lambda: running.listener.send_budget.unsent_bytes > 0)
        for _ in range(5):
            await other.ask(METADATA, 1, topics=None)
        assert held(running).reads < 6
        assert running.listener.send_budget.unsent_bytes < 20 * limits.MIB
        transport_of(slow.writer).resume_reading()
        for _ in range(12):
            assert len(only_partition(await slow.receive()).records) > 4 * limits.MIB
        await until(lambda: running.listener.send_budget.unsent_bytes == 0)


@on_both_loops
async def test_a_peer_that_takes_nothing_of_its_answers_is_disconnected_in_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as running:
        topic = await running.broker.create_topic(TESTER, "news")
        batch = Batch.parse(news(bytes(4 * limits.MIB)))
        for _ in range(3):
            await running.broker.publish(TESTER, topic, 0, batch)
        deaf, other = await running.client(), await running.client()
        transport_of(deaf.writer).pause_reading()
        for _ in range(6):
            deaf.send(FETCH, 11, **fetch_fields())
        await until(lambda: running.listener.send_budget.unsent_bytes > 0)
        running.listener.sweep()
        running.listener.sweep()
        assert len(running.listener.connections) == 2
        monkeypatch.setattr(kafka_limits, "KAFKA_SEND_WAIT_MS", 1)

        def one_is_left_after_a_sweep() -> bool:
            running.listener.sweep()
            return len(running.listener.connections) == 1

        await until(one_is_left_after_a_sweep)
        assert "read no responses" in caplog.text
        assert running.listener.send_budget.unsent_bytes == 0
        await other.ask(METADATA, 1, topics=None)


@on_both_loops
async def test_answers_are_small_while_slow_peers_hold_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served() as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        size = 100 * limits.KIB
        for _ in range(10):
            await client.ask(PRODUCE, 9, **produce_fields(news(bytes(size))))
        plenty = only_partition(await client.ask(FETCH, 11, **fetch_fields()))
        assert len(plenty.records) > 10 * size
        running.listener.send_budget.add(kafka_limits.KAFKA_SEND_BYTES)
        scarce = only_partition(await client.ask(FETCH, 11, **fetch_fields()))
        assert size < len(scarce.records) < 2 * size
        running.listener.send_budget.add(-kafka_limits.KAFKA_SEND_BYTES)


@on_both_loops
async def test_a_large_request_waits_for_memory_and_then_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kafka_limits, "KAFKA_SCRATCH_BYTES", 64 * limits.KIB)
    async with served() as running:
        await running.broker.create_topic(TESTER, "news")
        running.listener.memory.budget.most_bytes = 1536 * limits.KIB
        first, second = await running.client(), await running.client()
        large = first.frame(PRODUCE, 9, **produce_fields(news(bytes(limits.MIB))))
        first.writer.write(large[: limits.MIB // 2])
        await until(lambda: running.listener.memory.budget.used_bytes > 936 * limits.KIB)
        second.writer.write(large)
        await until(lambda: running.listener.waiting_for_memory)
        assert (await (await running.client()).ask(METADATA, 1, topics=None)).topics
        first.writer.write(large[limits.MIB // 2 :])
        await first.receive_frame()
        await second.receive_frame()
        assert running.listener.memory.budget.used_bytes == 0


# --- peers that go, or should ------------------------------------------------------------------


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "a size below none": b"\xff" * 20,
    "a size above the limit": b"\x7f" + bytes(20),
    "a metadata request of four billion topics": bytes.fromhex(
        "00000010 0003 000c 00000001 ffff 00 ffffffff0f"
    ),
    "a header that ends early": bytes.fromhex("0000000a 0003 0001 00000001 7fff"),
    "a produce request that ends early": bytes.fromhex("0000000b 0000 0009 00000001 ffff 00"),
}


@pytest.mark.parametrize("what", GARBAGE)
@on_both_loops
async def test_a_peer_that_sends_garbage_is_disconnected_with_a_line_in_the_log(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as running:
        await running.broker.create_topic(TESTER, "news")
        bad, good = await running.client(), await running.client()
        good.send(FETCH, 11, **fetch_fields(wait_ms=60_000))
        bad.writer.write(GARBAGE[what])
        assert await bad.is_disconnected()
        (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert "disconnected" in line.message
        await (await running.client()).ask(PRODUCE, 9, **produce_fields(news()))
        assert only_partition(await good.receive()).high_watermark == 1


@on_both_loops
async def test_a_bug_of_ours_costs_only_the_connection_that_met_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(HeldBroker) as running:
        await running.broker.create_topic(TESTER, "news")

        def fail(*arguments: Any, **more: Any) -> Any:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(running.broker, "publish", fail)
        monkeypatch.setattr(running.broker, "read", fail)
        for api_key, version, fields in (
            (PRODUCE, 9, produce_fields(news())),
            (FETCH, 11, fetch_fields()),
        ):
            client = await running.client()
            client.send(api_key, version, **fields)
            assert await client.is_disconnected()
        other = await running.client()
        assert (await other.ask(METADATA, 1, topics=None)).topics[0].name == "news"
    tracebacks = [record for record in caplog.records if record.exc_info]
    assert len(tracebacks) == 2


@on_both_loops
async def test_a_peer_that_goes_away_while_its_fetch_waits_leaves_nothing_behind() -> None:
    async with served(HeldBroker) as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        client.send(FETCH, 11, **fetch_fields(wait_ms=60_000))
        client.send(PRODUCE, 9, **produce_fields(news()))
        await until(lambda: held(running).reads == 1 and len(held(running).held) == 1)
        client.writer.transport.abort()
        await until(lambda: not running.listener.connections)
        held(running).release(0)
        await let_others_run()
        tasks = [task for task in asyncio.all_tasks() if "_work" in repr(task.get_coro())]
        assert tasks == []


@on_both_loops
async def test_a_request_that_does_not_come_to_its_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as running:
        client, idle = await running.client(), await running.client()
        client.writer.write(client.frame(METADATA, 1, topics=None)[:-1])
        await until(
            lambda: any(c.request_began_at is not None for c in running.listener.connections)
        )
        running.listener.sweep()
        assert len(running.listener.connections) == 2
        monkeypatch.setattr(kafka_limits, "KAFKA_REQUEST_WAIT_MS", -1)
        running.listener.sweep()
        assert await client.is_disconnected()
        assert "was incomplete" in caplog.text
        assert (await idle.ask(METADATA, 1, topics=None)).topics == ()


@on_both_loops
async def test_connections_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_limits, "KAFKA_CONNECTIONS", 2)
    async with served() as running:
        first, second = await running.client(), await running.client()
        await first.ask(METADATA, 1, topics=None)
        await second.ask(METADATA, 1, topics=None)
        third = await running.client()
        assert await third.is_disconnected()
        await first.close()
        await until(lambda: len(running.listener.connections) == 1)
        fourth = await running.client()
        await fourth.ask(METADATA, 1, topics=None)
        await second.ask(METADATA, 1, topics=None)


# --- closing -----------------------------------------------------------------------------------


@on_both_loops
async def test_a_listener_that_closes_answers_what_was_published_before() -> None:
    async with served(HeldBroker) as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        for _ in range(2):
            client.send(PRODUCE, 9, **produce_fields(news()))
        await until(lambda: len(held(running).held) == 2)
        closing = asyncio.ensure_future(running.listener.close())
        await let_others_run()
        client.writer.write(client.frame(PRODUCE, 9, **produce_fields(news())))
        held(running).release(0)
        assert only_partition(await client.receive()).base_offset == 0
        assert not closing.done()
        held(running).release(1)
        assert only_partition(await client.receive()).base_offset == 1
        assert await client.is_disconnected()
        await client.close()
        await soon(closing)
        assert len(held(running).held) == 2
        with pytest.raises(OSError):
            await running.client()


@on_both_loops
async def test_a_listener_that_closes_answers_a_waiting_fetch_at_once() -> None:
    async with served() as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        client.send(FETCH, 11, **fetch_fields(wait_ms=60_000))
        client.send(PRODUCE, 9, **produce_fields(news(), topic="nowhere"))
        await until(
            lambda: any(
                c._responses and c._responses[-1].done for c in running.listener.connections
            )
        )
        closing = asyncio.ensure_future(running.listener.close())
        assert only_partition(await client.receive()).records == b""
        part = only_partition(await client.receive())
        assert part.error_code == ErrorCode.unknown_topic_or_partition
        assert await client.is_disconnected()
        await client.close()
        await soon(closing)


@on_both_loops
async def test_a_listener_that_closes_does_not_wait_for_ever_for_anybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kafka_limits, "KAFKA_DRAIN_MS", 10)
    async with served(HeldBroker) as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        client.send(PRODUCE, 9, **produce_fields(news()))
        await until(lambda: len(held(running).held) == 1)
        await soon(running.listener.close())
        assert await client.is_disconnected()
        held(running).release(0)


@on_both_loops
async def test_closing_twice_or_before_starting_is_no_harm() -> None:
    async with served() as running:
        client = await running.client()
        await client.ask(METADATA, 1, topics=None)
        await soon(running.listener.close())
        await soon(running.listener.close())


@on_both_loops
async def test_a_closed_connection_is_freed_without_the_garbage_collector() -> None:
    async with served() as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        await client.ask(PRODUCE, 9, **produce_fields(news(b"a")))
        await client.ask(METADATA, 1, topics=[])
        await client.ask(FETCH, 12, **fetch_fields())
        (connection,) = map(weakref.ref, running.listener.connections)
        gc.collect()
        gc.disable()
        try:
            await client.close()
            await until(lambda: connection() is None)
        finally:
            gc.enable()
