"""A directory for as long as a command runs, which goes with it.

A command that is killed cannot take its directory with it, so the next one of its kind does that:
whoever uses a directory holds a lock on it, and one that nobody holds is left over. The system
gives a lock back when its process ends, however that is. Directories of other users are let alone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def temporary_directory(prefix: str) -> Iterator[Path]:
    """Empty; its name begins with `prefix`, as do those that are removed first."""
    _sweep(prefix)
    # Others look only at the name that it gets when it is locked: none takes it for left over.
    unlocked = Path(tempfile.mkdtemp(prefix=f".{prefix}"))
    directory = unlocked.with_name(unlocked.name.removeprefix("."))
    descriptor = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        unlocked.rename(directory)
        try:
            yield directory
        finally:
            shutil.rmtree(directory)
    finally:
        os.close(descriptor)


def _sweep(prefix: str) -> None:
    """What cannot be removed now is there for the next one: it is nobody's reason to stop."""
    for found in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            if found.lstat().st_uid == os.getuid():
                _remove_if_left(found)


def _remove_if_left(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with suppress(BlockingIOError):  # somebody uses it
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory)
    finally:
        os.close(descriptor)
