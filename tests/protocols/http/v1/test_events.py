"""Server-Sent Events: a topic followed, cut off, resumed without a gap or a repeat."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from quackmq import limits
from quackmq.broker.log.page import Page
from quackmq.model.topic import PartitionKey
from quackmq.protocols.http import limits as http_limits
from tests.protocols.http.v1.serving import CALLER, DEADLINE_S, Client, Serving, serving
from tests.protocols.http.v1.sse import Events


def path_of(topic: str, query: str = "") -> str:
    return f"/v1/topics/{topic}/events{query}"


def test_what_is_published_comes_as_events(served: Serving, api: Client, topic: str) -> None:
    api.publish(topic, "before")
    with Events(served, path_of(topic)) as events:
        (place,) = api.publish(topic, "a\nb")
        event = events.next()
    assert event is not None
    assert (event.kind, event.id) == ("message", place["id"])
    assert event.value == "a\nb"
    page = api.get(f"/v1/topics/{topic}/partitions/0/messages?offset=1").json
    assert event.data == page["messages"][0]


def test_a_stream_begins_where_it_is_told_to(served: Serving, api: Client, topic: str) -> None:
    api.publish(topic, "a", "b", "c")
    for query, expected in (
        ("?start=beginning", "a"),
        ("?offset=2", "c"),
        ("?timestamp_ms=0", "a"),
        ("?start=beginning&partition=0", "a"),
    ):
        with Events(served, path_of(topic, query)) as events:
            assert [event.value for event in events.take(1)] == [expected]


def test_a_stream_goes_on_behind_the_last_event(served: Serving, api: Client, topic: str) -> None:
    api.publish(topic, *"abcde")
    last, seen = None, []
    for _ in range(5):
        with Events(served, path_of(topic, "?start=beginning"), last) as events:
            (event,) = events.take(1)
            last = event.id
            seen.append(event.value)
    assert seen == list("abcde")


def test_one_id_resumes_all_partitions(served: Serving, api: Client, topic: str) -> None:
    api.post("/v1/topics", {"name": topic, "partitions": 3})
    for number in range(30):
        api.publish(topic, str(number), query=f"?partition={number % 3}")
    last: str | None = None
    seen: list[tuple[int, int]] = []
    while len(seen) < 30:
        with Events(served, path_of(topic, "?start=beginning"), last) as events:
            for event in events.take(min(4, 30 - len(seen))):
                last = event.id
                seen.append((event.data["partition"], event.data["offset"]))
    assert sorted(seen) == [(partition, offset) for partition in range(3) for offset in range(10)]
    for partition in range(3):
        offsets = [offset for at, offset in seen if at == partition]
        assert offsets == sorted(offsets)


def test_partitions_that_come_later_are_followed_too(
    served: Serving, api: Client, topic: str
) -> None:
    api.publish(topic, "a")
    with Events(served, path_of(topic, "?start=beginning")) as events:
        (first,) = events.take(1)
        api.ask("PATCH", f"/v1/topics/{topic}", {"partitions": 2})
        api.publish(topic, "wakes", query="?partition=0")
        api.publish(topic, "new", query="?partition=1")
        assert {event.value for event in events.take(2)} == {"wakes", "new"}
    with Events(served, path_of(topic), first.id) as events:
        assert {event.value for event in events.take(2)} == {"wakes", "new"}


def test_what_was_dropped_meanwhile_is_told_as_lost(
    served: Serving, api: Client, topic: str
) -> None:
    api.publish(topic, *"abcde")
    with Events(served, path_of(topic, "?start=beginning")) as events:
        (first,) = events.take(1)
    key = PartitionKey(served.broker.topic(topic).id, 0)
    served.run(served.broker.trim(CALLER, key, 3))
    with Events(served, path_of(topic), first.id) as events:
        fourth, fifth = events.take(2)
    assert (fourth.value, fourth.data["lost"]) == ("d", 2)
    assert (fifth.value, fifth.data["lost"]) == ("e", 0)


def test_what_is_dropped_just_before_it_is_read_does_not_end_a_stream(
    served: Serving, api: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.publish(topic, *"abc")
    broker = served.broker
    key = PartitionKey(broker.topic(topic).id, 0)
    read = broker.messages.read

    async def read_too_late(*place: Any, **bounds: Any) -> Page:
        await broker.trim(CALLER, key, 2)
        return await read(*place, **bounds)

    monkeypatch.setattr(broker.messages, "read", read_too_late)
    with Events(served, path_of(topic, "?start=beginning")) as events:
        (event,) = events.take(1)
    assert (event.value, event.data["lost"]) == ("c", 2)


def test_a_silent_stream_says_that_it_lives(
    served: Serving, api: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "HTTP_HEARTBEAT_MS", 20)
    api.publish(topic, "a")
    with Events(served, path_of(topic)) as events:
        events.until_comment()
        api.publish(topic, "b")
        assert [event.value for event in events.take(1)] == ["b"]


def test_a_stream_ends_with_its_topic_and_says_so(served: Serving, api: Client, topic: str) -> None:
    api.publish(topic, "a")
    with Events(served, path_of(topic)) as events:
        assert api.delete(f"/v1/topics/{topic}").status == 204
        api.publish(topic, "of another topic")
        end = events.next()
        assert end is not None and end.kind == "end"
        assert end.data["code"] == "unknown_topic"
        assert events.next() is None


def test_a_stream_ends_cleanly_when_the_broker_closes() -> None:
    with serving() as own:
        api = own.client()
        api.publish("ducks", "a")
        with Events(own, path_of("ducks", "?start=beginning")) as events:
            events.take(1)
            own.close_listener()
            # A broken one would raise IncompleteRead.
            assert events.next() is None


def test_the_id_of_another_topic_or_of_nothing_is_refused(
    served: Serving, api: Client, topic: str
) -> None:
    api.publish(topic, "a")
    (other,) = api.publish(f"{topic}.other", "a")
    for token in (other["id"], "nonsense", "A" * 44, "A" * 5000, "é"):
        answer = api.get(path_of(topic), **{"last-event-id": token})
        answer.problem(400, "invalid_message_id")


def test_an_id_of_other_partitions_is_refused(served: Serving, api: Client, topic: str) -> None:
    api.post("/v1/topics", {"name": topic, "partitions": 2})
    (place,) = api.publish(topic, "a", query="?partition=1")
    answer = api.get(path_of(topic), **{"last-event-id": place["id"]})
    answer.problem(400, "invalid_message_id")
    answer = api.get(path_of(topic, "?partition=0"), **{"last-event-id": place["id"]})
    answer.problem(400, "invalid_message_id")
    with Events(served, path_of(topic, "?partition=1"), place["id"]) as events:
        api.publish(topic, "b", query="?partition=1")
        assert [event.value for event in events.take(1)] == ["b"]


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("?start=middle", 400, "invalid_request"),
        ("?start=end&offset=0", 400, "invalid_request"),
        ("?offset=9", 416, "offset_out_of_range"),
        ("?partition=1", 404, "unknown_partition"),
        ("?from=1", 400, "invalid_request"),
    ],
)
def test_a_stream_that_cannot_begin_is_refused(
    api: Client, topic: str, query: str, status: int, code: str
) -> None:
    api.publish(topic, "a")
    api.get(path_of(topic, query)).problem(status, code)
    api.get(path_of(f"{topic}.nothing")).problem(404, "unknown_topic")


def test_streams_are_bounded_in_number_and_in_partitions(
    served: Serving, api: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitions = http_limits.HTTP_EVENT_PARTITIONS + 1
    api.post("/v1/topics", {"name": topic, "partitions": partitions})
    api.get(path_of(topic)).problem(429, "limit_reached")
    monkeypatch.setattr(http_limits, "HTTP_EVENT_STREAMS", 1)
    with Events(served, path_of(topic, "?partition=100")):
        assert api.get("/v1/health").json["streams"] == 1
        api.get(path_of(topic, "?partition=1")).problem(429, "limit_reached")

    async def ended() -> None:
        async with asyncio.timeout(DEADLINE_S):
            while served.listener.stream_count:
                await asyncio.sleep(0.01)

    served.run(ended())
    with Events(served, path_of(topic, "?partition=1")):
        pass


def test_a_reader_that_takes_nothing_costs_a_bounded_amount(
    served: Serving, api: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does not take is not even read for it."""
    messages, read_bytes = served.broker.messages, 0
    read = messages.read

    async def counted(*arguments: Any, **options: Any) -> Page:
        nonlocal read_bytes
        page = await read(*arguments, **options)
        read_bytes += sum(len(each.record.value or b"") for each in page.messages)
        return page

    monkeypatch.setattr(messages, "read", counted)
    published_bytes = 0
    with socket.create_connection((served.host, served.port)) as peer:
        api.publish(topic, "first")
        request = f"GET {path_of(topic, '?start=beginning')} HTTP/1.1\r\nHost: localhost\r\n\r\n"
        peer.sendall(request.encode())
        while published_bytes < 32 * limits.MIB:
            api.publish(topic, *["x" * 64 * limits.KIB] * 16)
            published_bytes += limits.MIB
        # The system takes some megabytes on both sides of the socket, the listener two pieces.
        assert 0 < read_bytes < published_bytes / 2
        assert api.get("/v1/health").json["streams"] == 1
