"""What a subscription has lost, and who has yet to consume a message, over HTTP."""

from __future__ import annotations

from tests.protocols.http.v1.serving import Client, Serving


def overtaken(served: Serving, api: Client, topic: str) -> tuple[str, str]:
    """Subscribe, publish a and b, let the topic go of them by its policy, publish c; the path of
    the subscription, and the id of a."""
    policy = {"keep_until_consumed": True, "hold_for_ms": 0}
    assert api.post("/v1/topics", {"name": topic, "policy": policy}).status == 201
    path = f"/v1/subscriptions/puddles/topics/{topic}"
    assert api.put(path).status == 201
    first, _ = api.publish(topic, "a", "b")
    served.run(served.broker.clean())
    changes = {"policy": {"keep_until_consumed": False, "hold_for_ms": None}}
    assert api.ask("PATCH", f"/v1/topics/{topic}", changes).status == 200
    api.publish(topic, "c")
    return path, first["id"]


def test_a_loss_comes_with_the_message_behind_it_until_that_is_named(
    served: Serving, api: Client, topic: str
) -> None:
    path, _ = overtaken(served, api, topic)
    assert api.get(f"{path}/lag").json == {"lag": 1, "lost": 2}
    message = api.post(f"{path}/get").json
    assert (message["value"], message["lost"]) == ("c", 2)
    assert message["lost_ranges"] == [{"first_offset": 0, "next_offset": 2}]
    assert api.post(f"{path}/get").json == message
    api.publish(topic, "d")
    after = api.post(f"{path}/get", {"last_id": message["id"]}).json
    assert (after["value"], after["lost"], "lost_ranges" in after) == ("d", 0, False)
    assert api.get(f"{path}/lag").json == {"lag": 1, "lost": 2}


def test_a_stream_tells_where_its_reader_has_lost_something(
    served: Serving, api: Client, topic: str
) -> None:
    _, last_id = overtaken(served, api, topic)
    client = served.client()
    headers = {"Last-Event-ID": last_id}
    client.connection.request("GET", f"/v1/topics/{topic}/events", headers=headers)
    answer = client.connection.getresponse()
    lines = iter(answer.readline, b"")
    data = next(line for line in lines if line.startswith(b"data: "))
    assert b'"lost":1' in data
    assert b'"lost_ranges":[{"first_offset":1,"next_offset":2}]' in data


def test_d3_of_each_message_it_is_shown_how_many_have_yet_to_consume_it(
    served: Serving, api: Client, topic: str
) -> None:
    policy = {"keep_until_consumed": True}
    api.post("/v1/topics", {"name": topic, "policy": policy})
    for name in ("one", "two"):
        api.put(f"/v1/subscriptions/{name}/topics/{topic}")
    api.publish(topic, "a", "b")
    messages = f"/v1/topics/{topic}/partitions/0/messages"
    shown = api.get(messages).json["messages"]
    assert [each["consumers_left"] for each in shown] == [2, 2]
    one = f"/v1/subscriptions/one/topics/{topic}"
    first = api.post(f"{one}/get").json
    assert first["consumers_left"] == 2
    api.post(f"{one}/ack", {"id": first["id"]})
    shown = api.get(messages).json["messages"]
    assert [each["consumers_left"] for each in shown] == [1, 2]
    assert api.ask("DELETE", f"/v1/subscriptions/two/topics/{topic}").status == 204
    served.run(served.broker.clean())
    page = api.get(messages).json
    assert page["first_offset"] == 1, "the document's bias: so many are consumed and gone"
    assert [each["consumers_left"] for each in page["messages"]] == [1]


def test_elsewhere_nobody_counts(api: Client, topic: str) -> None:
    api.publish(topic, "a")
    (message,) = api.get(f"/v1/topics/{topic}/partitions/0/messages").json["messages"]
    assert "consumers_left" not in message
