"""A checkpoint of many partitions is taken in slices, and is still the state behind one frame."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from quackmq.model.policy import Policy
from quackmq.model.topic import Append, PartitionKey
from quackmq.stores import limits as stores_limits
from quackmq.stores.local import LocalOptions, LocalStore
from quackmq.stores.local.commit.checkpoint_capture import Capture
from quackmq.stores.local.files import checkpoint, extents
from quackmq.stores.local.files.checkpoint import Decoded
from tests.kit.loop_cpu import measured_callbacks
from tests.kit.support import batch_of
from tests.kit.waiting import soon
from tests.stores.calls import append_values, new_partitions, read_all
from tests.stores.local.directories import leave_crashed

OPTIONS = LocalOptions()


def in_place(directory: Path) -> Decoded:
    return checkpoint.decode((directory / checkpoint.PATH).read_bytes(), OPTIONS)


@asynccontextmanager
async def held_capture(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[asyncio.Task[None]]:
    """A checkpoint that has begun and has taken nothing; it goes on behind the block."""
    goes_on = asyncio.Event()
    finish = Capture.finish

    async def slowly(capture: Capture) -> None:
        await goes_on.wait()
        await finish(capture)

    with monkeypatch.context() as patch:
        patch.setattr(Capture, "finish", slowly)
        task = store._medium.checkpointer.start()
        while store._medium.checkpointer.capture.is_complete:
            await asyncio.sleep(0)
        yield task
        goes_on.set()
        await soon(task)


async def test_what_is_committed_meanwhile_is_not_part_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await LocalStore.open(tmp_path / "data")
    keys = await new_partitions(store, 4)
    doomed = PartitionKey((await store.create_topic("doomed", 1, Policy())).id, 0)
    for key in [*keys, doomed]:
        await append_values(store, key, b"before")
    async with held_capture(store, monkeypatch):
        await append_values(store, keys[0], b"meanwhile")
        await store.trim(keys[1], 1)
        await store.delete_topic(doomed.topic_id)
        late = await new_partitions(store, 1, "late")
        await append_values(store, late[0], b"meanwhile")
    found = in_place(tmp_path / "data")
    assert {
        key: (log.first_offset, log.high_watermark) for key, log in found.logs.items()
    } == dict.fromkeys([*keys, doomed], (0, 1))
    assert all(log.segments[0].path in found.packed.extents for log in found.logs.values())
    # The journal has the rest.
    leave_crashed(tmp_path / "data", tmp_path / "crashed")
    again = await LocalStore.open(tmp_path / "crashed")
    assert [value for _, value in await read_all(again, keys[0])] == [b"before", b"meanwhile"]
    assert (await again.offsets(keys[1])).first == 1
    assert [value for _, value in await read_all(again, late[0])] == [b"meanwhile"]
    assert "doomed" not in await again.topics()
    await again.close()
    # The next checkpoint has it, too.
    await store._medium.checkpointer.write(clean=False)
    found = in_place(tmp_path / "data")
    assert found.logs[keys[0]].high_watermark == 2
    assert found.logs[keys[1]].first_offset == 1
    assert found.logs[late[0]].high_watermark == 1
    assert doomed not in found.logs
    await store.close()


async def test_nothing_later_is_written_back_while_the_state_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut the journal may have lost it, and offsets and places are given again."""
    monkeypatch.setattr(stores_limits, "WRITE_BACK_BYTES", 4_000)
    store = await LocalStore.open(tmp_path, LocalOptions(sync="os"))
    keys = await new_partitions(store, 2)
    for key in keys:
        await append_values(store, key, b"before")
    sizes = {key: log.segments[-1].size for key, log in store._medium._logs.items()}
    calls: list[asyncio.Future[object]] = []
    async with held_capture(store, monkeypatch):
        # The first ones go beyond the bound; the last has to wait for the checkpoint.
        calls += [
            asyncio.ensure_future(store.append([Append(key, batch_of(bytes(3_000)))]))
            for _ in range(3)
            for key in keys
        ]
        await soon(calls[0])
        last = asyncio.ensure_future(store.append([Append(keys[0], batch_of(b"last"))]))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not last.done()
    await soon(asyncio.gather(*calls, last))
    found = in_place(tmp_path)
    paths = {log.segments[-1].path: sizes[key] for key, log in found.logs.items()}
    for path, size in paths.items():
        assert max(extent.end for extent in extents.decode(found.packed.extents[path])) == size
    await store.close()


async def test_partitions_that_did_not_change_stay_in_the_next_checkpoint(tmp_path: Path) -> None:
    store = await LocalStore.open(tmp_path)
    keys = await new_partitions(store, 3)
    for key in keys:
        await append_values(store, key, b"quack")
    await store._medium.checkpointer.write(clean=False)
    capture = store._medium.checkpointer.capture
    assert not capture.logs and not capture.unwritten and not capture.indexes, "memory is held"
    await append_values(store, keys[1], b"quack")
    await store.close()
    assert [in_place(tmp_path).logs[key].high_watermark for key in keys] == [1, 2, 1]
    again = await LocalStore.open(tmp_path)
    await again.close()
    assert [in_place(tmp_path).logs[key].high_watermark for key in keys] == [1, 2, 1]


@pytest.mark.sweep
async def test_a_checkpoint_of_many_partitions_does_not_hold_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(os, "fdatasync", lambda file: None)
    store = await LocalStore.open(tmp_path)
    keys = await new_partitions(store, 5_000)
    await asyncio.gather(*(store.append([Append(key, batch_of(b"quack"))]) for key in keys))
    with measured_callbacks() as times:
        await asyncio.create_task(store._medium.checkpointer.write(clean=False))
    times.check(20)
    await store.close()
