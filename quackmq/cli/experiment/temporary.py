"""A temporary directory that is removed when the command ends.

A killed command cannot remove its directory, so the next command of the same kind does. Each user
of a directory holds a lock on it, which the system releases when the process ends in any way. An
unlocked directory is left over. Directories of other users are ignored.
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
    """Provide an empty directory whose name starts with `prefix`. First remove left-over
    directories with this prefix."""
    _remove_abandoned(prefix)
    # Lock the directory before it gets its final name, so that no other process takes it for left
    # over.
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


def _remove_abandoned(prefix: str) -> None:
    """Remove left-over directories. Errors are ignored; the next command tries again."""
    for found in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):
            if found.lstat().st_uid == os.getuid():
                _remove_if_abandoned(found)


def _remove_if_abandoned(directory: Path) -> None:
    """Remove a directory unless another process holds its lock. Raises OSError, for example for a
    symbolic link, which is never followed."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with suppress(BlockingIOError):  # another process uses it
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory)
    finally:
        os.close(descriptor)
