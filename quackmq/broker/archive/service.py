"""The archive as protocols see it: files, plans, replacement of files, archiving and merging on
request, and the archive's health.

A **plan** is a consistent view of a topic's files. A reader with a plan finds all of these files
until it releases the plan or the lease expires. Merging and retention continue meanwhile; files
that they replace or delete stay on disk while a plan has them. Therefore plans are leases that
readers renew, and their number is bounded. Plans are in memory only: after a restart, readers must
plan again.

Other programs may merge files, too. Such a program makes a plan that `offers`, and writes new files
into the partitions' directories, under names that begin with the plan's id. Then it calls
`replace`. The broker reads the offered files and compares them with the files to replace before it
accepts them. When the plan ends, offered files that were not accepted are removed.

Every call names its caller. Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

from quackmq import limits as shared_limits
from quackmq.archive import layout as archive_files
from quackmq.archive import manifest as manifests
from quackmq.archive.manifest import ArchiveFile, Manifest
from quackmq.broker import limits
from quackmq.broker.archive.plans import PartitionArchive, Plan, Plans
from quackmq.broker.lifecycle import Lifecycle
from quackmq.broker.settings import BrokerSettings, Caller
from quackmq.broker.topics import Topics
from quackmq.disk.interface import Disk, read_all
from quackmq.errors import (
    DamagedData,
    InvalidRequest,
    QuackError,
    StorageError,
    UnknownFile,
)
from quackmq.model.topic import PartitionKey, Topic

if TYPE_CHECKING:  # these modules load pyarrow, which a broker without an archive does not need
    from quackmq.archive.archiving.archiver import Archiver, ArchiverState
    from quackmq.archive.archiving.run import ArchiveResult
    from quackmq.archive.manifest_registry import ManifestRegistry
    from quackmq.archive.merging.merger import Merger, MergeResult
    from quackmq.archive.merging.replacement import ReplacementFile
    from quackmq.archive.pins import Pin
    from quackmq.archive.tiered_store import TieredStore

log = logging.getLogger(__name__)

T = TypeVar("T")
#: Returned by `next` after the last step.
_DONE: Final = object()


@dataclass(frozen=True, slots=True)
class TopicArchive:
    """Some partitions of a topic. `next_partition` is the first partition that is not among them;
    None if there are no more. `directory` holds the partitions' directories."""

    topic: Topic
    directory: str
    partitions: tuple[PartitionArchive, ...]
    next_partition: int | None


@dataclass(frozen=True, slots=True)
class ArchiveState:
    """The health of the archive. `problems` lists some of the present problems; each of them needs
    an operator, or time. Meanwhile published records stay in the log."""

    problems: tuple[str, ...]
    archiver: ArchiverState
    merged: MergeResult
    quarantined: int
    #: Descriptions of some quarantined batches, for operators.
    kept_aside: tuple[str, ...]
    plans: int


class Archives:
    """What the protocols call for the archive."""

    def __init__(
        self,
        store: TieredStore,
        archiver: Archiver,
        topics: Topics,
        now_ms: Callable[[], int],
        settings: BrokerSettings,
        lifecycle: Lifecycle,
    ) -> None:
        from quackmq.archive.merging.merger import Merger
        from quackmq.archive.merging.planner import MergeSettings

        self._store = store
        self._registry = store.registry
        self._disk = store.registry.disk
        self._archiver = archiver
        self._topics = topics
        self._merger: Merger = Merger(
            self._registry, MergeSettings(target_bytes=settings.merge_target_bytes)
        )
        #: Compare one replacement at a time, since it takes memory. Offered files are not swept
        #: meanwhile.
        self._replace_lock = asyncio.Lock()
        self._plans = Plans(self._registry, self._describe, now_ms, self._replace_lock)
        self._lifecycle = lifecycle
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Start merging in the background."""
        self._task = asyncio.get_running_loop().create_task(self._merge_periodically())

    async def stop(self) -> None:
        """Stop merging in the background."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """Release all plans. Call this after `stop`, when all changes have ended."""
        await self._plans.close()

    # --- listing and plans ------------------------------------------------------------------

    async def describe(
        self, caller: Caller, topic_name: str, from_partition: int = 0
    ) -> TopicArchive:
        """Describe the present archive of a topic: as many partitions as fit into one response.
        Raise UnknownTopic."""
        self._lifecycle.check_open()
        topic = self._topics.named(topic_name)
        numbers = range(from_partition, topic.partitions)
        partitions = [
            await self._describe(PartitionKey(topic.id, number), self._registry.manifest)
            for number in numbers
        ]
        return self._make_page(topic, _first_page(partitions), numbers)

    async def plan(
        self,
        caller: Caller,
        topic_name: str,
        for_ms: int,
        partitions: Collection[int] | None = None,
        *,
        offers: bool = False,
    ) -> Plan:
        """Make a plan that keeps the present files of a topic, or of some of its partitions, for
        `for_ms`. Raise UnknownTopic, UnknownPartition, InvalidRequest or LimitReached."""
        self._lifecycle.check_open()
        topic = self._topics.named(topic_name)
        numbers = range(topic.partitions) if partitions is None else sorted(set(partitions))
        for number in numbers:
            self._topics.of(PartitionKey(topic.id, number))
        active_plan = await self._plans.make(topic, numbers, for_ms, offers)
        if self._lifecycle.is_closing:  # `close` ended all plans while this one was being made
            self._plans.end(active_plan)
        self._lifecycle.check_open()
        return active_plan.describe()

    async def describe_plan(
        self, caller: Caller, plan_id: str, from_partition: int = 0
    ) -> tuple[Plan, TopicArchive]:
        """Return a plan, and some of its partitions with the files of the plan. Raise
        UnknownPlan."""
        self._lifecycle.check_open()
        active_plan = self._plans.get(plan_id)
        numbers = [number for number in active_plan.partitions if number >= from_partition]
        partitions = _first_page(active_plan.partitions[number] for number in numbers)
        return active_plan.describe(), self._make_page(active_plan.topic, partitions, numbers)

    async def renew(self, caller: Caller, plan_id: str, for_ms: int) -> Plan:
        """Let a plan's lease end `for_ms` from now, even if that is earlier. Raise InvalidRequest
        or UnknownPlan."""
        self._lifecycle.check_open()
        return self._plans.renew(plan_id, for_ms).describe()

    async def release(self, caller: Caller, plan_id: str) -> None:
        """End a plan. Raise UnknownPlan."""
        self._lifecycle.check_open()
        self._plans.end(self._plans.get(plan_id))

    def plans(self, caller: Caller) -> list[Plan]:
        return [active_plan.describe() for active_plan in self._plans.all()]

    # --- bytes ------------------------------------------------------------------------------

    def file_size(self, caller: Caller, topic_name: str, partition: int, name: str) -> int:
        """Return the size of a file that is in the present manifest or in a plan. Raise
        UnknownTopic, UnknownPartition or UnknownFile."""
        _, size, _ = self._find(topic_name, partition, name)
        return size

    def file(self, caller: Caller, topic_name: str, partition: int, name: str) -> FileBytes:
        """Open a file for reading; the caller closes it. Raise the errors of `file_size`, and
        LimitReached."""
        key, size, is_present = self._find(topic_name, partition, name)
        path = f"{archive_files.partition_path(topic_name, partition)}/{name}"
        # A file that only a plan has needs no pin: the plan keeps it.
        pin = self._registry.pin(key) if is_present else None
        return FileBytes(self._store, path, size, pin)

    def _find(self, topic_name: str, partition: int, name: str) -> tuple[PartitionKey, int, bool]:
        """Return the file's partition, its size, and whether the present manifest has it."""
        self._lifecycle.check_open()
        key = PartitionKey(self._topics.named(topic_name).id, partition)
        self._topics.of(key)
        present = self._registry.manifest(key)
        pinned = (active_plan.pinned_manifest(key) for active_plan in self._plans.all())
        for manifest in (present, *pinned):
            size = None if manifest is None else _find_size(manifest, name)
            if size is not None:
                return key, size, manifest is present
        raise UnknownFile(
            f"topic {topic_name}, partition {partition} has no file {name[:100]!r}, or not any "
            "more: list the files, or make a plan that keeps them"
        )

    # --- changes ----------------------------------------------------------------------------

    async def replace(
        self,
        caller: Caller,
        topic_name: str,
        partition: int,
        version: int,
        old: Sequence[str],
        new: Sequence[str],
    ) -> PartitionArchive:
        """Replace the files `old` by the offered files `new`, both ordered by offset, as
        `manifest.replace` does. Return the partition afterwards. Raise UnknownPlan if a file is not
        offered under a living plan, InvalidRequest if the new files do not hold the same records as
        the old ones, StateChanged if the manifest has another version."""
        self._lifecycle.check_open()
        key = PartitionKey(self._topics.named(topic_name).id, partition)
        self._topics.of(key)
        for name in new:
            self._check_offered(name)
        if (
            len(set(new)) != len(new)
            or max(len(new), len(old)) > shared_limits.ARCHIVE_REPLACED_FILES
        ):
            raise InvalidRequest(
                f"name each offered file once, and at most {shared_limits.ARCHIVE_REPLACED_FILES}"
            )
        await self._lifecycle.run_shielded(self._replace(key, version, old, new))
        return await self._describe(key, self._registry.manifest)

    async def archive(self, caller: Caller, topic_name: str) -> ArchiveResult:
        """Archive all decided records of a topic now. Raise UnknownTopic or StorageError."""
        self._lifecycle.check_open()
        self._topics.named(topic_name)
        return await self._archiver.archive(topic_name)

    async def merge(self, caller: Caller, topic_name: str) -> MergeResult:
        """Merge the files of a topic now, where that is worthwhile. Raise UnknownTopic or
        StorageError."""
        self._lifecycle.check_open()
        topic = self._topics.named(topic_name)
        keys = [PartitionKey(topic.id, number) for number in range(topic.partitions)]
        return await self._merger.merge(keys)

    # --- health -----------------------------------------------------------------------------

    def state(self, caller: Caller) -> ArchiveState:
        """Return the health of the archive."""
        archiver = self._archiver.state()
        problems = [
            *(
                _with_partition(each.topic, each.partition, each.reason)
                for each in archiver.failures
            ),
            *_first_few(str(problem) for problem in self._registry.problems().values()),
            *_first_few(self._merger.problems()),
            *_first_few(self._registry.left_behind()),
        ]
        if archiver.no_room is not None:
            problems.insert(0, f"the disk is full: {archiver.no_room}")
        if self._registry.failure is not None:
            problems.insert(0, str(self._registry.failure))
        listed = self._registry.changeable()
        return ArchiveState(
            problems=tuple(dict.fromkeys(problems)),
            archiver=archiver,
            merged=self._merger.total,
            quarantined=sum(len(each.quarantined) for each in listed),
            kept_aside=tuple(_first_few(_describe_quarantined(listed))),
            plans=len(self._plans),
        )

    # --- helpers ----------------------------------------------------------------------------

    async def _describe(
        self, key: PartitionKey, find_manifest: Callable[[PartitionKey], Manifest | None]
    ) -> PartitionArchive:
        """Describe a partition with the manifest that `find_manifest` returns for it."""
        # Read the log's offsets first: the log never begins after the end of a manifest read later.
        offsets = await self._store.log_offsets(key)
        manifest = find_manifest(key) or manifests.empty(key, "", offsets.first)
        if manifest.files:
            first, end = manifest.first_offset, manifest.next_offset
        else:
            first = end = max(manifest.next_offset, offsets.first)
        problem = self._registry.problem(key)
        return PartitionArchive(
            key.partition,
            manifest.version,
            first,
            end,
            offsets.first,
            max(end, offsets.stable),
            offsets.size,
            manifest.files,
            manifest.quarantined,
            None if problem is None else str(problem),
        )

    def _make_page(
        self, topic: Topic, partitions: list[PartitionArchive], numbers: Sequence[int]
    ) -> TopicArchive:
        """Return these partitions, which are the first ones of `numbers`, as one page."""
        next_partition = numbers[len(partitions)] if len(partitions) < len(numbers) else None
        directory = self._disk.location(archive_files.topic_path(topic.name))
        return TopicArchive(topic, directory, tuple(partitions), next_partition)

    # --- offered files ----------------------------------------------------------------------

    async def _replace(
        self, key: PartitionKey, version: int, old: Sequence[str], new: Sequence[str]
    ) -> None:
        """Compare the offered files with the old ones, then replace these in the manifest."""
        async with self._replace_lock:
            with self._registry.pin(key) as pin:
                offered = await self._compare_offered(pin.manifest, old, new, version)
            for name in new:  # the plan may have ended meanwhile
                self._check_offered(name)
            make = partial(_replace_files, old=old, offered=offered, version=version)
            await self._registry.replace(key, make, new)

    def _check_offered(self, name: str) -> None:
        """Check that a name is that of a file offered under a plan. Raise InvalidRequest or
        UnknownPlan."""
        plan_id = manifests.parse_plan(name)
        if plan_id is None:
            raise InvalidRequest(
                f"{name[:100]!r} is not the name of an offered file: use "
                f"{manifests.offered_name('PLAN', 'WORD')}"
            )
        if not self._plans.get(plan_id).offers:
            raise InvalidRequest(f"plan {plan_id} accepts no offered files: make a plan that does")

    async def _compare_offered(
        self, manifest: Manifest, old: Sequence[str], new: Sequence[str], version: int
    ) -> list[ReplacementFile]:
        """Read the offered files, compare them with the files to replace, and return them. Raise if
        they differ."""
        examine = partial(_examine, self._disk, manifest)
        offered = [await self._run_in_lane(partial(examine, name)) for name in new]
        # Call this only for its errors.
        _replace_files(manifest, old=old, offered=offered, version=version)
        file_by_name = {file.name: file for file in manifest.files}
        replaced_files = [file_by_name[name] for name in old]
        compare = partial(_compare, self._registry, manifest, replaced_files, offered)
        steps = await self._run_in_lane(compare)
        while await self._run_in_lane(partial(_run_step, steps)):
            self._lifecycle.check_open()
        return offered

    async def _run_in_lane(self, function: Callable[[], T]) -> T:
        try:
            return await self._disk.run(function, "archive")
        except OSError as error:
            raise StorageError(f"cannot read the offered files: {error}") from error

    async def _merge_periodically(self) -> None:
        """Merge files at intervals, until cancelled."""
        while True:
            await asyncio.sleep(limits.MERGE_INTERVAL_MS / 1000)
            try:
                await self._merger.merge_due()
            except QuackError as error:  # the merger has logged it
                log.debug("merging failed; trying again later: %s", error)
            except Exception:
                log.exception("merging failed; trying again later")


class FileBytes:
    """A file of the archive, read in pieces. It stays on disk until this is closed, or its plan
    ends."""

    def __init__(self, store: TieredStore, path: str, size: int, pin: Pin | None) -> None:
        self.size = size
        self._disk = store.registry.disk
        self._path = path
        self._pin = pin

    async def read(self, position: int, length: int) -> bytes:
        """Read exactly `length` bytes. Raise UnknownFile if the plan that had the file has ended,
        DamagedData if the file is missing or too short, or StorageError."""
        try:
            data = await self._disk.run(partial(self._read, position, length), "read")
        except FileNotFoundError:
            if self._pin is not None:
                raise DamagedData(f"{self._path} is missing") from None
            raise UnknownFile(f"{self._path} was removed: plan again") from None
        except OSError as error:
            raise StorageError(f"{self._path} cannot be read: {error}") from error
        if len(data) != length:
            raise DamagedData(f"{self._path} ends at byte {position + len(data)}")
        return data

    def close(self) -> None:
        if self._pin is not None:
            self._pin.release()

    def _read(self, position: int, length: int) -> bytes:
        """Open the file, read from a position, and close the file, in the archive thread."""
        file = self._disk.open(self._path)
        try:
            return read_all(file, length, position)
        finally:
            file.close()


def _replace_files(
    manifest: Manifest, *, old: Sequence[str], offered: Sequence[ReplacementFile], version: int
) -> Manifest:
    """Return the manifest with the offered files, renamed, in place of `old`."""
    new = [
        dataclasses.replace(file, name=manifests.file_name(file.first_offset, manifest.version + 1))
        for file, _ in offered
    ]
    return manifests.replace(manifest, old, new, version)


def _find_size(manifest: Manifest, name: str) -> int | None:
    """Return the size of a file by its name, quarantined files included; None if the manifest does
    not list it."""
    sizes = {file.name: file.size for file in manifest.files}
    sizes.update((batch.name, batch.size) for batch in manifest.quarantined)
    return sizes.get(name)


def _first_page(partitions: Iterable[PartitionArchive]) -> list[PartitionArchive]:
    """Return the first partitions, as many as fit into one response, but at least one."""
    page: list[PartitionArchive] = []
    files = 0
    for each in partitions:
        files += len(each.files) + len(each.quarantined)
        if page and files > limits.ARCHIVE_PAGE_FILES:
            break
        page.append(each)
    return page


def _examine(disk: Disk, manifest: Manifest, name: str) -> ReplacementFile:
    """Read an offered file. Call this in the archive thread: the import takes a while."""
    from quackmq.archive.merging.replacement import read_footer

    return read_footer(disk, manifest, name)


def _compare(
    registry: ManifestRegistry,
    manifest: Manifest,
    replaced_files: Sequence[ArchiveFile],
    offered: Sequence[ReplacementFile],
) -> Iterator[None]:
    """Return the steps of a comparison. Call this in the archive thread, like `_examine`."""
    from quackmq.archive.merging.replacement import compare

    return compare(registry.reader, manifest, replaced_files, offered)


def _with_partition(topic: str, partition: int, reason: str) -> str:
    """Prefix a reason with its topic and partition, unless it begins with them."""
    prefix = f"topic {topic}, partition {partition}: "
    return reason if reason.startswith(prefix) else f"{prefix}{reason}"


def _describe_quarantined(listed: Iterable[Manifest]) -> Iterator[str]:
    """Describe each quarantined batch in words."""
    for manifest in listed:
        for batch in manifest.quarantined:
            offsets = f"offsets {batch.first_offset} to {batch.next_offset - 1}"
            reason = f"{offsets} cannot be decoded, and are kept in {batch.name}: {batch.reason}"
            yield _with_partition(manifest.topic, manifest.key.partition, reason)


def _run_step(steps: Iterator[None]) -> bool:
    """Run the next step; return whether there was one."""
    return next(steps, _DONE) is not _DONE


def _first_few(lines: Iterable[str]) -> list[str]:
    return list(islice(lines, limits.ARCHIVE_PROBLEMS_SHOWN))
