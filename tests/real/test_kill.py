"""SIGKILL at random instants under load: what was acknowledged is there, in order and once.

Ten kills here; as many as you like, with `python -m tests.real.soak --kills 1000`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.real.broker import QUACKMQ, SMALL_QUACKMQ
from tests.real.driving import drive
from tests.real.killing import run_round

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("command", [QUACKMQ, SMALL_QUACKMQ], ids=["default", "small"])
def test_a_broker_killed_again_and_again_keeps_what_it_promised(
    command: Sequence[str], tmp_path: Path
) -> None:
    result = run_round(tmp_path / "data", some_seed(), kills=5, command=command)
    assert result.violations == [], str(result)
    assert result.recoveries > 0, "no kill left anything to recover"


def test_cursors_of_a_store_killed_again_and_again_are_never_behind(tmp_path: Path) -> None:
    cursors = drive(tmp_path / "data", some_seed(), kills=10)
    assert cursors.violations == []


def some_seed() -> int:
    """Printed, which pytest shows for a test that fails in whatever way."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    return seed
