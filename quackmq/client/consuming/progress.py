"""Track which messages are buffered, which are in hand, and up to where each partition is done.

A message is *given* when `get` returns it or a `listen` loop yields it. Then it is *in hand* until
its holder asks for the next one, which makes it *done*. Nothing else makes a message done, so the
position never passes a message that the program did not get.

A holder is a thread or a task that calls `get`, or a `listen` loop. Several holders may have
messages of one partition and finish them in any order: the partition is done up to the first one in
hand. A message is also done when its thread or task ends. A message that was in hand for longer
than `busy_timeout` is given again to the next caller.

The position of a partition (`done`) depends on the mode:

- REPEAT: the first message in hand, or the next one to give;
- SKIP: the next one to give, so that a message in hand at a crash is not given again;
- NAMED: the position that the program has passed.

Any thread may call: `listen` takes messages without the reader's lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from confluent_kafka import Message as Record

from quackmq.client.consuming.start import PartitionPosition


class Mode(Enum):
    REPEAT = "repeat"
    SKIP = "skip"
    NAMED = "named"


class _Waiting(NamedTuple):
    """A buffered message, with the values that the fast loop needs."""

    record: Record
    partition: int
    offset: int
    standing: PartitionPosition


class Progress:
    def __init__(self, mode: Mode, busy_s: float) -> None:
        self.mode = mode
        self._busy_s = busy_s
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._partitions: dict[int, PartitionPosition] = {}
        #: The message in hand of each holder, and since when.
        self._held: dict[object, tuple[_Waiting, float]] = {}
        #: Ended `listen` loops, by the thread or task that left them.
        self._left: dict[object, list[object]] = {}

    def __len__(self) -> int:
        """Return the number of buffered messages."""
        return len(self._waiting)

    # --- partitions -------------------------------------------------------------------------

    @property
    def partitions(self) -> dict[int, PartitionPosition]:
        """A copy of the partitions by number."""
        with self._lock:
            return dict(self._partitions)

    def standing(self, partition: int) -> PartitionPosition | None:
        return self._partitions.get(partition)

    def begin(self, partition: int, standing: PartitionPosition) -> None:
        with self._lock:
            self._partitions[partition] = standing

    def end(self, partition: int) -> PartitionPosition | None:
        """Release a partition, its messages and its file."""
        with self._lock:
            self._drop(partition)
            standing = self._partitions.pop(partition, None)
            if standing is not None and standing.file is not None:
                standing.file.close()
            return standing

    def end_lost(self) -> list[int]:
        """Release the partitions whose positions other processes have taken over; return them."""
        lost = [
            partition
            for partition, standing in self.partitions.items()
            if standing.file is not None and not standing.file.is_ours
        ]
        for partition in lost:
            self.end(partition)
        return lost

    def move(self, partition: int, offset: int) -> None:
        """Continue a partition at another offset."""
        with self._lock:
            self._drop(partition)
            standing = self._partitions[partition]
            standing.end = standing.given = offset
            self._note(standing, offset)

    def _drop(self, partition: int) -> None:
        self._waiting = deque(each for each in self._waiting if each.partition != partition)
        for holder, (message, _) in list(self._held.items()):
            if message.partition == partition:
                del self._held[holder]

    # --- messages ---------------------------------------------------------------------------

    def add(self, records: Iterable[Record]) -> None:
        """Buffer fetched messages. Drop those of unassigned partitions and repeated ones: they
        were in flight while a partition was reassigned."""
        with self._lock:
            find, wait = self._partitions.get, self._waiting.append
            for record in records:
                partition, offset = record.partition() or 0, record.offset() or 0
                standing = find(partition)
                if standing is not None and offset >= standing.end:
                    wait(_Waiting(record, partition, offset, standing))
                    standing.end = offset + 1

    def first(self, partition: int | None = None) -> Record | None:
        """Return the first buffered message, of all partitions or of one."""
        with self._lock:
            for each in self._waiting:
                if partition is None or each.partition == partition:
                    return each.record
        return None

    def take(self, holder: object, now: float) -> Record | None:
        """Give the next message to a holder, whose last message is done. Return None if no
        message is buffered, or if the committed offset does not carry our metadata yet: without
        it, the file would not count after a crash. `now` is monotonic."""
        with self._lock:
            held, waiting, mode = self._held, self._waiting, self.mode
            if holder in held:
                self._settle(holder)
            if not waiting:
                return None
            message = waiting[0]
            record, _, offset, standing = message
            if not standing.is_claimed and mode is not Mode.NAMED:
                return None
            waiting.popleft()
            held[holder] = message, now
            if offset >= standing.given:
                standing.given = offset + 1
            else:  # it was put back, or was in hand for too long
                standing.again.discard(offset)
            if mode is Mode.SKIP:
                self._note(standing, self._position(standing))
            return record

    def held(self, holder: object) -> Record | None:
        held = self._held.get(holder)
        return None if held is None else held[0].record

    def put_back(self, holder: object) -> None:
        """Put the message of a holder back to the front of the buffer."""
        with self._lock:
            held = self._held.pop(holder, None)
            if held is not None:
                self._give_again(held[0])

    # --- done messages -----------------------------------------------------------------------

    def settle(self, holder: object) -> None:
        """Mark a holder's message as done, and messages of holders that have ended."""
        with self._lock:
            self._settle(holder)
            for loop in self._left.pop(holder, ()):
                self._settle(loop)
            if self._held:
                self._sweep()

    def settle_all(self) -> None:
        with self._lock:
            for holder in list(self._held):
                self._settle(holder)

    def leave(self, loop: object, caller: object) -> None:
        """End a loop: its last message is done when its thread or task, `caller`, asks for
        another one."""
        with self._lock:
            if loop in self._held:
                self._left.setdefault(caller, []).append(loop)

    def name(self, partition: int, position: int) -> None:
        """Set the position that the program has passed: all messages before it are done."""
        with self._lock:
            standing = self._partitions.get(partition)
            if standing is not None:
                standing.done = position

    def _settle(self, holder: object) -> None:
        held = self._held.pop(holder, None)
        if held is None or self.mode is not Mode.REPEAT:
            return
        standing = held[0].standing
        is_alone = not self._held and not standing.again
        self._note(standing, standing.given if is_alone else self._position(standing))

    def _position(self, standing: PartitionPosition) -> int:
        """Return the position up to which all messages are done."""
        open_ones = [*standing.again, standing.given]
        if self.mode is Mode.REPEAT:
            open_ones += [
                message.offset for message, _ in self._held.values() if message.standing is standing
            ]
        return min(open_ones)

    def _note(self, standing: PartitionPosition, position: int) -> None:
        standing.done = position
        if standing.file is not None:
            standing.file.note(position)

    def _give_again(self, message: _Waiting) -> None:
        standing, offset = message.standing, message.offset
        self._waiting.appendleft(message)
        if standing.given == offset + 1:
            standing.given = offset
        else:
            standing.again.add(offset)
        if self.mode is not Mode.NAMED:
            self._note(standing, self._position(standing))

    def _sweep(self) -> None:
        """Mark messages of ended holders as done; give messages again that were in hand for too
        long."""
        late = time.monotonic() - self._busy_s
        for holder, (message, since) in list(self._held.items()):
            if _has_ended(holder):
                self._settle(holder)
            elif since < late and self.mode is Mode.REPEAT:
                del self._held[holder]
                self._give_again(message)
        for caller in [each for each in self._left if _has_ended(each)]:
            for loop in self._left.pop(caller):
                self._settle(loop)


def _has_ended(holder: object) -> bool:
    """Return whether a thread or task has ended; a loop reports its end itself."""
    if isinstance(holder, threading.Thread):
        return not holder.is_alive()
    is_done = getattr(
        holder, "done", None
    )  # asyncio tasks have `done`; this avoids importing asyncio
    return bool(is_done()) if is_done is not None else False
