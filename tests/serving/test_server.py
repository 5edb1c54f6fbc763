"""What every server does the same way: listening, admitting, sweeping, closing."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quackmq.serving.budgets import SendBudget
from quackmq.serving.connection import ConnectionBounds, ServedConnection
from quackmq.serving.server import Address, Bounds, Server
from tests.kit.waiting import soon, until
from tests.protocols.kafka.client import on_both_loops


class Echo(ServedConnection, asyncio.Protocol):
    """A connection that notes what its server asks of it, and ends when it is told to."""

    def __init__(self, server: EchoServer, channel: str) -> None:
        super().__init__(server, server.send_budget, channel)
        self.server = server
        self.channel = channel
        self.asked: list[str] = []

    @property
    def bounds(self) -> ConnectionBounds:
        return ConnectionBounds(1_000, self.server.send_wait_ms, self.server.linger_ms)

    def _on_opened(self) -> None:
        self.asked.append("opened")

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)

    def _on(self, what: str) -> None:
        self.asked.append(what)
        if self.server.ends_on == what:
            self._finish()

    def _sweep(self, now: float) -> None:
        self._on("sweep")

    def drain(self) -> None:
        self._on("drain")

    def cancel(self) -> None:
        self._on("cancel")

    def abort(self) -> None:
        self.asked.append("abort")
        super().abort()


class EchoServer(Server[Echo]):
    name = "echo"
    ends_on = "drain"
    limit = 10
    drain_ms = 20.0
    cancel_ms = 0.0
    sweep_ms = 60_000.0
    send_wait_ms = 60_000.0
    linger_ms = 0.0

    def __init__(self, address: Address) -> None:
        super().__init__(SimpleNamespace(listener_addresses={}), address)  # type: ignore[arg-type]
        self.send_budget = SendBudget(10_000_000)
        self.made: list[Echo] = []

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.limit, 10, self.sweep_ms, self.drain_ms, self.cancel_ms)

    def make_connection(self, channel: str = "") -> Echo:
        self.made.append(Echo(self, channel))
        return self.made[-1]


@asynccontextmanager
async def serving(server: EchoServer) -> AsyncIterator[Any]:
    """The address at which the server listens."""
    address = await server.start()
    try:
        yield address
    finally:
        await soon(server.close())


async def echoed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(b"quack")
    return await soon(reader.read(10))


@on_both_loops
async def test_a_server_that_was_given_no_port_says_which_it_has() -> None:
    server = EchoServer(("127.0.0.1", 0))
    async with serving(server) as (host, port):
        assert (host, port > 0) == ("127.0.0.1", True)
        reader, writer = await asyncio.open_connection(host, port)
        assert await echoed(reader, writer) == b"quack"
        writer.close()


@on_both_loops
async def test_peers_of_a_unix_socket_are_numbered_and_its_file_goes(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    server = EchoServer(path)
    async with serving(server) as address:
        assert address == path
        assert stat.S_ISSOCK(os.stat(path).st_mode)
        for number in (1, 2):
            reader, writer = await asyncio.open_unix_connection(path)
            assert await echoed(reader, writer) == b"quack"
            assert server.made[-1].channel == f"unix:{path}#{number}"
            writer.close()
    assert not os.path.exists(path)


@on_both_loops
async def test_a_server_without_an_address_serves_what_it_is_handed() -> None:
    server = EchoServer(None)
    async with serving(server) as address:
        assert address is None
        read_fd, peer_writes = os.pipe()
        peer_reads, write_fd = os.pipe()
        await server.attach(read_fd, write_fd, "pipes")
        os.write(peer_writes, b"quack")
        loop = asyncio.get_running_loop()
        assert await soon(loop.run_in_executor(None, os.read, peer_reads, 10)) == b"quack"
        assert [each.channel for each in server.connections] == ["pipes"]
    os.close(peer_writes)
    os.close(peer_reads)


@on_both_loops
async def test_a_connection_beyond_the_limit_may_not_stay() -> None:
    server = EchoServer(("127.0.0.1", 0))
    server.limit = 1
    async with serving(server) as address:
        first = await asyncio.open_connection(*address)
        assert await echoed(*first) == b"quack"
        second = await asyncio.open_connection(*address)
        assert await soon(second[0].read()) == b""
        first[1].close()
        await until(lambda: not server.connections)
        third = await asyncio.open_connection(*address)
        assert await echoed(*third) == b"quack"
        for _, writer in (second, third):
            writer.close()


@on_both_loops
async def test_connections_are_swept_regularly_also_while_the_server_closes() -> None:
    server = EchoServer(("127.0.0.1", 0))
    server.sweep_ms = 1
    address: Any = await server.start()
    _, writer = await asyncio.open_connection(*address)
    await until(lambda: any("sweep" in each.asked for each in server.connections))
    (connection,) = server.connections
    server.ends_on, server.drain_ms = "nothing", 60_000
    closing = asyncio.ensure_future(server.close())
    await until(lambda: "drain" in connection.asked)
    server.ends_on = "sweep"
    await soon(closing)
    assert connection.asked[-1] == "sweep"
    writer.close()


@pytest.mark.parametrize(
    ("ends_on", "cancel_ms", "asked"),
    [
        ("drain", 0, ["drain"]),
        ("cancel", 60_000, ["drain", "cancel"]),
        ("nothing", 20, ["drain", "cancel", "abort"]),
        ("nothing", 0, ["drain", "cancel", "abort"]),
    ],
)
@on_both_loops
async def test_closing_asks_for_no_more_than_a_connection_needs_to_end(
    ends_on: str, cancel_ms: float, asked: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    server = EchoServer(("127.0.0.1", 0))
    server.ends_on, server.cancel_ms = ends_on, cancel_ms
    address: Any = await server.start()
    _, writer = await asyncio.open_connection(*address)
    await until(lambda: len(server.connections) == 1)
    (connection,) = server.connections
    await soon(server.close())
    assert connection.asked == ["opened", *asked]
    assert ("did not finish in time" in caplog.text) is (ends_on != "drain")
    assert server.is_closing
    with pytest.raises(OSError):
        await asyncio.open_connection(*address)
    writer.close()
