"""The watchdog: the longest pause of the loop, what caused it, and how often it is told."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable

import pytest
import uvloop

from quackmq import limits
from quackmq.broker import Broker
from quackmq.loop_clock import Pause, loop_clock
from quackmq.model.topic import Offsets, PartitionKey
from quackmq.stores.memory import MemoryStore
from quackmq.watchdog import LoopWatchdog, describe_stack
from tests.broker.support import CALLER

#: Held until the watchdog has had the chance to look several times.
HOLD_S = (limits.LOOP_BEAT_MS + 10 * limits.LOOP_SAMPLE_MS) / 1000


def compute_for(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1_000))


def a_function_that_takes_long() -> None:
    compute_for(HOLD_S)


def forget_earlier_pauses() -> None:
    """A busy machine may have stopped the loop before."""
    loop_clock().longest = None


async def found_pause() -> Pause:
    clock = loop_clock()
    async with asyncio.timeout(60):
        while clock.longest is None:
            await asyncio.sleep(0.001)
    return clock.longest


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_function_that_holds_the_loop_is_named(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def hold() -> None:
        clock = loop_clock()
        clock.start()
        watchdog = LoopWatchdog()
        watchdog.start()
        await asyncio.sleep(2 * limits.LOOP_BEAT_MS / 1000)
        forget_earlier_pauses()
        a_function_that_takes_long()
        pause = await found_pause()
        assert pause.pause_ms >= HOLD_S * 1000 - 2 * limits.LOOP_BEAT_MS
        assert pause.cpu_ms > 0
        assert "compute_for" in pause.cause
        watchdog.stop()
        clock.stop()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(hold())


async def test_what_the_broker_did_is_told_as_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryStore, "offsets", slow_offsets)
    broker = Broker(MemoryStore())
    await broker.open()
    watchdog = LoopWatchdog()
    watchdog.start()
    await asyncio.sleep(2 * limits.LOOP_BEAT_MS / 1000)
    topic = await broker.create_topic(CALLER, "news")
    forget_earlier_pauses()
    await broker.offsets(CALLER, PartitionKey(topic.id, 0))
    pause = await found_pause()
    assert "LogService.offsets (quackmq/broker/log/service.py:" in pause.cause
    watchdog.stop()
    await broker.close()


async def slow_offsets(self: MemoryStore, key: PartitionKey) -> Offsets:
    compute_for(HOLD_S)
    return Offsets(0, 0, 0, 0)


@pytest.mark.sweep
async def test_the_garbage_collector_is_named_if_it_took_most_of_a_pause() -> None:
    clock = loop_clock()
    clock.start()
    watchdog = LoopWatchdog()
    watchdog.start()
    await asyncio.sleep(2 * limits.LOOP_BEAT_MS / 1000)
    garbage: list[list[object]] = [[] for _ in range(300_000)]
    for each in garbage:
        each.append(garbage)
    while clock.longest is None or "garbage collector" not in clock.longest.cause:
        clock.longest = None
        end = time.monotonic() + HOLD_S
        while time.monotonic() < end:
            gc.collect()
        await asyncio.sleep(2 * limits.LOOP_BEAT_MS / 1000)
    watchdog.stop()
    clock.stop()


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_loop_that_only_waits_is_nowhere(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Neither what started it nor the loop's own code would tell anybody anything."""
    thread_id = threading.get_ident()
    seen: list[str] = []

    def look() -> str:
        return describe_stack(sys._current_frames()[thread_id])

    async def wait() -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(60):
            while "" not in seen:
                seen.append(await loop.run_in_executor(None, look))

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(wait())


async def test_a_pause_of_which_nothing_was_seen_has_no_place() -> None:
    watchdog = LoopWatchdog()
    assert watchdog._find_cause(202, 0) == "the machine was busy, or the process was stopped"
    watchdog._line_counts.update(["", "", "Cleaner.run"])
    assert watchdog._find_cause(202, 0) == "the machine was busy, or the process was stopped"
    watchdog._line_counts.update(["Cleaner.run"])
    assert watchdog._find_cause(202, 0).endswith("was stopped, in Cleaner.run")
    assert watchdog._find_cause(202, 150) == "it is unknown which line ran"


async def test_long_pauses_are_logged_but_not_each_of_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watchdog = LoopWatchdog()
    with caplog.at_level(logging.WARNING):
        watchdog._on_pause(Pause(limits.LOOP_PAUSE_LOG_MS - 1, 1, 0, "short"))
        for number in range(5):
            watchdog._on_pause(Pause(limits.LOOP_PAUSE_LOG_MS, 100, 0, f"long {number}"))
        watchdog._logged_s -= limits.LOOP_PAUSE_LOG_INTERVAL_MS / 1000
        watchdog._on_pause(Pause(1_000, 100, 0, "last"))
    assert [record.message for record in caplog.records] == [
        "the broker stood still for 200 ms and used 100 ms of CPU: long 0",
        "the broker stood still for 1000 ms and used 100 ms of CPU: last; 4 more since the last "
        "line",
    ]
