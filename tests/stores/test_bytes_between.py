"""About how many bytes lie between two offsets: over every store, and whatever was trimmed."""

from __future__ import annotations

import pytest

from quackmq.errors import UnknownTopic
from quackmq.stores.contract import Store
from tests.kit.support import batch_of
from tests.stores.calls import append_values, new_partition, no_such_topic

VALUE = b"x" * 100
BATCH_BYTES = batch_of(VALUE).size


async def test_of_records_of_one_size_each_has_its_share(store: Store) -> None:
    key = await new_partition(store)
    for _ in range(20):
        await append_values(store, key, VALUE)
    offsets = await store.offsets(key)
    whole = await store.bytes_between(key, 0, 20)
    assert whole <= offsets.size
    parts = [await store.bytes_between(key, first, first + 5) for first in range(0, 20, 5)]
    assert abs(sum(parts) - whole) <= len(parts) * BATCH_BYTES
    assert parts[-1] > 0


async def test_nothing_has_no_bytes_and_more_than_there_is_has_as_many(store: Store) -> None:
    key = await new_partition(store)
    assert await store.bytes_between(key, 0, 0) == 0
    assert await store.bytes_between(key, 0, 10) == 0
    await append_values(store, key, VALUE)
    assert await store.bytes_between(key, 1, 9) == 0
    assert await store.bytes_between(key, 0, 9) == await store.bytes_between(key, 0, 1) > 0


async def test_what_was_trimmed_does_not_count_for_what_was_not(store: Store) -> None:
    key = await new_partition(store)
    for _ in range(20):
        await append_values(store, key, VALUE)
    before = await store.bytes_between(key, 15, 20)
    await store.trim(key, 14)
    assert abs(await store.bytes_between(key, 15, 20) - before) <= 4 * BATCH_BYTES


async def test_of_a_topic_that_is_not_there_nothing_is_told(store: Store) -> None:
    with pytest.raises(UnknownTopic):
        await store.bytes_between(no_such_topic(), 0, 1)
