"""Subscriptions over HTTP: durable names that get each message once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from quackmq.broker import Message
from tests.protocols.http.v1.serving import DEADLINE_S, Answered, Client, Serving, serving


def path_of(topic: str, call: str = "", name: str = "puddles") -> str:
    return f"/v1/subscriptions/{name}/topics/{topic}{call}"


def get(api: Client, topic: str, last_id: str | None = None, wait_ms: int = 0) -> Answered:
    return api.post(path_of(topic, "/get"), {"last_id": last_id, "wait_ms": wait_ms})


def get_all(api: Client, topic: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    while True:
        answer = get(api, topic, messages[-1]["id"] if messages else None)
        if answer.status == 204:
            return messages
        messages.append(answer.json)


def test_a_name_subscribes_once_and_brings_the_topic_to_life(api: Client, topic: str) -> None:
    first = api.put(path_of(topic), {"start": "beginning"})
    assert first.status == 201
    assert first.json["start"] == "beginning"
    assert first.json["next_offsets"] == [0]
    again = api.put(path_of(topic))
    assert (again.status, again.json) == (200, first.json)
    assert api.get(path_of(topic)).json == first.json


def test_a_message_comes_again_until_it_is_named_r2(api: Client, topic: str) -> None:
    api.put(path_of(topic))
    api.publish(topic, "a", "b")
    first = get(api, topic)
    assert first.status == 200
    assert first.json["value"] == "a"
    assert get(api, topic).json == first.json
    second = get(api, topic, first.json["id"])
    assert second.json["value"] == "b"
    assert get(api, topic, first.json["id"]).json == second.json
    nothing = get(api, topic, second.json["id"])
    assert (nothing.status, nothing.body) == (204, b"")


def test_get_needs_no_body(api: Client, topic: str) -> None:
    api.put(path_of(topic))
    assert api.post(path_of(topic, "/get")).status == 204
    api.publish(topic, "a")
    assert api.post(path_of(topic, "/get")).json["value"] == "a"


def test_a_subscriber_waits_for_what_comes_m6(served: Serving, api: Client, topic: str) -> None:
    api.put(path_of(topic))
    answers: list[Answered] = []

    def wait() -> None:
        answers.append(get(served.client(), topic, wait_ms=30_000))

    waiting = threading.Thread(target=wait)
    waiting.start()
    api.publish(topic, "a")
    waiting.join(DEADLINE_S)
    assert answers[0].json["value"] == "a"


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("beginning", "abc"),
        ("end", ""),
        ({"offset": 1}, "bc"),
        ({"timestamp_ms": 0}, "abc"),
        ({"timestamp_ms": 2**60}, ""),
    ],
)
def test_a_subscription_begins_where_it_is_told_to(
    api: Client, topic: str, start: object, expected: str
) -> None:
    api.publish(topic, *"abc")
    assert api.put(path_of(topic), {"start": start}).json["start"] == start
    assert "".join(each["value"] for each in get_all(api, topic)) == expected


def test_an_ack_is_for_everything_up_to_a_message(api: Client, topic: str) -> None:
    places = api.publish(topic, *"abcd")
    api.put(path_of(topic), {"start": "beginning"})
    assert api.get(path_of(topic, "/lag")).json == {"lag": 4, "lost": 0}
    assert api.post(path_of(topic, "/ack"), {"id": places[2]["id"]}).status == 204
    assert api.get(path_of(topic, "/lag")).json == {"lag": 1, "lost": 0}
    assert get(api, topic).json["value"] == "d"
    assert api.post(path_of(topic, "/ack"), {"id": places[0]["id"]}).status == 204
    assert get(api, topic).json["value"] == "d"


def test_a_subscription_moves_back_and_forth_m3(api: Client, topic: str) -> None:
    api.publish(topic, *"abcd")
    api.put(path_of(topic))
    for to, expected in (("beginning", "abcd"), ({"offset": 2}, "cd"), ("end", "")):
        assert api.post(path_of(topic, "/seek"), {"to": to}).status == 204
        assert "".join(each["value"] for each in get_all(api, topic)) == expected


def test_subscriptions_end_when_they_are_ended_r3(api: Client, topic: str) -> None:
    api.put(path_of(topic))
    assert api.delete(path_of(topic)).status == 204
    for answer in (
        api.delete(path_of(topic)),
        api.get(path_of(topic)),
        get(api, topic),
        api.get(path_of(topic, "/lag")),
    ):
        answer.problem(404, "unknown_subscription")


def test_an_ephemeral_topic_goes_with_its_last_subscription_r4(api: Client, topic: str) -> None:
    api.post("/v1/topics", {"name": topic, "policy": {"ephemeral": True}})
    api.put(path_of(topic))
    api.delete(path_of(topic))
    assert api.get(f"/v1/topics/{topic}").status == 404


def test_subscriptions_are_listed_by_name_and_by_topic_a_page_at_a_time() -> None:
    with serving() as own:
        api = own.client()
        for name in "cab":
            for topic in ("t2", "t1"):
                assert api.put(path_of(topic, name=name)).status == 201

        def listed(query: str) -> list[str]:
            found = api.get(f"/v1/subscriptions?{query}").json["subscriptions"]
            return [f"{each['name']}/{each['topic']}" for each in found]

        everything = ["a/t1", "a/t2", "b/t1", "b/t2", "c/t1", "c/t2"]
        assert listed("") == everything
        assert listed("name=b") == ["b/t1", "b/t2"]
        assert listed("topic=t1") == ["a/t1", "b/t1", "c/t1"]
        assert listed("topic=t2&name=c") == ["c/t2"]
        assert listed("name=nobody") == []
        seen, query = [], "limit=4"
        while query:
            page = api.get(f"/v1/subscriptions?{query}").json
            seen += [f"{each['name']}/{each['topic']}" for each in page["subscriptions"]]
            more = page["next"]
            query = f"limit=4&after={more.replace(' ', '%20')}" if more else ""
        assert seen == everything
        api.get("/v1/subscriptions?after=x").problem(400, "invalid_request")
        api.get("/v1/subscriptions?topic=none").problem(404, "unknown_topic")


@pytest.mark.parametrize(
    ("call", "body", "status", "code"),
    [
        ("/get", {"last_id": 5}, 400, "invalid_request"),
        ("/get", {"wait_ms": -1}, 400, "invalid_request"),
        ("/get", {"wait_ms": 30_001}, 400, "invalid_request"),
        ("/get", {"wait": 1}, 400, "invalid_request"),
        ("/get?wait_ms=1", {}, 400, "invalid_request"),
        ("/ack", {}, 400, "invalid_request"),
        ("/ack", {"id": "nonsense"}, 400, "invalid_message_id"),
        ("/ack", None, 400, "invalid_request"),
        ("/seek", {"to": "middle"}, 400, "invalid_request"),
        ("/seek", {"to": {}}, 400, "invalid_request"),
        ("/seek", {"to": {"offset": 1, "timestamp_ms": 1}}, 400, "invalid_request"),
        ("/seek", {"to": {"offset": 99}}, 416, "offset_out_of_range"),
        ("/seek", {"to": {"offset": -1}}, 400, "invalid_request"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused_and_changes_nothing(
    api: Client, topic: str, call: str, body: object, status: int, code: str
) -> None:
    api.put(path_of(topic))
    api.publish(topic, "a")
    api.post(path_of(topic, call), body).problem(status, code)
    assert get(api, topic).json["value"] == "a"


@pytest.mark.parametrize("name", ["a%20b", "%00", "x" * 256, "%F0%9F%A6%86%0A"])
def test_a_name_that_cannot_be_is_refused(api: Client, topic: str, name: str) -> None:
    api.put(path_of(topic, name=name)).problem(400, "invalid_request")


def test_get_with_an_invalid_id_sends_the_head_again_r2(api: Client, topic: str) -> None:
    api.put(path_of(topic))
    (elsewhere,) = api.publish(f"{topic}-other", "x")
    first, _ = api.publish(topic, "a", "b")
    for last_id in ("", "nonsense", "A" * 39, "x" * 10_000, elsewhere["id"]):
        assert get(api, topic, last_id).json["id"] == first["id"], last_id
    assert get(api, topic, first["id"]).json["value"] == "b"


def test_the_id_of_a_topic_that_was_made_anew_acknowledges_nothing(api: Client, topic: str) -> None:
    api.put(path_of(topic))
    (old,) = api.publish(topic, "a")
    api.delete(f"/v1/topics/{topic}")
    api.put(path_of(topic))
    api.publish(topic, "b")
    assert get(api, topic, old["id"]).json["value"] == "b"
    api.post(path_of(topic, "/ack"), {"id": old["id"]}).problem(400, "invalid_message_id")
    assert get(api, topic).json["value"] == "b"


def test_a_wait_that_is_under_way_is_answered_when_the_listener_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving() as own:
        api = own.client()
        api.put(path_of("ducks"))
        asked, ask = threading.Event(), own.broker.get

        async def noted(*arguments: Any) -> Message | None:
            asked.set()
            return await ask(*arguments)

        monkeypatch.setattr(own.broker, "get", noted)
        answers: list[Answered] = []
        waiting = threading.Thread(
            target=lambda: answers.append(get(own.client(), "ducks", wait_ms=30_000))
        )
        waiting.start()
        assert asked.wait(DEADLINE_S)
        own.close_listener()
        waiting.join(DEADLINE_S)
        answers[0].problem(503, "closing")
