"""What a subscriber makes of its messages, in a database of its own: the result of each and the id
of the last one, in one transaction. That is all that exactly once asks of a program.

Also where a producer writes down what it was told. Both outlive their process, not the machine:
here only processes die, so nothing is synced.
"""

from __future__ import annotations

import os
import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import Final

from tests.pubsub.checker import END, Stored, partition_of

_SCHEMA: Final = """
    CREATE TABLE IF NOT EXISTS results (
        position INTEGER PRIMARY KEY, topic TEXT NOT NULL, id TEXT NOT NULL, value TEXT NOT NULL
    );
    CREATE TABLE IF NOT EXISTS progress (topic TEXT PRIMARY KEY, last_id TEXT NOT NULL);
"""
_BUSY_S: Final = 30.0


class Results:
    """One connection, for one thread at a time; opened one after the other, since a database that
    is just being opened cannot be. Nothing here refuses a message that comes twice: that is to be
    seen."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(
            path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.executescript(_SCHEMA)

    def close(self) -> None:
        self._database.close()

    def last_id(self, topic: str) -> str | None:
        found = self._database.execute("SELECT last_id FROM progress WHERE topic = ?", (topic,))
        row = found.fetchone()
        return None if row is None else str(row[0])

    def add(self, topic: str, message_id: str, value: str) -> None:
        """Both or neither."""
        self._database.execute("BEGIN IMMEDIATE")
        self._database.execute(
            "INSERT INTO results (topic, id, value) VALUES (?, ?, ?)", (topic, message_id, value)
        )
        self._database.execute("REPLACE INTO progress VALUES (?, ?)", (topic, message_id))
        self._database.execute("COMMIT")

    def ended(self, topic: str) -> set[int]:
        """The partitions whose end has come."""
        found = self._database.execute(
            "SELECT id FROM results WHERE topic = ? AND value = ?", (topic, END)
        )
        return {partition_of(message_id) for (message_id,) in found}

    def stored(self) -> dict[str, list[Stored]]:
        """Everything, by topic, in the order in which it was stored."""
        messages: dict[str, list[Stored]] = defaultdict(list)
        for topic, message_id, value in self._database.execute(
            "SELECT topic, id, value FROM results ORDER BY position"
        ):
            messages[topic].append(Stored(message_id, value))
        return messages


class Notes:
    """A line for each number that a producer was told is there. Each goes to the system at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def close(self) -> None:
        os.close(self._file)

    def add(self, topic: str, number: int) -> None:
        os.write(self._file, f"{topic} {number}\n".encode())

    def last(self, topic: str) -> int:
        """-1 before the first."""
        return max(self.told().get(topic, [-1]))

    def told(self) -> dict[str, list[int]]:
        numbers: dict[str, list[int]] = defaultdict(list)
        for line in self._path.read_text().splitlines():
            topic, number = line.split(" ")
            numbers[topic].append(int(number))
        return numbers
