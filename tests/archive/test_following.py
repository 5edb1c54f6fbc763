"""What follows is made while a reader works on what it has: the same records, and less waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from quackmq.archive import limits as archive_limits
from quackmq.archive.parquet.reader import ArchiveReader
from quackmq.errors import DamagedData, NotFound
from quackmq.model.topic import PartitionKey, Read
from quackmq.records.batch import batches
from quackmq.records.codec import decode
from tests.archive.archiving import archive
from tests.archive.home import Home, flip
from tests.kit.support import let_others_run
from tests.kit.waiting import soon
from tests.stores.calls import DEADLINE_S, append_values

RECORDS = 600
#: What a reader asks for at a time, some twenty records.
PIECE_BYTES = 1_000


@pytest_asyncio.fixture
async def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Home]:
    """With batches made ahead by small amounts, and row groups of 150 records."""
    monkeypatch.setattr(archive_limits, "ARCHIVE_PREFETCH_BYTES", 4 * PIECE_BYTES)
    monkeypatch.setattr(archive_limits, "ARCHIVE_ROW_GROUP_ROWS", 150)
    home = Home(tmp_path)
    await home.open()
    yield home
    await home.store.close()


async def history(home: Home, files: int = 2) -> PartitionKey:
    """Nothing of it is left in the log."""
    key = PartitionKey((await home.topic()).id, 0)
    for number in range(files):
        values = [b"%d" % each for each in range(RECORDS // files)]
        await append_values(home.store, key, *values)
        await archive(home.store, key)
        await home.at_rest()
        assert await home.first_in_log(key) == (number + 1) * len(values)
    return key


class Lane:
    """What goes to the read lane, by the function's name."""

    def __init__(self, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: list[str] = []
        run = home.disk.run

        async def counted(function: Callable[[], Any], lane: Any) -> Any:
            if lane == "read":
                self.jobs.append(getattr(function, "func", function).__name__)
            return await run(function, lane)

        monkeypatch.setattr(home.disk, "run", counted)


async def piece(home: Home, key: PartitionKey, offset: int) -> list[int]:
    (part,) = await home.store.read([Read(key, offset, PIECE_BYTES)], max_bytes=PIECE_BYTES)
    if part.error is not None:
        raise part.error
    assert part.size <= PIECE_BYTES
    found = [each for chunk in part.chunks for batch in batches(chunk) for each in decode(batch)]
    return [record.offset for record in found]


async def test_who_reads_on_finds_the_next_piece_made(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await history(home)
    lane = Lane(home, monkeypatch)
    offset = 0
    while offset < RECORDS:
        found = await piece(home, key, offset)
        assert found == list(range(offset, offset + len(found)))
        offset += len(found)
        await home.at_rest()
    # The first read, and the second, which shows that somebody reads on; then nobody waits.
    assert lane.jobs.count("_read_in_lane") == 2
    assert lane.jobs.count("prefetch") == 3, "one for each other row group"


async def test_who_does_not_wait_for_it_gets_the_same(home: Home) -> None:
    """Several readers at once, each as fast as it can, with what is made for one in its way."""
    key = await history(home)

    async def everything(offset: int) -> list[int]:
        found: list[int] = []
        while offset < RECORDS:
            found += await piece(home, key, offset)
            offset = found[-1] + 1
        return found

    results = await soon(asyncio.gather(*(everything(begin) for begin in (0, 0, 7, 300))))
    assert results == [list(range(begin, RECORDS)) for begin in (0, 0, 7, 300)]


async def test_what_lies_ahead_and_is_damaged_is_told_to_who_asks_for_it(home: Home) -> None:
    key = await history(home)
    (second,) = home.path("ducks", "0").glob(f"{RECORDS // 2:020d}-*.parquet")
    flip(second, 100)
    found: list[int] = []
    with pytest.raises(DamagedData) as damage:
        while True:
            found += await piece(home, key, len(found))
            await home.at_rest()
    assert found == list(range(RECORDS // 2))
    behind = damage.value.next_offset
    assert behind == RECORDS // 2 + 150
    assert (await piece(home, key, behind))[0] == behind


async def test_nothing_is_made_ahead_for_which_there_is_no_room(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await history(home)
    monkeypatch.setattr(
        archive_limits, "ARCHIVE_PREFETCHED_BYTES", archive_limits.ARCHIVE_PREFETCH_BYTES
    )
    lane = Lane(home, monkeypatch)
    offset = 0
    while offset < RECORDS:
        offset += len(await piece(home, key, offset))
        await home.at_rest()
    assert set(lane.jobs) == {"_read_in_lane"}


async def test_what_is_being_made_is_waited_for_at_the_end(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await history(home)
    begun, goes_on = threading.Event(), threading.Event()
    make = ArchiveReader.prefetch

    def held_up(reader: ArchiveReader, *arguments: Any) -> None:
        begun.set()
        assert goes_on.wait(DEADLINE_S)
        make(reader, *arguments)

    monkeypatch.setattr(ArchiveReader, "prefetch", held_up)
    offset = 0
    while not home.registry._tasks:
        offset += len(await piece(home, key, offset))
    assert await asyncio.to_thread(begun.wait, DEADLINE_S)
    assert home.registry._pins == 1, "its files are held meanwhile"
    closing = asyncio.create_task(home.store.close())
    await let_others_run()
    assert not closing.done()
    goes_on.set()
    await soon(closing)
    assert not home.registry._tasks and home.registry._pins == 0
    await home.open()
    assert (await piece(home, key, offset))[0] == offset


async def test_a_topic_that_is_deleted_meanwhile_is_gone_for_who_reads_on(home: Home) -> None:
    key = await history(home)
    offset = 0
    while not home.registry._tasks:
        offset += len(await piece(home, key, offset))
    await home.store.delete_topic(key.topic_id)
    with pytest.raises(NotFound):
        await piece(home, key, offset)
    await home.at_rest()
