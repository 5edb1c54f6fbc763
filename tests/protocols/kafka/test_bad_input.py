"""What a client may do wrong, and what it hears: the code that Kafka gives, by its number.

One case after another, over everything that the listener advertises. Wherever something is refused,
nothing else has changed, and others go on.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from quackmq import limits
from quackmq.model.topic import PartitionKey
from quackmq.protocols.kafka import limits as kafka_limits
from tests.kit.tables import each
from tests.protocols.kafka.admin import DELETE_RECORDS
from tests.protocols.kafka.client import (
    API_VERSIONS,
    CREATE_TOPICS,
    FETCH,
    METADATA,
    PRODUCE,
    TESTER,
    Client,
    Served,
    fetch_fields,
    news,
    only_partition,
    produce_fields,
)
from tests.protocols.kafka.membership import (
    DELETE_GROUPS,
    JOIN_GROUP,
    OFFSET_COMMIT,
    OFFSET_DELETE,
    OFFSET_FETCH,
    Member,
    join_fields,
    member,
    served_at_once,
    versions_of,
)

OFFSET_OUT_OF_RANGE = 1
CORRUPT_MESSAGE = 2
UNKNOWN_TOPIC_OR_PARTITION = 3
INVALID_TOPIC = 17
ILLEGAL_GENERATION = 22
INVALID_GROUP_ID = 24
NONE = 0
UNKNOWN_MEMBER_ID = 25
UNSUPPORTED_VERSION = 35
OUT_OF_ORDER_SEQUENCE_NUMBER = 45
INVALID_PRODUCER_EPOCH = 47
GROUP_ID_NOT_FOUND = 69
FENCED_INSTANCE_ID = 82


async def next_offset(running: Served, topic: str = "news") -> int:
    key = PartitionKey(running.broker.topic(topic).id, 0)
    return (await running.broker.offsets(TESTER, key)).next


# --- unknown APIs and versions, requests over the limit ----------------------------------------


def header(api_key: int, version: int) -> bytes:
    return struct.pack(">hhih", api_key, version, 7, -1)


@pytest.mark.parametrize("version", [0, 1, -1, 32_767])
async def test_an_unknown_api_is_disconnected(version: int) -> None:
    async with served_at_once() as running:
        for api_key in (-1, 4, 7, 99, 32_767):
            client = await running.client()
            content = header(api_key, version) + bytes(20)
            client.writer.write(struct.pack(">i", len(content)) + content)
            assert await client.is_disconnected()


async def test_a_version_beside_those_that_are_advertised_is_disconnected() -> None:
    async with served_at_once() as running:
        other = await running.client()
        told = await other.ask(API_VERSIONS, 0)
        for api in told.api_keys:
            for version in (api.min_version - 1, api.max_version + 1):
                if api.api_key == API_VERSIONS:
                    continue
                client = await running.client()
                content = header(api.api_key, version) + bytes(20)
                client.writer.write(struct.pack(">i", len(content)) + content)
                assert await client.is_disconnected()
        assert (await other.ask(METADATA, 1, topics=None)).topics == ()


@pytest.mark.parametrize("version", [5, 99, 32_767, -1])
async def test_an_unknown_version_of_api_versions_is_told_the_right_ones(version: int) -> None:
    async with served_at_once() as running:
        client = await running.client()
        content = header(API_VERSIONS, version) + bytes(20)
        client.writer.write(struct.pack(">i", len(content)) + content)
        payload = await client.receive_frame()
        assert payload == struct.pack(">ihihhh", 7, UNSUPPORTED_VERSION, 1, API_VERSIONS, 0, 4)


async def test_a_request_over_the_limit_is_disconnected_before_it_has_come() -> None:
    async with served_at_once() as running:
        told = await (await running.client()).ask(API_VERSIONS, 0)
        for api in told.api_keys:
            most = kafka_limits.KAFKA_REQUEST_BYTES
            if api.api_key == PRODUCE:
                most = kafka_limits.KAFKA_PRODUCE_BYTES
            client = await running.client()
            client.writer.write(struct.pack(">i", most + 1) + header(api.api_key, api.max_version))
            assert await client.is_disconnected()


# --- illegal names -----------------------------------------------------------------------------

ILLEGAL_TOPICS = ["", ".", "..", "a/b", "a b", "Ente\0", "ü", "x" * 250]


@each("name", ILLEGAL_TOPICS)
async def test_an_illegal_name_of_a_topic_is_refused(name: str) -> None:
    async with served_at_once() as running:
        client = await running.client()
        wish = {"name": name, "num_partitions": 1, "replication_factor": 1}
        for version in versions_of(CREATE_TOPICS):
            topics = [{**wish, "assignments": [], "configs": []}]
            created = await client.ask(CREATE_TOPICS, version, topics=topics, timeout=0)
            assert created.topics[0].error_code == INVALID_TOPIC
        by_metadata = await client.ask(METADATA, 4, topics=[{"name": name}])
        assert by_metadata.topics[0].error_code == INVALID_TOPIC
        produced = await client.ask(PRODUCE, 9, **produce_fields(news(), topic=name))
        assert only_partition(produced).error_code == UNKNOWN_TOPIC_OR_PARTITION
        fetched = await client.ask(FETCH, 11, **fetch_fields(topic=name))
        assert only_partition(fetched).error_code == UNKNOWN_TOPIC_OR_PARTITION
        assert running.broker.topics() == {}


async def test_an_illegal_name_of_a_group_is_refused() -> None:
    name = "x" * (limits.NAME_BYTES + 1)
    async with served_at_once() as running:
        await running.broker.create_topic(TESTER, "news")
        nobody = await member(running, name)
        nobody.protocol = "range"
        client = nobody.client
        assert (await nobody.join()).error_code == INVALID_GROUP_ID
        assert (await nobody.sync()).error_code == INVALID_GROUP_ID
        assert await nobody.beat() == INVALID_GROUP_ID
        assert await nobody.leave() == INVALID_GROUP_ID
        assert await commit_code(nobody) == INVALID_GROUP_ID
        fetched = await client.ask(OFFSET_FETCH, 7, group_id=name, topics=None)
        assert fetched.error_code == INVALID_GROUP_ID
        news_0 = {"name": "news", "partitions": [{"partition_index": 0}]}
        deleted = await client.ask(OFFSET_DELETE, 0, group_id=name, topics=[news_0])
        assert deleted.error_code == INVALID_GROUP_ID
        gone = await client.ask(DELETE_GROUPS, 2, groups_names=[name])
        assert gone.results[0].error_code == GROUP_ID_NOT_FOUND
        assert running.broker.groups.all(TESTER) == []


async def test_the_group_without_a_name_has_offsets_and_nothing_else() -> None:
    async with served_at_once() as running:
        await running.broker.create_topic(TESTER, "news")
        nobody = await member(running, "")
        nobody.protocol = "range"
        assert (await nobody.join()).error_code == INVALID_GROUP_ID
        assert (await nobody.sync()).error_code == INVALID_GROUP_ID
        assert await nobody.beat() == INVALID_GROUP_ID
        assert await nobody.leave() == INVALID_GROUP_ID
        assert running.broker.groups.all(TESTER) == []
        assert await commit_code(nobody) == NONE
        assert [group.name for group in running.broker.groups.all(TESTER)] == [""]


# --- offsets out of range, corrupt batches -----------------------------------------------------


@pytest.mark.parametrize("offset", [-1, -(2**63), 4, 2**63 - 1])
async def test_an_offset_out_of_range_is_refused(offset: int) -> None:
    async with served_at_once() as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        await client.ask(PRODUCE, 9, **produce_fields(news(b"a", b"b", b"c")))
        for version in range(4, 13):
            part = only_partition(await client.ask(FETCH, version, **fetch_fields(offset)))
            assert part.error_code == OFFSET_OUT_OF_RANGE
        if offset == -1:
            return  # For DeleteRecords that is the end.
        for version in versions_of(DELETE_RECORDS):
            wish = {"name": "news", "partitions": [{"partition_index": 0, "offset": offset}]}
            part = only_partition(
                await client.ask(DELETE_RECORDS, version, topics=[wish], timeout=1000)
            )
            assert part.error_code == OFFSET_OUT_OF_RANGE
        part = only_partition(await client.ask(FETCH, 4, **fetch_fields(0)))
        assert part.high_watermark == 3


async def test_a_batch_with_any_byte_changed_is_corrupt_and_nothing_is_appended() -> None:
    async with served_at_once() as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        batch = news(b"quack", b"quack quack")
        # What the checksum covers begins behind it, at byte 21; it stands at 17.
        for position in range(17, len(batch)):
            harmed = bytearray(batch)
            harmed[position] ^= 1
            produced = await client.ask(PRODUCE, 9, **produce_fields(bytes(harmed)))
            assert only_partition(produced).error_code == CORRUPT_MESSAGE
        assert await next_offset(running) == 0


async def test_a_batch_cut_off_anywhere_is_corrupt_and_nothing_is_appended() -> None:
    async with served_at_once() as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        batch = news(b"quack", b"quack quack")
        for size in range(1, len(batch)):
            produced = await client.ask(PRODUCE, 9, **produce_fields(batch[:size]))
            assert only_partition(produced).error_code == CORRUPT_MESSAGE
        assert await next_offset(running) == 0


async def test_a_corrupt_batch_takes_no_other_of_its_request_along() -> None:
    async with served_at_once() as running:
        await running.broker.create_topic(TESTER, "news", partitions=3)
        client = await running.client()
        harmed = news()[:-1] + b"!"
        produced = await client.ask(PRODUCE, 9, **produce_fields(news(), harmed, news()))
        codes = [part.error_code for part in produced.responses[0].partition_responses]
        assert codes == [0, CORRUPT_MESSAGE, 0]


# --- stale generations, unknown members, fenced producers --------------------------------------


async def commit_code(by: Member) -> int:
    topics = [
        {
            "name": "news",
            "partitions": [
                {"partition_index": 0, "committed_offset": 0, "committed_metadata": None}
            ],
        }
    ]
    answer = await by.client.ask(
        OFFSET_COMMIT,
        8,
        group_id=by.group,
        generation_id_or_member_epoch=by.generation,
        member_id=by.id,
        group_instance_id=by.instance_id,
        topics=topics,
    )
    code: int = answer.topics[0].partitions[0].error_code
    return code


async def sync_code(by: Member) -> int:
    code: int = (await by.sync()).error_code
    return code


async def join_code(by: Member) -> int:
    code: int = (await by.ask_to_join()).error_code
    return code


def beat_code(by: Member) -> Awaitable[int]:
    return by.beat()


def leave_code(by: Member) -> Awaitable[int]:
    return by.leave()


Asks = Callable[[Member], Awaitable[int]]


@pytest.mark.parametrize("asks", [sync_code, beat_code, commit_code])
async def test_a_stale_generation_is_refused(asks: Asks) -> None:
    async with served_at_once() as running:
        await running.broker.create_topic(TESTER, "news")
        only = await member(running)
        await only.settle()
        await only.settle()
        assert await asks(only) == 0
        for generation in (1, 3, 2**31 - 1):
            only.generation = generation
            assert await asks(only) == ILLEGAL_GENERATION


@pytest.mark.parametrize("asks", [join_code, sync_code, beat_code, leave_code, commit_code])
async def test_an_unknown_member_is_refused(asks: Asks) -> None:
    async with served_at_once() as running:
        await running.broker.create_topic(TESTER, "news")
        only = await member(running)
        await only.settle()
        only.id = "nobody"
        assert await asks(only) == UNKNOWN_MEMBER_ID


@pytest.mark.parametrize("asks", [join_code, sync_code, beat_code, leave_code, commit_code])
async def test_a_static_member_whose_place_was_taken_is_refused(asks: Asks) -> None:
    async with served_at_once() as running:
        await running.broker.create_topic(TESTER, "news")
        before, after = [await member(running, instance_id="pond") for _ in range(2)]
        await before.settle()
        assert (await after.join()).error_code == 0
        assert await asks(before) == FENCED_INSTANCE_ID
        assert await after.beat() == 0


async def test_a_fenced_producer_is_refused_and_so_is_a_gap() -> None:
    async with served_at_once() as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()

        async def produce(epoch: int, sequence: int) -> int:
            batch = news(producer_id=7, producer_epoch=epoch, base_sequence=sequence)
            answer = await client.ask(PRODUCE, 9, **produce_fields(batch))
            code: int = only_partition(answer).error_code
            return code

        assert await produce(3, 0) == 0
        assert await produce(2, 1) == INVALID_PRODUCER_EPOCH
        assert await produce(3, 2) == OUT_OF_ORDER_SEQUENCE_NUMBER
        assert await next_offset(running) == 1
        assert await produce(3, 1) == 0


# --- all of it at once -------------------------------------------------------------------------


async def test_a_client_that_does_everything_wrong_is_answered_each_time() -> None:
    """On one connection, without waiting between: answers come in order, each with its code."""
    async with served_at_once() as running:
        await running.broker.create_topic(TESTER, "news")
        client: Client = await running.client()
        wrong: list[tuple[int, int, dict[str, Any]]] = [
            (PRODUCE, 9, produce_fields(news()[:-1] + b"!")),
            (FETCH, 11, fetch_fields(99)),
            (JOIN_GROUP, 9, join_fields("")),
            (PRODUCE, 9, produce_fields(news(), topic="..")),
            (METADATA, 4, {"topics": [{"name": ".."}]}),
        ]
        for key, version, fields in wrong:
            client.send(key, version, **fields)
        assert only_partition(await client.receive()).error_code == CORRUPT_MESSAGE
        assert only_partition(await client.receive()).error_code == OFFSET_OUT_OF_RANGE
        assert (await client.receive()).error_code == INVALID_GROUP_ID
        part = only_partition(await client.receive())
        assert part.error_code == UNKNOWN_TOPIC_OR_PARTITION
        assert (await client.receive()).topics[0].error_code == INVALID_TOPIC
        assert list(running.broker.topics()) == ["news"]
