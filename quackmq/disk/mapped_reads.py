"""Reading in place: large ranges of files from the page cache, without a copy.

A large read of old records mostly finds its bytes in the page cache. Checking and sending them from
there takes two thirds of the time that copying them first takes.

If the system cannot load a mapped byte (the device fails, the file was truncated), a signal ends
the process, where a read would have raised. So the system is first asked to load the whole range,
with a call that returns an error instead (MADV_POPULATE_READ, Linux 5.14). If that fails or is
unknown, there is no view, and the caller's ordinary read raises the error.

There is one window per file, and few of them: the system counts their pages as the process's own.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, NamedTuple

from quackmq.disk import limits

#: The system's number of MADV_POPULATE_READ; Python has no name for it yet.
_POPULATE_READ: Final = 22


class _Window(NamedTuple):
    """A mapped range [start, end) of a file."""

    start: int
    end: int
    mapped: mmap.mmap
    view: memoryview


class MappedFiles:
    """Mapped windows of open files. `forget` is thread-safe; call the rest from the event loop."""

    #: On other systems the number means something else, or nothing.
    is_supported = sys.platform == "linux"
    #: The shortest and the longest range that is viewed.
    viewed_bytes: int = limits.VIEWED_BYTES
    window_bytes: int = limits.WINDOW_BYTES

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: OrderedDict[Hashable, _Window] = OrderedDict()

    def view(
        self, file: Hashable, descriptor: int, length: int, position: int
    ) -> memoryview | None:
        """Return a range of an open file; None if reading it is better, or it cannot be loaded. The
        view stays valid while it is referenced, whatever happens to the file."""
        if not (self.is_supported and self.viewed_bytes <= length <= self.window_bytes):
            return None
        with self._lock:
            window = self._windows.get(file)
        try:
            if window is None or position < window.start or position + length > window.end:
                window = self._open(file, descriptor, length, position)
                if window is None:
                    return None
            start = position - window.start
            # The call takes only whole pages.
            aligned = start - start % mmap.PAGESIZE
            window.mapped.madvise(_POPULATE_READ, aligned, start + length - aligned)
        except (OSError, ValueError):  # ValueError: the file was truncated meanwhile
            return None
        return window.view[start : start + length]

    def _open(self, file: Hashable, descriptor: int, length: int, position: int) -> _Window | None:
        """Map a window that contains this range, in place of the file's old window; return None if
        the file ends before the range does. Drop the oldest window if there are too many."""
        start = position - position % self.window_bytes
        # Twice the longest range, so that a range which begins anywhere in the first half fits.
        end = min(start + 2 * self.window_bytes, self._file_size(descriptor))
        if position + length > end:
            return None
        mapped = self._map(descriptor, start, end)
        window = _Window(start, end, mapped, memoryview(mapped))
        with self._lock:
            self._windows[file] = window
            self._windows.move_to_end(file)
            if len(self._windows) > limits.WINDOWS:
                self._windows.popitem(last=False)
        return window

    def forget(self, file: Hashable) -> None:
        """Drop the window of a closed file, so that a deleted file's disk space is freed."""
        with self._lock:
            self._windows.pop(file, None)

    def _file_size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def _map(self, descriptor: int, start: int, end: int) -> mmap.mmap:
        """Map the bytes from `start` to before `end`."""
        return mmap.mmap(
            descriptor, end - start, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=start
        )
