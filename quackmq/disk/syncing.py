"""Making written bytes durable with the calls that the system has.

Linux has `fdatasync`. macOS does not, and its `fsync` leaves bytes in the device's cache, where a
power cut loses them; only `F_FULLFSYNC` empties that cache. Other systems have at least `fsync`.

Thread-safe.
"""

from __future__ import annotations

import errno
import fcntl
import os
from typing import Final

#: The errors of a file system that does not support `F_FULLFSYNC`. Any other error is the device's,
#: and must not be hidden by a weaker call that succeeds.
_UNSUPPORTED: Final = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY}


def sync_data(descriptor: int) -> None:
    """Return when the bytes and the length of a file will survive a power cut. Raises OSError."""
    if _sync_device(descriptor):
        return
    fdatasync = getattr(os, "fdatasync", os.fsync)
    fdatasync(descriptor)


def sync_names(descriptor: int) -> None:
    """Return when the names in a directory will survive a power cut. Raises OSError."""
    if not _sync_device(descriptor):
        os.fsync(descriptor)


def _sync_device(descriptor: int) -> bool:
    """Empty the device's cache; return False if the system has no call for this."""
    command: int | None = getattr(fcntl, "F_FULLFSYNC", None)
    if command is None:
        return False
    try:
        fcntl.fcntl(descriptor, command)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True
