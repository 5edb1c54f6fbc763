"""Exactly once through SIGKILL, with a real process: what was answered is there, nothing twice.

Answers are lost for certain: the broker is killed when a request has been sent and before anything
of its answer is read.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.protocols.http.v1.serving import DEADLINE_S, Client
from tests.real.broker import Broker
from tests.real.disks import BoundedFiles

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[4]
TOPIC = "ducks"
SUBSCRIPTION = f"/v1/subscriptions/puddles/topics/{TOPIC}"


class Lives:
    """A broker that is killed and started again, and a client that comes back to it."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        host, _, port = broker.addresses["http"].rpartition(":")
        self.api = Client(host, int(port))

    def kill_unheard(self, method: str, path: str, value: object) -> None:
        """Ask, and kill the broker without having heard its answer."""
        body = json.dumps(value).encode()
        headers = {"content-type": "application/json"}
        self.api.connection.request(method, path, body, headers)
        self.restart()

    def restart(self) -> None:
        self.broker.kill()
        self.api.close()
        self.broker.start()


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    with Broker(tmp_path / "data", listeners=("http",)) as broker:
        broker.start()
        living = Lives(broker)
        yield living
        living.api.close()


def test_numbered_messages_are_there_once_and_got_once_through_crashes_r2_r6(lives: Lives) -> None:
    api = lives.api
    assert api.put(SUBSCRIPTION).status == 201
    for number in range(12):
        path = f"/v1/topics/{TOPIC}/messages?publisher=till&sequence={number}"
        if number % 4 == 2:
            lives.kill_unheard("POST", path, {"value": number})
            last = api.get(f"/v1/topics/{TOPIC}/publishers/till").json["last_sequence"]
            assert last in (number - 1, number)
        assert api.post(path, {"value": number}).status in (200, 201)
    got: list[dict[str, Any]] = []
    while True:
        asking = {"last_id": got[-1]["id"] if got else None}
        if len(got) % 4 == 2:
            lives.kill_unheard("POST", f"{SUBSCRIPTION}/get", asking)
        answer = api.post(f"{SUBSCRIPTION}/get", asking)
        if answer.status == 204:
            break
        got.append(answer.json)
    assert [int(each["value"]) for each in got] == list(range(12))


def test_a_key_a_commit_and_a_place_are_known_after_a_crash(lives: Lives) -> None:
    api, path = lives.api, f"/v1/topics/{TOPIC}/messages"
    body, headers = b'{"value": "keyed"}', {"idempotency-key": "k"}
    first = api.ask("POST", path, body=body, headers=headers)
    staged = f"/v1/stages/nest/parts/a/0?topic={TOPIC}&partition=0&timestamp_ms=1"
    summary = api.put(staged, {"messages": [{"value": "staged"}]}).json
    lives.restart()
    again = api.ask("POST", path, body=body, headers=headers)
    assert (first.status, again.status) == (201, 200)
    assert again.json["messages"] == first.json["messages"]
    assert api.put(staged, {"messages": [{"value": "staged"}]}).json == summary
    lives.kill_unheard("POST", "/v1/stages/nest/commit", {"receipts": [summary]})
    assert api.post("/v1/stages/nest/commit", {"receipts": [summary]}).status == 200
    page = api.get(f"/v1/topics/{TOPIC}/partitions/0/messages").json
    assert [each["value"] for each in page["messages"]] == ["keyed", "staged"]


def test_on_a_full_disk_the_broker_lives_reads_and_is_not_ready(tmp_path: Path) -> None:
    with (
        BoundedFiles(tmp_path) as disk,
        Broker(disk.directory / "data", command=disk.command, listeners=("http",)) as broker,
    ):
        broker.start()
        api = Lives(broker).api
        try:
            assert api.get("/v1/ready").status == 200
            count = 0
            path = f"/v1/topics/{TOPIC}/messages"
            while (answer := api.post(path, {"value": "x" * 1_000_000})).status == 201:
                count += 1
            assert "Free disk space" in answer.problem(503, "store_read_only")
            assert "Free disk space" in api.get("/v1/ready").problem(503, "store_read_only")
            assert api.get("/v1/health").status == 200
            last = api.get(f"/v1/topics/{TOPIC}/partitions/0/messages?offset={count - 1}")
            assert len(last.json["messages"]) == 1
        finally:
            api.close()


def test_the_example_books_each_sale_once_m12(lives: Lives, tmp_path: Path) -> None:
    """Also when it is run again, and when the broker is killed between and during its runs."""
    books = tmp_path / "books"
    address = lives.broker.addresses["http"]
    command = [sys.executable, "examples/http_client.py", address, str(books)]
    said = [run(command)]
    lives.restart()
    said.append(run(command))
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        lives.restart()
        said.append(running.communicate(timeout=DEADLINE_S)[0])
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 0
    assert said == [
        f"{3 * times} sales of {800 * times} cents are booked, 0 are to come\n"
        for times in (1, 2, 3)
    ]
    with sqlite3.connect(books) as booked:
        numbers = [number for (number,) in booked.execute("SELECT number FROM sales")]
    booked.close()
    assert numbers == list(range(9))


def run(command: list[Any]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE_S, check=True
    )
    return done.stdout


def test_topic_defaults_are_there_after_a_crash_r4_r6(lives: Lives) -> None:
    api, path = lives.api, "/v1/topic-defaults/duck*"
    assert api.put(path, {"policy": {"ephemeral": True}}).status == 200
    lives.kill_unheard("PUT", "/v1/topic-defaults/*", {"policy": {"keep_bytes": 9}})
    for _ in range(2):
        api.get(f"/v1/topics/{TOPIC}").problem(404, "unknown_topic")
        assert api.put(SUBSCRIPTION).status == 201
        lives.restart()
        assert api.get(f"/v1/topics/{TOPIC}").json["policy"]["ephemeral"]
        assert api.delete(SUBSCRIPTION).status == 204
    assert api.delete(path).status == 204
    lives.restart()
    assert path.rpartition("/")[2] not in api.get("/v1/topic-defaults").body.decode()
