"""Who is connected, told from door to door: they know the broker, and not each other.

A door that knows its peers by name and purpose adds a function that lists them; whichever shows
them asks for all. Nothing is kept here.

Who may call: the broker's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Connected:
    """A peer that has said who it is. `channel` is how it reaches the door, `topics` what it has
    chosen so far."""

    door: str
    role: str
    id: str
    channel: str
    topics: tuple[str, ...]


class Connections:
    def __init__(self) -> None:
        self._listings: set[Callable[[], Iterable[Connected]]] = set()

    def add(self, listing: Callable[[], Iterable[Connected]]) -> None:
        """What it gives has to be cheap: one step lists all of them."""
        self._listings.add(listing)

    def discard(self, listing: Callable[[], Iterable[Connected]]) -> None:
        self._listings.discard(listing)

    def all(self) -> list[Connected]:
        """By door, role, id and channel."""
        return sorted(peer for listing in self._listings for peer in listing())
