"""How stages end badly: damaged at rest, committed under a writer, given up by a failing store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from quackmq.broker.staging.stage_log import topic_name
from quackmq.errors import DamagedData, StageConflict, StorageError, StoreReadOnly, UnknownStage
from quackmq.model.log_transactions import Marker, read_marker
from quackmq.model.topic import Append, PartitionKey, Read, Slice
from quackmq.records.batch import batches
from quackmq.stores.contract import Store
from tests.broker.flock import Pond
from tests.broker.stages import KEY, stage, topics
from tests.broker.support import (
    CALLER,
    TOPIC,
    FailingStore,
    SlowStore,
    key_of,
    open_broker,
    poison_batch,
    publish,
)
from tests.broker.transacting import committed_values
from tests.kit.support import Clock, batch_of
from tests.kit.waiting import until

OTHER_KEY = "query/18"


async def spoil(store: Store, how: str) -> None:
    """Put what is no header where a stage's next header would be."""
    source = PartitionKey((await store.topics())[topic_name(KEY)].id, 0)
    batch = poison_batch(b"x") if how == "poison" else batch_of(b'{"key": 17}')
    await store.append([Append(source, batch)])


@pytest.mark.parametrize("how", ["poison", "nonsense"])
async def test_a_damaged_stage_is_named_and_the_broker_opens_without_it(
    pond: Pond, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with pond.open() as broker:
        await topics(broker)
        lost = await stage(broker, b"lost")
        kept = await stage(broker, b"kept", key=OTHER_KEY)
    async with pond.open_store() as store:
        await spoil(store, how)
    async with pond.open() as broker:
        assert topic_name(KEY) in caplog.text
        await publish(broker, b"plain")
        with pytest.raises(UnknownStage):
            await broker.staging.commit(CALLER, KEY, [lost])
        await broker.staging.commit(CALLER, OTHER_KEY, [kept])
        again = await stage(broker, b"staged anew")
        await broker.staging.commit(CALLER, KEY, [again])
        assert await committed_values(broker) == [b"plain", b"kept", b"staged anew"]


class UnreadableStore(FailingStore):
    """Has a stage whose bytes have rotted."""

    is_rotten = False

    async def read(
        self, reads: Sequence[Read], *, max_bytes: int, min_bytes: int = 1, wait_ms: int = 0
    ) -> list[Slice]:
        slices = await super().read(
            reads, max_bytes=max_bytes, min_bytes=min_bytes, wait_ms=wait_ms
        )
        if not self.is_rotten:
            return slices
        hidden = (await self.topics())[topic_name(KEY)].id
        error = DamagedData("the checksum is wrong")
        return [
            each._replace(chunks=(), error=error) if each.key.topic_id == hidden else each
            for each in slices
        ]


async def test_a_stage_whose_bytes_have_rotted_can_be_aborted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = UnreadableStore(Clock())
    async with open_broker(store) as broker:
        await topics(broker)
        await stage(broker, b"a")
    store.is_rotten = True
    async with open_broker(store) as broker:
        assert "the checksum is wrong" in caplog.text
        assert await broker.staging.abort(CALLER, KEY)
        store.is_rotten = False
        assert topic_name(KEY) not in await store.topics()
        assert not await broker.staging.abort(CALLER, KEY)


async def test_no_summary_is_returned_for_what_a_commit_has_not_taken() -> None:
    store = SlowStore(Clock())
    store.released.set()
    async with open_broker(store) as broker:
        await topics(broker)
        await stage(broker, b"a")
        store.released.clear()
        before = store.appends
        late = asyncio.ensure_future(stage(broker, b"late", number=1))
        await until(lambda: store.appends == before + 1)
        committing = asyncio.ensure_future(broker.staging.commit(CALLER, KEY))
        await until(lambda: store.appends == before + 2)
        store.released.set()
        assert (await committing).records == 1
        with pytest.raises(StageConflict):
            await late
        assert await committed_values(broker) == [b"a"]


async def test_a_call_under_way_counts_if_the_commit_fails() -> None:
    store = SlowStore(Clock())
    store.released.set()
    async with open_broker(store) as broker:
        await topics(broker)
        first = await stage(broker, b"a")
        store.released.clear()
        before = store.appends
        late = asyncio.ensure_future(stage(broker, b"late", number=1))
        await until(lambda: store.appends == before + 1)
        with pytest.raises(StageConflict):
            await broker.staging.commit(CALLER, KEY, [first._replace(calls=2)])
        store.released.set()
        await broker.staging.commit(CALLER, KEY, [await late])
        assert await committed_values(broker) == [b"a", b"late"]


class SilentStore(FailingStore):
    """Cannot even tell what is open once it has failed."""

    async def open_transactions(
        self, producer_id: int | None = None
    ) -> Mapping[PartitionKey, Mapping[int, int]]:
        if self.append_error is not None:
            raise StorageError("nothing can be told")
        return await super().open_transactions(producer_id)


async def test_why_a_commit_failed_is_told_also_if_giving_it_up_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = SilentStore(Clock())
    async with open_broker(store) as broker:
        await topics(broker)
        summary = await stage(broker, b"a")
        store.append_error = StoreReadOnly("the disk is full")
        with pytest.raises(StoreReadOnly, match="the disk is full"):
            await broker.staging.commit(CALLER, KEY, [summary])
        assert "nothing can be told" in caplog.text
        store.append_error = None
        await broker.staging.commit(CALLER, KEY, [summary])
        assert await committed_values(broker) == [b"a"]


@pytest.mark.asyncio
async def test_a_commit_ends_with_markers_of_the_producers_next_epoch(pond: Pond) -> None:
    async with pond.open() as broker:
        await topics(broker)
        await broker.staging.commit(CALLER, KEY, [await stage(broker, b"a")])
        reads = [Read(key_of(broker.topic(TOPIC)), 0, 10_000)]
        (part,) = await broker.read(CALLER, reads, max_bytes=10_000)
        copied, marker = (batch for chunk in part.chunks for batch in batches(chunk))
        assert read_marker(marker) is Marker.COMMIT
        assert marker.producer_id == copied.producer_id
        assert marker.producer_epoch == copied.producer_epoch + 1
