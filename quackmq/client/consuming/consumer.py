"""Read one topic for one name, with one of two ways to store the progress.

A reader is a member of the name's Kafka group, for one topic. The group assigns each partition to
one process at a time, and the reader decides where to start in it:

- `by_id`: the program stores the ids of its messages itself. Only messages whose ids it passes are
  done.
- by the client's file (`PositionFile`): the file has the position, unless another program has moved
  the committed offset since. Our commits carry the id of the directory as metadata. So if the
  committed offset carries it, the file counts, which is never behind; otherwise the committed
  offset counts.

Messages are fetched in batches and buffered in `Progress`, which also knows which are in hand and
which are done. Done messages are committed to the broker.

Not thread-safe: the caller holds the reader's lock (see `Session`). Only `take_buffered` may be
called by any thread. librdkafka runs its callbacks inside `poll`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as Record

from quackmq import limits as shared_limits
from quackmq.client import limits
from quackmq.client.consuming.commits import Commits, close, leave
from quackmq.client.consuming.directory import Directory
from quackmq.client.consuming.position_file import NotOwner
from quackmq.client.consuming.progress import Mode, Progress
from quackmq.client.consuming.start import (
    PartitionPosition,
    choose_position,
    has_note,
    is_subscribed,
    not_subscribed_error,
)
from quackmq.client.deadline import Deadline
from quackmq.client.kafka.cluster import Cluster, Committed
from quackmq.client.kafka.config import KafkaConfig
from quackmq.client.kafka.diagnostics import OUT_OF_RANGE, Diagnostics
from quackmq.client.kafka.errors import translating_errors
from quackmq.client.kafka.types import TopicInfo
from quackmq.errors import QuackError, QuackTimeout
from quackmq.model.subscription import RecordPosition

log = logging.getLogger(__name__)

OnCrash = Literal["skip", "repeat"]

#: The only holder if messages are read by id.
_PROGRAM: Final = "the program"


class Reader:
    """A member of a name's group that reads one topic."""

    def __init__(
        self,
        config: KafkaConfig,
        cluster: Cluster,
        topic: TopicInfo,
        name: str,
        directory: Directory,
        *,
        by_id: bool,
        on_crash: OnCrash,
        session_ms: int,
        busy_ms: int,
        poll_others: Callable[[], None],
    ) -> None:
        """`poll_others` is called regularly while a call waits."""
        self.topic = topic
        self.instance = directory.instance(topic.id)
        self._poll_others = poll_others
        self.by_id = by_id
        self._diagnostics = Diagnostics(
            cluster, topic, name, config, directory.path, session_ms / 1000
        )
        self._cluster = cluster
        self._name = name
        self._directory = directory
        self._note = "" if by_id else directory.note
        mode = Mode.BY_ID if by_id else Mode(on_crash)
        self._progress = Progress(mode, busy_ms / 1000)
        #: Assigned partitions whose start is not known yet, because the broker did not answer.
        self._unstarted: set[int] = set()
        #: The positions that the program has passed, also for partitions of other processes.
        self._passed_offsets: dict[int, int] = {}
        #: Whether the group has ever sent an assignment, even an empty one.
        self._has_joined = False
        self._error: QuackError | None = None
        self._commits = Commits(topic.name, self._on_committed)
        self._committed_at = time.monotonic()
        #: When `listen` has to poll the group and commit again.
        self._poll_group_at = 0.0
        settings = config.consumer(name, session_ms, busy_ms)
        settings["group.instance.id"] = self.instance
        settings["on_commit"] = self._commits.on_commit
        self._consumer = Consumer(settings)
        self._consumer.subscribe(
            [topic.name],
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_lost,
        )

    # --- one message ------------------------------------------------------------------------

    def get(self, holder: object, deadline: Deadline) -> Record:
        """Return the next message, with the progress in the client's file. The holder's last
        message is done. Raises QuackTimeout."""
        self._finish_last(holder)
        while True:
            record = self._wait_for_message(deadline)
            if not self._secure_partitions(deadline):
                continue
            if self._progress.mode is Mode.REPEAT or self._write_position(record, deadline):
                delivered = self._progress.deliver_next(holder, time.monotonic())
                if delivered is not None:  # otherwise a `listen` loop in another thread was faster
                    return delivered

    def get_after(self, positions: Iterable[RecordPosition] | None, deadline: Deadline) -> Record:
        """Return the next message after those at `positions`, which are done. Raises
        QuackTimeout.
        """
        self._apply_passed(positions or ())
        while True:
            record = self._wait_for_message(deadline)
            if self._ensure_others_committed(record.partition() or 0, deadline):
                delivered = self._progress.deliver_next(_PROGRAM, time.monotonic())
                if delivered is not None:
                    return delivered

    def put_back(self, holder: object, record: Record) -> None:
        """Let the next get return a message that was delivered to a holder."""
        holder = _PROGRAM if self.by_id else holder
        if self._progress.in_hand(holder) is record:
            self._progress.put_back(holder)

    def _finish_last(self, holder: object) -> None:
        """Mark the holder's last message as done."""
        self._progress.finish(holder)
        self._commit_if_due()

    # --- many messages ----------------------------------------------------------------------

    def fill(self, holder: object, deadline: Deadline) -> None:
        """Wait until there are messages for `take_buffered`. The holder's last message is done.
        Raises QuackTimeout.
        """
        self._finish_last(holder)
        # If messages are buffered, `_wait_for_message` returns without polling. Poll here, so that
        # a loop over many buffered messages still takes part in rebalances.
        if len(self._progress):
            self.poll_group()
        while True:
            self._wait_for_message(deadline)
            if self._secure_partitions(deadline):
                self._poll_group_at = time.monotonic() + limits.CLIENT_COMMIT_MS / 1000
                return

    def take_buffered(self, holder: object) -> Record | None:
        """Return the next buffered message, or None if `fill` must be called first. The holder's
        last message is done. Only for `on_crash="repeat"`. Any thread may call."""
        now = time.monotonic()
        return self._progress.deliver_next(holder, now) if now < self._poll_group_at else None

    def end_loop(self, loop: object, caller: object) -> None:
        """End a loop over messages: its last one is done when `caller` requests another."""
        self._progress.end_loop(loop, caller)

    def poll_group(self) -> None:
        """Poll without delivering messages: the group waits for all its members whenever one
        joins or leaves."""
        # A poll may return a message, which has to be buffered. The bound keeps the buffer small.
        if len(self._progress) < limits.CLIENT_BATCH_MESSAGES:
            self._handle_polled(self._consumer.poll(0))

    # --- moving -----------------------------------------------------------------------------

    def seek(self, starts: Mapping[int, int], note: str, deadline: Deadline) -> None:
        """Move the position in all partitions. Other processes use the new position when they
        next start reading a partition."""
        self.commit_as_member(starts, note, deadline)
        for partition, start in starts.items():
            self._passed_offsets.pop(partition, None)
            state = self._progress.position_in(partition)
            if state is not None:
                # The commit above does not carry our metadata. Before the next delivery,
                # `_secure_partitions` commits with it.
                state.is_claimed = False
                self._seek_partition(partition, start)

    def positions(self) -> dict[int, int]:
        """Return the next offset of each assigned partition; a message in hand counts as read."""
        return {each: state.delivered_end for each, state in self._progress.partitions.items()}

    def commit_as_member(self, offsets: Mapping[int, int], note: str, deadline: Deadline) -> None:
        """Commit as a member, which may also commit for partitions of other members. Messages
        that arrive meanwhile are buffered. Raises QuackTimeout."""
        self._commits.send_and_wait(self._consumer, offsets, note, deadline, poll=self._poll)

    def close(self, deadline: Deadline, *, is_done: bool) -> None:
        """Write and commit the progress as far as the time allows, and leave the group. With
        `is_done`, the messages in hand are done."""
        try:
            if is_done:
                self._progress.finish_all()
            self._commit_and_leave(deadline)
        finally:
            close(self._consumer, deadline)
            for partition in self._progress.partitions:
                self._progress.release_partition(partition)

    # --- fetching -----------------------------------------------------------------------------

    def _wait_for_message(self, deadline: Deadline) -> Record:
        """Return the first buffered message; wait for one. Raises QuackTimeout."""
        consumer = self._consumer
        while (first := self._progress.first_buffered()) is None:
            self._raise_error()
            if self._unstarted:
                self._try_to_start(consumer, deadline)
            self._commits.take_results()
            # With a timeout, `consume` would wait for a full batch. So take the messages that are
            # there. If there are none, wait with `poll`, which returns with the first message.
            records = consumer.consume(limits.CLIENT_BATCH_MESSAGES, 0)
            if not records:
                record = consumer.poll(deadline.slice_s())
                if record is None:
                    self._raise_error()
                    if deadline.has_passed():
                        raise self._explain_timeout(deadline)
                    self._commit_if_due()
                    self._poll_others()
                    continue
                records = [record]
            # Usually no record is an error, and all are buffered in one call.
            if any(map(Record.error, records)):
                for each in records:
                    self._handle_polled(each)
            else:
                self._progress.add(records)
        # A callback may have stored an error during the last poll.
        self._raise_error()
        return first

    def _handle_polled(self, record: Record | None) -> None:
        """Buffer a polled message, or store its error to be raised later. None is ignored."""
        if record is None:
            return
        error = record.error()
        if error is not None:
            self._error = self._error or self._explain_error(error, record)
            return
        self._progress.add([record])

    def _seek_partition(self, partition: int, offset: int) -> None:
        """Continue reading a partition at another offset."""
        self._progress.seek(partition, offset)
        with translating_errors(
            f"partition {partition} of {self.topic.name} to be read from {offset}"
        ):
            target = TopicPartition(self.topic.name, partition, offset)
            try:
                self._consumer.seek(target)
            except KafkaException:
                # The partition is not being fetched yet.
                self._consumer.incremental_unassign([target])
                self._consumer.incremental_assign([target])

    # --- by id --------------------------------------------------------------------------------

    def _apply_passed(self, positions: Iterable[RecordPosition]) -> None:
        """Continue after the messages at these positions. The program has passed their ids as
        `after`, so it has processed them."""
        # Positions of partitions are those of the next message, hence + 1.
        passed = {partition: offset + 1 for partition, offset in positions}
        record = self._progress.in_hand(_PROGRAM)
        if record is not None:
            next_offset = (record.offset() or 0) + 1
            if passed.get(record.partition() or 0) == next_offset:
                self._passed_offsets[record.partition() or 0] = next_offset
            else:
                # Its id was not passed, so it is the next message again.
                self._progress.put_back(_PROGRAM)
        for partition, offset in passed.items():
            # If the program passed the same offset before, no message between it and the next
            # buffered one was skipped. A gap in the offsets is then, for example, a transaction
            # marker.
            was_passed = self._passed_offsets.get(partition) == offset
            self._passed_offsets[partition] = offset
            state = self._progress.position_in(partition)
            if state is not None:
                next_offset = self._next_offset(partition, state)
                if next_offset < offset or (next_offset > offset and not was_passed):
                    self._seek_partition(partition, offset)
                self._progress.set_passed(partition, offset)
        self._commit_if_due()

    def _next_offset(self, partition: int, state: PartitionPosition) -> int:
        """Return the offset of the next message of a partition, buffered or to be fetched."""
        first = self._progress.first_buffered(partition)
        return state.fetched_end if first is None else first.offset() or 0

    def _ensure_others_committed(self, partition: int, deadline: Deadline) -> bool:
        """Commit the done messages of all other partitions before a message of this partition is
        returned. Then the single id that the program stores next is enough to know all positions.
        Return False if a commit was necessary, because messages may have been removed meanwhile.
        """
        uncommitted = {
            each: state.done
            for each, state in self._progress.partitions.items()
            if each != partition and state.is_behind
        }
        if not uncommitted:
            return True
        self.commit_as_member(uncommitted, self._note, deadline)
        return False

    # --- files --------------------------------------------------------------------------------

    def _secure_partitions(self, deadline: Deadline) -> bool:
        """Return whether a message may be delivered now. Return False after one of these steps,
        which may have removed messages:

        - Release partitions whose files another process has taken over.
        - Commit with our metadata where the committed offset lacks it: without it, our file would
          not count after a crash.
        """
        lost = self._progress.release_lost()
        if lost:
            log.warning("partitions %s of %s went to another process", lost, self.topic.name)
            return False
        unclaimed = {
            each: state.done
            for each, state in self._progress.partitions.items()
            if not state.is_claimed
        }
        if not unclaimed:
            return True
        self.commit_as_member(unclaimed, self._note, deadline)
        for partition in unclaimed:
            state = self._progress.position_in(partition)
            if state is not None:
                state.is_claimed = True
        return False

    def _write_position(self, record: Record, deadline: Deadline) -> bool:
        """Write to disk that this message is done; return whether that succeeded and the
        partition is still ours."""
        partition = record.partition() or 0
        state = self._progress.position_in(partition)
        if state is None or state.file is None:
            return False
        # A message that was put back may be before `delivered_end`; the position must not go back.
        try:
            state.file.write(max(state.delivered_end, (record.offset() or 0) + 1), deadline)
        except NotOwner:
            return False  # the next check releases it
        return True

    # --- assignment --------------------------------------------------------

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Start reading partitions that the group assigns to this member. librdkafka calls this
        inside `poll`; partitions whose start fails are tried again later."""
        self._has_joined = True
        self._unstarted |= {each.partition for each in partitions}
        self._try_to_start(consumer, Deadline(shared_limits.CLIENT_TIMEOUT_MS / 1000))

    def _try_to_start(self, consumer: Consumer, deadline: Deadline) -> None:
        """Try to start reading. A failed attempt is repeated by us: the group does not assign
        again."""
        try:
            self._start_partitions(consumer, deadline)
        except QuackTimeout as error:
            log.warning("%s will try again to start reading: %s", self._name, error)
        except QuackError as error:
            self._error = error
        except KafkaException as exception:
            self._error = self._diagnostics.explain_error(exception.args[0])

    def _start_partitions(self, consumer: Consumer, deadline: Deadline) -> None:
        """Start reading newly assigned partitions. Raises UnknownSubscription or QuackTimeout."""
        starts: list[TopicPartition] = []
        try:
            for partition, cursor in self._find_cursors(deadline).items():
                start = self._start_partition(partition, cursor, deadline)
                starts.append(TopicPartition(self.topic.name, partition, start))
                self._unstarted.discard(partition)
        finally:
            # Call it even with an empty list: otherwise librdkafka assumes the whole assignment.
            consumer.incremental_assign(starts)

    def _find_cursors(self, deadline: Deadline) -> dict[int, Committed]:
        """Return the committed offsets of newly assigned partitions."""
        topic = self._diagnostics.check_topic(deadline)
        committed = self._cluster.committed(self._name, topic, deadline)
        if not is_subscribed(committed):
            raise not_subscribed_error(self._name, self.topic.name)
        if not self._unstarted <= committed.keys():
            # Partitions added after the subscription are read from their beginning.
            firsts = enumerate(self._cluster.first_and_end_offsets(topic, deadline)[0])
            committed = {each: Committed(first, "") for each, first in firsts} | committed
        return {each: committed[each] for each in sorted(self._unstarted)}

    def _start_partition(self, partition: int, cursor: Committed, deadline: Deadline) -> int:
        """Choose where to start in a partition, add the partition to the progress, and return the
        start. The program's own position counts in `by_id` mode. Otherwise take over the position
        file. Raises QuackTimeout if another process holds the file."""
        file = None
        if self.by_id:
            start = self._passed_offsets.get(partition, cursor.offset)
        else:
            file = self._directory.position_file(self.topic.id, partition)
            try:
                start = file.take_over(
                    lambda position: choose_position(cursor, position, self._note), deadline
                )
            except QuackTimeout:
                file.close()
                raise
        state = PartitionPosition(start, file)
        state.committed = cursor.offset
        state.is_claimed = has_note(cursor.note, self._note)
        self._progress.add_partition(partition, state)
        return start

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Commit and release partitions that go to another process. The commit is sent before
        the release, over the same connection, and the coordinator reads in order. So the other
        process starts at our position."""
        released = self._release(partitions)
        uncommitted = {each: state.done for each, state in released.items() if state.is_behind}
        try:
            self._commits.send(consumer, uncommitted, self._note)
        except KafkaException as exception:
            log.warning("%s could not commit: %s", self._name, exception)
        self._unassign(consumer, partitions)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Release partitions that already belong to other processes."""
        self._release(partitions)
        self._unassign(consumer, partitions)

    def _unassign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Tell librdkafka that these partitions are no longer assigned. Leave out partitions that
        were not started: librdkafka was never told that they are assigned."""
        started = [each for each in partitions if each.partition not in self._unstarted]
        self._unstarted -= {each.partition for each in partitions}
        try:
            consumer.incremental_unassign(started)
        except KafkaException as exception:
            # A fatal error has already removed them; `poll` reports that error.
            log.debug("there was nothing to unassign: %s", exception)

    def _release(self, partitions: list[TopicPartition]) -> dict[int, PartitionPosition]:
        released = {
            each.partition: self._progress.release_partition(each.partition) for each in partitions
        }
        return {each: state for each, state in released.items() if state is not None}

    # --- committing ---------------------------------------------------------------------------

    def _commit_if_due(self) -> None:
        """Commit the progress if the last commit is old enough."""
        now = time.monotonic()
        if (now - self._committed_at) * 1000 < limits.CLIENT_COMMIT_MS:
            return
        self._commits.take_results()
        if not self._commits.is_idle:
            return  # only one commit at a time may be in flight: see `commits`
        self._committed_at = now
        self._commits.send(self._consumer, self._uncommitted(), self._note)

    def _uncommitted(self) -> dict[int, int]:
        partitions = self._progress.partitions
        return {each: state.done for each, state in partitions.items() if state.is_behind}

    def _on_committed(self, partition: int, offset: int) -> None:
        state = self._progress.position_in(partition)
        if state is not None:
            state.committed = offset

    def _poll(self) -> None:
        """Poll once, briefly; buffer a received message."""
        self._handle_polled(self._consumer.poll(limits.CLIENT_SHORT_POLL_MS / 1000))

    # --- the end ------------------------------------------------------------------------------

    def _commit_and_leave(self, deadline: Deadline) -> None:
        """Commit the progress and leave the group. A failed commit is only logged: after that, the
        position in the file or in the program's own store still counts."""
        offsets = self._uncommitted()
        if offsets:
            try:
                self.commit_as_member(offsets, self._note, deadline)
            except QuackError as error:
                log.warning(
                    "%s could not commit its progress in %s: %s", self._name, self.topic.name, error
                )
        leave(self._consumer, deadline, self._poll_others)

    # --- errors ----------------------------------------------------------------------

    def _explain_timeout(self, deadline: Deadline) -> QuackError:
        has_partitions = bool(self._progress.partitions)
        return self._diagnostics.explain_timeout(
            deadline, has_joined=self._has_joined, has_partitions=has_partitions
        )

    def _raise_error(self) -> None:
        """Raise the stored error, if there is one, and forget it."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _explain_error(self, error: KafkaError, record: Record) -> QuackError | None:
        """Translate an error; return None if the reader or librdkafka recovers from it. If the next
        offset was deleted, continue at the next existing offset."""
        state = self._progress.position_in(record.partition() or 0)
        if error.code() not in OUT_OF_RANGE:
            return self._diagnostics.explain_error(error)
        if state is None:
            return None
        try:
            self._seek_partition(
                record.partition() or 0,
                self._diagnostics.next_existing_offset(record, state.fetched_end),
            )
        except QuackError as failure:
            return failure
        return None
