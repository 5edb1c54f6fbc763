"""Defaults of new topics over HTTP: set, listed, removed, and in effect for every way to create."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quackmq import limits
from quackmq.broker import BrokerSettings
from tests.protocols.http.v1.serving import Client, serving

PATH = "/v1/topic-defaults"


@pytest.fixture
def clean_api(api: Client) -> Iterator[Client]:
    """The shared broker, without defaults before and after a test."""
    yield api
    for default in api.get(PATH).json["topic_defaults"]:
        api.delete(f"{PATH}/{default['pattern'].replace('?', '%3F')}")


def test_defaults_are_set_listed_replaced_and_removed(clean_api: Client) -> None:
    api = clean_api
    put = api.put(f"{PATH}/logs.*", {"policy": {"keep_for_ms": 5, "hold_bytes": None}})
    expected = {"pattern": "logs.*", "policy": {"keep_for_ms": 5, "hold_bytes": None}}
    assert (put.status, put.json) == (200, {**expected, "source": "stored"})
    api.put(f"{PATH}/a%3F", {"policy": {"when_full": "refuse"}})
    listed = api.get(PATH).json["topic_defaults"]
    assert [each["pattern"] for each in listed] == ["a?", "logs.*"]
    api.put(f"{PATH}/logs.*", {"policy": {"ephemeral": True}})
    assert api.get(PATH).json["topic_defaults"][1]["policy"] == {"ephemeral": True}
    assert api.delete(f"{PATH}/logs.*").status == 204
    api.delete(f"{PATH}/logs.*").problem(404, "unknown_topic_default")
    assert [each["pattern"] for each in api.get(PATH).json["topic_defaults"]] == ["a?"]


def test_a_new_topic_has_the_defaults_unless_its_creator_says_otherwise(
    clean_api: Client, topic: str
) -> None:
    api = clean_api
    api.put(f"{PATH}/{topic}*", {"policy": {"keep_for_ms": 5, "needs_subscriber": True}})
    body = {"name": topic, "policy": {"keep_for_ms": 7}}
    policy = api.post("/v1/topics", body).json["policy"]
    assert (policy["keep_for_ms"], policy["needs_subscriber"]) == (7, True)
    policy = api.post("/v1/topics", {"name": f"{topic}-2"}).json["policy"]
    assert (policy["keep_for_ms"], policy["needs_subscriber"]) == (5, True)
    policy = api.put(f"/v1/topics/{topic}-3").json["policy"]
    assert (policy["keep_for_ms"], policy["needs_subscriber"]) == (5, True)
    api.post(f"/v1/topics/{topic}-4/messages", {"value": "x"}).problem(409, "no_subscriber")


def test_an_ephemeral_topic_comes_back_ephemeral_r4(clean_api: Client, topic: str) -> None:
    api = clean_api
    api.put(f"{PATH}/{topic}", {"policy": {"ephemeral": True}})
    subscription = f"/v1/subscriptions/daisy/topics/{topic}"
    for _ in range(3):
        api.get(f"/v1/topics/{topic}").problem(404, "unknown_topic")
        assert api.put(subscription).status == 201
        assert api.get(f"/v1/topics/{topic}").json["policy"]["ephemeral"]
        api.delete(subscription)


@pytest.mark.parametrize(
    ("pattern", "body", "code", "hint"),
    [
        ("a%20b", {"policy": {"ephemeral": True}}, "invalid_pattern", "is not a pattern"),
        ("*", {"policy": {}}, "invalid_policy", "name at least one setting"),
        ("*", {"policy": {"ephemerel": True}}, "invalid_request", "did you mean ephemeral?"),
        ("*", {"policy": {"keep_for_ms": -1}}, "invalid_request", "null is for no bound"),
        ("*", {"polcy": {}}, "invalid_request", "did you mean policy?"),
        ("*", {}, "invalid_request", "missing required field `policy`"),
    ],
)
def test_what_cannot_be_a_default_is_refused(
    api: Client, pattern: str, body: object, code: str, hint: str
) -> None:
    assert hint in api.put(f"{PATH}/{pattern}", body).problem(400, code)
    assert api.get(PATH).json == {"topic_defaults": []}


def test_patterns_are_bounded_and_those_of_the_settings_are_marked() -> None:
    settings = BrokerSettings(topic_defaults={"*": {"ephemeral": True}})
    with serving(settings=settings) as served:
        api = served.client()
        (only,) = api.get(PATH).json["topic_defaults"]
        assert only == {"pattern": "*", "policy": {"ephemeral": True}, "source": "settings"}
        assert "broker's settings" in api.delete(f"{PATH}/*").problem(400, "invalid_request")
        for number in range(limits.TOPIC_DEFAULTS):
            assert api.put(f"{PATH}/{number}", {"policy": {"keep_bytes": 1}}).status == 200
        api.put(f"{PATH}/more", {"policy": {"keep_bytes": 1}}).problem(429, "limit_reached")
        assert len(api.get(PATH).json["topic_defaults"]) == limits.TOPIC_DEFAULTS + 1
