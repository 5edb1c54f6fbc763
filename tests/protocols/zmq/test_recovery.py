"""Limits of the ZeroMQ listener after they were reached: the peer that reached one goes, and the
next one is served as though nothing had been."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quackmq.protocols.zmq import limits as zmq_limits
from quackmq.protocols.zmq.server import ZmqServer
from tests.kit.support import transport_of
from tests.kit.waiting import soon, until
from tests.protocols.codecs.zmtp_frames import message, request
from tests.protocols.kafka.client import on_both_loops
from tests.protocols.zmq.peers import (
    TESTER,
    Raw,
    Served,
    SlowStore,
    WatchedBroker,
    broker_of,
    served,
)

GET = request(b"GET donald ducks -1")


async def put_large(running: Served, size: int) -> None:
    """A subscription whose next message has so many bytes."""
    peer = await (await running.raw()).hello()
    assert await peer.ask(b"SUB donald ducks") == b"SUB donald ducks"
    await peer.ask(b"PUT daisy ducks " + b"x" * size)


@on_both_loops
async def test_what_a_peer_had_not_taken_when_it_hung_up_holds_up_no_large_answer() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq_limits, "ZMQ_SEND_BYTES", 1)
        async with served(WatchedBroker) as running:
            await put_large(running, 15_000_000)
            for number in range(1, 4):
                slow = await (await running.raw()).hello()
                transport_of(slow.writer).pause_reading()
                slow.writer.write(GET)
                await until(lambda: not running.listener.budgets.sendable.is_set())
                slow.writer.transport.abort()
                await until(lambda: running.listener.budgets.sendable.is_set())
                assert broker_of(running).gets == number
            other = await (await running.raw()).hello()
            other.writer.write(GET)
            assert len((await other.receive())[1]) > 15_000_000


@pytest.mark.parametrize("envelopes", ["one", "many"])
@on_both_loops
async def test_requests_of_peers_that_hung_up_leave_room_for_others(envelopes: str) -> None:
    """Those under way, and those that waited behind them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq_limits, "ZMQ_REQUESTS", 10)
        store = SlowStore()
        async with served(store=store) as running:
            await running.broker.create_topic(TESTER, "ducks")
            for _ in range(3):
                greedy = await (await running.raw()).hello()
                for number in range(9):
                    envelope = b"%d" % number if envelopes == "many" else b"same"
                    greedy.writer.write(message(envelope, b"", b"PUT d ducks x"))
                under_way = 9 if envelopes == "many" else 1
                await until(lambda count: store.appends == count, under_way)
                greedy.writer.transport.abort()
                await until(lambda: running.connections == 0)
                store.released.set()
                await until(running.listener.has_room)
                store.released.clear()
                store.appends = 0
            other = await (await running.raw()).hello()
            for number in range(10):
                other.writer.write(message(b"%d" % number, b"", b"PUT d ducks y"))
            await until(lambda: store.appends == 10)
            store.released.set()
            for _ in range(10):
                await other.receive()


@on_both_loops
async def test_memory_for_large_requests_is_given_back_however_they_end() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq_limits, "ZMQ_RECEIVE_BYTES", 1_000_000)
        async with served() as running:
            content = b"PUT d ducks " + b"x" * 700_000
            for _ in range(3):
                broken = await (await running.raw()).hello()
                broken.writer.write(request(content)[:400_000])
                await broken.writer.drain()
                await until(lambda: running.listener.budgets.receive.used_bytes > 700_000)
                broken.writer.transport.abort()
                await until(lambda: running.connections == 0)
                whole = await (await running.raw()).hello()
                assert await whole.ask(content) == content
                await whole.close()
                await until(lambda: running.connections == 0)
            assert running.listener.budgets.receive.used_bytes == 0, "all of it is there again"


@on_both_loops
async def test_sockets_that_share_budgets_wait_for_each_others_large_requests() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq_limits, "ZMQ_RECEIVE_BYTES", 1_000_000)
        async with served() as running:
            budgets = running.listener.budgets
            other = ZmqServer(running.broker, "127.0.0.1", 0, budgets)
            address: Any = await other.start()
            data = request(content := b"PUT d ducks " + b"x" * 700_000)
            first = await (await running.raw()).hello()
            first.writer.write(data[:400_000])
            await until(lambda: budgets.receive.used_bytes > 700_000)
            second = await Raw(*await asyncio.open_connection(*address)).hello()
            second.writer.write(data)
            await until(lambda: len(budgets.waiting) == 1)
            assert not any(peer.is_reading for peer in other.connections)
            first.writer.write(data[400_000:])
            assert (await first.receive())[1] == content
            assert (await second.receive())[1] == content
            await second.close()
            await soon(other.close())
