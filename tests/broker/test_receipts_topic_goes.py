"""The topic of receipts may go while receipts are written and while it is itself read: whoever
holds a subscription to it does not wait for its end, which waits for them."""

from __future__ import annotations

import asyncio
import json
import uuid

from quackmq.broker import Broker, Commit
from quackmq.errors import UnknownTopic
from quackmq.model.offset_notes import RECEIPTS_TOPIC
from quackmq.model.topic import Offsets, OffsetTime, PartitionKey
from quackmq.stores.memory import MemoryStore
from tests.broker.flock import NOBODY
from tests.broker.support import CALLER, NAME, TOPIC, get, key_of, open_broker, publish, values_in
from tests.broker.transacting import Transactor
from tests.kit.waiting import until

#: For what would wait for ever.
DEADLINE_S = 60


class GatedStore(MemoryStore):
    """Whoever asks for what receipts say of a partition waits at a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = 0

    async def offsets(self, key: PartitionKey) -> Offsets:
        await self._pass()
        return await super().offsets(key)

    async def append_times(self, key: PartitionKey, first: int, next: int) -> list[OffsetTime]:
        await self._pass()
        return list(await super().append_times(key, first, next))

    async def _pass(self) -> None:
        self.waiting += 1
        await self.gate.wait()
        self.waiting -= 1


async def both_followed(broker: Broker) -> None:
    """One name reads a topic, with receipts, and the receipts."""
    await broker.create_topic(CALLER, TOPIC)
    await broker.subscribe(CALLER, NAME, TOPIC, "beginning", receipts=True)
    await broker.subscribe(CALLER, NAME, RECEIPTS_TOPIC, "beginning")
    await publish(broker, b"a", b"b")


async def kinds(broker: Broker) -> list[str]:
    return [json.loads(value)["kind"] for value in await values_in(broker, RECEIPTS_TOPIC)]


async def test_a_group_that_commits_to_both_topics_and_a_deletion_do_not_wait_for_each_other() -> (
    None
):
    store = GatedStore()
    async with asyncio.timeout(DEADLINE_S), open_broker(store) as broker:
        await both_followed(broker)
        keys = [key_of(broker.topic(name)) for name in (RECEIPTS_TOPIC, TOPIC)]
        store.gate.clear()
        commits = [Commit(key, 1) for key in keys]
        committing = asyncio.ensure_future(broker.groups.commit(CALLER, NAME, NOBODY, commits))
        await until(lambda: store.waiting == 1)
        deleting = asyncio.ensure_future(broker.delete_topic(CALLER, RECEIPTS_TOPIC))
        await until(lambda: RECEIPTS_TOPIC not in broker.topics())
        store.gate.set()
        gone, done = await committing
        await deleting
        assert isinstance(gone, UnknownTopic)
        assert done is None
        assert await kinds(broker) == ["taken"]
        (found,) = await broker.subscriptions(CALLER, name=NAME)
        assert (found.topic_name, found.cursors) == (TOPIC, (1,))


class SlowEnds(MemoryStore):
    """A topic that is deleted is gone from the store for a while before its caller knows."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def delete_topic(self, topic_id: uuid.UUID) -> None:
        await super().delete_topic(topic_id)
        self.begun.set()
        await self.go_on.wait()


async def test_a_group_commits_while_the_topic_of_receipts_is_about_to_go() -> None:
    """It is not told that its own topic is unknown."""
    store = SlowEnds()
    async with asyncio.timeout(DEADLINE_S), open_broker(store) as broker:
        await both_followed(broker)
        deleting = asyncio.ensure_future(broker.delete_topic(CALLER, RECEIPTS_TOPIC))
        await store.begun.wait()
        commits = [Commit(key_of(broker.topic(TOPIC)), 1)]
        committing = asyncio.ensure_future(broker.groups.commit(CALLER, NAME, NOBODY, commits))
        for _ in range(100):  # until it waits for the end: nothing else can happen
            await asyncio.sleep(0)
        store.go_on.set()
        assert await committing == [None]
        await deleting
        assert await kinds(broker) == ["taken"]


async def test_nor_with_a_reader_by_last_id_between_them() -> None:
    """The reader holds the one subscription and waits for the topic of receipts; its deletion waits
    for the other subscription, which the transaction's end must not hold while it waits for the
    reader."""
    store = GatedStore()
    async with asyncio.timeout(DEADLINE_S), open_broker(store) as broker:
        await both_followed(broker)
        transactor = Transactor(broker)
        await transactor.init()
        keys = [key_of(broker.topic(name)) for name in (RECEIPTS_TOPIC, TOPIC)]
        await transactor.send_offsets(dict.fromkeys(keys, 2), NAME)
        first = await get(broker)
        store.gate.clear()
        reading = asyncio.ensure_future(get(broker, first))
        await until(lambda: store.waiting == 1)
        committing = asyncio.ensure_future(transactor.commit())
        for _ in range(100):  # until it waits for the reader: nothing else can happen
            await asyncio.sleep(0)
        deleting = asyncio.ensure_future(broker.delete_topic(CALLER, RECEIPTS_TOPIC))
        await until(lambda: RECEIPTS_TOPIC not in broker.topics())
        store.gate.set()
        assert (await reading).record.value == b"b"
        await asyncio.gather(committing, deleting)
        assert await kinds(broker) == ["taken", "taken"]
        (found,) = await broker.subscriptions(CALLER, name=NAME)
        assert (found.topic_name, found.cursors) == (TOPIC, (2,))
