"""Limits of the Kafka listener after they were reached: the peer that reached one goes, and the
next one is served as though nothing had been."""

from __future__ import annotations

import pytest

from quackmq import limits
from quackmq.protocols.kafka import limits as kafka_limits
from quackmq.protocols.kafka.codec.framing import Frames, ReceiveMemory
from tests.kit.support import transport_of
from tests.kit.waiting import until
from tests.protocols.kafka.client import (
    FETCH,
    METADATA,
    PRODUCE,
    TESTER,
    fetch_fields,
    news,
    on_both_loops,
    produce_fields,
    served,
)


@on_both_loops
async def test_answers_may_be_large_again_when_a_peer_that_took_none_has_hung_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kafka_limits, "KAFKA_SEND_BYTES", 4 * kafka_limits.KAFKA_FETCH_BYTES)
    async with served() as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        for _ in range(3):
            await client.ask(PRODUCE, 9, **produce_fields(news(bytes(4 * limits.MIB))))
        for _ in range(3):
            assert running.listener.response_bytes == kafka_limits.KAFKA_FETCH_BYTES
            slow = await running.client()
            transport_of(slow.writer).pause_reading()
            for _ in range(12):
                slow.send_unanswered(FETCH, 11, **fetch_fields())
            await until(lambda: running.listener.response_bytes < kafka_limits.KAFKA_FETCH_BYTES)
            slow.writer.transport.abort()
            await until(lambda: running.listener.response_bytes == kafka_limits.KAFKA_FETCH_BYTES)


@on_both_loops
async def test_memory_for_a_large_request_is_given_back_when_its_peer_hangs_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kafka_limits, "KAFKA_SCRATCH_BYTES", 64 * limits.KIB)
    async with served() as running:
        await running.broker.create_topic(TESTER, "news")
        memory = running.listener.memory
        memory.budget.most_bytes = 1536 * limits.KIB
        for _ in range(3):
            broken, whole = await running.client(), await running.client()
            large = whole.frame(PRODUCE, 9, **produce_fields(news(bytes(limits.MIB))))
            broken.writer.write(large[: limits.MIB // 2])
            await until(lambda: memory.budget.used_bytes > 936 * limits.KIB)
            whole.writer.write(large)
            await until(lambda: running.listener.waiting_for_memory)
            broken.writer.transport.abort()
            await whole.receive_frame()
            await until(lambda: memory.budget.used_bytes == 0)
            await whole.close()
        assert (await (await running.client()).ask(METADATA, 1, topics=None)).topics


def test_buffers_that_came_back_are_used_again_and_only_so_many_are_kept() -> None:
    memory = ReceiveMemory()
    size = 64 * limits.KIB
    for _ in range(3):
        taken = [memory.acquire(size) for _ in range(2 * kafka_limits.KAFKA_POOLED_BYTES // size)]
        kept = {id(buffer.obj) for buffer in taken[: kafka_limits.KAFKA_POOLED_BYTES // size]}
        for buffer in taken:
            memory.release(buffer)
        assert memory._pooled_bytes == kafka_limits.KAFKA_POOLED_BYTES, "the rest is let go of"
        again = [memory.acquire(size) for _ in kept]
        assert {id(buffer.obj) for buffer in again} == kept
        assert memory._pooled_bytes == 0
        for buffer in again:
            memory.release(buffer)
        for _ in kept:
            memory.acquire(size)
        assert memory._pooled_bytes == 0


def test_a_connection_gives_its_buffer_back_when_all_was_taken_and_when_it_ends() -> None:
    memory = ReceiveMemory()
    frames = Frames(memory)
    half = (100).to_bytes(4, "big") + bytes(50)
    for number in range(3):
        frames.buffer()[: len(half)] = half
        frames.received(len(half))
        assert not frames.find_frame()
        frames.compact()
        assert memory._pooled_bytes == 0, "it has a buffer of its own"
        if number % 2:
            frames.close()
        else:
            frames.buffer()[:50] = bytes(50)
            frames.received(50)
            assert frames.find_frame()
            frames.next_frame()
            frames.compact()
        assert memory._pooled_bytes > 0, "which came back"
