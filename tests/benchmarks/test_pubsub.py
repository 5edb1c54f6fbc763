"""What the benchmark of put and get sends means what it says, and the peer does what ours does."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlencode

import pytest

from benchmarks import queues
from benchmarks.broker import Broker
from benchmarks.pubsub import best, row
from benchmarks.queues import Queue
from benchmarks.requests import kafka_put, kafka_put_answer, zmq_request

TOPIC = "bench"
WAIT_SECONDS = 30


def test_the_best_of_each_counts_and_they_take_turns() -> None:
    order: list[str] = []

    def measure(name: str, figures: list[float]) -> float:
        order.append(name)
        return figures.pop()

    ours, bare = [1.0, 5.0, 2.0], [4.0, 3.0, 1.0]
    assert best(lambda: measure("ours", ours), lambda: measure("bare", bare)) == [5.0, 4.0]
    assert order == ["ours", "bare"] * 3


def test_a_row_is_reached_from_its_mark_on_and_one_without_a_mark_always() -> None:
    assert row("", 1, 4, "put/s", 0.25).reached
    assert not row("", 0.99, 4, "put/s", 0.25).reached
    assert row("", 1, 1000, "put/s", None).reached


def test_a_zmq_request_may_be_of_any_length() -> None:
    assert zmq_request(b"x" * 255) == b"\x01\x00\x00\xff" + b"x" * 255
    assert zmq_request(b"x" * 256) == b"\x01\x00\x02" + (256).to_bytes(8, "big") + b"x" * 256


@pytest.mark.processes
def test_what_the_crowd_sends_is_taken_and_answered_as_expected(tmp_path: Path) -> None:
    with Broker.started(tmp_path, "os") as broker:
        Queue.made(broker.http, TOPIC)  # which makes the topic
        payload = answer_of(broker.kafka, kafka_put(TOPIC, b"x" * 100))
        assert payload.startswith(kafka_put_answer(TOPIC))
        refused = answer_of(broker.kafka, kafka_put(TOPIC + "-not", b"x"))
        assert not refused.startswith(kafka_put_answer(TOPIC + "-not"))


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_both_queues_answer_the_requests_of_the_comparison_alike(kind: str, tmp_path: Path) -> None:
    with started(kind, tmp_path) as address, closing(http.client.HTTPConnection(address)) as to:
        queue = Queue.made(address, TOPIC)
        queue.register_consumers(2)
        first, second = queue.consumer_ids
        assert first != second
        for message in ("a", "b"):
            assert produced(to, queue.producer_id, message) == (200, "success")
        assert produced(to, "producer-9", "c")[1] == "failure"
        assert [consumed(to, first), consumed(to, first)] == ["a", "b"]
        assert consumed(to, first) is None  # it has read everything; the other has its own place
        assert consumed(to, second) == "a"
        assert consumed(to, "consumer-9") is None


# --- helpers ---------------------------------------------------------------------------------


@contextmanager
def started(kind: str, directory: Path) -> Iterator[str]:
    if kind == "theirs":
        with queues.fastapi(directory) as address:
            yield address
    else:
        with Broker.started(directory, "os") as broker:
            yield broker.http


def produced(to: http.client.HTTPConnection, producer_id: str, message: str) -> tuple[int, str]:
    asked = {"topic": TOPIC, "producer_id": producer_id, "message": message}
    headers = {"Content-Type": "application/json"}
    to.request("POST", "/producer/produce", json.dumps(asked), headers)
    response = to.getresponse()
    return response.status, json.loads(response.read())["status"]


def consumed(to: http.client.HTTPConnection, consumer_id: str) -> str | None:
    """The message; none where there is a failure."""
    asked = urlencode({"topic": TOPIC, "consumer_id": consumer_id})
    to.request("GET", f"/consumer/consume?{asked}")
    response = to.getresponse()
    answer = json.loads(response.read())
    assert (answer["status"] == "success") == (response.status == 200)
    return answer["message"] if response.status == 200 else None


def answer_of(address: str, request: bytes) -> bytes:
    """What a Kafka broker answers, behind the length."""
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), WAIT_SECONDS) as peer:
        peer.sendall(request)
        with peer.makefile("rb") as answers:
            return answers.read(int.from_bytes(answers.read(4), "big"))
