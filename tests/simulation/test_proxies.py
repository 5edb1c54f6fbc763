"""The reliable proxy on a failing network: every message until it is acknowledged, nobody late."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.platter import Counts
from tests.simulation.proxies import LIMITS, simulate_proxies
from tests.simulation.shrunk import missing

pytestmark = pytest.mark.sweep

_SEEDS = range(2, 8)
#: Each must have happened, or the simulation proves less than it says.
_MUST_HAPPEN = (
    "acknowledgements noted",
    "clients that changed their address",
    "closed while clients were busy",
    "connections that opened slowly",
    "connections that were reset",
    "data again after `not_yet`",
    "data requests",
    "first deliveries",
    "goodbyes",
    "hellos",
    "links that stalled",
    "listeners closed",
    "messages of PUB sockets",
    "messages of SUB sockets",
    "power cuts",
    "probes answered",
    "process crashes",
    "proxy answers unreachable",
    "proxy connections lost",
    "proxy entries acknowledged",
    "PUB sockets that ended in good order",
    "SUB sockets that read nothing",
    "silent client never answers",
    "silent client never reads",
    "silent client says nothing",
    "silent client sends noise",
    "visits",
    "xpub connections lost",
)


def test_no_loss_of_connections_or_crash_breaks_a_promise_of_the_proxy() -> None:
    counts: Counts = Counter()
    for seed in _SEEDS:
        counts += simulate_proxies(seed)
    absent = [what for what in _MUST_HAPPEN if not counts[what]]
    assert not absent, f"never happened: {absent}"
    assert not missing(LIMITS, counts), "limits that were never reached"


def test_a_seed_is_the_same_run_every_time() -> None:
    traces: list[list[str]] = [[], []]
    for trace in traces:
        simulate_proxies(_SEEDS[1], trace.append)
    assert traces[0] == traces[1]
