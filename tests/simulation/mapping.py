"""Mapped pieces of files: what `quackmq.disk.mapped_reads` gets from the system, made up.

A mapping shows the bytes that the file has now, not those that it had when it was mapped: later
writes, pages that a failed sync lost, and damage. It keeps a removed file's bytes, and their room
on the disk, as long as anybody holds a view of it. Where the file was cut off there is nothing to
show: the system ends a process that looks there. `SimulatedDisk.misuses` has what a program did
that would come to this.

`SimulatedWindows` is the store's own `MappedFiles` over such mappings, with sizes that small files
reach. The sizes come from the seed.
"""

from __future__ import annotations

import errno
import mmap
import random
from collections.abc import Callable
from collections.abc import Mapping as ByDescriptor
from typing import Protocol, cast

from quackmq.disk.mapped_reads import MappedFiles


class MappedFile(Protocol):
    """An open file, as far as it can be mapped."""

    def mapped_size(self) -> int: ...

    def mapped(self, start: int, end: int) -> Mapping: ...


class Mapping(bytearray):
    """The bytes of a file from `start` on. Its views stay good while its content changes."""

    __slots__ = ("__weakref__", "_bring", "_end", "start")

    def __init__(self, content: bytes, start: int, bring: Callable[[], None]) -> None:
        """`bring` raises OSError where the device does not give the bytes."""
        super().__init__(content)
        self.start = start
        self._end = start + len(content)
        self._bring = bring

    def madvise(self, option: int, start: int, length: int) -> None:
        """Bring these bytes to memory, or say that they cannot be had. Like the real one, stop at
        the end of the mapping without a word."""
        if self.start + min(start + length, len(self)) > self._end:
            raise OSError(errno.EFAULT, "the file ends before that")
        self._bring()

    def follow(self, position: int, data: bytes) -> None:
        """The file has these bytes now."""
        first = max(position, self.start)
        last = min(position + len(data), self._end)
        if first < last:
            self[first - self.start : last - self.start] = data[first - position : last - position]

    def cut_off(self, size: int) -> None:
        """The file ends at `size` now."""
        if size < self._end:
            gone = self._end - max(size, self.start)
            at = max(size, self.start) - self.start
            self[at : at + gone] = b"\xdd" * gone
            self._end = max(size, self.start)


class SimulatedWindows(MappedFiles):
    def __init__(self, source: random.Random, files: ByDescriptor[int, MappedFile]) -> None:
        """`files` has the open ones by their descriptors."""
        super().__init__()
        self._files = files
        self.viewed_bytes = source.choice((1, 200, 1_000))
        self.window_bytes = source.choice((1_024, 4_096, 16_384))
        self.is_supported = source.random() < 0.9

    def _file_size(self, descriptor: int) -> int:
        return self._files[descriptor].mapped_size()

    def _map(self, descriptor: int, start: int, end: int) -> mmap.mmap:
        return cast("mmap.mmap", self._files[descriptor].mapped(start, end))
