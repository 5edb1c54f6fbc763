"""Getting: one topic's messages for one name, in one of two ways of remembering how far it is.

A reader is a member of the Kafka group of its name, for one topic. The group gives each partition
to one process at a time, and the reader decides where to begin in it:

- `by_id`: the program keeps the ids of its messages itself. What it names is done, nothing else is.
- by the client's file (`PositionFile`): it says how far the name has come, unless the broker's
  cursor was moved by somebody else since. A commit of ours bears the directory's own note, so it is
  known whose the cursor is: with our note the file counts, which is never behind; else the cursor.

Messages come in batches and wait in `buffer`; `get` takes one, `listen` all. Where a partition
stands is the first of its messages in the buffer, or where the last batch ended.

One thread at a time; `Client` holds the reader's lock. librdkafka calls back inside `poll`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as Record

from quackmq import limits
from quackmq.client.buffer import Buffer
from quackmq.client.cluster import Cluster, Committed
from quackmq.client.commits import Commits, close, leave
from quackmq.client.directory import Directory, Taken
from quackmq.client.failures import Deadline, translating
from quackmq.client.settings import Connection
from quackmq.client.standing import (
    Standing,
    is_note,
    is_subscribed,
    not_subscribed,
    position_by,
)
from quackmq.client.values import TopicInfo
from quackmq.client.watch import OUT_OF_RANGE, Watch
from quackmq.errors import QuackError, QuackTimeout
from quackmq.subscriptions import Place

log = logging.getLogger(__name__)

OnCrash = Literal["skip", "repeat"]

#: Messages of the first batch, before it is known how fast a program is.
_FIRST_BATCH: Final = 64


class Reader:
    def __init__(
        self,
        connection: Connection,
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
        """`tend_others` is called from time to time while a call waits."""
        self.topic = topic
        self._tend_others = tend_others
        self.by_id = by_id
        self._watch = Watch(cluster, topic, name, connection.address, directory.path)
        self._cluster = cluster
        self._name = name
        self._directory = directory
        self._repeats = on_crash == "repeat" and not by_id
        self._note = "" if by_id else directory.note
        self.buffer = Buffer()
        self._partitions: dict[int, Standing] = {}
        #: What the group gave us and we could not begin with, since nobody answered.
        self._unbegun: set[int] = set()
        #: Where the program says that it stands, also in partitions that others have.
        self._named: dict[int, int] = {}
        #: What was returned last, and is not done with for all that is known.
        self._in_hand: Record | None = None
        #: Whether messages are taken out of the buffer without our being told.
        self._is_listened_to = False
        self._trouble: QuackError | None = None
        self._commits = Commits(topic.name, self._acknowledged)
        self._committed_at = time.monotonic()
        self._changes = 0
        #: How many messages make a batch; when the last one was given, and how many it had.
        self._batch_messages = _FIRST_BATCH
        self._batch_at = time.monotonic()
        self._batch_size = 0
        #: For callbacks, which cannot be given one.
        self._deadline = Deadline(limits.CLIENT_TIMEOUT_MS / 1000)
        settings = connection.consumer(name, session_ms, busy_ms)
        settings["group.instance.id"] = f"{directory.id}.{directory.process}.{topic.id.hex}"
        settings["on_commit"] = self._commits.answered
        self._consumer = Consumer(settings)
        self._consumer.subscribe(
            [topic.name], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
        )

    # --- one message ------------------------------------------------------------------------

    def get(self, deadline: Deadline) -> Record:
        """The next message, by the client's file. QuackTimeout."""
        self.settle(deadline)
        while True:
            record = self._next(deadline)
            if not self._claimed(deadline):
                continue
            if self._repeats or self._write(record, deadline):
                self._in_hand = self.buffer.take()
                return record

    def get_after(self, named: Iterable[Place] | None, deadline: Deadline) -> Record:
        """The next message behind those that are named. QuackTimeout."""
        self._name_places(named or ())
        while True:
            record = self._next(deadline)
            if self._others_committed(record.partition() or 0, deadline):
                self._in_hand = self.buffer.take()
                return record

    def put_back(self, record: Record) -> None:
        """Nobody has seen the message that was returned last: it comes next again."""
        if self._in_hand is not record or record.partition() not in self._partitions:
            return
        self._in_hand = None
        self.buffer.replace([record, *self.buffer])
        if not self.by_id:
            self._write_positions()

    def settle(self, deadline: Deadline) -> None:
        """The message in hand is done with."""
        self._look_at_batch()
        record, self._in_hand = self._in_hand, None
        state = None if record is None else self._partitions.get(record.partition() or 0)
        if record is None or state is None or self.by_id:
            return
        state.done = max(state.done, (record.offset() or 0) + 1)
        if self._repeats:
            self._write(record, deadline)
        self._commit_sometimes()

    # --- batches ----------------------------------------------------------------------------

    def next_batch(self, deadline: Deadline) -> None:
        """The next messages are in the buffer, whose iterator the caller may use until the next
        call. The file is written for all of them at once. QuackTimeout."""
        self._fit_batch()
        self.settle_batch()
        while True:
            self._next(deadline)
            if not self._claimed(deadline):
                continue
            if self._repeats or self._write_ends():
                self._batch_at = time.monotonic()
                self._batch_size = len(self.buffer)
                self._is_listened_to = True
                return

    def settle_batch(self) -> None:
        """Everything that was taken out of the buffer is done with."""
        self._is_listened_to = False
        self._in_hand = None
        for partition, position in self._positions().items():
            self._partitions[partition].done = position
        if self._repeats:
            self._write_positions()
        self._commit_sometimes()

    def _fit_batch(self) -> None:
        """The next batch is as large as the program can take in its time."""
        took_ms = (time.monotonic() - self._batch_at) * 1000
        if took_ms > limits.CLIENT_BATCH_MS:
            self._batch_messages = max(1, self._batch_messages // 2)
        elif self._batch_size >= self._batch_messages and took_ms < limits.CLIENT_BATCH_MS / 2:
            self._batch_messages = min(2 * self._batch_messages, limits.CLIENT_BATCH_MESSAGES)

    def leave_batch(self) -> None:
        """What is left in the buffer stays for later, also for who comes after a crash."""
        if not self.by_id:
            self._look_at_batch()
            self._write_positions()

    def _look_at_batch(self) -> None:
        """What was taken last by who listens is in hand."""
        if self._is_listened_to:
            self._is_listened_to = False
            self._in_hand = self.buffer.last_taken()

    def tend(self) -> None:
        """Let the group go on though nobody asks for our messages at the moment: it waits for all
        its members whenever one comes or goes."""
        if len(self.buffer) < limits.CLIENT_BATCH_MESSAGES:
            self._take(self._consumer.poll(0))

    # --- moving -----------------------------------------------------------------------------

    def seek(self, starts: Mapping[int, int], note: str, deadline: Deadline) -> None:
        """Go on from elsewhere, in all partitions; those of other processes are not moved in
        these, but where they begin the next time."""
        self._is_listened_to = False
        self._in_hand = None
        self.commit_as_member(starts, note, deadline)
        for partition, start in starts.items():
            self._named.pop(partition, None)
            if partition in self._partitions:
                self._partitions[partition].is_claimed = False
                self._go(partition, start)
        if not self.by_id:
            self._write_positions()

    def positions(self) -> dict[int, int]:
        """The next offsets of what we have been given; a message in hand counts as taken."""
        return self._positions()

    def commit_as_member(self, offsets: Mapping[int, int], note: str, deadline: Deadline) -> None:
        """Also for partitions that are not ours: a member may speak for its name. Messages that
        come meanwhile wait in the buffer. QuackTimeout."""
        self._commits.send_and_wait(self._consumer, offsets, note, deadline, poll=self._look)

    def close(self, deadline: Deadline, *, is_done: bool) -> None:
        """Leave the group, with everything written and committed as far as the time suffices. With
        `is_done` the message in hand is done with."""
        try:
            if is_done:
                self.settle(deadline)
            self._finish(deadline)
        finally:
            close(self._consumer, deadline)
            for state in self._partitions.values():
                if state.file is not None:
                    state.file.close()
            self._partitions.clear()
            self.buffer.replace([])

    # --- filling the buffer -------------------------------------------------------------------

    def _next(self, deadline: Deadline) -> Record:
        """The first message in the buffer, once there is one. QuackTimeout."""
        self._deadline = deadline
        consumer = self._consumer
        while (first := self.buffer.first()) is None:
            self._raise_trouble()
            if self._unbegun:
                self._try_to_begin(consumer, deadline)
            self._commits.hear()
            changes = self._changes
            come = consumer.consume(self._batch_messages, 0)
            if not come:
                record = consumer.poll(deadline.slice())
                if record is None:
                    self._raise_trouble()
                    if deadline.passed():
                        raise self._watch.silence(deadline, has_partitions=bool(self._partitions))
                    self._commit_sometimes()
                    self._tend_others()
                    continue
                come = [record]
            if changes != self._changes or any(map(Record.error, come)):
                for each in come:
                    self._take(each)
            else:
                self.buffer.replace(come)
                self._note_ends(come)
        self._raise_trouble()
        return first

    def _take(self, record: Record | None) -> None:
        """One message, or an error, or nothing."""
        if record is None:
            return
        error = record.error()
        if error is not None:
            self._trouble = self._trouble or self._meaning(error, record)
            return
        state = self._partitions.get(record.partition() or 0)
        if state is not None:  # else it was on its way while the partition went elsewhere
            self.buffer.add([record])
            state.end = (record.offset() or 0) + 1

    def _note_ends(self, records: list[Record]) -> None:
        """Of each partition the last message counts, which stands nearest to the end."""
        missing = len(self._partitions)
        seen: set[int] = set()
        for record in reversed(records):
            partition = record.partition() or 0
            if partition not in seen:
                seen.add(partition)
                self._partitions[partition].end = (record.offset() or 0) + 1
                if len(seen) == missing:
                    return

    def _positions(self) -> dict[int, int]:
        """Where each partition stands: at its first message in the buffer, or behind the last; or
        at the message in hand, where that one is to be repeated."""
        found = {partition: state.end for partition, state in self._partitions.items()}
        for record in reversed([*self.buffer]):
            found[record.partition() or 0] = record.offset() or 0
        if self._repeats and self._in_hand is not None:
            partition = self._in_hand.partition() or 0
            if partition in found:
                found[partition] = self._in_hand.offset() or 0
        return found

    def _drop(self, partition: int) -> None:
        """The partition's messages that wait: not ours any more, or not next."""
        self.buffer.replace([each for each in self.buffer if each.partition() != partition])
        self._changes += 1

    def _go(self, partition: int, offset: int) -> None:
        """Read a partition from elsewhere."""
        self._drop(partition)
        state = self._partitions[partition]
        state.end = state.done = offset
        with translating(f"partition {partition} of {self.topic.name} to be read from {offset}"):
            where = TopicPartition(self.topic.name, partition, offset)
            try:
                self._consumer.seek(where)
            except KafkaException:
                # It has not begun to be read.
                self._consumer.incremental_unassign([where])
                self._consumer.incremental_assign([where])

    # --- by id --------------------------------------------------------------------------------

    def _name_places(self, named: Iterable[Place]) -> None:
        places = {partition: offset + 1 for partition, offset in named}
        record, self._in_hand = self._in_hand, None
        if record is not None and record.partition() in self._partitions:
            if places.get(record.partition() or 0) == (record.offset() or 0) + 1:
                self._named[record.partition() or 0] = (record.offset() or 0) + 1
            else:
                self.buffer.replace([record, *self.buffer])  # not named, so it is next again
        for partition, wanted in places.items():
            # Then nothing between it and the next one in the buffer was left out, also if there is
            # a gap in the offsets: the marker of a transaction has one too.
            is_known = self._named.get(partition) == wanted
            self._named[partition] = wanted
            state = self._partitions.get(partition)
            if state is not None:
                position = self._position(partition)
                if position < wanted or (position > wanted and not is_known):
                    self._go(partition, wanted)
                state.done = wanted
        self._commit_sometimes()

    def _position(self, partition: int) -> int:
        for record in self.buffer:
            if record.partition() == partition:
                return record.offset() or 0
        return self._partitions[partition].end

    def _others_committed(self, partition: int, deadline: Deadline) -> bool:
        """Before a message of another partition than the last is returned, what is done in the
        others is committed: so that the one id which the program stores next is enough to know
        all. False if that had to be waited for."""
        open_ones = {
            each: state.done
            for each, state in self._partitions.items()
            if each != partition and state.is_behind
        }
        if not open_ones:
            return True
        self.commit_as_member(open_ones, self._note, deadline)
        return False

    # --- files --------------------------------------------------------------------------------

    def _claimed(self, deadline: Deadline) -> bool:
        """Whether the broker's cursors bear our note, without which our files would not count after
        a crash. False if that had to be waited for: messages may have come and gone meanwhile."""
        strange = {
            each: state.done for each, state in self._partitions.items() if not state.is_claimed
        }
        if not strange:
            return True
        self.commit_as_member(strange, self._note, deadline)
        for partition in strange:
            state = self._partitions.get(partition)
            if state is not None:
                state.is_claimed = True
        return False

    def _write(self, record: Record, deadline: Deadline) -> bool:
        """Whether the file says that this message is behind, and the partition is still ours."""
        partition, position = record.partition() or 0, (record.offset() or 0) + 1
        return self._write_position(partition, position, deadline)

    def _write_ends(self) -> bool:
        """The same of all that is in the buffer. False if something of it is no longer ours."""
        changes = self._changes
        for partition, state in list(self._partitions.items()):
            self._write_position(partition, state.end, self._deadline)
        return changes == self._changes

    def _write_positions(self) -> None:
        """What was returned, and nothing else, is behind."""
        for partition, position in self._positions().items():
            self._write_position(partition, position, self._deadline)

    def _write_position(self, partition: int, position: int, deadline: Deadline) -> bool:
        state = self._partitions.get(partition)
        if state is None or state.file is None:
            return False
        if state.written == position:
            return True
        try:
            state.file.write(position, deadline)
        except Taken:
            log.warning("partition %d of %s went to another process", partition, self.topic.name)
            self._drop(partition)
            state.file.close()
            del self._partitions[partition]
            return False
        state.written = position
        return True

    # --- what the group gives and takes --------------------------------------------------------

    def _assigned(self, consumer: Consumer, told: list[TopicPartition]) -> None:
        self._changes += 1
        self._unbegun |= {each.partition for each in told}
        self._try_to_begin(consumer, Deadline(limits.CLIENT_TIMEOUT_MS / 1000))

    def _try_to_begin(self, consumer: Consumer, deadline: Deadline) -> None:
        """What does not succeed is tried again: the group, which gave it to us, will not."""
        try:
            self._begin(consumer, deadline)
        except QuackTimeout as error:
            log.warning("%s will try again to begin: %s", self._name, error)
        except QuackError as error:
            self._trouble = error
        except KafkaException as exception:
            self._trouble = self._watch.meaning(exception.args[0])

    def _begin(self, consumer: Consumer, deadline: Deadline) -> None:
        """Read what has not begun. UnknownSubscription, QuackTimeout."""
        starts: list[TopicPartition] = []
        try:
            for partition, cursor in self._cursors(deadline).items():
                start = self._begin_one(partition, cursor, deadline)
                starts.append(TopicPartition(self.topic.name, partition, start))
                self._unbegun.discard(partition)
        finally:
            # Also where there is nothing: of who does not say so librdkafka assumes it all.
            consumer.incremental_assign(starts)

    def _cursors(self, deadline: Deadline) -> dict[int, Committed]:
        """Of what has not begun."""
        topic = self._watch.check_topic(deadline)
        committed = self._cluster.committed(self._name, topic, deadline)
        if not is_subscribed(committed):
            raise not_subscribed(self._name, self.topic.name)
        if not self._unbegun <= committed.keys():
            # Partitions that came after the subscription are read from their beginning.
            firsts = enumerate(self._cluster.ends(topic, deadline)[0])
            committed = {each: Committed(first, "") for each, first in firsts} | committed
        return {each: committed[each] for each in sorted(self._unbegun)}

    def _begin_one(self, partition: int, cursor: Committed, deadline: Deadline) -> int:
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
        state = Standing(start, file)
        state.committed = cursor.offset
        state.is_claimed = is_note(cursor.note, self._note)
        self._partitions[partition] = state
        return start

    def _revoked(self, consumer: Consumer, told: list[TopicPartition]) -> None:
        """They go to another process, which begins where we are. The commit is on its way before we
        say that we have let go, by the same connection; who answers for the group reads in order.
        """
        going = self._let_go(told)
        behind = {each: state.done for each, state in going.items() if state.is_behind}
        try:
            self._commits.send(consumer, behind, self._note)
        except KafkaException as exception:
            log.warning("%s could not commit: %s", self._name, exception)
        self._unassign(consumer, told)

    def _lost(self, consumer: Consumer, told: list[TopicPartition]) -> None:
        """They went to others already."""
        self._let_go(told)
        self._unassign(consumer, told)

    def _unassign(self, consumer: Consumer, told: list[TopicPartition]) -> None:
        begun = [each for each in told if each.partition not in self._unbegun]
        self._unbegun -= {each.partition for each in told}
        try:
            consumer.incremental_unassign(begun)
        except KafkaException as exception:
            # An error that ends the consumer has taken them away before: `poll` tells of that one.
            log.debug("there was nothing to let go of: %s", exception)

    def _let_go(self, told: list[TopicPartition]) -> dict[int, Standing]:
        positions = self._positions()
        going = {}
        for partition in (each.partition for each in told):
            if partition not in self._partitions:
                continue
            if not self.by_id:
                self._partitions[partition].done = positions[partition]
                self._write_position(partition, positions[partition], self._deadline)
            self._drop(partition)
            state = self._partitions.pop(partition, None)
            if state is not None:
                going[partition] = state
                if state.file is not None:
                    state.file.close()
        return going

    # --- committing ---------------------------------------------------------------------------

    def _commit_sometimes(self) -> None:
        """The broker's cursor follows from time to time."""
        now = time.monotonic()
        if (now - self._committed_at) * 1000 < limits.CLIENT_COMMIT_MS:
            return
        self._commits.hear()
        if not self._commits.is_idle:
            return
        self._committed_at = now
        self._commits.send(self._consumer, self._uncommitted(), self._note)

    def _uncommitted(self) -> dict[int, int]:
        return {each: state.done for each, state in self._partitions.items() if state.is_behind}

    def _acknowledged(self, partition: int, offset: int) -> None:
        state = self._partitions.get(partition)
        if state is not None:
            state.committed = offset

    def _look(self) -> None:
        """Let things happen for a moment."""
        self._take(self._consumer.poll(limits.CLIENT_LOOK_MS / 1000))

    # --- the end ------------------------------------------------------------------------------

    def _finish(self, deadline: Deadline) -> None:
        if not self.by_id:
            self._write_positions()
            for partition, position in self._positions().items():
                self._partitions[partition].done = position
        offsets = self._uncommitted()
        if offsets:
            try:
                self.commit_as_member(offsets, self._note, deadline)
            except QuackError as error:
                # The file, or the program's store, knows.
                log.warning("%s leaves %s uncommitted: %s", self._name, self.topic.name, error)
        leave(self._consumer, deadline)

    # --- what goes wrong ----------------------------------------------------------------------

    def _raise_trouble(self) -> None:
        if self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            raise trouble

    def _meaning(self, error: KafkaError, record: Record) -> QuackError | None:
        """None for what is mended already, or mends itself."""
        state = self._partitions.get(record.partition() or 0)
        if error.code() not in OUT_OF_RANGE:
            return self._watch.meaning(error)
        if state is None:
            return None
        try:
            self._go(record.partition() or 0, self._watch.next_there_is(record, state.end))
        except QuackError as found:
            return found
        return None
