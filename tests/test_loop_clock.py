"""The clock by which clients are waited for: pauses of the loop do not count."""

from __future__ import annotations

import asyncio

import pytest

from quackmq import limits
from quackmq.loop_clock import LoopClock, Pause, loop_clock
from tests.kit.slow_loop import block, on_a_slow_loop

LATE_S = limits.LOOP_LATE_MS / 1000


async def beats(clock: LoopClock, count: int = 1) -> None:
    for _ in range(count):
        before = clock.last_beat_s
        async with asyncio.timeout(60):
            while clock.last_beat_s == before:
                await asyncio.sleep(0.001)


@on_a_slow_loop
async def test_a_pause_of_the_loop_counts_little_however_long_it_is() -> None:
    clock = loop_clock()
    clock.start()
    before = clock.time()
    block(3_600)
    assert clock.time() - before <= LATE_S
    await asyncio.sleep(0)
    assert clock.time() - before < 60, "nor after the turn"
    block(3_600)
    await beats(clock, 2)
    assert clock.time() - before < 60, "nor after the beats"
    clock.stop()


@on_a_slow_loop
async def test_the_clock_never_goes_back() -> None:
    clock = loop_clock()
    times = [clock.time()]
    clock.start()
    for wait_s in (0.0, 0.01, 3_600.0, 0.0, 7.0, 0.2):
        times.append(clock.time())
        block(wait_s)
        times.append(clock.time())
        await beats(clock)
        times.append(clock.time())
    clock.stop()
    times.append(clock.time())
    assert times == sorted(times)


@on_a_slow_loop
async def test_a_loop_that_is_always_late_still_counts_time() -> None:
    clock = loop_clock()
    clock.start()
    before = clock.time()
    for _ in range(20):
        block(1)
        await beats(clock)
    assert clock.time() - before >= 20 * LATE_S * 0.99
    clock.stop()


async def test_time_in_which_the_loop_waits_for_something_counts() -> None:
    clock = loop_clock()
    clock.start()
    before, began = clock.time(), asyncio.get_running_loop().time()
    await asyncio.sleep(4 * LATE_S)
    assert clock.time() - before >= 3 * LATE_S
    assert clock.time() - before <= asyncio.get_running_loop().time() - began + 0.001
    clock.stop()


@on_a_slow_loop
async def test_a_timer_rings_when_its_time_has_been_served() -> None:
    clock = loop_clock()
    clock.start()
    rung = asyncio.Event()
    timer = clock.call_later(0.3, rung.set)
    block(3_600)
    await asyncio.sleep(0.05)
    assert not rung.is_set()
    async with asyncio.timeout(60):
        await rung.wait()
    assert clock.time() >= timer.when
    clock.stop()


@on_a_slow_loop
async def test_a_timer_rings_after_what_had_arrived_was_read_and_handled() -> None:
    """Bytes that were there before the time was up reach a task before the timer rings."""
    clock = loop_clock()
    clock.start()
    order: list[str] = []
    served = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        order.append("read")
        writer.close()
        served.set_result(None)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    await asyncio.sleep(0.05)
    clock.call_later(0.0, order.append, "timer")
    writer.write(b"x")
    await served
    await asyncio.sleep(0.05)
    assert order == ["read", "timer"]
    writer.close()
    server.close()
    clock.stop()


@on_a_slow_loop
async def test_a_timer_that_was_cancelled_does_not_ring() -> None:
    clock = loop_clock()
    rung: list[int] = []
    first = clock.call_later(0.0, rung.append, 1)
    second = clock.call_later(0.01, rung.append, 2)
    await asyncio.sleep(0)
    first.cancel()
    second.cancel()
    await asyncio.sleep(0.05)
    assert rung == []


@on_a_slow_loop
async def test_a_timeout_by_this_clock_does_not_count_a_pause() -> None:
    clock = loop_clock()
    clock.start()
    async with clock.timeout(10):
        block(3_600)
        await asyncio.sleep(0.05)
    with pytest.raises(TimeoutError):
        async with clock.timeout(0.05):
            await asyncio.sleep(60)
    clock.stop()


@on_a_slow_loop
async def test_the_longest_pause_is_kept_with_its_cause() -> None:
    clock = loop_clock()
    told: list[Pause] = []
    clock.find_cause = lambda pause_ms, cpu_ms: "a test"
    clock.on_pause = told.append
    clock.start()
    for seconds in (5, 50, 7):
        block(seconds)
        await beats(clock)
    clock.stop()
    assert clock.longest is not None
    assert 49_000 <= clock.longest.pause_ms <= 60_000
    assert clock.longest.cause == "a test"
    assert len([pause for pause in told if pause.pause_ms > 4_000]) == 3


async def test_a_loop_has_one_clock() -> None:
    assert loop_clock() is loop_clock()
