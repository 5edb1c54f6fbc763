"""X2 to X6, exactly once through the reliable proxy: broker, publishers and subscribers are killed
again and again, a chaos client is at the same topic, and the checker of all listeners finds
nothing. `make soak` does more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pubsub.proxy_cast import DEATHS, PUBLISHERS, SUBSCRIBERS, run

pytestmark = pytest.mark.processes

BROKER_KILLS = 2


@pytest.mark.parametrize("seed", [9])
def test_x4_each_message_comes_once_whatever_is_killed(tmp_path: Path, seed: int) -> None:
    outcome = run(tmp_path, seed, BROKER_KILLS)
    assert outcome.violations == []
    assert outcome.deaths == DEATHS * (len(PUBLISHERS) + len(SUBSCRIBERS))
