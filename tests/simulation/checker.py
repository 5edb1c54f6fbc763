"""After a crash and recovery: does the store hold what it promised, and nothing else?

Everything is asked through the store's own contract and compared with the model. What is found goes
back into the model: from now on it is known, and what was not found is known to be absent.

`lossy` is for a power cut in a weak sync mode, which owes less: of each partition a first part is
there, of everything else some state that it once had; nothing is ever changed, doubled, or put
where something else was readable.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from quackmq.errors import OffsetOutOfRange
from quackmq.model.topic import Offsets, PartitionKey, Read, Topic
from quackmq.records.batch import Batch, batches
from quackmq.stores.contract import Store
from tests.simulation.model import (
    Attempt,
    Model,
    PartitionModel,
    TopicSlot,
    Violation,
    leader_epoch_of,
)
from tests.simulation.platter import Counts


@dataclass(frozen=True)
class Checker:
    store: Store
    model: Model
    source: random.Random
    counts: Counts
    #: The last life did not close the store.
    unclean: bool
    lossy: bool
    #: A weak mode was in force some time: after it, recovery may leave offsets out.
    gaps: bool

    async def check(self) -> None:
        """Everything. To be called when nothing else uses the store."""
        if self.model.cluster_id not in (None, self.store.cluster_id):
            raise Violation(f"the cluster was {self.model.cluster_id}, is {self.store.cluster_id}")
        self.model.cluster_id = self.store.cluster_id
        await self._check_topics()
        for topic in self.model.live_topics():
            for number in range(topic.partitions):
                await self._check_partition(PartitionKey(topic.id, number))
        await self._check_cursors()
        await self._check_states()
        self._check_units()
        self.counts["recoveries checked"] += 1

    # --- the catalog ----------------------------------------------------------------------------

    async def _check_topics(self) -> None:
        topics = dict(await self.store.topics())
        for name, topic in topics.items():
            if topic.name != name or name not in self.model.topics:
                raise Violation(f"nobody created {topic} under the name {name}")
        for name, slot in self.model.topics.items():
            self._check_slot(slot, topics.get(name))

    def _check_slot(self, slot: TopicSlot, found: Topic | None) -> None:
        if not slot.allows(found, lossy=self.lossy):
            raise Violation(
                f"topic {slot.name} is {found}, but should be {slot.known} or one of {slot.maybe}"
            )
        before = slot.known
        if found is None:
            if before is not None:
                self._deleted(before)
                slot.settle(None)
        elif found != before:
            self.model.learn_topic(found, again=self.lossy)
        slot.maybe.clear()
        if found is not None:
            self.model.doomed.discard(found.id)
            self.model.gone.discard(found.id)
            if before is not None and before.id != found.id:
                self._deleted(before)

    def _deleted(self, topic: Topic) -> None:
        self.model.doomed.add(topic.id)
        self.model.gone.add(topic.id)

    async def _check_cursors(self) -> None:
        found = dict(await self.store.cursors())
        for key, cursor in found.items():
            if key.topic_id in self.model.doomed:
                raise Violation(f"{cursor} outlived its topic")
        for key, register in self.model.cursors.items():
            if key.topic_id in self.model.doomed:
                continue
            there = found.pop(key, None)
            value = (None, "") if there is None else (there.offset, there.metadata)
            register.observe(value, lossy=self.lossy)
            if there is not None and there.leader_epoch != leader_epoch_of(there.metadata):
                raise Violation(f"nobody set the leader epoch of {there}")
        for cursor in found.values():
            if (cursor.key.topic_id, cursor.key.name) not in self.model.subscriptions:
                raise Violation(f"nobody set {cursor}")

    async def _check_states(self) -> None:
        found = dict(await self.store.states("state-"))
        for key, register in self.model.states.items():
            state = found.pop(key, None)
            value = (None, 0) if state is None else (state.value, state.version)
            register.observe(value, lossy=self.lossy)
        if found:
            raise Violation(f"nobody put {found}")

    def _check_units(self) -> None:
        """What one call changed is all there or not there at all."""
        for unit in self.model.units:
            there = [
                attempt.offset is not None
                for attempt in unit.attempts
                if attempt.key.topic_id not in self.model.doomed
                and self.model.partition(attempt.key).first <= attempt.floor
            ]
            there += [
                self.model.cursors[key].known == value
                for key, value in unit.cursors
                if value[0] is not None and key.topic_id not in self.model.doomed
            ]
            if not self.lossy and len(set(there)) > 1:
                raise Violation(f"of one call, some is there and some not: {unit}")
            self.counts["calls cut short that were whole"] += any(there)
            self.counts["calls cut short that left nothing"] += not any(there)
        self.model.units.clear()

    # --- partitions -----------------------------------------------------------------------------

    async def _check_partition(self, key: PartitionKey) -> None:
        partition = self.model.partition(key)
        offsets = await self.store.offsets(key)
        self._check_range(partition, offsets)
        found = await self._scan(partition, offsets)
        present = {self.model.observe_batch(key, batch): batch for batch in found}
        self._check_nothing_lost(partition, set(present), offsets)
        self._check_order(list(present.items()), partition)
        await self._check_lookups(key, found, offsets)
        for attempt in self.model.attempts:
            if attempt.key == key and attempt not in present and attempt.offset is None:
                attempt.status = "absent"

    def _check_range(self, partition: PartitionModel, offsets: Offsets) -> None:
        key = partition.key
        if offsets.first > offsets.next:
            raise Violation(f"{key} has {offsets}")
        if not self.lossy:
            if offsets.next < partition.next:
                raise Violation(f"{key} has lost its end at {partition.next}: there is {offsets}")
            if offsets.first < partition.first:
                raise Violation(f"{key} began at {partition.first} and has {offsets} now")
            most = max(partition.first, partition.first_at_most)
            if offsets.first > most and not partition.trims_itself:
                raise Violation(f"{key} was trimmed to {most} at the most and has {offsets}")
        partition.first = partition.first_at_most = offsets.first
        if offsets.epoch < partition.epoch or (self.unclean and offsets.epoch == partition.epoch):
            raise Violation(f"{key} had leader epoch {partition.epoch} and has {offsets} now")
        partition.epoch = offsets.epoch

    async def _scan(self, partition: PartitionModel, offsets: Offsets) -> list[Batch]:
        """Every batch, by reads of random sizes, without a gap where none may be."""
        key = partition.key
        partition.gaps_allowed = partition.gaps_allowed or self.gaps
        found: list[Batch] = []
        offset = offsets.first
        while offset < offsets.next:
            size = self.source.choice((1, 700, 5_000, 1_000_000))
            [answer] = await self.store.read([Read(key, offset, size)], max_bytes=size)
            if answer.error is not None:
                raise Violation(f"{key} at {offset}: {answer.error!r}") from answer.error
            batch = None
            for batch in (each for chunk in answer.chunks for each in batches(chunk)):
                straddles = not found and batch.base_offset <= offset < batch.next_offset
                gap = partition.gaps_allowed and batch.base_offset > offset
                if batch.base_offset != offset and not straddles and not gap:
                    raise Violation(f"{key}: {batch.base_offset} where {offset} was due")
                found.append(Batch.parse(batch.view))
                offset = batch.next_offset
            if batch is None:
                if partition.gaps_allowed:
                    break
                raise Violation(f"{key} has {offsets}, and nothing at {offset}")
        if offset > offsets.next:
            raise Violation(f"{key} has {offsets}, and batches up to {offset}")
        return found

    def _check_nothing_lost(
        self, partition: PartitionModel, present: set[Attempt], offsets: Offsets
    ) -> None:
        held = {
            attempt
            for offset, attempt in partition.at.items()
            if offset >= offsets.first and offset not in partition.burned
        }
        lost = sorted(held - present, key=lambda attempt: attempt.offset or 0)
        if not lost:
            return
        if not self.lossy:
            raise Violation(f"lost: {lost[0]}, and {len(lost) - 1} more; {offsets}")
        first_lost = lost[0].offset or 0
        last_kept = max((attempt.offset or 0 for attempt in held & present), default=-1)
        if last_kept > first_lost:
            raise Violation(f"{partition.key} lost {lost[0]} and kept what lies behind it")
        self.counts["batches lost in a weak mode"] += len(lost)
        for attempt in lost:
            base = attempt.offset
            assert base is not None
            partition.burned.update(range(base, base + attempt.records))
            attempt.offset = None

    def _check_order(self, present: list[tuple[Attempt, Batch]], partition: PartitionModel) -> None:
        """In offset order: nobody before somebody whose call had ended when his own began; each
        producer's numbers without a gap; the leader's epoch never falling."""
        latest: Attempt | None = None
        latest_call: Attempt | None = None
        producers: dict[tuple[int, int], int] = {}
        epoch = 0
        for attempt, batch in present:
            if latest is not None and latest.began > attempt.returned:
                raise Violation(f"{latest} lies before {attempt}, which had returned")
            if latest is None or attempt.began > latest.began:
                latest = attempt
            if attempt.ordered and attempt.calls == 1:
                if latest_call is not None and latest_call.began > attempt.began:
                    raise Violation(f"{latest_call} was called after {attempt}")
                latest_call = attempt
            if attempt.producer is not None:
                producer_id, producer_epoch, sequence = attempt.producer
                due = producers.get((producer_id, producer_epoch), sequence)
                if due != sequence:
                    raise Violation(f"{attempt} where number {due} was due")
                producers[producer_id, producer_epoch] = sequence + attempt.records
            if not epoch <= batch.leader_epoch <= partition.epoch:
                raise Violation(f"{attempt} has leader epoch {batch.leader_epoch} after {epoch}")
            epoch = batch.leader_epoch

    async def _check_lookups(self, key: PartitionKey, found: list[Batch], offsets: Offsets) -> None:
        """Reading from any offset, and by time, agrees with the scan."""
        for batch in self.source.sample(found, min(len(found), 5)):
            offset = max(offsets.first, self.source.randrange(batch.base_offset, batch.next_offset))
            [answer] = await self.store.read([Read(key, offset, 1)], max_bytes=1)
            if answer.error is not None or b"".join(answer.chunks) != batch.view:
                raise Violation(f"{key}: a scan and a read at {offset} differ: {answer}")
            await self._check_time(key, found, batch.max_timestamp, offsets)
            await self._check_append_time(key, self.model.recognise(key, batch))
        for offset in (offsets.first - 1, offsets.next + 1):
            [answer] = await self.store.read([Read(key, offset, 1)], max_bytes=1)
            if not isinstance(answer.error, OffsetOutOfRange):
                raise Violation(f"{key} has {offsets}, reading {offset} gives {answer}")

    async def _check_append_time(self, key: PartitionKey, attempt: Attempt) -> None:
        """By the time of the append, an answer may be early, never late."""
        if attempt.append_time_ms is None or attempt.offset is None:
            return
        answer = await self.store.offset_for_time(key, attempt.append_time_ms, "append")
        if answer is None or answer.offset >= attempt.offset + attempt.records:
            raise Violation(f"{attempt} was appended at {attempt.append_time_ms}, not {answer}")

    async def _check_time(
        self, key: PartitionKey, found: list[Batch], time_ms: int, offsets: Offsets
    ) -> None:
        answer = await self.store.offset_for_time(key, time_ms)
        first = next(batch for batch in found if batch.max_timestamp >= time_ms)
        due = (max(first.base_offset, offsets.first), first.max_timestamp)
        if answer is None or (max(answer.offset, offsets.first), answer.timestamp_ms) != due:
            raise Violation(f"{key} at time {time_ms}: {answer}, but it is {due}")
