"""Staging over HTTP: many writers, one commit, nothing twice."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.kit.support import batch_of
from tests.protocols.http.v1.serving import Answered, Client

BYTES = {"content-type": "application/octet-stream"}


def staged(
    api: Client, key: str, topic: str, *values: str, part: str = "a", number: int = 0
) -> Answered:
    path = f"/v1/stages/{key}/parts/{part}/{number}?topic={topic}&partition=0&timestamp_ms=17"
    return api.put(path, {"messages": [{"value": value} for value in values]})


def part_summary(api: Client, key: str, topic: str, *values: str, **options: Any) -> dict[str, Any]:
    answer = staged(api, key, topic, *values, **options)
    assert answer.status == 200, answer
    return dict(answer.json)


def read(api: Client, topic: str, partition: int = 0) -> list[str]:
    page = api.get(f"/v1/topics/{topic}/partitions/{partition}/messages").json
    return [each["value"] for each in page["messages"]]


@pytest.fixture
def target(api: Client, topic: str) -> str:
    assert api.post("/v1/topics", {"name": topic, "partitions": 2}).status == 201
    return topic


def test_what_is_staged_is_seen_when_it_is_committed_all_at_once(api: Client, target: str) -> None:
    key = f"{target}%2F17"
    first = part_summary(api, key, target, "a", "b")
    second = part_summary(api, key, target, "c", part="b")
    assert read(api, target) == []
    described = api.get(f"/v1/stages/{key}").json
    assert (described["key"], described["part_count"]) == (f"{target}/17", 2)
    assert described["parts"] == [first, second]
    committed = api.post(f"/v1/stages/{key}/commit", {"receipts": [first, second]})
    assert committed.status == 200
    assert (committed.json["records"], committed.json["repeated"]) == (3, False)
    assert read(api, target) == ["a", "b", "c"]
    described = api.get(f"/v1/stages/{key}").json
    assert described["commit"] == committed.json


def test_a_call_and_a_commit_that_are_repeated_add_nothing(api: Client, target: str) -> None:
    first = part_summary(api, target, target, "a")
    assert part_summary(api, target, target, "a") == first
    api.post(f"/v1/stages/{target}/commit")
    again = api.post(f"/v1/stages/{target}/commit", {"receipts": [first]})
    assert (again.status, again.json["repeated"]) == (200, True)
    assert read(api, target) == ["a"]
    other = {"receipts": [{**first, "calls": 2}]}
    api.post(f"/v1/stages/{target}/commit", other).problem(409, "stage_conflict")
    staged(api, target, target, "late", number=1).problem(409, "stage_committed")


def test_a_call_that_is_not_the_same_again_or_comes_too_soon_is_a_conflict(
    api: Client, target: str
) -> None:
    part_summary(api, target, target, "a")
    staged(api, target, target, "b").problem(409, "stage_conflict")
    staged(api, target, target, "c", number=2).problem(409, "stage_conflict")


def test_record_batches_are_staged_as_they_are(api: Client, target: str) -> None:
    body = bytes(batch_of(b"a", b"b").view) + bytes(batch_of(b"c").view)
    path = f"/v1/stages/{target}/parts/x/0?topic={target}&partition=1"
    answer = api.ask("PUT", path, body=body, headers=BYTES)
    assert answer.status == 200
    assert api.post(f"/v1/stages/{target}/commit").json["records"] == 3
    assert read(api, target, 1) == ["a", "b", "c"]


def test_parts_that_are_not_named_come_to_nothing(api: Client, target: str) -> None:
    part_summary(api, target, target, "failed", part="try 1".replace(" ", "%20"))
    good = part_summary(api, target, target, "good", part="try%202")
    assert good["part"] == "try 2"
    api.post(f"/v1/stages/{target}/commit", {"receipts": [good]})
    assert read(api, target) == ["good"]


def test_an_aborted_stage_is_gone(api: Client, target: str) -> None:
    part_summary(api, target, target, "a")
    assert api.delete(f"/v1/stages/{target}").status == 204
    for answer in (
        api.delete(f"/v1/stages/{target}"),
        api.get(f"/v1/stages/{target}"),
        api.post(f"/v1/stages/{target}/commit"),
    ):
        answer.problem(404, "unknown_stage")
    assert read(api, target) == []


def test_stages_and_their_parts_are_listed_a_page_at_a_time(api: Client, target: str) -> None:
    keys = [f"zz.{number}" for number in range(5)]
    for key in keys:
        part_summary(api, key, target, "a")
    seen, after = [], "zz"
    while after:
        page = api.get(f"/v1/stages?limit=2&after={after}").json
        seen += [each["key"] for each in page["stages"]]
        after = page["next"]
    assert seen == keys
    for part in "bcd":
        part_summary(api, "zz.0", target, "a", part=part)
    page = api.get("/v1/stages/zz.0?limit=3").json
    assert ([each["part"] for each in page["parts"]], page["next_part"]) == (["a", "b", "c"], "c")
    page = api.get("/v1/stages/zz.0?limit=3&after=c").json
    assert ([each["part"] for each in page["parts"]], page["next_part"]) == (["d"], None)


@pytest.mark.parametrize(
    ("query", "body", "status", "code"),
    [
        ("topic={}&partition=0", {"messages": [{"value": 1}]}, 400, "invalid_request"),
        ("topic={}&timestamp_ms=1", {"messages": [{"value": 1}]}, 400, "invalid_request"),
        ("partition=0&timestamp_ms=1", {"messages": [{"value": 1}]}, 400, "invalid_request"),
        (
            "topic=none&partition=0&timestamp_ms=1",
            {"messages": [{"value": 1}]},
            404,
            "unknown_topic",
        ),
        (
            "topic={}&partition=2&timestamp_ms=1",
            {"messages": [{"value": 1}]},
            404,
            "unknown_partition",
        ),
        ("topic={}&partition=0&timestamp_ms=1", {"messages": []}, 400, "invalid_request"),
        ("topic={}&partition=0&timestamp_ms=1", {"messages": [{}]}, 400, "invalid_request"),
    ],
)
def test_a_call_that_cannot_be_staged_begins_no_stage(
    api: Client, target: str, query: str, body: object, status: int, code: str
) -> None:
    path = f"/v1/stages/{target}/parts/a/0?{query.format(target)}"
    api.put(path, body).problem(status, code)
    api.get(f"/v1/stages/{target}").problem(404, "unknown_stage")


@pytest.mark.parametrize(
    "body", [b"", b"nonsense", bytes(60), bytes(batch_of(b"a").view)[:-1], b"\xff" * 100]
)
def test_bytes_that_are_no_batches_are_refused(api: Client, target: str, body: bytes) -> None:
    path = f"/v1/stages/{target}/parts/a/0?topic={target}&partition=0"
    answer = api.ask("PUT", path, body=body, headers=BYTES)
    assert answer.status == 400
    assert answer.json["code"] in ("corrupt_batch", "unsupported_batch", "invalid_request")


def test_a_number_or_a_name_that_cannot_be_is_refused(api: Client, target: str) -> None:
    tail = f"?topic={target}&partition=0&timestamp_ms=1"
    body = {"messages": [{"value": base64.b64encode(b"x").decode()}]}
    for path in ("a/parts/b/-1", "a/parts/b/x", f"{'k' * 256}/parts/b/0", f"a/parts/{'p' * 256}/0"):
        api.put(f"/v1/stages/{path}{tail}", body).problem(400, "invalid_request")


# --- several partitions in one call, and series ---------------------------------------------------


def framed(*batches: tuple[int, bytes]) -> bytes:
    return b"".join(
        partition.to_bytes(4, "big") + bytes(batch_of(value).view) for partition, value in batches
    )


def test_a_call_may_stage_for_many_partitions(api: Client, target: str) -> None:
    path = f"/v1/stages/{target}/parts/a/0?topic={target}"
    body = framed((1, b"one"), (0, b"zero"), (1, b"two"))
    assert api.ask("PUT", path, body=body, headers=BYTES).status == 200
    assert api.post(f"/v1/stages/{target}/commit").json["records"] == 3
    assert (read(api, target), read(api, target, 1)) == (["zero"], ["one", "two"])


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"\0\0", "corrupt_batch"),
        (framed((0, b"x")) + b"\0\0\0\0", "corrupt_batch"),
        (framed((0, b"x"))[:-1], "corrupt_batch"),
        (framed((2, b"x")), "unknown_partition"),
        (framed((2**32 - 1, b"x")), "unknown_partition"),
    ],
)
def test_partitions_before_batches_are_checked(
    api: Client, target: str, body: bytes, code: str
) -> None:
    path = f"/v1/stages/{target}/parts/a/0?topic={target}"
    answer = api.ask("PUT", path, body=body, headers=BYTES)
    assert answer.json["code"] == code
    path = f"/v1/stages/{target}/parts/a/0?topic={target}&timestamp_ms=1"
    assert api.put(path, {"messages": [{"value": "x"}]}).status == 400


def test_the_turn_of_a_series_is_committed_once(api: Client, target: str) -> None:
    series = f"{target}-query"
    options = f"topic={target}&partition=0&series={series}&turn=4"
    path = f"/v1/stages/{target}/parts/a/0?{options}"
    body = bytes(batch_of(b"once").view)
    first = api.ask("PUT", path, body=body, headers=BYTES).json
    turn = {"receipts": [first], "series": series, "turn": 4}
    assert not api.post(f"/v1/stages/{target}/commit", turn).json["repeated"]
    assert api.post("/v1/stages/another/commit", turn).json["repeated"]
    path = f"/v1/stages/another/parts/b/0?{options}"
    api.ask("PUT", path, body=body, headers=BYTES).problem(409, "stage_committed")
    path = path.replace("turn=4", "turn=3")
    api.ask("PUT", path, body=body, headers=BYTES).problem(409, "turn_outdated")
    api.post("/v1/stages/another/commit", {**turn, "turn": 3}).problem(409, "turn_outdated")
    assert read(api, target) == ["once"]
    known = api.get(f"/v1/series/{series}").json
    assert (known["series"], known["turn"], known["records"]) == (series, 4, 1)
    assert known["topics"] == [target]
    assert known in api.get("/v1/series?limit=1000").json["series"]
    assert api.delete(f"/v1/series/{series}").status == 204
    for method in (api.get, api.delete):
        assert method(f"/v1/series/{series}").status == 404
    for wrong in ({"series": series}, {"turn": 4}):
        assert api.post(f"/v1/stages/{target}/commit", wrong).status == 400
