"""What holds of every message, and of every text that claims to be an event's id."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quackmq.broker import Caller, Message
from quackmq.errors import InvalidMessageId, InvalidRequest
from quackmq.model.policy import Policy
from quackmq.model.subscription import RecordPosition, message_id
from quackmq.model.topic import Topic
from quackmq.protocols.http import limits as http_limits
from quackmq.protocols.http.errors import HttpFailure
from quackmq.protocols.http.types import Request
from quackmq.protocols.http.v1.events import encode_event_id, parse_event_id
from quackmq.protocols.http.v1.messages import parse_messages, to_stored_message
from quackmq.protocols.http.v1.operations import encode_json
from quackmq.protocols.http.v1.publishing import PARTITION
from quackmq.records.batch import NO_TIMESTAMP, Record

DATA = st.none() | st.binary(max_size=50) | st.text(max_size=50).map(str.encode)
HEADERS = st.lists(st.tuples(st.text(max_size=20), DATA), max_size=5).map(tuple)
RECORDS = st.builds(
    Record, st.just(0), st.just(NO_TIMESTAMP), key=DATA, value=DATA, headers=HEADERS
)
OFFSETS = st.integers(0, 2**63 - 1)


def topic_of(partitions: int) -> Topic:
    return Topic(uuid.UUID(int=17), "ducks", partitions, Policy(), 0)


def records_in(body: bytes, content_type: str = "application/json") -> list[Record]:
    """What a request with this body publishes."""
    nobody: Any = None
    headers = [(b"content-type", content_type.encode())]
    request = Request(nobody, Caller(), "POST", "/", {}, b"", headers, body, nobody)
    return parse_messages(request, PARTITION)[0]


@given(st.lists(RECORDS, min_size=1, max_size=4))
def test_what_is_read_can_be_published_again_as_it_is(records: list[Record]) -> None:
    fields = ("value", "value_base64", "key", "key_base64", "headers")
    messages = []
    for record in records:
        read = json.loads(encode_json(to_stored_message(Message("id", "ducks", 0, record))))
        messages.append({name: read[name] for name in fields if name in read})
    together = json.dumps({"messages": messages}).encode()
    lines = "\n".join(map(json.dumps, messages)).encode()
    assert records_in(together) == records
    assert records_in(lines, "application/x-ndjson") == records


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_messages_or_are_refused(body: bytes) -> None:
    for content_type in ("application/json", "application/x-ndjson"):
        try:
            assert all(isinstance(each, Record) for each in records_in(body, content_type))
        except InvalidRequest as refused:
            assert str(refused)
    assert records_in(body, "application/octet-stream")[0].value == body


@given(st.text(max_size=50))
def test_any_content_type_is_known_or_refused(content_type: str) -> None:
    try:
        records_in(b'{"value": 1}', content_type.encode("ascii", "replace").decode())
    except HttpFailure as refused:
        assert refused.status == 415


@given(st.lists(OFFSETS, min_size=2, max_size=http_limits.HTTP_EVENT_PARTITIONS), st.integers(0, 3))
def test_an_events_id_tells_where_to_go_on_in_every_partition(offsets: list[int], new: int) -> None:
    topic = topic_of(len(offsets) + new)
    token = encode_event_id(topic.id, offsets)
    expected = dict(enumerate([*offsets, *[0] * new]))
    assert parse_event_id(token, topic, None) == expected
    assert parse_event_id(token, topic, 1) == {1: offsets[1]}


@given(st.integers(0, 4), st.integers(0, 2**63 - 2))
def test_a_messages_id_tells_where_to_go_on_in_its_partition(partition: int, offset: int) -> None:
    topic = topic_of(5)
    token = message_id(topic.id, RecordPosition(partition, offset))
    assert parse_event_id(token, topic, partition) == {partition: offset + 1}


@given(
    st.text(max_size=100)
    | st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", max_size=100)
)
def test_any_other_text_is_refused_as_an_events_id(token: str) -> None:
    with pytest.raises(InvalidMessageId):
        parse_event_id(token, topic_of(3), None)


@given(st.lists(OFFSETS, min_size=2, max_size=5), st.data())
def test_an_id_that_was_changed_is_refused_or_of_the_same_topic(
    offsets: list[int], data: st.DataObject
) -> None:
    topic = topic_of(5)
    token = encode_event_id(topic.id, offsets)
    cut = token[: data.draw(st.integers(0, len(token) - 1))]
    try:
        found = parse_event_id(cut, topic, None)
    except InvalidMessageId:
        return
    assert set(found) == set(range(5))
