"""What cannot be staged, how much can, and what is hidden by it."""

from __future__ import annotations

import asyncio

import pytest

from quackmq import limits
from quackmq.broker import StagedBatch
from quackmq.broker import limits as broker_limits
from quackmq.broker.topics import HIDDEN_PREFIX
from quackmq.errors import (
    BrokerClosing,
    CorruptBatch,
    IllegalTopicName,
    InvalidRequest,
    LimitReached,
    NoSubscriber,
    RecordTooLarge,
    StageConflict,
    StoreReadOnly,
    UnknownPartition,
    UnknownTopic,
    UnsupportedBatch,
)
from quackmq.model.policy import Policy
from quackmq.stores.memory import MemoryStore
from tests.broker.flock import Pond
from tests.broker.stages import KEY, OTHER_TOPIC, stage, staged, topics
from tests.broker.support import (
    CALLER,
    NAME,
    TOPIC,
    FailingStore,
    get_all,
    key_of,
    open_broker,
    values_of,
)
from tests.kit.limits import home_of
from tests.kit.support import Clock, batch_of, let_others_run

# --- what is refused -------------------------------------------------------------------------


async def test_what_could_not_be_published_cannot_be_staged() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=Policy(batch_bytes=100))
        key, good = key_of(topic), batch_of(b"x")
        wrong = [
            (StagedBatch(key, batch_of(b"x" * 100)), RecordTooLarge),
            (StagedBatch(key, good._replace(record_count=2)), CorruptBatch),
            (StagedBatch(key, batch_of(b"x", transactional=True)), UnsupportedBatch),
            (StagedBatch(key._replace(partition=1), good), UnknownPartition),
        ]
        for each, error in wrong:
            with pytest.raises(error):
                await broker.staging.stage(CALLER, KEY, "a", 0, [StagedBatch(key, good), each])
        assert broker.staging.all(CALLER) == []


async def test_a_topic_that_needs_subscribers_is_asked_at_the_commit() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(needs_subscriber=True))
        await stage(broker, b"a")
        with pytest.raises(NoSubscriber):
            await broker.staging.commit(CALLER, KEY)
        await broker.subscribe(CALLER, NAME, TOPIC)
        await broker.staging.commit(CALLER, KEY)
        assert values_of(await get_all(broker)) == [b"a"]


async def test_a_hidden_topic_is_nobodys_to_use() -> None:
    async with open_broker() as broker:
        await topics(broker)
        await stage(broker, b"a")
        for name in (HIDDEN_PREFIX + "x", HIDDEN_PREFIX):
            with pytest.raises(IllegalTopicName):
                await broker.create_topic(CALLER, name)
            with pytest.raises(IllegalTopicName):
                await broker.ensure_topic(CALLER, name)
            with pytest.raises(UnknownTopic):
                await broker.delete_topic(CALLER, name)
        assert set(broker.topics()) == {TOPIC, OTHER_TOPIC}


@pytest.mark.parametrize("name", ["", "x" * 256, "\udcff"])
async def test_names_have_bounds(name: str) -> None:
    async with open_broker() as broker:
        await topics(broker)
        for call in (
            stage(broker, b"a", key=name),
            stage(broker, b"a", part=name),
            broker.staging.commit(CALLER, name, []),
            broker.staging.abort(CALLER, name),
        ):
            with pytest.raises(InvalidRequest):
                await call
        with pytest.raises(InvalidRequest):
            await broker.staging.commit(CALLER, KEY, [], contents_digest="x" * 2000)


@pytest.mark.parametrize(
    ("bound", "value"),
    [
        ("STAGES", 1),
        ("STAGED_BATCHES", 1),
        ("STAGED_BYTES", 100),
        ("STAGE_PARTS", 1),
        ("STAGE_CALL_BYTES", 60),
        ("COMMITTED_STAGES", 1),
    ],
)
async def test_stages_are_bounded(bound: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_broker() as broker:
        await topics(broker)
        await stage(broker, b"a", key="one")
        if bound == "COMMITTED_STAGES":
            await broker.staging.commit(CALLER, "one")
        monkeypatch.setattr(home_of(bound), bound, value)
        key = "one" if bound == "STAGE_PARTS" else "two"
        with pytest.raises(LimitReached):
            await stage(broker, b"b", key=key, part="b")
        monkeypatch.undo()
        await stage(broker, b"b", key=key, part="b")


@pytest.mark.parametrize("count", [0, limits.STAGE_CALL_BATCHES + 1])
async def test_a_call_stages_some_batches_and_not_too_many(count: int) -> None:
    async with open_broker() as broker:
        await topics(broker)
        batches = [staged(broker, b"x")] * count
        with pytest.raises(InvalidRequest):
            await broker.staging.stage(CALLER, KEY, "a", 0, batches)
        with pytest.raises(InvalidRequest):
            await stage(broker, b"x", number=-1)


async def test_room_is_given_back_when_a_stage_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_limits, "STAGED_BATCHES", 2)
    async with open_broker() as broker:
        await topics(broker)
        for turn in range(5):
            await stage(broker, b"a", key=f"{turn}")
            await stage(broker, b"b", key=f"{turn}", part="b")
            if turn % 2:
                await broker.staging.abort(CALLER, f"{turn}")
            else:
                await broker.staging.commit(CALLER, f"{turn}")


async def test_a_broker_that_closes_stages_nothing(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        await stage(broker, b"a")
    for call in (
        broker.staging.stage(CALLER, KEY, "a", 1, []),
        broker.staging.commit(CALLER, KEY),
        broker.staging.abort(CALLER, KEY),
    ):
        with pytest.raises(BrokerClosing):
            await call


async def test_a_stage_that_was_never_answered_is_removed_at_the_start() -> None:
    store = FailingStore(Clock())
    async with open_broker(store) as broker:
        await topics(broker)
        store.append_error = StoreReadOnly("the disk is full")
        with pytest.raises(StoreReadOnly):
            await stage(broker, b"a")
        assert len(await store.topics()) == 3
    async with open_broker(store) as broker:
        assert len(await store.topics()) == 2
        assert broker.staging.all(CALLER) == []


class BusyStore(MemoryStore):
    """Has no room for the time being."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.has_room = asyncio.Event()
        self.has_room.set()

    async def room(self) -> None:
        await self.has_room.wait()


async def test_room_is_given_back_once_if_a_stage_ends_under_its_writer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_limits, "STAGED_BATCHES", 2)
    store = BusyStore(Clock())
    async with open_broker(store) as broker:
        await topics(broker)
        await stage(broker, b"a")
        store.has_room.clear()
        late = asyncio.ensure_future(stage(broker, b"late", number=1))
        await let_others_run()
        await broker.staging.abort(CALLER, KEY)
        store.has_room.set()
        with pytest.raises(StageConflict):
            await late
        await stage(broker, b"a")
        await stage(broker, b"b", number=1)
        with pytest.raises(LimitReached):
            await stage(broker, b"c", number=2)
