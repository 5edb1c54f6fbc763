"""Moves decided records from the logs to the archive, and only then deletes them (Q7, Q8).

    log ── reads on the loop ──▶ two buffers ──▶ rows ──▶ file ──▶ manifest ──▶ the log is trimmed
             buffers.py           alternating      builder.py   manifest_registry.py tiered_store.py

A partition is checked when it has changed, or when its time comes. Besides, all partitions are
checked in turn, slowly. Partitions that are due (`schedule.py`) take turns, one file each. One file
is built at a time, so that memory is that of two buffers and one file, whatever the backlog and the
number of waiting topics. `archive` does the same at once, even if nothing is due.

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
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from quackmq import limits as shared_limits
from quackmq.archive import limits
from quackmq.archive.archiving.buffers import Buffers
from quackmq.archive.archiving.builder import FileBuilder, LocalFileBuilder
from quackmq.archive.archiving.run import Archived, ArchiveRun, SuspectRange, take_turn
from quackmq.archive.archiving.schedule import ArchiveBacklog, Failure, Failures
from quackmq.archive.tiered_store import TieredStore
from quackmq.clock import Clock
from quackmq.errors import BrokerClosing, NotFound, QuackError, UnknownTopic
from quackmq.model.agenda import Agenda
from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey, Topic

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ArchiverState:
    """For health. `backlog_bytes` is about the decided, unarchived bytes in all logs. `failing` is
    the number of failing partitions; `failures` are the first of them. `no_room` is the disk's
    error if all wait for room. `done` counts since the start."""

    backlog_bytes: int
    due_partitions: int
    failing: int
    failures: tuple[Failure, ...]
    no_room: str | None
    done: Archived


class Archiver:
    def __init__(
        self,
        store: TieredStore,
        topics: Callable[[], Mapping[str, Topic]],
        clock: Clock,
        publisher_of: Callable[[int], str | None],
        workshop: FileBuilder | None = None,
    ) -> None:
        """`topics` returns the topics to archive by name; `publisher_of` returns the durable name
        of a transactional producer by its id."""
        self._store = store
        self._topics = topics
        self._clock = clock
        self._now_ms = clock.now_ms
        self._publisher_of = publisher_of
        self._workshop = LocalFileBuilder() if workshop is None else workshop
        self._buffers = Buffers(store.inner)
        #: Held while a file is built.
        self._making = asyncio.Lock()
        self._round: Iterator[tuple[str, PartitionKey]] = iter(())
        #: Partitions to check, and their topics' names: they have changed, or are new.
        self._unseen: dict[PartitionKey, str] = {}
        self._names: dict[uuid.UUID, str] = {}
        #: Partitions to check again at some time.
        self._agenda: Agenda[PartitionKey] = Agenda()
        self._backlog_bytes = 0
        self._standings: dict[PartitionKey, _Standing] = {}
        #: Partitions that are due, and their topics' names, in the order of their turns.
        self._due: dict[PartitionKey, str] = {}
        self._failures = Failures()
        self._done = Archived()
        self._tasks: set[asyncio.Task[Any]] = set()
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
                    idle_from = loop.time()
                    await self._rest()
                    await self._store.partitions.remove_left_behind()
            except Exception:
                log.exception("archiving failed; it will be retried")
            await asyncio.sleep(limits.ARCHIVE_LOOK_MS / 1000)

    async def archive_due(self) -> bool:
        """Check the partitions and archive those that are due, until none is; return whether any
        was. Failures are in the state."""
        await self._look()
        was_due = False
        while self._due and not self._waits_for_room:
            was_due = True
            await self._take_turns()
            await self._look()
        return was_due

    async def archive(self, topic_name: str | None = None) -> Archived:
        """Archive all decided records now, of one topic or of all, even if nothing is due. Raises
        UnknownTopic. An error of a partition is raised after the others are archived. The work
        continues if the caller is cancelled."""
        topics = self._topics()
        if topic_name is not None and topic_name not in topics:
            raise UnknownTopic(
                f"there is no topic {topic_name[: shared_limits.TOPIC_NAME_CHARS]!r}"
            )
        names = list(topics) if topic_name is None else [topic_name]
        return await self._carry_through(self._archive(_partitions_of(topics, names)))

    def state(self) -> ArchiverState:
        failures = self._failures.by_key.values()
        no_room = self._failures.no_room
        return ArchiverState(
            backlog_bytes=self._backlog_bytes,
            due_partitions=len(self._due),
            failing=len(failures),
            failures=tuple(islice(failures, limits.ARCHIVE_FAILURES)),
            no_room=None if no_room is None else no_room.reason,
            done=self._done,
        )

    def follow(self, topic: Topic) -> None:
        """Schedule a check of a topic that was created or altered."""
        self._names[topic.id] = topic.name
        for number in range(topic.partitions):
            self._unseen[PartitionKey(topic.id, number)] = topic.name

    def forget(self, topic: Topic) -> None:
        """Forget a deleted topic."""
        self._names.pop(topic.id, None)
        for number in range(topic.partitions):
            self._forget(PartitionKey(topic.id, number))

    async def close(self) -> None:
        """Discard an unfinished file; a manifest that is being committed completes by itself.
        Cancel `run` before."""
        self._is_closed = True
        self._workshop.close()
        for task in (tasks := set(self._tasks)):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- checking ----------------------------------------------------------------------------

    async def _look(self) -> None:
        """Find out which partitions are due: check those that have changed, those whose time has
        come, and a few others."""
        changed = self._store.inner.take_changed()
        await self._look_soon(changed or ())
        await self._look_soon(self._agenda.pop_due(self._now_ms()))
        for count, key in enumerate(tuple(islice(self._unseen, limits.ARCHIVE_LOOKS)), start=1):
            name = self._unseen.pop(key, None)
            if name is not None:
                await self._look_at(name, key)
            if count % limits.ARCHIVE_LOOKS_AT_ONCE == 0:
                await asyncio.sleep(0)
        knows_all = changed is not None and len(self._names) == len(self._topics())
        await self._go_round(limits.ARCHIVE_ROUND_LOOKS if knows_all else limits.ARCHIVE_LOOKS)

    async def _look_soon(self, keys: Iterable[PartitionKey]) -> None:
        """Schedule a check of partitions; let other work run in between."""
        for count, key in enumerate(keys, start=1):
            if key.topic_id in self._names:
                self._unseen[key] = self._names[key.topic_id]
            if count % limits.ARCHIVE_LOOKS_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _go_round(self, looks: int) -> None:
        """Check the next `looks` partitions of all, in turn."""
        for count in range(looks):
            following = next(self._round, None)
            if following is None:
                if count:
                    return  # all were checked
                topics = self._topics()
                self._round = _partitions_of(topics, list(topics))
                continue
            await self._look_at(*following)
            if count % limits.ARCHIVE_LOOKS_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _look_at(self, name: str, key: PartitionKey) -> None:
        """Check a partition. One that is due keeps its place in the queue."""
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
            self._failed(name, key, error)
            is_due = False
        if is_due:
            self._due.setdefault(key, name)
        else:
            self._due.pop(key, None)
            self._look_again(key, topic.policy)

    async def _is_due(self, key: PartitionKey, policy: Policy) -> bool:
        now_ms = self._now_ms()
        if policy.archive_bytes is None and policy.archive_after_ms is None:
            return False
        if self._failures.must_wait(key, now_ms):
            return False
        ready = await self._ready(key)
        standing = self._standings.get(key)
        if standing is None:
            return False
        if ready.is_due(policy, self._clock):
            # All of it, in as many runs as needed: the rest would soon be due again.
            standing.target = max(standing.target, ready.next)
        return ready.first < standing.target

    def _look_again(self, key: PartitionKey, policy: Policy) -> None:
        """Schedule the next check: when its records become due, or may be retried."""
        standing, failure = self._standings.get(key), self._failures.by_key.get(key)
        if failure is not None:
            self._agenda.put(key, failure.retry_ms)
        elif standing is None or not standing.ready_bytes or standing.oldest_offset < 0:
            self._agenda.drop(key)
        elif policy.archive_after_ms is not None:
            now_ms, at_ms = self._now_ms(), standing.oldest_ms + policy.archive_after_ms
            # The time may have come without being due: the clock was set back.
            self._agenda.put(key, at_ms if at_ms > now_ms else now_ms + limits.ARCHIVE_RETRY_MS)

    async def _ready(self, key: PartitionKey) -> ArchiveBacklog:
        log_store = self._store.inner
        offsets = await log_store.offsets(key)
        present = self._store.partitions.manifest(key)
        first = offsets.first if present is None else present.next_offset
        if offsets.first < first:  # an earlier trim failed, or was not reached
            await self._store.trim_log(key, first)
        standing = self._standings.get(key)
        if standing is not None:
            first = max(first, standing.passed)
        if first >= offsets.stable:
            if standing is not None:
                self._note_backlog(standing, 0)
            return ArchiveBacklog(first, first, 0, None)
        if standing is None:
            standing = self._standings[key] = _Standing()
        ready_bytes = await log_store.bytes_between(key, first, offsets.stable)
        self._note_backlog(standing, ready_bytes)
        if standing.oldest_offset != first:
            times = await log_store.append_times(key, first, first + 1)
            standing.oldest_ms = times[0].timestamp_ms if times else self._now_ms()
            standing.oldest_offset = first
        return ArchiveBacklog(first, offsets.stable, standing.ready_bytes, standing.oldest_ms)

    def _note_backlog(self, standing: _Standing, ready_bytes: int) -> None:
        self._backlog_bytes += ready_bytes - standing.ready_bytes
        standing.ready_bytes = ready_bytes

    # --- turns -------------------------------------------------------------------------------

    async def _take_turns(self) -> None:
        """Archive due partitions one after the other, until it is time to check again."""
        loop = asyncio.get_running_loop()
        until = loop.time() + limits.ARCHIVE_LOOK_MS / 1000
        while self._due and not self._waits_for_room and loop.time() < until:
            key, name = next(iter(self._due.items()))
            del self._due[key]
            standing = self._standings.get(key)
            if standing is None:
                continue
            try:
                await self._archive_some(name, key, standing.target)
            except NotFound:
                self._forget(key)
            except QuackError as error:
                self._failed(name, key, error)
            except Exception as error:
                log.exception("topic %s, partition %d cannot be archived", name, key.partition)
                self._failed(name, key, error)
            else:
                await self._look_at(name, key)  # at the end of the queue, if there is more

    async def _archive(self, partitions: Iterable[tuple[str, PartitionKey]]) -> Archived:
        done = Archived()
        errors: list[QuackError] = []
        for name, key in partitions:
            try:
                done = done.plus(await self._archive_all(name, key))
            except NotFound:
                self._forget(key)
            except QuackError as error:
                self._failed(name, key, error)
                errors.append(error)
        if errors:
            raise errors[0]
        return done

    async def _archive_all(self, name: str, key: PartitionKey) -> Archived:
        """Archive one partition up to its current stable offset."""
        end = (await self._store.inner.offsets(key)).stable
        done = Archived()
        before = -1
        while before < (first := (await self._ready(key)).first) < end:
            done = done.plus(await self._archive_some(name, key, end))
            before = first
        return done

    async def _archive_some(self, name: str, key: PartitionKey, end: int) -> Archived:
        """Archive at most one file."""
        async with self._making:
            if self._is_closed:
                raise _closing()
            topic = self._topics().get(name)
            if topic is None or topic.id != key.topic_id:
                raise UnknownTopic(f"topic {name} was deleted")
            standing = self._standings.setdefault(key, _Standing())
            turn = ArchiveRun(topic, key, standing.passed, end, standing.suspects)
            try:
                await take_turn(
                    turn, self._store, self._buffers, self._workshop, self._publisher_of
                )
            finally:
                standing.passed = max(standing.passed, turn.passed)
                standing.suspects = turn.suspects
                self._done = self._done.plus(turn.done)
        self._succeeded(name, key)
        return turn.done

    async def _rest(self) -> None:
        async with self._making:
            await self._store.partitions.disk.run(self._workshop.rest, "archive")

    # --- failures ----------------------------------------------------------------------------

    @property
    def _waits_for_room(self) -> bool:
        return self._failures.waits_for_room(self._now_ms())

    def _failed(self, name: str, key: PartitionKey, error: Exception) -> None:
        if self._is_closed:
            return
        topic = self._topics().get(name)
        if topic is None or topic.id != key.topic_id:  # deleted meanwhile
            self._forget(key)
            return
        is_new = self._failures.note(key, name, error, self._now_ms())
        self._agenda.put(key, self._failures.by_key[key].retry_ms)
        if is_new:
            log.error(
                "topic %s, partition %d could not be archived; its log is kept: %s; it will be "
                "retried",
                *(name, key.partition, error),
            )

    def _succeeded(self, name: str, key: PartitionKey) -> None:
        if self._failures.clear(key) is not None:
            log.info("topic %s, partition %d is archived again", name, key.partition)

    def _forget(self, key: PartitionKey) -> None:
        standing = self._standings.pop(key, None)
        if standing is not None:
            self._note_backlog(standing, 0)
        self._due.pop(key, None)
        self._unseen.pop(key, None)
        self._agenda.drop(key)
        self._failures.clear(key)

    async def _carry_through(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._is_closed:
                raise BrokerClosing(
                    "the broker is closing: archive again after its restart"
                ) from None
            raise

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a waiting caller gets it; without one it is in the state


class _Standing:
    """The state of a partition that has, or had, records to archive."""

    __slots__ = ("oldest_ms", "oldest_offset", "passed", "ready_bytes", "suspects", "target")

    def __init__(self) -> None:
        #: Between the archive's end and this offset there is nothing to archive.
        self.passed = 0
        #: It is due until everything before this offset is archived.
        self.target = 0
        self.ready_bytes = 0
        #: The first offset to archive, and when it was appended; -1 until it is known.
        self.oldest_offset = -1
        self.oldest_ms = 0
        #: The offsets at which a worker process died.
        self.suspects: SuspectRange | None = None


def _closing() -> BrokerClosing:
    return BrokerClosing("the broker is closing: archive again after its restart")


def _partitions_of(
    topics: Mapping[str, Topic], names: Iterable[str]
) -> Iterator[tuple[str, PartitionKey]]:
    """Yield the partitions of topics; a topic may be deleted meanwhile."""
    for name in names:
        topic = topics.get(name)
        if topic is not None:
            for number in range(topic.partitions):
                yield name, PartitionKey(topic.id, number)
