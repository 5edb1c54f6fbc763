"""All listeners see the same topics, subscriptions, numbers and ids: subscribe by one, put by
another, get by a third."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from quackmq import Client
from quackmq.client.zmq import ZmqClient
from quackmq.errors import UnknownSubscription, UnknownTopic
from quackmq.protocols.http import limits as http_limits
from tests.kit.server import DEADLINE_S, Server

pytestmark = pytest.mark.processes

LISTENERS = ("python", "http", "zmq")


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    listeners = [
        word for listener in ("kafka", "http", "zmq") for word in (f"--{listener}", "127.0.0.1:0")
    ]
    with Server("serve", "--store", "memory:", "--default-partitions", "2", *listeners) as server:
        yield server.listeners()


class Http:
    """A client of /v1 in ten lines."""

    def __init__(self, address: str, name: str) -> None:
        self._name = name
        host, port = address.split(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=DEADLINE_S)

    def subscribe(self, topic: str) -> None:
        self._ask("PUT", self._subscription(topic))

    def unsubscribe(self, topic: str) -> None:
        self._ask("DELETE", self._subscription(topic))

    def put(self, topic: str, value: str, sequence: int) -> None:
        numbered = f"?publisher={self._name}&sequence={sequence}"
        self._ask("POST", f"/v1/topics/{topic}/messages{numbered}", {"value": value})

    def last_sequence(self, topic: str) -> int | None:
        answer = self._ask("GET", f"/v1/topics/{topic}/publishers/{self._name}")
        last: int | None = answer["last_sequence"]
        return last

    def get(self, topic: str, last_id: str | None) -> tuple[str, str]:
        asking = {"last_id": last_id, "wait_ms": http_limits.HTTP_WAIT_MS}
        answer = self._ask("POST", f"{self._subscription(topic)}/get", asking)
        return answer["id"], answer["value"]

    def close(self) -> None:
        self._connection.close()

    def _subscription(self, topic: str) -> str:
        return f"/v1/subscriptions/{self._name}/topics/{topic}"

    def _ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body)
        self._connection.request(method, path, data, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read() or b"{}")
        if answer.get("code") == "unknown_subscription":
            raise UnknownSubscription(answer["detail"])
        assert response.status < 400, answer
        return answer


class Zmq:
    def __init__(self, address: str, name: str) -> None:
        self._client = ZmqClient(address, name, timeout=DEADLINE_S)
        self.subscribe = self._client.subscribe
        self.unsubscribe = self._client.unsubscribe
        self.last_sequence = self._client.last_sequence
        self.close = self._client.close

    def put(self, topic: str, value: str, sequence: int) -> None:
        self._client.put(topic, value, sequence=sequence)

    def get(self, topic: str, last_id: str | None) -> tuple[str, str]:
        message = self._client.get(topic, after=last_id or "-1")
        return message.id, message.text


class Python:
    def __init__(self, address: str, name: str, directory: Path) -> None:
        self._client = Client(
            address, name, serialiser="str", timeout=DEADLINE_S, directory=directory
        )
        self.subscribe = self._client.subscribe
        self.unsubscribe = self._client.unsubscribe
        self.last_sequence = self._client.last_sequence
        self.close = self._client.close

    def put(self, topic: str, value: str, sequence: int) -> None:
        self._client.put(topic, value, sequence=sequence)

    def get(self, topic: str, last_id: str | None) -> tuple[str, str]:
        message = self._client.get(topic, after=last_id)
        return message.id, message.value


class Opened:
    """Clients of each listener, closed at the end of the test."""

    def __init__(self, addresses: dict[str, str], directory: Path) -> None:
        self._addresses = addresses
        self._directory = directory
        self._clients: list[Http | Zmq | Python] = []

    def __call__(self, listener: str, name: str) -> Http | Zmq | Python:
        client: Http | Zmq | Python
        if listener == "python":
            client = Python(self._addresses["kafka"], name, self._directory / name)
        elif listener == "http":
            client = Http(self._addresses[listener], name)
        else:
            client = Zmq(self._addresses[listener], name)
        self._clients.append(client)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()


@pytest.fixture
def opened(addresses: dict[str, str], tmp_path: Path) -> Iterator[Opened]:
    clients = Opened(addresses, tmp_path)
    yield clients
    clients.close()


@pytest.mark.parametrize("listeners", [*permutations(LISTENERS)], ids=" ".join)
def test_subscribe_by_one_listener_put_by_another_get_by_a_third(
    opened: Opened, listeners: tuple[str, str, str]
) -> None:
    topic = "-".join(listeners)
    subscribing, putting, getting = listeners
    opened(subscribing, f"reader-{topic}").subscribe(topic)
    author = opened(putting, "author")
    texts = [f"message {number}" for number in range(6)]
    for sequence, text in enumerate(texts):
        author.put(topic, text, sequence)
    reader = opened(getting, f"reader-{topic}")
    last_id, got = None, []
    for _ in texts:
        last_id, text = reader.get(topic, last_id)
        got.append(text)
    # Two partitions, so an order of its own; but each message once.
    assert sorted(got) == texts


@pytest.mark.parametrize("listeners", [*permutations(LISTENERS, 2)], ids=" ".join)
def test_unsubscribed_by_one_listener_is_unsubscribed_for_all(
    opened: Opened, listeners: tuple[str, str]
) -> None:
    topic = f"left-{'-'.join(listeners)}"
    one, other = (opened(listener, f"leaver-{topic}") for listener in listeners)
    one.subscribe(topic)
    other.unsubscribe(topic)
    with pytest.raises(UnknownSubscription):
        one.get(topic, None)
    with pytest.raises(UnknownSubscription):
        other.unsubscribe(topic)


def test_a_publishers_numbers_are_the_same_by_every_listener(opened: Opened) -> None:
    opened("zmq", "counter").subscribe("numbered")
    authors = [opened(listener, "numberer") for listener in LISTENERS]
    for sequence in range(3):
        for author in authors:
            author.put("numbered", f"number {sequence}", sequence)
            assert author.last_sequence("numbered") == sequence
    opened("http", "numberer").put("numbered", "end", 3)
    reader = opened("http", "counter")
    last_id: str | None = None
    got: list[str] = []
    while len(got) < 4:
        last_id, text = reader.get("numbered", last_id)
        got.append(text)
    assert sorted(got) == ["end", "number 0", "number 1", "number 2"]


def test_an_id_names_the_same_message_by_every_listener(opened: Opened) -> None:
    """What was got by one listener is named by another, and is behind."""
    opened("http", "walker").subscribe("walked")
    author = opened("http", "author")
    for sequence in range(4):
        author.put("walked", f"step {sequence}", sequence)
    last_id, got = None, []
    for listener in ("http", "zmq", "http", "zmq"):
        last_id, text = opened(listener, "walker").get("walked", last_id)
        got.append(text)
    assert sorted(got) == [f"step {sequence}" for sequence in range(4)]


def test_topics_are_the_same_by_every_listener(opened: Opened, addresses: dict[str, str]) -> None:
    with Client(addresses["kafka"], "maker") as client:
        client.create_topic("made", 5)
        connection = http.client.HTTPConnection(addresses["http"], timeout=DEADLINE_S)
        connection.request("GET", "/topics")
        assert "made" in json.loads(connection.getresponse().read())["topics"]
        connection.request("DELETE", "/v1/topics/made")
        assert connection.getresponse().status == 204
        connection.close()
        assert "made" not in client.topics()
    with ZmqClient(addresses["zmq"], "maker") as other, pytest.raises(UnknownTopic):
        other.unsubscribe("made")
