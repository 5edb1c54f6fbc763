"""The file of a Unix socket: created without harm to other processes, removed at the end.

A killed broker leaves its socket file behind. Connecting to that file fails, so the file is stale
and is removed. A socket on which a process listens is left alone, and so is a file that is not a
socket. At the end the file is removed only if it is still the file that was created here. The
permissions are the process's default for new files; they decide which users may connect.
"""

from __future__ import annotations

import errno
import os
import socket
import stat


class SocketFile:
    def __init__(self, path: str) -> None:
        """Bind a socket at `path`; raise OSError if that is not possible."""
        self.path = path
        _remove_stale(path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.bind(path)
            self._file_identity = _identity(os.stat(path))
        except BaseException:
            self.socket.close()
            raise

    def remove(self) -> None:
        """Remove the file, unless another process has replaced or removed it."""
        try:
            if _identity(os.lstat(self.path)) == self._file_identity:
                os.unlink(self.path)
        except FileNotFoundError:
            return  # another process has removed it


def _remove_stale(path: str) -> None:
    """Remove a socket file on which no process listens. Raise OSError if the file is in use or is
    not a socket."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "the file exists and is not a socket", path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        # EAGAIN: the listener's backlog is full, so a process listens.
        error_number = probe.connect_ex(path)
    if error_number != errno.ECONNREFUSED:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), path)
    os.unlink(path)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
