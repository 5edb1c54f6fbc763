"""Requests with bytes changed, lost or added: answered or disconnected; nobody else notices."""

from __future__ import annotations

import asyncio
import logging
import random
import struct

import pytest

from tests.doors.kafka.client import (
    METADATA,
    PRODUCE,
    TESTER,
    Client,
    news,
    on_both_loops,
    only_partition,
    produce_fields,
    served,
)
from tests.doors.kafka.test_registry import VERSIONS, request_of

ROUNDS = 150
HEADER_BYTES = 14


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
            data[:4] = struct.pack(">i", len(data) - 4)
        else:
            data[max(position, 4) : position] = generator.randbytes(generator.randrange(1, 5))
            data[:4] = struct.pack(">i", len(data) - 4)
    return bytes(data)


@on_both_loops
async def test_harmed_requests_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    async with served() as running:
        await running.broker.create_topic(TESTER, "kept")
        good = await running.client()
        for number in range(ROUNDS):
            stranger: Client = await running.client()
            for _ in range(generator.randrange(1, 5)):
                api_key, version = generator.choice(VERSIONS)
                frame = stranger.frame(api_key, version, **request_of(api_key, version))
                stranger.writer.write(harm(generator, frame))
            fields = produce_fields(news(), topic="kept")
            assert only_partition(await good.ask(PRODUCE, 9, **fields)).base_offset == number
            stranger.writer.transport.abort()
            await asyncio.sleep(0)
        topics = (await good.ask(METADATA, 1, topics=None)).topics
        assert "kept" in {topic.name for topic in topics}
    assert [record for record in caplog.records if record.levelno > logging.WARNING] == []
