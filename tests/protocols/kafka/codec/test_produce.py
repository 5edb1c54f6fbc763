"""Produce by hand against kio's schemas, and against bytes that nobody would write."""

from __future__ import annotations

import io
import struct
import uuid
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.index import load_request_schema, load_response_schema
from kio.serial.writers import write_int16, write_int32, write_legacy_bytes, write_legacy_string
from kio.static.primitive import i16, i32

from quackmq.errors import ProtocolError
from quackmq.protocols.kafka.codec import produce
from quackmq.protocols.kafka.codec.produce import (
    PartitionResponse,
    TopicResponse,
    read_request,
    write_response,
)
from tests.kit import effort
from tests.kit.tables import each
from tests.protocols.kafka.codec.schemas import entities, read_by_kio, written

VERSIONS = range(3, 14)
NEWS = uuid.uuid4()


@each("version", VERSIONS)
@settings(max_examples=effort.of(10), deadline=None)
@given(st.data())
def test_what_kio_writes_is_read_as_it_was(version: int, data: st.DataObject) -> None:
    sent = data.draw(entities(load_request_schema(produce.API_KEY, version)))
    got = read_request(version, memoryview(written(sent)))
    assert (got.transactional_id, got.acks) == (sent.transactional_id, sent.acks)
    assert [
        (topic.topic, [(part.partition, part.records) for part in topic.partitions])
        for topic in got.topics
    ] == [
        (name_or_id(topic), [(part.index, part.records) for part in topic.partition_data])
        for topic in sent.topic_data
    ]


def test_the_records_are_a_part_of_the_request_and_no_copy() -> None:
    data = memoryview(written(one_batch(9, b"some records")))
    records = read_request(9, data).topics[0].partitions[0].records
    assert records is not None
    assert records.obj is data.obj
    assert bytes(records) == b"some records"


@each("version", VERSIONS)
def test_a_request_cut_off_anywhere_is_a_protocol_error_and_bytes_after_it_do_not_matter(
    version: int,
) -> None:
    whole = written(one_batch(version, b"some records"))
    for size in range(len(whole)):
        with pytest.raises(ProtocolError):
            read_request(version, memoryview(whole[:size]))
    followed = read_request(version, memoryview(whole + b"more"))
    assert followed == read_request(version, memoryview(whole))


@each("version", [0, *VERSIONS])
@settings(max_examples=effort.of(30), deadline=None)
@given(data=st.binary(max_size=100))
def test_any_bytes_are_a_request_or_a_protocol_error(version: int, data: bytes) -> None:
    try:
        read_request(version, memoryview(data))
    except ProtocolError:
        return


@pytest.mark.parametrize("version", [0, 1, 2])
def test_the_oldest_versions_are_read_too(version: int) -> None:
    out = io.BytesIO()
    write_int16(out, i16.parse(1))
    write_int32(out, i32.parse(500))
    write_int32(out, i32.parse(1))
    write_legacy_string(out, "old")
    write_int32(out, i32.parse(1))
    write_int32(out, i32.parse(7))
    write_legacy_bytes(out, b"message set")
    request = read_request(version, memoryview(out.getvalue()))
    assert request == (None, 1, [("old", [(7, memoryview(b"message set"))])])


@pytest.mark.parametrize("length", [2**31 - 1, 100_000])
def test_a_length_is_held_against_the_bytes_that_are_left(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"{length} elements"):
        read_request(3, memoryview(struct.pack(">hhii", -1, 1, 0, length) + bytes(20)))


@each("version", VERSIONS)
def test_kio_reads_the_answer(version: int) -> None:
    topic: str | uuid.UUID = uuid.uuid4() if version >= produce.FIRST_WITH_TOPIC_IDS else "news"
    answers = [
        TopicResponse(
            topic,
            [
                PartitionResponse(3, 0, base_offset=1000, log_start=17),
                PartitionResponse(4, 2, message="damaged"),
            ],
        )
    ]
    schema = load_response_schema(produce.API_KEY, version)
    (got,) = read_by_kio(schema, bytes(write_response(version, answers))).responses
    assert name_or_id(got) == topic
    good, bad = got.partition_responses
    assert (good.index, good.error_code, good.base_offset) == (3, 0, 1000)
    assert (bad.index, bad.error_code, bad.base_offset) == (4, 2, -1)
    assert good.log_append_time is None
    if version >= 5:
        assert (good.log_start_offset, bad.log_start_offset) == (17, -1)
    if version >= 8:
        assert (good.error_message, bad.error_message) == (None, "damaged")


def test_the_oldest_answers_have_their_oldest_form() -> None:
    answers = [TopicResponse("t", [PartitionResponse(1, 43)])]
    oldest = struct.pack(">ih1siihq", 1, 1, b"t", 1, 1, 43, -1)
    assert write_response(0, answers) == oldest
    assert write_response(1, answers) == oldest + struct.pack(">i", 0)
    assert write_response(2, answers) == oldest + struct.pack(">qi", -1, 0)


def one_batch(version: int, records: bytes) -> Any:
    schema: Any = load_request_schema(produce.API_KEY, version)
    topic_type = schema.__dataclass_fields__["topic_data"].type.__args__[0]
    partition_type = topic_type.__dataclass_fields__["partition_data"].type.__args__[0]
    by = {"name": "news"} if "name" in topic_type.__dataclass_fields__ else {"topic_id": NEWS}
    topic = topic_type(**by, partition_data=(partition_type(index=0, records=records),))
    return schema(acks=-1, timeout=timedelta(0), topic_data=(topic,))


def name_or_id(topic: Any) -> str | uuid.UUID:
    named: str | uuid.UUID = topic.name if hasattr(topic, "name") else topic.topic_id
    return named
