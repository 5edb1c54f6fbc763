"""Append times of records that only the segments hold."""

from __future__ import annotations

from pathlib import Path

from quackmq.disk.real import RealDisk
from quackmq.stores.local import LocalOptions, LocalStore
from tests.kit.support import batch_of
from tests.stores.calls import append, new_partition


async def test_an_empty_range_inside_a_region_has_no_append_time(tmp_path: Path) -> None:
    options = LocalOptions(tail_bytes=0, journal_inline_bytes=0, packed_bytes=0)
    store = await LocalStore.open_on(RealDisk(tmp_path), options=options)
    key = await new_partition(store)
    await append(store, key, batch_of(b"a", b"b", b"c"))
    assert len(await store.append_times(key, 1, 2)) == 1
    assert list(await store.append_times(key, 1, 1)) == []
    await store.close()
