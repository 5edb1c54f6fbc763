"""The garbage collector looks at few values at a time, and at everything in quiet moments only."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import pytest

from quackmq.cli import limits
from quackmq.cli.broker import collector
from quackmq.cli.broker.collector import FullCollection
from tests.kit.support import let_others_run

#: Enough new objects for a full collection, also if others that were frozen are freed meanwhile.
MANY = 10 * limits.YOUNG_VALUES


class Circle:
    """Refers to itself, so that only the collector frees it."""

    living = 0

    def __init__(self) -> None:
        self.itself = self
        Circle.living += 1

    def __del__(self) -> None:
        Circle.living -= 1


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    """The collector as a broker has it; afterwards as it was."""
    thresholds, callbacks = gc.get_threshold(), list(gc.callbacks)
    gc.collect()
    collector.set_up()
    yield
    gc.callbacks[:] = callbacks
    gc.set_threshold(*thresholds)


@pytest.fixture
def full_looks() -> list[int]:
    """The looks at everything; `collecting` takes the callback away."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start" and info["generation"] == 2:
            seen.append(2)

    gc.callbacks.append(note)
    return seen


def test_values_that_stay_are_looked_at_in_portions_and_then_no_more(full_looks: list[int]) -> None:
    most = 0

    def note(phase: str, info: dict[str, Any]) -> None:
        nonlocal most
        if phase == "start":
            most = max(most, sum(len(gc.get_objects(each)) for each in (0, 1, 2)))

    gc.callbacks.append(note)
    before = gc.get_freeze_count()
    kept: list[list[int]] = [[number] for number in range(20 * limits.YOUNG_VALUES)]
    assert most < (limits.YOUNG_LOOKS + 3) * limits.YOUNG_VALUES
    assert gc.get_freeze_count() - before > len(kept) / 2
    assert not full_looks


def test_young_circles_are_freed_while_they_come() -> None:
    most = 0
    for _ in range(3 * limits.YOUNG_VALUES):
        Circle()
        most = max(most, Circle.living)
    assert most <= limits.YOUNG_VALUES + 1


async def test_circles_that_died_late_are_freed_in_a_quiet_moment(
    full_looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "QUIET_MS", 1)
    monkeypatch.setattr(limits, "QUIET_PERCENT", 1_000_000)
    monkeypatch.setattr(limits, "FULL_COLLECTION_MS", 0)
    full = FullCollection()
    full.start()
    held = [Circle() for _ in range(MANY)]
    gc.collect(1)  # freezes them
    held.clear()
    gc.collect(1)
    assert Circle.living == MANY
    try:
        async with asyncio.timeout(30):
            while Circle.living:
                await asyncio.sleep(0)
    finally:
        full.stop()
    assert full_looks


@pytest.mark.parametrize("percent", [0, 1_000_000])
async def test_a_busy_loop_is_spared_until_it_is_very_late(
    full_looks: list[int], monkeypatch: pytest.MonkeyPatch, percent: int
) -> None:
    """A quiet one is as well, if there is hardly anything new."""
    monkeypatch.setattr(limits, "QUIET_PERCENT", percent)
    monkeypatch.setattr(limits, "FULL_COLLECTION_MS", 0)
    full = FullCollection()
    full.start()
    held = [Circle() for _ in range(MANY if not percent else 1)]
    gc.collect(1)
    full._collect_if_idle()
    await let_others_run()
    assert not full_looks
    monkeypatch.setattr(limits, "LATEST_FULL_COLLECTION_MS", 0)
    full._collect_if_idle()
    assert bool(full_looks) == (not percent)
    full.stop()
    held.clear()
