"""Small files that a crash leaves whole: the old content or the new one.

What `replace` has returned from is on disk. Promised of one writer at a time; on failure, OSError,
the file is as it was.
"""

from __future__ import annotations

import os
from pathlib import Path

from quackmq.disk.syncing import sync_data, sync_names


def replace(file: Path, new: Path, content: bytes) -> None:
    """The content is written to `new`, in the same directory, which then takes the file's place."""
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        written = 0
        while written < len(content):
            written += os.write(descriptor, content[written:])
        sync_data(descriptor)
    finally:
        os.close(descriptor)
    new.replace(file)
    sync_directory(file.parent)


def sync_directory(path: Path) -> None:
    """That its files are there, or gone, is on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_names(descriptor)
    finally:
        os.close(descriptor)
