"""Locks with a deadline."""

from __future__ import annotations

import threading

from quackmq.client.deadline import Deadline


class locked:
    """Lock a lock within a `with` block. Raises QuackTimeout if it is not free by the deadline."""

    __slots__ = ("_deadline", "_lock", "_waited_for")

    def __init__(
        self, lock: threading.Lock | threading.RLock, waited_for: str, deadline: Deadline
    ) -> None:
        self._lock = lock
        self._waited_for = waited_for
        self._deadline = deadline

    def __enter__(self) -> None:
        # A free lock is taken even if the deadline has passed.
        if self._lock.acquire(blocking=False):
            return
        if not self._lock.acquire(timeout=min(self._deadline.remaining_s(), threading.TIMEOUT_MAX)):
            raise self._deadline.timeout_error(self._waited_for)

    def __exit__(self, *error: object) -> None:
        self._lock.release()
