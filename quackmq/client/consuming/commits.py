"""Commit offsets as a member of a group: send the commit, and receive the answer later.

librdkafka's blocking commit has no timeout. So commits are sent asynchronously, their answers
arrive through `poll`, and callers that need the answer wait with a deadline.

Only one commit at a time is in flight. librdkafka sends a commit again if its answer was lost,
possibly after a later commit, and then the committed offset would go back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from quackmq.client import limits
from quackmq.client.kafka.cluster import is_not_member, partitions_of
from quackmq.client.kafka.config import Settings
from quackmq.client.kafka.errors import Deadline, translated
from quackmq.errors import MemberFenced, QuackError

#: The result of a commit: the error, if any, and the offsets.
Answer = tuple[KafkaError | None, Mapping[int, int]]
#: Polls without an assignment before a leaving member is sure that none is in flight.
_QUIET_POLLS: Final = 4


class Commits:
    """The commits of one member in one topic. Not thread-safe."""

    def __init__(self, topic: str, acknowledged: Callable[[int, int], None]) -> None:
        """`acknowledged` is called with each committed partition and offset."""
        self._topic = topic
        self._acknowledged = acknowledged
        self._answers: list[Answer] = []
        self._unanswered = 0

    @property
    def is_idle(self) -> bool:
        """Whether no commit is in flight."""
        return not self._unanswered

    def answered(self, error: KafkaError | None, told: list[TopicPartition]) -> None:
        """librdkafka's callback."""
        self._unanswered -= 1
        failed = error or next((each.error for each in told if each.error is not None), None)
        self._answers.append((failed, {each.partition: each.offset for each in told}))

    def send(self, consumer: Consumer, offsets: Mapping[int, int], note: str) -> None:
        """Send a commit. Call it when none is in flight, or when there is no time to wait."""
        if offsets:
            wanted = partitions_of(self._topic, offsets, note)
            consumer.commit(offsets=wanted, asynchronous=True)
            self._unanswered += 1

    def hear(self) -> list[Answer]:
        """Return the answers since the last call."""
        answers, self._answers = self._answers, []
        for error, offsets in answers:
            if error is None:
                for partition, offset in offsets.items():
                    self._acknowledged(partition, offset)
        return answers

    def send_and_wait(
        self,
        consumer: Consumer,
        offsets: Mapping[int, int],
        note: str,
        deadline: Deadline,
        *,
        poll: Callable[[], None],
    ) -> None:
        """Commit and wait for the answer; try again while the group rebalances. `poll` receives
        answers and rebalance events. Raises QuackTimeout."""
        what = f"offsets in topic {self._topic} to be committed"
        while True:
            error = self._wait(consumer, offsets, note, deadline, what, poll)
            if error is None:
                return
            if not is_not_member(error) or deadline.passed():
                raise _translate(error, what, deadline)
            poll()

    def _wait(
        self,
        consumer: Consumer,
        offsets: Mapping[int, int],
        note: str,
        deadline: Deadline,
        what: str,
        poll: Callable[[], None],
    ) -> KafkaError | None:
        while not self.is_idle:
            if deadline.passed():
                raise deadline.timeout(what)
            poll()
        self.hear()
        try:
            self.send(consumer, offsets, note)
        except KafkaException as exception:
            return exception.args[0]  # type: ignore[no-any-return]
        while True:
            for error, told in self.hear():
                if told == offsets:
                    return error
            if deadline.passed():
                raise deadline.timeout(what)
            poll()


def _translate(error: KafkaError, what: str, deadline: Deadline) -> QuackError:
    """Translate an error. A fatal error always means that another instance has fenced this
    member; librdkafka reports the cause only once."""
    if error.fatal() or error.code() == KafkaError._FATAL:
        return MemberFenced(f"{what}: {error.str()}")
    return translated(error, what, deadline)


def leave(consumer: Consumer, deadline: Deadline, tend_others: Callable[[], None]) -> None:
    """Leave the group for good.

    - librdkafka keeps the place of a member with an instance id unless it unsubscribes before
      closing.
    - An assignment that arrives meanwhile must be received and returned here: inside `close`,
      librdkafka would wait for that with Python's lock held, sometimes forever.
    - A member leaves with the id from the answer to its join. So wait for a join that is in flight:
      otherwise the group would keep a dead member until its session expires. `tend_others` lets
      other members of this process take part in the rebalance.
    """
    try:
        while not consumer.memberid() and not deadline.passed():
            if consumer.poll(limits.CLIENT_LOOK_MS / 1000) is not None:
                break  # the group refuses the member
            tend_others()
        consumer.unsubscribe()
        quiet = 0
        while quiet < _QUIET_POLLS and not deadline.passed():
            come = consumer.poll(limits.CLIENT_LOOK_MS / 1000)
            quiet = quiet + 1 if come is None and not consumer.assignment() else 0
    except (KafkaException, RuntimeError):
        return  # it has left already


def close(consumer: Consumer, deadline: Deadline) -> None:
    """Close in a background thread, and wait for it only until the deadline."""
    closing = threading.Thread(target=consumer.close, daemon=True)
    closing.start()
    closing.join(max(deadline.left(), 1.0))


def evict(
    settings: Settings,
    topic: str,
    instances: Sequence[str],
    deadline: Deadline,
    tend_others: Callable[[], None],
) -> None:
    """Remove the members of dead processes from their group, by their instance ids. librdkafka
    has no request for that. So take the place of each, for which the group does not wait, and
    leave it. `tend_others` as for `leave`."""
    members = [Consumer(settings | {"group.instance.id": each}) for each in instances]

    def tend() -> None:
        for member in members:
            member.poll(0)
        tend_others()

    for member in members:
        member.subscribe([topic], on_assign=_accept_paused)
    while members:
        member = members.pop()
        try:
            leave(member, deadline, tend)
        finally:
            close(member, deadline)


def _accept_paused(member: Consumer, told: list[TopicPartition]) -> None:
    # Accept the assignment; otherwise librdkafka cannot revoke it and never closes.
    member.incremental_assign(told)
    member.pause(told)


def commit_by_joining(
    settings: Settings,
    topic: str,
    offsets: Mapping[int, int],
    note: str,
    deadline: Deadline,
    tend_others: Callable[[], None],
) -> None:
    """Commit for a name that other processes use. Only members may commit, so join the group,
    without reading anything, commit, and leave. `tend_others` lets other members of this process
    take part in the rebalance. Raises QuackTimeout."""
    commits = Commits(topic, lambda partition, offset: None)
    consumer = Consumer(settings | {"on_commit": commits.answered})
    joined: list[bool] = []

    def assigned(member: Consumer, told: list[TopicPartition]) -> None:
        _accept_paused(member, told)
        joined.append(True)

    def poll() -> None:
        consumer.poll(limits.CLIENT_LOOK_MS / 1000)
        tend_others()

    try:
        consumer.subscribe([topic], on_assign=assigned)
        while not joined:
            if deadline.passed():
                session_s = settings["session.timeout.ms"] / 1000
                raise deadline.timeout(
                    f"the members of the group {settings['group.id']} to let this process join "
                    f"them and commit offsets in topic {topic}: one of them is busy, or died less "
                    f"than {session_s:g} s ago on another machine or with another directory; give "
                    "a longer timeout"
                )
            poll()
        commits.send_and_wait(consumer, offsets, note, deadline, poll=poll)
        leave(consumer, deadline, tend_others)
    finally:
        close(consumer, deadline)
