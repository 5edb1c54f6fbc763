"""Subscriptions in memory, of one mode, by topic and by name. Nothing empty is kept.

Who may call: the broker's loop.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar
from uuid import UUID

from quackmq.broker import limits
from quackmq.errors import LimitReached
from quackmq.model.topic import Topic


class _Held(Protocol):
    name: str
    topic: Topic


H = TypeVar("H", bound=_Held)


class SubscriptionRoom:
    """Counts the subscriptions of all modes together, because their limit holds for the sum."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def check(self) -> None:
        """Raise LimitReached if there is no room for one more."""
        if self.count >= limits.SUBSCRIPTIONS:
            raise LimitReached(f"there are {limits.SUBSCRIPTIONS} subscriptions: unsubscribe some")


class Registry(Generic[H]):
    __slots__ = ("_room", "by_name", "by_topic")

    def __init__(self, room: SubscriptionRoom) -> None:
        self.by_topic: dict[UUID, dict[str, H]] = {}
        self.by_name: dict[str, dict[UUID, H]] = {}
        self._room = room

    def add(self, held: H) -> None:
        self.by_topic.setdefault(held.topic.id, {})[held.name] = held
        self.by_name.setdefault(held.name, {})[held.topic.id] = held
        self._room.count += 1

    def remove(self, held: H) -> None:
        of_topic, of_name = self.by_topic[held.topic.id], self.by_name[held.name]
        del of_topic[held.name]
        if not of_topic:
            del self.by_topic[held.topic.id]
        del of_name[held.topic.id]
        if not of_name:
            del self.by_name[held.name]
        self._room.count -= 1
