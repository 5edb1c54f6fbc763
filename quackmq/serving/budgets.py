"""Memory over all peers that share a budget: for what they send, and for what they do not take.

A request that is large reserves its memory before it is received. Without memory it is refused, or
it waits in a `WaitingLine`; that is for the protocol to say. What peers have not taken is counted
when it has been written, so this budget can be exceeded by what was begun before.

Pure. Call it only from the event loop.
"""

from __future__ import annotations

from collections.abc import Callable


class ReceiveBudget:
    """`on_release` is called whenever memory is given back."""

    __slots__ = ("_on_release", "most_bytes", "used_bytes")

    def __init__(self, most_bytes: int, on_release: Callable[[], None] = lambda: None) -> None:
        self.most_bytes = most_bytes
        self.used_bytes = 0
        self._on_release = on_release

    @property
    def has_room(self) -> bool:
        return self.used_bytes < self.most_bytes

    def reserve(self, size: int) -> bool:
        """Take so much memory, if there is so much; return whether there was."""
        if self.used_bytes + size > self.most_bytes:
            return False
        self.used_bytes += size
        return True

    def release(self, size: int) -> None:
        self.used_bytes -= size
        self._on_release()


class SendBudget:
    """`on_change` is told when there is no room any more, and when there is room again."""

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
        """Count so many more bytes, or fewer, that peers have not taken."""
        had_room = self.unsent_bytes < self.most_bytes
        self.unsent_bytes += change_bytes
        has_room = self.unsent_bytes < self.most_bytes
        if has_room is not had_room:
            self._on_change(has_room)
