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

Not thread-safe: the caller holds the reader's lock (see `Session`). Only `take` may be called by
any thread. librdkafka runs its callbacks inside `poll`.
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
from quackmq.client.consuming.position_file import Taken
from quackmq.client.consuming.progress import Mode, Progress
from quackmq.client.consuming.start import (
    PartitionPosition,
    is_note,
    is_subscribed,
    not_subscribed,
    position_by,
)
from quackmq.client.kafka.cluster import Cluster, Committed
from quackmq.client.kafka.config import KafkaConfig
from quackmq.client.kafka.diagnostics import OUT_OF_RANGE, Watch
from quackmq.client.kafka.errors import Deadline, translating
from quackmq.client.kafka.types import TopicInfo
from quackmq.errors import QuackError, QuackTimeout
from quackmq.model.subscription import RecordPosition

log = logging.getLogger(__name__)

OnCrash = Literal["skip", "repeat"]

#: The only holder if messages are read by id.
_PROGRAM: Final = "the program"


class Reader:
    def __init__(
        self,
        connection: KafkaConfig,
        cluster: Cluster,
        topic: TopicInfo,
        name: str,
        directory: Directory,
        *,
        by_id: bool,
        on_crash: OnCrash,
        session_ms: int,
        busy_ms: int,
        tend_others: Callable[[], None],
    ) -> None:
        """`tend_others` is called regularly while a call waits."""
        self.topic = topic
        self.instance = directory.instance(topic.id)
        self._tend_others = tend_others
        self.by_id = by_id
        self._watch = Watch(cluster, topic, name, connection, directory.path, session_ms / 1000)
        self._cluster = cluster
        self._name = name
        self._directory = directory
        self._note = "" if by_id else directory.note
        mode = Mode.NAMED if by_id else Mode(on_crash)
        self._progress = Progress(mode, busy_ms / 1000)
        #: Assigned partitions whose start is not known yet, because the broker did not answer.
        self._unstarted: set[int] = set()
        #: The positions that the program has passed, also for partitions of other processes.
        self._named: dict[int, int] = {}
        #: Whether the group has ever sent an assignment, even an empty one.
        self._has_joined = False
        self._trouble: QuackError | None = None
        self._commits = Commits(topic.name, self._acknowledged)
        self._committed_at = time.monotonic()
        #: When `listen` has to poll the group and commit again.
        self._tend_at = 0.0
        #: For callbacks, which have no deadline argument.
        self._deadline = Deadline(shared_limits.CLIENT_TIMEOUT_MS / 1000)
        settings = connection.consumer(name, session_ms, busy_ms)
        settings["group.instance.id"] = self.instance
        settings["on_commit"] = self._commits.answered
        self._consumer = Consumer(settings)
        self._consumer.subscribe(
            [topic.name], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
        )

    # --- one message ------------------------------------------------------------------------

    def get(self, holder: object, deadline: Deadline) -> Record:
        """Return the next message, with the progress in the client's file. The holder's last
        message is done. Raises QuackTimeout."""
        self._settle(holder)
        while True:
            record = self._next(deadline)
            if not self._may_give(deadline):
                continue
            if self._progress.mode is Mode.REPEAT or self._write(record, deadline):
                taken = self._progress.take(holder, time.monotonic())
                if taken is not None:  # otherwise a `listen` loop in another thread was faster
                    return taken

    def get_after(self, named: Iterable[RecordPosition] | None, deadline: Deadline) -> Record:
        """Return the next message after those whose places are given. Raises QuackTimeout."""
        self._name_places(named or ())
        while True:
            record = self._next(deadline)
            if self._others_committed(record.partition() or 0, deadline):
                taken = self._progress.take(_PROGRAM, time.monotonic())
                if taken is not None:
                    return taken

    def put_back(self, holder: object, record: Record) -> None:
        """Let the next get return the message that a holder was given."""
        holder = _PROGRAM if self.by_id else holder
        if self._progress.held(holder) is record:
            self._progress.put_back(holder)

    def _settle(self, holder: object) -> None:
        self._progress.settle(holder)
        self._commit_sometimes()

    # --- many messages ----------------------------------------------------------------------

    def fill(self, holder: object, deadline: Deadline) -> None:
        """Wait until there are messages for `take`. The holder's last message is done. Raises
        QuackTimeout."""
        self._settle(holder)
        if len(self._progress):
            self.tend()
        while True:
            self._next(deadline)
            if self._may_give(deadline):
                self._tend_at = time.monotonic() + limits.CLIENT_COMMIT_MS / 1000
                return

    def take(self, holder: object) -> Record | None:
        """Return the next buffered message, or None if `fill` must be called first. The holder's
        last message is done. Only for `on_crash="repeat"`. Any thread may call."""
        now = time.monotonic()
        return self._progress.take(holder, now) if now < self._tend_at else None

    def leave(self, loop: object, caller: object) -> None:
        """End a loop over messages: its last one is done when `caller` asks for another."""
        self._progress.leave(loop, caller)

    def tend(self) -> None:
        """Poll without delivering messages: the group waits for all its members whenever one
        joins or leaves."""
        if len(self._progress) < limits.CLIENT_BATCH_MESSAGES:
            self._take(self._consumer.poll(0))

    # --- moving -----------------------------------------------------------------------------

    def seek(self, starts: Mapping[int, int], note: str, deadline: Deadline) -> None:
        """Move the position in all partitions. Other processes use the new position when they
        next start reading a partition."""
        self.commit_as_member(starts, note, deadline)
        for partition, start in starts.items():
            self._named.pop(partition, None)
            standing = self._progress.standing(partition)
            if standing is not None:
                standing.is_claimed = False
                self._go(partition, start)

    def positions(self) -> dict[int, int]:
        """Return the next offset of each assigned partition; a message in hand counts as read."""
        return {each: state.given for each, state in self._progress.partitions.items()}

    def commit_as_member(self, offsets: Mapping[int, int], note: str, deadline: Deadline) -> None:
        """Commit as a member, which may also commit for partitions of other members. Messages
        that arrive meanwhile are buffered. Raises QuackTimeout."""
        self._commits.send_and_wait(self._consumer, offsets, note, deadline, poll=self._poll)

    def close(self, deadline: Deadline, *, is_done: bool) -> None:
        """Write and commit the progress as far as the time allows, and leave the group. With
        `is_done`, the messages in hand are done."""
        try:
            if is_done:
                self._progress.settle_all()
            self._finish(deadline)
        finally:
            close(self._consumer, deadline)
            for partition in self._progress.partitions:
                self._progress.end(partition)

    # --- fetching -----------------------------------------------------------------------------

    def _next(self, deadline: Deadline) -> Record:
        """Return the first buffered message; wait for one. Raises QuackTimeout."""
        self._deadline = deadline
        consumer = self._consumer
        while (first := self._progress.first()) is None:
            self._raise_trouble()
            if self._unstarted:
                self._try_to_start(consumer, deadline)
            self._commits.hear()
            come = consumer.consume(limits.CLIENT_BATCH_MESSAGES, 0)
            if not come:
                record = consumer.poll(deadline.slice())
                if record is None:
                    self._raise_trouble()
                    if deadline.passed():
                        raise self._explain_timeout(deadline)
                    self._commit_sometimes()
                    self._tend_others()
                    continue
                come = [record]
            if any(map(Record.error, come)):
                for each in come:
                    self._take(each)
            else:
                self._progress.add(come)
        self._raise_trouble()
        return first

    def _take(self, record: Record | None) -> None:
        """Handle a message, an error, or None."""
        if record is None:
            return
        error = record.error()
        if error is not None:
            self._trouble = self._trouble or self._explain_error(error, record)
            return
        self._progress.add([record])

    def _go(self, partition: int, offset: int) -> None:
        """Continue reading a partition at another offset."""
        self._progress.move(partition, offset)
        with translating(f"partition {partition} of {self.topic.name} to be read from {offset}"):
            where = TopicPartition(self.topic.name, partition, offset)
            try:
                self._consumer.seek(where)
            except KafkaException:
                # The partition is not being fetched yet.
                self._consumer.incremental_unassign([where])
                self._consumer.incremental_assign([where])

    # --- by id --------------------------------------------------------------------------------

    def _name_places(self, named: Iterable[RecordPosition]) -> None:
        places = {partition: offset + 1 for partition, offset in named}
        record = self._progress.held(_PROGRAM)
        if record is not None:
            behind = (record.offset() or 0) + 1
            if places.get(record.partition() or 0) == behind:
                self._named[record.partition() or 0] = behind
            else:
                self._progress.put_back(
                    _PROGRAM
                )  # its id was not passed, so it is the next one again
        for partition, wanted in places.items():
            # Then no message between it and the next buffered one was skipped, even if there is a
            # gap in the offsets, for example from a transaction marker.
            is_known = self._named.get(partition) == wanted
            self._named[partition] = wanted
            state = self._progress.standing(partition)
            if state is not None:
                position = self._position(partition, state)
                if position < wanted or (position > wanted and not is_known):
                    self._go(partition, wanted)
                self._progress.name(partition, wanted)
        self._commit_sometimes()

    def _position(self, partition: int, state: PartitionPosition) -> int:
        first = self._progress.first(partition)
        return state.end if first is None else first.offset() or 0

    def _others_committed(self, partition: int, deadline: Deadline) -> bool:
        """Commit what is done in all other partitions before a message of this partition is
        returned. Then the single id that the program stores next is enough to know all
        positions. Return False if a commit was necessary."""
        open_ones = {
            each: state.done
            for each, state in self._progress.partitions.items()
            if each != partition and state.is_behind
        }
        if not open_ones:
            return True
        self.commit_as_member(open_ones, self._note, deadline)
        return False

    # --- files --------------------------------------------------------------------------------

    def _may_give(self, deadline: Deadline) -> bool:
        """Return whether a message may be delivered now. Return False after one of these steps,
        which may have removed messages:

        - Release partitions whose files another process has taken over.
        - Commit with our metadata where the committed offset lacks it: without it, our file would
          not count after a crash.
        """
        lost = self._progress.end_lost()
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
            state = self._progress.standing(partition)
            if state is not None:
                state.is_claimed = True
        return False

    def _write(self, record: Record, deadline: Deadline) -> bool:
        """Write to disk that this message is done; return whether that succeeded and the
        partition is still ours."""
        partition = record.partition() or 0
        state = self._progress.standing(partition)
        if state is None or state.file is None:
            return False
        try:
            state.file.write(max(state.given, (record.offset() or 0) + 1), deadline)
        except Taken:
            return False  # the next check releases it
        return True

    # --- assignment --------------------------------------------------------

    def _assigned(self, consumer: Consumer, told: list[TopicPartition]) -> None:
        self._has_joined = True
        self._unstarted |= {each.partition for each in told}
        self._try_to_start(consumer, Deadline(shared_limits.CLIENT_TIMEOUT_MS / 1000))

    def _try_to_start(self, consumer: Consumer, deadline: Deadline) -> None:
        """Try to start reading. A failed attempt is repeated by us: the group does not assign
        again."""
        try:
            self._start(consumer, deadline)
        except QuackTimeout as error:
            log.warning("%s will try again to start reading: %s", self._name, error)
        except QuackError as error:
            self._trouble = error
        except KafkaException as exception:
            self._trouble = self._watch.explain_error(exception.args[0])

    def _start(self, consumer: Consumer, deadline: Deadline) -> None:
        """Start reading newly assigned partitions. Raises UnknownSubscription or QuackTimeout."""
        starts: list[TopicPartition] = []
        try:
            for partition, cursor in self._cursors(deadline).items():
                start = self._start_partition(partition, cursor, deadline)
                starts.append(TopicPartition(self.topic.name, partition, start))
                self._unstarted.discard(partition)
        finally:
            # Call it even with an empty list: otherwise librdkafka assumes the whole assignment.
            consumer.incremental_assign(starts)

    def _cursors(self, deadline: Deadline) -> dict[int, Committed]:
        """Return the committed offsets of newly assigned partitions."""
        topic = self._watch.check_topic(deadline)
        committed = self._cluster.committed(self._name, topic, deadline)
        if not is_subscribed(committed):
            raise not_subscribed(self._name, self.topic.name)
        if not self._unstarted <= committed.keys():
            # Partitions added after the subscription are read from their beginning.
            firsts = enumerate(self._cluster.ends(topic, deadline)[0])
            committed = {each: Committed(first, "") for each, first in firsts} | committed
        return {each: committed[each] for each in sorted(self._unstarted)}

    def _start_partition(self, partition: int, cursor: Committed, deadline: Deadline) -> int:
        file = None
        if self.by_id:
            start = self._named.get(partition, cursor.offset)
        else:
            file = self._directory.position(self.topic.id, partition)
            try:
                start = file.take_over(
                    lambda position: position_by(cursor, position, self._note), deadline
                )
            except QuackTimeout:
                file.close()
                raise
        state = PartitionPosition(start, file)
        state.committed = cursor.offset
        state.is_claimed = is_note(cursor.note, self._note)
        self._progress.begin(partition, state)
        return start

    def _revoked(self, consumer: Consumer, told: list[TopicPartition]) -> None:
        """Commit and release partitions that go to another process. The commit is sent before
        the release, over the same connection, and the coordinator reads in order. So the other
        process starts at our position."""
        going = self._release(told)
        behind = {each: state.done for each, state in going.items() if state.is_behind}
        try:
            self._commits.send(consumer, behind, self._note)
        except KafkaException as exception:
            log.warning("%s could not commit: %s", self._name, exception)
        self._unassign(consumer, told)

    def _lost(self, consumer: Consumer, told: list[TopicPartition]) -> None:
        """Release partitions that already belong to other processes."""
        self._release(told)
        self._unassign(consumer, told)

    def _unassign(self, consumer: Consumer, told: list[TopicPartition]) -> None:
        begun = [each for each in told if each.partition not in self._unstarted]
        self._unstarted -= {each.partition for each in told}
        try:
            consumer.incremental_unassign(begun)
        except KafkaException as exception:
            # A fatal error has already removed them; `poll` reports that error.
            log.debug("there was nothing to unassign: %s", exception)

    def _release(self, told: list[TopicPartition]) -> dict[int, PartitionPosition]:
        going = {each.partition: self._progress.end(each.partition) for each in told}
        return {each: state for each, state in going.items() if state is not None}

    # --- committing ---------------------------------------------------------------------------

    def _commit_sometimes(self) -> None:
        """Commit the progress if the last commit is old enough."""
        now = time.monotonic()
        if (now - self._committed_at) * 1000 < limits.CLIENT_COMMIT_MS:
            return
        self._commits.hear()
        if not self._commits.is_idle:
            return
        self._committed_at = now
        self._commits.send(self._consumer, self._uncommitted(), self._note)

    def _uncommitted(self) -> dict[int, int]:
        partitions = self._progress.partitions
        return {each: state.done for each, state in partitions.items() if state.is_behind}

    def _acknowledged(self, partition: int, offset: int) -> None:
        state = self._progress.standing(partition)
        if state is not None:
            state.committed = offset

    def _poll(self) -> None:
        """Poll once."""
        self._take(self._consumer.poll(limits.CLIENT_LOOK_MS / 1000))

    # --- the end ------------------------------------------------------------------------------

    def _finish(self, deadline: Deadline) -> None:
        offsets = self._uncommitted()
        if offsets:
            try:
                self.commit_as_member(offsets, self._note, deadline)
            except QuackError as error:
                # The file, or the program's own store, has the progress.
                log.warning(
                    "%s could not commit its progress in %s: %s", self._name, self.topic.name, error
                )
        leave(self._consumer, deadline, self._tend_others)

    # --- errors ----------------------------------------------------------------------

    def _explain_timeout(self, deadline: Deadline) -> QuackError:
        has_any = bool(self._progress.partitions)
        return self._watch.explain_timeout(
            deadline, has_joined=self._has_joined, has_partitions=has_any
        )

    def _raise_trouble(self) -> None:
        if self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            raise trouble

    def _explain_error(self, error: KafkaError, record: Record) -> QuackError | None:
        """Handle or translate an error; None if the reader or librdkafka recovers."""
        state = self._progress.standing(record.partition() or 0)
        if error.code() not in OUT_OF_RANGE:
            return self._watch.explain_error(error)
        if state is None:
            return None
        try:
            self._go(record.partition() or 0, self._watch.next_existing_offset(record, state.end))
        except QuackError as found:
            return found
        return None
