"""The archive as doors see it: which files there are, plans that keep them, files put in the place
of others, archiving and merging now, and how all of that is doing.

A **plan** is a look at a topic's files that stays true: whoever reads them by a plan finds them all
until it releases the plan, or its lease is over. Merging and retention go on meanwhile; files that
went stay on disk for as long as a plan has them. So plans are leases, renewed by those that need
longer, and their number is bounded. They live in memory: after a restart, plan again.

Others may merge files beside the broker: they make a plan that `offers`, write what is to come in
the place of its files into the partitions' directories, under names that begin with the plan's id,
and call `replace`. What is offered is read and compared with what it is for, and only then taken;
what was not taken when its plan is over is removed.

Every call names its caller. Who may call: the broker's loop.
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

if TYPE_CHECKING:  # what loads pyarrow, which a broker without an archive does without
    from quackmq.archive.archiving.archiver import Archiver, ArchiverState
    from quackmq.archive.archiving.run import Archived
    from quackmq.archive.manifest_registry import ManifestRegistry
    from quackmq.archive.merging.merger import Merged, Merger
    from quackmq.archive.merging.replacement import ReplacementFile
    from quackmq.archive.pins import Pin
    from quackmq.archive.tiered_store import TieredStore

log = logging.getLogger(__name__)

T = TypeVar("T")
#: Behind the last step.
_DONE: Final = object()


@dataclass(frozen=True, slots=True)
class TopicArchive:
    """Some partitions of a topic, and the first that is not among them; None if all are. Their
    directories lie in `directory`, which is named by the topic."""

    topic: Topic
    directory: str
    partitions: tuple[PartitionArchive, ...]
    next_partition: int | None


@dataclass(frozen=True, slots=True)
class ArchiveState:
    """How the archive is doing. Each of `problems`, some of those that there are, needs somebody's
    help, or time; what is published is kept in the log meanwhile."""

    problems: tuple[str, ...]
    archiver: ArchiverState
    merged: Merged
    quarantined: int
    #: Some of the quarantined batches, for people.
    kept_aside: tuple[str, ...]
    plans: int


class Archives:
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
        self._partitions = store.partitions
        self._disk = store.partitions.disk
        self._archiver = archiver
        self._topics = topics
        self._merger: Merger = Merger(
            self._partitions, MergeSettings(target_bytes=settings.merge_target_bytes)
        )
        #: What is offered is compared one by one: it takes memory. Nothing is swept meanwhile.
        self._comparing = asyncio.Lock()
        self._plans = Plans(self._partitions, self._describe, now_ms, self._comparing)
        self._lifecycle = lifecycle
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin to merge what is worth it, again and again."""
        self._task = asyncio.get_running_loop().create_task(self._merge_again_and_again())

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
        """What is archived of a topic now. UnknownTopic."""
        self._lifecycle.check_open()
        topic = self._topics.named(topic_name)
        numbers = range(from_partition, topic.partitions)
        found = [
            await self._describe(PartitionKey(topic.id, number), self._partitions.manifest)
            for number in numbers
        ]
        return self._page(topic, _page_of(found), numbers)

    async def plan(
        self,
        caller: Caller,
        topic_name: str,
        for_ms: int,
        partitions: Collection[int] | None = None,
        *,
        offers: bool = False,
    ) -> Plan:
        """Keep what is archived of a topic now, or of some of its partitions, for so long.
        UnknownTopic, UnknownPartition, LimitReached."""
        self._lifecycle.check_open()
        topic = self._topics.named(topic_name)
        numbers = range(topic.partitions) if partitions is None else sorted(set(partitions))
        for number in numbers:
            self._topics.of(PartitionKey(topic.id, number))
        made = await self._plans.make(topic, numbers, for_ms, offers)
        if self._lifecycle.is_closing:  # all plans were ended while this one was made
            self._plans.end(made)
        self._lifecycle.check_open()
        return made.told()

    async def planned(
        self, caller: Caller, plan_id: str, from_partition: int = 0
    ) -> tuple[Plan, TopicArchive]:
        """A plan, and partitions of it as it holds them. UnknownPlan."""
        self._lifecycle.check_open()
        made = self._plans.get(plan_id)
        numbers = [number for number in made.partitions if number >= from_partition]
        found = _page_of(made.partitions[number] for number in numbers)
        return made.told(), self._page(made.topic, found, numbers)

    async def renew(self, caller: Caller, plan_id: str, for_ms: int) -> Plan:
        """Keep a plan for so long from now on, also if that is shorter. UnknownPlan."""
        self._lifecycle.check_open()
        return self._plans.renew(plan_id, for_ms).told()

    async def release(self, caller: Caller, plan_id: str) -> None:
        """A plan is over. UnknownPlan."""
        self._lifecycle.check_open()
        self._plans.end(self._plans.get(plan_id))

    def plans(self, caller: Caller) -> list[Plan]:
        return [made.told() for made in self._plans.all()]

    # --- bytes ------------------------------------------------------------------------------

    def file_size(self, caller: Caller, topic_name: str, partition: int, name: str) -> int:
        """How many bytes a file has, of the present manifest or of a plan. UnknownTopic,
        UnknownPartition, UnknownFile."""
        return self._find(topic_name, partition, name)[1]

    def file(self, caller: Caller, topic_name: str, partition: int, name: str) -> FileBytes:
        """The same file to be read, and closed then. LimitReached."""
        key, size, is_present = self._find(topic_name, partition, name)
        path = f"{archive_files.partition_path(topic_name, partition)}/{name}"
        # What only a plan has is that plan's to keep.
        pin = self._partitions.pin(key) if is_present else None
        return FileBytes(self._store, path, size, pin)

    def _find(self, topic_name: str, partition: int, name: str) -> tuple[PartitionKey, int, bool]:
        """Whose file it is, its size, and whether the present manifest has it."""
        self._lifecycle.check_open()
        key = PartitionKey(self._topics.named(topic_name).id, partition)
        self._topics.of(key)
        held = [self._partitions.manifest(key), *(made.held(key) for made in self._plans.all())]
        for listed in held:
            size = None if listed is None else _size_of(listed, name)
            if size is not None:
                return key, size, listed is held[0]
        raise UnknownFile(
            f"{name[:100]!r} is no file of topic {topic_name}, partition {partition}, or not any "
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
        """Put files that are offered, by offset, in the place of others, as `manifest.replace` has
        it; the partition as it is then. UnknownPlan unless they are offered under a plan that
        lives; InvalidRequest where they do not hold what the others do; StateChanged."""
        self._lifecycle.check_open()
        key = PartitionKey(self._topics.named(topic_name).id, partition)
        self._topics.of(key)
        for name in new:
            self._check_offered(name)
        if (
            len(set(new)) != len(new)
            or max(len(new), len(old)) > shared_limits.ARCHIVE_REPLACED_FILES
        ):
            raise InvalidRequest("files are offered once each, and not so many at a time")
        await self._lifecycle.run_shielded(self._replace(key, version, old, new))
        return await self._describe(key, self._partitions.manifest)

    async def archive(self, caller: Caller, topic_name: str) -> Archived:
        """Archive now whatever is decided of a topic. UnknownTopic, StorageError."""
        self._lifecycle.check_open()
        self._topics.named(topic_name)
        return await self._archiver.archive(topic_name)

    async def merge(self, caller: Caller, topic_name: str) -> Merged:
        """Merge now whatever is worth it of a topic. UnknownTopic, StorageError."""
        self._lifecycle.check_open()
        topic = self._topics.named(topic_name)
        keys = [PartitionKey(topic.id, number) for number in range(topic.partitions)]
        return await self._merger.merge(keys)

    # --- health -----------------------------------------------------------------------------

    def state(self, caller: Caller) -> ArchiveState:
        archiver = self._archiver.state()
        problems = [
            *(_named(each.topic, each.partition, each.reason) for each in archiver.failures),
            *_some(str(problem) for problem in self._partitions.problems().values()),
            *_some(self._merger.problems()),
            *_some(self._partitions.left_behind()),
        ]
        if archiver.no_room is not None:
            problems.insert(0, f"there is no room: {archiver.no_room}")
        if self._partitions.failure is not None:
            problems.insert(0, str(self._partitions.failure))
        listed = self._partitions.all()
        return ArchiveState(
            problems=tuple(dict.fromkeys(problems)),
            archiver=archiver,
            merged=self._merger.total,
            quarantined=sum(len(each.quarantined) for each in listed),
            kept_aside=tuple(_some(_kept_aside(listed))),
            plans=len(self._plans),
        )

    # --- helpers ----------------------------------------------------------------------------

    async def _describe(
        self, key: PartitionKey, look: Callable[[PartitionKey], Manifest | None]
    ) -> PartitionArchive:
        # The log first: it never begins behind the end of a manifest that is looked at later.
        offsets = await self._store.inner.offsets(key)
        found = look(key)
        if found is None or not found.files:
            found = manifests.empty(key, "", offsets.first) if found is None else found
            begin = end = max(found.next_offset, offsets.first)
        else:
            begin, end = found.first_offset, found.next_offset
        problem = self._partitions.problem(key)
        return PartitionArchive(
            key.partition,
            found.version,
            begin,
            end,
            offsets.first,
            max(end, offsets.stable),
            offsets.size,
            found.files,
            found.quarantined,
            None if problem is None else str(problem),
        )

    def _page(
        self, topic: Topic, found: list[PartitionArchive], numbers: Sequence[int]
    ) -> TopicArchive:
        more = numbers[len(found)] if len(found) < len(numbers) else None
        directory = self._disk.location(archive_files.topic_path(topic.name))
        return TopicArchive(topic, directory, tuple(found), more)

    # --- what is offered --------------------------------------------------------------------

    async def _replace(
        self, key: PartitionKey, version: int, old: Sequence[str], new: Sequence[str]
    ) -> None:
        async with self._comparing:
            with self._partitions.pin(key) as pin:
                offered = await self._compared(pin.manifest, old, new, version)
            for name in new:  # its plan may be over by now
                self._check_offered(name)
            make = partial(_replaced, old=old, offered=offered, version=version)
            await self._partitions.replace(key, make, new)

    def _check_offered(self, name: str) -> None:
        plan_id = manifests.plan_of_offered(name)
        if plan_id is None:
            raise InvalidRequest(
                f"{name[:100]!r} is no name by which a file is offered: that is "
                f"{manifests.offered_name('PLAN', 'WORD')}"
            )
        if not self._plans.get(plan_id).offers:
            raise InvalidRequest(f"plan {plan_id} was not made to offer files under it")

    async def _compared(
        self, present: Manifest, old: Sequence[str], new: Sequence[str], version: int
    ) -> list[ReplacementFile]:
        """What is offered, when all of it was read and is as it should be."""
        examine = partial(_examine, self._disk, present)
        offered = [await self._in_lane(partial(examine, name)) for name in new]
        _replaced(present, old=old, offered=offered, version=version)  # for what it raises
        named = {file.name: file for file in present.files}
        gone = [named[name] for name in old]
        compare = partial(_compare, self._partitions, present, gone, offered)
        steps = await self._in_lane(compare)
        while await self._in_lane(partial(_is_not_done, steps)):
            self._lifecycle.check_open()
        return offered

    async def _in_lane(self, function: Callable[[], T]) -> T:
        try:
            return await self._disk.run(function, "archive")
        except OSError as error:
            raise StorageError(f"what is offered cannot be read: {error}") from error

    async def _merge_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(limits.MERGE_INTERVAL_MS / 1000)
            try:
                await self._merger.merge_due()
            except QuackError as error:  # named by the merger
                log.debug("merging goes on later: %s", error)
            except Exception:
                log.exception("merging failed; it is tried again")


class FileBytes:
    """A file of the archive, piece by piece. It stays until this is closed, or its plan is over."""

    def __init__(self, store: TieredStore, path: str, size: int, pin: Pin | None) -> None:
        self.size = size
        self._disk = store.partitions.disk
        self._path = path
        self._pin = pin

    async def read(self, position: int, length: int) -> bytes:
        """Bytes that are there. UnknownFile where the plan that had it is over; DamagedData,
        StorageError."""
        try:
            data = await self._disk.run(partial(self._read, position, length), "read")
        except FileNotFoundError:
            if self._pin is not None:
                raise DamagedData(f"{self._path} is missing") from None
            raise UnknownFile(f"{self._path} is not there any more: plan again") from None
        except OSError as error:
            raise StorageError(f"{self._path} cannot be read: {error}") from error
        if len(data) != length:
            raise DamagedData(f"{self._path} ends at byte {position + len(data)}")
        return data

    def close(self) -> None:
        if self._pin is not None:
            self._pin.release()

    def _read(self, position: int, length: int) -> bytes:
        file = self._disk.open(self._path)
        try:
            return read_all(file, length, position)
        finally:
            file.close()


def _replaced(
    present: Manifest, *, old: Sequence[str], offered: Sequence[ReplacementFile], version: int
) -> Manifest:
    """With what is offered, under names of ours."""
    new = [
        dataclasses.replace(file, name=manifests.file_name(file.first_offset, present.version + 1))
        for file, _ in offered
    ]
    return manifests.replace(present, old, new, version)


def _size_of(listed: Manifest, name: str) -> int | None:
    """Of a file by this name; quarantined ones are files, too."""
    sizes = {file.name: file.size for file in listed.files}
    sizes.update((aside.name, aside.size) for aside in listed.quarantined)
    return sizes.get(name)


def _page_of(found: Iterable[PartitionArchive]) -> list[PartitionArchive]:
    """The first ones, as many as go into one answer; one at the least."""
    page: list[PartitionArchive] = []
    files = 0
    for each in found:
        files += len(each.files) + len(each.quarantined)
        if page and files > limits.ARCHIVE_PAGE_FILES:
            break
        page.append(each)
    return page


def _examine(disk: Disk, present: Manifest, name: str) -> ReplacementFile:
    """In a lane: it stands on what takes its time to load."""
    from quackmq.archive.merging.replacement import examine

    return examine(disk, present, name)


def _compare(
    partitions: ManifestRegistry,
    present: Manifest,
    gone: Sequence[ArchiveFile],
    offered: Sequence[ReplacementFile],
) -> Iterator[None]:
    """In a lane, too."""
    from quackmq.archive.merging.replacement import compare

    return compare(partitions.reader, present, gone, offered)


def _named(topic: str, partition: int, reason: str) -> str:
    """A reason with where it holds, unless it says so itself."""
    where = f"topic {topic}, partition {partition}: "
    return reason if reason.startswith(where) else f"{where}{reason}"


def _kept_aside(listed: Iterable[Manifest]) -> Iterator[str]:
    for each in listed:
        for one in each.quarantined:
            what = f"offsets {one.first_offset} to {one.next_offset - 1} cannot be opened, and are"
            reason = f"{what} kept as {one.name}: {one.reason}"
            yield _named(each.topic, each.key.partition, reason)


def _is_not_done(steps: Iterator[None]) -> bool:
    return next(steps, _DONE) is not _DONE


def _some(lines: Iterable[str]) -> list[str]:
    return list(islice(lines, limits.ARCHIVE_TOLD))
