"""Runs the merges that `planner` plans inside the broker, one by one, beside all other work.

A merge reads the old files one row group at a time and writes the new file as it grows, under a
name of offered files. When the new file is complete and durable, one change of the manifest
replaces the old ones by it. Readers notice nothing: the files of an older manifest are kept until
it is released. Records that are archived or trimmed meanwhile do no harm. If an old file was
removed, the merge is dropped and planned again.

Promised: memory for a few row groups, whatever the files' sizes. The disk's lane does one row
group's work at a time, and pauses after it. A crash leaves the old files or the new one. An
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
from quackmq.archive.merging.planner import Merge, MergeSettings, UnreadableFile, plan
from quackmq.errors import (
    NotFound,
    QuackError,
    StateChanged,
    StorageError,
)
from quackmq.failure_log import FailureLog
from quackmq.model.topic import PartitionKey

if TYPE_CHECKING:
    from quackmq.archive.merging.merge import MergeWork

log = logging.getLogger("quackmq.archive")

#: The plan under which the broker's own files are offered.
PLAN: Final = "merger"


class MergeResult(NamedTuple):
    """The result of merges: their number, and the files and bytes before and after."""

    merges: int = 0
    files_before: int = 0
    files_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0

    def plus(self, other: MergeResult) -> MergeResult:
        return MergeResult(*(left + right for left, right in zip(self, other, strict=True)))


class Merger:
    def __init__(
        self,
        registry: ManifestRegistry,
        settings: MergeSettings = MergeSettings(),  # noqa: B008  (frozen)
    ) -> None:
        self.settings = settings
        self._registry = registry
        self._disk = registry.disk
        self._merge_lock = asyncio.Lock()
        self._numbers = iter(range(1, 2**63))
        #: By partition, the version of its manifest that needed no merge.
        self._finished_versions: dict[PartitionKey, int] = {}
        #: By partition, the errors of unreadable files by name.
        self._unreadable: dict[PartitionKey, dict[str, str]] = {}
        #: The errors of merges that will be retried.
        self._failures: FailureLog[PartitionKey, QuackError] = FailureLog()
        self._total = MergeResult()

    @property
    def total(self) -> MergeResult:
        """The result of all merges since the broker was opened."""
        return self._total

    def problems(self) -> list[str]:
        """Return one line for each failing merge and each unreadable file."""
        unreadable = [reason for each in self._unreadable.values() for reason in each.values()]
        return [*map(str, self._failures.failures()), *unreadable]

    async def merge_due(self) -> MergeResult:
        """Run all merges that are worth it now, in partitions that changed since the last check;
        pause after each step. Merges of different partitions alternate. Raises the first error,
        after the other merges are done."""
        manifest_by_key = {each.key: each for each in self._registry.changeable()}
        self._finished_versions = {
            key: at for key, at in self._finished_versions.items() if key in manifest_by_key
        }
        self._unreadable = {
            key: errors for key, errors in self._unreadable.items() if key in manifest_by_key
        }
        self._failures.keep_only(manifest_by_key)
        end_by_key = {
            key: each.next_offset
            for key, each in manifest_by_key.items()
            if self._finished_versions.get(key) != each.version
        }
        return await self._merge_all(end_by_key, limits.MERGE_DUTY)

    async def merge(self, keys: Collection[PartitionKey]) -> MergeResult:
        """Run the merges of these partitions without pauses."""
        end_by_key = {each.key: each.next_offset for each in self._registry.changeable()}
        return await self._merge_all(
            {key: end_by_key[key] for key in keys if key in end_by_key}, 1.0
        )

    async def _merge_all(self, end_by_key: Mapping[PartitionKey, int], duty: float) -> MergeResult:
        """Merge files of these partitions up to these offsets; leave later files to another
        call."""
        result = MergeResult()
        first_error: QuackError | None = None
        keys = list(end_by_key)
        while keys:
            unfinished_keys: list[PartitionKey] = []
            for key in keys:
                try:
                    merged = await self._merge_one(key, end_by_key[key], duty)
                except NotFound:  # the topic was deleted meanwhile
                    continue
                except QuackError as error:
                    if self._registry.manifest(key) is None:
                        continue  # the files were removed with the topic
                    if self._failures.record(key, error, kind=str(error)):
                        log.warning("a merge failed; it will be retried: %s", error)
                    if is_no_room(error):
                        raise  # the merges of the other partitions would fail too
                    first_error = first_error or error
                    continue
                if merged is not None:
                    result = result.plus(merged)
                    unfinished_keys.append(key)
            keys = unfinished_keys
        if first_error is not None:
            raise first_error
        return result

    async def _merge_one(self, key: PartitionKey, end: int, duty: float) -> MergeResult | None:
        """Run the first merge that is worth it; return None if there is none."""
        async with self._merge_lock:
            with self._registry.pin(key) as pin:
                manifest = pin.manifest
                planned: list[Merge] = []
                excluded = self._excluded(manifest)
                if len(manifest.files) > 1 or manifest.edge is not None:
                    make = partial(plan, manifest, self.settings, excluded)
                    planned = await self._disk.run(make, "archive")
                if not planned:
                    self._finished_versions[key] = manifest.version
                    self._failures.resolve(key)
                for merge in planned:
                    if merge.next_offset <= end:
                        return await self._run_merge(manifest, merge, duty)
                return None

    def _excluded(self, manifest: Manifest) -> frozenset[str]:
        """Return the unreadable files that are still in the manifest."""
        unreadable = self._unreadable.pop(manifest.key, {})
        if unreadable:
            names = {file.name for file in manifest.files}
            unreadable = {name: error for name, error in unreadable.items() if name in names}
        if unreadable:
            self._unreadable[manifest.key] = unreadable
        return frozenset(unreadable)

    async def _run_merge(self, manifest: Manifest, merge: Merge, duty: float) -> MergeResult:
        """Write the new file and replace the old ones by it; return the result. Return an empty
        result, not None, if an old file is unreadable or was removed: then the partition is planned
        again."""
        name = manifests.offered_name(PLAN, str(next(self._numbers)))
        work = await self._disk.run(partial(self._start_work, manifest, merge, name), "archive")
        try:
            await self._write_file(work, duty)
            make = partial(_replace_files, merge=merge, file=work.new_file)
            await self._registry.replace(manifest.key, make, [name])
        except UnreadableFile as error:
            # `_write_file` has removed the new file. The next plan leaves the unreadable one out.
            log.error("not merged: %s", error)
            self._unreadable.setdefault(manifest.key, {})[error.name] = str(error)
            return MergeResult()
        except StateChanged as error:
            log.info("a merge was dropped: %s", error)
            await self._undo(work)
            return MergeResult()
        except QuackError:
            await self._undo(work)
            raise
        self._failures.resolve(manifest.key)
        merged = MergeResult(1, len(merge.files), 1, merge.size, work.new_file.size)
        self._total = self._total.plus(merged)
        log.info(
            "topic %s, partition %d: %d files became one",
            *(manifest.topic, manifest.key.partition, len(merge.files)),
        )
        return merged

    def _start_work(self, manifest: Manifest, merge: Merge, name: str) -> MergeWork:
        """Begin a merge in the archive lane: importing the Parquet library may take a while."""
        from quackmq.archive.merging.merge import MergeWork

        return MergeWork(self._disk, self._registry.reader, manifest, merge, name)

    async def _write_file(self, work: MergeWork, duty: float) -> None:
        """Write the new file; remove it if this fails."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        try:
            while await self._disk.run(work.step, "archive"):
                # Pause so that the work takes the share `duty` of the time: not at all if it is 1.
                await asyncio.sleep((loop.time() - started_at) * (1 / duty - 1))
                started_at = loop.time()
        except OSError as error:
            await self._undo(work)
            # Without the file's name, which differs each time, so that the error is logged once.
            reason = error.strerror or error
            raise StorageError(f"{work.directory}: cannot merge files: {reason}") from error
        except (QuackError, UnreadableFile, asyncio.CancelledError):
            await self._undo(work)
            raise

    async def _undo(self, work: MergeWork) -> None:
        """Remove the new file of a merge. A failure is only logged, since the next opening of the
        partition removes the file."""
        try:
            await self._disk.run(work.undo, "archive")
        except OSError as error:
            log.warning("cannot remove %s: %s; the next start removes it", work.path, error)


def _replace_files(current: Manifest, *, merge: Merge, file: ArchiveFile) -> Manifest:
    """Return the manifest with the new file in the place of the merged ones. The file gets its
    final name here, because that contains the version that adds it."""
    name = manifests.file_name(file.first_offset, current.version + 1)
    new = dataclasses.replace(file, name=name)
    return manifests.replace(current, merge.names, [new], merge.version)
