"""Raw connections to an HTTP listener, and a broker with a listener to go with them.

A peer sends bytes as a test likes them and reads answers by rules of its own, so that what the
listener writes is held against something else than the parser that it reads with.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from quackmq.broker import Broker, BrokerSettings, Caller
from quackmq.protocols.http.router import Route
from quackmq.protocols.http.server import HttpServer
from quackmq.stores.contract import Store
from quackmq.stores.memory import MemoryStore
from tests.kit.support import listening
from tests.kit.waiting import soon

TESTER = Caller("tester")


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def failed(self, status: int, code: str) -> str:
        """What a failure of the queue's endpoints says, which has this status and code."""
        assert self.status == status, self
        assert set(self.json) == {"status", "message", "code"}
        assert (self.json["status"], self.json["code"]) == ("failure", code), self
        return str(self.json["message"])

    def succeeded(self) -> dict[str, Any]:
        assert self.status == 200, self
        fields = dict(self.json)
        assert fields.pop("status") == "success"
        return fields


class Peer:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def ask(self, method: str, target: str, body: object = None, **headers: str) -> Answer:
        """One request and its answer; a body that is not bytes goes as JSON."""
        self.send(request(method, target, body, **headers))
        return await self.receive(is_head=method == "HEAD")

    async def get(self, target: str, **headers: str) -> Answer:
        return await self.ask("GET", target, **headers)

    async def post(self, target: str, body: object = None, **headers: str) -> Answer:
        return await self.ask("POST", target, body, **headers)

    async def receive(self, *, is_head: bool = False) -> Answer:
        status, headers = await self.receive_head()
        if is_head or status in (100, 204):
            return Answer(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join([chunk async for chunk in self.chunks()])
        elif "content-length" in headers:
            body = await soon(self.reader.readexactly(int(headers["content-length"])))
        else:
            assert headers["connection"] == "close"
            body = await soon(self.reader.read())
        return Answer(status, headers, body)

    async def receive_head(self) -> tuple[int, dict[str, str]]:
        head = await soon(self.reader.readuntil(b"\r\n\r\n"))
        line, *lines = head.decode("latin-1").split("\r\n")[:-2]
        version, status, _ = line.split(" ", 2)
        assert version == "HTTP/1.1"
        pairs = [each.split(": ", 1) for each in lines]
        assert len({name for name, _ in pairs}) == len(pairs), "each header once"
        return int(status), dict(pairs)

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            size = int(await soon(self.reader.readuntil(b"\r\n")), 16)
            data = await soon(self.reader.readexactly(size + 2))
            assert data[-2:] == b"\r\n"
            if not size:
                return
            yield data[:-2]

    async def is_closed(self) -> bool:
        """True when the listener closes the connection without saying anything more."""
        try:
            return await soon(self.reader.read(1)) == b""
        except ConnectionError:
            return True

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            return


class Served:
    def __init__(self, broker: Broker, listener: HttpServer, address: tuple[str, int]) -> None:
        self.broker = broker
        self.listener = listener
        self.address = address
        self._peers: list[Peer] = []

    async def peer(self) -> Peer:
        peer = Peer(*await asyncio.open_connection(*self.address))
        self._peers.append(peer)
        return peer

    async def close_peers(self) -> None:
        for peer in self._peers:
            await peer.close()


@asynccontextmanager
async def served(
    routes: Iterable[Route] | None = None,
    *,
    store: Store | None = None,
    settings: BrokerSettings | None = None,
    names: Iterable[str] = (),
    advertised_host: str = "",
) -> AsyncIterator[Served]:
    """Of all the listener's routes, or of some of a test's own."""
    store = store or MemoryStore()
    broker = Broker(store, settings or BrokerSettings())
    await broker.open()
    listener = HttpServer(
        broker, "127.0.0.1", 0, names=names, advertised_host=advertised_host, routes=routes
    )
    running = Served(broker, listener, await listening(listener))
    try:
        yield running
    finally:
        await running.close_peers()
        await soon(listener.close())
        await broker.close()
        await store.close()


@asynccontextmanager
async def served_meanwhile() -> AsyncIterator[Served]:
    """A listener with all its routes, and somebody who publishes and consumes all the while."""
    async with served() as running:
        bystander = await running.peer()
        await bystander.post("/producer/register?topic=ponds")
        await bystander.post("/consumer/register?topic=ponds")
        stop = asyncio.Event()
        busy = asyncio.create_task(publish_and_consume(bystander, stop))
        try:
            yield running
        finally:
            stop.set()
            assert await soon(busy) > 0


async def publish_and_consume(peer: Peer, stop: asyncio.Event) -> int:
    rounds = 0
    while not stop.is_set() or not rounds:
        fields = {"topic": "ponds", "producer_id": "producer-1", "message": str(rounds)}
        (await peer.post("/producer/produce", fields)).succeeded()
        answer = await peer.get("/consumer/consume?topic=ponds&consumer_id=consumer-1")
        assert answer.succeeded()["message"] == str(rounds)
        rounds += 1
    return rounds


def request(
    method: str, target: str, body: object = None, version: str = "1.1", **headers: str
) -> bytes:
    """A request's bytes. A header is named with `_` for `-`; one of None's value is left out."""
    said: dict[str, str | None] = {"host": "localhost"}
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
        said["content-type"] = "application/json"
    if isinstance(body, bytes):
        said["content-length"] = str(len(body))
    said |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in said.items() if value]
    head = "\r\n".join((f"{method} {target} HTTP/{version}", *lines, "", ""))
    return head.encode("latin-1") + (body if isinstance(body, bytes) else b"")
