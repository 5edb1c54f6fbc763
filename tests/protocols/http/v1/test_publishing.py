"""Publishing over HTTP: every way to write a message, and repeats that add nothing."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable
from typing import Any

import pytest

from quackmq import limits
from quackmq.model.partitioning import Partitioner, choose_partition
from quackmq.protocols.http import limits as http_limits
from quackmq.protocols.http.types import Request
from quackmq.protocols.http.v1.publishing import publish
from tests.protocols.http.v1.serving import CALLER, Answered, Client, Serving

NDJSON = {"content-type": "application/x-ndjson"}
RAW = {"content-type": "application/octet-stream"}


def read_all(api: Client, topic: str, partition: int = 0) -> list[dict[str, Any]]:
    page = api.get(f"/v1/topics/{topic}/partitions/{partition}/messages")
    assert page.status == 200
    return list(page.json["messages"])


def values(api: Client, topic: str, partition: int = 0) -> list[str]:
    return [each["value"] for each in read_all(api, topic, partition)]


def post_raw(api: Client, path: str, body: bytes, **headers: str) -> Answered:
    said = {name.replace("_", "-"): text for name, text in headers.items()}
    return api.ask("POST", path, body=body, headers=said)


# --- ways to write a message -----------------------------------------------------------------


def test_one_message_is_published_and_its_place_is_told(api: Client, topic: str) -> None:
    answer = api.post(f"/v1/topics/{topic}/messages", {"value": "quack", "key": "pond"})
    assert answer.status == 201
    (place,) = answer.json["messages"]
    assert (place["partition"], place["offset"]) == (0, 0)
    assert answer.json["repeated"] is False
    (message,) = read_all(api, topic)
    assert message["id"] == place["id"]
    assert (message["topic"], message["partition"], message["offset"]) == (topic, 0, 0)
    assert (message["key"], message["value"], message["headers"]) == ("pond", "quack", [])
    assert message["timestamp_ms"] > 1_700_000_000_000
    assert message["lost"] == 0


def test_many_are_published_in_order(api: Client, topic: str) -> None:
    places = api.publish(topic, "a", "b", "c")
    assert [place["offset"] for place in places] == [0, 1, 2]
    assert values(api, topic) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ('"text"', "text"),
        ('"\\u00e4\\n\\ud83e\\udd86"', "ä\n🦆"),
        ('""', ""),
        ('{"a" : [1, 2.50, null]}', '{"a" : [1, 2.50, null]}'),
        ("[ ]", "[ ]"),
        ("17", "17"),
        ("1e400", "1e400"),
        ("true", "true"),
    ],
)
def test_text_is_published_as_it_is_and_other_json_as_its_text(
    api: Client, topic: str, sent: str, kept: str
) -> None:
    body = f' {{"value":  {sent} , "key": null}} '.encode()
    assert post_raw(api, f"/v1/topics/{topic}/messages", body).status == 201
    (message,) = read_all(api, topic)
    assert (message["value"], message["key"]) == (kept, None)


def test_no_value_is_not_the_same_as_an_empty_one(api: Client, topic: str) -> None:
    api.publish(topic, None, "")
    assert values(api, topic) == [None, ""]


def test_bytes_that_are_no_text_go_and_come_as_base64(api: Client, topic: str) -> None:
    data, key = base64.b64encode(b"\xff\x00\xfe").decode(), base64.b64encode(b"\x80").decode()
    header = {"name": "h", "value_base64": base64.b64encode(b"\xc0").decode()}
    sent = {"value_base64": data, "key_base64": key, "headers": [header]}
    assert api.post(f"/v1/topics/{topic}/messages", sent).status == 201
    (message,) = read_all(api, topic)
    assert {name: message[name] for name in sent} == sent
    assert "value" not in message and "key" not in message


def test_base64_of_text_comes_back_as_text(api: Client, topic: str) -> None:
    sent = {"value_base64": base64.b64encode("ä".encode()).decode()}
    api.post(f"/v1/topics/{topic}/messages", sent)
    assert values(api, topic) == ["ä"]


def test_headers_are_kept_in_order_also_where_a_name_repeats(api: Client, topic: str) -> None:
    headers = [
        {"name": "a", "value": "1"},
        {"name": "b", "value": None},
        {"name": "a", "value": "2"},
    ]
    path = f"/v1/topics/{topic}/messages"
    api.post(path, {"value": "x", "headers": headers})
    api.post(path, {"value": "y", "headers": {"trace": "17", "kind": "quack"}})
    first, second = read_all(api, topic)
    assert first["headers"] == headers
    assert second["headers"] == [
        {"name": "trace", "value": "17"},
        {"name": "kind", "value": "quack"},
    ]


def test_lines_are_published_together(api: Client, topic: str) -> None:
    body = b'{"value": "a"}\n\n{"value": {"b":1}, "key": "k"}\r\n{"value": "c"}'
    answer = post_raw(api, f"/v1/topics/{topic}/messages", body, **NDJSON)
    assert answer.status == 201
    assert len(answer.json["messages"]) == 3
    assert values(api, topic) == ["a", '{"b":1}', "c"]


def test_raw_bytes_are_one_value(api: Client, topic: str) -> None:
    path = f"/v1/topics/{topic}/messages"
    assert post_raw(api, f"{path}?key=p%C3%B6nd", b"\x00{not json", **RAW).status == 201
    assert post_raw(api, f"{path}?key_base64=/w==", b"", **RAW).status == 201
    first, second = read_all(api, topic)
    assert (first["key"], first["value"]) == ("pönd", "\x00{not json")
    assert (second["key_base64"], second["value"]) == ("/w==", "")


def test_a_partition_is_chosen_by_name_or_by_key(api: Client, topic: str) -> None:
    api.post("/v1/topics", {"name": topic, "partitions": 4})
    path = f"/v1/topics/{topic}/messages"
    assert api.post(path, {"value": "a", "partition": 3}).json["messages"][0]["partition"] == 3
    assert post_raw(api, f"{path}?partition=2", b"b", **RAW).json["messages"][0]["partition"] == 2
    both = {"messages": [{"value": "c"}, {"value": "d"}], "partition": 1}
    assert [each["partition"] for each in api.post(path, both).json["messages"]] == [1, 1]
    keyed = {"messages": [{"value": str(n), "key": f"k{n}"} for n in range(8)]}
    places = api.post(path, keyed).json["messages"]
    again = api.post(path, keyed).json["messages"]
    chosen = [place["partition"] for place in places]
    assert len(set(chosen)) > 1
    assert [place["partition"] for place in again] == chosen


# --- repeats ---------------------------------------------------------------------------------


def test_the_same_idempotency_key_is_answered_like_the_first_time(api: Client, topic: str) -> None:
    def put(key: str) -> Answered:
        body = json.dumps({"messages": [{"value": "a"}, {"value": "b"}]}).encode()
        return post_raw(api, f"/v1/topics/{topic}/messages", body, idempotency_key=key)

    first, second, other = put("k-1"), put("k-1"), put("k-2")
    assert (first.status, second.status, other.status) == (201, 200, 201)
    assert second.json == {"messages": first.json["messages"], "repeated": True}
    assert len(read_all(api, topic)) == 4


@pytest.mark.parametrize("partitioner", Partitioner)
def test_a_key_goes_where_the_topics_partitioner_says(
    api: Client, topic: str, partitioner: Partitioner
) -> None:
    policy = {"partitioner": partitioner}
    api.post("/v1/topics", {"name": topic, "partitions": 5, "policy": policy})
    path = f"/v1/topics/{topic}/messages"
    keys = ["k", "pond", "鴨", "duck" * 100, *map(str, range(20))]
    expected = [choose_partition(partitioner, key.encode(), 5) for key in keys]
    one_by_one = [api.post(path, {"value": "quack", "key": key}).json for key in keys]
    assert [each["messages"][0]["partition"] for each in one_by_one] == expected
    together = api.post(path, {"messages": [{"value": "quack", "key": key} for key in keys]}).json
    assert [each["partition"] for each in together["messages"]] == expected


def test_a_key_for_repeats_is_known_again_in_a_topic_that_has_grown(
    api: Client, topic: str
) -> None:
    api.post("/v1/topics", {"name": topic, "partitions": 2})
    messages = [{"value": "quack", "key": str(number)} for number in range(8)]
    body = json.dumps({"messages": messages}).encode()

    def post() -> Any:
        return post_raw(api, f"/v1/topics/{topic}/messages", body, idempotency_key="once")

    first = post()
    api.ask("PATCH", f"/v1/topics/{topic}", {"partitions": 3})
    again = post()
    assert (first.status, again.status) == (201, 200)
    assert again.json == {"messages": first.json["messages"], "repeated": True}


def test_a_key_used_for_another_number_of_messages_is_a_conflict(api: Client, topic: str) -> None:
    path = f"/v1/topics/{topic}/messages"
    assert post_raw(api, path, b'{"value": 1}', idempotency_key="k").status == 201
    body = b'{"messages": [{"value": 1}, {"value": 2}]}'
    post_raw(api, path, body, idempotency_key="k").problem(409, "conflict")
    assert len(read_all(api, topic)) == 1


def test_a_numbered_message_is_taken_once_r2(api: Client, topic: str) -> None:
    path = f"/v1/topics/{topic}/messages?publisher=till&sequence="
    assert api.get(f"/v1/topics/{topic}/publishers/till").status == 404
    assert api.post(f"{path}0", {"value": "a"}).status == 201
    assert api.post(f"{path}5", {"value": "b"}).status == 201
    for number in (5, 3):
        repeat = api.post(f"{path}{number}", {"value": "never"})
        assert repeat.status == 200
        assert repeat.json["repeated"] is True
    assert values(api, topic) == ["a", "b"]
    last = api.get(f"/v1/topics/{topic}/publishers/till").json
    assert last == {"publisher": "till", "last_sequence": 5}
    assert api.get(f"/v1/topics/{topic}/publishers/other").json["last_sequence"] is None


# --- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"value": NaN}', "not valid JSON"),
        (b'{"value": "\xff"}', "UTF-8"),
        (b'{"value": ["\xff"]}', "UTF-8"),
        (b'{"value": "\\ud800"}', "not valid JSON"),
        (b'{"value": ' + b"[" * 100_000, "nested"),
        (b"{}", "neither value nor value_base64"),
        (b'{"value": 1, "value_base64": ""}', "both value and value_base64"),
        (b'{"value": 1, "key": "a", "key_base64": ""}', "both"),
        (b'{"value_base64": "a"}', "value_base64"),
        (b'{"value_base64": "!!!!"}', "value_base64"),
        (b'{"value_base64": "AAAA=="}', "padding"),
        (b'{"value_base64": "\\u00e9"}', "value_base64"),
        (b'{"value": 1, "color": 1}', "color"),
        (b'{"value": 1, "headers": {"a": 1}}', "headers"),
        (b'{"value": 1, "headers": [{"value": "x"}]}', "name"),
        (b'{"value": 1, "partition": -1}', "partition"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": [{"value": 1}, {}]}', "messages[1]"),
        (b'{"messages": [{"value": 1}], "key": "a"}', "own fields"),
        (b'{"messages": [{"value": 1, "partition": 1}]}', "partition"),
    ],
)
def test_a_body_that_makes_no_sense_is_refused_and_nothing_published(
    api: Client, topic: str, body: bytes, says: str
) -> None:
    answer = post_raw(api, "/v1/topics/refused/messages", body)
    assert says in answer.problem(400, "invalid_request")
    assert api.get("/v1/topics/refused").status == 404


@pytest.mark.parametrize(
    ("query", "headers", "says"),
    [
        ("publisher=a", {}, "go together"),
        ("sequence=1", {}, "go together"),
        ("publisher=a&sequence=-1", {}, "sequence"),
        ("publisher=a&sequence=9223372036854775807", {}, "sequence"),
        ("publisher=" + "a" * 300 + "&sequence=1", {}, "1 to 245 characters"),
        ("publisher=a&sequence=1", {"idempotency-key": "k"}, ""),
        ("partition=x", {}, "partition"),
        ("key=a&key_base64=YQ==", {}, "both"),
        ("key_base64=a", {}, "key_base64"),
        ("", {"idempotency-key": "k" * (limits.IDEMPOTENCY_KEY_BYTES + 1)}, "key"),
        ("", {"idempotency-key": ""}, "key"),
    ],
)
def test_a_request_that_contradicts_itself_is_refused(
    api: Client, topic: str, query: str, headers: dict[str, str], says: str
) -> None:
    answer = api.ask("POST", f"/v1/topics/{topic}/messages?{query}", {"value": 1}, headers=headers)
    assert says in answer.problem(400, "invalid_request")


def test_two_partitions_in_one_request_are_refused(api: Client, topic: str) -> None:
    answer = api.post(f"/v1/topics/{topic}/messages?partition=0", {"value": 1, "partition": 1})
    answer.problem(400, "invalid_request")


def test_a_partition_that_is_not_there_is_not_found(api: Client, topic: str) -> None:
    api.post("/v1/topics", {"name": topic})
    answer = api.post(f"/v1/topics/{topic}/messages?partition=1", {"value": 1})
    answer.problem(404, "unknown_partition")


@pytest.mark.parametrize("name", ["a%20b", "..", "x" * 250, "a%2Fb", "%E2%82%AC"])
def test_a_topic_that_cannot_be_is_refused(api: Client, name: str) -> None:
    api.post(f"/v1/topics/{name}/messages", {"value": 1}).problem(400, "illegal_topic_name")


def test_lines_are_refused_by_their_number(api: Client, topic: str) -> None:
    path = f"/v1/topics/{topic}/messages"
    body = b'{"value": 1}\n\n{"value": }\n'
    assert "line 3" in post_raw(api, path, body, **NDJSON).problem(400, "invalid_request")
    post_raw(api, path, b"\n\n", **NDJSON).problem(400, "invalid_request")
    assert api.get(f"/v1/topics/{topic}").status == 404


def test_more_messages_than_a_request_may_have_are_refused(api: Client, topic: str) -> None:
    path = f"/v1/topics/{topic}/messages"
    lines = b'{"value":1}\n' * (http_limits.HTTP_MESSAGES + 1)
    post_raw(api, path, lines, **NDJSON).problem(400, "invalid_request")
    many = {"messages": [{"value": 1}] * (http_limits.HTTP_MESSAGES + 1)}
    api.post(path, many).problem(400, "invalid_request")
    assert api.get(f"/v1/topics/{topic}").status == 404


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/xml"]
)
def test_a_body_of_another_kind_is_refused_by_its_kind(
    api: Client, topic: str, content_type: str
) -> None:
    answer = post_raw(api, f"/v1/topics/{topic}/messages", b"value=1", content_type=content_type)
    assert "application/json" in answer.problem(415, "unsupported_media_type")


def test_a_body_larger_than_the_limit_is_refused_and_others_go_on(api: Client, topic: str) -> None:
    body = b"x" * (http_limits.HTTP_BODY_BYTES + 1)
    post_raw(api, f"/v1/topics/{topic}/messages", body, **RAW).problem(413, "record_too_large")
    assert post_raw(api, f"/v1/topics/{topic}/messages", b"small", **RAW).status == 201


def test_a_topics_policy_says_no_with_its_reason(api: Client, topic: str) -> None:
    policy = {"live_entries": 1, "when_full": "refuse"}
    api.post("/v1/topics", {"name": topic, "policy": policy})
    api.publish(topic, "a")
    path = f"/v1/topics/{topic}/messages"
    api.post(path, {"value": "b"}).problem(409, "topic_full")
    lonely = f"{topic}.lonely"
    api.post("/v1/topics", {"name": lonely, "policy": {"needs_subscriber": True}})
    api.post(f"/v1/topics/{lonely}/messages", {"value": "b"}).problem(409, "no_subscriber")


def test_lines_without_a_message_do_not_come_without_end(api: Client, topic: str) -> None:
    """Each costs the loop that all connections share a little time."""
    path = f"/v1/topics/{topic}/messages"
    body = b'{"value": 1}' + b"\n" * (2 * http_limits.HTTP_MESSAGES + 1)
    assert "lines" in post_raw(api, path, body, **NDJSON).problem(400, "invalid_request")
    assert post_raw(api, path, body[:-1], **NDJSON).status == 201


def test_between_the_steps_of_a_large_request_others_have_their_turn(
    served: Serving, api: Client, topic: str
) -> None:
    async def turns_meanwhile(count: int) -> int:
        messages = [{"value": str(number)} for number in range(count)]
        body = json.dumps({"messages": messages}).encode()
        nobody: Any = None
        asked = Request(served.broker, CALLER, "POST", "/", {"topic": topic}, b"", [], body, nobody)
        answer = publish(asked)
        assert isinstance(answer, Awaitable), "many messages need a task"
        publishing = asyncio.ensure_future(answer)
        turns = 0
        while not publishing.done():
            await asyncio.sleep(0)
            turns += 1
        assert (await publishing).status == 201
        return turns

    api.publish(topic, "first")
    usual = served.run(turns_meanwhile(limits.HTTP_PAGE_ITEMS))
    assert served.run(turns_meanwhile(limits.HTTP_PAGE_ITEMS + 1)) == usual + 2
