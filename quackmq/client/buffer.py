"""Messages that have come and wait to be taken.

A loop over many messages pays for every step, so `listen` does not ask for them one by one: it goes
through the buffer's own iterator, and how far it has come is seen there.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import length_hint

from confluent_kafka import Message as Record


class Buffer:
    """One thread at a time."""

    __slots__ = ("_records", "iterator")

    def __init__(self) -> None:
        self._records: list[Record] = []
        #: Takes messages out, one after the other. It ends also when they are replaced.
        self.iterator: Iterator[Record] = iter(self._records)

    def __len__(self) -> int:
        return length_hint(self.iterator)

    def __iter__(self) -> Iterator[Record]:
        """What is left, without taking it."""
        return iter(self._records[len(self._records) - len(self) :])

    def first(self) -> Record | None:
        return next(iter(self), None)

    def take(self) -> Record:
        return next(self.iterator)

    def last_taken(self) -> Record | None:
        """Of those that came together."""
        taken = len(self._records) - len(self)
        return self._records[taken - 1] if taken else None

    def replace(self, records: list[Record]) -> None:
        """These wait now, and nothing else."""
        for _ in self.iterator:
            pass  # whoever goes through it must not go on with what was
        self._records = records
        self.iterator = iter(records)

    def add(self, records: list[Record]) -> None:
        self.replace([*self, *records])
