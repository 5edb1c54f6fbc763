"""Reading by offset over HTTP, and waiting for what comes."""

from __future__ import annotations

import threading

import pytest

from quackmq.model.topic import PartitionKey
from quackmq.protocols.http import limits as http_limits
from tests.broker.transacting import Transactor
from tests.protocols.http.v1.serving import CALLER, DEADLINE_S, Client, Serving
from tests.protocols.http.v1.sse import Events


def path_of(topic: str, query: str = "", partition: int = 0) -> str:
    return f"/v1/topics/{topic}/partitions/{partition}/messages{query}"


def test_a_partition_is_read_page_by_page(api: Client, topic: str) -> None:
    api.publish(topic, *"abcdefg")
    read, offset = [], 0
    while True:
        page = api.get(path_of(topic, f"?offset={offset}&limit=3")).json
        assert (page["first_offset"], page["end_offset"]) == (0, 7)
        if not page["messages"]:
            break
        read.append("".join(each["value"] for each in page["messages"]))
        offset = page["next_offset"]
    assert read == ["abc", "def", "g"]
    assert offset == 7


def test_without_an_offset_reading_begins_at_what_is_left(
    served: Serving, api: Client, topic: str
) -> None:
    api.publish(topic, "a", "b", "c")
    key = PartitionKey(served.broker.topic(topic).id, 0)
    served.run(served.broker.trim(CALLER, key, 2))
    page = api.get(path_of(topic)).json
    assert [each["value"] for each in page["messages"]] == ["c"]
    assert page["first_offset"] == 2
    api.get(path_of(topic, "?offset=1")).problem(416, "offset_out_of_range")
    api.get(path_of(topic, "?offset=4")).problem(416, "offset_out_of_range")
    assert api.get(path_of(topic, "?offset=3")).json["messages"] == []


def test_a_reader_waits_for_what_comes_m6(served: Serving, api: Client, topic: str) -> None:
    api.publish(topic, "a")
    pages = []

    def wait() -> None:
        pages.append(served.client().get(path_of(topic, "?offset=1&wait_ms=30000")).json)

    waiting = threading.Thread(target=wait)
    waiting.start()
    api.publish(topic, "b")
    waiting.join(DEADLINE_S)
    assert [each["value"] for each in pages[0]["messages"]] == ["b"]


def test_a_wait_that_was_in_vain_is_answered_with_nothing(api: Client, topic: str) -> None:
    api.publish(topic, "a")
    page = api.get(path_of(topic, "?offset=1&wait_ms=1")).json
    assert (page["messages"], page["next_offset"]) == ([], 1)


def test_a_page_is_bounded_in_bytes_and_always_moves_on(api: Client, topic: str) -> None:
    large = "x" * (http_limits.HTTP_PAGE_BYTES // 2 + 1)
    for _ in range(3):
        api.publish(topic, large)
    page = api.get(path_of(topic)).json
    assert len(page["messages"]) < 3
    assert page["next_offset"] == len(page["messages"]) > 0


def test_only_what_is_committed_is_read_by_page_and_by_event(
    served: Serving, api: Client, topic: str
) -> None:
    api.publish(topic, "before")
    transactor = Transactor(served.broker, topic)
    served.run(transactor.init())
    served.run(transactor.send(b"aborted", topic=topic))
    served.run(transactor.abort())
    served.run(transactor.send(b"decided", topic=topic))
    api.publish(topic, "behind it")
    assert values(api, topic) == ["before"]
    with Events(served, f"/v1/topics/{topic}/events?start=beginning") as events:
        assert [event.value for event in events.take(1)] == ["before"]
        served.run(transactor.commit())
        assert [event.value for event in events.take(2)] == ["decided", "behind it"]
        api.publish(topic, "after")
        assert [event.value for event in events.take(1)] == ["after"]
    assert values(api, topic) == ["before", "decided", "behind it", "after"]


def values(api: Client, topic: str) -> list[str]:
    return [each["value"] for each in api.get(path_of(topic)).json["messages"]]


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/topics/nothing/partitions/0/messages", 404, "unknown_topic"),
        ("/v1/topics/there/partitions/1/messages", 404, "unknown_partition"),
        ("/v1/topics/there/partitions/x/messages", 400, "invalid_request"),
        ("/v1/topics/there/partitions/-1/messages", 400, "invalid_request"),
        ("/v1/topics/there/partitions/99999/messages", 400, "invalid_request"),
        ("/v1/topics/there/partitions/0/messages?offset=-1", 400, "invalid_request"),
        ("/v1/topics/there/partitions/0/messages?ofset=1", 400, "invalid_request"),
        ("/v1/topics/there/partitions/0/messages?limit=1001", 400, "invalid_request"),
        ("/v1/topics/there/partitions/0/messages?wait_ms=30001", 400, "invalid_request"),
        ("/v1/topics/there/partitions//messages", 404, "unknown_route"),
    ],
)
def test_what_cannot_be_read_is_refused(api: Client, path: str, status: int, code: str) -> None:
    api.post("/v1/topics/there/messages", {"value": 1})
    api.get(path).problem(status, code)
