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

    __slots__ = (
        "committed",
        "delivered_end",
        "done",
        "fetched_end",
        "file",
        "is_claimed",
        "to_redeliver",
    )

    def __init__(self, start: int, file: PositionFile | None) -> None:
        #: The offset after the last fetched message.
        self.fetched_end = start
        #: The offset after the last message that was delivered to the program.
        self.delivered_end = start
        #: Offsets before `delivered_end` that must be delivered again.
        self.to_redeliver: set[int] = set()
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
    """Return whether a name with these committed offsets is subscribed. `unsubscribe` does not
    delete the offsets; it commits them again with the note UNSUBSCRIBED."""
    return any(find_note(cursor.note) != UNSUBSCRIBED for cursor in committed.values())


def not_subscribed_error(name: str, topic: str) -> UnknownSubscription:
    return UnknownSubscription(
        f"{name} has not subscribed to topic {topic}: call subscribe({topic!r}) first"
    )


def has_note(metadata: str, note: str) -> bool:
    """Return whether the metadata of a commit is this note. Bytes that confluent-kafka reads beyond
    its end are ignored.
    """
    return metadata.startswith(note) if note else not metadata


def choose_position(cursor: Committed, position: int | None, note: str) -> int:
    """Return the position, given the committed offset and the position in the file. The module
    `consumer` explains which one counts.
    """
    if position is None or not has_note(cursor.note, note):
        return cursor.offset
    # After a power failure, the file may be behind the committed offset.
    return max(position, cursor.offset)
