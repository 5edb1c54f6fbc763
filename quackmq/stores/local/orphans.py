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
from collections.abc import Callable, Sequence
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


class _OpenedPartition(NamedTuple):
    """The next offset of a partition, and its segments' base offsets, when the store opened."""

    end_offset: int
    base_offsets: frozenset[int]


class OrphanFiles:
    """The files that may be removed. The removals run in the checkpoint lane."""

    def __init__(self, disk: Disk, recovered: Recovered, *, clean: bool) -> None:
        """List the files. After a clean close only packs can be left: the process may have ended
        before it removed them."""
        existing_packs = packs.list_packs(disk)
        self._disk = disk
        self._packs = [number for number in existing_packs if number not in recovered.packed.sizes]
        names = [] if clean else disk.list(LOG_DIRECTORY)
        partitions_by_topic: dict[str, dict[int, _OpenedPartition]] = {
            name: {} for name in names if _TOPIC_DIRECTORY.fullmatch(name)
        }
        for key, log in recovered.logs.items():
            partitions = partitions_by_topic.get(key.topic_id.hex)
            if partitions is not None:
                base_offsets = frozenset(segment.base_offset for segment in log.segments)
                partitions[key.partition] = _OpenedPartition(log.end_offset, base_offsets)
        #: The partitions that existed, by topic directory; none for a deleted topic.
        self._directories = partitions_by_topic

    def __bool__(self) -> bool:
        return bool(self._packs or self._directories)

    async def sweep(self, remover: Packs) -> None:
        """Remove the files. Log a failure; the rest is then removed after the next crash."""
        try:
            for pack in self._packs:
                await self._run(partial(self._remove_pack, remover, pack))
            directories = list(self._directories)
            for start in range(0, len(directories), limits.SWEPT_AT_ONCE):
                some_directories = directories[start : start + limits.SWEPT_AT_ONCE]
                await self._run(partial(self._sweep_directories, remover, some_directories))
        except OSError as error:
            _logger.warning("unused files could not be removed: %s", error)

    async def _run(self, work: Callable[[], None]) -> None:
        await self._disk.run(work, "checkpoint")

    def _remove_pack(self, remover: Packs, pack: int) -> None:
        remover.remove(packs.pack_path(pack))

    def _sweep_directories(self, remover: Packs, topics: Sequence[str]) -> None:
        for topic in topics:
            directory, partitions = f"{LOG_DIRECTORY}/{topic}", self._directories[topic]
            for name in self._disk.list(directory):
                if not partitions or _is_orphan(name, partitions):
                    remover.remove(f"{directory}/{name}")
            if not partitions:
                with suppress(FileNotFoundError):
                    self._disk.remove(directory)


def _is_orphan(name: str, partitions: dict[int, _OpenedPartition]) -> bool:
    match = _SEGMENT_FILE.fullmatch(name)
    if match is None:
        return False  # not a file of the store
    partition = partitions.get(int(match[1]))
    base_offset = int(match[2])
    if partition is None or base_offset >= partition.end_offset:
        return False
    return base_offset not in partition.base_offsets
