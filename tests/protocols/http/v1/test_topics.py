"""Topics over HTTP: created, listed in pages, described, altered, deleted."""

from __future__ import annotations

import pytest

from quackmq import limits
from quackmq.broker import BrokerSettings
from tests.protocols.http.v1.serving import Client, serving


def test_a_topic_is_created_with_partitions_and_a_policy(api: Client, topic: str) -> None:
    policy = {"live_entries": 10, "when_full": "refuse", "keep_until_consumed": True}
    created = api.post("/v1/topics", {"name": topic, "partitions": 3, "policy": policy})
    assert created.status == 201
    assert created.headers["location"] == f"/v1/topics/{topic}"
    described = created.json
    assert described["name"] == topic
    assert described["partition_count"] == 3
    assert described["partitions"][2] == {
        "partition": 2,
        "first_offset": 0,
        "next_offset": 0,
        "stable_offset": 0,
    }
    assert {name: described["policy"][name] for name in policy} == policy
    assert described["policy"]["keep_for_ms"] is None
    assert api.get(f"/v1/topics/{topic}").json == described


def test_without_more_than_a_name_a_topic_is_as_the_broker_makes_them(
    api: Client, topic: str
) -> None:
    created = api.post("/v1/topics", {"name": topic}).json
    assert created["partition_count"] == 1
    assert created["policy"]["when_full"] == "archive"
    assert created["policy"]["partitioner"] == "murmur2"


def test_using_a_topic_creates_it_once_and_describes_it(api: Client, topic: str) -> None:
    created = api.put(f"/v1/topics/{topic}")
    assert (created.status, created.json["partition_count"]) == (200, 1)
    again = api.put(f"/v1/topics/{topic}")
    assert (again.status, again.json["id"]) == (200, created.json["id"])
    api.put("/v1/topics/a%20b").problem(400, "illegal_topic_name")
    with serving(settings=BrokerSettings(auto_create_topics=False)) as closed:
        detail = closed.client().put(f"/v1/topics/{topic}").problem(404, "unknown_topic")
        assert "create it first" in detail


def test_the_partitioner_is_shown_and_can_be_changed(api: Client, topic: str) -> None:
    api.post("/v1/topics", {"name": topic, "policy": {"partitioner": "crc32", "keep_bytes": 9}})
    assert api.get(f"/v1/topics/{topic}").json["policy"]["partitioner"] == "crc32"
    changes = {"policy": {"partitioner": "murmur2"}}
    changed = api.ask("PATCH", f"/v1/topics/{topic}", changes).json
    assert changed["policy"]["partitioner"] == "murmur2"
    assert changed["policy"]["keep_bytes"] == 9


def test_a_topic_that_exists_is_not_created_again(api: Client, topic: str) -> None:
    assert api.post("/v1/topics", {"name": topic}).status == 201
    assert topic in api.post("/v1/topics", {"name": topic}).problem(409, "topic_exists")


@pytest.mark.parametrize(
    ("body", "status", "code", "says"),
    [
        ({}, 400, "invalid_request", "name"),
        ({"name": "a b"}, 400, "invalid_request", "field `name` must be"),
        ({"name": "x" * 250}, 400, "invalid_request", "field `name` must be"),
        ({"name": ".."}, 400, "illegal_topic_name", "'..'"),
        ({"name": "__quackmq.x"}, 400, "illegal_topic_name", "reserved"),
        ({"name": "a", "partitions": 0}, 400, "invalid_request", "field `partitions` must"),
        ({"name": "a", "partitions": 10_001}, 400, "invalid_request", "field `partitions` must"),
        ({"name": "a", "partitions": 1.5}, 400, "invalid_request", "field `partitions` must"),
        ({"name": "a", "partitions": True}, 400, "invalid_request", "field `partitions` must"),
        ({"name": "a", "policy": {"keep_fr_ms": 1}}, 400, "invalid_request", "keep_fr_ms"),
        ({"name": "a", "policy": {"keep_for_ms": -1}}, 400, "invalid_request", "keep_for_ms"),
        ({"name": "a", "policy": {"when_full": "explode"}}, 400, "invalid_request", "explode"),
        ({"name": "a", "policy": {"partitioner": "md5"}}, 400, "invalid_request", "md5"),
        ({"name": "a", "policy": {"partitioner": None}}, 400, "invalid_request", "partitioner"),
        ({"name": "a", "policy": {"ephemeral": "yes"}}, 400, "invalid_request", "ephemeral"),
        ({"name": "a", "color": "blue"}, 400, "invalid_request", "color"),
        ([], 400, "invalid_request", "object"),
    ],
)
def test_a_topic_that_cannot_be_is_refused_with_the_reason(
    api: Client, body: object, status: int, code: str, says: str
) -> None:
    assert says in api.post("/v1/topics", body).problem(status, code)


def test_topics_are_listed_by_name_a_page_at_a_time() -> None:
    with serving() as served:
        api = served.client()
        names = [f"t{number:02}" for number in range(7)]
        for name in reversed(names):
            assert api.post("/v1/topics", {"name": name}).status == 201
        pages, path = [], "/v1/topics?limit=3"
        while path:
            page = api.get(path).json
            pages.append([each["name"] for each in page["topics"]])
            path = f"/v1/topics?limit=3&after={page['next']}" if page["next"] else ""
        assert pages == [names[:3], names[3:6], names[6:]]
        assert api.get("/v1/topics?limit=7").json["next"] is None
        assert [each["name"] for each in api.get("/v1/topics").json["topics"]] == names


def test_many_partitions_are_described_a_page_at_a_time(api: Client, topic: str) -> None:
    api.post("/v1/topics", {"name": topic, "partitions": 5})
    first = api.get(f"/v1/topics/{topic}?limit=2").json
    assert [each["partition"] for each in first["partitions"]] == [0, 1]
    assert first["next_partition"] == 2
    last = api.get(f"/v1/topics/{topic}?limit=3&from_partition=2").json
    assert [each["partition"] for each in last["partitions"]] == [2, 3, 4]
    assert last["next_partition"] is None
    assert api.get(f"/v1/topics/{topic}?from_partition=7").json["partitions"] == []


def test_offsets_tell_what_was_published(api: Client, topic: str) -> None:
    api.publish(topic, "a", "b")
    (partition,) = api.get(f"/v1/topics/{topic}").json["partitions"]
    assert (partition["first_offset"], partition["next_offset"]) == (0, 2)
    assert partition["stable_offset"] == 2


def test_a_policy_is_changed_where_it_is_said_and_nowhere_else(api: Client, topic: str) -> None:
    api.post(
        "/v1/topics", {"name": topic, "policy": {"keep_for_ms": 60_000, "needs_subscriber": True}}
    )
    changes = {"policy": {"keep_for_ms": None, "keep_bytes": 100}, "partitions": 2}
    altered = api.ask("PATCH", f"/v1/topics/{topic}", changes)
    assert altered.status == 200
    assert altered.json["partition_count"] == 2
    policy = altered.json["policy"]
    assert (policy["keep_for_ms"], policy["keep_bytes"]) == (None, 100)
    assert policy["needs_subscriber"] is True
    assert api.get(f"/v1/topics/{topic}").json == altered.json


def test_a_topic_never_has_fewer_partitions(api: Client, topic: str) -> None:
    api.post("/v1/topics", {"name": topic, "partitions": 2})
    answer = api.ask("PATCH", f"/v1/topics/{topic}", {"partitions": 1})
    answer.problem(400, "invalid_request")
    assert api.get(f"/v1/topics/{topic}").json["partition_count"] == 2


def test_a_deleted_topic_is_gone_and_one_made_anew_is_another(api: Client, topic: str) -> None:
    first = api.post("/v1/topics", {"name": topic}).json
    assert api.delete(f"/v1/topics/{topic}").status == 204
    api.get(f"/v1/topics/{topic}").problem(404, "unknown_topic")
    api.delete(f"/v1/topics/{topic}").problem(404, "unknown_topic")
    api.ask("PATCH", f"/v1/topics/{topic}", {}).problem(404, "unknown_topic")
    assert api.post("/v1/topics", {"name": topic}).json["id"] != first["id"]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("limit=0", "limit"),
        (f"limit={limits.HTTP_PAGE_ITEMS + 1}", "limit"),
        ("limit=ten", "'ten'"),
        ("limit=1e2", "limit"),
        ("limit=%2B5", "limit"),
        ("limit=", "limit"),
        ("limit=" + "9" * 500, "limit"),
        ("limt=5", "unknown parameter 'limt'; allowed parameters: after, limit"),
        ("limit=1&limit=2", "twice"),
        ("after=%ff", "UTF-8"),
    ],
)
def test_a_parameter_that_makes_no_sense_is_refused_by_name(
    api: Client, query: str, says: str
) -> None:
    assert says in api.get(f"/v1/topics?{query}").problem(400, "invalid_request")
