"""The file of a Unix socket: made without harm to others, removed when it is over.

A file that a killed broker left behind is found out by connecting to it: nobody answers, and it is
removed. One at which somebody listens, or that is no socket at all, is left alone. At the end the
file is removed if it is still the one that was made here. Who may connect is the file system's to
say: the permissions are those that the process gives to new files.
"""

from __future__ import annotations

import errno
import os
import socket
import stat


class SocketFile:
    def __init__(self, path: str) -> None:
        """OSError if there is no listening at that path."""
        self.path = path
        _remove_stale(path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.bind(path)
            self._made = _identity(os.stat(path))
        except BaseException:
            self.socket.close()
            raise

    def remove(self) -> None:
        try:
            if _identity(os.lstat(self.path)) == self._made:
                os.unlink(self.path)
        except FileNotFoundError:
            return  # somebody was faster


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "there is a file that is no socket", path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        # EAGAIN: its queue of connections is full, so somebody listens.
        refused = probe.connect_ex(path)
    if refused != errno.ECONNREFUSED:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), path)
    os.unlink(path)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
