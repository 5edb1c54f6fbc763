"""Getting: one topic's messages for one name, in one of two ways of remembering how far it is.

A reader is a member of the Kafka group of its name, for one topic. The group gives each partition
to one process at a time, and the reader decides where to begin in it:

- `by_id`: the program keeps the ids of its messages itself. What it names is done, nothing else is.
- by the client's file (`PositionFile`): it says how far the name has come, unless the broker's
  cursor was moved by somebody else since. A commit of ours bears the directory's own note, so it is
  known whose the cursor is: with our note the file counts, which is never behind; else the cursor.

Messages are fetched in batches and wait in `Progress`, which also knows which of them are in hand
and which are done. The broker's cursor follows what is done.

One thread at a time, which holds the reader's lock (see `Session`), except `take`: any thread may
call that. librdkafka calls back inside `poll`.
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
from quackmq.model.subscription import Place

log = logging.getLogger(__name__)

OnCrash = Literal["skip", "repeat"]

#: Where messages are got by id, one holder is all that there is.
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
        """`tend_others` is called from time to time while a call waits."""
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
        #: What the group gave us and we could not begin with, since nobody answered.
        self._unbegun: set[int] = set()
        #: Where the program says that it stands, also in partitions that others have.
        self._named: dict[int, int] = {}
        #: Whether the group has ever told us which partitions are ours, be it none.
        self._has_joined = False
        self._trouble: QuackError | None = None
        self._commits = Commits(topic.name, self._acknowledged)
        self._committed_at = time.monotonic()
        #: When `listen` has to look after the group and the broker's cursor again.
        self._tend_at = 0.0
        #: For callbacks, which cannot be given one.
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
        """Return the next message, by the client's file. What the holder had before is done.
        QuackTimeout."""
        self._settle(holder)
        while True:
            record = self._next(deadline)
            if not self._may_give(deadline):
                continue
            if self._progress.mode is Mode.REPEAT or self._write(record, deadline):
                taken = self._progress.take(holder, time.monotonic())
                if taken is not None:  # else a loop over `listen` in another thread was faster
                    return taken

    def get_after(self, named: Iterable[Place] | None, deadline: Deadline) -> Record:
        """Return the next message behind those that are named. QuackTimeout."""
        self._name_places(named or ())
        while True:
            record = self._next(deadline)
            if self._others_committed(record.partition() or 0, deadline):
                taken = self._progress.take(_PROGRAM, time.monotonic())
                if taken is not None:
                    return taken

    def put_back(self, holder: object, record: Record) -> None:
        """Nobody has seen the message that a holder was given: it comes next again."""
        holder = _PROGRAM if self.by_id else holder
        if self._progress.held(holder) is record:
            self._progress.put_back(holder)

    def _settle(self, holder: object) -> None:
        self._progress.settle(holder)
        self._commit_sometimes()

    # --- many messages ----------------------------------------------------------------------

    def fill(self, holder: object, deadline: Deadline) -> None:
        """Wait until there are messages for `take`; what the holder had before is done.
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
        """Return the next message of those that wait; what the holder had before is done. None if
        `fill` has to be called first. Only where a message in hand is repeated after a crash. Any
        thread may call."""
        now = time.monotonic()
        return self._progress.take(holder, now) if now < self._tend_at else None

    def leave(self, loop: object, caller: object) -> None:
        """A loop over messages has ended: its last one is done when `caller` asks for another."""
        self._progress.leave(loop, caller)

    def tend(self) -> None:
        """Let the group go on though nobody asks for our messages at the moment: it waits for all
        its members whenever one comes or goes."""
        if len(self._progress) < limits.CLIENT_BATCH_MESSAGES:
            self._take(self._consumer.poll(0))

    # --- moving -----------------------------------------------------------------------------

    def seek(self, starts: Mapping[int, int], note: str, deadline: Deadline) -> None:
        """Go on from elsewhere, in all partitions; those of other processes are not moved in
        these, but where they begin the next time."""
        self.commit_as_member(starts, note, deadline)
        for partition, start in starts.items():
            self._named.pop(partition, None)
            standing = self._progress.standing(partition)
            if standing is not None:
                standing.is_claimed = False
                self._go(partition, start)

    def positions(self) -> dict[int, int]:
        """Return the next offsets of our partitions; a message in hand counts as taken."""
        return {each: state.given for each, state in self._progress.partitions.items()}

    def commit_as_member(self, offsets: Mapping[int, int], note: str, deadline: Deadline) -> None:
        """Also for partitions that are not ours: a member may speak for its name. Messages that
        come meanwhile wait. QuackTimeout."""
        self._commits.send_and_wait(self._consumer, offsets, note, deadline, poll=self._look)

    def close(self, deadline: Deadline, *, is_done: bool) -> None:
        """Leave the group, with everything written and committed as far as the time suffices. With
        `is_done` the message in hand is done with."""
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
        """Return the first message that waits, once there is one. QuackTimeout."""
        self._deadline = deadline
        consumer = self._consumer
        while (first := self._progress.first()) is None:
            self._raise_trouble()
            if self._unbegun:
                self._try_to_begin(consumer, deadline)
            self._commits.hear()
            come = consumer.consume(limits.CLIENT_BATCH_MESSAGES, 0)
            if not come:
                record = consumer.poll(deadline.slice())
                if record is None:
                    self._raise_trouble()
                    if deadline.passed():
                        raise self._silence(deadline)
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
        """One message, or an error, or nothing."""
        if record is None:
            return
        error = record.error()
        if error is not None:
            self._trouble = self._trouble or self._meaning(error, record)
            return
        self._progress.add([record])

    def _go(self, partition: int, offset: int) -> None:
        """Read a partition from elsewhere."""
        self._progress.move(partition, offset)
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
        record = self._progress.held(_PROGRAM)
        if record is not None:
            behind = (record.offset() or 0) + 1
            if places.get(record.partition() or 0) == behind:
                self._named[record.partition() or 0] = behind
            else:
                self._progress.put_back(_PROGRAM)  # not named, so it is next again
        for partition, wanted in places.items():
            # Then nothing between it and the next one that waits was left out, also if there is
            # a gap in the offsets: the marker of a transaction has one too.
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
        """Before a message of another partition than the last is returned, what is done in the
        others is committed: so that the one id which the program stores next is enough to know
        all. False if that had to be waited for."""
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
        """Whether a message may be given now. False if something had to be done first, which may
        have taken messages away:

        - Partitions whose files another process has taken over are let go of.
        - The broker's cursors must bear our note: without it our files would not count after a
          crash.
        """
        lost = self._progress.end_lost()
        if lost:
            log.warning("partitions %s of %s went to another process", lost, self.topic.name)
            return False
        strange = {
            each: state.done
            for each, state in self._progress.partitions.items()
            if not state.is_claimed
        }
        if not strange:
            return True
        self.commit_as_member(strange, self._note, deadline)
        for partition in strange:
            state = self._progress.standing(partition)
            if state is not None:
                state.is_claimed = True
        return False

    def _write(self, record: Record, deadline: Deadline) -> bool:
        """Whether it is on disk that this message is behind, and the partition is still ours."""
        partition = record.partition() or 0
        state = self._progress.standing(partition)
        if state is None or state.file is None:
            return False
        try:
            state.file.write(max(state.given, (record.offset() or 0) + 1), deadline)
        except Taken:
            return False  # the next look lets go of it
        return True

    # --- what the group gives and takes --------------------------------------------------------

    def _assigned(self, consumer: Consumer, told: list[TopicPartition]) -> None:
        self._has_joined = True
        self._unbegun |= {each.partition for each in told}
        self._try_to_begin(consumer, Deadline(shared_limits.CLIENT_TIMEOUT_MS / 1000))

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
        state = PartitionPosition(start, file)
        state.committed = cursor.offset
        state.is_claimed = is_note(cursor.note, self._note)
        self._progress.begin(partition, state)
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

    def _let_go(self, told: list[TopicPartition]) -> dict[int, PartitionPosition]:
        going = {each.partition: self._progress.end(each.partition) for each in told}
        return {each: state for each, state in going.items() if state is not None}

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
        partitions = self._progress.partitions
        return {each: state.done for each, state in partitions.items() if state.is_behind}

    def _acknowledged(self, partition: int, offset: int) -> None:
        state = self._progress.standing(partition)
        if state is not None:
            state.committed = offset

    def _look(self) -> None:
        """Let things happen for a moment."""
        self._take(self._consumer.poll(limits.CLIENT_LOOK_MS / 1000))

    # --- the end ------------------------------------------------------------------------------

    def _finish(self, deadline: Deadline) -> None:
        offsets = self._uncommitted()
        if offsets:
            try:
                self.commit_as_member(offsets, self._note, deadline)
            except QuackError as error:
                # The file, or the program's store, knows.
                log.warning("%s leaves %s uncommitted: %s", self._name, self.topic.name, error)
        leave(self._consumer, deadline, self._tend_others)

    # --- what goes wrong ----------------------------------------------------------------------

    def _silence(self, deadline: Deadline) -> QuackError:
        has_any = bool(self._progress.partitions)
        return self._watch.silence(deadline, has_joined=self._has_joined, has_partitions=has_any)

    def _raise_trouble(self) -> None:
        if self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            raise trouble

    def _meaning(self, error: KafkaError, record: Record) -> QuackError | None:
        """None for what is mended already, or mends itself."""
        state = self._progress.standing(record.partition() or 0)
        if error.code() not in OUT_OF_RANGE:
            return self._watch.meaning(error)
        if state is None:
            return None
        try:
            self._go(record.partition() or 0, self._watch.next_there_is(record, state.end))
        except QuackError as found:
            return found
        return None
