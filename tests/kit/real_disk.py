"""A temporary directory on a real disk, for tests of the disk itself and of a broker as users run
it. The other tests use memory where there is room (tests/memory_directory.py)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(name="tmp_path")
def real_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="quackmq-real-") as directory:
        yield Path(directory)
