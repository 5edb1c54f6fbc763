"""The Python client keeps its promises while the broker crashes and its own process is killed."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.platter import Counts
from tests.simulation.python_clients import simulate_python_clients

pytestmark = pytest.mark.sweep

_SEEDS = 7
#: Each must have happened, or the simulation proves less than it says.
_MUST_HAPPEN = (
    "calls that failed: empty",
    "calls that failed: timeout",
    "calls that failed: unusable_directory",
    "consuming programs killed: repeat",
    "consuming programs killed: skip",
    "links that stalled",
    "messages consumed: repeat",
    "messages consumed: skip",
    "messages got: by-queue",
    "messages got: by-zmq-client",
    "messages put: by-queue",
    "messages put: by-zmq-client",
    "power cuts",
    "process crashes",
    "programs killed",
)


def test_no_crash_of_broker_or_client_breaks_a_promise_of_the_python_client() -> None:
    counts: Counts = Counter()
    for seed in range(_SEEDS):
        counts += simulate_python_clients(seed)
    absent = [what for what in _MUST_HAPPEN if not counts[what]]
    assert not absent, f"never happened: {absent}"
