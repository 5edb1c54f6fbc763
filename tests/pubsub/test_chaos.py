"""X5, exactly once where chaos clients are at a broker that is killed; and the same finds a broker
out that leaves a check out. `make soak` does more, over every listener."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.pubsub.chaos import Chaos

pytestmark = pytest.mark.processes

SEED = 5
PUTS = 12
BROKER_KILLS = 2
#: Whoever has lost something waits for it for ever.
END_S = 5


@pytest.mark.parametrize("listener", ["zmq", "kafka"])
@pytest.mark.timeout(600)
def test_x5_chaos_clients_take_every_message_whatever_becomes_of_the_broker(
    tmp_path: Path, listener: str
) -> None:
    with Chaos(tmp_path, listener, SEED, puts=PUTS) as chaos:
        outcome = chaos.run(BROKER_KILLS, ["broker"])
    assert outcome.violations == []
    assert outcome.puts == PUTS * 2
    # Nothing is proved by faults that did not happen.
    assert outcome.faults["brokers killed"] == BROKER_KILLS
    assert outcome.faults["drop"] + outcome.faults["delay"] + outcome.faults["double"] > 0


def test_a_broker_that_forgets_what_was_dropped_is_found_out(tmp_path: Path) -> None:
    """So many messages that takers drop some, whatever they meet when."""
    command = (sys.executable, "-m", "tests.pubsub.planted", "last-id")
    with Chaos(tmp_path, "zmq", SEED, puts=30, command=command, end_s=END_S) as chaos:
        outcome = chaos.run(0)
    assert any("acknowledged and never came" in found for found in outcome.violations), outcome
