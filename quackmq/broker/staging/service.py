"""Staging: atomic writes by any number of writers; nothing is visible before the commit.

Each writer stages encoded batches under a common key and under a name of its own, a *part*. One
client commits the key once and names the parts to include. Then all records of these parts become
visible together. This is for jobs whose writers may fail, be repeated or run twice: parts that the
commit does not name are discarded.

Staged batches are in a hidden topic per stage (see `stage_log`), outside their target logs.
Therefore no last stable offset waits for a writer. The commit copies the batches in one short
transaction of a broker-owned producer. The last append of this transaction holds the markers and
records that the key is committed. A crash before it leaves the stage as it was, and an open
transaction that the next start aborts.

Promised: staged batches that were acknowledged survive a crash. A key is committed once; for
`limits.STAGE_REMEMBERED_MS` a repeated commit gets the first response, or StageConflict if its
contents differ. A stage without new calls for `limits.STAGE_EXPIRY_MS` is deleted. An unreadable
stage is logged and treated as if it did not exist. A stage may be a *turn* of a series (see
`staging.series`): then the series is remembered instead of the key, and the first committed stage
of the turn counts. A turn before the last committed one is refused: its writer was reset.

Not promised: a commit does not check whether a topic is full.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from uuid import UUID

from quackmq import limits as shared_limits
from quackmq.broker import limits
from quackmq.broker.lifecycle import Lifecycle, NamedLocks
from quackmq.broker.publish.admission import check_records, check_sizes
from quackmq.broker.publish.producer_ids import ProducerIds
from quackmq.broker.settings import Caller
from quackmq.broker.staging.checks import check_call, check_name, check_turn
from quackmq.broker.staging.committer import StageCopier
from quackmq.broker.staging.series import CommittedTurn, SeriesRegistry, Turn
from quackmq.broker.staging.stage import (
    STATE_PREFIX,
    Call,
    CommittedStage,
    PartSummary,
    Stage,
    StageDescription,
    decode_committed,
    digest_summaries,
    encode_committed,
    stage_key_in,
    state_key,
)
from quackmq.broker.staging.stage_log import (
    STAGE_PREFIX,
    Header,
    StagedBatch,
    decode_header,
    encode_header,
    make_header,
    topic_name,
    without_producer,
)
from quackmq.broker.topics import Topics
from quackmq.clock import Clock
from quackmq.errors import (
    CorruptBatch,
    DamagedData,
    DamagedStore,
    InvalidRequest,
    LimitReached,
    NoSubscriber,
    QuackError,
    StageCommitted,
    StageConflict,
    StorageError,
    UnknownStage,
    UnknownTopic,
    UnsupportedBatch,
)
from quackmq.model.log_transactions import TRANSACTION_FLAGS
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, AppendResult, PartitionKey, Read, StatePut, Topic
from quackmq.records.batch import Batch, batches
from quackmq.stores.contract import Store

log = logging.getLogger(__name__)


class Staging:
    """What the protocols call for stages. Every call names its caller."""

    def __init__(
        self,
        store: Store,
        topics: Topics,
        producer_ids: ProducerIds,
        clock: Clock,
        on_appended: Callable[[PartitionKey, AppendResult, int], None],
        count_subscriptions: Callable[[UUID], int],
        lifecycle: Lifecycle,
    ) -> None:
        """`on_appended` is called with the partition, result and size of every batch that a
        commit appends. `count_subscriptions` returns the number of subscriptions to a topic."""
        self._store = store
        self._topics = topics
        self._clock = clock
        self._now_ms = clock.now_ms
        self._count_subscriptions = count_subscriptions
        self._copier = StageCopier(store, topics, producer_ids, clock.now_ms, on_appended)
        self._stages: dict[str, Stage] = {}
        self._committed: dict[str, CommittedStage] = {}
        self._series = SeriesRegistry(store)
        #: Topics of unreadable stages, by name; a writer that uses the key again starts a new
        #: stage.
        self._unreadable_topics: dict[str, UUID] = {}
        self._staged_batches = 0
        self._staged_bytes = 0
        self._locks = NamedLocks()
        self._lifecycle = lifecycle
        self._last_clean_ms = 0

    async def load(self) -> None:
        """Load stages and remembered commits from the store. Delete stages that were committed."""
        for key, state in (await self._store.states(STATE_PREFIX)).items():
            if state.value is not None:
                self._committed[stage_key_in(key)] = decode_committed(state.value)
        await self._series.load()
        for topic in (await self._store.topics()).values():
            if topic.name.startswith(STAGE_PREFIX):
                await self._load_stage(topic)

    async def _load_stage(self, topic: Topic) -> None:
        """Load one stage; delete it if it was committed, ignore it if it is unreadable."""
        try:
            stage = await self._read_stage(topic)
        except (DamagedData, DamagedStore, CorruptBatch) as error:
            # Nothing of this stage was committed. Its writers get UnknownStage and start again. One
            # damaged stage must not prevent the broker from starting.
            log.error("ignoring the unreadable stage in topic %s: %s", topic.name, error)
            self._unreadable_topics[topic.name] = topic.id
            return
        if stage is None or self._is_committed(stage):
            await self._remove_topic(topic.id)
            return
        self._stages[stage.key] = stage
        self._staged_batches += stage.batches
        self._staged_bytes += stage.size

    # --- writing ----------------------------------------------------------------------------

    async def stage(
        self,
        caller: Caller,
        key: str,
        part: str,
        number: int,
        staged_batches: Sequence[StagedBatch],
        turn: Turn | None = None,
    ) -> PartSummary:
        """Store batches for a part of a stage; create the stage if it does not exist. With `turn`,
        the stage is this turn of a series. The batches must have passed `Batch.parse`, and their
        bytes must not change until this returns. A writer numbers its calls from 0, and repeats a
        call unchanged if it gets no response. Return the summary of the part, for the commit.

        Raise UnknownTopic, UnknownPartition, CorruptBatch, UnsupportedBatch, RecordTooLarge,
        StageConflict (StageCommitted if the key or turn was committed), TurnOutdated, LimitReached
        or InvalidRequest.
        """
        self._lifecycle.check_open()
        check_name("a stage's key", key)
        check_name("a part's name", part)
        check_turn(turn)
        header = make_header(key, part, number, staged_batches, turn)
        check_call(header)
        for target, batch in staged_batches:
            self._check_batch(self._topics.of(target), batch)
        return await self._lifecycle.run_shielded(self._stage(header, staged_batches))

    # --- ending -----------------------------------------------------------------------------

    async def commit(
        self,
        caller: Caller,
        key: str,
        summaries: Sequence[PartSummary] | None = None,
        *,
        contents_digest: str = "",
        turn: Turn | None = None,
    ) -> CommittedStage:
        """Make the records of some parts visible, all at once; discard the other parts. `summaries`
        names the parts, each by the `PartSummary` that staging it returned; None means all parts.
        `contents_digest` is the client's digest of the committed data: a repeated commit is
        recognised by it, even if the parts were staged again. Without it, the summaries identify
        the data. A turn of a series is committed once, whatever the key and contents: repeating the
        last turn adds nothing.

        Raise UnknownStage, UnknownTopic, UnknownPartition, NoSubscriber, TurnOutdated for a turn
        before the last one, or StageConflict (other contents were committed, or a part does not
        match its summary).
        """
        self._lifecycle.check_open()
        check_name("a stage's key", key)
        if len(contents_digest.encode(errors="replace")) > shared_limits.STATE_KEY_BYTES:
            raise InvalidRequest(f"contents may have {shared_limits.STATE_KEY_BYTES} bytes at most")
        check_turn(turn)
        if turn is None:
            commit = self._commit(key, summaries, contents_digest)
        else:
            commit = self._commit_turn(key, summaries, contents_digest, turn)
        return await self._lifecycle.run_shielded(commit)

    async def abort(self, caller: Caller, key: str) -> bool:
        """Delete a stage; return whether it existed. Raise StageConflict if it was committed."""
        self._lifecycle.check_open()
        check_name("a stage's key", key)
        return await self._lifecycle.run_shielded(self._abort(key))

    # --- administration -----------------------------------------------------------------------

    def all(self, caller: Caller) -> list[StageDescription]:
        """Describe every stage that is neither committed nor aborted."""
        self._lifecycle.check_open()
        return [stage.description() for stage in self._stages.values()]

    def describe(self, caller: Caller, key: str) -> StageDescription | CommittedStage:
        """Describe a stage or a remembered commit. Raise UnknownStage."""
        self._lifecycle.check_open()
        committed, stage = self._committed.get(key), self._stages.get(key)
        if committed is not None:
            return committed
        if stage is None:
            raise _unknown_error(key)
        return stage.description()

    def series(self, caller: Caller) -> dict[str, CommittedTurn]:
        """Return the last committed turn of every series."""
        self._lifecycle.check_open()
        return self._series.all()

    async def forget_series(self, caller: Caller, series: str) -> bool:
        """Forget a series, so that its next turn may have any number. Return whether it existed."""
        self._lifecycle.check_open()
        return await self._lifecycle.run_shielded(self._forget_series(series))

    async def clean(self) -> None:
        """Delete abandoned stages, and forget old commits and series."""
        now_ms = self._now_ms()
        if 0 <= now_ms - self._last_clean_ms < limits.STAGE_EXPIRY_INTERVAL_MS:
            return
        self._last_clean_ms = now_ms
        for key in [key for key in self._stages if self._is_abandoned(key)]:
            await self._lifecycle.run_shielded(self._expire(key))
        since_ms = self._clock.expired_before(limits.STAGE_REMEMBERED_MS)
        for key in [key for key, each in self._committed.items() if each.committed_ms <= since_ms]:
            await self._lifecycle.run_shielded(self._forget_commit(key))
        series_since_ms = self._clock.expired_before(limits.STAGE_SERIES_REMEMBERED_MS)
        for series in self._series.idle_since(series_since_ms):
            await self._lifecycle.run_shielded(self._forget_series(series))

    # --- implementation ---------------------------------------------------------------------

    async def _stage(self, header: Header, staged_batches: Sequence[StagedBatch]) -> PartSummary:
        """Append a call to its part, unless it repeats an earlier one. Return the summary of the
        part."""
        if header.key not in self._stages:
            # Check the limits before creating a stage: an empty stage counts as one, too.
            self._check_limits(len(staged_batches), header.size)
        if header.turn is None or header.key in self._stages:
            stage = await self._find_or_create(header.key, header.turn)
        else:
            stage = await self._open_turn(header.key, header.turn)
        stage.check_turn(header.turn)
        part = stage.part(header.part)
        async with part.lock:
            stage.check_accepts_calls()
            if not part.is_repeat(header):
                self._add_usage(stage, len(staged_batches), header.size)
                try:
                    part.add(await self._append(stage, header, staged_batches))
                    await self._check_not_missed(stage)
                except QuackError:
                    self._add_usage(stage, -len(staged_batches), -header.size)
                    raise
            return part.summary()

    async def _check_not_missed(self, stage: Stage) -> None:
        """Check that a commit did not miss the call that was just appended. If a commit is running,
        wait for it; the call counts only if that commit fails. Raise StageConflict."""
        if stage.is_ending:
            async with self._locks.hold(stage.key):
                stage.check_accepts_calls()

    async def _open_turn(self, key: str, turn: Turn) -> Stage:
        """Return the stage of a turn; create it if needed. Delete the oldest stages of the series
        if there are too many."""
        # Lock order: the lock of a series before the lock of a key.
        async with self._locks.hold(_series_lock(turn)):
            self._series.check_writable(turn)
            others = sorted(self._stages_of_series(turn.series), key=lambda stage: stage.touched_ms)
            for stage in others[: max(0, len(others) + 1 - limits.STAGES_PER_SERIES)]:
                log.info("deleting the stage %s: the series has newer stages", stage.key)
                await self._abort(stage.key)
            return await self._find_or_create(key, turn)

    async def _find_or_create(self, key: str, turn: Turn | None) -> Stage:
        """Return the stage of this key; create it if there is none. Raise StageCommitted or
        LimitReached."""
        async with self._locks.hold(key):
            if key in self._committed:
                raise StageCommitted(f"stage {key} was committed: use another key")
            stage = self._stages.get(key)
            if stage is None:
                if len(self._stages) >= limits.STAGES:
                    raise LimitReached(f"there are {limits.STAGES} stages: commit or abort some")
                if len(self._committed) >= limits.COMMITTED_STAGES:
                    raise LimitReached(
                        f"{limits.COMMITTED_STAGES} commits are remembered, the limit: try again "
                        "later, or write turns of a series"
                    )
                await self._remove_damaged(key)
                topic = await self._store.create_topic(topic_name(key), 1, Policy())
                stage = self._stages[key] = Stage(key, topic.id, self._now_ms(), turn)
            return stage

    async def _append(
        self, stage: Stage, header: Header, staged_batches: Sequence[StagedBatch]
    ) -> Call:
        """Append a call to the stage's log. Raise StageConflict if the stage has ended."""
        await self._store.room()
        now_ms = self._now_ms()
        appends = [Append(stage.source, encode_header(header, now_ms))]
        appends += [Append(stage.source, without_producer(batch)) for _, batch in staged_batches]
        try:
            results = await self._store.append(appends)
        except UnknownTopic:
            raise StageConflict(f"stage {header.key} has ended") from None
        stage.touched_ms = now_ms
        return Call(header, results[0].next_offset)

    async def _commit(
        self, key: str, summaries: Sequence[PartSummary] | None, contents_digest: str
    ) -> CommittedStage:
        """Commit a stage without a series, or repeat the result of its commit."""
        async with self._locks.hold(key):
            committed = self._committed.get(key)
            if committed is not None:
                return _repeat_commit(key, committed, summaries, contents_digest)
            return await self._commit_and_record(key, summaries, contents_digest, None)

    async def _commit_turn(
        self, key: str, summaries: Sequence[PartSummary] | None, contents_digest: str, turn: Turn
    ) -> CommittedStage:
        """Commit a turn of a series, or repeat the result of the last turn. Remove the stages of
        earlier turns."""
        async with self._locks.hold(_series_lock(turn)):
            self._series.check_not_outdated(turn)
            last = self._series.last(turn.series)
            if last is not None and turn.number == last.number:
                log.info(
                    "turn %d of the series %s is already committed: nothing is added",
                    last.number,
                    turn.series,
                )
                return CommittedStage(last.contents, last.records, last.committed_ms, repeated=True)
            self._series.check_writable(turn)
            async with self._locks.hold(key):
                committed = await self._commit_and_record(key, summaries, contents_digest, turn)
            for stage in self._stages_of_series(turn.series):
                async with self._locks.hold(stage.key):
                    if self._is_committed(stage) and not stage.is_removed:
                        self._remove_stage(stage)
                        await self._remove_topic(stage.topic_id)
            return committed

    async def _commit_and_record(
        self,
        key: str,
        summaries: Sequence[PartSummary] | None,
        contents_digest: str,
        turn: Turn | None,
    ) -> CommittedStage:
        """Commit a stage, record the commit, and remove the stage. A stage that was never created
        may be committed without parts."""
        stage = self._stages.get(key)
        topics: tuple[str, ...] = ()
        if stage is None:
            # Only a commit that names no part at all needs no stage.
            if summaries is None or summaries:
                raise _unknown_error(key)
            committed = CommittedStage(contents_digest or digest_summaries([]), 0, self._now_ms())
            await self._store.put_state(*self._make_commit_put(key, turn, committed, ()))
        else:
            stage.check_turn(turn)
            committed, topics = await self._commit_stage(stage, summaries, contents_digest)
        if turn is None:
            self._committed[key] = committed
        else:
            self._series.set_last(turn, _make_committed_turn(turn, committed, topics))
        if stage is not None:
            self._remove_stage(stage)
            await self._remove_topic(stage.topic_id)
        return committed

    def _make_commit_put(
        self, key: str, turn: Turn | None, committed: CommittedStage, topics: tuple[str, ...]
    ) -> StatePut:
        """Return the state change that records a commit: of the series if there is a turn, else of
        the key."""
        if turn is None:
            return StatePut(state_key(key), encode_committed(committed), 0)
        return self._series.make_put(turn, _make_committed_turn(turn, committed, topics))

    async def _commit_stage(
        self, stage: Stage, summaries: Sequence[PartSummary] | None, contents_digest: str
    ) -> tuple[CommittedStage, tuple[str, ...]]:
        """Copy the named parts to their topics. Return the commit and the names of these topics.
        Without a digest from the client, that of the parts' summaries is recorded."""
        stage.is_ending = True  # calls that arrive from here on are not part of this commit
        try:
            summaries = stage.part_summaries() if summaries is None else summaries
            calls = [call for part in stage.find_parts(summaries) for call in part.calls]
            topics = self._check_targets(calls)
            records = sum(call.header.records for call in calls)
            contents_digest = contents_digest or digest_summaries(summaries)
            committed = CommittedStage(contents_digest, records, self._now_ms())
            put = self._make_commit_put(stage.key, stage.turn, committed, topics)
            await self._copier.copy(stage.source, calls, put)
        except BaseException:
            stage.is_ending = False
            raise
        return committed, topics

    async def _abort(self, key: str) -> bool:
        """Delete a stage; return whether it existed."""
        async with self._locks.hold(key):
            if key in self._committed:
                raise StageConflict(f"stage {key} was committed")
            stage = self._stages.get(key)
            if stage is None:
                return await self._remove_damaged(key)
            await self._store.delete_topic(stage.topic_id)
            self._remove_stage(stage)
            return True

    async def _remove_damaged(self, key: str) -> bool:
        """Delete the topic of an unreadable stage; return whether there was one."""
        topic_id = self._unreadable_topics.get(topic_name(key))
        if topic_id is None:
            return False
        await self._store.delete_topic(topic_id)
        del self._unreadable_topics[topic_name(key)]
        return True

    async def _remove_topic(self, topic_id: UUID) -> None:
        try:
            await self._store.delete_topic(topic_id)
        except StorageError as error:
            log.error("cannot delete the topic of an ended stage until the next start: %s", error)

    async def _expire(self, key: str) -> None:
        if self._is_abandoned(key) and await self._abort(key):
            log.info("deleted the stage %s: its writers have abandoned it", key)

    async def _forget_commit(self, key: str) -> None:
        async with self._locks.hold(key):
            state = await self._store.state(state_key(key))
            await self._store.put_state(state_key(key), None, state.version)
            del self._committed[key]

    async def _forget_series(self, series: str) -> bool:
        async with self._locks.hold(_series_lock(Turn(series, 0))):
            return await self._series.forget(series)

    async def _read_stage(self, topic: Topic) -> Stage | None:
        """Rebuild a stage from the headers in its hidden topic. Return None if the topic is empty:
        no call was acknowledged."""
        source = PartitionKey(topic.id, 0)
        offsets = await self._store.offsets(source)
        stage: Stage | None = None
        offset = offsets.first
        while offset < offsets.next:
            (part,) = await self._store.read([Read(source, offset, 1)], max_bytes=1)
            if part.error is not None:
                raise part.error
            batch = next(batches(part.chunks[0]))
            header = decode_header(batch)
            if stage is None:
                stage = Stage(header.key, topic.id, batch.max_timestamp, header.turn)
            stage.part(header.part).add(Call(header, batch.next_offset))
            stage.batches += len(header.entries)
            stage.size += header.size
            stage.touched_ms = max(stage.touched_ms, batch.max_timestamp)
            offset = batch.next_offset + header.records
        return stage

    # --- helpers ----------------------------------------------------------------------------

    def _check_limits(self, count: int, size: int) -> None:
        if count > 0 and self._staged_batches + count > limits.STAGED_BATCHES:
            raise LimitReached(f"{self._staged_batches} batches are staged: commit or abort some")
        if size > 0 and self._staged_bytes + size > limits.STAGED_BYTES:
            raise LimitReached(f"{self._staged_bytes} bytes are staged: commit or abort some")

    def _add_usage(self, stage: Stage, count: int, size: int) -> None:
        """Count batches and bytes for the limits; negative numbers subtract. Raise LimitReached."""
        self._check_limits(count, size)
        stage.batches += count
        stage.size += size
        if not stage.is_removed:
            self._staged_batches += count
            self._staged_bytes += size

    def _remove_stage(self, stage: Stage) -> None:
        stage.is_ending = stage.is_removed = True
        del self._stages[stage.key]
        self._staged_batches -= stage.batches
        self._staged_bytes -= stage.size

    def _stages_of_series(self, series: str) -> list[Stage]:
        stages = self._stages.values()
        return [each for each in stages if each.turn is not None and each.turn.series == series]

    def _is_committed(self, stage: Stage) -> bool:
        """Return whether the stage's key or turn was committed."""
        if stage.turn is None:
            return stage.key in self._committed
        return self._series.has_committed(stage.turn)

    def _is_abandoned(self, key: str) -> bool:
        stage = self._stages.get(key)
        if stage is None or stage.is_ending:
            return False
        return stage.touched_ms <= self._clock.expired_before(limits.STAGE_EXPIRY_MS)

    def _check_batch(self, topic: Topic, batch: Batch) -> None:
        """Check a batch as `publish` does. Raise UnsupportedBatch, CorruptBatch or
        RecordTooLarge."""
        if batch.attributes & TRANSACTION_FLAGS:
            raise UnsupportedBatch("a staged batch must be neither transactional nor a marker")
        check_records(batch)
        check_sizes(topic, batch)

    def _check_targets(self, calls: Sequence[Call]) -> tuple[str, ...]:
        """Return the names of the topics that these calls write to. Raise UnknownTopic,
        UnknownPartition or NoSubscriber."""
        names: set[str] = set()
        for key in dict.fromkeys(entry.key for call in calls for entry in call.header.entries):
            topic = self._topics.of(key)
            if topic.policy.needs_subscriber and not self._count_subscriptions(topic.id):
                raise NoSubscriber(
                    f"topic {topic.name} accepts no records without a subscription: subscribe first"
                )
            names.add(topic.name)
        return tuple(sorted(names))


def _repeat_commit(
    key: str,
    committed: CommittedStage,
    summaries: Sequence[PartSummary] | None,
    contents_digest: str,
) -> CommittedStage:
    """Return the first result of a repeated commit. Raise StageConflict if its contents differ."""
    if not contents_digest and summaries is not None:
        contents_digest = digest_summaries(summaries)
    if contents_digest and contents_digest != committed.contents:
        raise StageConflict(
            f"stage {key} was committed with other contents, of {committed.records} records"
        )
    log.info("stage %s is already committed: nothing is added", key)
    return committed._replace(repeated=True)


def _make_committed_turn(
    turn: Turn, committed: CommittedStage, topics: tuple[str, ...]
) -> CommittedTurn:
    return CommittedTurn(
        turn.number, committed.contents, committed.records, committed.committed_ms, topics
    )


def _series_lock(turn: Turn) -> Hashable:
    """Return a lock name that differs from every stage's key."""
    return ("series", turn.series)


def _unknown_error(key: str) -> UnknownStage:
    return UnknownStage(f"there is no stage {key}: it never existed, was aborted, or has expired")
