"""Which messages wait, which are in hand, and how far each partition is done.

A message is *given* when `get` returns it or a loop over `listen` yields it. From then on it is *in
hand*, until whoever holds it asks for the next one: then it is *done*. Nothing else makes a message
done, so a position never lies behind a message that the program did not have.

A holder is a thread or a task that gets, or a loop over `listen`. Several may hold messages of one
partition, and finish them in any order: the partition is done up to the first one in hand. A thread
or task that has ended is done with its message. A message that was in hand for longer than
`busy_timeout` is given again, to whoever asks next.

By mode, the position of a partition (`done`) is

- REPEAT: the first message in hand, or the next one to be given;
- SKIP: the next one to be given, so that a message in hand at a crash is not given again;
- NAMED: what the program has named.

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
    """A message that was fetched, and what is needed of it for each step of a fast loop."""

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
        #: The message that each holder has in hand, and since when.
        self._held: dict[object, tuple[_Waiting, float]] = {}
        #: Loops that were left, by the thread or task that left them.
        self._left: dict[object, list[object]] = {}

    def __len__(self) -> int:
        """How many messages wait."""
        return len(self._waiting)

    # --- partitions -------------------------------------------------------------------------

    @property
    def partitions(self) -> dict[int, PartitionPosition]:
        """As they are at the moment."""
        with self._lock:
            return dict(self._partitions)

    def standing(self, partition: int) -> PartitionPosition | None:
        return self._partitions.get(partition)

    def begin(self, partition: int, standing: PartitionPosition) -> None:
        with self._lock:
            self._partitions[partition] = standing

    def end(self, partition: int) -> PartitionPosition | None:
        """Let go of a partition, its messages and its file."""
        with self._lock:
            self._drop(partition)
            standing = self._partitions.pop(partition, None)
            if standing is not None and standing.file is not None:
                standing.file.close()
            return standing

    def end_lost(self) -> list[int]:
        """Let go of partitions whose positions other processes have taken over; return them."""
        lost = [
            partition
            for partition, standing in self.partitions.items()
            if standing.file is not None and not standing.file.is_ours
        ]
        for partition in lost:
            self.end(partition)
        return lost

    def move(self, partition: int, offset: int) -> None:
        """Go on from elsewhere in a partition."""
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
        """Let messages wait that were fetched. Left out are those of partitions that we do not
        have, and those that came before: they were on their way while a partition went elsewhere,
        and perhaps came back."""
        with self._lock:
            find, wait = self._partitions.get, self._waiting.append
            for record in records:
                partition, offset = record.partition() or 0, record.offset() or 0
                standing = find(partition)
                if standing is not None and offset >= standing.end:
                    wait(_Waiting(record, partition, offset, standing))
                    standing.end = offset + 1

    def first(self, partition: int | None = None) -> Record | None:
        """Return the first message that waits, of all or of one partition."""
        with self._lock:
            for each in self._waiting:
                if partition is None or each.partition == partition:
                    return each.record
        return None

    def take(self, holder: object, now: float) -> Record | None:
        """Give the next message to a holder; what it held before is done. None if no message
        waits, or the broker's cursor does not bear our note yet: without it the file would not
        count after a crash. `now` is monotonic."""
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
            else:  # it was put back, or held for too long
                standing.again.discard(offset)
            if mode is Mode.SKIP:
                self._note(standing, self._position(standing))
            return record

    def held(self, holder: object) -> Record | None:
        held = self._held.get(holder)
        return None if held is None else held[0].record

    def put_back(self, holder: object) -> None:
        """Let the message that a holder was given wait again, before all others."""
        with self._lock:
            held = self._held.pop(holder, None)
            if held is not None:
                self._give_again(held[0])

    # --- what is done -----------------------------------------------------------------------

    def settle(self, holder: object) -> None:
        """What a holder was given is done: it asks for the next message, or is finished."""
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
        """A loop has ended: its last message is done when its thread or task, `caller`, asks for
        another one."""
        with self._lock:
            if loop in self._held:
                self._left.setdefault(caller, []).append(loop)

    def name(self, partition: int, position: int) -> None:
        """The program has named a message: what lies before `position` is done."""
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
        """Up to where all is done."""
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
        """Settle for holders that have ended; give again what others hold for too long."""
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
    """Whether a thread or a task has; a loop says itself when it ends."""
    if isinstance(holder, threading.Thread):
        return not holder.is_alive()
    is_done = getattr(holder, "done", None)  # of a task, without loading asyncio for it
    return bool(is_done()) if is_done is not None else False
