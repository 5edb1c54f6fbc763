"""A file written as a whole: all of it, and never much of it unsynced at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from quackmq.disk import limits as disk_limits
from quackmq.disk.interface import read_file, write_durable
from quackmq.disk.real import RealDisk, RealFile


@pytest.mark.parametrize(("size", "syncs"), [(0, 1), (1, 1), (10, 1), (11, 2), (20, 2), (35, 4)])
def test_a_file_is_synced_as_it_grows(
    size: int, syncs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_limits, "SYNCED_WRITE_BYTES", 10)
    sizes: list[int] = []

    def sync(file: RealFile) -> None:
        sizes.append(file.size())

    monkeypatch.setattr(RealFile, "sync", sync)
    disk = RealDisk(tmp_path)
    data = bytes(number % 251 for number in range(size))
    (tmp_path / "file").write_bytes(b"what was there before, and is longer than what comes")
    write_durable(disk, "file", data)
    assert read_file(disk, "file") == data
    assert len(sizes) == syncs and sizes[-1] == size
    disk.close()
