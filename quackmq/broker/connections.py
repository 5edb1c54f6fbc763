"""The connected clients of all listeners. Listeners know the broker, and not each other.

A listener that knows its clients by name adds a function that lists them. A listener that shows
connected clients calls `all`. Nothing is stored here.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Connected:
    """A client that has given its id. `channel` is the way in which it is connected, `topics` are
    those that it has chosen so far."""

    listener: str
    role: str
    id: str
    channel: str
    topics: tuple[str, ...]


class Connections:
    """The functions that list the clients of each listener."""

    def __init__(self) -> None:
        self._listings: set[Callable[[], Iterable[Connected]]] = set()

    def add(self, listing: Callable[[], Iterable[Connected]]) -> None:
        """Add a function that lists clients. It must be fast: all are called in one step."""
        self._listings.add(listing)

    def discard(self, listing: Callable[[], Iterable[Connected]]) -> None:
        self._listings.discard(listing)

    def all(self) -> list[Connected]:
        """Return all connected clients, sorted by listener, role, id and channel."""
        return sorted(peer for listing in self._listings for peer in listing())
