"""One commit at a time: librdkafka may send an old one again, behind a newer (R2)."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from confluent_kafka import KafkaError, TopicPartition

from quackmq import QuackTimeout, errors
from quackmq.client.consuming.commits import Commits
from quackmq.client.deadline import Deadline


class SlowConsumer:
    """Answers when told to, as librdkafka does whose broker is away."""

    def __init__(self) -> None:
        self.acknowledged: dict[int, int] = {}
        self.commits = Commits("news", self.acknowledged.__setitem__)
        self.sent: list[list[TopicPartition]] = []

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> None:
        assert asynchronous
        self.sent.append(offsets)

    def answer(self) -> None:
        self.commits.on_commit(None, self.sent.pop(0))

    def send(self, offsets: dict[int, int]) -> None:
        as_consumer: Any = self
        self.commits.send(as_consumer, offsets, "")

    def send_and_wait(self, offsets: dict[int, int], seconds: float, poll: Any) -> None:
        as_consumer: Any = self
        self.commits.send_and_wait(as_consumer, offsets, "", Deadline(seconds), poll=poll)


def test_a_commit_waits_for_the_one_before_it() -> None:
    consumer = SlowConsumer()
    consumer.send({0: 72})
    under_way = []

    def poll() -> None:
        under_way.append(len(consumer.sent))
        consumer.answer()

    consumer.send_and_wait({0: 77}, 60, poll)
    assert under_way == [1, 1]
    assert consumer.acknowledged == {0: 77}
    assert consumer.commits.is_idle


def test_a_commit_that_is_not_answered_lets_no_other_one_go() -> None:
    consumer = SlowConsumer()
    consumer.send({0: 72})
    assert not consumer.commits.is_idle
    with pytest.raises(QuackTimeout, match="offsets in topic news to be committed"):
        consumer.send_and_wait({0: 77}, 0, lambda: None)
    assert [each.offset for each in consumer.sent[0]] == [72]
    assert len(consumer.sent) == 1


class Answered(NamedTuple):
    """What librdkafka says of one partition of a commit."""

    partition: int
    offset: int
    error: KafkaError | None = None


def test_a_commit_that_fails_in_one_partition_has_failed() -> None:
    """librdkafka then says that all is well, and the error stands beside the partition."""
    consumer = SlowConsumer()
    refused = KafkaError(KafkaError.OFFSET_METADATA_TOO_LARGE)

    def poll() -> None:
        told: Any = [Answered(0, 77), Answered(1, 88, refused)]
        consumer.commits.on_commit(None, told)

    with pytest.raises(errors.MetadataTooLarge):
        consumer.send_and_wait({0: 77, 1: 88}, 60, poll)
    assert consumer.acknowledged == {}
