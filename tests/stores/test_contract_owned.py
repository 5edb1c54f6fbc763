"""The store contract, over every store: batches whose buffers are handed over."""

from __future__ import annotations

from quackmq import limits
from quackmq.model.topic import Append
from quackmq.records.batch import Batch
from quackmq.stores.contract import Store
from tests.kit.support import batch_of
from tests.stores.calls import append_values, new_partition, new_partitions, read_all

LARGE = limits.KEPT_BATCH_BYTES


def handed_over(*values: bytes) -> Batch:
    """A batch in a buffer of its own, as a listener receives one."""
    return Batch.parse(bytearray(batch_of(*values).view))


async def test_large_and_small_batches_lie_in_the_order_of_their_appends(store: Store) -> None:
    key = await new_partition(store)
    values = [bytes([number]) * (LARGE if number % 3 else 50) for number in range(10)]
    waiting = [store.append([Append(key, handed_over(value), True)]) for value in values]
    answers = [await each for each in waiting]
    assert [answer.base_offset for (answer,) in answers] == list(range(10))
    assert await read_all(store, key) == list(enumerate(values))


async def test_the_same_goes_for_what_is_copied_in_between(store: Store) -> None:
    key = await new_partition(store)
    first = store.append([Append(key, handed_over(b"a" * LARGE), True)])
    second = store.append([Append(key, batch_of(b"b", b"c"))])
    third = store.append([Append(key, handed_over(b"d" * LARGE), True)])
    for each in (first, second, third):
        await each
    await append_values(store, key, b"e")
    assert [value[:1] for _, value in await read_all(store, key)] == [b"a", b"b", b"c", b"d", b"e"]


async def test_a_buffer_that_cannot_be_written_to_is_copied_all_the_same(store: Store) -> None:
    key = await new_partition(store)
    batch = batch_of(b"a" * LARGE)
    assert batch.view.readonly
    for _ in range(2):
        await store.append([Append(key, batch, True)])
    assert [offset for offset, _ in await read_all(store, key)] == [0, 1]


async def test_several_batches_of_one_buffer_go_to_several_partitions(store: Store) -> None:
    keys = await new_partitions(store, 3)
    values = [bytes([65 + number]) * LARGE for number in range(3)]
    buffer = memoryview(bytearray(b"".join(batch_of(value).view for value in values)))
    appends = []
    for key in keys:
        batch = Batch.parse(buffer)
        appends.append(Append(key, batch, True))
        buffer = buffer[batch.size :]
    await store.append(appends)
    for key, value in zip(keys, values, strict=True):
        assert await read_all(store, key) == [(0, value)]
