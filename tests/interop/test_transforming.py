"""Exactly once from one topic to another, whoever is killed meanwhile; and that it would be seen if
this were not so. For longer: `python -m tests.interop.transforming`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.interop.transforming import CLIENTS, Torture, violations

pytestmark = [pytest.mark.timeout(900), pytest.mark.processes]


@pytest.mark.parametrize(
    "client", ["confluent", pytest.param("java", marks=pytest.mark.needs("kafka-clients"))]
)
def test_the_target_holds_exactly_the_image_of_the_source(client: str, tmp_path: Path) -> None:
    with Torture(tmp_path / "data", some_seed(), CLIENTS[client]) as torture:
        torture.begin()
        torture.suffer(4)
        torture.kill_broker()
        torture.kill_program()
        outcome = torture.finish()
    print(outcome)
    assert outcome.violations == []


def test_without_transactions_it_does_not(tmp_path: Path) -> None:
    torture = Torture(
        tmp_path / "data", some_seed(), CLIENTS["confluent"], transactions=False, dawdle_ms=200
    )
    with torture:
        torture.begin()
        for _ in range(6):  # some of which come too late: it commits soon
            torture.kill_program(amid=True)
        outcome = torture.finish()
    print(outcome)
    assert any("more than once" in each for each in outcome.violations)


# --- the checker -------------------------------------------------------------------------------

SOURCE = {0: ["a", "b", "c"], 1: ["d"], 2: []}


def images(*values: str) -> list[str]:
    return [f"image of {value}" for value in values]


def test_an_image_is_none_the_worse_for_being_mixed() -> None:
    assert violations(SOURCE, {0: images("a", "d", "b"), 1: images("c")}) == []


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        (images("a", "b", "d"), "1 records are missing, the first of them: ['c']"),
        (images("a", "b", "c", "b", "d"), "1 records came more than once, the first: ['b']"),
        (images("b", "a", "c", "d"), "the images of partition 0 are out of order"),
        (images("a", "b", "c", "d", "e"), "'image of e', which is the image of nothing"),
        ([*images("a", "b", "c"), "d"], "'d', which is the image of nothing"),
    ],
)
def test_whatever_is_wrong_is_found(target: list[str], complaint: str) -> None:
    assert complaint in " ".join(violations(SOURCE, {0: target}))


def some_seed() -> int:
    """Printed, which pytest shows for a test that fails in whatever way."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    return seed
