"""How long a stop may take: as long as it gets on."""

from __future__ import annotations

import asyncio
import logging

import pytest

from quackmq.cli import limits as cli_limits
from quackmq.cli.broker import closing

DEADLINE_S = 20


class Work:
    """Some work is done each time that somebody looks, and then no more."""

    def __init__(self, looks: int) -> None:
        self.looks = 0
        self._most = looks

    def done(self) -> int:
        self.looks += 1
        return min(self.looks, self._most)


@pytest.fixture(autouse=True)
def short_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_limits, "DRAIN_MS", 4)


async def test_nothing_is_given_up_while_work_is_done(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quackmq")
    work, given_up = Work(50), asyncio.Event()
    closing.watch(work.done, given_up.set)
    async with asyncio.timeout(DEADLINE_S):
        await given_up.wait()
    assert work.looks == 54, "four looks at no work"
    assert "closing: 49 writes and syncs so far" in caplog.messages


async def test_a_stop_that_does_nothing_is_given_up_once() -> None:
    work, given_up = Work(1), []
    closing.watch(work.done, lambda: given_up.append(work.looks))
    async with asyncio.timeout(DEADLINE_S):
        while not given_up:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    assert given_up == [work.looks]
