"""Clients that write, move and read in transactions, and survive the broker.

What such a client was unsure of when the broker died, it asks for again in the next life, as real
ones do; or it has died as well, and another takes its place. One whose place was taken goes on for
a while, and must come to nothing.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal

from quackmq.broker import (
    Broker,
    Commit,
    MemberRef,
    PartSummary,
    ProducerEpoch,
    ProducerRef,
    Put,
    StagedBatch,
    Turn,
)
from quackmq.errors import (
    ConcurrentTransactions,
    InvalidProducerIdMapping,
    InvalidTransactionState,
    ProducerFenced,
)
from quackmq.model.log_transactions import Marker
from quackmq.model.topic import PartitionKey, Read
from quackmq.records.batch import NO_TIMESTAMP, Batch, Record, batches
from tests.broker.transacting import as_clients_see
from tests.kit.support import batch_of
from tests.simulation.flow_truth import GROUP, IMAGE, PARTITIONS, SOURCE, TARGET, Deal, Ledger
from tests.simulation.life import CALLER
from tests.simulation.model import Violation
from tests.simulation.platter import Counts

#: What a client hears whose place another has, or whose time was up.
_REPLACED = (ProducerFenced, InvalidProducerIdMapping)


@dataclass
class Flow:
    """One life of the broker, as clients share it."""

    broker: Broker
    ledger: Ledger
    source: random.Random
    counts: Counts

    def key(self, topic: str, partition: int | None = None) -> PartitionKey:
        chosen = self.source.randrange(PARTITIONS) if partition is None else partition
        return PartitionKey(self.broker.topic(topic).id, chosen)


class Transactor(ABC):
    """A transactional producer that survives the broker. What it was doing when a life ended, it
    does again in the next one."""

    def __init__(self, name: str, transactional_id: str, *, implicit: bool) -> None:
        self.name = name
        self._id = transactional_id
        self._implicit = implicit
        self._producer: ProducerEpoch | None = None
        self._deal: Deal | None = None
        self._sequences: dict[PartitionKey, int] = {}
        #: The work of the deal is done.
        self._worked = False
        #: Batches of which it has not heard.
        self._unsure: list[tuple[str, int, Batch]] = []
        #: An end of which it has not heard: whether it is a commit.
        self._ending: bool | None = None
        self._life: Flow | None = None

    async def step(self, life: Flow) -> None:
        if self._life is not life:
            self._life = life
            if life.source.random() < 0.4:
                self._die()
        try:
            await self._step(life)
        except _REPLACED:
            life.counts["producers replaced or timed out"] += 1
            await self._haunt(life)
            self._die()
        except ConcurrentTransactions:
            life.counts["producers told to ask again"] += 1
            await asyncio.sleep(0.001)

    async def _step(self, life: Flow) -> None:
        if self._producer is None:
            producer = await life.broker.transactions.init(
                CALLER, self._id, life.source.choice((300, 3_000, 60_000))
            )
            self._producer = producer
            return
        if self._ending is not None:
            life.counts["ends asked for again"] += 1
            await self._end(life, self._ending)
            return
        if self._deal is None:
            self._deal, self._worked = life.ledger.new_deal(), False
        while self._unsure:
            topic, partition, batch = self._unsure[0]
            await self._write(life, topic, partition, batch)
        if self._deal.values and not self._worked:
            life.counts["transactions given up half-way"] += 1
            await self._end(life, commit=False)
            return
        if not self._worked:
            await self.work(life, self._deal)
            self._worked = True
        if life.source.random() < 0.1:
            self._die()  # a new process takes its place
            return
        if life.source.random() < 0.05:
            await asyncio.sleep(life.source.choice((0.2, 2, 70)))
        await self._end(life, commit=life.source.random() < 0.7)

    @abstractmethod
    async def work(self, life: Flow, deal: Deal) -> None:
        """What is done within one transaction."""

    async def send(self, life: Flow, deal: Deal, topic: str, values: list[bytes]) -> None:
        partition = life.source.randrange(PARTITIONS)
        key = life.key(topic, partition)
        assert self._producer is not None
        sequence = self._sequences.get(key, 0)
        batch = batch_of(
            *values,
            producer_id=self._producer.producer_id,
            producer_epoch=self._producer.epoch,
            base_sequence=sequence,
            transactional=True,
        )
        self._sequences[key] = sequence + len(values)
        deal.values.extend((topic, value) for value in values)
        self._unsure.append((topic, partition, batch))
        await self._write(life, topic, partition, batch)

    async def _write(self, life: Flow, topic: str, partition: int, batch: Batch) -> None:
        transactions = life.broker.transactions
        if not self._implicit:
            key = life.key(topic, partition)
            await transactions.add_partitions(CALLER, self._ref(), [key])
        found = life.broker.topic(topic)
        transactions.admit(CALLER, batch, found, partition, self._id, implicit=self._implicit)
        answer = await life.broker.publish(CALLER, found, partition, batch)
        self._unsure.pop(0)
        life.counts["transactional batches repeated"] += answer.repeated

    async def _end(self, life: Flow, commit: bool) -> None:
        deal = self._deal
        assert deal is not None
        self._ending = commit
        deal.asked_to_commit = deal.asked_to_commit or commit
        try:
            producer = await life.broker.transactions.end(
                CALLER, self._ref(), commit, bump_epoch=self._implicit
            )
        except InvalidTransactionState as error:
            if deal.values:
                raise Violation(f"{self.name} cannot end deal {deal.number}: {error}") from error
            self._die()
            return
        deal.learn(Marker.COMMIT if commit else Marker.ABORT)
        life.counts["transactions committed" if commit else "transactions aborted"] += 1
        if producer != self._producer:
            self._sequences.clear()
        self._producer = producer
        self._deal, self._ending = None, None

    async def _haunt(self, life: Flow) -> None:
        """One that was replaced goes on for a while, and must come to nothing."""
        ref, deal = self._ref(), life.ledger.new_deal()
        if life.source.random() < 0.5:
            await asyncio.sleep(life.source.random() * 0.05)
        try:
            if life.source.random() < 0.5:
                self._unsure.clear()
                await self.send(life, deal, TARGET, [life.ledger.value(deal, "undead")])
            else:
                await life.broker.transactions.end(CALLER, ref, True, bump_epoch=self._implicit)
        except (*_REPLACED, ConcurrentTransactions):
            life.counts["what fenced producers tried was refused"] += 1
            return
        raise Violation(f"{self.name} was replaced and goes on")

    def _die(self) -> None:
        """All that it knew is gone; what it left open is for others to end."""
        self._producer, self._deal, self._ending = None, None, None
        self._sequences.clear()
        self._unsure.clear()

    def _ref(self) -> ProducerRef:
        assert self._producer is not None
        return ProducerRef(self._id, *self._producer)


class Writer(Transactor):
    """Writes to both topics at once."""

    async def work(self, life: Flow, deal: Deal) -> None:
        for _ in range(life.source.randint(1, 3)):
            topic = life.source.choice((SOURCE, SOURCE, TARGET))
            count = life.source.choice((1, 1, 3))
            values = [life.ledger.value(deal, self.name) for _ in range(count)]
            await self.send(life, deal, topic, values)


class PlainWriter:
    """Writes to the source without a transaction, and does not ask again."""

    name = "plain"

    async def step(self, life: Flow) -> None:
        value = life.ledger.value(life.ledger.deals[0], self.name)
        topic = life.broker.topic(life.source.choice((SOURCE, SOURCE, TARGET)))
        await life.broker.publish(CALLER, topic, life.source.randrange(PARTITIONS), batch_of(value))


class Numberer:
    """Puts without a transaction, in both partitions at once, and numbers what it puts. What it was
    unsure of it puts again; or it has died as well, and asks how far it had come."""

    name = "numberer"

    def __init__(self) -> None:
        self._sequence = 0
        self._unsure: tuple[Deal, list[Record]] | None = None
        self._life: Flow | None = None

    async def step(self, life: Flow) -> None:
        if self._life is not life:
            self._life = life
            if life.source.random() < 0.4:
                await self._ask(life)
        is_new = self._unsure is None
        if self._unsure is None:
            deal = life.ledger.new_deal(is_repeated=True)
            deal.asked_to_commit = True
            values = [life.ledger.value(deal, self.name) for _ in range(life.source.choice((1, 3)))]
            deal.values.extend((SOURCE, value) for value in values)
            self._unsure = deal, [Record(0, NO_TIMESTAMP, value, value) for value in values]
        deal, records = self._unsure
        at_once = life.source.choice((1, 1, 2))
        puts = await asyncio.gather(*(self._put(life, records) for _ in range(at_once)))
        if is_new and all(put.repeated for put in puts):
            raise Violation(f"{self._sequence} is taken for a repeat, and was never put")
        life.counts["numbered puts that were repeats"] += sum(put.repeated for put in puts)
        life.counts["numbered puts"] += 1
        deal.learn(Marker.COMMIT)
        self._unsure = None
        self._sequence += 1

    async def _put(self, life: Flow, records: list[Record]) -> Put:
        return await life.broker.messages.put(
            CALLER, SOURCE, records, publisher=self.name, sequence=self._sequence
        )

    async def _ask(self, life: Flow) -> None:
        held = await life.broker.messages.last_sequence(CALLER, SOURCE, self.name)
        came_to = -1 if held is None else held
        if came_to not in (self._sequence - 1, self._sequence if self._unsure else -2):
            raise Violation(f"{came_to} is held, where {self._sequence} was next")
        if self._unsure is not None and came_to == self._sequence:
            self._unsure[0].learn(Marker.COMMIT)
        life.counts["numbers asked for"] += 1
        self._sequence, self._unsure = came_to + 1, None


class Mover(Transactor):
    """Consumes, transforms, produces."""

    async def work(self, life: Flow, deal: Deal) -> None:
        broker = life.broker
        if broker.transactions.pending_offsets(CALLER, GROUP):
            return  # what is committed there may be about to change
        committed = await broker.groups.committed(CALLER, GROUP)
        partition = life.source.randrange(PARTITIONS)
        key = life.key(SOURCE, partition)
        offset = committed[key].offset if key in committed else 0
        assert offset is not None
        max_bytes = life.source.choice((1, 500, 5_000))
        read = Read(key, offset, max_bytes, committed=True)
        [found] = await broker.read(CALLER, [read], max_bytes=max_bytes)
        last = [batch.next_offset for chunk in found.chunks for batch in batches(chunk)]
        if not last:
            return
        for value in as_clients_see(found):
            life.ledger.check_seen(value)
            image = life.ledger.value(deal, (IMAGE + value).decode())
            await self.send(life, deal, TARGET, [image])
        if not self._implicit:
            await broker.transactions.add_offsets(CALLER, self._ref(), GROUP)
        [outcome] = await broker.transactions.commit_offsets(
            CALLER,
            self._ref(),
            GROUP,
            MemberRef("", -1),
            [Commit(key, last[-1])],
            implicit=self._implicit,
        )
        if outcome is not None:
            raise Violation(f"an offset of {key} cannot be committed: {outcome}") from outcome
        life.counts["offsets committed in transactions"] += 1


@dataclass(eq=False)
class Job:
    """What is staged under one key, and how far it has come."""

    key: str
    deal: Deal
    #: Which of a series it is, if it is of one.
    turn: Turn | None = None
    summaries: dict[str, PartSummary] = field(default_factory=dict)
    #: A call of which nobody has heard: part, number, batches.
    unsure: tuple[str, int, list[StagedBatch]] | None = None
    ending: Literal["commit", "abort"] | None = None


class Stager:
    """Many writers and somebody who commits for them: jobs, one after the other, of which every
    second is the next turn of a series. What it was unsure of, it asks for again; now and then it
    leaves a job where it is."""

    name = "stager"

    def __init__(self) -> None:
        self._job: Job | None = None
        self._count = 0

    async def step(self, life: Flow) -> None:
        job = self._job
        if job is None:
            self._count += 1
            deal = life.ledger.new_deal(is_repeated=True)
            turn = Turn("series", self._count) if self._count % 2 else None
            job = self._job = Job(f"job {self._count}", deal, turn)
        if job.ending is not None:
            life.counts["ends of stages asked for again"] += 1
            await self._end(life, job, job.ending)
            return
        fate = life.source.random()
        if job.unsure is not None or fate < 0.6:
            await self._stage(life, job)
        elif fate < 0.65:
            await self._stage_in_vain(life, job)
        elif fate < 0.7:
            self._job = None  # whoever ran it is gone
        elif job.summaries:
            await self._end(life, job, "commit" if fate < 0.93 else "abort")

    def give_up(self) -> None:
        """Leave the present job: there is no room for it."""
        self._job = None

    async def _stage(self, life: Flow, job: Job) -> None:
        if job.unsure is None:
            part = life.source.choice("abc")
            values = [life.ledger.value(job.deal, "staged") for _ in range(2)]
            job.deal.values.extend((TARGET, value) for value in values)
            number = job.summaries[part].calls if part in job.summaries else 0
            job.unsure = (part, number, [self._staged(life, value) for value in values])
        part, number, staged = job.unsure
        staging = life.broker.staging
        summary = await staging.stage(CALLER, job.key, part, number, staged, job.turn)
        if summary.calls != number + 1:
            raise Violation(f"{summary} is answered to call {number}")
        job.summaries[part] = summary
        job.unsure = None

    async def _stage_in_vain(self, life: Flow, job: Job) -> None:
        """A writer that nobody counts on."""
        deal = life.ledger.new_deal()
        value = life.ledger.value(deal, "in vain")
        deal.values.append((TARGET, value))
        part = f"vain {deal.number}"
        staged = [self._staged(life, value)]
        await life.broker.staging.stage(CALLER, job.key, part, 0, staged, job.turn)

    async def _end(self, life: Flow, job: Job, how: Literal["commit", "abort"]) -> None:
        job.ending = how
        if how == "commit":
            job.deal.asked_to_commit = True
            staging, summaries = life.broker.staging, list(job.summaries.values())
            await staging.commit(CALLER, job.key, summaries, turn=job.turn)
            job.deal.learn(Marker.COMMIT)
            if not (await staging.commit(CALLER, job.key, turn=job.turn)).repeated:
                raise Violation(f"{job.key} was committed twice")
        else:
            await life.broker.staging.abort(CALLER, job.key)
            job.deal.learn(Marker.ABORT)
        self._job = None
        life.counts["stages committed" if how == "commit" else "stages aborted"] += 1

    def _staged(self, life: Flow, value: bytes) -> StagedBatch:
        return StagedBatch(life.key(TARGET), batch_of(value))


class Watcher:
    """Reads committed records from anywhere, as Kafka's clients do."""

    name = "watcher"

    async def step(self, life: Flow) -> None:
        key = life.key(life.source.choice((SOURCE, TARGET)))
        offsets = await life.broker.offsets(CALLER, key)
        offset = life.source.randint(offsets.first, offsets.next)
        read = Read(key, offset, 5_000, committed=True)
        wait_ms = life.source.choice((0, 0, 50))
        [found] = await life.broker.read(CALLER, [read], max_bytes=5_000, wait_ms=wait_ms)
        if found.error is not None:
            raise Violation(f"{read} met {found.error!r}") from found.error
        for value in as_clients_see(found):
            life.ledger.check_seen(value)


class Listener:
    """Subscribes to the target and gets single messages. All that is committed, in order."""

    name = "listener"

    def __init__(self) -> None:
        self._last_id: str | None = None
        #: By partition and offset.
        self.heard: dict[int, dict[int, bytes]] = {number: {} for number in range(PARTITIONS)}
        self.count = 0

    async def step(self, life: Flow) -> None:
        await life.broker.subscribe(CALLER, self.name, TARGET, "beginning")
        wait_ms = life.source.choice((0, 0, 50))
        message = await life.broker.get(CALLER, self.name, TARGET, self._last_id, wait_ms)
        if message is None:
            return
        self._last_id = message.id
        value = message.record.value or b""
        life.ledger.check_seen(value)
        of_partition = self.heard[message.partition]
        before = of_partition.setdefault(message.record.offset, value)
        if before != value or message.lost:
            raise Violation(f"{message} is heard where {before!r} was")
        self.count += 1
        life.counts["committed messages heard"] += 1
