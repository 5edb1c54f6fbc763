"""A plugin of pytest: the temporary directories of tests are in memory where there is room.

Most tests would otherwise wait for the disk: a sync takes milliseconds, and the suite makes a
hundred thousand of them. All system calls stay the same. What a sync promises shows only after a
power cut, which no test makes on a real disk; the simulation (`tests/simulation/`) does so on its
own. `pytest --basetemp DIR` uses another directory, for example one on a disk. Tests of the disk
itself, and of a broker as users run it, always use a disk (tests/kit/real_disk.py).
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Final

import pytest

_MEMORY: Final = Path("/dev/shm")
_NAME: Final = "quackmq-tests-{}"
#: Two workers use less than 2 GiB at any time, because the directory of a passed test is removed.
_NEEDED_BYTES: Final = 6 * 1024**3


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the directory before pytest does. A worker gets its own one from the main process."""
    if config.option.basetemp is None and not hasattr(config, "workerinput"):
        _remove_directories_of_ended_runs()
        directory = find_memory()
        if directory is not None:
            config.option.basetemp = str(directory / _NAME.format(os.getpid()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remove the directory, unless a test has failed and has left its files there."""
    directory = _MEMORY / _NAME.format(os.getpid())
    if exitstatus == pytest.ExitCode.OK:
        shutil.rmtree(directory, ignore_errors=True)


def find_memory() -> Path | None:
    """Return a directory in memory, or None if there is too little room."""
    return _MEMORY if _free_bytes() >= _NEEDED_BYTES else None


def _free_bytes() -> int:
    """Return how much the file system in memory and the memory itself have left."""
    if not _MEMORY.is_dir():
        return 0
    status = os.statvfs(_MEMORY)
    memory = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    available = int(memory[1]) * 1024 if memory else 0
    return min(status.f_bavail * status.f_frsize, available)


def _remove_directories_of_ended_runs() -> None:
    for directory in _MEMORY.glob(_NAME.format("*")):
        process = directory.name.rpartition("-")[2]
        if not Path("/proc", process).exists():
            shutil.rmtree(directory, ignore_errors=True)
