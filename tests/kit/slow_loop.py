"""An event loop that can be blocked without waiting: its clock jumps, as if a callback had taken
so long. Sockets are real, so that what was sent before lies there unread meanwhile."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable


class SlowLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._blocked_s = 0.0

    def time(self) -> float:
        return super().time() + self._blocked_s

    def block(self, seconds: float) -> None:
        self._blocked_s += seconds


def block(seconds: float) -> None:
    """Hold the running loop, which is a SlowLoop, for so long."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SlowLoop)
    loop.block(seconds)


def on_a_slow_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        async def whole() -> None:
            await test()

        with asyncio.Runner(loop_factory=SlowLoop) as runner:
            runner.run(whole())

    return run
