"""What goes wrong again and again, in the log once in a while, with how often."""

from __future__ import annotations

import logging
from collections.abc import Callable

from quackmq.serving import limits


class RateLimitedLog:
    """Who may call: the loop, whose clock is `time`."""

    def __init__(self, log: logging.Logger, what: str, time: Callable[[], float]) -> None:
        """`what` is a format for how many there were and the last of them."""
        self.count = 0
        self._log = log
        self._what = what
        self._time = time
        self._told = 0
        self._told_at: float | None = None

    def add(self, last: str, count: int = 1) -> None:
        """The first is told at once, those that follow soon after it with the next one."""
        self.count += count
        now = self._time()
        if self._told_at is None or (now - self._told_at) * 1000 >= limits.REPEATED_LOG_MS:
            self._log.warning(self._what, self.count - self._told, last)
            self._told, self._told_at = self.count, now
