"""Reading in place: large pieces of files as the system holds them in memory, without a copy.

A large read of old news mostly finds its bytes in the system's memory already. Checking them there
and handing them out as they are takes two thirds of the time that copying them out first takes.

A mapped byte that the system cannot bring (the device fails, the file was cut off by someone) ends
the process with a signal, where a read would have raised. So the system is asked for the whole
piece first, by a call that answers with an error instead (MADV_POPULATE_READ, Linux 5.14); where
that fails or is not known there is no view, and the caller's read says what is wrong.

One window a file, and few of them: the system counts what was looked at as the process's own.
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

#: The system's number for it; Python's own modules have no name for it yet.
_POPULATE_READ: Final = 22


class _Window(NamedTuple):
    start: int
    end: int
    mapped: mmap.mmap
    view: memoryview


class MappedFiles:
    """Any thread may call `forget`; call everything else from the event loop."""

    #: Elsewhere the system's number means something else, or nothing.
    is_supported = sys.platform == "linux"
    #: The shortest piece that is viewed, and the longest.
    viewed_bytes: int = limits.VIEWED_BYTES
    window_bytes: int = limits.WINDOW_BYTES

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: OrderedDict[Hashable, _Window] = OrderedDict()

    def view(
        self, file: Hashable, descriptor: int, length: int, position: int
    ) -> memoryview | None:
        """A piece of an open file; None if it is better read, or cannot be had. It stays good
        whatever becomes of the file, as long as it is held."""
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
            aligned = start - start % mmap.PAGESIZE
            window.mapped.madvise(_POPULATE_READ, aligned, start + length - aligned)
        except (OSError, ValueError):  # a ValueError where the file was cut off meanwhile
            return None
        return window.view[start : start + length]

    def _open(self, file: Hashable, descriptor: int, length: int, position: int) -> _Window | None:
        start = position - position % self.window_bytes
        end = min(start + 2 * self.window_bytes, self._size_of(descriptor))
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
        """The file is closed: the room that it takes on disk must not be held for nothing."""
        with self._lock:
            self._windows.pop(file, None)

    def _size_of(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def _map(self, descriptor: int, start: int, end: int) -> mmap.mmap:
        """Map the bytes from `start` to before `end`."""
        return mmap.mmap(
            descriptor, end - start, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=start
        )
