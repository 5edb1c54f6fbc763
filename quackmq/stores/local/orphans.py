"""The sweep after a crash: removes files that nothing refers to, while the store is in use.

A crash may leave files of deleted topics and segments, and packs that no checkpoint names. Nobody
waits for their removal, so it is done after the store is ready, a few directories at a time.

What to remove was decided when the store was opened, from the directories and packs that existed
and the segments of each partition then. So no file that was created later is removed. A file whose
name a later segment may get is left alone: its base offset had not been assigned yet.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from quackmq.disk.real import Disk
from quackmq.stores import limits
from quackmq.stores.local.files import packs
from quackmq.stores.local.files.packs import Packs
from quackmq.stores.local.files.segment import DIRECTORY as LOG_DIRECTORY
from quackmq.stores.local.recovery import Recovered

_logger = logging.getLogger("quackmq.store")
_TOPIC_DIRECTORY: Final = re.compile("[0-9a-f]{32}")
_SEGMENT_FILE: Final = re.compile(r"(\d+)-(\d{20})\.(log|index|aborted)")


class _Known(NamedTuple):
    """The state of a partition when opened: its next offset, and its segments' base offsets."""

    end: int
    bases: frozenset[int]


class Leftovers:
    """The files that may be removed. The removals run in the checkpoint lane."""

    def __init__(self, disk: Disk, recovered: Recovered, *, clean: bool) -> None:
        """For a store that was closed cleanly, only packs: its process may have ended before it
        removed them."""
        there = packs.listed(disk)
        self._disk = disk
        self._packs = [number for number in there if number not in recovered.packed.sizes]
        names = [] if clean else disk.list(LOG_DIRECTORY)
        known: dict[str, dict[int, _Known]] = {
            name: {} for name in names if _TOPIC_DIRECTORY.fullmatch(name)
        }
        for key, log in recovered.logs.items():
            partitions = known.get(key.topic_id.hex)
            if partitions is not None:
                bases = frozenset(segment.base_offset for segment in log.segments)
                partitions[key.partition] = _Known(log.end, bases)
        self._directories = known

    def __bool__(self) -> bool:
        return bool(self._packs or self._directories)

    async def sweep(self, files: Packs) -> None:
        """Remove them. A failure is logged; the rest is removed after the next crash."""
        try:
            for pack in self._packs:
                await self._run(partial(self._remove_pack, files, pack))
            names = list(self._directories)
            for at in range(0, len(names), limits.SWEPT_AT_ONCE):
                some = names[at : at + limits.SWEPT_AT_ONCE]
                await self._run(partial(self._sweep_some, files, some))
        except OSError as error:
            _logger.warning("unused files could not be removed: %s", error)

    async def _run(self, work: Callable[[], None]) -> None:
        await self._disk.run(work, "checkpoint")

    def _remove_pack(self, files: Packs, pack: int) -> None:
        files.remove(packs.pack_path(pack))

    def _sweep_some(self, files: Packs, names: Sequence[str]) -> None:
        for name in names:
            directory, partitions = f"{LOG_DIRECTORY}/{name}", self._directories[name]
            found = self._disk.list(directory)
            if partitions:
                found = [each for each in found if _is_orphan(each, partitions)]
            self._remove(files, (f"{directory}/{each}" for each in found))
            if not partitions:
                with suppress(FileNotFoundError):
                    self._disk.remove(directory)

    def _remove(self, files: Packs, paths: Iterable[str]) -> None:
        for path in paths:
            files.remove(path)


def _is_orphan(name: str, partitions: dict[int, _Known]) -> bool:
    found = _SEGMENT_FILE.fullmatch(name)
    if found is None:
        return False  # not ours
    known = partitions.get(int(found[1]))
    base_offset = int(found[2])
    return known is not None and base_offset < known.end and base_offset not in known.bases
