"""Pushed subscriptions as HTTP shows them: listed, with their lag and counts, and ended."""

from __future__ import annotations

from quackmq.broker import Caller, Terms
from tests.protocols.http.v1.serving import Client, Serving

_CALLER = Caller("test")


def test_a_pushed_subscription_is_listed_with_its_terms_lag_and_counts(
    served: Serving, api: Client, topic: str
) -> None:
    path = f"/v1/subscriptions/daisy/topics/{topic}"
    api.post("/v1/topics", {"name": topic})
    pushing = served.broker.pushing
    served.run(pushing.subscribe(_CALLER, "daisy", topic, Terms("live", lease_ms=500)))
    pushed = {"reading": "live", "lease_ms": 500, "outstanding": 10_000, "window": 100}
    shown = api.get(path).json
    assert (shown["pushed"], shown["next_offsets"]) == (pushed, [0])
    (listed,) = api.get(f"/v1/subscriptions?topic={topic}").json["subscriptions"]
    assert (listed["name"], listed["pushed"]) == ("daisy", pushed)
    api.publish(topic, "a", "b", "c")

    async def take_two_and_ack_one() -> None:
        channel = await pushing.open(_CALLER, "daisy", topic, lambda: None)
        first, _ = await channel.take(2)
        channel.ack(first.partition, first.offset)
        await channel.close()

    served.run(take_two_and_ack_one())
    lag = {"lag": 2, "lost": 0, "outstanding": 1, "acked": 1, "skipped": 0}
    assert api.get(f"{path}/lag").json == lag


def test_a_pushed_name_is_not_used_by_last_id_and_can_be_ended(
    served: Serving, api: Client, topic: str
) -> None:
    path = f"/v1/subscriptions/donald/topics/{topic}"
    api.post("/v1/topics", {"name": topic})
    served.run(served.broker.pushing.subscribe(_CALLER, "donald", topic))
    for answer in (api.put(path), api.post(f"{path}/get")):
        assert answer.status == 409
        assert "push subscription" in answer.json["detail"]
    assert api.ask("DELETE", path).status == 204
    assert api.get(f"{path}/lag").status == 404
    assert api.put(path).status == 201
    assert "pushed" not in api.get(path).json


def test_receipts_are_asked_for_of_a_pushed_one_that_is_there_s5(
    served: Serving, api: Client, topic: str
) -> None:
    served.run(served.broker.pushing.subscribe(_CALLER, "gladstone", topic))
    path = f"/v1/subscriptions/gladstone/topics/{topic}"
    asked = api.put(path, {"receipts": True})
    assert (asked.status, asked.json["receipts"], asked.json["next_offsets"]) == (200, True, [0])
    assert asked.json["pushed"]["reading"] == "every"
    assert api.put(path, {"start": "beginning"}).status == 409, "it cannot be subscribed so"
    assert api.get(path).json["receipts"]
    assert not api.put(path, {"receipts": False}).json["receipts"]
