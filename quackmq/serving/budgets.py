"""Memory budgets shared by connections: one for received requests, one for unsent responses.

A large request reserves its memory before it is received. If there is not enough memory, the
protocol decides: it refuses the request, or lets the connection wait in a `WaitingLine`. Unsent
bytes are counted after they are written. So responses that were already begun can exceed the send
budget.

Pure. Call it only from the event loop.
"""

from __future__ import annotations

from collections.abc import Callable


class ReceiveBudget:
    """Bound the memory of received requests; call `on_release` whenever memory is released."""

    __slots__ = ("_on_release", "most_bytes", "used_bytes")

    def __init__(self, most_bytes: int, on_release: Callable[[], None] = lambda: None) -> None:
        self.most_bytes = most_bytes
        self.used_bytes = 0
        self._on_release = on_release

    @property
    def has_room(self) -> bool:
        return self.used_bytes < self.most_bytes

    def reserve(self, size: int) -> bool:
        """Reserve `size` bytes; return False, and reserve nothing, if that exceeds the budget."""
        if self.used_bytes + size > self.most_bytes:
            return False
        self.used_bytes += size
        return True

    def release(self, size: int) -> None:
        self.used_bytes -= size
        self._on_release()


class SendBudget:
    """Bound the unsent bytes; call `on_change(has_room)` when the budget fills up or has room
    again.
    """

    __slots__ = ("_on_change", "most_bytes", "unsent_bytes")

    def __init__(
        self, most_bytes: int, on_change: Callable[[bool], None] = lambda has_room: None
    ) -> None:
        self.most_bytes = most_bytes
        self.unsent_bytes = 0
        self._on_change = on_change

    @property
    def has_room(self) -> bool:
        return self.unsent_bytes < self.most_bytes

    def add(self, change_bytes: int) -> None:
        """Change the count of unsent bytes by `change_bytes`, which may be negative."""
        had_room = self.unsent_bytes < self.most_bytes
        self.unsent_bytes += change_bytes
        has_room = self.unsent_bytes < self.most_bytes
        if has_room is not had_room:
            self._on_change(has_room)
