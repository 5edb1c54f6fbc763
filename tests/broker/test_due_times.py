"""A cleaning costs as much as there is due, however many topics there are."""

from __future__ import annotations

import pytest

from quackmq.broker import Broker
from quackmq.broker.retention.facts import RetentionFacts
from quackmq.broker.retention.partition import Partition
from quackmq.errors import StorageError
from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey
from tests.broker.support import CALLER, open_broker, publish, values_in
from tests.kit.support import Clock

TOPICS = 20
KEEP_MS = 10_000
KEPT = Policy(keep_for_ms=KEEP_MS, keep_bytes=10_000)


async def topics_at_rest(broker: Broker) -> None:
    for number in range(TOPICS):
        await broker.create_topic(CALLER, f"topic-{number}", policy=KEPT)
        await publish(broker, b"x", topic=f"topic-{number}")
    for _ in range(3):
        await broker.clean()


def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    looks: list[str] = []
    real = RetentionFacts.update

    async def noted(survey: RetentionFacts, partition: Partition) -> bool:
        looks.append(partition.topic.name)
        return await real(survey, partition)

    monkeypatch.setattr(RetentionFacts, "update", noted)
    return looks


async def test_topics_in_which_nothing_is_due_are_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await topics_at_rest(broker)
        looks = looked_at(monkeypatch)
        await broker.clean()
        assert looks == []
        await broker.trim(CALLER, PartitionKey(broker.topic("topic-3").id, 0), 1)
        await publish(broker, bytes(20_000), topic="topic-7")
        await broker.clean()
        assert "topic-7" in looks and set(looks) <= {"topic-3", "topic-7"}


async def test_what_is_old_goes_when_its_time_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await topics_at_rest(broker)
        looks = looked_at(monkeypatch)
        clock.advance(KEEP_MS // 2)
        await publish(broker, b"y", topic="topic-5")
        await broker.clean()
        clock.advance(KEEP_MS // 2)
        await broker.clean()
        assert {f"topic-{number}" for number in range(TOPICS)} <= set(looks)
        assert await values_in(broker, "topic-4") == []
        assert await values_in(broker, "topic-5") == [b"y"]
        clock.advance(KEEP_MS)
        await broker.clean()
        assert await values_in(broker, "topic-5") == []


async def test_a_topic_that_is_deleted_or_kept_for_ever_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await topics_at_rest(broker)
        await broker.delete_topic(CALLER, "topic-0")
        await broker.alter_topic(CALLER, "topic-1", policy=Policy())
        looks = looked_at(monkeypatch)
        clock.advance(KEEP_MS)
        await broker.clean()
        assert set(looks) == {f"topic-{number}" for number in range(2, TOPICS)}


async def test_a_partition_that_could_not_be_made_ready_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, "ducks", policy=KEPT)
        real = RetentionFacts.load
        with monkeypatch.context() as failing:

            async def fail(survey: RetentionFacts, partition: Partition) -> None:
                raise StorageError("not now")

            failing.setattr(RetentionFacts, "load", fail)
            await broker.clean()
        assert broker.retention_failures()
        assert RetentionFacts.load is real
        await broker.clean()
        assert not broker.retention_failures()
