"""Replace small files atomically: after a crash, a file has its old or its new content.

When `replace` returns, the new content is on disk. Only one writer at a time. If it raises OSError,
the file is unchanged, with one exception: when the disk fails to sync the directory after the
rename, the file has the new content, and a crash may bring the old content back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quackmq.disk.syncing import sync_data, sync_names


def replace(file: Path, new: Path, content: bytes) -> None:
    """Write the content to `new`, which must be in the same directory, and rename it to `file`."""
    # The directory is opened first: after the rename, a lack of descriptors must not raise.
    with _opened_directory(file.parent) as directory:
        os.close(write(new, content))
        new.replace(file)
        sync_names(directory)


def write(file: Path, content: bytes) -> int:
    """Write a file and sync it; its name is not synced. Return its descriptor, which is open for
    reading and writing at the end of the file. The caller closes it.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        written = 0
        while written < len(content):
            written += os.write(descriptor, content[written:])
        sync_data(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def sync_directory(path: Path) -> None:
    """Sync the creation and removal of files in a directory."""
    with _opened_directory(path) as directory:
        sync_names(directory)


@contextmanager
def _opened_directory(path: Path) -> Iterator[int]:
    """Open a directory for the block; yield its descriptor."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
