"""Log a repeated problem at most once per interval, with the number of occurrences."""

from __future__ import annotations

import logging
from collections.abc import Callable

from quackmq.serving import limits


class RateLimitedLog:
    """Count occurrences of one problem. `time` is the loop's clock. Call it only from the loop."""

    def __init__(self, log: logging.Logger, message: str, time: Callable[[], float]) -> None:
        """`message` is a log format with two arguments: the number of occurrences, and the last of
        them."""
        self.count = 0
        self._log = log
        self._message = message
        self._time = time
        self._logged_count = 0
        self._logged_at: float | None = None

    def add(self, last_occurrence: str, count: int = 1) -> None:
        """Count occurrences. Log them now if the interval has passed, otherwise in a later
        call."""
        self.count += count
        now = self._time()
        if self._logged_at is None or (now - self._logged_at) * 1000 >= limits.REPEATED_LOG_MS:
            self._log.warning(self._message, self.count - self._logged_count, last_occurrence)
            self._logged_count, self._logged_at = self.count, now
