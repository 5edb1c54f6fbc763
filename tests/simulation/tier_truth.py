"""What was published, record by record, and what log and archive together must still show of it.

Batches cannot be told by their bytes here, since the archive makes others of the same records; but
every value is different from every other, so a record that is found is known at once: who sent it,
where it must lie, whether it may be there at all.

A plain record that was acknowledged, or seen once, is there until it is trimmed. A record of a
transaction is there while that is open and when it was committed; when it was aborted it may be
there (in the log, for those who want everything) or not (in the archive, which has no use for it).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Literal

from quackmq.archive import manifest as manifests
from quackmq.archive.layout import ARCHIVE
from quackmq.archive.tiered_store import TieredStore
from quackmq.errors import DamagedData
from quackmq.model.topic import AbortedTransaction, CursorKey, PartitionKey, Read, Slice, Topic
from quackmq.records.batch import Batch, batches
from quackmq.records.codec import decode
from quackmq.stores.contract import Store
from quackmq.stores.local import LocalStore
from tests.simulation.disk import Machine
from tests.simulation.model import Register, Violation, attempt_number

PLENTY_BYTES = 1 << 20
End = Literal["open", "commit", "abort"]


@dataclass(eq=False)
class Transaction:
    """`ends` are those that are possible; more than one while nobody knows what became of a call
    that ended it."""

    producer_id: int
    keys: set[PartitionKey] = field(default_factory=set)
    ends: set[End] = field(default_factory=lambda: {"open"})

    @property
    def may_be_missing(self) -> bool:
        return "abort" in self.ends


@dataclass(eq=False)
class Sent:
    """Records that somebody sent to a partition as one batch."""

    number: int
    key: PartitionKey
    values: tuple[bytes, ...]
    transaction: Transaction | None
    offset: int | None = None
    #: It was appended then or later.
    since_ms: int = 0

    @property
    def may_be_missing(self) -> bool:
        return self.transaction is not None and self.transaction.may_be_missing

    def __str__(self) -> str:
        return f"batch {self.number} of {len(self.values)} records at {self.offset}"


@dataclass(eq=False)
class PartitionTruth:
    at: dict[int, Sent] = field(default_factory=dict)
    first: int = 0
    #: Where it may begin because a trim's outcome is unknown.
    first_at_most: int = 0
    next: int = 0


class Truth:
    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.partitions: dict[PartitionKey, PartitionTruth] = {}
        self.transactions: list[Transaction] = []
        self.cursors: dict[CursorKey, Register[int | None]] = {}
        self.topics: dict[str, Topic] = {}
        #: Deletion was asked for; and is certain.
        self.doomed: set[uuid.UUID] = set()
        self.gone: set[uuid.UUID] = set()
        self._producer_ids = 0

    # --- what clients say ------------------------------------------------------------------------

    def partition(self, key: PartitionKey) -> PartitionTruth:
        return self.partitions.setdefault(key, PartitionTruth())

    def send(
        self, key: PartitionKey, sizes: list[int], transaction: Transaction | None = None
    ) -> Sent:
        number = len(self.sent)
        values = tuple(
            b"%d.%d:" % (number, index) + b"x" * size for index, size in enumerate(sizes)
        )
        self.sent.append(Sent(number, key, values, transaction))
        return self.sent[-1]

    def begin(self) -> Transaction:
        self._producer_ids += 1
        self.transactions.append(Transaction(self._producer_ids))
        return self.transactions[-1]

    def place(self, sent: Sent, offset: int) -> None:
        """A batch lies at an offset: for good, and alone."""
        if sent.offset not in (None, offset):
            raise Violation(f"{sent} also lies at {offset}: it is there twice")
        partition = self.partition(sent.key)
        for each in range(offset, offset + len(sent.values)):
            other = partition.at.setdefault(each, sent)
            if other is not sent:
                raise Violation(f"offset {each} had {other} and has {sent} now")
        sent.offset = offset
        partition.next = max(partition.next, offset + len(sent.values))

    def expire(self, key: PartitionKey, before: int, born_before_ms: int) -> PartitionTruth:
        """Retention is about to let go of all before an offset, which it may only if that is old
        enough."""
        partition = self.partition(key)
        for offset in range(partition.first, before):
            sent = partition.at.get(offset)
            if sent is None or sent.may_be_missing:
                continue
            if sent.since_ms > born_before_ms:
                raise Violation(f"{sent} of {key} goes {sent.since_ms - born_before_ms} ms early")
        partition.first_at_most = max(partition.first_at_most, before)
        return partition

    def live(self) -> list[Topic]:
        return [each for _, each in sorted(self.topics.items()) if each.id not in self.doomed]

    # --- what readers see ------------------------------------------------------------------------

    def see(self, key: PartitionKey, offset: int, value: bytes) -> Sent:
        number = attempt_number(value)
        sent = self.sent[number] if number < len(self.sent) else None
        if sent is None or value not in sent.values:
            raise Violation(f"nobody sent what lies at {offset} of {key}")
        if sent.key != key:
            raise Violation(f"{sent} is readable in {key}")
        self.place(sent, offset - sent.values.index(value))
        return sent

    def check_slice(self, read: Read, found: Slice) -> int:
        """Every record of an answer is what and where it should be, and none is missing that lies
        between two of them. Where the next read goes on."""
        partition = self.partition(read.key)
        position = read.offset
        for batch in _batches(found):
            self._check_skipped(partition, position, batch.base_offset, found)
            for offset, value in records_of(batch):
                if offset < read.offset:
                    continue
                self._check_skipped(partition, position, offset, found)
                self.see(read.key, offset, value)
                position = offset + 1
            if batch.next_offset > found.next_offset:
                raise Violation(f"{read}: {batch.next_offset} lies beyond {found.next_offset}")
            position = max(position, batch.next_offset)
        return position

    def _check_skipped(self, partition: PartitionTruth, begin: int, end: int, found: Slice) -> None:
        for offset in range(max(begin, found.first_offset), end):
            sent = partition.at.get(offset)
            if sent is not None and not sent.may_be_missing:
                raise Violation(f"{sent} was skipped at {offset}: {_shape(found)}")

    # --- after each opening ----------------------------------------------------------------------

    async def check(self, store: TieredStore, machine: Machine, *, sound: bool) -> None:
        """Everything. `sound` unless the disk failed already in this life."""
        await self._check_topics(store)
        await self._settle_transactions(store)
        for topic in self.live():
            for number in range(topic.partitions):
                key = PartitionKey(topic.id, number)
                problem = store.registry.problem(key)
                if problem is not None:
                    if sound:
                        raise Violation(f"{key} has a problem: {problem!r}") from problem
                    continue
                await self._check_partition(store, key)
                self._check_archive(store, key, machine, sound)
        if sound:
            self._check_directories(machine)
        cursors = await store.cursors()
        for cursor_key, register in self.cursors.items():
            if cursor_key.topic_id not in self.doomed:
                cursor = cursors.get(cursor_key)
                register.observe(None if cursor is None else cursor.offset)

    async def _check_topics(self, store: Store) -> None:
        topics = await store.topics()
        ids = {topic.id for topic in topics.values()}
        if ids & self.gone:
            raise Violation("a topic that was deleted is there again")
        for name, topic in self.topics.items():
            if topic.id not in ids and topic.id not in self.doomed:
                raise Violation(f"{name} is gone, and nobody deleted it")
        self.gone |= {topic.id for topic in self.topics.values()} - ids
        self.doomed = set(self.gone)
        self.topics = dict(topics)

    async def _settle_transactions(self, store: Store) -> None:
        """Which of those are open whose end was asked for, and not answered."""
        opened = await store.open_transactions()
        open_ids = {producer_id for each in opened.values() for producer_id in each}
        for transaction in self.transactions:
            if transaction.producer_id in open_ids:
                if "open" not in transaction.ends:
                    raise Violation(f"{transaction} was ended, and is open again")
                transaction.ends = {"open"}
            elif len(transaction.ends) > 1:
                transaction.ends.discard("open")

    async def _check_partition(self, store: TieredStore, key: PartitionKey) -> None:
        partition = self.partition(key)
        offsets = await store.offsets(key)
        if not partition.first <= offsets.first <= max(partition.first, partition.first_at_most):
            raise Violation(f"{key} began at {partition.first} and has {offsets} now")
        if offsets.next < partition.next:
            raise Violation(f"{key} ended at {partition.next} and has {offsets} now")
        partition.first = partition.first_at_most = offsets.first
        seen = await self._scan(store, key, offsets.first, offsets.next, committed=False)
        shown = await self._scan(store, key, offsets.first, offsets.stable, committed=True)
        for offset, sent in partition.at.items():
            if offset < offsets.first:
                continue
            if offset not in seen and not sent.may_be_missing:
                raise Violation(f"lost: {sent}, offset {offset}; {offsets}")
            ends = {"commit"} if sent.transaction is None else sent.transaction.ends
            if offset in shown and "commit" not in ends:
                raise Violation(f"{sent} is shown as committed")
            if ends == {"commit"} and offset < offsets.stable and offset not in shown:
                raise Violation(f"{sent} is committed, and is not shown")

    async def _scan(
        self, store: Store, key: PartitionKey, first: int, end: int, *, committed: bool
    ) -> set[int]:
        """The offsets of all records, read on as a consumer does."""
        seen: set[int] = set()
        offset = first
        while offset < end:
            read = Read(key, offset, PLENTY_BYTES, committed)
            (found,) = await store.read([read], max_bytes=PLENTY_BYTES)
            if found.error is not None:
                raise Violation(f"{read}: {found.error!r}") from found.error
            if not found.chunks:
                raise Violation(f"{read}: nothing is there, up to {end}")
            for batch in _batches(found):
                if committed and is_aborted(batch, found.aborted):
                    continue
                for at, value in records_of(batch):
                    if at >= offset:
                        self.see(key, at, value)
                        seen.add(at)
            following = _batches(found)[-1].next_offset
            if not committed:
                self.check_slice(read, found)
            offset = following
        return seen

    def _check_archive(
        self, store: TieredStore, key: PartitionKey, machine: Machine, sound: bool
    ) -> None:
        """Log and archive meet without gap and overlap, and every byte is there."""
        present = store.registry.manifest(key)
        if present is None:
            return
        if wrong := manifests.broken_rule(present):
            raise Violation(f"{key}: {wrong}")
        assert isinstance(store.inner, LocalStore)
        log = store.inner._medium._logs[key]
        if present.files and log.first_offset != present.next_offset:
            raise Violation(
                f"the archive ends at {present.next_offset}, the log: {log.first_offset}"
            )
        directory = f"{ARCHIVE}/{present.topic}/{key.partition}/"
        there = {
            path.removeprefix(directory)
            for path, _ in machine.files()
            if path.startswith(directory)
        }
        listed = set(manifests.list_names(present))
        if missing := listed - there:
            raise Violation(f"{key} lists {missing}, which are not there")
        if sound and (orphans := there - listed - {"_manifest.json"}):
            raise Violation(f"{key} has {orphans}, which nobody lists")

    def _check_directories(self, machine: Machine) -> None:
        names = {path.split("/")[1] for path, _ in machine.files() if path.startswith(ARCHIVE)}
        if strangers := names - set(self.topics):
            raise Violation(f"{strangers} are left of topics that are gone")


def records_of(batch: Batch) -> list[tuple[int, bytes]]:
    if batch.is_control:
        return []
    return [(record.offset, record.value or b"") for record in decode(batch)]


def is_aborted(batch: Batch, aborted: tuple[AbortedTransaction, ...]) -> bool:
    return batch.is_transactional and any(
        each.producer_id == batch.producer_id
        and each.first_offset <= batch.base_offset < each.last_offset
        for each in aborted
    )


def _shape(found: Slice) -> str:
    """For whoever looks into a violation."""
    parts = [f"{each.base_offset}-{each.next_offset}" for each in _batches(found)]
    return f"{', '.join(parts)} of {found.first_offset} to {found.next_offset}"


def _batches(found: Slice) -> list[Batch]:
    return [batch for chunk in found.chunks for batch in batches(chunk)]


async def check_damaged(store: TieredStore, truth: Truth, path: str) -> tuple[int, int]:
    """With a bit of one file flipped at rest: what is served is what was sent; what is not, is
    named as damaged and lies in that file, or in that partition where it is the manifest's. How
    many records were named as lost, and how many were served."""
    lost = served = 0
    for topic in truth.live():
        for number in range(topic.partitions):
            key = PartitionKey(topic.id, number)
            mine = path.startswith(
                (f"{ARCHIVE}/{topic.name}/{number}/", f"{ARCHIVE}/{topic.name}/_")
            )
            partition = truth.partition(key)
            end = (await store.offsets(key)).next
            offset = partition.first
            while offset < end:
                read = Read(key, offset, PLENTY_BYTES)
                (found,) = await store.read([read], max_bytes=PLENTY_BYTES)
                if isinstance(found.error, DamagedData) and mine:
                    following = found.error.next_offset
                    if following is None or following <= offset:
                        raise Violation(f"{read}: {found.error}, and no way on")
                    lost += sum(offset <= at < following for at in partition.at)
                    offset = following
                    continue
                if found.error is not None or not found.chunks:
                    raise Violation(f"{read}, {path} is damaged: {found.error!r}")
                served += len(found.chunks)
                offset = truth.check_slice(read, found)
    return lost, served
