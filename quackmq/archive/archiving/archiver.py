"""Moves decided records from the logs to the archive, and only then deletes them (Q7, Q8).

    log ── reads on the loop ──▶ two buffers ──▶ rows ──▶ file ──▶ manifest ──▶ the log is trimmed
             buffers.py           alternating      builder.py   manifest_registry.py tiered_store.py

A partition is checked when it has changed, or when its time comes. Besides, all partitions are
checked in rotation, slowly. Partitions that are due (`schedule.py`) are archived in rotation, one
file each. One file is built at a time, so that memory is that of two buffers and one file, whatever
the backlog and the number of waiting topics. `archive` does the same immediately, even if nothing
is due.

Promised: publishing and delivery never wait for the archive: on the loop it makes only small reads.
Nothing leaves a log before file and manifest are durable. A batch that cannot be decoded is
quarantined unchanged and reported, and archiving continues after it.

A failure is logged and shown in `state`, once until it changes, and retried after a wait that grows
to a minute. Meanwhile the log keeps its records, and other partitions are archived. If the disk is
full, all wait together. **Damage in a log** stops its partition there: everything before it is
archived. Continuing after it would trim the damaged bytes, which may still be restored, and would
make a loss look like a gap that was always there. Archiving continues by itself when the log can be
read again, or when retention or a trim has deleted the damaged range.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from quackmq import limits as shared_limits
from quackmq.archive import limits
from quackmq.archive.archiving.buffers import Buffers
from quackmq.archive.archiving.builder import FileBuilder, LocalFileBuilder
from quackmq.archive.archiving.run import ArchiveResult, ArchiveRun, SuspectRange
from quackmq.archive.archiving.schedule import ArchiveBacklog, Failure, Failures
from quackmq.archive.tiered_store import TieredStore
from quackmq.clock import Clock
from quackmq.errors import BrokerClosing, NotFound, QuackError, UnknownTopic
from quackmq.model.agenda import Agenda
from quackmq.model.policy import Policy
from quackmq.model.topic import OffsetTime, PartitionKey, Topic
from quackmq.tasks import TaskSet

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ArchiverState:
    """The archiver's state, for health checks. `backlog_bytes` is about the decided, unarchived
    bytes in all logs. `failing` is the number of failing partitions; `failures` are the first of
    them. `no_room` is the disk's error if all partitions wait for room. `done` counts since the
    start."""

    backlog_bytes: int
    due_partitions: int
    failing: int
    failures: tuple[Failure, ...]
    no_room: str | None
    done: ArchiveResult


class Archiver:
    def __init__(
        self,
        store: TieredStore,
        topics: Callable[[], Mapping[str, Topic]],
        clock: Clock,
        find_publisher: Callable[[int], str | None],
        file_builder: FileBuilder | None = None,
    ) -> None:
        """`topics` returns the topics to archive by name; `find_publisher` returns the durable name
        of a transactional producer by its id. By default, files are built in this process."""
        self._store = store
        self._topics = topics
        self._clock = clock
        self._now_ms = clock.now_ms
        self._find_publisher = find_publisher
        self._file_builder = LocalFileBuilder() if file_builder is None else file_builder
        self._buffers = Buffers(store.inner)
        #: Locked while a file is built.
        self._build_lock = asyncio.Lock()
        self._rotation: Iterator[tuple[str, PartitionKey]] = iter(())
        #: Partitions that have changed or are new and must be checked, with their topics' names.
        self._unchecked: dict[PartitionKey, str] = {}
        self._name_by_topic_id: dict[uuid.UUID, str] = {}
        #: Partitions to check again later, each at its time.
        self._agenda: Agenda[PartitionKey] = Agenda()
        self._backlog_bytes = 0
        self._state_by_partition: dict[PartitionKey, _PartitionState] = {}
        #: Partitions that are due, with their topics' names, in the order in which they are
        #: archived.
        self._due_partitions: dict[PartitionKey, str] = {}
        self._failures = Failures()
        self._done = ArchiveResult()
        self._tasks = TaskSet()
        self._is_closed = False

    async def run(self) -> None:
        """Archive partitions that are due, until cancelled."""
        loop = asyncio.get_running_loop()
        idle_from = loop.time()
        while True:
            try:
                if await self.archive_due():
                    idle_from = loop.time()
                elif loop.time() - idle_from > limits.ARCHIVE_WORKER_IDLE_MS / 1000:
                    # Free the memory once, and again only after as long without work.
                    idle_from = loop.time()
                    await self._free_builder_memory()
                    await self._store.registry.remove_left_behind()
            except Exception:
                log.exception("archiving failed; it will be retried")
            await asyncio.sleep(limits.ARCHIVE_CHECK_MS / 1000)

    async def archive_due(self) -> bool:
        """Check the partitions and archive those that are due, until none is due. Return whether
        any was due. Failures are in the state."""
        await self._check_partitions()
        was_due = False
        while self._due_partitions and not self._waits_for_room:
            was_due = True
            await self._archive_due_partitions()
            await self._check_partitions()
        return was_due

    async def archive(self, topic_name: str | None = None) -> ArchiveResult:
        """Archive all decided records now, of one topic or of all, even if nothing is due. Raises
        UnknownTopic. An error of a partition is raised after the others are archived. The work
        continues if the caller is cancelled."""
        topics = self._topics()
        if topic_name is not None and topic_name not in topics:
            raise UnknownTopic(
                f"there is no topic {topic_name[: shared_limits.TOPIC_NAME_CHARS]!r}"
            )
        names = list(topics) if topic_name is None else [topic_name]
        work = self._archive_partitions(_list_partitions(topics, names))
        try:
            return await self._tasks.run_shielded(work)
        except asyncio.CancelledError:
            # Either `close` cancelled the work, or the caller itself was cancelled.
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise _closing_error() from None
            raise

    def state(self) -> ArchiverState:
        """Return the backlog, the failures and the work done since the start."""
        failures = self._failures.by_key.values()
        no_room = self._failures.no_room
        return ArchiverState(
            backlog_bytes=self._backlog_bytes,
            due_partitions=len(self._due_partitions),
            failing=len(failures),
            failures=tuple(islice(failures, limits.ARCHIVE_FAILURES)),
            no_room=None if no_room is None else no_room.reason,
            done=self._done,
        )

    def follow(self, topic: Topic) -> None:
        """Schedule a check of a topic that was created or altered."""
        self._name_by_topic_id[topic.id] = topic.name
        for number in range(topic.partitions):
            self._unchecked[PartitionKey(topic.id, number)] = topic.name

    def forget(self, topic: Topic) -> None:
        """Forget a deleted topic."""
        self._name_by_topic_id.pop(topic.id, None)
        for number in range(topic.partitions):
            self._forget(PartitionKey(topic.id, number))

    async def close(self) -> None:
        """Discard an unfinished file; a manifest that is being committed completes by itself.
        Cancel `run` before."""
        self._is_closed = True
        self._file_builder.close()
        self._tasks.cancel()
        await self._tasks.finish()

    # --- checking ----------------------------------------------------------------------------

    async def _check_partitions(self) -> None:
        """Find the partitions that are due: check those that have changed, those whose time has
        come, and a few others in rotation, in case a change was missed."""
        changed = self._store.inner.take_changed()
        await self._add_unchecked(changed or ())
        await self._add_unchecked(self._agenda.pop_due(self._now_ms()))
        for count, key in enumerate(tuple(islice(self._unchecked, limits.ARCHIVE_CHECKS)), start=1):
            topic_name = self._unchecked.pop(key, None)
            if topic_name is not None:
                await self._check_partition(topic_name, key)
            if count % limits.ARCHIVE_CHECKS_PER_STEP == 0:
                await asyncio.sleep(0)
        # If the log does not know which partitions have changed, or some topics were never
        # announced by `follow`, only the rotation finds their records: it must be faster then.
        knows_all = changed is not None and len(self._name_by_topic_id) == len(self._topics())
        await self._check_rotation(
            limits.ARCHIVE_ROTATION_CHECKS if knows_all else limits.ARCHIVE_CHECKS
        )

    async def _add_unchecked(self, keys: Iterable[PartitionKey]) -> None:
        """Schedule a check of partitions; let other work run in between."""
        for count, key in enumerate(keys, start=1):
            if key.topic_id in self._name_by_topic_id:
                self._unchecked[key] = self._name_by_topic_id[key.topic_id]
            if count % limits.ARCHIVE_CHECKS_PER_STEP == 0:
                await asyncio.sleep(0)

    async def _check_rotation(self, check_count: int) -> None:
        """Check the next `check_count` partitions of all, in rotation."""
        for count in range(check_count):
            next_partition = next(self._rotation, None)
            if next_partition is None:
                if count:
                    # The rotation ended in this call. The next call begins a new one, so that no
                    # partition is checked twice in one call.
                    return
                topics = self._topics()
                self._rotation = _list_partitions(topics, list(topics))
                continue
            await self._check_partition(*next_partition)
            if count % limits.ARCHIVE_CHECKS_PER_STEP == 0:
                await asyncio.sleep(0)

    async def _check_partition(self, name: str, key: PartitionKey) -> None:
        """Check whether a partition is due. If it is already in the queue of due partitions, it
        keeps its position there."""
        topic = self._topics().get(name)
        if topic is None or topic.id != key.topic_id:
            self._forget(key)
            return
        try:
            is_due = await self._is_due(key, topic.policy)
        except NotFound:
            self._forget(key)
            return
        except QuackError as error:
            self._record_failure(name, key, error)
            is_due = False
        if is_due:
            self._due_partitions.setdefault(key, name)
        else:
            self._due_partitions.pop(key, None)
            self._schedule_check(key)

    async def _is_due(self, key: PartitionKey, policy: Policy) -> bool:
        """Return whether a partition must be archived now: its policy says so, or an earlier run
        did not reach its target."""
        if not policy.archives_entries:
            if key in self._state_by_partition:
                self._state_by_partition[key].due_ms = None
            return False
        if self._failures.must_wait(key, self._now_ms()):
            return False
        backlog = await self._measure_backlog(key)
        state = self._state_by_partition.get(key)
        if state is None:  # it has no records to archive
            return False
        if policy.live_entries is not None and backlog.first + policy.live_entries < backlog.next:
            newer = backlog.first + policy.live_entries
            state.outnumbering = await self._find_append_time(key, newer, state.outnumbering)
            backlog = backlog._replace(outnumbered_ms=state.outnumbering.timestamp_ms)
        state.due_ms = backlog.find_due_ms(policy)
        if backlog.is_due(policy, self._clock):
            # Archive the whole backlog, in several runs if needed: the rest would soon be due
            # again.
            state.target_offset = max(state.target_offset, backlog.next)
        return backlog.first < state.target_offset

    def _schedule_check(self, key: PartitionKey) -> None:
        """Schedule the next check of a partition: when its records become due, or may be
        retried."""
        state, failure = self._state_by_partition.get(key), self._failures.by_key.get(key)
        if failure is not None:
            self._agenda.put(key, failure.retry_ms)
        elif state is None or not state.backlog_bytes or state.due_ms is None:
            # Nothing to archive, or not by time: the next append makes it a changed partition.
            self._agenda.drop(key)
        else:
            now_ms, due_ms = self._now_ms(), state.due_ms
            # If the clock was set back, the time has come and yet the partition is not due.
            self._agenda.put(key, due_ms if due_ms > now_ms else now_ms + limits.ARCHIVE_RETRY_MS)

    async def _measure_backlog(self, key: PartitionKey) -> ArchiveBacklog:
        """Return the records of a partition that can be archived. Before that, trim its log if it
        still has archived records."""
        log_store = self._store.inner
        offsets = await log_store.offsets(key)
        manifest = self._store.registry.manifest(key)
        first = offsets.first if manifest is None else manifest.next_offset
        if offsets.first < first:  # an earlier trim failed, or was not reached
            await self._store.trim_log(key, first)
        state = self._state_by_partition.get(key)
        if state is not None:
            first = max(first, state.examined_to)
        if first >= offsets.stable:
            if state is not None:
                self._set_backlog(state, 0)
            return ArchiveBacklog(first, first, 0, None)
        if state is None:
            state = self._state_by_partition[key] = _PartitionState()
        ready_bytes = await log_store.bytes_between(key, first, offsets.stable)
        self._set_backlog(state, ready_bytes)
        state.oldest = await self._find_append_time(key, first, state.oldest)
        oldest_ms = state.oldest.timestamp_ms
        return ArchiveBacklog(first, offsets.stable, state.backlog_bytes, oldest_ms)

    async def _find_append_time(
        self, key: PartitionKey, offset: int, known: OffsetTime | None
    ) -> OffsetTime:
        """Return when the record at an offset was appended. `known` is an earlier result, perhaps
        of another offset. If the log does not know the time, return the present one."""
        if known is not None and known.offset == offset:
            return known
        times = await self._store.inner.append_times(key, offset, offset + 1)
        return OffsetTime(offset, times[0].timestamp_ms if times else self._now_ms())

    def _set_backlog(self, state: _PartitionState, ready_bytes: int) -> None:
        """Set the bytes that a partition has to archive, and correct the sum over all
        partitions."""
        self._backlog_bytes += ready_bytes - state.backlog_bytes
        state.backlog_bytes = ready_bytes

    # --- archiving ---------------------------------------------------------------------------

    async def _archive_due_partitions(self) -> None:
        """Archive due partitions one after the other, until it is time to check again."""
        loop = asyncio.get_running_loop()
        until = loop.time() + limits.ARCHIVE_CHECK_MS / 1000
        while self._due_partitions and not self._waits_for_room and loop.time() < until:
            key, name = next(iter(self._due_partitions.items()))
            # Removed before it is archived: if it has more records, it goes to the end of the
            # queue, and the other partitions come first.
            del self._due_partitions[key]
            state = self._state_by_partition.get(key)
            if state is None:
                continue
            try:
                await self._archive_next_file(name, key, state.target_offset)
            except NotFound:
                self._forget(key)
            except QuackError as error:
                self._record_failure(name, key, error)
            except Exception as error:
                log.exception("topic %s, partition %d cannot be archived", name, key.partition)
                self._record_failure(name, key, error)
            else:
                # If there is more to archive, this appends the partition to the queue again.
                await self._check_partition(name, key)

    async def _archive_partitions(
        self, partitions: Iterable[tuple[str, PartitionKey]]
    ) -> ArchiveResult:
        """Archive partitions one after the other; return the sum of their results. A failing
        partition does not stop the others: its failure is recorded, and the first error is raised
        at the end."""
        result = ArchiveResult()
        errors: list[QuackError] = []
        for name, key in partitions:
            try:
                result = result.plus(await self._archive_partition(name, key))
            except NotFound:
                self._forget(key)
            except QuackError as error:
                self._record_failure(name, key, error)
                errors.append(error)
        if errors:
            raise errors[0]
        return result

    async def _archive_partition(self, name: str, key: PartitionKey) -> ArchiveResult:
        """Archive one partition up to its current stable offset, file by file. Return the sum of
        the results."""
        end = (await self._store.inner.offsets(key)).stable
        result = ArchiveResult()
        previous_first = -1
        # Stop also if the last file did not advance: another attempt would not either.
        while previous_first < (first := (await self._measure_backlog(key)).first) < end:
            result = result.plus(await self._archive_next_file(name, key, end))
            previous_first = first
        return result

    async def _archive_next_file(self, name: str, key: PartitionKey, end: int) -> ArchiveResult:
        """Archive at most one file of a partition, up to `end`; return the result."""
        async with self._build_lock:
            if self._is_closed:
                raise _closing_error()
            topic = self._topics().get(name)
            # The caller may have waited for the lock: the topic may have been deleted, or created
            # again under the same name.
            if topic is None or topic.id != key.topic_id:
                raise UnknownTopic(f"topic {name} was deleted")
            state = self._state_by_partition.setdefault(key, _PartitionState())
            run = ArchiveRun(
                topic,
                key,
                state.examined_to,
                end,
                state.suspects,
                self._store,
                self._buffers,
                self._file_builder,
                self._find_publisher,
            )
            try:
                await run.archive_one_file()
            finally:
                # Also after an error: the next run must not examine these records again.
                state.examined_to = max(state.examined_to, run.examined_to)
                state.suspects = run.suspects
                self._done = self._done.plus(run.result)
        self._record_success(name, key)
        return run.result

    async def _free_builder_memory(self) -> None:
        """Tell the file builder that there is no work for a while, when it builds no file."""
        async with self._build_lock:
            await self._store.registry.disk.run(self._file_builder.free_memory, "archive")

    # --- failures ----------------------------------------------------------------------------

    @property
    def _waits_for_room(self) -> bool:
        return self._failures.waits_for_room(self._now_ms())

    def _record_failure(self, name: str, key: PartitionKey, error: Exception) -> None:
        """Record why a partition could not be archived, and schedule its retry. Log the failure if
        it is new. Do nothing while closing: closing itself makes runs fail."""
        if self._is_closed:
            return
        topic = self._topics().get(name)
        if topic is None or topic.id != key.topic_id:  # deleted meanwhile
            self._forget(key)
            return
        is_new = self._failures.record(key, name, error, self._now_ms())
        self._agenda.put(key, self._failures.by_key[key].retry_ms)
        if is_new:
            log.error(
                "topic %s, partition %d could not be archived; its log is kept: %s; it will be "
                "retried",
                *(name, key.partition, error),
            )

    def _record_success(self, name: str, key: PartitionKey) -> None:
        """Clear the failure of a partition, if it had one, and log that it is archived again."""
        if self._failures.record_success(key) is not None:
            log.info("topic %s, partition %d is archived again", name, key.partition)

    def _forget(self, key: PartitionKey) -> None:
        """Remove all state of a partition that does not exist any more."""
        state = self._state_by_partition.pop(key, None)
        if state is not None:
            self._set_backlog(state, 0)
        self._due_partitions.pop(key, None)
        self._unchecked.pop(key, None)
        self._agenda.drop(key)
        self._failures.forget(key, others_are_due=bool(self._due_partitions))


class _PartitionState:
    """The archiver's state of a partition that has, or had, records to archive."""

    __slots__ = (
        "backlog_bytes",
        "due_ms",
        "examined_to",
        "oldest",
        "outnumbering",
        "suspects",
        "target_offset",
    )

    def __init__(self) -> None:
        #: Records before this offset were examined: they are archived, or need not be.
        self.examined_to = 0
        #: The partition is due until everything before this offset is archived.
        self.target_offset = 0
        self.backlog_bytes = 0
        #: The first offset to archive, and the first one that is newer by `live_entries`, each with
        #: its append time; None until it is needed.
        self.oldest: OffsetTime | None = None
        self.outnumbering: OffsetTime | None = None
        #: When the records become due if none is added; None if they never do.
        self.due_ms: int | None = None
        #: The offsets at which a worker process died.
        self.suspects: SuspectRange | None = None


def _closing_error() -> BrokerClosing:
    return BrokerClosing("the broker is closing: archive again after its restart")


def _list_partitions(
    topics: Mapping[str, Topic], names: Iterable[str]
) -> Iterator[tuple[str, PartitionKey]]:
    """Yield the partitions of topics one by one. A topic that was deleted since `names` was made is
    left out."""
    for name in names:
        topic = topics.get(name)
        if topic is not None:
            for number in range(topic.partitions):
                yield name, PartitionKey(topic.id, number)
