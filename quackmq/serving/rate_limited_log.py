"""Log a repeated problem at most once per interval, with the number of occurrences."""

from __future__ import annotations

import logging
from collections.abc import Callable

from quackmq.serving import limits


class RateLimitedLog:
    """Count occurrences of one problem. `time` is the loop's clock. Call it only from the loop."""

    def __init__(self, log: logging.Logger, what: str, time: Callable[[], float]) -> None:
        """`what` is a log format for the number of occurrences and the last of them."""
        self.count = 0
        self._log = log
        self._what = what
        self._time = time
        self._told = 0
        self._told_at: float | None = None

    def add(self, last: str, count: int = 1) -> None:
        """Count occurrences. Log at once if the interval has passed, otherwise with a later
        call."""
        self.count += count
        now = self._time()
        if self._told_at is None or (now - self._told_at) * 1000 >= limits.REPEATED_LOG_MS:
            self._log.warning(self._what, self.count - self._told, last)
            self._told, self._told_at = self.count, now
