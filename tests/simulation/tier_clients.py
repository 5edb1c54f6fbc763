"""Users of a store with an archive: who publish, archive, merge, trim, delete, read, hold on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

from quackmq import limits
from quackmq.archive.archiving.archiver import Archiver
from quackmq.archive.manifest import ArchiveFile, Quarantined
from quackmq.archive.merging.merger import Merger
from quackmq.archive.merging.planner import MergeSettings
from quackmq.archive.pins import Pin
from quackmq.archive.tiered_store import TieredStore
from quackmq.broker.lifecycle import Lifecycle
from quackmq.broker.retention.service import Failure, Retention
from quackmq.clock import Clock
from quackmq.errors import (
    DamagedData,
    InvalidRequest,
    NotFound,
    OffsetOutOfRange,
    StorageError,
    TopicExists,
)
from quackmq.model.log_transactions import Marker, marker_batch
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, Cursor, CursorKey, PartitionKey, Read
from quackmq.records.batch import Batch
from tests.archive.archiving import archive
from tests.simulation.disk import SimulatedDisk
from tests.simulation.loop import Clock as WorldClock
from tests.simulation.model import Register, Violation, make_body
from tests.simulation.platter import Counts
from tests.simulation.tier_truth import End, Sent, Transaction, Truth

NAMES = ("ducks", "geese")
#: The second lets go of what is old. The age of a record is known to a second.
KEEP_FOR_MS = 3_000
POLICIES = {
    "ducks": Policy(
        archive_bytes=1_500, archive_after_ms=None, live_for_ms=30, archive_after_live_ms=20
    ),
    "geese": Policy(archive_bytes=1_500, archive_after_ms=50, keep_for_ms=KEEP_FOR_MS),
}


@dataclass
class Tiers:
    """One life of the process, as its clients share it."""

    store: TieredStore
    disk: SimulatedDisk
    truth: Truth
    source: random.Random
    counts: Counts
    clock: Clock
    world: WorldClock
    pins: list[Pin] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.archiver = Archiver(
            self.store, lambda: self.truth.topics, self.clock, lambda producer_id: None
        )
        self.merger = Merger(
            self.store.registry, MergeSettings(target_bytes=20_000, growth=2, most_files=3)
        )

    def some_partition(self) -> PartitionKey | None:
        topics = self.truth.live()
        if not topics:
            return None
        topic = self.source.choice(topics)
        return PartitionKey(topic.id, self.source.randrange(topic.partitions))

    def excuse(self, key: PartitionKey, error: Exception) -> None:
        if key.topic_id not in self.truth.doomed:
            raise Violation(f"{key} is gone, and nobody deleted it") from error


class Publisher:
    name = "publisher"

    async def step(self, life: Tiers) -> None:
        keys = [key for _ in range(life.source.randint(1, 3)) if (key := life.some_partition())]
        if keys:
            await publish(life, [life.truth.send(key, _sizes(life)) for key in keys])


class Transactor:
    """Begins, writes, and ends what it began, or leaves it open for the next to end."""

    name = "transactor"

    async def step(self, life: Tiers) -> None:
        truth, source = life.truth, life.source
        left = [each for each in truth.transactions if each.ends == {"open"} and each.keys]
        if left and source.random() < 0.6:
            await end(life, source.choice(left), source.choice(("commit", "abort")))
            return
        transaction = truth.begin()
        sequences: dict[PartitionKey, int] = {}
        for _ in range(source.randint(1, 3)):
            key = life.some_partition()
            if key is None:
                return
            sent = truth.send(key, _sizes(life), transaction)
            await publish(life, [sent], sequences.get(key, 0))
            if sent.offset is None:
                return
            transaction.keys.add(key)
            sequences[key] = sequences.get(key, 0) + len(sent.values)


async def publish(life: Tiers, batches: list[Sent], sequence: int = 0) -> None:
    appends = []
    for sent in batches:
        transaction = sent.transaction
        producer = None if transaction is None else (transaction.producer_id, 0, sequence)
        sent.since_ms = life.world.true_ms()
        body = make_body(
            sent.values, life.clock.now_ms(), producer, transactional=transaction is not None
        )
        appends.append(Append(sent.key, Batch.parse(body)))
    try:
        answers = await life.store.append(appends)
    except NotFound as error:
        if not {sent.key.topic_id for sent in batches} & life.truth.doomed:
            raise Violation("a topic is gone, and nobody deleted it") from error
        return
    for sent, answer in zip(batches, answers, strict=True):
        life.truth.place(sent, answer.base_offset)
    life.counts["batches published"] += len(batches)


async def end(life: Tiers, transaction: Transaction, how: End) -> None:
    marker = Marker.COMMIT if how == "commit" else Marker.ABORT
    body = marker_batch(transaction.producer_id, 0, marker, life.clock.now_ms())
    keys = sorted(await life.store.open_transactions(transaction.producer_id))
    if {key.topic_id for key in transaction.keys} & (life.truth.doomed - life.truth.gone):
        return  # nobody can say whether it ends there, too
    appends = [Append(key, Batch.parse(body)) for key in keys]
    transaction.ends.add(how)
    if appends:
        try:
            await life.store.append(appends)
        except NotFound as error:
            if not {key.topic_id for key in keys} & life.truth.doomed:
                raise Violation("a topic is gone, and nobody deleted it") from error
            transaction.ends.discard(how)
            return
    transaction.ends.discard("open")
    life.counts[f"transactions ended by {how}"] += 1


class Archivist:
    """Archives: with the broker's archiver, or a piece of one partition by hand."""

    name = "archivist"

    async def step(self, life: Tiers) -> None:
        key = life.some_partition()
        if key is None:
            return
        choice = life.source.random()
        try:
            if choice < 0.3:
                await life.archiver.archive()
            elif choice < 0.5:
                await life.archiver.archive_due()
            else:
                before = life.source.randint(0, life.truth.partition(key).next)
                trims = life.source.random() < 0.7
                await archive(life.store, key, before, trims=trims)
            life.counts["archivings"] += 1
        except (InvalidRequest, OffsetOutOfRange):
            life.counts["archivings that a trim overtook"] += 1
        except NotFound as error:
            life.excuse(key, error)
        except StorageError as error:
            if not life.disk.failed:
                raise Violation(f"archiving met {error!r}") from error
            life.counts["archivings that failed"] += 1


class MergingClient:
    name = "merger"

    async def step(self, life: Tiers) -> None:
        try:
            merged = await life.merger.merge_due()
        except StorageError as error:
            # What is merged may go with its topic, directory and all.
            if not life.disk.failed and not life.truth.doomed:
                raise Violation(f"merging met {error!r}") from error
            return
        life.counts["merges"] += merged.merges


class Trimmer:
    name = "trimmer"

    async def step(self, life: Tiers) -> None:
        key = life.some_partition()
        if key is None or life.source.random() < 0.5:
            return
        partition = life.truth.partition(key)
        before = life.source.randint(0, partition.next)
        partition.first_at_most = max(partition.first_at_most, before)
        try:
            first = await life.store.trim(key, before)
        except NotFound as error:
            life.excuse(key, error)
            return
        if first < before:
            raise Violation(f"{key} was trimmed before {before} and begins at {first}")
        partition.first = max(partition.first, first)
        life.counts["trims"] += 1


class Retainer:
    """The broker's retention, which lets go of what is old, in the log or archived."""

    name = "retention"

    def __init__(self) -> None:
        self._retention: Retention | None = None

    async def step(self, life: Tiers) -> None:
        # Time passes, or nothing would ever be old.
        await asyncio.sleep(life.source.choice((0, 0.1, 2)))
        if self._retention is None:
            store: Any = _Watched(life)
            self._retention = Retention(
                store,
                life.clock,
                _NoHolds(),
                0,
                lambda key, first: None,
                Lifecycle(),
                archive=life.store,
            )
        retention, live = self._retention, life.truth.live()
        for topic in live:
            retention.topic_changed(topic)
        await retention.clean()
        for failure in retention.failures():
            if failure.topic_name in {topic.name for topic in live} and not life.disk.failed:
                self._complain(life, failure)

    def _complain(self, life: Tiers, failure: Failure) -> None:
        if isinstance(failure.error, Violation):
            raise failure.error
        if not life.truth.doomed:
            raise Violation(f"retention of {failure.topic_name} met {failure.error!r}")


class _Watched:
    """The store as retention has it: what it lets go of must be old enough."""

    def __init__(self, life: Tiers) -> None:
        self._life = life

    def __getattr__(self, name: str) -> Any:
        return getattr(self._life.store, name)

    async def trim(self, key: PartitionKey, before: int) -> int:
        life = self._life
        # By the time that really passed, whatever the wall clock says.
        least_ms = KEEP_FOR_MS - KEEP_FOR_MS // limits.CLOCK_PACE
        old_ms = life.world.true_ms() - least_ms + limits.REGION_MS
        partition = life.truth.expire(key, before, old_ms)
        first = await life.store.trim(key, before)
        partition.first = max(partition.first, first)
        life.counts["trims by age"] += 1
        return first


class _NoHolds:
    async def sort_push(self, key: PartitionKey) -> None:
        return

    def lowest_hold(self, key: PartitionKey) -> int | None:
        return None

    def names_behind(self, key: PartitionKey, offset: int) -> Sequence[str]:
        return ()

    def holders(self, key: PartitionKey, offset: int) -> None:
        return None

    def topic_deleted(self, topic_id: UUID) -> None:
        """Nothing is kept."""


class Administrator:
    """Topics come, and now and then go, and come again under their name."""

    name = "administrator"

    async def step(self, life: Tiers) -> None:
        truth = life.truth
        name = life.source.choice(NAMES)
        topic = truth.topics.get(name)
        if topic is None:
            try:
                made = await life.store.create_topic(
                    name, life.source.randint(1, 2), POLICIES[name]
                )
            except TopicExists:
                return
            truth.topics[name] = made
        elif life.source.random() < 0.06 and topic.id not in truth.doomed:
            truth.doomed.add(topic.id)
            await life.store.delete_topic(topic.id)
            truth.gone.add(topic.id)
            truth.topics.pop(name, None)
            life.archiver.forget(topic)
            life.counts["topics deleted"] += 1


class CursorKeeper:
    name = "cursors"

    async def step(self, life: Tiers) -> None:
        key = life.some_partition()
        if key is None:
            return
        cursor_key = CursorKey("reader", *key)
        register = life.truth.cursors.setdefault(cursor_key, Register(f"{cursor_key}", None))
        value = len(life.truth.sent)
        register.maybe.append(value)
        try:
            await life.store.set_cursors([Cursor(cursor_key, value)])
        except NotFound as error:
            life.excuse(key, error)
            return
        register.settle(value)


class Reader:
    """Reads from anywhere, some partitions in the log and some in the archive, and waits."""

    name = "reader"

    async def step(self, life: Tiers) -> None:
        source = life.source
        reads: list[Read] = []
        for _ in range(source.randint(1, 3)):
            key = life.some_partition()
            if key is None:
                return
            try:
                offsets = await life.store.offsets(key)
            except NotFound as error:
                life.excuse(key, error)
                return
            offset = source.randint(offsets.first, offsets.next)
            size = source.choice((1, 500, 5_000, 100_000))
            reads.append(Read(key, offset, size, source.random() < 0.3))
        at_least = [life.truth.partition(read.key).next for read in reads]
        slices = await life.store.read(
            reads,
            max_bytes=source.choice((1, 2_000, 100_000)),
            min_bytes=source.choice((1, 1, 3_000)),
            wait_ms=source.choice((0, 0, 20, 300)),
        )
        for index, (read, found) in enumerate(zip(reads, slices, strict=True)):
            if isinstance(found.error, NotFound):
                life.excuse(read.key, found.error)
            elif isinstance(found.error, OffsetOutOfRange):
                if found.first_offset <= read.offset <= found.next_offset:
                    raise Violation(f"{read} is in range, the answer is {found}")
            elif found.error is not None:
                if not life.disk.failed or isinstance(found.error, DamagedData):
                    self._forgive(life, read, found.error)
            else:
                if found.next_offset < at_least[index]:
                    raise Violation(f"{read}: the end is at {found.next_offset}")
                life.truth.check_slice(read, found)
                life.counts["slices read"] += 1

    def _forgive(self, life: Tiers, read: Read, error: Exception) -> None:
        """A sync that failed may have cost pages of the log that were only cached."""
        if not life.disk.failed or "archive/" in str(error):
            raise Violation(f"{read} met {error!r}") from error
        life.counts["reads that met a failed disk"] += 1


class Holder:
    """Holds on to manifests, and finds every file of them whole, whatever went on since."""

    name = "holder"

    async def step(self, life: Tiers) -> None:
        key = life.some_partition()
        if key is not None and life.source.random() < 0.6:
            try:
                life.pins.append(life.store.registry.pin(key))
            except NotFound:
                return  # nothing of it is archived
        if life.pins and life.source.random() < 0.6:
            pin = life.pins.pop(life.source.randrange(len(life.pins)))
            held = pin.manifest
            if held.key.topic_id not in life.truth.doomed:
                reader = life.store.registry.reader
                listed: list[ArchiveFile | Quarantined] = [*held.files, *held.quarantined]
                for file in listed:
                    try:
                        await life.disk.run(partial(reader.verify, held, file), "read")
                    except DamagedData as error:
                        if held.key.topic_id not in life.truth.doomed:
                            raise Violation(f"a file that is held is not there: {error}") from error
                life.counts["manifests held"] += 1
            pin.release()


def _sizes(life: Tiers) -> list[int]:
    count = life.source.choice((1, 1, 2, 5))
    return [life.source.choice((0, 10, 100, 600)) for _ in range(count)]
