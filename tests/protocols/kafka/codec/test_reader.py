"""The bounded reader against kio's writer, and against bytes that nobody would write."""

from __future__ import annotations

import datetime
import resource
import struct
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.api_versions.v3.request import ApiVersionsRequest
from kio.schema.delete_topics.v5.request import DeleteTopicsRequest as DeleteTopicsV5
from kio.schema.fetch.v17.request import FetchRequest
from kio.schema.metadata.v1.request import MetadataRequest as MetadataV1
from kio.schema.metadata.v12.request import MetadataRequest as MetadataV12
from kio.static.primitive import i32, i32Timedelta
from kio.static.protocol import Entity

from quackmq.errors import ProtocolError
from quackmq.protocols.kafka import limits as kafka_limits
from quackmq.protocols.kafka.codec.reader import compiled, read_entity
from quackmq.protocols.kafka.codec.writer import write_entity
from tests.kit import effort
from tests.kit.tables import each
from tests.protocols.kafka.codec.schemas import (
    all_requests,
    entities,
    schema_id,
    shortest_entity,
    spoken_requests,
    written,
)

EACH_SPOKEN_REQUEST = each("schema", spoken_requests())


@pytest.fixture
def little_memory() -> Iterator[None]:
    """At most 1 GiB of address space beyond what is in use: whoever wants more gets MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        in_use = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def read(schema: type[Entity], data: bytes) -> Any:
    return read_entity(schema, memoryview(data))


@EACH_SPOKEN_REQUEST
@settings(max_examples=effort.of(5), deadline=None)
@given(st.data())
def test_what_kio_writes_is_read_as_it_was(schema: type[Entity], data: st.DataObject) -> None:
    entity = data.draw(entities(schema))
    assert read(schema, written(entity)) == entity


@EACH_SPOKEN_REQUEST
@settings(max_examples=1, deadline=None)
@given(st.data())
def test_a_request_cut_off_anywhere_is_a_protocol_error_and_bytes_after_it_do_not_matter(
    schema: type[Entity], data: st.DataObject
) -> None:
    whole = written(data.draw(entities(schema)))
    for size in range(len(whole)):
        with pytest.raises(ProtocolError):
            read(schema, whole[:size])
    assert read(schema, whole + b"more") == read(schema, whole)


@settings(max_examples=effort.of(200), deadline=None)
@given(schema=st.sampled_from(spoken_requests()), data=st.binary(max_size=100))
def test_any_bytes_are_a_request_or_a_protocol_error(schema: type[Entity], data: bytes) -> None:
    try:
        entity = read(schema, data)
    except ProtocolError:
        return
    assert isinstance(entity, schema)


@settings(max_examples=effort.of(100), deadline=None)
@given(st.data())
def test_a_request_with_some_bytes_changed_is_a_request_or_a_protocol_error(
    data: st.DataObject,
) -> None:
    schema = data.draw(st.sampled_from(spoken_requests()))
    changed = bytearray(written(data.draw(entities(schema))))
    for _ in range(data.draw(st.integers(1, 5)) if changed else 0):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        entity = read(schema, bytes(changed))
    except ProtocolError:
        return
    assert isinstance(entity, schema)


@settings(max_examples=effort.of(30), deadline=None)
@given(st.data())
def test_requests_of_every_api_can_be_read(data: st.DataObject) -> None:
    entity = data.draw(st.sampled_from(all_requests()).flatmap(entities))
    assert read(type(entity), written(entity)) == entity


def test_of_every_request_that_kio_has_the_shortest_takes_the_least_bytes() -> None:
    """The number bounds how many elements an array may claim: more bytes would refuse good
    requests, fewer would let bad ones ask for memory."""
    schemas = all_requests()
    assert len(schemas) > 300
    for schema in schemas:
        shortest = shortest_entity(schema)
        data = written(shortest)
        assert compiled(schema).least_bytes == len(data), schema_id(schema)
        assert read(schema, data) == shortest, schema_id(schema)


@pytest.mark.usefixtures("little_memory")
def test_five_bytes_that_claim_four_billion_topics_cost_nothing() -> None:
    with pytest.raises(ProtocolError, match="4294967294 elements"):
        read(MetadataV12, bytes.fromhex("ffffffff0f"))


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("length", [2**31 - 1, 1_000_000, 2])
def test_a_length_is_held_against_the_bytes_that_are_left(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"{length} elements"):
        read(MetadataV1, struct.pack(">i", length) + b"\0\0")


def test_a_null_list_of_topics_is_not_an_empty_one() -> None:
    assert read(MetadataV1, struct.pack(">i", -1)).topics is None
    assert read(MetadataV1, struct.pack(">i", 0)).topics == ()


@pytest.mark.parametrize("length", [-2, -(2**31)])
def test_a_length_below_null_is_a_protocol_error(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"a length of {length}"):
        read(MetadataV1, struct.pack(">i", length))


def test_null_is_refused_where_something_must_be() -> None:
    with pytest.raises(ProtocolError, match="string that must not be null"):
        read(ApiVersionsRequest, b"\x00\x02a\x00")
    with pytest.raises(ProtocolError, match="array that must not be null"):
        read(DeleteTopicsV5, b"\x00" + bytes(4) + b"\x00")


def test_more_elements_than_the_bound_are_refused_before_they_are_made() -> None:
    length = kafka_limits.KAFKA_REQUEST_ELEMENTS + 1
    with pytest.raises(ProtocolError, match="elements in a request"):
        read(MetadataV1, struct.pack(">i", length) + bytes(2 * length))


def test_the_bound_of_elements_is_one_for_all_arrays_of_a_request() -> None:
    most = kafka_limits.KAFKA_REQUEST_ELEMENTS
    topics = [{"topic_id": None, "name": None}] * most
    fields = {"topics": topics, "include_topic_authorized_operations": False}
    data = bytes(write_entity(MetadataV12, fields))
    assert len(read(MetadataV12, data).topics) == most
    one_tag = data[:-1] + b"\x01\x7f\x00"
    with pytest.raises(ProtocolError, match="elements in a request"):
        read(MetadataV12, one_tag)


def test_a_string_that_is_not_utf8_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="UTF-8"):
        read(ApiVersionsRequest, b"\x02\xff\x02a\x00")


def test_a_string_beyond_its_bound_is_a_protocol_error() -> None:
    size = kafka_limits.KAFKA_STRING_BYTES + 1
    with pytest.raises(ProtocolError, match=f"a string of {size} bytes"):
        read(ApiVersionsRequest, uvarint(size + 1) + bytes(size) + b"\x02a\x00")


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff\x1f", b"\xff\xff\xff\xff\xff\x01"])
def test_a_variable_length_integer_has_32_bits_at_the_most(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="32 bits"):
        read(MetadataV12, data)


# --- tagged fields ---------------------------------------------------------------------------

NAMES = b"\x02a\x02b"


def test_tagged_fields_that_are_not_known_are_stepped_over() -> None:
    plain = read(ApiVersionsRequest, NAMES + b"\x00")
    assert read(ApiVersionsRequest, NAMES + b"\x02\x05\x03abc\x90\x4e\x00") == plain


def test_a_tagged_field_longer_than_the_rest_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        read(ApiVersionsRequest, NAMES + b"\x01\x05\xff\xff\xff\xff\x0f")


def test_more_tagged_fields_than_bytes_are_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="tagged fields"):
        read(ApiVersionsRequest, NAMES + b"\xff\xff\xff\xff\x0f")


@pytest.mark.parametrize("tags", [b"\x02\x05\x00\x05\x00", b"\x02\x05\x00\x04\x00"])
def test_tagged_fields_come_in_growing_order_and_once(tags: bytes) -> None:
    with pytest.raises(ProtocolError, match="tagged field"):
        read(ApiVersionsRequest, NAMES + tags)


def test_a_known_tagged_field_must_fill_its_size_exactly() -> None:
    request = FetchRequest(
        cluster_id="abc",
        max_wait=i32Timedelta.parse(datetime.timedelta(0)),
        min_bytes=i32.parse(0),
        topics=(),
        forgotten_topics_data=(),
    )
    data = written(request)
    assert read(FetchRequest, data) == request
    assert data.endswith(b"\x01\x00\x04\x04abc")
    for wrong in (b"\x01\x00\x04\x03abc", b"\x01\x00\x04\x05abc"):
        with pytest.raises(ProtocolError):
            read(FetchRequest, data.removesuffix(b"\x01\x00\x04\x04abc") + wrong)


def test_an_id_of_zeros_is_no_id() -> None:
    topic_id = uuid.uuid4()
    for sent, meant in ((uuid.UUID(int=0).bytes, None), (topic_id.bytes, topic_id)):
        request = read(MetadataV12, b"\x02" + sent + b"\x00\x00" + b"\x00\x00\x00")
        assert request.topics[0].topic_id == meant


def uvarint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
