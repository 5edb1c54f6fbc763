"""A client with a durable subscription: it takes messages by the id of the last one (R2), commits,
moves back and forth, leaves and comes again, and notices if anything is skipped or sent twice.
"""

from __future__ import annotations

from typing import Final

from quackmq.broker import Broker, Message, Offset, Start
from quackmq.errors import InvalidMessageId, UnknownSubscription, UnknownTopic
from quackmq.model.topic import PartitionKey, Topic
from tests.simulation.life import CALLER, Life
from tests.simulation.model import Cursors, Model, Register, Violation

#: A subscription that begins where the store was at that moment, which nobody can know before.
SOMEWHERE: Final[Cursors] = (-1,)


class Subscriber:
    def __init__(self, name: str) -> None:
        self.name = name
        #: The last message of each subscription: its id, partition and offset.
        self._received: dict[Register[Cursors | None], tuple[str, int, int]] = {}

    async def step(self, life: Life) -> None:
        topic = life.some_topic()
        if topic is None:
            return
        key = (topic.id, self.name)
        register = life.model.subscriptions.setdefault(
            key, Register(f"subscription {self.name} of {topic.name}", None)
        )
        if register.maybe:  # unsure since a failure in this life
            return
        try:
            await self._act(life, topic, register)
        except (UnknownTopic, UnknownSubscription) as error:
            if topic.id not in life.model.doomed:
                raise Violation(f"{register.name} is gone: {error}") from error
        except InvalidMessageId as error:
            if not life.model.lossy:
                raise Violation(f"{register.name}: {error}") from error
            del self._received[register]  # a power cut took the message, or its whole partition

    async def _act(self, life: Life, topic: Topic, register: Register[Cursors | None]) -> None:
        if register.known is None:
            await self._subscribe(life, topic, register)
            return
        fate = life.source.random()
        if fate < 0.7:
            await self._get(life, topic, register, register.known)
        elif fate < 0.8:
            await self._commit(life, topic, register, register.known)
        elif fate < 0.9:
            await self._seek(life, topic, register)
        elif fate < 0.94:
            await self._unsubscribe(life, topic, register)
        elif await life.broker.subscribe(CALLER, self.name, topic.name):
            raise Violation(f"{register.name} was there and is new")

    async def _subscribe(
        self, life: Life, topic: Topic, register: Register[Cursors | None]
    ) -> None:
        start = self._some_start(life, topic)
        with life.model.changing(register, SOMEWHERE):
            is_new = await life.broker.subscribe(CALLER, self.name, topic.name, start)
        if not is_new:
            raise Violation(f"{register.name} is new and was there")
        self._received.pop(register, None)
        register.settle(await self._look(life, topic))

    async def _get(
        self,
        life: Life,
        topic: Topic,
        register: Register[Cursors | None],
        cursors: Cursors,
    ) -> None:
        wait_ms = life.source.choice((0, 0, 50))
        last = self._received.get(register)
        if last is None or life.source.random() < 0.2:  # the answer was lost on its way
            message = await life.broker.get(CALLER, self.name, topic.name, None, wait_ms)
        else:
            message, cursors = await self._get_next(life, topic, register, cursors, last, wait_ms)
        if message is not None:
            self._check_message(life, topic, cursors, message)
            record = message.record
            self._received[register] = (message.id, message.partition, record.offset)

    async def _get_next(
        self,
        life: Life,
        topic: Topic,
        register: Register[Cursors | None],
        cursors: Cursors,
        last: tuple[str, int, int],
        wait_ms: int,
    ) -> tuple[Message | None, Cursors]:
        """Name the last message: it is done with, and the next one is sent."""
        token, partition, offset = last
        after = _moved(cursors, partition, offset + 1)
        if after == cursors:
            answer = await life.broker.get(CALLER, self.name, topic.name, token, wait_ms)
            return answer, cursors
        with life.model.changing(register, after):
            answer = await life.broker.get(CALLER, self.name, topic.name, token, wait_ms)
        del self._received[register]
        known = life.model.partition(PartitionKey(topic.id, partition))
        # A power cut may have taken the partition; then the id acknowledges nothing.
        is_lost = partition >= topic.partitions
        if is_lost or known.trims_itself or known.gaps_allowed or known.first_at_most > offset:
            # A restarted broker cannot tell what it sent if that is gone since: then the cursor
            # stays before the gap, and nothing that is left is skipped or doubled by that.
            found = await self._look(life, topic)
            if not _agree(found, after) and not _agree(found, cursors):
                raise Violation(f"{register.name} went from {cursors} to {found}, not {after}")
            register.settle(found)
            after = found
        return answer, after

    def _check_message(self, life: Life, topic: Topic, cursors: Cursors, message: Message) -> None:
        key = PartitionKey(topic.id, message.partition)
        partition = life.model.partition(key)
        offset, value = message.record.offset, message.record.value
        cursor = _at(cursors, message.partition)
        if offset < cursor:
            raise Violation(f"{self.name} at {cursor} of {key} got {offset} again")
        if offset > cursor and not message.lost and not partition.gaps_allowed:
            raise Violation(f"{self.name} at {cursor} of {key} got {offset}, and nothing was lost")
        attempt = partition.at.get(offset)
        if attempt is not None and attempt.offset is not None:
            if attempt.values[offset - attempt.offset] != value:
                raise Violation(f"{self.name} got {value!r} at {offset} of {key}, not {attempt}")
        life.counts["messages delivered"] += 1

    async def _commit(
        self,
        life: Life,
        topic: Topic,
        register: Register[Cursors | None],
        cursors: Cursors,
    ) -> None:
        last = self._received.get(register)
        if last is None:
            return
        token, partition, offset = last
        with life.model.changing(register, _moved(cursors, partition, offset + 1)):
            await life.broker.commit(CALLER, self.name, topic.name, token)
        del self._received[register]

    async def _seek(self, life: Life, topic: Topic, register: Register[Cursors | None]) -> None:
        with life.model.changing(register, SOMEWHERE):
            await life.broker.seek(CALLER, self.name, topic.name, self._some_start(life, topic))
        self._received.pop(register, None)
        register.settle(await self._look(life, topic))

    async def _unsubscribe(
        self, life: Life, topic: Topic, register: Register[Cursors | None]
    ) -> None:
        with life.model.changing(register, None):
            await life.broker.unsubscribe(CALLER, self.name, topic.name)
        self._received.pop(register, None)

    async def _look(self, life: Life, topic: Topic) -> Cursors:
        found = await life.broker.subscriptions(CALLER, name=self.name, topic_name=topic.name)
        if not found:
            raise UnknownSubscription(f"{self.name} is not listed")
        return found[0].cursors

    def _some_start(self, life: Life, topic: Topic) -> Start:
        ends = [
            life.model.partition(PartitionKey(topic.id, number)).next
            for number in range(topic.partitions)
        ]
        starts: tuple[Start, ...] = ("beginning", "end", Offset(life.source.randint(0, max(ends))))
        return life.source.choice(starts)


async def check_subscriptions(broker: Broker, model: Model, *, lossy: bool) -> None:
    """After a recovery: those that were acknowledged are there, exactly where they were left."""
    found = {
        (each.topic_id, each.name): each.cursors for each in await broker.subscriptions(CALLER)
    }
    for key, register in model.subscriptions.items():
        there = found.pop(key, None)
        if key[0] in model.doomed:
            if there is not None:
                raise Violation(f"{register.name} outlived its topic")
            continue
        allowed = [register.known, *register.maybe, *(register.past if lossy else ())]
        if not any(_agree(there, each) for each in allowed):
            raise Violation(f"{register.name} is at {there}, but should be at one of {allowed}")
        if not _agree(there, register.known):
            register.settle(there)
        register.maybe.clear()
    if found:
        raise Violation(f"nobody made the subscriptions {found}")


def _agree(there: Cursors | None, expected: Cursors | None) -> bool:
    """A topic that has grown adds partitions that are wanted from their beginning."""
    if there is None or expected is None:
        return there is expected
    if expected == SOMEWHERE:
        return True
    most = max(len(there), len(expected))
    return all(_at(there, number) == _at(expected, number) for number in range(most))


def _at(cursors: Cursors, partition: int) -> int:
    return cursors[partition] if partition < len(cursors) else 0


def _moved(cursors: Cursors, partition: int, offset: int) -> Cursors:
    """Never backwards."""
    most = max(len(cursors), partition + 1)
    return tuple(
        max(_at(cursors, number), offset) if number == partition else _at(cursors, number)
        for number in range(most)
    )
