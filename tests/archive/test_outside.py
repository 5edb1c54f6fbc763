"""Tools that know nothing of the broker read the archive while it archives and merges.

By manifest they read each record once, at any moment, as docs/archive.md says: who misses a file
reads the manifest again. By glob, while files come and go, a record may come twice, and never in
two versions; when nothing happens, it is once, too.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import duckdb
import pytest

from quackmq.archive.merging.merger import Merger
from quackmq.disk.real import RealDisk
from tests.archive.merging import archive, opened, settled
from tests.stores.calls import DEADLINE_S

T = TypeVar("T")
ROUNDS = 6
FILES_A_ROUND = 5
RECORDS_A_FILE = 10
Row = tuple[int, bytes]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[RealDisk]:
    disk = RealDisk(tmp_path)
    yield disk
    disk.close()


def until_all_files_are_there(read: Callable[[], T]) -> T:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return read()
        except duckdb.IOException as error:
            assert time.monotonic() < deadline, error


def by_manifest(directory: Path) -> tuple[int, list[Row]]:
    """Where the manifest ends, and all rows that it lists."""
    manifest = json.loads((directory / "_manifest.json").read_text())
    names = [str(directory / file["name"]) for file in manifest["files"]]
    query = 'SELECT "offset", value FROM read_parquet($names) WHERE "offset" >= $first'
    with duckdb.connect() as connection:
        told = connection.execute(query, {"names": names, "first": manifest["first_offset"]})
        return manifest["next_offset"], told.fetchall()


def by_glob(directory: Path) -> list[Row]:
    with duckdb.connect() as connection:
        query = f"""SELECT "offset", value FROM '{directory}/*.parquet'"""
        return connection.execute(query).fetchall()


@pytest.mark.sweep
async def test_duckdb_reads_by_manifest_and_by_glob_while_files_come_and_are_merged(
    disk: RealDisk, tmp_path: Path
) -> None:
    directory = tmp_path / "archive" / "ducks" / "0"
    partitions = await opened(disk)
    merger = Merger(partitions)
    await archive(partitions, RECORDS_A_FILE)

    async def archive_and_merge() -> None:
        for _ in range(FILES_A_ROUND):
            await archive(partitions, RECORDS_A_FILE)
        await merger.merge_due()

    values: dict[int, bytes] = {}
    for round_number in range(ROUNDS):
        archived = round_number * FILES_A_ROUND + 1
        _, (end, listed), found = await asyncio.gather(
            archive_and_merge(),
            asyncio.to_thread(until_all_files_are_there, lambda: by_manifest(directory)),
            asyncio.to_thread(until_all_files_are_there, lambda: by_glob(directory)),
        )
        # The first offset of each file has no record.
        expected = [each for each in range(end) if each % (RECORDS_A_FILE + 1)]
        assert sorted(offset for offset, _ in listed) == expected
        assert len(expected) >= archived * RECORDS_A_FILE
        for offset, value in [*listed, *found]:
            assert values.setdefault(offset, value) == value
    assert merger.total.merges >= ROUNDS // 2
    await settled(partitions)
    _, listed = by_manifest(directory)
    assert sorted(listed) == sorted(by_glob(directory)), "when nothing happens to it"
    assert values.items() <= dict(listed).items()
    await partitions.close()
