"""What the connections of all protocols share, on a transport that only notes what is asked."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest

from quackmq.serving.budgets import SendBudget
from quackmq.serving.connection import ConnectionBounds, ServedConnection
from tests.kit.waiting import until

WAIT_MS = 1_000


class Admitting:
    """A server that lets in everybody, or nobody."""

    def __init__(self, admits: bool = True) -> None:
        self.admits = admits
        self.connections: set[Any] = set()

    def opened(self, connection: Any) -> bool:
        self.connections.add(connection)
        return self.admits

    def closed(self, connection: Any) -> None:
        self.connections.discard(connection)


class Transport(asyncio.Transport):
    def __init__(self, *, can_write_eof: bool = True) -> None:
        super().__init__({"peername": ("10.0.0.7", 1234), "socket": Mock()})
        self.calls: list[str] = []
        self.unsent_bytes = 0
        self._can_write_eof = can_write_eof

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert (high, low) == (100, 0)

    def can_write_eof(self) -> bool:
        return self._can_write_eof

    def is_closing(self) -> bool:
        return "close" in self.calls or "abort" in self.calls

    def __getattribute__(self, name: str) -> Any:
        if name in {"write_eof", "close", "abort", "pause_reading", "resume_reading"}:
            return lambda: self.calls.append(name)
        return super().__getattribute__(name)


class Spoken(ServedConnection):
    def __init__(self, server: Admitting, budget: SendBudget, linger_ms: float = 0) -> None:
        super().__init__(server, budget)
        self._linger_ms = linger_ms
        self.heard: list[str] = []

    @property
    def bounds(self) -> ConnectionBounds:
        return ConnectionBounds(100, WAIT_MS, self._linger_ms)

    def _on_opened(self) -> None:
        self.heard.append("opened")

    def _on_writable(self) -> None:
        self.heard.append("writable")

    def _on_lost(self) -> None:
        self.heard.append("lost")

    def _sweep(self, now: float) -> None:
        self.heard.append("swept")

    def drain(self) -> None:
        self._finish()

    def reads_on(self, reads: bool) -> None:
        self._set_reading(reads)


def connected(transport: Transport, admits: bool = True) -> tuple[Spoken, SendBudget]:
    budget = SendBudget(10_000)
    connection = Spoken(Admitting(admits), budget)
    connection.connection_made(transport)
    return connection, budget


async def test_every_connection_is_kept_alive_and_knows_its_peer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = Transport()
    connection, _ = connected(transport)
    assert connection.heard == ["opened"]
    transport.get_extra_info("socket").setsockopt.assert_called_once()
    connection.disconnect("it quacks too loudly")
    connection.disconnect("once is enough")
    assert transport.calls == ["abort"]
    assert [record.getMessage() for record in caplog.records] == [
        "10.0.0.7:1234 disconnected: it quacks too loudly"
    ]


async def test_one_that_may_not_stay_is_disconnected() -> None:
    transport = Transport()
    connection, _ = connected(transport, admits=False)
    assert (connection.heard, transport.calls) == ([], ["abort"])


async def test_what_a_slow_peer_has_not_taken_counts_until_it_takes_it_or_goes() -> None:
    transport = Transport()
    connection, budget = connected(transport)
    for ending in ("resume_writing", "connection_lost"):
        transport.unsent_bytes = 500
        connection.pause_writing()
        assert budget.unsent_bytes == 500
        transport.unsent_bytes = 300
        connection.sweep(0.0)
        assert budget.unsent_bytes == 300
        transport.unsent_bytes = 0
        if ending == "resume_writing":
            connection.resume_writing()
        else:
            connection.connection_lost(None)
        assert budget.unsent_bytes == 0
    assert connection.heard == ["opened", "swept", "writable", "swept", "lost"]


async def test_a_peer_that_takes_nothing_goes_and_one_that_takes_a_little_stays() -> None:
    transport = Transport()
    connection, _ = connected(transport)
    transport.unsent_bytes = 1_000
    connection.pause_writing()
    for second in range(10):
        transport.unsent_bytes -= 1
        connection.sweep(float(second))
    assert transport.calls == []
    connection.sweep(9.0 + WAIT_MS / 1000)
    assert transport.calls == []
    connection.sweep(9.1 + WAIT_MS / 1000)
    assert transport.calls == ["abort"]


async def test_reading_is_stopped_and_resumed_once() -> None:
    transport = Transport()
    connection, _ = connected(transport)
    for reads in (True, False, False, True, True):
        connection.reads_on(reads)
        assert connection.is_reading is reads
    assert transport.calls == ["pause_reading", "resume_reading"]


async def test_at_the_end_the_peer_may_hang_up_first() -> None:
    transport = Transport()
    connection, _ = connected(transport)
    connection.reads_on(False)
    connection.drain()
    assert transport.calls == ["pause_reading", "write_eof", "resume_reading"]
    await until(lambda: transport.calls[-1] == "close")


async def test_a_transport_that_has_no_half_close_is_closed() -> None:
    transport = Transport(can_write_eof=False)
    connection, _ = connected(transport)
    connection.drain()
    assert transport.calls == ["close"]


async def test_who_takes_nothing_of_the_last_answer_is_given_up() -> None:
    transport = Transport()
    connection, _ = connected(transport)
    transport.unsent_bytes = 50
    connection.drain()
    connection.sweep(0.0)
    connection.sweep(0.1 + WAIT_MS / 1000)
    assert transport.calls[-1] == "abort"
    assert "swept" not in connection.heard, "it has ended"
