"""Exactly once through kills and lost answers, over every listener (R2, R6, D7); and the same
torture finds a broker out that leaves a check out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.pubsub.torture import LISTENERS, Torture

pytestmark = pytest.mark.processes

SEED = 20_221
PUTS = 100
KILLS = 6
#: Whoever has lost something may wait for it for ever.
END_S = 15


@pytest.mark.parametrize("way", LISTENERS)
@pytest.mark.timeout(900)
def test_every_message_is_there_exactly_once_for_every_subscriber(tmp_path: Path, way: str) -> None:
    with Torture(tmp_path, way, SEED, puts=PUTS) as torture:
        outcome = torture.run(KILLS)
    assert outcome.violations == []
    assert outcome.puts == PUTS * 3 * 2
    # Nothing is proved by faults that did not happen.
    for fault in ("answers lost", "requests doubled", "brokers killed"):
        assert outcome.faults[fault] > 0


@pytest.mark.parametrize(
    ("way", "bug", "found"),
    [
        ("http", "last-id", "acknowledged and never came"),
        ("zmq", "last-id", "acknowledged and never came"),
        ("http", "sequence", "came more than once"),
        ("zmq", "sequence", "came more than once"),
        ("http-keys", "key", "came more than once"),
    ],
)
def test_a_broker_that_leaves_a_check_out_is_found_out(
    tmp_path: Path, way: str, bug: str, found: str
) -> None:
    command = (sys.executable, "-m", "tests.pubsub.planted", bug)
    # Nobody is killed: lost answers are enough.
    with Torture(
        tmp_path, way, SEED, puts=50, command=command, mortality=0, end_s=END_S
    ) as torture:
        outcome = torture.run(kills=0)
    assert any(found in violation for violation in outcome.violations), outcome


@pytest.mark.parametrize("bug", ["last-id", "sequence"])
@pytest.mark.timeout(900)
def test_a_python_client_that_leaves_a_check_out_is_found_out(tmp_path: Path, bug: str) -> None:
    """Within one life of it librdkafka repeats by itself, so workers have to die for that."""
    worker = (sys.executable, "-m", "tests.pubsub.planted_worker", bug)
    with Torture(
        tmp_path, "python", SEED, puts=40, worker=worker, mortality=0.005, end_s=END_S
    ) as torture:
        outcome = torture.run(kills=0)
    assert any("more than once" in violation for violation in outcome.violations), outcome
