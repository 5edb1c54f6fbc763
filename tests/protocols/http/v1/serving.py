"""A broker with its HTTP listener in a thread of its own, asked by `http.client` through a
socket."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from quackmq.archive.tiered_store import TieredStore
from quackmq.broker import Broker, BrokerSettings, Caller
from quackmq.broker import limits as broker_limits
from quackmq.clock import Clock
from quackmq.protocols.http.server import HttpServer
from quackmq.stores.contract import Store
from quackmq.stores.local import LocalOptions, LocalStore
from quackmq.stores.memory import MemoryStore
from tests.kit.support import listening

#: For anything that takes milliseconds when all is well. Long, since machines can be busy.
DEADLINE_S = 120
CALLER = Caller("tester")
PROBLEM = "application/problem+json"

T = TypeVar("T")


class Answered(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        assert self.headers["content-type"] in ("application/json", PROBLEM), self
        return json.loads(self.body)

    def problem(self, status: int, code: str) -> str:
        """What a failure says, which is told as a problem with this status and code."""
        assert self.status == status, self
        assert self.headers["content-type"] == PROBLEM
        problem = self.json
        assert set(problem) == {"type", "title", "status", "detail", "code"}
        assert (problem["status"], problem["code"]) == (status, code)
        return str(problem["detail"])


class Client:
    """One connection, which is made when it is needed."""

    def __init__(self, host: str, port: int) -> None:
        self.connection = http.client.HTTPConnection(host, port, timeout=DEADLINE_S)

    def ask(
        self,
        method: str,
        path: str,
        value: object = None,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answered:
        """`value` goes as JSON, `body` as it is."""
        said = dict(headers or {})
        if value is not None:
            body = json.dumps(value).encode()
            said.setdefault("content-type", "application/json")
        self.connection.request(method, path, body, said)
        answer = self.connection.getresponse()
        read = answer.read()
        return Answered(
            answer.status, {name.lower(): text for name, text in answer.getheaders()}, read
        )

    def get(self, path: str, **headers: str) -> Answered:
        return self.ask("GET", path, headers=headers)

    def post(self, path: str, value: object = None) -> Answered:
        return self.ask("POST", path, value)

    def put(self, path: str, value: object = None) -> Answered:
        return self.ask("PUT", path, value)

    def delete(self, path: str) -> Answered:
        return self.ask("DELETE", path)

    def publish(self, topic: str, *values: object, query: str = "") -> list[dict[str, Any]]:
        messages = {"messages": [{"value": value} for value in values]}
        answer = self.post(f"/v1/topics/{topic}/messages{query}", messages)
        assert answer.status == 201, answer
        return list(answer.json["messages"])

    def close(self) -> None:
        self.connection.close()


class Serving:
    """A broker and its listener, over a store, or a directory where it has an archive, too. Calls
    come from the test's thread."""

    def __init__(
        self,
        store: Store | None = None,
        directory: Path | None = None,
        clock: Clock | None = None,
        settings: BrokerSettings | None = None,
    ) -> None:
        self._settings = settings or BrokerSettings()
        self._store = store
        self._clock = clock
        self._directory = directory
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._clients: list[Client] = []
        # It merges files when a test tells it to: by itself it would, every ten seconds, in the
        # midst of a test.
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(broker_limits, "MERGE_INTERVAL_MS", 3_600_000)
        self.broker: Broker
        self.listener: HttpServer
        self.host, self.port = self.run(self._open())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Something for the broker's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    def client(self) -> Client:
        client = Client(self.host, self.port)
        self._clients.append(client)
        return client

    def close_listener(self) -> None:
        self.run(self.listener.close())

    def close(self) -> None:
        for client in self._clients:
            client.close()
        try:
            self.run(self._close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._patch.undo()

    async def _open(self) -> tuple[str, int]:
        archive = None
        if self._directory is not None:
            clock = self._clock or Clock.of_system()
            log = await LocalStore.open(self._directory, LocalOptions(sync="os"), clock)
            self._store = archive = await TieredStore.open(log, log.disk, clock)
        self._store = self._store or MemoryStore()
        self.broker = Broker(self._store, self._settings, self._clock, archive)
        await self.broker.open()
        self.listener = HttpServer(self.broker, "127.0.0.1", 0)
        return await listening(self.listener)

    async def _close(self) -> None:
        assert self._store is not None
        await self.listener.close()
        await self.broker.close()
        await self._store.close()


@contextmanager
def serving(
    store: Store | None = None,
    directory: Path | None = None,
    clock: Clock | None = None,
    settings: BrokerSettings | None = None,
) -> Iterator[Serving]:
    served = Serving(store, directory, clock, settings)
    try:
        yield served
    finally:
        served.close()
