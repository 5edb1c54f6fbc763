"""Making written bytes durable with the calls that the system has.

Linux has `fdatasync`. macOS does not, and its `fsync` leaves bytes in the device's own cache, where
a power cut takes them; only `F_FULLFSYNC` empties that cache. Other systems have at least `fsync`.

Any thread may call.
"""

from __future__ import annotations

import errno
import fcntl
import os
from typing import Final

#: What the system answers where a file system does not know `F_FULLFSYNC`. Any other error is one
#: of the device, and must not be hidden by a weaker call that succeeds.
_UNSUPPORTED: Final = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY}


def sync_data(descriptor: int) -> None:
    """Return when the bytes and the length of a file will survive a power cut. OSError."""
    if _sync_device(descriptor):
        return
    fdatasync = getattr(os, "fdatasync", os.fsync)
    fdatasync(descriptor)


def sync_names(descriptor: int) -> None:
    """Return when the names in a directory will survive a power cut. OSError."""
    if not _sync_device(descriptor):
        os.fsync(descriptor)


def _sync_device(descriptor: int) -> bool:
    """Whether the system has a call that empties the device's cache, and it was made."""
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
