"""Runs the merges that `planner` plans inside the broker, one by one, beside all other work.

A merge reads the old files one row group at a time and writes the new file as it grows, under a
name of offered files. When the new file is complete and durable, one change of the manifest
replaces the old ones by it. Readers notice nothing: the files of an older manifest are kept until
it is released. Records that are archived or trimmed meanwhile do no harm. If an old file was
removed, the merge is dropped and planned again.

Promised: memory for a few row groups, whatever the files' sizes. The disk's lane does one row
group's work at a time, and rests after it. A crash leaves the old files or the new one. An
unreadable file is reported and left alone until the broker is opened again. A partition whose merge
fails is reported too, and retried later, while others are merged. If the disk is full, all wait.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from quackmq.archive import limits
from quackmq.archive import manifest as manifests
from quackmq.archive.archiving.schedule import is_no_room
from quackmq.archive.manifest import ArchiveFile, Manifest
from quackmq.archive.manifest_registry import ManifestRegistry
from quackmq.archive.merging.planner import Merge, MergeSettings, Unreadable, plan
from quackmq.errors import (
    NotFound,
    QuackError,
    StateChanged,
    StorageError,
)
from quackmq.model.topic import PartitionKey

if TYPE_CHECKING:
    from quackmq.archive.merging.merge import MergeWork

log = logging.getLogger("quackmq.archive")

#: The plan under which the broker's own files are offered.
PLAN: Final = "merger"


class Merged(NamedTuple):
    """The result of merges: their number, and the files and bytes before and after."""

    merges: int = 0
    files_before: int = 0
    files_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0

    def plus(self, other: Merged) -> Merged:
        return Merged(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Merger:
    def __init__(
        self,
        partitions: ManifestRegistry,
        settings: MergeSettings = MergeSettings(),  # noqa: B008  (frozen)
    ) -> None:
        self.settings = settings
        self._partitions = partitions
        self._disk = partitions.disk
        self._one_at_a_time = asyncio.Lock()
        self._numbers = iter(range(1, 2**63))
        #: The version of each partition's manifest that needed no merge.
        self._done: dict[PartitionKey, int] = {}
        #: Unreadable files, and why.
        self._unreadable: dict[PartitionKey, dict[str, str]] = {}
        #: The errors of merges that will be retried.
        self._failures: dict[PartitionKey, QuackError] = {}
        self._total = Merged()

    @property
    def total(self) -> Merged:
        """The result of all merges since the broker was opened."""
        return self._total

    def problems(self) -> list[str]:
        """Return one line for each failing merge and each unreadable file."""
        unreadable = [reason for each in self._unreadable.values() for reason in each.values()]
        return [*map(str, self._failures.values()), *unreadable]

    async def merge_due(self) -> Merged:
        """Make all merges that are worth it now, in partitions that changed since the last check;
        rest after each step. Partitions take turns, merge by merge. Raise the first error after the
        others are done."""
        listed = {each.key: each for each in self._partitions.all()}
        self._done = {key: at for key, at in self._done.items() if key in listed}
        self._unreadable = {k: why for k, why in self._unreadable.items() if k in listed}
        self._failures = {key: why for key, why in self._failures.items() if key in listed}
        waiting = {
            key: each.next_offset
            for key, each in listed.items()
            if self._done.get(key) != each.version
        }
        return await self._merge_all(waiting, limits.MERGE_DUTY)

    async def merge(self, keys: Collection[PartitionKey]) -> Merged:
        """Make the merges of these partitions, without rest."""
        listed = {each.key: each.next_offset for each in self._partitions.all()}
        return await self._merge_all({key: listed[key] for key in keys if key in listed}, 1.0)

    async def _merge_all(self, ends: Mapping[PartitionKey, int], duty: float) -> Merged:
        """Merge in these partitions up to these offsets; later files are left for another time."""
        done = Merged()
        failed: QuackError | None = None
        waiting = list(ends)
        while waiting:
            again: list[PartitionKey] = []
            for key in waiting:
                try:
                    merged = await self._merge_one(key, ends[key], duty)
                except NotFound:  # the topic was deleted meanwhile
                    continue
                except QuackError as error:
                    if self._partitions.manifest(key) is None:
                        continue  # the files were removed with the topic
                    self._note(key, error)
                    if is_no_room(error):
                        raise
                    failed = failed or error
                    continue
                if merged is not None:
                    done = done.plus(merged)
                    again.append(key)
            waiting = again
        if failed is not None:
            raise failed
        return done

    async def _merge_one(self, key: PartitionKey, end: int, duty: float) -> Merged | None:
        """Make the first merge that is worth it; return None if there is none."""
        async with self._one_at_a_time:
            with self._partitions.pin(key) as pin:
                listed = pin.manifest
                planned: list[Merge] = []
                excluded = self._excluded(listed)
                if len(listed.files) > 1 or listed.edge is not None:
                    make = partial(plan, listed, self.settings, excluded)
                    planned = await self._disk.run(make, "archive")
                if not planned:
                    self._done[key] = listed.version
                    self._failures.pop(key, None)
                for merge in planned:
                    if merge.next_offset <= end:
                        return await self._carry_out(listed, merge, duty)
                return None

    def _excluded(self, listed: Manifest) -> frozenset[str]:
        """Return the unreadable files that are still in the manifest."""
        known = self._unreadable.pop(listed.key, {})
        if known:
            names = {file.name for file in listed.files}
            known = {name: why for name, why in known.items() if name in names}
        if known:
            self._unreadable[listed.key] = known
        return frozenset(known)

    async def _carry_out(self, listed: Manifest, merge: Merge, duty: float) -> Merged:
        name = manifests.offered_name(PLAN, str(next(self._numbers)))
        work = await self._disk.run(partial(self._begin, listed, merge, name), "archive")
        try:
            await self._make(work, duty)
            make = partial(_replaced, merge=merge, file=work.made)
            await self._partitions.replace(listed.key, make, [name])
        except Unreadable as error:
            log.error("not merged: %s", error)
            self._unreadable.setdefault(listed.key, {})[error.name] = str(error)
            return Merged()
        except StateChanged as error:
            log.info("a merge was dropped: %s", error)
            await self._undo(work)
            return Merged()
        except QuackError:
            await self._undo(work)
            raise
        self._failures.pop(listed.key, None)
        merged = Merged(1, len(merge.files), 1, merge.size, work.made.size)
        self._total = self._total.plus(merged)
        log.info(
            "topic %s, partition %d: %d files became one",
            *(listed.topic, listed.key.partition, len(merge.files)),
        )
        return merged

    def _begin(self, listed: Manifest, merge: Merge, name: str) -> MergeWork:
        """In the archive lane: importing the Parquet library may take a while."""
        from quackmq.archive.merging.merge import MergeWork

        return MergeWork(self._disk, self._partitions.reader, listed, merge, name)

    async def _make(self, work: MergeWork, duty: float) -> None:
        """Write the new file; remove it if this fails."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            while await self._disk.run(work.step, "archive"):
                await asyncio.sleep((loop.time() - began) * (1 / duty - 1))
                began = loop.time()
        except OSError as error:
            await self._undo(work)
            # Without the file's name, which differs each time, so that the error is logged once.
            why = error.strerror or error
            raise StorageError(f"{work.directory}: cannot merge files: {why}") from error
        except (QuackError, Unreadable, asyncio.CancelledError):
            await self._undo(work)
            raise

    def _note(self, key: PartitionKey, error: QuackError) -> None:
        """Record an error; log it unless it is the same as before."""
        if str(self._failures.get(key)) != str(error):
            log.warning("a merge failed; it will be retried: %s", error)
        self._failures[key] = error

    async def _undo(self, work: MergeWork) -> None:
        try:
            await self._disk.run(work.undo, "archive")
        except OSError as error:
            log.warning("cannot remove %s: %s; the next start removes it", work.path, error)


def _replaced(present: Manifest, *, merge: Merge, file: ArchiveFile) -> Manifest:
    name = manifests.file_name(file.first_offset, present.version + 1)
    new = dataclasses.replace(file, name=name)
    return manifests.replace(present, merge.names, [new], merge.version)
