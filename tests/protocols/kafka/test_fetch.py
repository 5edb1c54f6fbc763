"""Fetch through the listener: what is given, when, and how much of it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from aiokafka.record.default_records import DefaultRecordBatch
from kio.schema.errors import ErrorCode

from quackmq.model.topic import PartitionKey, Topic
from quackmq.records.batch import Batch
from quackmq.stores.local import LocalStore
from tests.kit.support import batches_of, let_others_run
from tests.kit.waiting import soon
from tests.protocols.kafka.client import (
    DELETE_TOPICS,
    FETCH,
    METADATA,
    TESTER,
    Served,
    fetch_fields,
    news,
    only_partition,
)
from tests.protocols.kafka.client import served as served_on


@pytest.fixture(autouse=True, params=["memory", "local"])
def _store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store in memory has tasks for all readers, the local one answers many without."""
    monkeypatch.setattr(_Kind, "directory", tmp_path if request.param == "local" else None)


class _Kind:
    directory: Path | None = None


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    directory = _Kind.directory
    store = None if directory is None else await LocalStore.open(directory / "data")
    async with served_on(store=store) as running:
        yield running


async def publish(running: Served, *batches: bytes, topic: str = "news") -> Topic:
    if topic not in running.broker.topics():
        await running.broker.create_topic(TESTER, topic)
    found = running.broker.topic(topic)
    for batch in batches:
        await running.broker.publish(TESTER, found, 0, Batch.parse(batch))
    return found


def records(part: Any) -> list[tuple[int, bytes]]:
    return [
        (record.offset, record.value)
        for batch in batches_of([part.records])
        for record in DefaultRecordBatch(bytearray(batch.view))
    ]


async def test_batches_come_whole_from_the_one_that_holds_the_offset() -> None:
    async with served() as running:
        await publish(running, news(b"a", b"b"), news(b"c"), news(b"d"))
        client = await running.client()
        part = only_partition(await client.ask(FETCH, 11, **fetch_fields(1)))
        assert records(part) == [(0, b"a"), (1, b"b"), (2, b"c"), (3, b"d")]
        assert (part.high_watermark, part.last_stable_offset, part.log_start_offset) == (4, 4, 0)
        part = only_partition(await client.ask(FETCH, 11, **fetch_fields(3)))
        assert records(part) == [(3, b"d")]


async def test_a_topic_can_be_named_by_its_id() -> None:
    async with served() as running:
        topic = await publish(running, news(b"a"))
        client = await running.client()
        by_id = fetch_fields(topic=topic.id, by="topic_id")
        assert records(only_partition(await client.ask(FETCH, 13, **by_id))) == [(0, b"a")]


@pytest.mark.parametrize("bound", ["max_bytes", "partition_bytes"])
async def test_an_answer_keeps_within_its_bounds_but_has_one_batch_at_least(bound: str) -> None:
    async with served() as running:
        batch = news(bytes(1000))
        await publish(running, *[batch] * 10)
        client = await running.client()
        for size, count in ((1, 1), (len(batch), 1), (3 * len(batch) + 10, 3), (2**30, 10)):
            wanted: dict[str, Any] = {bound: size}
            fields = fetch_fields(**wanted)
            assert len(records(only_partition(await client.ask(FETCH, 11, **fields)))) == count


async def test_offsets_out_of_range_and_unknown_partitions_have_their_codes() -> None:
    async with served() as running:
        topic = await publish(running, *[news()] * 5)
        await running.broker.trim(TESTER, PartitionKey(topic.id, 0), 2)
        client = await running.client()

        async def code(version: int = 11, **fields: Any) -> int:
            answer = await client.ask(FETCH, version, **fetch_fields(wait_ms=60_000, **fields))
            return int(only_partition(answer).error_code)

        assert await code(offset=1) == ErrorCode.offset_out_of_range
        assert await code(offset=6) == ErrorCode.offset_out_of_range
        assert await code(offset=-1) == ErrorCode.offset_out_of_range
        assert await code(offset=2) == ErrorCode.none
        assert await code(partition=1) == ErrorCode.unknown_topic_or_partition
        assert await code(partition=-1) == ErrorCode.unknown_topic_or_partition
        assert await code(topic="nowhere") == ErrorCode.unknown_topic_or_partition
        by_id = {"topic": uuid.uuid4(), "by": "topic_id"}
        assert await code(13, **by_id) == ErrorCode.unknown_topic_id


@pytest.mark.parametrize("session_id", [0, -1, 5])
async def test_a_full_fetch_is_granted_whatever_session_it_names(session_id: int) -> None:
    async with served() as running:
        await publish(running, news(b"a"))
        client = await running.client()
        for version, epoch in product((7, 11, 12), (0, -1)):
            fields = fetch_fields(session_id=session_id, session_epoch=epoch)
            answer = await client.ask(FETCH, version, **fields)
            assert (answer.error_code, answer.session_id) == (ErrorCode.none, 0)
            assert records(only_partition(answer)) == [(0, b"a")]


@pytest.mark.parametrize("session_id", [0, -1, 5])
async def test_no_session_can_be_continued(session_id: int) -> None:
    async with served() as running:
        await publish(running, news(b"a"))
        client = await running.client()
        for epoch in (1, 3, -2):
            fields = fetch_fields(session_id=session_id, session_epoch=epoch)
            answer = await client.ask(FETCH, 12, **fields)
            assert answer.error_code == ErrorCode.fetch_session_id_not_found
            assert answer.responses == ()


async def test_a_fetch_waits_for_what_is_published_and_blocks_nobody() -> None:
    async with served() as running:
        await publish(running)
        reader, other = await running.client(), await running.client()
        reader.send(FETCH, 11, **fetch_fields(wait_ms=60_000))
        answer = asyncio.ensure_future(reader.receive())
        assert (await other.ask(METADATA, 1, topics=None)).topics[0].name == "news"
        assert not answer.done()
        await publish(running, news(b"at last"))
        assert records(only_partition(await soon(answer))) == [(0, b"at last")]


async def test_a_fetch_waits_until_there_are_enough_bytes() -> None:
    async with served() as running:
        batch = news(b"a")
        await publish(running, batch)
        client = await running.client()
        client.send(FETCH, 11, **fetch_fields(wait_ms=60_000, min_bytes=3 * len(batch)))
        answer = asyncio.ensure_future(client.receive())
        await publish(running, batch)
        await let_others_run()
        assert not answer.done()
        await publish(running, batch)
        assert len(records(only_partition(await soon(answer)))) == 3


async def test_a_fetch_that_has_waited_long_enough_is_answered_with_nothing() -> None:
    async with served() as running:
        await publish(running)
        client = await running.client()
        part = only_partition(await client.ask(FETCH, 11, **fetch_fields(wait_ms=1)))
        assert (part.error_code, part.records) == (ErrorCode.none, b"")


async def test_a_fetch_of_nothing_does_not_wait() -> None:
    async with served() as running:
        client = await running.client()
        # So a consumer that closes says goodbye to the session that it never had.
        fields = fetch_fields(wait_ms=60_000) | {"topics": [], "session_epoch": -1}
        answer = await soon(client.ask(FETCH, 11, **fields))
        assert (answer.error_code, answer.responses) == (ErrorCode.none, ())


async def test_a_waiting_fetch_hears_that_its_topic_is_deleted() -> None:
    async with served() as running:
        await publish(running)
        reader, other = await running.client(), await running.client()
        reader.send(FETCH, 11, **fetch_fields(wait_ms=60_000))
        await other.ask(DELETE_TOPICS, 5, topic_names=["news"], timeout=0)
        part = only_partition(await reader.receive())
        assert part.error_code == ErrorCode.unknown_topic_or_partition


async def test_known_and_unknown_topics_of_one_fetch_keep_their_places() -> None:
    async with served() as running:
        await publish(running, news(b"a"), topic="first")
        await publish(running, news(b"b"), topic="second")
        client = await running.client()
        fields = fetch_fields(wait_ms=60_000, min_bytes=2**20)
        (wanted,) = fields["topics"]
        fields["topics"] = [{**wanted, "topic": name} for name in ("first", "none", "second")]
        answer = await client.ask(FETCH, 11, **fields)
        assert [topic.topic for topic in answer.responses] == ["first", "none", "second"]
        first, none, second = (topic.partitions[0] for topic in answer.responses)
        assert records(first) == [(0, b"a")]
        assert none.error_code == ErrorCode.unknown_topic_or_partition
        assert records(second) == [(0, b"b")]
