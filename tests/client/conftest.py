"""A broker for the tests of clients: as users run it, in a process of its own, keeping nothing.

One for all tests of a worker, since starting one takes longer than most of them; so each test has
topics and names of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from quackmq import Client
from quackmq.client.queue import Producer
from tests.kit.server import Server

_numbers = count(1)


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """The address of its Kafka listener."""
    with Server("serve", "--store", "memory:", "--kafka", "127.0.0.1:0") as server:
        yield server.ready()


@pytest.fixture(scope="session")
def queue_address() -> Iterator[str]:
    """The address of a broker's HTTP listener, for the queue's library."""
    with Server("serve", "--store", "memory:", "--http", "127.0.0.1:0") as server:
        yield server.listeners()["http"]


@pytest.fixture
def producer(address: str) -> Iterator[Producer]:
    """A producer of the queue, at the address that the test's module has chosen."""
    with Producer(address) as producer:
        yield producer


@pytest.fixture
def topic() -> str:
    """A topic that no other test has; nobody has made it."""
    return f"news-{next(_numbers)}"


class Clients:
    """Makes clients and closes them. Those of one name share a directory, as on one machine."""

    def __init__(self, address: str, directory: Path, suffix: str) -> None:
        self.address = address
        self._directory = directory
        self._suffix = suffix
        self._made: list[Client] = []

    def __call__(self, name: str = "billing", **options: Any) -> Client:
        whole = f"{name}-{self._suffix}"
        settings: dict[str, Any] = {"serialiser": "str", "directory": self._directory / whole}
        settings["timeout"] = 20.0  # machines can be busy
        settings.update(options)
        client = Client(self.address, whole, **settings)
        self._made.append(client)
        return client

    def close(self) -> None:
        for client in self._made:
            client.close()


@pytest.fixture
def clients(address: str, tmp_path: Path, topic: str) -> Iterator[Clients]:
    made = Clients(address, tmp_path, topic)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def client(clients: Clients) -> Client:
    return clients()
