"""The budget of batches in one turn of the event loop, which all Kafka connections share."""

from __future__ import annotations

import asyncio

from quackmq.protocols.kafka import limits
from quackmq.protocols.kafka.publish_turns import PublishTurns


class Publisher:
    """Has batches to publish, as many in each turn as the budget allows."""

    def __init__(self, name: str, batch_count: int, turns: PublishTurns, served: list[str]) -> None:
        self.name = name
        self.batch_count = batch_count
        self._turns = turns
        self._served = served
        self.done = asyncio.Event()

    def publish(self) -> None:
        self._served.append(self.name)
        count = min(self._turns.batches_left, self.batch_count)
        self.batch_count -= count
        if self.batch_count:
            self._turns.wait(self.publish)
        else:
            self.done.set()
        self._turns.spend(count)


async def test_publishers_are_served_in_the_order_in_which_they_began_to_wait() -> None:
    turns, served = PublishTurns(), list[str]()
    publishers = [
        Publisher(name, 2 * limits.KAFKA_BATCHES_AT_ONCE, turns, served) for name in "abc"
    ]
    for publisher in publishers:
        turns.wait(publisher.publish)
    async with asyncio.timeout(10):
        for publisher in publishers:
            await publisher.done.wait()
    assert served == ["a", "b", "c", "a", "b", "c"]


async def test_a_new_turn_has_the_whole_budget_again() -> None:
    turns = PublishTurns()
    turns.spend(limits.KAFKA_BATCHES_AT_ONCE)
    assert turns.batches_left == 0
    await asyncio.sleep(0)
    assert turns.batches_left == limits.KAFKA_BATCHES_AT_ONCE
