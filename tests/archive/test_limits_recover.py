"""Limits of the archive: what was refused at a limit is taken when there is room again."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from quackmq import limits
from quackmq.archive import limits as archive_limits
from quackmq.archive.archiving.builder import LocalFileBuilder
from quackmq.archive.manifest import add, replace, trim
from quackmq.archive.prefetch_buffer import PrefetchBuffer
from quackmq.errors import LimitReached
from quackmq.model.policy import Policy
from tests.archive.pond import pond, put_some
from tests.archive.support import KEY, plain
from tests.archive.test_manifest import aside_of, file_of, names, of_ranges
from tests.kit.waiting import until

DEADLINE_S = 30


# --- manifests -----------------------------------------------------------------------------------


def test_files_are_taken_again_when_some_were_merged_or_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "ARCHIVE_FILES", 3)
    full = of_ranges(10, 20, 30)
    with pytest.raises(LimitReached, match="merge or delete some"):
        add(full, file_of(30, 40, 4))
    merged = replace(full, names(full)[:2], [file_of(0, 20, 4)], full.version)
    assert add(merged, file_of(30, 40, 5)).next_offset == 40
    assert add(trim(full, 10), file_of(30, 40, 5)).next_offset == 40


def test_batches_are_kept_aside_again_when_others_were_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(archive_limits, "ARCHIVE_QUARANTINED", 1)
    full = add(of_ranges(10), file_of(10, 30, 2, records=15), [aside_of(12, 15, 2)])
    more = (file_of(30, 40, 3, records=9), [aside_of(33, 34, 3)])
    with pytest.raises(LimitReached, match="quarantined batches"):
        add(full, *more)
    let_go = trim(full, 30)
    assert add(let_go, file_of(30, 40, 4, records=9), [aside_of(33, 34, 4)]).next_offset == 40


# --- archiving -----------------------------------------------------------------------------------


async def test_a_partition_with_too_many_files_keeps_its_log_and_is_archived_when_some_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ARCHIVE_FILES", 2)
    async with pond(tmp_path / "data") as home:
        key = await home.create("ducks", Policy(archive_bytes=1))
        put: dict[int, bytes] = {}
        for number in range(3):
            put |= await put_some(home, key, 5, size=20 + number)
            await home.archiver.archive_due()
        assert home.ranges(key) == [(0, 5), (5, 10)]
        (failure,) = home.archiver.state().failures
        assert "at most 2 are allowed" in failure.reason
        assert await home.values(key) == put, "nothing is lost meanwhile"
        await home.store.trim(key, 5)
        home.clock.advance(archive_limits.ARCHIVE_RETRY_MAX_MS)
        await home.archiver.archive_due()
        assert home.ranges(key) == [(5, 10), (10, 15)]
        assert home.archiver.state().failures == ()
        assert list(await home.values(key)) == list(range(5, 15))


class Counted(LocalFileBuilder):
    def __init__(self) -> None:
        super().__init__()
        self.rests = 0

    def free_memory(self) -> None:
        self.rests += 1
        super().free_memory()


async def test_an_archiver_lets_go_of_its_process_each_time_that_it_is_idle_and_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_limits, "ARCHIVE_CHECK_MS", 1)
    monkeypatch.setattr(archive_limits, "ARCHIVE_WORKER_IDLE_MS", 1)
    file_builder = Counted()
    async with (
        pond(tmp_path / "data", file_builder=file_builder) as home,
        asyncio.timeout(DEADLINE_S),
    ):
        running = asyncio.create_task(home.archiver.run())
        key = await home.create("ducks", Policy(archive_bytes=1))
        for end in (5, 10):
            rests = file_builder.rests
            await put_some(home, key, 5)
            await until(partial(home.is_archived_to, key, end))
            await until(lambda rests: file_builder.rests > rests, rests)
        running.cancel()
        await asyncio.wait([running])


# --- reading ahead -------------------------------------------------------------------------------


def test_more_is_made_ahead_when_what_waits_was_taken() -> None:
    batch = bytes(plain(0, 10, size=50).batch.view)
    following = bytes(plain(10, 10, size=50).batch.view)
    ahead = PrefetchBuffer(4_000)
    ahead.put(KEY, 0, [batch])
    ahead.put(KEY, 10, [following])
    for _ in range(3):
        assert ahead.run_end(KEY, 10, 3_000) is None, "there is no room"
        assert ahead.pop(KEY, 0) == (batch,)
        assert ahead.run_end(KEY, 10, 2_600) == 20
        ahead.put(KEY, 0, [batch])
