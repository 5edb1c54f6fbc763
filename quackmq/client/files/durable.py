"""Replace small files atomically: after a crash, a file has its old or its new content.

When `replace` returns, the new content is on disk. Only one writer at a time. If it raises OSError,
the file is unchanged.
"""

from __future__ import annotations

import os
from pathlib import Path

from quackmq.disk.syncing import sync_data, sync_names


def replace(file: Path, new: Path, content: bytes) -> None:
    """Write the content to `new`, which must be in the same directory, and rename it to `file`."""
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
    """Sync the creation and removal of files in a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_names(descriptor)
    finally:
        os.close(descriptor)
