"""Which partitions are archived, by manifests that are durable; and the one way to change them.

A change is a step: its files are written and named, its manifest is committed, and only then does
it count here. Changes of a partition come one after the other; those of different partitions wait
for each other in the disk's lane alone. A change that has begun is carried out, also if whoever
asked for it no longer waits. What a change dropped is removed when no `Pin` has it any more.

Log and archive are kept in step, also over a crash at any point:

    archive   |first ······ next|            the log's first offset is never beyond the archive's
    log                  |first ······ end|  next; what both have is trimmed from the log

An archive that holds nothing has no place of its own: it begins where the log does, and moving it
is not worth a write. After a change that failed nobody knows which manifest the disk holds, so its
version is never given again and nothing is removed until another change has succeeded.

A partition whose manifest is damaged, or whose archive and log do not meet, has a *problem*: its
log is served, its archive as far as it is known, and nothing of it is archived or trimmed. Opening
it again tries again.

Who may call: the loop. Blocking work goes to the disk's lane "archive".
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
    """As there, with the lanes that the archive uses."""

    async def run(self, function: Callable[[], T], lane: Literal["read", "archive"]) -> T: ...

    def location(self, path: str) -> str:
        """Where a path lies for other programs of this machine."""


class ManifestRegistry:
    def __init__(self, disk: Disk, log_store: Store) -> None:
        self.disk = disk
        self._reader: ArchiveReader | None = None
        self._reader_lock = threading.Lock()
        self._log = log_store
        self._known: dict[PartitionKey, _Partition] = {}
        self._changed: dict[PartitionKey, None] = {}
        self._pins = 0
        #: Topics that were deleted, and why their archive is still there.
        self._left: dict[uuid.UUID, tuple[Topic, str]] = {}
        #: Why nothing at all is known of the archive, where that is so.
        self._failure: StorageError | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loading = asyncio.Lock()
        self._locks: WeakValueDictionary[PartitionKey, asyncio.Lock] = WeakValueDictionary()
        self._closed = False

    def __len__(self) -> int:
        """How many partitions there is anything to say of."""
        return len(self._known) if self._failure is None else max(1, len(self._known))

    @property
    def reader(self) -> ArchiveReader:
        """For lanes only: the first call loads what reads Parquet, which takes time and memory."""
        with self._reader_lock:
            if self._reader is None:
                from quackmq.archive.parquet.reader import ArchiveReader

                self._reader = ArchiveReader(self.disk)
            return self._reader

    async def load_reader(self) -> None:
        """Load what reads Parquet, if anything is archived. Whichever thread loads it, the loop
        stands still for a fifth of a second: so call this before anybody is served."""
        if any(each.manifest is not None and each.manifest.files for each in self._known.values()):
            try:
                await self.disk.run(lambda: self.reader, "read")
            except Exception:
                log.exception("what is archived cannot be read; everything else can")

    @property
    def loaded_reader(self) -> ArchiveReader | None:
        """The same for the loop: None until somebody has read."""
        return self._reader

    # --- what is known -----------------------------------------------------------------------

    def manifest(self, key: PartitionKey) -> Manifest | None:
        """As it is durable; None where nothing is archived, or where it cannot be told what is."""
        partition = self._known.get(key)
        return None if partition is None else partition.manifest

    def size(self, key: PartitionKey) -> int:
        """Bytes of what is archived."""
        partition = self._known.get(key)
        return 0 if partition is None else partition.size

    def holds(self, key: PartitionKey, offset: int) -> bool:
        partition = self._known.get(key)
        if partition is None or partition.manifest is None:
            return False
        return partition.manifest.first_offset <= offset < partition.manifest.next_offset

    def problem(self, key: PartitionKey) -> QuackError | None:
        """Why a partition is not archived and not trimmed, where that is so."""
        partition = self._known.get(key)
        if partition is not None and partition.problem is not None:
            return partition.problem
        return self._failure

    def unavailable(self, key: PartitionKey) -> QuackError | None:
        """Why it cannot be told what is archived of a partition, where that is so."""
        partition = self._known.get(key)
        if partition is None:
            return self._failure
        is_known = partition.manifest is not None or partition.is_new
        return None if is_known else partition.problem

    def problems(self) -> Mapping[PartitionKey, QuackError]:
        """Of all partitions that have one."""
        known = self._known.items()
        return {key: each.problem for key, each in known if each.problem is not None}

    def left_behind(self) -> list[str]:
        """What is still there of topics that were deleted, and why."""
        return [why for _, why in self._left.values()]

    @property
    def failure(self) -> StorageError | None:
        """Why nothing at all is known of the archive, where that is so."""
        return self._failure

    def pin(self, key: PartitionKey) -> Pin:
        """The present manifest of a partition, whose files stay until the pin is released.
        UnknownPartition where there is none; LimitReached."""
        self.check_open()
        partition = self._ready(key)
        if self._pins >= limits.ARCHIVE_PINS:
            raise LimitReached(f"{self._pins} manifests are held already: try again later")
        self._pins += 1
        held = partition.hold()
        return Pin(held, lambda: self._released(partition, held))

    # --- changes -----------------------------------------------------------------------------

    async def open_partition(self, topic: Topic, key: PartitionKey, first_offset: int) -> Manifest:
        """The manifest of a partition, which from now on may be changed: an empty one from
        `first_offset` on, or from where the log begins if that is later, if nothing is archived
        yet. DamagedData, StorageError; UnknownTopic if it is gone."""
        if self._failure is not None:
            await self._carry_out(self._load_again())
        partition = self._known.get(key)
        if partition is None:
            await self._log.offsets(
                key
            )  # raises if there is none; while there is, `forget` will come
            made = _Partition(key, topic.name, self._lock(key), is_new=True)
            partition = self._known.setdefault(key, made)
        return await self._carry_out(self._open(partition, first_offset, files.take_partition))

    async def change(
        self,
        key: PartitionKey,
        make: Callable[[Manifest], Manifest],
        files: Sequence[tuple[str, Buffer]] = (),
    ) -> Manifest:
        """Commit what `make` makes of the present manifest, with the files that it lists anew, by
        name; the manifest that counts now. What `make` raises changes nothing. StorageError where
        the disk fails: nothing counts then that did not before. UnknownPartition unless opened."""
        return await self._carry_out(self._change(self._ready(key), make, files, ()))

    async def replace(
        self, key: PartitionKey, make: Callable[[Manifest], Manifest], offered: Sequence[str]
    ) -> Manifest:
        """The same with files that lie in the partition's directory under the names that they are
        `offered` by, in the order of those that `make` lists anew."""
        return await self._carry_out(self._change(self._ready(key), make, (), offered))

    def all(self) -> list[Manifest]:
        """Of every partition that has one and may be changed."""
        return [
            each.manifest
            for each in self._known.values()
            if each.manifest is not None and each.problem is None
        ]

    async def trim(self, key: PartitionKey, before: int) -> None:
        """Let go of what lies before an offset, in the archive and then in the log, with nobody in
        between: what is being archived now is not brought back. Raises what is the partition's
        problem, unless that goes with what is let go of; and what the log's trim raises."""
        await self._carry_out(self._trim(key, before))

    async def forget(self, topic: Topic) -> None:
        """A topic was deleted: its archive goes. What fails is told by `left_behind`, and tried
        again by `remove_left_behind`, and at the next opening."""
        gone = [key for key in self._known if key.topic_id == topic.id]
        for key in gone:
            self._known.pop(key).is_gone = True
        if gone:
            await self._carry_out(self._remove(topic))

    async def remove_left_behind(self) -> None:
        """Of topics that were deleted, what could not be removed then."""
        for topic, _ in list(self._left.values()):
            await self._carry_out(self._remove(topic))

    # --- opening and closing -----------------------------------------------------------------

    async def load(self, topics: Mapping[str, Topic]) -> None:
        """Everything that is archived, once, before anything else. What is damaged, or cannot be
        read, is named and keeps nothing else from being opened."""
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
                # Until it is known what it holds: nobody takes that for nothing.
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
        """Returns when what was begun is done; the disk is the caller's to close. Every later
        change raises BrokerClosing."""
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
        """Bring log and archive into step, whatever a crash left between two of their changes."""
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
                f"{found.next_offset - 1}, the log begins at {first_in_log}: what lies between is "
                "missing; restore the archive from a copy, or trim to where the log begins",
                first_in_log,
            )
        if first_in_log < partition.manifest.next_offset:
            await self.disk.run(partial(self._make_sure, found, first_in_log), "archive")
            end = (await self._log.offsets(key)).next
            await self._log.trim(key, min(end, partition.manifest.next_offset))

    def _make_sure(self, found: Manifest, first_in_log: int) -> None:
        """In the archive lane, before the log lets go of what it has from an offset on: all of it
        can be read, and the manifest is durable, whatever became of an earlier sync."""
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
        """Under the partition's lock."""
        if before <= present.first_offset:
            return
        trimmed = manifest.trim(present, before)
        # What a failed change may have left on disk must not bring back what goes now.
        if present.files or partition.is_unsure:
            await self._commit(partition, present, trimmed, ())
        else:
            partition.take(dataclasses.replace(trimmed, version=present.version), self._changed)
        if not trimmed.files:
            partition.problem = None  # what did not meet is gone

    async def _commit(
        self,
        partition: _Partition,
        older: Manifest,
        made: Manifest,
        data: Sequence[tuple[str, Buffer]],
        offered: Sequence[str] = (),
    ) -> None:
        """Under the partition's lock."""
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
        """In the archive lane."""
        for name, content in data:
            files.write_file(self.disk, made.topic, made.key.partition, name, content)
        for offered, name in taken:
            files.take_offered(self.disk, made.topic, made.key.partition, offered, name)
        files.commit(self.disk, made)

    async def _remove(self, topic: Topic) -> None:
        try:
            await self.disk.run(partial(files.remove_topic, self.disk, topic), "archive")
        except (OSError, DamagedData) as error:
            why = f"topic {topic.name} was deleted, its archive is still there: {error}"
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
        """Remove what neither the manifest nor a pin has."""
        async with partition.lock:
            present = partition.manifest
            if present is None or partition.is_gone or partition.is_unsure:
                return
            in_use = partition.names_in_use()
            try:
                await self.disk.run(partial(files.sweep, self.disk, present, in_use), "archive")
            except OSError as error:
                log.warning(
                    "topic %s, partition %d: files of the archive that are no longer needed are "
                    "still there: %s",
                    *(partition.topic, partition.key.partition, error),
                )
                return
            partition.is_unswept = not in_use <= set(manifest.names_of(present))

    # --- helpers -----------------------------------------------------------------------------

    def _lock(self, key: PartitionKey) -> asyncio.Lock:
        """The same for all who ask for it while anybody has it."""
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
        """To its end, whether or not the caller stays."""
        if self._closed:
            work.close()
            self.check_open()
        return await asyncio.shield(self.begin(work))

    def take_changed(self) -> Sequence[PartitionKey]:
        """The partitions whose manifests have changed since the last call, for one caller."""
        changed, self._changed = self._changed, {}
        return list(changed)

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Beside everything else; `close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever waits; if they have left, nobody needs to know


class _Partition:
    """What is known of one partition. Its lock is held by whoever changes any of it on disk."""

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
        #: Nothing of it was archived when the broker was opened.
        self.is_new = is_new
        self.manifest: Manifest | None = None
        self.size = 0
        self.is_gone = False
        #: The last change failed: the disk may hold its manifest, or the one before.
        self.is_unsure = False
        #: There may be files that no manifest needs.
        self.is_unswept = False
        #: Manifests that are held, by version, and how often.
        self._held: dict[int, tuple[Manifest, int]] = {}

    def take(self, present: Manifest, changed: dict[PartitionKey, None]) -> None:
        changed[self.key] = None
        self.manifest = present
        self.size = present.size

    def usable(self) -> Manifest:
        """The manifest, if it may be changed."""
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
        """Whether nobody holds that version any more."""
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
            f"a change brings {', '.join(sorted(given)) or 'no files'} and lists "
            f"{', '.join(missing) or 'none'} anew"
        )
    if made.key != older.key or made.version != older.version + 1:
        raise InvalidRequest("a change makes the next version of the same partition's manifest")


def _anew(problem: QuackError) -> QuackError:
    """To be raised again, without the frames of the times before, which it would keep."""
    return problem.with_traceback(None)


def _unknown(key: PartitionKey) -> UnknownPartition:
    return UnknownPartition(f"nothing of partition {key.partition} of {key.topic_id} is archived")


def _failed(partition: _Partition, error: OSError) -> StorageError:
    return StorageError(
        f"topic {partition.topic}, partition {partition.key.partition}: its archive cannot be "
        f"written or read: {error}"
    )


def _report(partition: _Partition, error: QuackError) -> None:
    log.error(
        "topic %s, partition %d is not archived, and its log is kept: %s",
        *(partition.topic, partition.key.partition, error),
    )
