"""Commit offsets as a member of a group: send the commit, and receive the result later.

librdkafka's blocking commit has no timeout. So commits are sent asynchronously, their results
arrive through `poll`, and callers that need the result wait with a deadline.

Only one commit at a time is in flight, except when partitions are released. librdkafka sends a
commit again if the response was lost, possibly after a later commit, and then the committed offset
would go back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from quackmq.client import limits
from quackmq.client.deadline import Deadline
from quackmq.client.kafka.cluster import is_not_member, to_topic_partitions
from quackmq.client.kafka.config import Settings
from quackmq.client.kafka.errors import translate_error
from quackmq.errors import MemberFenced, QuackError

#: The result of a commit: the error, if any, and the offsets.
CommitResult = tuple[KafkaError | None, Mapping[int, int]]
#: Polls without an assignment before a leaving member is sure that none is in flight.
_QUIET_POLLS: Final = 4


class Commits:
    """The commits of one member in one topic. Not thread-safe."""

    def __init__(self, topic: str, on_committed: Callable[[int, int], None]) -> None:
        """`on_committed` is called with each committed partition and offset."""
        self._topic = topic
        self._on_committed = on_committed
        self._results: list[CommitResult] = []
        self._in_flight = 0

    @property
    def is_idle(self) -> bool:
        """Whether no commit is in flight."""
        return not self._in_flight

    def on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        """Store the result of a commit. librdkafka calls this inside `poll`."""
        self._in_flight -= 1
        errors = [each.error for each in partitions if each.error is not None]
        first_error = error or next(iter(errors), None)
        self._results.append((first_error, {each.partition: each.offset for each in partitions}))

    def send(self, consumer: Consumer, offsets: Mapping[int, int], note: str) -> None:
        """Send a commit without waiting for its result; send nothing if `offsets` is empty. Call it
        only when no commit is in flight, except to release partitions, which cannot wait."""
        if offsets:
            topic_partitions = to_topic_partitions(self._topic, offsets, note)
            consumer.commit(offsets=topic_partitions, asynchronous=True)
            self._in_flight += 1

    def take_results(self) -> list[CommitResult]:
        """Return the results since the last call, after reporting the committed offsets."""
        results, self._results = self._results, []
        for error, offsets in results:
            if error is None:
                for partition, offset in offsets.items():
                    self._on_committed(partition, offset)
        return results

    def send_and_wait(
        self,
        consumer: Consumer,
        offsets: Mapping[int, int],
        note: str,
        deadline: Deadline,
        *,
        poll: Callable[[], None],
    ) -> None:
        """Commit and wait for the result; try again while the group rebalances. `poll` receives
        results and rebalance events. Raises QuackTimeout."""
        waited_for = f"offsets in topic {self._topic} to be committed"
        while True:
            error = self._commit_once(consumer, offsets, note, deadline, waited_for, poll)
            if error is None:
                return
            # A member that the group has just removed joins again while it polls.
            if not is_not_member(error) or deadline.has_passed():
                raise _translate_commit_error(error, waited_for, deadline)
            poll()

    def _commit_once(
        self,
        consumer: Consumer,
        offsets: Mapping[int, int],
        note: str,
        deadline: Deadline,
        waited_for: str,
        poll: Callable[[], None],
    ) -> KafkaError | None:
        """Send one commit and wait for its result. Return its error, or None if it succeeded. An
        error of sending is returned, too. Raises QuackTimeout."""
        while not self.is_idle:
            if deadline.has_passed():
                raise deadline.timeout_error(waited_for)
            poll()
        # An earlier commit may have had the same offsets. Take its result now, so that it is not
        # mistaken for the result of this commit.
        self.take_results()
        try:
            self.send(consumer, offsets, note)
        except KafkaException as exception:
            return exception.args[0]  # type: ignore[no-any-return]
        while True:
            for error, partitions in self.take_results():
                if partitions == offsets:
                    return error
            if deadline.has_passed():
                raise deadline.timeout_error(waited_for)
            poll()


def _translate_commit_error(error: KafkaError, waited_for: str, deadline: Deadline) -> QuackError:
    """Translate an error. A fatal error always means that another instance has fenced this
    member; librdkafka reports the cause only once."""
    if error.fatal() or error.code() == KafkaError._FATAL:
        return MemberFenced(f"{waited_for}: {error.str()}")
    return translate_error(error, waited_for, deadline)


def leave(consumer: Consumer, deadline: Deadline, poll_others: Callable[[], None]) -> None:
    """Leave the group for good.

    - A member with an instance id must unsubscribe before closing. Otherwise librdkafka does not
      leave the group.
    - An assignment that arrives meanwhile must be received and returned here: inside `close`,
      librdkafka would wait for that with Python's lock held, sometimes forever.
    - A member leaves with the id from the response to its join. So wait for a join in flight:
      otherwise the group would keep a dead member until its session expires. `poll_others` lets
      other members of this process take part in the rebalance.
    """
    try:
        while not consumer.memberid() and not deadline.has_passed():
            if consumer.poll(limits.CLIENT_SHORT_POLL_MS / 1000) is not None:
                break  # the group refuses the member
            poll_others()
        consumer.unsubscribe()
        quiet_polls = 0
        while quiet_polls < _QUIET_POLLS and not deadline.has_passed():
            record = consumer.poll(limits.CLIENT_SHORT_POLL_MS / 1000)
            quiet_polls = quiet_polls + 1 if record is None and not consumer.assignment() else 0
    except (KafkaException, RuntimeError):
        return  # it has left already


def close(consumer: Consumer, deadline: Deadline) -> None:
    """Close the consumer in a background thread. Wait for that thread until the deadline, and for a
    second if the deadline has passed."""
    closing = threading.Thread(target=consumer.close, daemon=True)
    closing.start()
    closing.join(max(deadline.remaining_s(), 1.0))


def evict(
    settings: Settings,
    topic: str,
    instances: Sequence[str],
    deadline: Deadline,
    poll_others: Callable[[], None],
) -> None:
    """Remove the members of dead processes from their group, by their instance ids.

    librdkafka has no request for that. So join with the instance id of each, which needs no
    rebalance, and leave. `poll_others` has the same meaning as for `leave`.
    """
    members = [Consumer(settings | {"group.instance.id": each}) for each in instances]

    def poll_members() -> None:
        for member in members:
            member.poll(0)
        poll_others()

    for member in members:
        member.subscribe([topic], on_assign=_accept_paused)
    while members:
        # Take the member out of the list first: `poll_members` must not poll a closed consumer.
        member = members.pop()
        try:
            leave(member, deadline, poll_members)
        finally:
            close(member, deadline)


def _accept_paused(member: Consumer, partitions: list[TopicPartition]) -> None:
    """Accept an assignment without reading. An assignment that is not accepted cannot be revoked,
    and then librdkafka never closes the consumer."""
    member.incremental_assign(partitions)
    member.pause(partitions)


def commit_by_joining(
    settings: Settings,
    topic: str,
    offsets: Mapping[int, int],
    note: str,
    deadline: Deadline,
    poll_others: Callable[[], None],
) -> None:
    """Commit for a name that other processes use. Only members may commit, so join the group,
    without reading anything, commit, and leave. `poll_others` lets other members of this process
    take part in the rebalance. Raises QuackTimeout."""
    commits = Commits(topic, lambda partition, offset: None)
    consumer = Consumer(settings | {"on_commit": commits.on_commit})
    joined: list[bool] = []

    def on_assign(member: Consumer, partitions: list[TopicPartition]) -> None:
        _accept_paused(member, partitions)
        joined.append(True)

    def poll() -> None:
        consumer.poll(limits.CLIENT_SHORT_POLL_MS / 1000)
        poll_others()

    try:
        consumer.subscribe([topic], on_assign=on_assign)
        while not joined:
            if deadline.has_passed():
                session_s = settings["session.timeout.ms"] / 1000
                raise deadline.timeout_error(
                    f"the members of the group {settings['group.id']} to let this process join "
                    f"them and commit offsets in topic {topic}: one of them is busy, or died less "
                    f"than {session_s:g} s ago on another machine or with another directory; give "
                    "a longer timeout"
                )
            poll()
        commits.send_and_wait(consumer, offsets, note, deadline, poll=poll)
        leave(consumer, deadline, poll_others)
    finally:
        close(consumer, deadline)
