"""The durable manifests of all archived partitions, and the only way to change them.

A change is one step: its files are written and named, its manifest is committed, and only then is
it visible here. Changes of one partition run one after the other; changes of different partitions
wait for each other only in the disk's lane. A change that has begun is completed even if its caller
no longer waits. Files that a change dropped are removed when no `Pin` has them any more.

Log and archive always meet, even after a crash at any point:

    archive   |first ······ next|            the log's first offset is never beyond the archive's
    log                  |first ······ end|  next; records in both are trimmed from the log

An empty archive begins where the log begins. When the log is trimmed, an empty archive therefore
moves in memory, and its manifest is not written again.

After a failed change it is unknown which manifest is on disk. So its version is never used again,
and nothing is removed until another change has succeeded.

A partition whose manifest is damaged, or whose archive and log do not meet, has a *problem*: the
broker serves its log, and its archive as far as it is known, and neither archives nor trims it.
`open_partition` tries again.

Not thread-safe: call from the event loop. Blocking work runs in the disk's lane "archive".
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar
from weakref import WeakValueDictionary

from quackmq.archive import layout as files
from quackmq.archive import limits, manifest
from quackmq.archive.manifest import Manifest
from quackmq.archive.manifest_pointers import ManifestPointers
from quackmq.archive.partition_archive import (
    PartitionArchive,
    unknown_partition_error,
    without_traceback,
)
from quackmq.archive.pins import Pin
from quackmq.disk import interface as disks
from quackmq.errors import (
    BrokerClosing,
    DamagedData,
    InvalidRequest,
    LimitReached,
    NotFound,
    QuackError,
    StorageError,
    UnknownTopic,
    WriteFailed,
)
from quackmq.failure_log import FailureLog
from quackmq.model.topic import PartitionKey, Topic
from quackmq.records.batch import Buffer
from quackmq.stores.contract import Store
from quackmq.tasks import TaskSet, report_bugs

if TYPE_CHECKING:
    from quackmq.archive.parquet.reader import ArchiveReader

T = TypeVar("T")
_OpenFiles = Callable[["Disk", PartitionKey, str, int, str], Manifest]
log = logging.getLogger("quackmq.archive")


class Disk(disks.Disk, Protocol):
    """`disk.Disk`, with the lanes that the archive uses."""

    async def run(self, function: Callable[[], T], lane: Literal["read", "archive"]) -> T: ...

    def location(self, path: str) -> str:
        """Return the absolute path, for other programs on this machine."""


class ManifestRegistry:
    def __init__(self, disk: Disk, log_store: Store) -> None:
        self.disk = disk
        self._reader: ArchiveReader | None = None
        self._reader_lock = threading.Lock()
        self._log = log_store
        self._pointers = ManifestPointers(log_store)
        self._partitions: dict[PartitionKey, PartitionArchive] = {}
        self._changed: dict[PartitionKey, None] = {}
        self._pins = 0
        #: Deleted topics whose archive still exists, and why.
        self._left_behind: FailureLog[uuid.UUID, tuple[Topic, str]] = FailureLog()
        #: Why the archive cannot be read at all, or None.
        self._failure: StorageError | None = None
        self._tasks = TaskSet()
        self._loading = asyncio.Lock()
        self._locks: WeakValueDictionary[PartitionKey, asyncio.Lock] = WeakValueDictionary()
        self._is_closed = False

    def __len__(self) -> int:
        """The number of known partitions. It is at least 1 if the archive cannot be read, so that
        no caller takes the archive for empty."""
        return len(self._partitions) if self._failure is None else max(1, len(self._partitions))

    @property
    def reader(self) -> ArchiveReader:
        """The reader, for lanes only: the first call loads Parquet, which takes time and memory."""
        with self._reader_lock:
            if self._reader is None:
                from quackmq.archive.parquet.reader import ArchiveReader

                self._reader = ArchiveReader(self.disk)
            return self._reader

    async def load_reader(self) -> None:
        """Load the Parquet library, if anything is archived. Loading blocks the loop for a fifth of
        a second, whichever thread does it: so call this before the broker serves clients."""
        if any(
            each.manifest is not None and each.manifest.files for each in self._partitions.values()
        ):
            try:
                await self.disk.run(lambda: self.reader, "read")
            except Exception:
                log.exception("cannot load the Parquet library: archived records are unreadable")

    @property
    def loaded_reader(self) -> ArchiveReader | None:
        """The reader, for the loop: None until it is loaded."""
        return self._reader

    # --- state -------------------------------------------------------------------------------

    def manifest(self, key: PartitionKey) -> Manifest | None:
        """Return the durable manifest; None if nothing is archived, or if that is unknown."""
        partition = self._partitions.get(key)
        return None if partition is None else partition.manifest

    def size(self, key: PartitionKey) -> int:
        """Return the bytes of the archived files."""
        partition = self._partitions.get(key)
        return 0 if partition is None else partition.size

    def holds(self, key: PartitionKey, offset: int) -> bool:
        """Return whether an offset is in a partition's archive."""
        partition = self._partitions.get(key)
        if partition is None or partition.manifest is None:
            return False
        return partition.manifest.first_offset <= offset < partition.manifest.next_offset

    def problem(self, key: PartitionKey) -> QuackError | None:
        """Return the error that keeps a partition from being archived and trimmed, or None."""
        partition = self._partitions.get(key)
        if partition is not None and partition.problem is not None:
            return partition.problem
        return self._failure

    def unavailable(self, key: PartitionKey) -> QuackError | None:
        """Return the error that hides this partition's manifest, or None."""
        partition = self._partitions.get(key)
        if partition is None:
            return self._failure
        is_known = partition.manifest is not None or partition.is_new
        return None if is_known else partition.problem

    def problems(self) -> Mapping[PartitionKey, QuackError]:
        """Return the problems of all partitions that have one."""
        partitions = self._partitions.items()
        return {key: each.problem for key, each in partitions if each.problem is not None}

    def left_behind(self) -> list[str]:
        """Describe the archives of deleted topics that could not be removed."""
        return [description for _, description in self._left_behind.failures()]

    @property
    def failure(self) -> StorageError | None:
        """The error because of which the archive cannot be read at all, or None."""
        return self._failure

    def pin(self, key: PartitionKey) -> Pin:
        """Return the current manifest of a partition; its files stay until the pin is released.
        Raises UnknownPartition if there is none, LimitReached."""
        self.check_open()
        partition = self._find_opened(key)
        if self._pins >= limits.ARCHIVE_PINS:
            raise LimitReached(f"{self._pins} manifests are already in use: try again later")
        self._pins += 1
        pinned = partition.pin()
        return Pin(pinned, lambda: self._release_pin(partition, pinned))

    # --- changes -----------------------------------------------------------------------------

    async def open_partition(self, topic: Topic, key: PartitionKey, first_offset: int) -> Manifest:
        """Open a partition for changes; return its manifest. If nothing is archived yet, it is an
        empty one from `first_offset` on, or from where the log begins if that is later. Raises
        DamagedData, StorageError; UnknownTopic if the topic is deleted."""
        if self._failure is not None:
            await self._run_shielded(self._reload())
        partition = self._partitions.get(key)
        if partition is None:
            # Raise if the topic does not exist. If it is deleted later, `forget` is called.
            await self._log.offsets(key)
            new_partition = PartitionArchive(key, topic.name, self._lock_of(key), is_new=True)
            partition = self._partitions.setdefault(key, new_partition)
        return await self._run_shielded(self._open(partition, first_offset, files.claim_partition))

    async def change(
        self,
        key: PartitionKey,
        make: Callable[[Manifest], Manifest],
        files: Sequence[tuple[str, Buffer]] = (),
    ) -> Manifest:
        """Commit the manifest that `make` returns for the current one, with the files that it adds,
        by name. Return the committed manifest. If `make` raises, nothing changes. Raises
        StorageError if the disk fails, and then nothing changes; UnknownPartition unless opened."""
        return await self._run_shielded(self._change(self._find_opened(key), make, files, ()))

    async def replace(
        self, key: PartitionKey, make: Callable[[Manifest], Manifest], offered: Sequence[str]
    ) -> Manifest:
        """Commit as `change` does, with files that already are in the partition's directory under
        the `offered` names, in the order in which `make` adds them."""
        return await self._run_shielded(self._change(self._find_opened(key), make, (), offered))

    def changeable(self) -> list[Manifest]:
        """Return the manifests of all partitions without a problem."""
        return [
            each.manifest
            for each in self._partitions.values()
            if each.manifest is not None and each.problem is None
        ]

    async def trim(self, key: PartitionKey, before: int) -> None:
        """Delete everything before an offset, in the archive and then in the log, as one step: a
        running archive job does not bring it back. Raises the partition's problem, unless the trim
        removes its cause, and the errors of the log's trim."""
        await self._run_shielded(self._trim(key, before))

    async def forget(self, topic: Topic) -> None:
        """Remove the archive of a deleted topic. A failure is reported by `left_behind`, and
        retried by `remove_left_behind`, and at the next opening."""
        deleted_keys = [key for key in self._partitions if key.topic_id == topic.id]
        for key in deleted_keys:
            self._partitions.pop(key).is_deleted = True
        if deleted_keys:
            await self._run_shielded(self._remove(topic))
            await self._run_shielded(self._pointers.remove(deleted_keys))

    async def remove_left_behind(self) -> None:
        """Retry to remove the archives of deleted topics."""
        for topic, _ in list(self._left_behind.failures()):
            await self._run_shielded(self._remove(topic))

    # --- opening and closing -----------------------------------------------------------------

    async def load(self, topics: Mapping[str, Topic]) -> None:
        """Read all manifests, once, before anything else. A damaged or unreadable partition gets a
        problem; the others are opened all the same."""
        try:
            scan = await self.disk.run(partial(files.scan_archive, self.disk, topics), "archive")
        except OSError as error:
            if self._failure is None:
                log.error("the archive cannot be read: %s; the log is kept", error)
            self._failure = StorageError(f"the archive cannot be read: {error}")
            return
        for name, damage in scan.damaged.items():
            for number in range(topics[name].partitions):
                key = PartitionKey(topics[name].id, number)
                self._partitions[key] = PartitionArchive(
                    key, name, self._lock_of(key), problem=damage
                )
            log.error("topic %s: %s; it is not archived, and its log is kept", name, damage)
        await self._pointers.remove_others({topic.id for topic in topics.values()})
        opening: list[PartitionArchive] = []
        for name, numbers in scan.partitions.items():
            for number in numbers:
                key = PartitionKey(topics[name].id, number)
                # Until it is read, nothing may treat the archive as empty.
                unread = StorageError(f"topic {name}, partition {number}: archive not read yet")
                self._partitions[key] = PartitionArchive(
                    key, name, self._lock_of(key), problem=unread
                )
                opening.append(self._partitions[key])
        self._failure = None
        for partition in opening:
            try:
                await self._open(partition, 0, files.open_partition)
            except NotFound:  # the topic was deleted meanwhile
                self._partitions.pop(partition.key, None)
            except QuackError as error:
                _log_problem(partition, error)

    async def close(self) -> None:
        """Wait until all running changes are done; the caller closes the disk. Every later change
        raises BrokerClosing."""
        self._is_closed = True
        await self._tasks.finish()

    def check_open(self) -> None:
        """Raise BrokerClosing if the archive is closed."""
        if self._is_closed:
            raise BrokerClosing("the archive is closed")

    # --- carrying out ------------------------------------------------------------------------

    async def _reload(self) -> None:
        """Read all manifests again after the archive could not be read. Raises the error if it
        still cannot. If several callers wait, only the first one reads."""
        async with self._loading:
            if self._failure is not None:
                await self.load(await self._log.topics())
            if self._failure is not None:
                raise without_traceback(self._failure)

    async def _open(
        self, partition: PartitionArchive, first_offset: int, open_files: _OpenFiles
    ) -> Manifest:
        """Read a partition's manifest with `open_files` and make archive and log meet; return the
        manifest. Return the known one if the partition is already open and has no problem. An error
        is stored as the partition's problem, and raised."""
        async with partition.lock:
            if partition.manifest is not None and partition.problem is None:
                return partition.manifest
            key, topic = partition.key, partition.topic
            try:
                offsets = await self._log.offsets(key)
                begin = max(first_offset, offsets.first)
                name = partition.manifest_name = await self._pointers.find(key)
                manifest_on_disk = await self.disk.run(
                    partial(open_files, self.disk, key, topic, begin, name), "archive"
                )
                if partition.is_deleted:
                    raise UnknownTopic(f"topic {topic} was deleted")
                await self._reconcile_with_log(partition, manifest_on_disk)
            except OSError as error:
                partition.problem = _storage_error(partition, error)
                raise partition.problem from error
            except StorageError as error:
                partition.problem = error
                raise
            partition.problem = None
            return partition.require_changeable()

    async def _reconcile_with_log(
        self, partition: PartitionArchive, manifest_on_disk: Manifest
    ) -> None:
        """Make log and archive meet after a crash between two of their changes. Raises DamagedData
        if records between them are missing."""
        key = partition.key
        first_in_log = (await self._log.offsets(key)).first
        if not manifest_on_disk.files:
            start = max(manifest_on_disk.first_offset, first_in_log)
            manifest_on_disk = dataclasses.replace(
                manifest_on_disk, first_offset=start, next_offset=start
            )
        partition.set_manifest(manifest_on_disk, self._changed)
        assert partition.manifest is not None
        if manifest_on_disk.files and manifest_on_disk.next_offset < first_in_log:
            raise DamagedData(
                f"topic {partition.topic}, partition {key.partition}: the archive ends at offset "
                f"{manifest_on_disk.next_offset - 1}, the log begins at {first_in_log}: the "
                "records between are missing; restore the archive from a backup, or trim to where "
                "the log begins",
                first_in_log,
            )
        if first_in_log < partition.manifest.next_offset:
            name = partition.manifest_name
            await self.disk.run(
                partial(self._verify_and_commit, manifest_on_disk, name, first_in_log), "archive"
            )
            end = (await self._log.offsets(key)).next
            await self._log.trim(key, min(end, partition.manifest.next_offset))

    def _verify_and_commit(
        self, manifest_on_disk: Manifest, manifest_name: str, first_in_log: int
    ) -> None:
        """In the archive lane, before the log deletes records from `first_in_log` on: check that
        all of them can be read from the archive, and make the manifest durable, since an earlier
        sync may have failed."""
        for file in manifest_on_disk.files:
            if file.next_offset > first_in_log:
                self.reader.verify(manifest_on_disk, file)
        for quarantined in manifest_on_disk.quarantined:
            if quarantined.next_offset > first_in_log:
                self.reader.verify(manifest_on_disk, quarantined)
        files.commit(self.disk, manifest_on_disk, manifest_name)

    async def _change(
        self,
        partition: PartitionArchive,
        make: Callable[[Manifest], Manifest],
        new_files: Sequence[tuple[str, Buffer]],
        offered: Sequence[str],
    ) -> Manifest:
        """Commit the manifest that `make` returns, while no other change of the partition runs.
        Write nothing if `make` returns the current manifest."""
        async with partition.lock:
            current = partition.require_changeable()
            changed = make(current)
            if changed is not current:
                await self._commit(partition, current, changed, new_files, offered)
            return changed

    async def _trim(self, key: PartitionKey, before: int) -> None:
        """Trim the archive and then the log, while no other change of the partition runs."""
        async with self._lock_of(key):
            if (unavailable := self.unavailable(key)) is not None:
                raise without_traceback(unavailable)
            first_in_log = (await self._log.offsets(key)).first
            partition = self._partitions.get(key)
            if partition is not None and partition.manifest is not None:
                # A trim that reaches the log drops the whole archive, and with it the problem.
                if partition.problem is not None and before < first_in_log:
                    raise without_traceback(partition.problem)
                await self._trim_archive(partition, partition.manifest, before)
            if before > first_in_log:
                await self._log.trim(key, before)

    async def _trim_archive(
        self, partition: PartitionArchive, current: Manifest, before: int
    ) -> None:
        """Trim only the archive. Call with the partition's lock held."""
        if before <= current.first_offset:
            return
        trimmed = manifest.trim(current, before)
        # A failed change may have left files on disk that must not come back.
        if current.files or partition.commit_unknown:
            await self._commit(partition, current, trimmed, ())
        else:
            partition.set_manifest(
                dataclasses.replace(trimmed, version=current.version), self._changed
            )
        if not trimmed.files:
            partition.problem = None  # there is no archive any more that must meet the log

    async def _commit(
        self,
        partition: PartitionArchive,
        older: Manifest,
        changed: Manifest,
        new_files: Sequence[tuple[str, Buffer]],
        offered: Sequence[str] = (),
    ) -> None:
        """Make a changed manifest and its new files durable, and then visible. Start a sweep if the
        change has dropped files. Call with the partition's lock held."""
        # The names that only the changed manifest has are those of the new files. The lengths may
        # differ: then `_check_names` raises.
        renames = list(zip(offered, manifest.dropped_names(changed, older), strict=False))
        _check_names(
            older, changed, [*(name for name, _ in new_files), *(name for _, name in renames)]
        )
        name = await self._pointers.new_name(changed)
        try:
            await self.disk.run(partial(self._write, changed, name, new_files, renames), "archive")
            await self._pointers.move(partition.key, name)
        except (OSError, WriteFailed) as error:
            # Either manifest may be on disk. Keep the older one in memory, but under the new
            # version, so that this version is never used for another manifest.
            partition.commit_unknown = partition.has_orphans = True
            partition.set_manifest(
                dataclasses.replace(older, version=changed.version), self._changed
            )
            if isinstance(error, WriteFailed):
                raise
            raise _storage_error(partition, error) from error
        if partition.is_deleted:
            raise UnknownTopic(f"topic {partition.topic} was deleted")
        partition.commit_unknown = False
        partition.manifest_name = name
        partition.set_manifest(changed, self._changed)
        if partition.has_orphans or manifest.dropped_names(older, changed):
            partition.has_orphans = True
            self._start_sweep(partition)

    def _write(
        self,
        manifest_: Manifest,
        manifest_name: str,
        new_files: Sequence[tuple[str, Buffer]],
        renames: Sequence[tuple[str, str]],
    ) -> None:
        """Write the new files, rename the offered ones and commit the manifest, in the archive
        lane."""
        for name, content in new_files:
            files.write_file(self.disk, manifest_.topic, manifest_.key.partition, name, content)
        for offered, name in renames:
            files.adopt_offered(self.disk, manifest_.topic, manifest_.key.partition, offered, name)
        files.commit(self.disk, manifest_, manifest_name)

    async def _remove(self, topic: Topic) -> None:
        """Remove the archive of a deleted topic. If this fails, remember the topic for
        `remove_left_behind`, up to a bound; the next opening removes the others."""
        try:
            await self.disk.run(partial(files.remove_topic, self.disk, topic), "archive")
        except (OSError, DamagedData) as error:
            description = (
                f"topic {topic.name} was deleted, but its archive could not be removed: {error}"
            )
            is_full = len(self._left_behind) >= limits.ARCHIVE_FAILURES
            if is_full and topic.id not in self._left_behind:
                log.warning(description)
            elif self._left_behind.record(topic.id, (topic, description)):
                log.warning(description)
        else:
            self._left_behind.resolve(topic.id)

    # --- sweeping ----------------------------------------------------------------------------

    def _release_pin(self, partition: PartitionArchive, pinned: Manifest) -> None:
        """Release a pin; sweep if it was the last one of its version and files may be unused
        now."""
        self._pins -= 1
        if partition.unpin(pinned) and partition.has_orphans and not self._is_closed:
            self._start_sweep(partition)

    def _start_sweep(self, partition: PartitionArchive) -> None:
        self.start_task(self._sweep(partition)).add_done_callback(report_bugs)

    async def _sweep(self, partition: PartitionArchive) -> None:
        """Remove the files that are neither in the manifest nor pinned."""
        async with partition.lock:
            current = partition.manifest
            if current is None or partition.is_deleted or partition.commit_unknown:
                return
            in_use, name = partition.names_in_use(), partition.manifest_name
            sweep = partial(files.sweep, self.disk, current, in_use, name)
            try:
                await self.disk.run(sweep, "archive")
            except OSError as error:
                log.warning(
                    "topic %s, partition %d: files of the archive that are no longer needed could "
                    "not be removed: %s",
                    *(partition.topic, partition.key.partition, error),
                )
                return
            # Files that only pinned manifests list are left: the release of a pin sweeps again.
            partition.has_orphans = not in_use <= set(manifest.list_names(current))

    # --- helpers -----------------------------------------------------------------------------

    def _lock_of(self, key: PartitionKey) -> asyncio.Lock:
        """Return the lock of a partition. All callers that use it at the same time get the same
        one; it is forgotten when no caller has it."""
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock

    def _find_opened(self, key: PartitionKey) -> PartitionArchive:
        """Return the state of a partition. Raises UnknownPartition if it has no known manifest."""
        partition = self._partitions.get(key)
        if partition is None or partition.manifest is None:
            raise unknown_partition_error(key)
        return partition

    async def _run_shielded(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a change to its end, even if the caller is cancelled; return its result."""
        if self._is_closed:
            work.close()
            self.check_open()
        return await self._tasks.run_shielded(work)

    def take_changed(self) -> Sequence[PartitionKey]:
        """Return the partitions with manifests changed since the last call. Only for one caller."""
        changed, self._changed = self._changed, {}
        return list(changed)

    def start_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that handles its own errors; `close` waits for it."""
        return self._tasks.start(work)


def _check_names(older: Manifest, changed: Manifest, supplied: Sequence[str]) -> None:
    """Check that a change supplies exactly the files that its manifest adds. Raises
    InvalidRequest."""
    added = manifest.dropped_names(changed, older)
    if set(supplied) != set(added):
        raise InvalidRequest(
            f"a change supplies {', '.join(sorted(supplied)) or 'no files'} but lists "
            f"{', '.join(added) or 'none'} as new"
        )
    if changed.key != older.key or changed.version != older.version + 1:
        raise InvalidRequest("a change must make the next version of the same manifest")


def _storage_error(partition: PartitionArchive, error: OSError) -> StorageError:
    return StorageError(
        f"topic {partition.topic}, partition {partition.key.partition}: cannot write or read its "
        f"archive: {error}"
    )


def _log_problem(partition: PartitionArchive, error: QuackError) -> None:
    log.error(
        "topic %s, partition %d is not archived, and its log is kept: %s",
        *(partition.topic, partition.key.partition, error),
    )
