"""The archive over HTTP: files listed, kept, read by range and replaced."""

from __future__ import annotations

import http.client
import io
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quackmq import limits
from quackmq.archive.parquet.rows import RowsWriter
from quackmq.model.topic import PartitionKey
from quackmq.protocols.http import limits as http_limits
from quackmq.protocols.http.errors import HttpFailure
from quackmq.protocols.http.v1.archive import parse_range
from tests.kit.tables import each
from tests.protocols.http.v1.serving import CALLER, Answered, Client, Serving, serving

HOUR_MS = 3_600_000


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """In the place of the one without an archive."""
    with serving(directory=tmp_path_factory.mktemp("pond")) as running:
        yield running


@pytest.fixture
def archived(api: Client, topic: str) -> str:
    """A topic of two partitions: four files of two messages in the first, two more in its log."""
    policy = {"archive_after_ms": None, "archive_bytes": None}
    assert api.post("/v1/topics", {"name": topic, "partitions": 2, "policy": policy}).status == 201
    for number in range(4):
        api.publish(topic, f"{number}a", f"{number}b", query="?partition=0")
        done = api.post(f"/v1/topics/{topic}/archive/now").json
        assert (done["files"], done["records"], done["quarantined"]) == (1, 2, 0)
    api.publish(topic, "4a", "4b", query="?partition=0")
    return topic


def listed(api: Client, topic: str) -> dict[str, Any]:
    """The first partition."""
    answer = api.get(f"/v1/topics/{topic}/archive")
    assert answer.status == 200, answer
    return dict(answer.json["partitions"][0])


def plan(api: Client, topic: str, **fields: Any) -> dict[str, Any]:
    answer = api.post(f"/v1/topics/{topic}/archive/plans", {"for_ms": HOUR_MS, **fields})
    assert answer.status == 201, answer
    return dict(answer.json)


def file_path(topic: str, name: str, partition: int = 0) -> str:
    return f"/v1/topics/{topic}/archive/partitions/{partition}/files/{name}"


# --- listing and plans ---------------------------------------------------------------------------


def test_files_are_listed_by_partition_with_where_the_log_goes_on(
    api: Client, archived: str
) -> None:
    found = api.get(f"/v1/topics/{archived}/archive").json
    assert (found["topic"], found["next_partition"]) == (archived, None)
    assert found["topic_id"] == api.get(f"/v1/topics/{archived}").json["id"]
    first, second = found["partitions"]
    offsets = ("first_offset", "next_offset", "log_first_offset", "end_offset")
    assert [first[name] for name in offsets] == [0, 8, 8, 10]
    assert [(file["first_offset"], file["records"]) for file in first["files"]] == [
        (0, 2),
        (2, 2),
        (4, 2),
        (6, 2),
    ]
    assert (second["files"], second["version"], second["end_offset"]) == ([], 0, 0)
    for file in first["files"]:
        path = Path(found["directory"]) / "0" / file["name"]
        assert path.stat().st_size == file["size"]
    only = api.get(f"/v1/topics/{archived}/archive?from_partition=1").json
    assert [each["partition"] for each in only["partitions"]] == [1]


def test_s1_a_plan_keeps_its_files_until_it_is_released(api: Client, archived: str) -> None:
    made = plan(api, archived)
    before = made["partitions"][0]
    merged = api.post(f"/v1/topics/{archived}/archive/merge").json
    assert (merged["merges"], merged["files_before"], merged["files_after"]) == (1, 4, 1)
    assert len(listed(api, archived)["files"]) == 1
    again = api.get(f"/v1/archive/plans/{made['plan']}").json
    assert again == made
    for file in before["files"]:
        answer = api.get(file_path(archived, file["name"]))
        assert (answer.status, len(answer.body)) == (200, file["size"])
    assert made["plan"] in {each["plan"] for each in api.get("/v1/archive/plans").json["plans"]}
    assert api.delete(f"/v1/archive/plans/{made['plan']}").status == 204
    api.get(file_path(archived, before["files"][0]["name"])).problem(404, "unknown_file")
    api.delete(f"/v1/archive/plans/{made['plan']}").problem(404, "unknown_plan")
    api.get(f"/v1/archive/plans/{made['plan']}").problem(404, "unknown_plan")


def test_a_plan_of_some_partitions_is_renewed(api: Client, archived: str) -> None:
    made = plan(api, archived, partitions=[1])
    assert [each["partition"] for each in made["partitions"]] == [1]
    path = f"/v1/archive/plans/{made['plan']}"
    renewed = api.post(path, {"for_ms": 2 * HOUR_MS}).json
    assert renewed["expires_ms"] > made["expires_ms"]
    assert (renewed["plan"], renewed["topic"]) == (made["plan"], archived)
    assert api.delete(path).status == 204
    api.post(path, {"for_ms": 1}).problem(404, "unknown_plan")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"for_ms": 0},
        {"for_ms": limits.ARCHIVE_PLAN_MS + 1},
        {"for_ms": "1"},
        {"for_ms": 1, "partitions": [-1]},
        {"for_ms": 1, "partitions": 0},
        {"for_ms": 1, "forms": 2},
    ],
)
def test_a_plan_that_cannot_be_is_refused(api: Client, archived: str, body: object) -> None:
    api.post(f"/v1/topics/{archived}/archive/plans", body).problem(400, "invalid_request")


def test_what_there_is_not_is_not_found(api: Client, archived: str) -> None:
    api.get("/v1/topics/nobody/archive").problem(404, "unknown_topic")
    api.post("/v1/topics/nobody/archive/now").problem(404, "unknown_topic")
    api.post("/v1/topics/nobody/archive/merge").problem(404, "unknown_topic")
    body = {"for_ms": 1, "partitions": [7]}
    api.post(f"/v1/topics/{archived}/archive/plans", body).problem(404, "unknown_partition")
    api.get(file_path(archived, "x.parquet", 7)).problem(404, "unknown_partition")


# --- bytes ---------------------------------------------------------------------------------------


def test_s1_a_worker_without_the_disk_reads_a_file_by_ranges(api: Client, archived: str) -> None:
    file = listed(api, archived)["files"][0]
    path = file_path(archived, file["name"])
    source = RangedFile(api, path, file["size"])
    table = pq.read_table(source)
    assert table.column("value").to_pylist() == [b"0a", b"0b"]
    assert source.asked > 1
    whole = api.get(path)
    assert (whole.status, whole.headers["content-type"]) == (200, "application/octet-stream")
    assert whole.headers["accept-ranges"] == "bytes"
    assert pq.read_table(pa.BufferReader(whole.body)).equals(table)


class RangedFile(io.RawIOBase):
    """A file of which every read is a request."""

    def __init__(self, api: Client, path: str, size: int) -> None:
        super().__init__()
        self._api, self._path, self._size = api, path, size
        self._position = 0
        self.asked = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = {0: 0, 1: self._position, 2: self._size}[whence] + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._size, self._position + size)
        if end <= self._position:
            return b""
        answer = self._api.get(self._path, range=f"bytes={self._position}-{end - 1}")
        assert answer.status == 206
        said = f"bytes {self._position}-{end - 1}/{self._size}"
        assert answer.headers["content-range"] == said
        self._position = end
        self.asked += 1
        return answer.body


def test_ranges_are_taken_as_http_has_them(api: Client, archived: str) -> None:
    file = listed(api, archived)["files"][0]
    path, size = file_path(archived, file["name"]), file["size"]
    whole = api.get(path)
    tag = whole.headers["etag"]
    for asked, wanted in (
        ("bytes=0-0", whole.body[:1]),
        ("bytes=4-", whole.body[4:]),
        ("bytes=-8", whole.body[-8:]),
        (f"bytes=-{size * 2}", whole.body),
        (f"bytes={size - 1}-{size + 10}", whole.body[-1:]),
    ):
        part = api.get(path, range=asked)
        assert (part.status, part.body) == (206, wanted)
    for asked in ("bytes=5-4", "lines=1-2", "bytes=-", "bytes=0-1,3-4", "bytes=a-b", "bytes=--1"):
        assert api.get(path, range=asked).status == 200
    same = api.ask("GET", path, headers={"range": "bytes=0-3", "if-range": tag})
    assert (same.status, same.body) == (206, b"PAR1")
    other = api.ask("GET", path, headers={"range": "bytes=0-3", "if-range": '"another"'})
    assert (other.status, other.body) == (200, whole.body)
    beyond = api.get(path, range=f"bytes={size}-")
    beyond.problem(416, "offset_out_of_range")
    assert beyond.headers["content-range"] == f"bytes */{size}"
    head = api.ask("HEAD", path)
    assert (head.status, head.headers["content-length"], head.body) == (200, str(size), b"")


def test_a_large_file_comes_in_bounded_pieces(
    served: Serving, api: Client, archived: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "ARCHIVE_CHUNK_BYTES", 100)
    file = listed(api, archived)["files"][0]
    answer = api.get(file_path(archived, file["name"]))
    assert len(answer.body) == file["size"] == int(answer.headers["content-length"])


def test_a_file_that_is_missing_or_cut_short_is_told_as_damage(api: Client, archived: str) -> None:
    found = api.get(f"/v1/topics/{archived}/archive").json
    gone, cut, *_ = [file["name"] for file in found["partitions"][0]["files"]]
    directory = Path(found["directory"]) / "0"
    (directory / gone).unlink()
    (directory / cut).write_bytes((directory / cut).read_bytes()[:100])
    for name in (gone, cut):
        assert name in api.get(file_path(archived, name)).problem(500, "damaged_data")
    assert api.get(file_path(archived, cut), range="bytes=0-3").body == b"PAR1"
    assert api.delete(f"/v1/topics/{archived}").status == 204


def test_a_file_that_breaks_off_is_not_taken_for_whole(
    api: Client, archived: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "ARCHIVE_CHUNK_BYTES", 100)
    found = api.get(f"/v1/topics/{archived}/archive").json
    name = found["partitions"][0]["files"][0]["name"]
    path = Path(found["directory"]) / "0" / name
    path.write_bytes(path.read_bytes()[:150])
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        api.get(file_path(archived, name))
    api.connection.close()
    assert api.delete(f"/v1/topics/{archived}").status == 204


@pytest.mark.parametrize(
    "name",
    [
        "_manifest.json",
        "..",
        "..%2F_topic.json",
        "%2e%2e%2f%2e%2e%2f_topic.json",
        "%2Fetc%2Fpasswd",
        "x.parquet",
        "0%00",
        "_new-x",
        "a" * 4_000,
    ],
)
def test_only_names_that_are_listed_are_files(api: Client, archived: str, name: str) -> None:
    api.get(file_path(archived, name)).problem(404, "unknown_file")


@each(
    ("header", "wanted"),
    [
        (None, None),
        ("bytes=0-9", (0, 10)),
        ("bytes=0-99999999999999999999", None),
        ("bytes=3-3", (3, 4)),
        ("bytes=9-", (9, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-0", 416),
        ("bytes=10-", 416),
        ("bytes=10-20", 416),
    ],
)
def test_a_range_is_one_of_bytes_that_are_there(header: str | None, wanted: object) -> None:
    if wanted == 416:
        with pytest.raises(HttpFailure):
            parse_range(header, 10)
    else:
        assert parse_range(header, 10) == wanted


# --- replacing -----------------------------------------------------------------------------------


def offer(found: dict[str, Any], name: str, first_offset: int, next_offset: int) -> None:
    """What Spark does at scale: the files of a partition in one."""
    directory = Path(found["directory"]) / "0"
    key = PartitionKey(uuid.UUID(found["topic_id"]), 0)
    with open(directory / name, "wb") as sink:
        writer = RowsWriter(key, found["topic"], first_offset, sink)
        for file in found["partitions"][0]["files"]:
            if file["first_offset"] >= first_offset and file["next_offset"] <= next_offset:
                for rows in pq.read_table(directory / file["name"]).to_batches():
                    writer.add(rows)
        writer.finish(next_offset, 1)


def replace(api: Client, topic: str, **fields: Any) -> Answered:
    return api.post(f"/v1/topics/{topic}/archive/partitions/0/replace", fields)


def test_files_made_beside_the_broker_take_the_place_of_others(api: Client, archived: str) -> None:
    made = plan(api, archived, offers=True)
    part = made["partitions"][0]
    old = [file["name"] for file in part["files"]]
    name = f"_offered-{made['plan']}-part.0.new"
    offer(made, name, 0, 8)
    answer = replace(api, archived, version=part["version"], old=old, new=[name])
    assert answer.status == 200, answer
    (file,) = answer.json["files"]
    assert (file["first_offset"], file["next_offset"], file["records"]) == (0, 8, 8)
    page = api.get(f"/v1/topics/{archived}/partitions/0/messages").json
    assert [each["value"] for each in page["messages"]] == [
        f"{number}{letter}" for number in range(5) for letter in "ab"
    ]
    replace(api, archived, version=part["version"], old=old, new=[name]).problem(
        400, "invalid_request"
    )
    assert api.delete(f"/v1/archive/plans/{made['plan']}").status == 204


def test_what_does_not_hold_the_same_is_refused_and_nothing_changes(
    api: Client, archived: str
) -> None:
    made = plan(api, archived, offers=True)
    part = made["partitions"][0]
    old = [file["name"] for file in part["files"]]
    name = f"_offered-{made['plan']}-1.new"
    offer(made, name, 0, 6)
    version = part["version"]
    said = replace(api, archived, version=version, old=old, new=[name])
    assert "cannot be replaced" in said.problem(400, "invalid_request")
    future = replace(api, archived, version=version + 1, old=old[:3], new=[name])
    future.problem(409, "state_changed")
    stranger = f"_offered-{'0' * 32}-1.new"
    replace(api, archived, version=version, old=old, new=[stranger]).problem(404, "unknown_plan")
    for wrong in ("../x.parquet", "x.parquet", old[0]):
        replace(api, archived, version=version, old=old, new=[wrong]).problem(
            400, "invalid_request"
        )
    replace(api, archived, version=version, old=[], new=[name]).problem(400, "invalid_request")
    assert listed(api, archived)["version"] == version
    assert replace(api, archived, version=version, old=old[:3], new=[name]).status == 200


# --- health --------------------------------------------------------------------------------------


def test_a_stuck_archive_is_named_and_keeps_nobody_from_publishing(
    api: Client, archived: str
) -> None:
    assert api.get("/v1/health").json["archive"]["status"] == "well"
    found = api.get(f"/v1/topics/{archived}/archive").json
    name = found["partitions"][0]["files"][1]["name"]
    path = Path(found["directory"]) / "0" / name
    data = bytearray(path.read_bytes())
    path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
    assert api.post(f"/v1/topics/{archived}/archive/merge").json["merges"] == 0
    for where in ("/v1/health", "/v1/ready"):
        answer = api.get(where)
        health = answer.json["archive"]
        assert (answer.status, health["status"]) == (200, "stuck")
        assert any(name in problem for problem in health["problems"])
        assert health["files_archived"] >= 4
    api.publish(archived, "still")
    assert api.delete(f"/v1/topics/{archived}").status == 204


def test_a_broker_that_keeps_nothing_on_disk_has_no_archive() -> None:
    with serving() as running:
        api = running.client()
        assert api.post("/v1/topics", {"name": "ducks"}).status == 201
        assert api.get("/v1/health").json["archive"] is None
        for answer in (
            api.get("/v1/topics/ducks/archive"),
            api.post("/v1/topics/ducks/archive/plans", {"for_ms": 1}),
            api.post("/v1/topics/ducks/archive/now"),
            api.get("/v1/archive/plans"),
            api.get(file_path("ducks", "x")),
        ):
            problem = answer.problem(404, "not_found")
            assert problem == "a broker with a memory store has no archive"


def test_archived_messages_are_read_like_any_others(
    served: Serving, api: Client, archived: str
) -> None:
    page = api.get(f"/v1/topics/{archived}/partitions/0/messages?offset=1&limit=3").json
    assert [each["offset"] for each in page["messages"]] == [1, 2, 3]
    assert json.loads(api.get("/v1/openapi.json").body)["tags"]
    assert served.broker.archive is not None
    assert served.broker.archive.state(CALLER).quarantined == 0
