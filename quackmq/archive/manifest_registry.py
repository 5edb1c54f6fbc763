"""The manifests of all archived partitions, as they are durable; and the only way to change them.

A change is one step: its files are written and named, its manifest is committed, and only then is
it visible here. Changes of one partition run one after the other; changes of different partitions
wait for each other only in the disk's lane. A change that has begun is completed even if its caller
no longer waits. Files that a change dropped are removed when no `Pin` has them any more.

Log and archive are kept in step, even over a crash at any point:

    archive   |first ······ next|            the log's first offset is never beyond the archive's
    log                  |first ······ end|  next; records in both are trimmed from the log

An empty archive has no position of its own: it begins where the log does, and moving it is not
worth a write. After a failed change it is unknown which manifest is on disk. So its version is
never used again, and nothing is removed until another change has succeeded.

A partition whose manifest is damaged, or whose archive and log do not meet, has a *problem*: its
log is served, its archive as far as it is known, and nothing of it is archived or trimmed. Opening
it again tries again.

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
    UnknownPartition,
    UnknownTopic,
)
from quackmq.model.topic import PartitionKey, Topic
from quackmq.records.batch import Buffer
from quackmq.stores.contract import Store

if TYPE_CHECKING:
    from quackmq.archive.parquet.reader import ArchiveReader

T = TypeVar("T")
_OpenFiles = Callable[["Disk", PartitionKey, str, int], Manifest]
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
        self._known: dict[PartitionKey, _Partition] = {}
        self._changed: dict[PartitionKey, None] = {}
        self._pins = 0
        #: Deleted topics whose archive still exists, and why.
        self._left: dict[uuid.UUID, tuple[Topic, str]] = {}
        #: Why the archive cannot be read at all, or None.
        self._failure: StorageError | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loading = asyncio.Lock()
        self._locks: WeakValueDictionary[PartitionKey, asyncio.Lock] = WeakValueDictionary()
        self._closed = False

    def __len__(self) -> int:
        """The number of known partitions; at least 1 if the archive cannot be read."""
        return len(self._known) if self._failure is None else max(1, len(self._known))

    @property
    def reader(self) -> ArchiveReader:
        """The reader, for lanes only: the first call loads Parquet, which takes time and memory."""
        with self._reader_lock:
            if self._reader is None:
                from quackmq.archive.parquet.reader import ArchiveReader

                self._reader = ArchiveReader(self.disk)
            return self._reader

    async def load_reader(self) -> None:
        """Load the Parquet library, if anything is archived. In any thread, it blocks the loop for
        a fifth of a second: so call it before anybody is served."""
        if any(each.manifest is not None and each.manifest.files for each in self._known.values()):
            try:
                await self.disk.run(lambda: self.reader, "read")
            except Exception:
                log.exception("what is archived cannot be read; everything else can")

    @property
    def loaded_reader(self) -> ArchiveReader | None:
        """The reader, for the loop: None until it is loaded."""
        return self._reader

    # --- state -------------------------------------------------------------------------------

    def manifest(self, key: PartitionKey) -> Manifest | None:
        """Return the durable manifest; None if nothing is archived, or if that is unknown."""
        partition = self._known.get(key)
        return None if partition is None else partition.manifest

    def size(self, key: PartitionKey) -> int:
        """Return the bytes of the archived files."""
        partition = self._known.get(key)
        return 0 if partition is None else partition.size

    def holds(self, key: PartitionKey, offset: int) -> bool:
        partition = self._known.get(key)
        if partition is None or partition.manifest is None:
            return False
        return partition.manifest.first_offset <= offset < partition.manifest.next_offset

    def problem(self, key: PartitionKey) -> QuackError | None:
        """Return the error that keeps a partition from being archived and trimmed, or None."""
        partition = self._known.get(key)
        if partition is not None and partition.problem is not None:
            return partition.problem
        return self._failure

    def unavailable(self, key: PartitionKey) -> QuackError | None:
        """Return the error that hides this partition's manifest, or None."""
        partition = self._known.get(key)
        if partition is None:
            return self._failure
        is_known = partition.manifest is not None or partition.is_new
        return None if is_known else partition.problem

    def problems(self) -> Mapping[PartitionKey, QuackError]:
        """Return the problems of all partitions that have one."""
        known = self._known.items()
        return {key: each.problem for key, each in known if each.problem is not None}

    def left_behind(self) -> list[str]:
        """Describe the archives of deleted topics that could not be removed."""
        return [why for _, why in self._left.values()]

    @property
    def failure(self) -> StorageError | None:
        """The error because of which the archive cannot be read at all, or None."""
        return self._failure

    def pin(self, key: PartitionKey) -> Pin:
        """Return the current manifest of a partition; its files stay until the pin is released.
        Raises UnknownPartition if there is none, LimitReached."""
        self.check_open()
        partition = self._ready(key)
        if self._pins >= limits.ARCHIVE_PINS:
            raise LimitReached(f"{self._pins} manifests are already in use: try again later")
        self._pins += 1
        held = partition.hold()
        return Pin(held, lambda: self._released(partition, held))

    # --- changes -----------------------------------------------------------------------------

    async def open_partition(self, topic: Topic, key: PartitionKey, first_offset: int) -> Manifest:
        """Open a partition for changes; return its manifest. If nothing is archived yet, it is an
        empty one from `first_offset` on, or from where the log begins if that is later. Raises
        DamagedData, StorageError; UnknownTopic if the topic is deleted."""
        if self._failure is not None:
            await self._carry_out(self._load_again())
        partition = self._known.get(key)
        if partition is None:
            await self._log.offsets(
                key
            )  # raises if it does not exist; if it is deleted later, `forget` is called
            made = _Partition(key, topic.name, self._lock(key), is_new=True)
            partition = self._known.setdefault(key, made)
        return await self._carry_out(self._open(partition, first_offset, files.take_partition))

    async def change(
        self,
        key: PartitionKey,
        make: Callable[[Manifest], Manifest],
        files: Sequence[tuple[str, Buffer]] = (),
    ) -> Manifest:
        """Commit the manifest that `make` returns for the current one, with the files that it adds,
        by name. Return the committed manifest. If `make` raises, nothing changes. Raises
        StorageError if the disk fails, and then nothing changes; UnknownPartition unless opened."""
        return await self._carry_out(self._change(self._ready(key), make, files, ()))

    async def replace(
        self, key: PartitionKey, make: Callable[[Manifest], Manifest], offered: Sequence[str]
    ) -> Manifest:
        """Commit as `change` does, with files that already are in the partition's directory under
        the `offered` names, in the order in which `make` adds them."""
        return await self._carry_out(self._change(self._ready(key), make, (), offered))

    def all(self) -> list[Manifest]:
        """Return every manifest that may be changed."""
        return [
            each.manifest
            for each in self._known.values()
            if each.manifest is not None and each.problem is None
        ]

    async def trim(self, key: PartitionKey, before: int) -> None:
        """Delete everything before an offset, in the archive and then in the log, as one step: a
        running archive job does not bring it back. Raises the partition's problem, unless the trim
        removes its cause, and the errors of the log's trim."""
        await self._carry_out(self._trim(key, before))

    async def forget(self, topic: Topic) -> None:
        """Remove the archive of a deleted topic. A failure is reported by `left_behind`, and
        retried by `remove_left_behind`, and at the next opening."""
        gone = [key for key in self._known if key.topic_id == topic.id]
        for key in gone:
            self._known.pop(key).is_gone = True
        if gone:
            await self._carry_out(self._remove(topic))

    async def remove_left_behind(self) -> None:
        """Retry to remove the archives of deleted topics."""
        for topic, _ in list(self._left.values()):
            await self._carry_out(self._remove(topic))

    # --- opening and closing -----------------------------------------------------------------

    async def load(self, topics: Mapping[str, Topic]) -> None:
        """Read all manifests, once, before anything else. A damaged or unreadable partition gets a
        problem; the others are opened all the same."""
        try:
            found = await self.disk.run(partial(files.survey, self.disk, topics), "archive")
        except OSError as error:
            if self._failure is None:
                log.error("the archive cannot be read: %s; the log is kept", error)
            self._failure = StorageError(f"the archive cannot be read: {error}")
            return
        for name, damage in found.damaged.items():
            for number in range(topics[name].partitions):
                key = PartitionKey(topics[name].id, number)
                self._known[key] = _Partition(key, name, self._lock(key), problem=damage)
            log.error("topic %s: %s; it is not archived, and its log is kept", name, damage)
        opening: list[_Partition] = []
        for name, numbers in found.partitions.items():
            for number in numbers:
                key = PartitionKey(topics[name].id, number)
                # Until it is read: nobody may take it for empty.
                unread = StorageError(f"topic {name}, partition {number}: archive not read yet")
                self._known[key] = _Partition(key, name, self._lock(key), problem=unread)
                opening.append(self._known[key])
        self._failure = None
        for partition in opening:
            try:
                await self._open(partition, 0, files.open_partition)
            except NotFound:  # the topic was deleted meanwhile
                self._known.pop(partition.key, None)
            except QuackError as error:
                _report(partition, error)

    async def close(self) -> None:
        """Return when all running changes are done; the caller closes the disk. Every later change
        raises BrokerClosing."""
        self._closed = True
        while self._tasks:
            await asyncio.wait(self._tasks)

    def check_open(self) -> None:
        if self._closed:
            raise BrokerClosing("the archive is closed")

    # --- carrying out ------------------------------------------------------------------------

    async def _load_again(self) -> None:
        async with self._loading:
            if self._failure is not None:
                await self.load(await self._log.topics())
            if self._failure is not None:
                raise _anew(self._failure)

    async def _open(
        self, partition: _Partition, first_offset: int, open_files: _OpenFiles
    ) -> Manifest:
        async with partition.lock:
            if partition.manifest is not None and partition.problem is None:
                return partition.manifest
            key, topic = partition.key, partition.topic
            try:
                offsets = await self._log.offsets(key)
                begin = max(first_offset, offsets.first)
                found = await self.disk.run(
                    partial(open_files, self.disk, key, topic, begin), "archive"
                )
                if partition.is_gone:
                    raise UnknownTopic(f"topic {topic} was deleted")
                await self._adopt(partition, found)
            except OSError as error:
                partition.problem = _failed(partition, error)
                raise partition.problem from error
            except StorageError as error:
                partition.problem = error
                raise
            partition.problem = None
            return partition.usable()

    async def _adopt(self, partition: _Partition, found: Manifest) -> None:
        """Bring log and archive into step after a crash between two of their changes."""
        key = partition.key
        first_in_log = (await self._log.offsets(key)).first
        if not found.files:
            place = max(found.first_offset, first_in_log)
            found = dataclasses.replace(found, first_offset=place, next_offset=place)
        partition.take(found, self._changed)
        assert partition.manifest is not None
        if found.files and found.next_offset < first_in_log:
            raise DamagedData(
                f"topic {partition.topic}, partition {key.partition}: the archive ends at offset "
                f"{found.next_offset - 1}, the log begins at {first_in_log}: the records between "
                "are missing; restore the archive from a backup, or trim to where the log begins",
                first_in_log,
            )
        if first_in_log < partition.manifest.next_offset:
            await self.disk.run(partial(self._make_sure, found, first_in_log), "archive")
            end = (await self._log.offsets(key)).next
            await self._log.trim(key, min(end, partition.manifest.next_offset))

    def _make_sure(self, found: Manifest, first_in_log: int) -> None:
        """In the archive lane, before the log deletes its records from an offset on: check that all
        of them can be read, and make the manifest durable, whatever happened to an earlier sync."""
        for file in found.files:
            if file.next_offset > first_in_log:
                self.reader.verify(found, file)
        for aside in found.quarantined:
            if aside.next_offset > first_in_log:
                self.reader.verify(found, aside)
        files.commit(self.disk, found)

    async def _change(
        self,
        partition: _Partition,
        make: Callable[[Manifest], Manifest],
        data: Sequence[tuple[str, Buffer]],
        offered: Sequence[str],
    ) -> Manifest:
        async with partition.lock:
            present = partition.usable()
            made = make(present)
            if made is not present:
                await self._commit(partition, present, made, data, offered)
            return made

    async def _trim(self, key: PartitionKey, before: int) -> None:
        async with self._lock(key):
            if (unavailable := self.unavailable(key)) is not None:
                raise _anew(unavailable)
            first_in_log = (await self._log.offsets(key)).first
            partition = self._known.get(key)
            if partition is not None and partition.manifest is not None:
                if partition.problem is not None and before < first_in_log:
                    raise _anew(partition.problem)
                await self._trim_archive(partition, partition.manifest, before)
            if before > first_in_log:
                await self._log.trim(key, before)

    async def _trim_archive(self, partition: _Partition, present: Manifest, before: int) -> None:
        """Call with the partition's lock held."""
        if before <= present.first_offset:
            return
        trimmed = manifest.trim(present, before)
        # A failed change may have left files on disk that must not come back.
        if present.files or partition.is_unsure:
            await self._commit(partition, present, trimmed, ())
        else:
            partition.take(dataclasses.replace(trimmed, version=present.version), self._changed)
        if not trimmed.files:
            partition.problem = None  # the archive that did not meet the log is gone

    async def _commit(
        self,
        partition: _Partition,
        older: Manifest,
        made: Manifest,
        data: Sequence[tuple[str, Buffer]],
        offered: Sequence[str] = (),
    ) -> None:
        """Call with the partition's lock held."""
        taken = list(zip(offered, manifest.dropped(made, older), strict=False))
        _check_names(older, made, [*(name for name, _ in data), *(name for _, name in taken)])
        try:
            await self.disk.run(partial(self._write, made, data, taken), "archive")
        except OSError as error:
            partition.is_unsure = partition.is_unswept = True
            partition.take(dataclasses.replace(older, version=made.version), self._changed)
            raise _failed(partition, error) from error
        if partition.is_gone:
            raise UnknownTopic(f"topic {partition.topic} was deleted")
        partition.is_unsure = False
        partition.take(made, self._changed)
        if partition.is_unswept or manifest.dropped(older, made):
            partition.is_unswept = True
            self._sweep_soon(partition)

    def _write(
        self,
        made: Manifest,
        data: Sequence[tuple[str, Buffer]],
        taken: Sequence[tuple[str, str]],
    ) -> None:
        """Write in the archive lane."""
        for name, content in data:
            files.write_file(self.disk, made.topic, made.key.partition, name, content)
        for offered, name in taken:
            files.take_offered(self.disk, made.topic, made.key.partition, offered, name)
        files.commit(self.disk, made)

    async def _remove(self, topic: Topic) -> None:
        try:
            await self.disk.run(partial(files.remove_topic, self.disk, topic), "archive")
        except (OSError, DamagedData) as error:
            why = f"topic {topic.name} was deleted, but its archive could not be removed: {error}"
            if topic.id not in self._left:
                log.warning(why)
            if topic.id in self._left or len(self._left) < limits.ARCHIVE_FAILURES:
                self._left[topic.id] = topic, why
        else:
            self._left.pop(topic.id, None)

    # --- sweeping ----------------------------------------------------------------------------

    def _released(self, partition: _Partition, held: Manifest) -> None:
        self._pins -= 1
        if partition.let_go(held) and partition.is_unswept and not self._closed:
            self._sweep_soon(partition)

    def _sweep_soon(self, partition: _Partition) -> None:
        self.begin(self._sweep(partition))

    async def _sweep(self, partition: _Partition) -> None:
        """Remove the files that are neither in the manifest nor pinned."""
        async with partition.lock:
            present = partition.manifest
            if present is None or partition.is_gone or partition.is_unsure:
                return
            in_use = partition.names_in_use()
            try:
                await self.disk.run(partial(files.sweep, self.disk, present, in_use), "archive")
            except OSError as error:
                log.warning(
                    "topic %s, partition %d: files of the archive that are no longer needed could "
                    "not be removed: %s",
                    *(partition.topic, partition.key.partition, error),
                )
                return
            partition.is_unswept = not in_use <= set(manifest.names_of(present))

    # --- helpers -----------------------------------------------------------------------------

    def _lock(self, key: PartitionKey) -> asyncio.Lock:
        """Return a partition's lock; it is shared while any caller has it."""
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock

    def _ready(self, key: PartitionKey) -> _Partition:
        partition = self._known.get(key)
        if partition is None or partition.manifest is None:
            raise _unknown(key)
        return partition

    async def _carry_out(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end, even if the caller is cancelled."""
        if self._closed:
            work.close()
            self.check_open()
        return await asyncio.shield(self.begin(work))

    def take_changed(self) -> Sequence[PartitionKey]:
        """Return the partitions with manifests changed since the last call. Only for one caller."""
        changed, self._changed = self._changed, {}
        return list(changed)

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task; `close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a waiting caller gets it; if there is none, nobody needs it


class _Partition:
    """The state of one partition. Hold its lock to change any of it on disk."""

    def __init__(
        self,
        key: PartitionKey,
        topic: str,
        lock: asyncio.Lock,
        problem: QuackError | None = None,
        is_new: bool = False,
    ) -> None:
        self.key = key
        self.topic = topic
        self.lock = lock
        self.problem = problem
        #: Whether nothing of it was archived when the broker was opened.
        self.is_new = is_new
        self.manifest: Manifest | None = None
        self.size = 0
        self.is_gone = False
        #: Whether the last change failed: its manifest may be on disk, or the one before.
        self.is_unsure = False
        #: Whether there may be files that no manifest needs.
        self.is_unswept = False
        #: Pinned manifests by version, and how often each is pinned.
        self._held: dict[int, tuple[Manifest, int]] = {}

    def take(self, present: Manifest, changed: dict[PartitionKey, None]) -> None:
        changed[self.key] = None
        self.manifest = present
        self.size = present.size

    def usable(self) -> Manifest:
        """Return the manifest if it may be changed; raise otherwise."""
        if self.is_gone or self.manifest is None:
            raise _unknown(self.key)
        if self.problem is not None:
            raise _anew(self.problem)
        return self.manifest

    def hold(self) -> Manifest:
        assert self.manifest is not None
        version = self.manifest.version
        held, count = self._held.get(version, (self.manifest, 0))
        self._held[version] = held, count + 1
        return self.manifest

    def let_go(self, held: Manifest) -> bool:
        """Release one pin; return whether that version is no longer pinned."""
        _, count = self._held[held.version]
        if count > 1:
            self._held[held.version] = held, count - 1
            return False
        del self._held[held.version]
        return True

    def names_in_use(self) -> set[str]:
        return {name for held, _ in self._held.values() for name in manifest.names_of(held)}


def _check_names(older: Manifest, made: Manifest, given: Sequence[str]) -> None:
    missing = manifest.dropped(made, older)
    if set(given) != set(missing):
        raise InvalidRequest(
            f"a change supplies {', '.join(sorted(given)) or 'no files'} but lists "
            f"{', '.join(missing) or 'none'} as new"
        )
    if made.key != older.key or made.version != older.version + 1:
        raise InvalidRequest("a change must make the next version of the same manifest")


def _anew(problem: QuackError) -> QuackError:
    """Drop the traceback of earlier raises, which the error would keep."""
    return problem.with_traceback(None)


def _unknown(key: PartitionKey) -> UnknownPartition:
    return UnknownPartition(f"partition {key.partition} of {key.topic_id} is not archived")


def _failed(partition: _Partition, error: OSError) -> StorageError:
    return StorageError(
        f"topic {partition.topic}, partition {partition.key.partition}: cannot write or read its "
        f"archive: {error}"
    )


def _report(partition: _Partition, error: QuackError) -> None:
    log.error(
        "topic %s, partition %d is not archived, and its log is kept: %s",
        *(partition.topic, partition.key.partition, error),
    )
