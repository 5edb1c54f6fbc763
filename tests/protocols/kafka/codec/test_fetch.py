"""Fetch by hand against kio's schemas, and against bytes that nobody would write."""

from __future__ import annotations

import struct
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.index import load_request_schema, load_response_schema

from quackmq.errors import ProtocolError
from quackmq.protocols.kafka.codec import fetch
from quackmq.protocols.kafka.codec.fetch import (
    PartitionData,
    TopicData,
    read_request,
    write_one,
    write_response,
)
from tests.kit import effort
from tests.kit.tables import each
from tests.protocols.kafka.codec.schemas import entities, read_by_kio, written

VERSIONS = range(4, 19)


@each("version", VERSIONS)
@settings(max_examples=effort.of(5), deadline=None)
@given(st.data())
def test_what_kio_writes_is_read_as_it_was(version: int, data: st.DataObject) -> None:
    sent = data.draw(entities(load_request_schema(fetch.API_KEY, version)))
    got = read_request(version, memoryview(written(sent)))
    assert got.max_wait_ms == round(sent.max_wait.total_seconds() * 1000)
    assert (got.min_bytes, got.max_bytes) == (sent.min_bytes, sent.max_bytes)
    assert got.isolation == sent.isolation_level
    if version >= fetch.FIRST_WITH_SESSIONS:
        assert (got.session_id, got.session_epoch) == (sent.session_id, sent.session_epoch)
    assert [(topic.topic, list(topic.partitions)) for topic in got.topics] == [
        (
            name_or_id(topic),
            [
                (
                    part.partition,
                    getattr(part, "current_leader_epoch", fetch.NO_EPOCH),
                    part.fetch_offset,
                    part.partition_max_bytes,
                )
                for part in topic.partitions
            ],
        )
        for topic in sent.topics
    ]


@each("version", VERSIONS)
@settings(max_examples=1, deadline=None)
@given(st.data())
def test_a_request_cut_off_anywhere_is_a_protocol_error_and_bytes_after_it_do_not_matter(
    version: int, data: st.DataObject
) -> None:
    whole = written(data.draw(entities(load_request_schema(fetch.API_KEY, version))))
    for size in range(len(whole)):
        with pytest.raises(ProtocolError):
            read_request(version, memoryview(whole[:size]))
    followed = read_request(version, memoryview(whole + b"more"))
    assert followed == read_request(version, memoryview(whole))


@each("version", VERSIONS)
@settings(max_examples=effort.of(30), deadline=None)
@given(data=st.binary(max_size=100))
def test_any_bytes_are_a_request_or_a_protocol_error(version: int, data: bytes) -> None:
    try:
        read_request(version, memoryview(data))
    except ProtocolError:
        return


@pytest.mark.parametrize("length", [2**31 - 1, 100_000])
def test_a_length_is_held_against_the_bytes_that_are_left(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"{length} elements"):
        read_request(4, memoryview(struct.pack(">iiiibi", -1, 0, 0, 0, 0, length) + bytes(20)))


@each("version", VERSIONS)
def test_kio_reads_the_answer(version: int) -> None:
    topic = name_for(version)
    chunks = (b"first batch", bytearray(b"second"), memoryview(b"and a third"))
    data = [
        TopicData(
            topic,
            [
                PartitionData(0, 0, 500, 100, chunks, sum(map(len, chunks)), 400),
                PartitionData(1, 0, 7, 0),
                PartitionData(2, 1, 9, 3),
            ],
        ),
        TopicData(name_for(version), [PartitionData(0, 3)]),
    ]
    buffers = write_response(version, data)
    whole = b"".join(buffers)
    full, empty = read_by_kio(load_response_schema(fetch.API_KEY, version), whole).responses
    assert name_or_id(full) == topic
    first, second, third = full.partitions
    assert (first.error_code, first.high_watermark, first.last_stable_offset) == (0, 500, 400)
    assert first.records == b"first batchsecondand a third"
    assert (second.high_watermark, second.records) == (7, b"")
    assert (third.partition_index, third.error_code, third.records) == (2, 1, b"")
    assert empty.partitions[0].error_code == 3
    if version >= 5:
        assert first.log_start_offset == 100
    if version >= 11:
        assert first.preferred_read_replica == -1


def test_the_pieces_of_a_store_are_sent_as_they_are() -> None:
    chunks = (bytes(1000), bytes(2000))
    buffers = write_response(12, [TopicData("t", [PartitionData(0, 0, 9, 0, chunks, 3000)])])
    assert [buffer for buffer in buffers if buffer is chunks[0] or buffer is chunks[1]] == [*chunks]


@each("version", VERSIONS)
@each("aborted", [[], [(1, 2)], [(7, 100), (2**40, 2**50), (8, 3)]])
def test_who_reads_what_is_committed_is_told_what_was_aborted(
    version: int, aborted: list[tuple[int, int]]
) -> None:
    parts = [PartitionData(0, 0, 9, 0, (b"batch",), 5, 9, aborted), PartitionData(1, 0)]
    topics = [TopicData(name_for(version), parts)]
    schema = load_response_schema(fetch.API_KEY, version)
    (topic,) = read_by_kio(schema, b"".join(write_response(version, topics, isolation=1))).responses
    first, second = topic.partitions
    told = [(each.producer_id, each.first_offset) for each in first.aborted_transactions]
    assert (told, first.records) == (aborted, b"batch")
    assert second.aborted_transactions == ()
    (topic,) = read_by_kio(schema, b"".join(write_response(version, topics))).responses
    assert [part.aborted_transactions for part in topic.partitions] == [None, None]


@each("version", VERSIONS)
@each("rack", [b"", b"r1"])
@each("forgotten", [[], [1, 2]])
def test_the_usual_request_is_read_as_any_other(
    version: int, rack: bytes, forgotten: list[int]
) -> None:
    """Most ask for one partition, and have no rack: these are read by a shorter way."""
    topic = name_for(version)
    whole = request_for_one(version, topic, rack, forgotten)
    wish = (7, 3 if version >= 9 else fetch.NO_EPOCH, 2**40, 2**20)
    session = (9, 10) if version >= fetch.FIRST_WITH_SESSIONS else (0, -1)
    expected = (500, 1, 2**25, 1, *session, [(topic, [wish])])
    assert read_request(version, memoryview(whole)) == expected
    assert read_request(version, memoryview(whole + b"more")) == expected
    for size in range(len(whole)):
        with pytest.raises(ProtocolError):
            read_request(version, memoryview(whole[:size]))


@each("version", [11, *range(13, 19)])
def test_what_the_shorter_way_takes_it_reads_as_the_longer_does(version: int) -> None:
    whole = request_for_one(version, name_for(version), b"", [])
    for position in range(len(whole)):
        for value in (0, 1, 2, 0x7F, 0x80, 0xFF):
            changed = bytearray(whole)
            changed[position] = value
            shorter = request_or_none(version, changed)
            # With a byte behind it, it is not of the usual shape.
            assert shorter is None or shorter == request_or_none(version, changed + b"\0")


@each("version", VERSIONS)
@each("isolation", [0, 1])
@each("aborted", [[], [(1, 2)]])
@each("chunks", [(), (b"batch",), (b"batch", b"and another")])
def test_the_answer_for_one_partition_is_that_for_many(
    version: int, isolation: int, aborted: list[tuple[int, int]], chunks: tuple[bytes, ...]
) -> None:
    topic = name_for(version)
    data = PartitionData(5, 0, 500, 100, chunks, sum(map(len, chunks)), 400, aborted)
    one = write_one(version, topic, data, isolation)
    many = write_response(version, [TopicData(topic, [data])], isolation=isolation)
    assert [bytes(buffer) for buffer in one] == [bytes(buffer) for buffer in many]


def test_an_error_of_the_whole_request_has_its_place_from_version_7_on() -> None:
    whole = b"".join(write_response(7, (), error=70))
    answer = read_by_kio(load_response_schema(fetch.API_KEY, 7), whole)
    assert (answer.error_code, answer.session_id, answer.responses) == (70, 0, ())


def name_for(version: int) -> str | uuid.UUID:
    return uuid.uuid4() if version >= fetch.FIRST_WITH_TOPIC_IDS else "news"


def request_for_one(
    version: int, topic: str | uuid.UUID, rack: bytes, forgotten: list[int]
) -> bytes:
    """A request for one partition, field by field."""
    flexible = version >= fetch.FLEXIBLE_FROM

    def length(value: int, form: str = ">i") -> bytes:
        return bytes([value + 1]) if flexible else struct.pack(form, value)

    def string(value: bytes) -> bytes:
        return length(len(value), ">h") + value

    tags = b"\0" if flexible else b""
    name = topic.bytes if isinstance(topic, uuid.UUID) else string(topic.encode())
    out = b"" if version >= 15 else struct.pack(">i", -1)
    out += struct.pack(">iiib", 500, 1, 2**25, 1)
    if version >= fetch.FIRST_WITH_SESSIONS:
        out += struct.pack(">ii", 9, 10)
    out += length(1) + name + length(1) + struct.pack(">i", 7)
    out += struct.pack(">i", 3) if version >= 9 else b""
    out += struct.pack(">q", 2**40)
    out += struct.pack(">i", -1) if version >= 12 else b""
    out += struct.pack(">q", -1) if version >= 5 else b""
    out += struct.pack(">i", 2**20) + tags + tags
    if version >= fetch.FIRST_WITH_SESSIONS:
        out += length(1) + name if forgotten else length(0)
        if forgotten:
            out += length(len(forgotten)) + struct.pack(f">{len(forgotten)}i", *forgotten) + tags
    return out + (string(rack) if version >= 11 else b"") + tags


def request_or_none(version: int, data: bytes | bytearray) -> fetch.FetchRequest | None:
    try:
        return read_request(version, memoryview(data))
    except ProtocolError:
        return None


def name_or_id(topic: Any) -> str | uuid.UUID:
    named: str | uuid.UUID = topic.topic if hasattr(topic, "topic") else topic.topic_id
    return named
