"""The listener's bounds hold: on time, on numbers, on memory; and others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tracemalloc
from typing import Any, cast

import pytest

from quackmq import limits
from quackmq.errors import InvalidRequest
from quackmq.protocols.http import limits as http_limits
from quackmq.protocols.http.queue_api import Parameters, read_parameters
from quackmq.protocols.http.types import Request
from tests.kit.limits import home_of
from tests.kit.waiting import soon, until
from tests.protocols.http.handlers import Handlers
from tests.protocols.http.peers import request, served, served_meanwhile
from tests.protocols.kafka.client import on_both_loops


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /",
        b"GET /topics HTTP/1.1\r\nhost: localhost\r\nx: ",
        b"POST /topics HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\nxx",
    ],
)
@on_both_loops
async def test_a_request_that_comes_too_slowly_is_given_up(
    begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "HTTP_REQUEST_WAIT_MS", 200)
    async with served_meanwhile() as running:
        peer = await running.peer()
        peer.send(begun)
        answer = asyncio.ensure_future(peer.receive())
        while not answer.done():
            peer.send(b"x")
            await asyncio.wait([answer], timeout=0.02)
        assert (await answer).status == 408
        assert await peer.is_closed()


@on_both_loops
async def test_a_connection_that_is_idle_for_too_long_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_limits, "HTTP_IDLE_MS", 500)
    async with served() as running:
        silent, said_something, only_newlines = [await running.peer() for _ in range(3)]
        assert (await said_something.get("/topics")).status == 200
        only_newlines.send(b"\r\n\r\n")
        for peer in (silent, said_something, only_newlines):
            assert await peer.is_closed()


@on_both_loops
async def test_a_request_that_waits_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "HTTP_IDLE_MS", 300)
    handlers = Handlers()
    async with served(handlers.routes()) as running:
        peer = await running.peer()
        peer.send(request("GET", "/wait?number=1"))
        await until(lambda: handlers.begun == 1)
        idle = await running.peer()
        assert await idle.is_closed()
        handlers.gate.set()
        assert (await peer.receive()).json == "1"


@pytest.mark.parametrize("size", [100_000, 64 * limits.MIB])
@on_both_loops
async def test_a_peer_that_takes_nothing_is_disconnected_and_nobody_else(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "HTTP_SEND_WAIT_MS", 200)
    handlers = Handlers()
    async with served(handlers.routes()) as running:
        other = await running.peer()
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            deaf.connect(running.address)
            deaf.sendall(request("GET", f"/large/{size}") * 200)
            await until(lambda: running.listener.send_budget.unsent_bytes > 0)
            assert running.listener.send_budget.unsent_bytes < size + 10 * limits.MIB, (
                "the rest is not begun"
            )
            assert (await other.get("/echo")).status == 200
            await until(lambda: running.listener.connection_count == 1)
        assert (await other.get("/echo")).status == 200
        assert running.listener.send_budget.unsent_bytes == 0


@on_both_loops
async def test_a_peer_that_takes_little_by_little_gets_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_limits, "HTTP_SEND_WAIT_MS", 1_000)
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        peer.send(request("GET", f"/large/{32 * limits.MIB}", connection="close"))
        _, headers = await peer.receive_head()
        left = int(headers["content-length"])
        while left:
            left -= len(await soon(peer.reader.read(min(left, 1_000_000))))
        assert await peer.is_closed()


@on_both_loops
async def test_unsent_answers_of_all_peers_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "HTTP_SEND_BYTES", limits.MIB)
    # What peers have taken is seen when they take it, and not when somebody next looks at all.
    for name in ("HTTP_REQUEST_WAIT_MS", "HTTP_IDLE_MS", "HTTP_SEND_WAIT_MS"):
        monkeypatch.setattr(home_of(name), name, 3_600_000)
    # Larger than what the system takes at once: the last part is sent in pieces.
    monkeypatch.setattr(http_limits, "HTTP_WRITE_BUFFER_BYTES", 16 * limits.MIB)
    async with served(Handlers().routes()) as running:
        slow, other = await running.peer(), await running.peer()
        slow.send(request("GET", f"/large/{32 * limits.MIB}"))
        await until(lambda: running.listener.send_budget.unsent_bytes > limits.MIB)
        (await other.get("/echo")).failed(503, "limit_reached")
        await slow.receive()
        await until(lambda: running.listener.send_budget.unsent_bytes == 0)
        assert (await other.get("/echo")).status == 200


@on_both_loops
async def test_a_thousand_idle_connections_harm_nobody() -> None:
    async with served_meanwhile() as running:
        idle = [await running.peer() for _ in range(1_000)]
        await until(lambda: running.listener.connection_count >= 1_001)
        for peer in idle[::100]:
            assert (await peer.get("/topics")).status == 200


@on_both_loops
async def test_connections_over_the_limit_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "HTTP_CONNECTIONS", 3)
    async with served(Handlers().routes()) as running:
        peers = [await running.peer() for _ in range(3)]
        await until(lambda: running.listener.connection_count == 3)
        one_more = await running.peer()
        answer = await one_more.receive()
        answer.failed(503, "limit_reached")
        assert answer.headers["retry-after"] == "1"
        assert await one_more.is_closed()
        await peers[0].close()
        await until(lambda: running.listener.connection_count == 2)
        assert (await (await running.peer()).get("/echo")).status == 200


@on_both_loops
async def test_all_large_bodies_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "HTTP_RECEIVE_BYTES", 1_000_000)
    handlers = Handlers()
    async with served(handlers.routes()) as running:
        first, second = await running.peer(), await running.peer()
        first.send(request("POST", "/echo", bytes(900_000))[:-1])
        await until(lambda: running.listener.receive_budget.used_bytes > 800_000)
        (await second.post("/echo", bytes(900_000))).failed(503, "limit_reached")
        first.send(b"\0")
        assert (await first.receive()).status == 200
        assert running.listener.receive_budget.used_bytes == 0
        third = await running.peer()
        assert (await third.post("/echo", bytes(900_000))).status == 200
        third.send(request("POST", "/echo", bytes(900_000))[:-1])
        await until(lambda: running.listener.receive_budget.used_bytes > 800_000)
        await third.close()
        await until(lambda: running.listener.receive_budget.used_bytes == 0)


@on_both_loops
async def test_bodies_sent_ahead_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "HTTP_RECEIVE_BYTES", 10_000)
    handlers = Handlers()
    async with served(handlers.routes()) as running:
        peer = await running.peer()
        peer.send(request("GET", "/wait") + request("POST", "/echo", bytes(6_000)) * 2)
        await until(lambda: running.listener.receive_budget.used_bytes == 6_000)
        handlers.gate.set()
        assert [(await peer.receive()).status for _ in range(3)] == [200, 200, 503]
        assert running.listener.receive_budget.used_bytes == 0


@on_both_loops
async def test_thousands_of_requests_in_one_piece_are_taken_little_by_little() -> None:
    handlers = Handlers()
    async with served(handlers.routes()) as running:
        peer = await running.peer()
        count = 8_000
        short = b"GET /nowhere HTTP/1.1\r\nhost: \r\n\r\n"
        last = request("GET", "/echo", connection="close")
        peer.send(request("GET", "/wait?number=1") + short * count + last)
        await until(lambda: handlers.begun == 1 and running.listener.receive_budget.used_bytes > 0)
        assert running.listener.receive_budget.used_bytes < limits.MIB, "what one read has brought"
        handlers.gate.set()
        answers = (await soon(peer.reader.read())).split(b"HTTP/1.1 ")[1:]
        assert [int(answer[:3]) for answer in answers] == [200, *[404] * count, 200]
        assert running.listener.receive_budget.used_bytes == 0


@on_both_loops
async def test_who_hangs_up_with_requests_waiting_leaves_nothing_behind() -> None:
    handlers = Handlers()
    async with served(handlers.routes()) as running:
        for connection in ("keep-alive", "close"):
            peer = await running.peer()
            peer.send(
                request("GET", "/wait")
                + request("POST", "/echo", b"x" * 100) * 2_000
                + request("GET", "/echo", connection=connection)
            )
            await until(lambda: running.listener.receive_budget.used_bytes > 0)
            await peer.close()
            handlers.gate.set()
            await until(lambda: running.listener.connection_count == 0)
            handlers.gate.clear()
            assert running.listener.receive_budget.used_bytes == 0


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/x-www-form-urlencoded", b"&" * 2**20),
        ("application/json", b'{"topic": "ducks", "more": [' + b"{}," * 2**18 + b"{}]}"),
        ("application/json", b'{"topic": "ducks", "more": {' + b'"a":{},' * 2**17 + b'"b":1}}'),
    ],
)
async def test_parameters_cost_no_more_memory_than_the_body_that_brings_them(
    kind: str, body: bytes
) -> None:
    asked = Request(
        *(cast(Any, None),) * 2,
        "POST",
        "/",
        {},
        b"",
        [(b"content-type", kind.encode())],
        body,
        cast(Any, None),
    )
    tracemalloc.start()
    try:
        with contextlib.suppress(InvalidRequest):
            read_parameters(asked, Parameters("topic", "message"))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < len(body) + 2**16


@on_both_loops
async def test_a_body_in_the_smallest_chunks_costs_no_more_than_another() -> None:
    handlers = Handlers()
    async with served(handlers.routes()) as running:
        peer = await running.peer()
        tracemalloc.start()
        try:
            peer.send(request("POST", "/echo", transfer_encoding="chunked"))
            peer.send(b"2\r\nab\r\n" * 2**16)
            await until(lambda: running.listener.receive_budget.used_bytes == 2**17)
            own = tracemalloc.take_snapshot().filter_traces(
                [tracemalloc.Filter(True, "*/quackmq/*")]
            )
        finally:
            tracemalloc.stop()
        assert sum(each.size for each in own.statistics("filename")) < 2**19
        peer.send(b"0\r\n\r\n")
        assert len((await peer.receive()).json["body"]) == 2**17
