"""Wait for a condition with a deadline: tests never sleep for a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Final, TypeVar, TypeVarTuple

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

#: For anything that takes milliseconds on an idle machine. Long, since machines can be busy.
DEADLINE_S: Final = 60.0
_EAGER_TURNS: Final = 1_000


async def soon(awaitable: Awaitable[T]) -> T:
    """Return the result of something that must end by itself. TimeoutError."""
    async with asyncio.timeout(DEADLINE_S):
        return await awaitable


async def until(condition: Callable[[*Arguments], object], *arguments: *Arguments) -> None:
    """Wait until `condition` returns something true, or a coroutine that does, while other tasks
    run. Raise TimeoutError after the deadline. In a loop, pass the loop's variables as `arguments`:
    a lambda would see their later values.

    It looks in every turn of the loop at first, so that a condition that holds for a moment only is
    not missed."""
    async with asyncio.timeout(DEADLINE_S):
        for turn in count():
            found = condition(*arguments)
            if await found if isinstance(found, Awaitable) else found:
                return
            await asyncio.sleep(0 if turn < _EAGER_TURNS else 0.001)


def wait_until(
    condition: Callable[[], object],
    what: str = "the condition",
    deadline_s: float = DEADLINE_S,
    pause_s: float = 0.002,
) -> None:
    """Wait until `condition` is true. Use a longer pause for a condition that costs much."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {deadline_s:g} s: {what}"
        time.sleep(pause_s)
