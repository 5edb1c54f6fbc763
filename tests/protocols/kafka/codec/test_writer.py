"""The writer against kio's reader, which nobody here wrote."""

from __future__ import annotations

import datetime
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.api_versions.v0.response import ApiVersionsResponse as ApiVersionsV0
from kio.schema.api_versions.v3.response import ApiVersionsResponse as ApiVersionsV3
from kio.schema.errors import ErrorCode
from kio.static.protocol import RequestPayload

from quackmq.protocols.kafka.codec.writer import write_entity
from tests.kit import effort
from tests.kit.tables import each
from tests.protocols.kafka.codec.schemas import (
    entities,
    read_by_kio,
    response_to,
    spoken_requests,
    written,
)


@each("request_schema", spoken_requests())
@settings(max_examples=effort.of(5), deadline=None)
@given(st.data())
def test_what_is_written_from_plain_fields_is_what_kio_writes_and_reads(
    request_schema: type[RequestPayload], data: st.DataObject
) -> None:
    schema = response_to(request_schema)
    entity = data.draw(entities(schema))
    out = bytes(write_entity(schema, plain(entity)))
    assert out == written(entity)
    assert read_by_kio(schema, out) == entity


ANSWER = {
    "error_code": ErrorCode.none,
    "api_keys": [{"api_key": 3, "min_version": 0, "max_version": 12, "unheard_of": 1}],
    "finalized_features_epoch": 7,
}


def test_fields_that_a_version_does_not_know_are_left_out() -> None:
    oldest = read_by_kio(ApiVersionsV0, bytes(write_entity(ApiVersionsV0, ANSWER)))
    assert [key.max_version for key in oldest.api_keys] == [12]
    newer = read_by_kio(ApiVersionsV3, bytes(write_entity(ApiVersionsV3, ANSWER)))
    assert newer.finalized_features_epoch == 7


def test_fields_that_are_not_given_get_the_default_of_the_schema() -> None:
    answer = {"error_code": ErrorCode.none, "api_keys": []}
    read = read_by_kio(ApiVersionsV3, bytes(write_entity(ApiVersionsV3, answer)))
    assert (read.finalized_features_epoch, read.throttle_time) == (-1, datetime.timedelta(0))


def test_a_field_without_a_default_that_is_not_given_is_named() -> None:
    with pytest.raises(KeyError, match="ApiVersionsResponse needs api_keys"):
        write_entity(ApiVersionsV3, {"error_code": ErrorCode.none})


def plain(entity: Any) -> dict[str, Any]:
    """An entity as the fields that a handler would give."""
    return {field.name: _plain_value(getattr(entity, field.name)) for field in fields(entity)}


def _plain_value(value: Any) -> Any:
    if is_dataclass(value):
        return plain(value)
    if isinstance(value, tuple):
        return [_plain_value(element) for element in value]
    if isinstance(value, datetime.datetime):
        value -= datetime.datetime.fromtimestamp(0, datetime.UTC)
    if isinstance(value, datetime.timedelta):
        return value // datetime.timedelta(milliseconds=1)
    return value
