"""The simulated network is like TCP: bytes arrive once and in order, until a reset."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from tests.simulation.local_channels import PipePair, open_pipes
from tests.simulation.loop import Clock, run
from tests.simulation.network import NetworkLoop, Weather, end_of

_SEEDS = 20
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def on_network(
    work: Callable[[NetworkLoop, _Streams, _Streams], Awaitable[None]],
    weather: Weather,
    seeds: int = _SEEDS,
) -> None:
    """Run `work` with both ends of a connection, for several seeds."""
    for seed in range(seeds):
        loop = NetworkLoop(Clock(), random.Random(seed), weather, Counter())

        async def connect(loop: NetworkLoop = loop) -> None:
            accepted: asyncio.Queue[_Streams] = asyncio.Queue()

            def accept() -> asyncio.StreamReaderProtocol:
                reader = asyncio.StreamReader()

                def on_connected(
                    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
                ) -> None:
                    accepted.put_nowait((reader, writer))

                return asyncio.StreamReaderProtocol(reader, on_connected)

            listener = await loop.create_server(accept, "127.0.0.1", 0)
            near = await asyncio.open_connection(*listener.getsockname())
            far = await accepted.get()
            await work(loop, near, far)
            near[1].close()
            far[1].close()

        try:
            run(loop, connect())
        finally:
            loop.kill()
        assert not loop.unhandled


def test_bytes_arrive_whole_and_in_order_however_they_are_split() -> None:
    async def work(loop: NetworkLoop, near: _Streams, far: _Streams) -> None:
        sent = loop.source.randbytes(10_000)
        near[1].write(sent[:7])
        near[1].write(sent[7:])
        near[1].write_eof()
        assert await far[0].read() == sent
        far[1].write(b"answer")  # the other direction is still open
        far[1].close()
        assert await near[0].read() == b"answer"

    on_network(work, Weather(splits=0.9, stalls=0.01))


def test_a_receiver_that_does_not_read_holds_the_sender_back() -> None:
    async def work(loop: NetworkLoop, near: _Streams, far: _Streams) -> None:
        end_of(far[1]).pause_reading()
        near[1].write(bytes(500_000))
        draining = asyncio.ensure_future(near[1].drain())
        await asyncio.sleep(100)
        assert not draining.done()
        assert near[1].transport.get_write_buffer_size() >= 300_000
        end_of(far[1]).resume_reading()
        assert len(await far[0].readexactly(500_000)) == 500_000
        await draining

    on_network(work, Weather(), seeds=5)


def test_a_reset_ends_both_ends_and_loses_what_is_on_its_way() -> None:
    async def work(loop: NetworkLoop, near: _Streams, far: _Streams) -> None:
        end_of(far[1]).pause_reading()
        near[1].write(b"lost")
        near[1].transport.abort()
        await asyncio.sleep(1)
        end_of(far[1]).resume_reading()
        with pytest.raises(ConnectionResetError):
            await far[0].read()
        assert await near[0].read() == b""

    on_network(work, Weather())


def test_closing_with_unread_bytes_resets_the_connection() -> None:
    async def work(loop: NetworkLoop, near: _Streams, far: _Streams) -> None:
        end_of(far[1]).pause_reading()
        near[1].write(b"never read")
        await asyncio.sleep(1)
        far[1].close()
        with pytest.raises(ConnectionResetError):
            await near[0].read()

    on_network(work, Weather())


def test_the_weather_resets_connections() -> None:
    resets: Counter[str] = Counter()

    async def work(loop: NetworkLoop, near: _Streams, far: _Streams) -> None:
        near[1].write(bytes(1_000))
        near[1].write_eof()
        try:
            await far[0].read()
        except ConnectionResetError:
            resets["seen"] += 1
            assert loop.counts["connections that were reset"] == 1

    on_network(work, Weather(resets=0.1, splits=0.9))
    assert 0 < resets["seen"] < _SEEDS


def test_nobody_listens_after_the_listener_was_closed() -> None:
    async def work(loop: NetworkLoop, near: _Streams, far: _Streams) -> None:
        listener = await loop.create_server(asyncio.Protocol, "127.0.0.1", 0)
        listener.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*listener.getsockname())

    on_network(work, Weather(), seeds=1)


def test_a_pipe_delivers_everything_and_then_the_end() -> None:
    async def work(loop: NetworkLoop, near: _Streams, far: _Streams) -> None:
        (read_fd, from_peer), (from_broker, write_fd) = loop.pipe(), loop.pipe()
        here = await open_pipes(loop, read_fd, write_fd)
        there = await open_pipes(loop, from_broker, from_peer)
        sent = loop.source.randbytes(10_000)
        here[1].write(sent)
        here[1].close()
        assert await there[0].read() == sent
        there[1].close()

    on_network(work, Weather(), seeds=5)


def test_writing_to_a_pipe_without_a_reader_breaks_it() -> None:
    async def work(loop: NetworkLoop, near: _Streams, far: _Streams) -> None:
        (read_fd, from_peer), (from_broker, write_fd) = loop.pipe(), loop.pipe()
        here = await open_pipes(loop, read_fd, write_fd)
        there = await open_pipes(loop, from_broker, from_peer)
        pair = here[1].transport
        assert isinstance(pair, PipePair)
        there[1].close()
        await asyncio.sleep(1)
        here[1].write(b"nobody reads this")
        await asyncio.sleep(1)
        assert pair.write_end.is_lost
        assert await here[0].read() == b""

    on_network(work, Weather(), seeds=5)
