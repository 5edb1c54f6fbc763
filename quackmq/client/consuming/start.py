"""Where a name stands in a topic: by the broker's cursor, by the client's file, in memory."""

from __future__ import annotations

from collections.abc import Mapping

from quackmq.client.consuming.position_file import PositionFile
from quackmq.client.kafka.cluster import Committed
from quackmq.errors import UnknownSubscription
from quackmq.model.offset_notes import UNSUBSCRIBED, note_of


class PartitionPosition:
    """One partition that the group has given us. Offsets are always the next ones wanted."""

    __slots__ = ("again", "committed", "done", "end", "file", "given", "is_claimed")

    def __init__(self, start: int, file: PositionFile | None) -> None:
        #: Behind the last message that was fetched.
        self.end = start
        #: Behind the last message that the program was given.
        self.given = start
        #: Messages before that one which are to be given again.
        self.again: set[int] = set()
        #: Up to where all is done, to be committed.
        self.done = start
        #: What the broker has acknowledged of that.
        self.committed = start
        self.file = file
        #: Whether the broker's cursor bears our note: from then on the file counts, not before.
        self.is_claimed = False

    @property
    def is_behind(self) -> bool:
        """Whether the broker's cursor is."""
        return self.done != self.committed


def is_subscribed(committed: Mapping[int, Committed]) -> bool:
    return any(note_of(cursor.note) != UNSUBSCRIBED for cursor in committed.values())


def not_subscribed(name: str, topic: str) -> UnknownSubscription:
    return UnknownSubscription(
        f"{name} has not subscribed to topic {topic}: call subscribe({topic!r}) first"
    )


def is_note(said: str, note: str) -> bool:
    """Whether a commit bears a note; what confluent-kafka reads beyond its end does not count."""
    return said.startswith(note) if note else not said


def position_by(cursor: Committed, position: int | None, note: str) -> int:
    """Where a name stands by the broker's cursor and the file: see `reader` whose word counts."""
    if position is None or not is_note(cursor.note, note):
        return cursor.offset
    return max(position, cursor.offset)
