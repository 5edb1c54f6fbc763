"""The broker's cursor, moved by a member of a name: sent at once, answered later.

librdkafka has a commit that waits, but for as long as it likes; so commits are sent, their answers
come in by `poll` like everything else, and who must know waits for them with a deadline.

One is under way at a time: librdkafka sends one whose answer was lost again, by then perhaps behind
a later one, and the cursor would go back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from quackmq.client import limits
from quackmq.client.kafka.cluster import is_of_nobody, partitions_of
from quackmq.client.kafka.config import Settings
from quackmq.client.kafka.errors import Deadline, translated
from quackmq.errors import MemberFenced, QuackError

#: What became of a commit: the error, if there is one, and what was to be committed.
Answer = tuple[KafkaError | None, Mapping[int, int]]
#: Who leaves looks so often whether an assignment was on its way, after the last one was gone.
_QUIET_POLLS: Final = 4


class Commits:
    """Those of one member in one topic. One thread at a time."""

    def __init__(self, topic: str, acknowledged: Callable[[int, int], None]) -> None:
        """`acknowledged` is told of each partition and offset that the broker has."""
        self._topic = topic
        self._acknowledged = acknowledged
        self._answers: list[Answer] = []
        self._unanswered = 0

    @property
    def is_idle(self) -> bool:
        """Whether none is under way."""
        return not self._unanswered

    def answered(self, error: KafkaError | None, told: list[TopicPartition]) -> None:
        """librdkafka's callback."""
        self._unanswered -= 1
        failed = error or next((each.error for each in told if each.error is not None), None)
        self._answers.append((failed, {each.partition: each.offset for each in told}))

    def send(self, consumer: Consumer, offsets: Mapping[int, int], note: str) -> None:
        """To be called when none is under way, or when there is no time to wait for it."""
        if offsets:
            wanted = partitions_of(self._topic, offsets, note)
            consumer.commit(offsets=wanted, asynchronous=True)
            self._unanswered += 1

    def hear(self) -> list[Answer]:
        """The answers since the last time."""
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
        """Until they are durable. While the group changes hands it is tried again; `poll` lets
        that, and answers, happen. QuackTimeout."""
        what = f"offsets in topic {self._topic} to be committed"
        while True:
            error = self._wait(consumer, offsets, note, deadline, what, poll)
            if error is None:
                return
            if not is_of_nobody(error) or deadline.passed():
                raise _meaning(error, what, deadline)
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


def _meaning(error: KafkaError, what: str, deadline: Deadline) -> QuackError:
    """A member is ended by one thing alone, and is told of it once: another one in its place. Then
    all that it hears is that it has ended."""
    if error.fatal() or error.code() == KafkaError._FATAL:
        return MemberFenced(f"{what}: {error.str()}")
    return translated(error, what, deadline)


def leave(consumer: Consumer, deadline: Deadline, tend_others: Callable[[], None]) -> None:
    """Leave the group for good: librdkafka would keep the place of a member with an instance id,
    unless it is unsubscribed before it is closed. An assignment that has come meanwhile must be
    heard of and given back here: inside `close` that waits for librdkafka with Python's lock held,
    at times for ever.

    A member leaves by the id that the answer to its join brings. So a join that is under way is
    waited for: the group would otherwise keep a member that nobody hears of again, and wait for it
    until its session ends. `tend_others` lets members of this process take part in that."""
    try:
        while not consumer.memberid() and not deadline.passed():
            if consumer.poll(limits.CLIENT_LOOK_MS / 1000) is not None:
                break  # the group refuses it
            tend_others()
        consumer.unsubscribe()
        quiet = 0
        while quiet < _QUIET_POLLS and not deadline.passed():
            come = consumer.poll(limits.CLIENT_LOOK_MS / 1000)
            quiet = quiet + 1 if come is None and not consumer.assignment() else 0
    except (KafkaException, RuntimeError):
        return  # it is out already


def close(consumer: Consumer, deadline: Deadline) -> None:
    """librdkafka closes by itself, usually at once, without anybody waiting for ever."""
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
    """Remove members whose process is dead from their group, by the names of their own. Take the
    place of each, for which the group does not wait, and leave it. librdkafka has no request by
    which one member removes another. `tend_others` as for `leave`."""
    members = [Consumer(settings | {"group.instance.id": each}) for each in instances]

    def tend() -> None:
        for member in members:
            member.poll(0)
        tend_others()

    for member in members:
        member.subscribe([topic], on_assign=_take_paused)
    while members:
        member = members.pop()
        try:
            leave(member, deadline, tend)
        finally:
            close(member, deadline)


def _take_paused(member: Consumer, told: list[TopicPartition]) -> None:
    # Taken, or librdkafka could not let go of them again, and would never close.
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
    """Commit for a name that others use at the moment: one of its members may, so become one, for
    as long as it takes, without reading anything. `tend_others` lets members of this process take
    part in that. QuackTimeout."""
    commits = Commits(topic, lambda partition, offset: None)
    consumer = Consumer(settings | {"on_commit": commits.answered})
    joined: list[bool] = []

    def assigned(member: Consumer, told: list[TopicPartition]) -> None:
        _take_paused(member, told)
        joined.append(True)

    def look() -> None:
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
            look()
        commits.send_and_wait(consumer, offsets, note, deadline, poll=look)
        leave(consumer, deadline, tend_others)
    finally:
        close(consumer, deadline)
