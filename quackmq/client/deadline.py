"""Deadlines: every wait of a client ends at one. The error says what the client waited for."""

from __future__ import annotations

import math
import time

from quackmq.client import limits
from quackmq.errors import InvalidRequest, QuackTimeout


class Deadline:
    """The time at which a wait must end, and its length."""

    __slots__ = ("__weakref__", "_at", "is_explicit", "seconds")

    def __init__(self, seconds: float, *, is_explicit: bool = True) -> None:
        """`is_explicit`: whether the program has set this timeout; otherwise it is a default."""
        if not _is_number(seconds) or not seconds >= 0:
            raise InvalidRequest(f"a timeout is a number of seconds, 0 or more, not {seconds!r}")
        self.seconds = seconds
        self.is_explicit = is_explicit
        self._at = time.monotonic() + seconds

    def remaining_s(self) -> float:
        return max(0.0, self._at - time.monotonic())

    def slice_s(self) -> float:
        """Return the remaining time, but at most a slice that is short enough for Ctrl-C."""
        return min(self.remaining_s(), limits.CLIENT_LONGEST_POLL_MS / 1000)

    def end(self) -> None:
        """End the wait now. Any thread may call this."""
        self._at = time.monotonic()

    def has_passed(self) -> bool:
        return time.monotonic() >= self._at

    def duration_text(self) -> str:
        return "for ever" if math.isinf(self.seconds) else f"{self.seconds:g} s"

    def timeout_error(self, waited_for: str) -> QuackTimeout:
        """Return the error that says how long the call waited, and for what."""
        return QuackTimeout(f"waited {self.duration_text()} for {waited_for}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
