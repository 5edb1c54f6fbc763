"""All protocols on a failing network: nothing acknowledged is lost, every answer is right."""

from __future__ import annotations

from collections import Counter, deque
from itertools import count
from typing import Any

import pytest

from quackmq.protocols.http import connection as http_connection
from quackmq.protocols.kafka.codec.framing import Frames
from quackmq.protocols.line.subscriber import Subscriber
from quackmq.protocols.zmq.connection import Peer
from quackmq.serving.budgets import SendBudget
from tests.simulation.platter import Counts
from tests.simulation.protocols import LIMITS, simulate_protocols
from tests.simulation.shrunk import missing
from tests.simulation.world import Failure

pytestmark = pytest.mark.sweep

_SEEDS = 25
#: Each must have happened, or the simulation proves less than it says.
_MUST_HAPPEN = (
    "closed while clients were busy",
    "commits whose answer was lost",
    "connections that were reset",
    "connections to a Unix socket",
    "event streams resumed",
    "event streams that ended properly",
    "events received",
    "group commits",
    "http connections lost",
    "http entries acknowledged",
    "http entries consumed",
    "idle event streams that ended with the broker",
    "kafka connections lost",
    "kafka entries acknowledged",
    "kafka entries fetched",
    "kernel syncs",
    "line connections lost",
    "line entries acknowledged",
    "line entries received",
    "links that stalled",
    "listeners closed",
    "numbered http entries acknowledged",
    "other requests behind Kafka's produces",
    "peers that misbehave: ask_once",
    "peers that misbehave: never_read",
    "peers that misbehave: say_nothing",
    "peers that misbehave: send_half",
    "peers that misbehave: send_noise",
    "pipes closed first: both",
    "pipes closed first: reading",
    "pipes closed first: writing",
    "power cuts",
    "probes answered",
    "process crashes",
    "socket files of dead brokers",
    "transactions aborted",
    "transactions committed",
    "waiting requests that the closing broker answered",
    "waiting subscribers that were told to terminate",
    "zmq connections lost",
    "zmq entries acknowledged",
    "zmq entries received",
)


def test_no_loss_of_connections_or_crash_breaks_a_promise_of_a_protocol() -> None:
    counts: Counts = Counter()
    for seed in range(_SEEDS):
        counts += simulate_protocols(seed)
    absent = [what for what in _MUST_HAPPEN if not counts[what]]
    assert not absent, f"never happened: {absent}"
    assert not missing(LIMITS, counts), "limits that were never reached"


def test_kafka_requests_that_lose_a_byte_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    compact = Frames.compact

    def compact_and_lose(self: Frames) -> None:
        compact(self)
        if self._end > self._start:
            self._view[self._end - 1] ^= 1

    monkeypatch.setattr(Frames, "compact", compact_and_lose)
    fails_within(_SEEDS)


def test_http_answers_in_another_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stack(deque[Any]):
        popleft = deque.pop

    monkeypatch.setattr(http_connection, "deque", Stack)
    fails_within(_SEEDS)


def test_zmq_messages_that_are_left_unhandled_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    pump, calls = Peer.pump, count(1)

    def pump_mostly(self: Peer) -> None:
        if next(calls) % 50:
            pump(self)

    monkeypatch.setattr(Peer, "pump", pump_mostly)
    fails_within(_SEEDS)


def test_line_answers_that_acknowledge_nothing_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Subscriber, "on_successful", lambda self: None)
    fails_within(_SEEDS)


def test_unsent_bytes_that_stay_counted_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    add = SendBudget.add
    monkeypatch.setattr(SendBudget, "add", lambda self, change: add(self, max(0, change)))
    fails_within(_SEEDS)


def fails_within(seeds: int) -> None:
    with pytest.raises(Failure):
        for seed in range(seeds):
            simulate_protocols(seed)
