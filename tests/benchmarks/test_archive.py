"""The benchmark of the archive measures what it says: both sides do the same work."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pyarrow.parquet as pq

from benchmarks.archive import LATER, VALUE_BYTES, bare_program, fill, json_batches, json_like
from quackmq.model.topic import PartitionKey
from quackmq.records.batch import Batch
from quackmq.records.codec import decode
from quackmq.stores.local import LocalOptions, LocalStore


def test_values_are_json_of_the_size_that_is_said() -> None:
    chance = random.Random(1)
    for number in range(100):
        assert len(json_like(number, chance)) == VALUE_BYTES


def test_the_bare_program_writes_every_record(tmp_path: Path) -> None:
    batches = json_batches(10_000)
    assert bare_program(batches, tmp_path / "bare.parquet") > 0
    table = pq.read_table(tmp_path / "bare.parquet")
    expected = [record.value for data in batches for record in decode(Batch.parse(data))]
    assert table.column("value").to_pylist() == expected


def test_every_topic_is_filled_with_the_same(tmp_path: Path) -> None:
    asyncio.run(fill(tmp_path / "data", {"a": LATER, "b": LATER}, json_batches(5_000)))

    async def ends() -> list[int]:
        store = await LocalStore.open(tmp_path / "data", LocalOptions())
        topics = (await store.topics()).values()
        found = [(await store.offsets(PartitionKey(topic.id, 0))).next for topic in topics]
        await store.close()
        return found

    assert asyncio.run(ends()) == [5_000, 5_000]
