"""Requests with bytes changed, lost or added: answered or disconnected; nobody else notices.

What is sent is made from a sound request of every API in every version that is advertised. While
it comes, a producer and a member of a group, each on a connection of its own, go about their
business. Whatever is left to chance comes from a seed, which is printed.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import resource
import struct
import tracemalloc
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from kio.schema.errors import ErrorCode

from quackmq import limits
from quackmq.protocols.kafka import limits as kafka_limits
from quackmq.protocols.kafka.registry import APIS
from tests.kit import effort
from tests.kit.waiting import soon, until
from tests.protocols.kafka.client import (
    METADATA,
    PRODUCE,
    TESTER,
    Client,
    Served,
    news,
    on_both_loops,
    only_partition,
    produce_fields,
)
from tests.protocols.kafka.membership import member, served_at_once
from tests.protocols.kafka.test_registry import VERSIONS, request_of

ROUNDS = 150
#: Requests are cut off at one place of so many, each kind at others.
CUT_EVERY = 8
#: How many of all lies are told; others in each run.
LIES = 1_000
#: Strangers that are there at once.
STRANGERS = 64
SIZE_BYTES = 4
#: Size, API, version, correlation id and the length of the client's name.
HEADER_BYTES = 14
#: Far more than the strangers' sockets take, far less than what they claim.
MEMORY_BYTES = 48 * limits.MIB
#: Five bytes that claim 34 GB of topics; kio's own reader asks for them.
CLAIMS_34_GB = bytes.fromhex("ffffffff0f")


@pytest.fixture(autouse=True)
def nothing_worse_than_a_warning(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A peer's nonsense is a line in the log; a traceback would be a bug of ours."""
    yield
    worse = [record for record in caplog.records if record.levelno > logging.WARNING]
    assert worse == []


@pytest.fixture
def generator() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """At most 1 GiB of address space beyond what is in use: whoever wants more gets MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        in_use = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@asynccontextmanager
async def others_at_work() -> AsyncIterator[Served]:
    """A listener at which a producer and a member of a group never notice anything."""
    async with served_at_once() as running:
        await running.broker.create_topic(TESTER, "kept")
        producer, reader = await running.client(), await member(running, "kept")
        await reader.settle()
        is_over = asyncio.Event()

        async def work() -> None:
            number = 0
            while not is_over.is_set() or not number:
                fields = produce_fields(news(), topic="kept")
                part = only_partition(await producer.ask(PRODUCE, 9, **fields))
                assert (part.error_code, part.base_offset) == (ErrorCode.none, number)
                assert await reader.beat() == ErrorCode.none
                number += 1
                # Now and then is enough, and leaves the strangers some time.
                await asyncio.sleep(0.002)

        task = asyncio.ensure_future(work())
        try:
            yield running
        finally:
            is_over.set()
            await soon(task)
        # The strangers have left nothing behind.
        await until(lambda: len(running.listener.connections) <= len(running._clients))


def on_the_servers_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test of many cases, that takes too long to run on both loops."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def whole() -> None:
            await test(**fixtures)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(whole())

    return run


def sound_frames(maker: Client) -> list[bytes]:
    return [maker.frame(key, version, **request_of(key, version)) for key, version in VERSIONS]


def sized(content: bytes) -> bytes:
    return struct.pack(">i", len(content)) + content


async def say(running: Served, stream: bytes, *, hang_up: bool) -> bytes:
    """A stranger says something; what it hears until the listener closes the connection."""
    reader, writer = await asyncio.open_connection(*running.address)
    writer.write(stream)
    if hang_up:
        writer.write_eof()
    try:
        return await soon(reader.read())
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


async def say_each(
    running: Served, streams: Iterable[bytes], *, hang_up: bool
) -> list[tuple[bytes, bytes]]:
    """Many strangers, some at a time; what each said and heard."""
    heard: list[tuple[bytes, bytes]] = []
    waiting = iter(streams)

    async def stranger() -> None:
        for stream in waiting:
            heard.append((stream, await say(running, stream, hang_up=hang_up)))

    await asyncio.gather(*(stranger() for _ in range(STRANGERS)))
    return heard


# --- by chance -------------------------------------------------------------------------------


def harm(generator: random.Random, frame: bytes) -> bytes:
    data = bytearray(frame)
    for _ in range(generator.randrange(1, 4)):
        start = generator.choice([0, HEADER_BYTES])
        position = generator.randrange(min(start, len(data) - 1), len(data))
        how = generator.random()
        if how < 0.4:
            data[position] = generator.randrange(256)
        elif how < 0.6:
            data[position] = generator.choice([0x00, 0x7F, 0x80, 0xFF])
        elif how < 0.8:
            del data[max(position, 5) : position + generator.randrange(1, 5)]
            data[:SIZE_BYTES] = struct.pack(">i", len(data) - SIZE_BYTES)
        else:
            data[max(position, 4) : position] = generator.randbytes(generator.randrange(1, 5))
            data[:SIZE_BYTES] = struct.pack(">i", len(data) - SIZE_BYTES)
    return bytes(data)


@on_both_loops
async def test_harmed_requests_do_no_harm(generator: random.Random) -> None:
    async with others_at_work() as running:
        frames = sound_frames(await running.client())
        for _ in range(effort.of(ROUNDS)):
            stranger: Client = await running.client()
            for frame in generator.choices(frames, k=generator.randrange(1, 5)):
                stranger.writer.write(harm(generator, frame))
            await asyncio.sleep(0)
            stranger.writer.transport.abort()


def nonsense(generator: random.Random) -> bytes:
    """Any bytes; or any content of a frame; or any body of a request that is advertised."""
    content = generator.randbytes(generator.randrange(300))
    how = generator.randrange(3)
    if how == 0:
        return content
    if how == 1:
        return sized(content)
    key, version = generator.choice(VERSIONS)
    return sized(struct.pack(">hhih", key, version, 1, -1) + content)


@on_both_loops
async def test_any_bytes_are_answered_or_disconnected(generator: random.Random) -> None:
    async with others_at_work() as running:
        streams = [nonsense(generator) for _ in range(effort.of(10 * ROUNDS))]
        assert len(await say_each(running, streams, hang_up=True)) == len(streams)


# --- case by case ----------------------------------------------------------------------------


@on_the_servers_loop
async def test_a_request_cut_off_anywhere_is_disconnected() -> None:
    """Here and there; that the reader refuses it anywhere is tested in
    tests/protocols/kafka/codec."""
    async with others_at_work() as running:
        frames = sound_frames(await running.client())
        cut = (
            sized(frame[SIZE_BYTES : SIZE_BYTES + size])
            for number, frame in enumerate(frames)
            for size in range(number % CUT_EVERY, len(frame) - SIZE_BYTES, CUT_EVERY)
        )
        answered = [
            (said.hex(), heard)
            for said, heard in await say_each(running, cut, hang_up=False)
            if heard
        ]
        assert answered == []


@on_both_loops
async def test_a_peer_that_hangs_up_anywhere_in_a_request_is_not_answered() -> None:
    async with others_at_work() as running:
        frames = sound_frames(await running.client())
        # Of each request another part.
        parts = [frame[: 1 + number % (len(frame) - 1)] for number, frame in enumerate(frames)]
        heard = await say_each(running, parts, hang_up=True)
        assert {answer for _, answer in heard} == {b""}


@on_both_loops
async def test_requests_of_every_kind_may_come_byte_by_byte() -> None:
    async with others_at_work() as running:
        client = await running.client()
        for key, version in VERSIONS:
            client.expect(key, version)
            for byte in client.frame(key, version, **request_of(key, version)):
                client.writer.write(bytes([byte]))
                await asyncio.sleep(0)
            answer = await client.receive()
            assert int(answer.__version__) == version


# --- lengths that lie ------------------------------------------------------------------------


def lies(frame: bytes) -> Iterator[bytes]:
    """The request with a huge number at every place of its body, in either spelling of lengths."""
    for position in range(HEADER_BYTES, len(frame)):
        for lie in (CLAIMS_34_GB, b"\x7f\xff\xff\xff", b"\x7f\xff"):
            yield frame[:position] + lie + frame[position + len(lie) :]


@pytest.mark.usefixtures("little_memory")
@on_the_servers_loop
async def test_lengths_and_counts_that_lie_cost_no_memory(generator: random.Random) -> None:
    async with others_at_work() as running:
        frames = sound_frames(await running.client())
        streams = [sized(lie[SIZE_BYTES:]) for frame in frames for lie in lies(frame)]
        tracemalloc.start()
        try:
            await say_each(running, generator.sample(streams, effort.of(LIES)), hang_up=True)
            _, most_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most_bytes < MEMORY_BYTES


@pytest.mark.usefixtures("little_memory")
@on_both_loops
async def test_the_packet_that_claims_34_gigabytes_is_disconnected() -> None:
    async with others_at_work() as running:
        assert await say(running, packet(METADATA, 12, CLAIMS_34_GB), hang_up=False) == b""


@pytest.mark.usefixtures("little_memory")
@on_both_loops
async def test_the_same_claim_of_any_other_api_is_disconnected_or_answered() -> None:
    async with others_at_work() as running:
        packets = [
            packet(api.key, version, CLAIMS_34_GB * 20)
            for api in APIS.values()
            for version in range(api.flexible_from, api.last_version + 1)
        ]
        await say_each(running, packets, hang_up=True)


def packet(key: int, version: int, body: bytes) -> bytes:
    """A request of a flexible version, whose header ends with no tagged fields."""
    return sized(struct.pack(">hhihx", key, version, 1, -1) + body)


@on_both_loops
async def test_sizes_that_lie_cost_no_memory_and_hold_up_nobody() -> None:
    """Everybody claims the largest request there is, and sends a little of it."""
    async with others_at_work() as running:
        claims = [
            struct.pack(">ihh", size, key, 3) + bytes(1000)
            for key, size in (
                (PRODUCE, kafka_limits.KAFKA_PRODUCE_BYTES),
                (METADATA, kafka_limits.KAFKA_REQUEST_BYTES),
            )
            for _ in range(100)
        ]
        tracemalloc.start()
        try:
            await begin(running, claims)
            _, most_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most_bytes < MEMORY_BYTES
        assert await published(running, bytes(2 * limits.MIB))


@on_both_loops
async def test_large_requests_that_stall_give_their_memory_to_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kafka_limits, "KAFKA_PACE_MS", 10)
    async with others_at_work() as running:
        claim = struct.pack(">ihh", kafka_limits.KAFKA_PRODUCE_BYTES, PRODUCE, 3)
        some_bytes = kafka_limits.KAFKA_UNRESERVED_BYTES
        running.listener.memory.budget.most_bytes = SIZE_BYTES + kafka_limits.KAFKA_PRODUCE_BYTES
        await begin(running, [claim + bytes(some_bytes)])
        assert await published(running, bytes(2 * limits.MIB))
        assert "too slowly" in caplog.text


async def begin(running: Served, parts: Sequence[bytes]) -> None:
    """Strangers send parts of requests, and nothing more."""
    for part in parts:
        (await running.client()).writer.write(part)
    await until(lambda: begun(running) >= len(parts))


def begun(running: Served) -> int:
    return sum(
        connection.request_began_at is not None for connection in running.listener.connections
    )


async def published(running: Served, value: bytes) -> bool:
    await running.broker.create_topic(TESTER, "large")
    client = await running.client()
    answer = await client.ask(PRODUCE, 9, **produce_fields(news(value), topic="large"))
    return bool(only_partition(answer).error_code == ErrorCode.none)
