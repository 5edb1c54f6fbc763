"""Waits that others can end, changes that cannot be cancelled, locks by name, single answers."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from quackmq.broker.lifecycle import (
    Lifecycle,
    NamedLocks,
    Waits,
    finish_before_cancelling,
)
from quackmq.errors import StoreReadOnly
from tests.kit.support import let_others_run


class Ended(Exception):
    pass


async def test_a_wait_is_ended_with_an_error_and_its_task_goes_on() -> None:
    waits = Waits()

    async def wait() -> str:
        with pytest.raises(Ended):
            await waits.wait(asyncio.Event().wait())
        await asyncio.sleep(0)
        return "went on"

    task = asyncio.create_task(wait())
    await let_others_run()
    assert len(waits) == 1
    waits.end(Ended())
    waits.end(Ended())
    assert await task == "went on"
    assert len(waits) == 0
    assert task.cancelling() == 0


async def test_a_cancellation_by_somebody_else_stays_one() -> None:
    waits = Waits()
    task = asyncio.create_task(waits.wait(asyncio.Event().wait()))
    await let_others_run()
    waits.end(Ended())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_wait_that_ends_by_itself_gives_what_it_waited_for() -> None:
    assert await Waits().wait(asyncio.sleep(0, "result")) == "result"


async def test_one_wait_in_another_is_ended_by_either() -> None:
    for ended in (0, 1):
        waits = [Waits(), Waits()]
        task = asyncio.create_task(waits[0].wait(waits[1].wait(asyncio.Event().wait())))
        await let_others_run()
        waits[ended].end(Ended())
        with pytest.raises(Ended):
            await task


async def test_a_change_is_carried_through_without_its_caller() -> None:
    changes = Lifecycle()
    go_on = asyncio.Event()
    done = []

    async def change() -> None:
        await go_on.wait()
        done.append(True)

    caller = asyncio.create_task(changes.run_shielded(change()))
    await let_others_run()
    caller.cancel()
    await let_others_run()
    assert not done
    go_on.set()
    await changes.finish()
    assert done


@pytest.mark.parametrize("error", [StoreReadOnly("full"), AssertionError("a bug")], ids=repr)
@pytest.mark.parametrize("carry", [Lifecycle().run_shielded, finish_before_cancelling])
async def test_that_a_change_is_refused_is_not_told_when_its_caller_has_left_but_a_bug_is(
    carry: Callable[[Coroutine[Any, Any, None]], Coroutine[Any, Any, None]], error: Exception
) -> None:
    """asyncio told of both, as of something that had escaped everybody."""
    told: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
    go_on = asyncio.Event()

    async def change() -> None:
        await go_on.wait()
        raise error

    caller = asyncio.create_task(carry(change()))
    await let_others_run()
    caller.cancel()
    await let_others_run()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await let_others_run()
    gc.collect()
    assert told == ([] if isinstance(error, StoreReadOnly) else [error])


async def test_a_lock_keeps_out_those_of_its_name_only() -> None:
    locks = NamedLocks()
    log: list[str] = []

    async def hold(name: str, text: str) -> None:
        async with locks.hold(name):
            log.append(f"{text} in")
            await asyncio.sleep(0)
            log.append(f"{text} out")

    await asyncio.gather(hold("a", "first"), hold("a", "second"), hold("b", "other"))
    assert log.index("first out") < log.index("second in")
    assert log.index("other in") < log.index("first out")


async def test_a_lock_is_passed_on_when_its_holder_fails_or_a_waiter_leaves() -> None:
    locks = NamedLocks()

    async def fail() -> None:
        async with locks.hold("a"):
            await asyncio.sleep(0)
            raise Ended

    failing = asyncio.create_task(fail())
    leaving = asyncio.create_task(fail())
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(failing, leaving, return_exceptions=True)
    async with asyncio.timeout(60), locks.hold("a"):
        pass
