"""The files that tell of aborted transactions: made, read, gone with their segments, damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from quackmq.errors import DamagedData, UnusableDirectory
from quackmq.model.log_transactions import ABORTED_BYTES, Marker, marker_batch
from quackmq.model.policy import Policy
from quackmq.model.topic import AbortedTransaction, PartitionKey, Read, Slice
from quackmq.records.batch import Batch
from quackmq.stores import limits as stores_limits
from quackmq.stores.contract import Store
from quackmq.stores.local import LocalStore
from quackmq.stores.local.inspect.findings import Finding, Kind
from quackmq.stores.local.inspect.verify import Verification
from quackmq.stores.local.recovery import META_PATH, Meta
from tests.kit.support import START_MS, batch_of, batches_of
from tests.stores.calls import PLENTY_BYTES, append, read_all
from tests.stores.local.directories import flip, leave_crashed, open_store
from tests.stores.local.test_inspection import inspection_of

DEALS = 20


async def deal(store: Store, key: PartitionKey, number: int) -> None:
    """A transaction of one record and its abort: offsets 2 * number and the next."""
    numbers = {"producer_id": 1, "producer_epoch": number, "base_sequence": 0}
    await append(store, key, batch_of(b"%d" % number, transactional=True, **numbers))
    await append(store, key, Batch.parse(marker_batch(1, number, Marker.ABORT, START_MS)))


async def deals(store: Store, count: int = DEALS) -> PartitionKey:
    key = PartitionKey((await store.create_topic("deals", 1, Policy())).id, 0)
    for number in range(count):
        await deal(store, key, number)
    return key


async def committed(store: Store, key: PartitionKey, offset: int, max_bytes: int = 1) -> Slice:
    read = Read(key, offset, max_bytes, committed=True)
    (found,) = await store.read([read], max_bytes=PLENTY_BYTES)
    return found


def files_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("log/*/*.aborted"))


def findings_in(directory: Path) -> list[Finding]:
    with inspection_of(directory) as inspection:
        return list(Verification(inspection).findings())


async def test_each_segment_has_a_file_of_its_own_for_what_was_aborted_in_it(
    tmp_path: Path,
) -> None:
    store = await open_store(tmp_path / "data")
    key = await deals(store)
    await store.close()
    sizes = [path.stat().st_size for path in files_of(tmp_path / "data")]
    assert len(sizes) > 2
    assert sum(sizes) == DEALS * ABORTED_BYTES
    assert findings_in(tmp_path / "data") == []
    store = await open_store(tmp_path / "data")
    for number in range(DEALS):
        found = await committed(store, key, 2 * number)
        assert found.aborted == (AbortedTransaction(1, 2 * number, 2 * number + 1),)
    several = await committed(store, key, 0, PLENTY_BYTES)
    last = [batch.base_offset for batch in batches_of(several.chunks)][-1]
    assert [each.first_offset for each in several.aborted] == list(range(0, last + 1, 2))
    await store.close()


async def test_a_topic_without_transactions_has_no_such_file(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    key = PartitionKey((await store.create_topic("news", 1, Policy())).id, 0)
    for _ in range(DEALS):
        await append(store, key, batch_of(b"plain"))
    await store.close()
    assert files_of(tmp_path / "data") == []


async def test_the_files_go_with_their_segments(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    key = await deals(store)
    await store.trim(key, 2 * DEALS - 1)
    assert (await committed(store, key, 2 * DEALS - 1)).aborted == (
        AbortedTransaction(1, 2 * DEALS - 2, 2 * DEALS - 1),
    )
    await store.close()
    assert len(files_of(tmp_path / "data")) == 1
    store = await open_store(tmp_path / "data")
    await store.delete_topic(key.topic_id)
    await store.close()
    assert files_of(tmp_path / "data") == []


async def test_a_file_left_over_from_a_trimmed_segment_is_swept_after_a_crash(
    tmp_path: Path,
) -> None:
    store = await open_store(tmp_path / "data")
    await deals(store)
    leave_crashed(tmp_path / "data", tmp_path / "crashed")
    await store.close()
    directory = next((tmp_path / "crashed").glob("log/*"))
    stray = directory / "0-00000000000000000001.aborted"
    stray.write_bytes(b"")
    # A new segment may come to have this name.
    later = directory / "0-00000000000000009999.aborted"
    later.write_bytes(b"")
    assert [finding.kind for finding in findings_in(tmp_path / "crashed")] == [Kind.NOTE] * 2
    await (await open_store(tmp_path / "crashed")).close()
    assert not stray.exists()
    assert later.exists()


async def test_a_damaged_file_is_named_and_nothing_in_doubt_is_shown(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    key = await deals(store)
    await store.close()
    first, second, *_ = files_of(tmp_path / "data")
    flip(first, ABORTED_BYTES + 3)
    name = str(first.relative_to(tmp_path / "data"))
    (finding,) = findings_in(tmp_path / "data")
    assert (finding.kind, finding.path) == (Kind.DAMAGE, name)
    assert (finding.start, finding.end) == (ABORTED_BYTES, 2 * ABORTED_BYTES)
    store = await open_store(tmp_path / "data")
    found = await committed(store, key, 0)
    assert isinstance(found.error, DamagedData) and name in str(found.error)
    following = int(second.stem.partition("-")[2])
    assert found.error.next_offset == following
    assert (await committed(store, key, following)).error is None
    assert len(await read_all(store, key)) == 2 * DEALS
    await store.close()


@pytest.mark.parametrize("how", ["cut", "missing"])
async def test_a_file_that_is_not_whole_is_damage(tmp_path: Path, how: str) -> None:
    store = await open_store(tmp_path / "data")
    key = await deals(store)
    await store.close()
    path = files_of(tmp_path / "data")[0]
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    (finding,) = findings_in(tmp_path / "data")
    assert finding.kind is Kind.DAMAGE
    store = await open_store(tmp_path / "data")
    assert isinstance((await committed(store, key, 0)).error, DamagedData)
    await store.close()


async def test_what_the_journal_tells_of_is_found_after_a_crash(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data")
    key = await deals(store)
    leave_crashed(tmp_path / "data", tmp_path / "crashed")
    await store.close()
    store = await open_store(tmp_path / "crashed")
    for number in range(DEALS):
        assert len((await committed(store, key, 2 * number)).aborted) == 1
    await store.close()


async def test_what_was_read_of_the_files_is_kept_within_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "CACHED_ABORTED_BYTES", 4 * ABORTED_BYTES)
    store = await open_store(tmp_path / "data")
    key = await deals(store)
    await store.close()
    store = await open_store(tmp_path / "data")
    for _ in range(2):
        for number in range(DEALS):
            assert len((await committed(store, key, 2 * number)).aborted) == 1
    await store.close()


async def test_a_format_from_before_transactions_is_refused(tmp_path: Path) -> None:
    await (await open_store(tmp_path / "data")).close()
    path = tmp_path / "data" / META_PATH
    with pytest.MonkeyPatch.context() as older:
        older.setattr("quackmq.stores.local.recovery.FORMAT_VERSION", 1)
        path.write_bytes(Meta("cluster", 1, 4, 8192).encode())
    with pytest.raises(UnusableDirectory, match="has format 1"):
        await LocalStore.open(tmp_path / "data")
