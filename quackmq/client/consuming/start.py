"""The position of a name in a topic: from the committed offset, from the client's file, in
memory."""

from __future__ import annotations

from collections.abc import Mapping

from quackmq.client.consuming.position_file import PositionFile
from quackmq.client.kafka.cluster import Committed
from quackmq.errors import UnknownSubscription
from quackmq.model.offset_notes import UNSUBSCRIBED, find_note


class PartitionPosition:
    """The state of one assigned partition. Each offset is that of the next message."""

    __slots__ = ("again", "committed", "done", "end", "file", "given", "is_claimed")

    def __init__(self, start: int, file: PositionFile | None) -> None:
        #: After the last fetched message.
        self.end = start
        #: After the last message given to the program.
        self.given = start
        #: Earlier messages that must be given again.
        self.again: set[int] = set()
        #: The position up to which all messages are done, to be committed.
        self.done = start
        #: The committed part of `done`.
        self.committed = start
        self.file = file
        #: Whether the committed offset carries our metadata; only then does the file count.
        self.is_claimed = False

    @property
    def is_behind(self) -> bool:
        """Whether the committed offset is behind `done`."""
        return self.done != self.committed


def is_subscribed(committed: Mapping[int, Committed]) -> bool:
    return any(find_note(cursor.note) != UNSUBSCRIBED for cursor in committed.values())


def not_subscribed(name: str, topic: str) -> UnknownSubscription:
    return UnknownSubscription(
        f"{name} has not subscribed to topic {topic}: call subscribe({topic!r}) first"
    )


def is_note(said: str, note: str) -> bool:
    """Return whether a commit carries this metadata; ignores bytes that confluent-kafka reads
    beyond its end."""
    return said.startswith(note) if note else not said


def position_by(cursor: Committed, position: int | None, note: str) -> int:
    """Return the position from the committed offset and the file; `consumer` explains which one
    counts."""
    if position is None or not is_note(cursor.note, note):
        return cursor.offset
    return max(position, cursor.offset)
