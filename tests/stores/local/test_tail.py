"""The tail's bound, seen from outside: memory that was handed over is let go of again."""

from __future__ import annotations

import asyncio
import ctypes
import weakref
from pathlib import Path

from quackmq import limits
from quackmq.model.topic import Append, PartitionKey
from quackmq.records.batch import Batch
from quackmq.stores import limits as stores_limits
from quackmq.stores.local import LocalOptions, LocalStore
from tests.kit.support import batch_of
from tests.stores.calls import DEADLINE_S, append_values, new_partition

TAIL_BYTES = 2 * limits.MIB
LARGE = batch_of(b"x" * limits.MIB)


class HandedOver:
    """Large batches, each in memory of its own, as a listener receives them; and how many are
    held."""

    def __init__(self) -> None:
        self.held = 0

    def batch(self) -> Batch:
        memory = (ctypes.c_char * LARGE.size).from_buffer(bytearray(LARGE.view))
        self.held += 1
        weakref.finalize(memory, self._let_go)
        return Batch.parse(memoryview(memory).cast("B"))

    def _let_go(self) -> None:
        self.held -= 1


async def append_large(store: LocalStore, key: PartitionKey, handed_over: HandedOver) -> None:
    await store.append([Append(key, handed_over.batch(), True)])


async def test_large_batches_are_let_go_of_when_others_have_come(tmp_path: Path) -> None:
    store = await LocalStore.open(tmp_path / "data", LocalOptions(tail_bytes=TAIL_BYTES))
    key = await new_partition(store)
    handed_over = HandedOver()
    for _ in range(8):
        await append_large(store, key, handed_over)
    assert handed_over.held <= TAIL_BYTES // limits.MIB
    await store.close()


async def test_a_small_batch_that_only_the_journal_holds_does_not_keep_all_that_came_after_it(
    tmp_path: Path,
) -> None:
    store = await LocalStore.open(tmp_path / "data", LocalOptions(tail_bytes=TAIL_BYTES))
    quiet = await new_partition(store, "quiet")
    busy = await new_partition(store, "busy")
    await append_values(store, quiet, b"said once")
    handed_over = HandedOver()
    most = (TAIL_BYTES + stores_limits.WRITE_BACK_BYTES) // limits.MIB
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(3 * most):
            await append_large(store, busy, handed_over)
            while handed_over.held > most:
                await asyncio.sleep(0.001)
    await store.close()
