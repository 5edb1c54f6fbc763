"""Decompression keeps its bound: bombs are opened by a process without the memory for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quackmq import limits
from quackmq.errors import CorruptBatch
from quackmq.records.batch import COMPRESSIONS
from quackmq.records.inflate import inflate
from tests.kit.batch_bombs import BOMBS, zstd_frame

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.processes
def test_a_bomb_is_refused_within_the_bound() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.kit.batch_bombs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    lines = [line.split("|") for line in result.stdout.splitlines()]
    assert [name for name, *_ in lines] == list(BOMBS)
    for name, size, taken, came, message in lines:
        assert came == "CorruptBatch", (name, came, message)
        assert int(size) <= limits.BATCH_BYTES, name
        assert int(taken) <= 3 * limits.DECODED_BATCH_BYTES, (name, taken)


def test_the_bombs_would_go_off_elsewhere() -> None:
    """The same frame, with a small size, is sound: it is refused for its size and nothing else."""
    frame = zstd_frame(10 * limits.MIB, b"start")
    inflated = inflate("zstd", memoryview(frame), 10 * limits.MIB)
    assert bytes(inflated) == b"start".ljust(10 * limits.MIB, b"\0")
    with pytest.raises(CorruptBatch):
        inflate("zstd", memoryview(frame), 10 * limits.MIB - 1)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_nothing_inflates_to_nothing_or_is_corrupt(compression: str) -> None:
    if compression == "none":
        assert bytes(inflate(compression, memoryview(b""), 10)) == b""
        return
    with pytest.raises(CorruptBatch):
        inflate(compression, memoryview(b""), 10)
