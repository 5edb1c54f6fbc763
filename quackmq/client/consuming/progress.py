"""Track which messages are buffered, which are in hand, and up to where each partition is done.

A message is *delivered* when `get` returns it or a `listen` loop yields it. Then it is *in hand*
until its holder requests the next one, which makes it *done*. The position never passes a message
that the program did not get.

A holder is a thread or a task that calls `get`, or a `listen` loop. Several holders may have
messages of one partition and finish them in any order: the partition is done up to the first one in
hand. A message is also done when its thread or task ends. A message that was in hand for longer
than `busy_timeout` is delivered again, to the next caller.

The position of a partition (`done`) depends on the mode:

- REPEAT: the first message in hand, or the next one to deliver;
- SKIP: the next one to deliver, so that a message in hand at a crash is not delivered again;
- BY_ID: the position that the program has passed.

Any thread may call: `listen` gets messages without the reader's lock.
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
    """How the position of a partition follows from its messages; see above."""

    REPEAT = "repeat"
    SKIP = "skip"
    BY_ID = "by id"


class _Buffered(NamedTuple):
    """A buffered message, with the values that the fast loop needs."""

    record: Record
    partition: int
    offset: int
    state: PartitionPosition


class Progress:
    """The buffered and delivered messages of all assigned partitions of one topic."""

    def __init__(self, mode: Mode, busy_s: float) -> None:
        self.mode = mode
        self._busy_s = busy_s
        self._lock = threading.Lock()
        self._buffer: deque[_Buffered] = deque()
        self._partitions: dict[int, PartitionPosition] = {}
        #: The message in hand of each holder, and the monotonic time of its delivery.
        self._in_hand: dict[object, tuple[_Buffered, float]] = {}
        #: Ended `listen` loops, by the thread or task that left them.
        self._ended_loops: dict[object, list[object]] = {}

    def __len__(self) -> int:
        """Return the number of buffered messages."""
        return len(self._buffer)

    # --- partitions -------------------------------------------------------------------------

    @property
    def partitions(self) -> dict[int, PartitionPosition]:
        """A copy of the partitions by number."""
        with self._lock:
            return dict(self._partitions)

    def position_in(self, partition: int) -> PartitionPosition | None:
        return self._partitions.get(partition)

    def add_partition(self, partition: int, state: PartitionPosition) -> None:
        with self._lock:
            self._partitions[partition] = state

    def release_partition(self, partition: int) -> PartitionPosition | None:
        """Forget a partition: drop its messages and close its file. Return its state, or None if
        the partition is unknown."""
        with self._lock:
            self._drop_messages(partition)
            state = self._partitions.pop(partition, None)
            if state is not None and state.file is not None:
                state.file.close()
            return state

    def release_lost(self) -> list[int]:
        """Release the partitions whose positions other processes have taken over; return them."""
        lost = [
            partition
            for partition, state in self.partitions.items()
            if state.file is not None and not state.file.is_ours
        ]
        for partition in lost:
            self.release_partition(partition)
        return lost

    def seek(self, partition: int, offset: int) -> None:
        """Continue a partition at another offset."""
        with self._lock:
            self._drop_messages(partition)
            state = self._partitions[partition]
            state.fetched_end = state.delivered_end = offset
            self._store_done(state, offset)

    def _drop_messages(self, partition: int) -> None:
        """Drop the messages of a partition, both buffered ones and those in hand."""
        self._buffer = deque(each for each in self._buffer if each.partition != partition)
        for holder, (message, _) in list(self._in_hand.items()):
            if message.partition == partition:
                del self._in_hand[holder]

    # --- messages ---------------------------------------------------------------------------

    def add(self, records: Iterable[Record]) -> None:
        """Buffer fetched messages. Drop those of unassigned partitions and repeated ones: they
        were in flight while a partition was reassigned."""
        with self._lock:
            find_state, buffer = self._partitions.get, self._buffer.append
            for record in records:
                partition, offset = record.partition() or 0, record.offset() or 0
                state = find_state(partition)
                if state is not None and offset >= state.fetched_end:
                    buffer(_Buffered(record, partition, offset, state))
                    state.fetched_end = offset + 1

    def first_buffered(self, partition: int | None = None) -> Record | None:
        """Return the first buffered message, of all partitions or of one."""
        with self._lock:
            for each in self._buffer:
                if partition is None or each.partition == partition:
                    return each.record
        return None

    def deliver_next(self, holder: object, now: float) -> Record | None:
        """Deliver the next message to a holder, whose last message is done. Return None if no
        message is buffered, or if the committed offset does not carry our metadata yet: without
        it, the file would not count after a crash. `now` is monotonic.
        """
        with self._lock:
            in_hand, buffer, mode = self._in_hand, self._buffer, self.mode
            if holder in in_hand:
                self._finish(holder)
            if not buffer:
                return None
            message = buffer[0]
            record, _, offset, state = message
            if not state.is_claimed and mode is not Mode.BY_ID:
                return None
            buffer.popleft()
            in_hand[holder] = message, now
            if offset >= state.delivered_end:
                state.delivered_end = offset + 1
            else:  # it was put back, or was in hand for too long
                state.to_redeliver.discard(offset)
            if mode is Mode.SKIP:
                self._store_done(state, self._compute_done(state))
            return record

    def in_hand(self, holder: object) -> Record | None:
        """Return the message that a holder has in hand, or None."""
        if holder not in self._in_hand:
            return None
        message, _ = self._in_hand[holder]
        return message.record

    def put_back(self, holder: object) -> None:
        """Put the message of a holder back to the front of the buffer."""
        with self._lock:
            entry = self._in_hand.pop(holder, None)
            if entry is not None:
                message, _ = entry
                self._buffer_again(message)

    # --- done messages -----------------------------------------------------------------------

    def finish(self, holder: object) -> None:
        """Mark a holder's message as done, and messages of holders that have ended."""
        with self._lock:
            self._finish(holder)
            for loop in self._ended_loops.pop(holder, ()):
                self._finish(loop)
            if self._in_hand:
                self._sweep()

    def finish_all(self) -> None:
        """Mark the messages of all holders as done."""
        with self._lock:
            for holder in list(self._in_hand):
                self._finish(holder)

    def end_loop(self, loop: object, caller: object) -> None:
        """End a loop: its last message is done when its thread or task, `caller`, requests another
        one.
        """
        with self._lock:
            if loop in self._in_hand:
                self._ended_loops.setdefault(caller, []).append(loop)

    def set_passed(self, partition: int, position: int) -> None:
        """Set the position that the program has passed: all messages before it are done."""
        with self._lock:
            state = self._partitions.get(partition)
            if state is not None:
                state.done = position

    def _finish(self, holder: object) -> None:
        """Mark a holder's message as done, and store the position that follows from that."""
        # In the other modes, the position does not depend on whether messages are done.
        entry = self._in_hand.pop(holder, None)
        if entry is None or self.mode is not Mode.REPEAT:
            return
        message, _ = entry
        state = message.state
        # In the usual case no other message is unfinished, and the position need not be computed.
        is_all_done = not self._in_hand and not state.to_redeliver
        self._store_done(state, state.delivered_end if is_all_done else self._compute_done(state))

    def _compute_done(self, state: PartitionPosition) -> int:
        """Return the position up to which all messages are done."""
        unfinished_offsets = [*state.to_redeliver, state.delivered_end]
        if self.mode is Mode.REPEAT:
            unfinished_offsets += [
                message.offset for message, _ in self._in_hand.values() if message.state is state
            ]
        return min(unfinished_offsets)

    def _store_done(self, state: PartitionPosition, position: int) -> None:
        """Store the position up to which all messages are done, in memory and in the file."""
        state.done = position
        if state.file is not None:
            state.file.note(position)

    def _buffer_again(self, message: _Buffered) -> None:
        """Put a message in front of the buffer, so that it is delivered again."""
        state, offset = message.state, message.offset
        self._buffer.appendleft(message)
        # If it was the last delivered message, it is simply the next one to deliver again.
        if state.delivered_end == offset + 1:
            state.delivered_end = offset
        else:
            state.to_redeliver.add(offset)
        # In BY_ID mode, only the program moves the position.
        if self.mode is not Mode.BY_ID:
            self._store_done(state, self._compute_done(state))

    def _sweep(self) -> None:
        """Mark messages of ended holders as done. Buffer messages again that were in hand for too
        long.
        """
        oldest_allowed = time.monotonic() - self._busy_s
        for holder, (message, since) in list(self._in_hand.items()):
            if _has_ended(holder):
                self._finish(holder)
            elif since < oldest_allowed and self.mode is Mode.REPEAT:
                del self._in_hand[holder]
                self._buffer_again(message)
        for caller in [each for each in self._ended_loops if _has_ended(each)]:
            for loop in self._ended_loops.pop(caller):
                self._finish(loop)


def _has_ended(holder: object) -> bool:
    """Return whether a thread or task has ended; a loop reports its end itself."""
    if isinstance(holder, threading.Thread):
        return not holder.is_alive()
    # Only asyncio tasks have `done`; this test does not import asyncio.
    is_done = getattr(holder, "done", None)
    return is_done is not None and bool(is_done())
