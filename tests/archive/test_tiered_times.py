"""Log and archive asked as one for times and epochs, also while something moves between them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from quackmq import limits
from quackmq.broker.log.decoded_batches import DecodedBatches
from quackmq.broker.log.epoch_lookup import EpochEnd, find_epoch_end
from quackmq.broker.log.time_lookup import find_first_since, find_latest
from quackmq.model.topic import OffsetTime, PartitionKey, TimeKind
from quackmq.records.batch import Batch
from quackmq.stores.local import LocalStore
from tests.archive.archiving import archive
from tests.archive.home import Home
from tests.kit.support import START_MS, batch_of
from tests.stores.calls import PLENTY_BYTES, append, append_values, read_one


@pytest_asyncio.fixture
async def home(tmp_path: Path) -> AsyncIterator[Home]:
    home = Home(tmp_path)
    await home.open()
    yield home
    await home.store.close()


async def test_times_reach_into_the_archive(home: Home) -> None:
    key = PartitionKey((await home.topic()).id, 0)
    step_ms = 10 * limits.REGION_MS
    for number in range(6):
        time_ms = START_MS + 100 * number
        await append(home.store, key, batch_of(b"a", b"b", timestamp_ms=time_ms))
        home.clock.advance(step_ms)
    await archive(home.store, key, 8)
    store = home.store
    for number in range(6):
        time_ms = START_MS + 100 * number
        expected = OffsetTime(2 * number, time_ms)
        assert await store.offset_for_time(key, time_ms) == expected
        assert await store.offset_for_time(key, time_ms - 99) == expected
        at_ms = START_MS + number * step_ms
        assert await store.offset_for_time(key, at_ms, "append") == OffsetTime(2 * number, at_ms)
    assert await store.offset_for_time(key, START_MS + 501) is None
    assert await store.offset_for_time(key, START_MS + 6 * step_ms, "append") is None
    await store.trim(key, 3)
    assert await store.offset_for_time(key, 0) == OffsetTime(3, START_MS + 100)


@pytest.mark.parametrize("archived_before", [None, 2])
@pytest.mark.parametrize("archived_meanwhile", [6, 10])
@pytest.mark.parametrize("kind", ["timestamp", "append"])
async def test_a_time_is_found_also_if_it_went_to_the_archive_meanwhile(
    home: Home, archived_before: int | None, archived_meanwhile: int, kind: TimeKind
) -> None:
    """The archive was looked through while the log had it; then the log has it no more. Retention
    would take everything before the answer for old."""
    key = PartitionKey((await home.topic()).id, 0)
    step_ms = 2 * limits.REGION_MS
    for number in range(10):
        time_ms = START_MS + number * step_ms
        await append(home.store, key, batch_of(b"x", timestamp_ms=time_ms))
        home.clock.advance(step_ms)
    if archived_before is not None:
        await archive(home.store, key, archived_before)
    real_search = home.store.inner.offset_for_time

    async def late_search(*asked: Any) -> OffsetTime | None:
        home.store.inner.offset_for_time = real_search  # type: ignore[method-assign]
        await archive(home.store, key, archived_meanwhile)
        return await real_search(*asked)

    home.store.inner.offset_for_time = late_search  # type: ignore[assignment,method-assign]
    wanted_ms = START_MS + 4 * step_ms
    found = await home.store.offset_for_time(key, wanted_ms, kind)
    assert found == OffsetTime(4, wanted_ms)


async def test_the_first_and_the_latest_record_of_a_time_are_found_in_the_archive(
    home: Home,
) -> None:
    key = PartitionKey((await home.topic()).id, 0)
    for number in (0, 1, 7, 3, 4, 5):
        await append(home.store, key, batch_of(b"a", b"b", timestamp_ms=START_MS + number))
    store, decoded = home.store, DecodedBatches()
    before = [await find_first_since(store, decoded, key, "ducks", START_MS + n) for n in range(9)]
    greatest = await find_latest(store, decoded, key, "ducks")
    assert greatest == OffsetTime(4, START_MS + 7)
    for offset in (4, 8, None):
        await archive(store, key, offset)
        for cache in (decoded, DecodedBatches()):
            after = [
                await find_first_since(store, cache, key, "ducks", START_MS + n) for n in range(9)
            ]
            assert after == before
            assert await find_latest(store, cache, key, "ducks") == greatest


async def test_a_batch_that_was_opened_short_is_opened_again_when_it_is_longer(
    home: Home,
) -> None:
    """The archive makes batches as large as what is asked for."""
    key = await home.filled()
    await archive(home.store, key)
    decoded = DecodedBatches()
    for max_bytes, count in ((1, 1), (PLENTY_BYTES, 10), (1, 10)):
        part = await read_one(home.store, key, 0, max_bytes=max_bytes)
        opened = await decoded.open(key, Batch.peek(part.chunks[0]), 0, "ducks", is_committed=True)
        assert len(opened.records) == count
    assert decoded.find(key, 9) is not None


async def test_an_epoch_never_ends_before_what_is_archived_of_it(home: Home) -> None:
    key = PartitionKey((await home.topic()).id, 0)
    for _ in range(3):
        for value in (b"a", b"b"):
            await append_values(home.store, key, value)
        home.disk.close()  # as a crash: the next one to open is another leader
        assert isinstance(home.store.inner, LocalStore)
        home.store.inner._medium.files.close()
        await home.open()
    epoch = (await home.store.offsets(key)).epoch
    ends = [await find_epoch_end(home.store, key, each) for each in range(epoch + 1)]
    assert [end and end.offset for end in ends][-4:] == [2, 4, 6, 6]
    await archive(home.store, key, 3)
    after = [await find_epoch_end(home.store, key, each) for each in range(epoch + 1)]
    assert [end and end.offset for end in after][-4:] == [3, 4, 6, 6]
    assert all(end is not None and 0 <= end.epoch <= each for each, end in enumerate(after))
    await archive(home.store, key)
    after = [await find_epoch_end(home.store, key, each) for each in range(epoch + 1)]
    assert after == [EpochEnd(each, 6) for each in range(epoch + 1)]
