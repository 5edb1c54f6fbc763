"""Transactions in the local store, on a disk that loses, tears and fails; without a broker.

One seed is a machine and a store that lives on it several times over. Producers write transactions
into the partitions of one topic, several at once, and end them as a coordinator does: markers, a
cursor and a state in one unit. A life ends by a crash anywhere, or by closing. What is then found
in the log decides, by the definition alone (tests/model/transaction_model.py), what must be open,
aborted, stable and shown; and each unit that never returned must be there whole or not at all.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from quackmq.broker.lifecycle import Lifecycle
from quackmq.broker.timekeeping import Timekeeping
from quackmq.errors import BrokerClosing, OffsetOutOfRange, StorageError
from quackmq.model.log_transactions import Marker, marker_batch
from quackmq.model.policy import Policy
from quackmq.model.producer_state import NO_TRANSACTION
from quackmq.model.topic import (
    AbortedTransaction,
    Append,
    Cursor,
    CursorKey,
    Offsets,
    PartitionKey,
    Read,
    State,
    StatePut,
)
from quackmq.records.batch import Batch, batches
from quackmq.stores.contract import Store
from quackmq.stores.local import LocalOptions, LocalStore
from tests.model.transaction_model import LogModel, Taken
from tests.simulation.disk import SimulatedDisk
from tests.simulation.model import Violation, make_body
from tests.simulation.world import Trace, World, make_options

#: Limits that a seed shrinks, and to what (see shrunk.py).
LIMITS: Final = {
    "PENDING_BYTES": (500, 2_000),
}
_PRODUCERS = 3
_PARTITIONS = 3
_GROUP = "group"


@dataclass(eq=False)
class Unit:
    """One call: what it appends, with the end of each partition before it, and what it puts."""

    appends: list[tuple[PartitionKey, bytes, int]] = field(default_factory=list)
    state: tuple[str, State] | None = None
    cursor: Cursor | None = None

    def __str__(self) -> str:
        places = [f"{len(body)} bytes in {key.partition}" for key, body, _ in self.appends]
        return f"{places}, {self.state}, {self.cursor}"


@dataclass(eq=False)
class Producer:
    """A transactional producer, and what its coordinator knows of it."""

    producer_id: int
    epoch: int = 0
    version: int = 0
    open: dict[PartitionKey, int] = field(default_factory=dict)
    sequences: dict[PartitionKey, int] = field(default_factory=dict)
    #: Its last batch in each partition, and where it lies.
    last: dict[PartitionKey, tuple[bytes, int]] = field(default_factory=dict)

    @property
    def state_key(self) -> str:
        return f"transaction/{self.producer_id}"


class TransactionWorld(World):
    program, stream = "transactors", "transactions"
    limits = LIMITS

    def __init__(self, seed: int, trace: Trace | None = None) -> None:
        super().__init__(seed, trace)
        self._logs: dict[PartitionKey, LogModel] = {}
        self._sent: dict[bytes, PartitionKey] = {}
        self._unsure: list[Unit] = []
        self._producers = [Producer(producer_id) for producer_id in range(_PRODUCERS)]
        self._ticks = 0
        #: What was acknowledged may be lost by a power cut; was lost, perhaps, by the last one.
        self._at_risk = self._lossy = False

    def _make_options(self) -> LocalOptions:
        return make_options(self._source)

    def run(self) -> None:
        for number in range(self._source.randint(2, 5)):
            self._live(number, self._faults(), lambda disk: self._life(disk, last=False))

    def _crash(self, power: bool) -> None:
        super()._crash(power)
        self._lossy = self._lossy or (power and self._at_risk)

    async def _life(self, disk: SimulatedDisk, *, last: bool) -> bool:
        self._at_risk = self._at_risk or self._options.sync != "always"
        clock = self._clock.of_process()
        self._setter.crashed()
        try:
            store = await LocalStore.open_on(disk, options=self._options, now_ms=clock)
        except StorageError as error:
            if not disk.failed:
                raise Violation(f"a sound directory does not open: {error!r}") from error
            return True
        await self._check(store)
        self._lossy = False
        try:
            timekeeping = Timekeeping(store, clock, Lifecycle())
            await timekeeping.load()
            await self._prepare(store)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._setter.run(clock, timekeeping, self.counts, 10))
                for producer in self._producers:
                    group.create_task(self._work(store, producer))
                group.create_task(self._look_and_trim(store))
        except* (StorageError, BrokerClosing) as errors:
            if not disk.failed:
                raise Violation("the store stopped for no reason") from errors
        if disk.failed or self._source.random() < 0.6:
            return True
        await self._check(store)
        await store.close()
        self._at_risk = self._at_risk and disk.failed
        return disk.failed

    # --- what is done -------------------------------------------------------------------------

    async def _prepare(self, store: Store) -> None:
        """As a coordinator does that begins: what is open is aborted, in a new epoch."""
        topics = await store.topics()
        topic = topics.get("deals") or await store.create_topic("deals", _PARTITIONS, Policy())
        for number in range(_PARTITIONS):
            self._logs.setdefault(PartitionKey(topic.id, number), LogModel())
        for producer in self._producers:
            await self._end(store, producer, Marker.ABORT, bump=True)

    async def _work(self, store: Store, producer: Producer) -> None:
        for _ in range(self._source.choice((3, 10, 25))):
            chance = self._source.random()
            if chance < 0.6:
                await self._write(store, producer)
            elif chance < 0.7:
                await self._repeat(store, producer)
            else:
                marker = self._source.choice((Marker.ABORT, Marker.COMMIT))
                await self._end(store, producer, marker, bump=self._source.random() < 0.5)
            await asyncio.sleep(self._source.random() ** 3 * 0.02)

    async def _write(self, store: Store, producer: Producer) -> None:
        """Batches of its transaction, and now and then a plain one of nobody."""
        unit = Unit()
        for key in self._source.choices(list(self._logs), k=self._source.choice((1, 1, 2, 4))):
            self._ticks += 1
            size = self._source.choice((0, 50, 400, 3_000))
            count = self._source.choice((1, 1, 2, 5))
            values = tuple(b"%d.%d" % (self._ticks, n) + bytes(size) for n in range(count))
            if self._source.random() < 0.2:
                self._add(unit, key, make_body(values, self._ticks, None))
                continue
            sequence = producer.sequences.get(key, 0)
            producer.sequences[key] = sequence + count
            numbers = (producer.producer_id, producer.epoch, sequence)
            body = make_body(values, self._ticks, numbers, transactional=True)
            self._add(unit, key, body)
        answers = await self._carry_out(store, unit)
        for (key, body, _), offset in zip(unit.appends, answers, strict=True):
            if Batch.parse(body).is_transactional:
                producer.last[key] = (body, offset)
                producer.open.setdefault(key, offset)

    async def _repeat(self, store: Store, producer: Producer) -> None:
        """Its last batch again, which must be found where it lies."""
        if not producer.last:
            return
        key = self._source.choice(list(producer.last))
        body, offset = producer.last[key]
        (answer,) = await store.append([Append(key, Batch.parse(body))])
        if (answer.base_offset, answer.repeated) != (offset, True):
            raise Violation(f"a repeat of the batch at {offset} of {key} is answered {answer}")
        self.counts["repeats answered like the first"] += 1

    async def _end(self, store: Store, producer: Producer, marker: Marker, *, bump: bool) -> None:
        """All that ends a transaction, in one unit."""
        found = await store.open_transactions(producer.producer_id)
        if found != {key: {producer.producer_id: at} for key, at in producer.open.items()}:
            raise Violation(f"{producer} is told of {found}")
        if bump:
            producer.epoch += 1
            producer.sequences.clear()
            producer.last.clear()
        unit = Unit()
        for key in found:
            self._ticks += 1
            body = marker_batch(producer.producer_id, producer.epoch, marker, self._ticks)
            self._add(unit, key, body)
        self._ticks += 1
        key = self._source.choice(list(self._logs))
        unit.cursor = Cursor(CursorKey(f"{_GROUP}-{producer.producer_id}", *key), self._ticks)
        unit.state = (producer.state_key, State(b"%d" % self._ticks, producer.version + 1))
        producer.open.clear()
        await self._carry_out(store, unit)
        producer.version += 1
        self.counts[f"transactions that ended with {marker.name}"] += bool(found)

    def _add(self, unit: Unit, key: PartitionKey, body: bytes) -> None:
        self._sent[_unstamped(body)] = key
        unit.appends.append((key, body, self._logs[key].next_offset))

    async def _carry_out(self, store: Store, unit: Unit) -> list[int]:
        self._unsure.append(unit)
        states = []
        if unit.state is not None:
            name, state = unit.state
            states.append(StatePut(name, state.value, state.version - 1))
        answers = await store.append(
            [Append(key, Batch.parse(body)) for key, body, _ in unit.appends],
            [] if unit.cursor is None else [unit.cursor],
            states,
        )
        for (key, body, _), answer in zip(unit.appends, answers, strict=True):
            self._logs[key].add(Taken.of(Batch.parse(body), answer.base_offset))
        self._unsure.remove(unit)
        return [answer.base_offset for answer in answers]

    async def _look_and_trim(self, store: Store) -> None:
        for _ in range(self._source.choice((3, 10))):
            key, log = self._source.choice(list(self._logs.items()))
            if self._source.random() < 0.3:
                before = self._source.randint(log.first_offset, log.next_offset)
                if not any(where == key for unit in self._unsure for where, _, _ in unit.appends):
                    log.first_offset = await store.trim(key, before)
            else:
                await self._look(store, key)
            await asyncio.sleep(self._source.random() ** 3 * 0.05)

    async def _look(self, store: Store, key: PartitionKey) -> None:
        """Whatever a committed read shows lies below the stable offset that it names."""
        offsets = await store.offsets(key)
        offset = self._source.randint(offsets.first, offsets.next)
        read = Read(key, offset, self._source.choice((1, 500, 100_000)), committed=True)
        wait_ms = self._source.choice((0, 20, 300))
        (found,) = await store.read([read], max_bytes=100_000, wait_ms=wait_ms)
        if found.error is not None:
            if isinstance(found.error, OffsetOutOfRange) and offset < found.first_offset:
                return
            raise Violation(f"{read} met {found.error!r}") from found.error
        if not offsets.stable <= found.stable_offset <= found.next_offset:
            raise Violation(f"{read} was stable up to {offsets.stable}, is {found}")
        for batch in (each for chunk in found.chunks for each in batches(chunk)):
            if batch.next_offset > found.stable_offset:
                raise Violation(f"{read} is stable to {found.stable_offset} and shows {batch}")
        self.counts["committed reads"] += 1

    # --- what must be there -------------------------------------------------------------------

    async def _check(self, store: Store) -> None:
        """Everything, when nothing is under way. What is found is what there is from now on."""
        if not await store.topics():
            self._forget_everything()
            return
        lost = False
        for key, log in self._logs.items():
            offsets = await store.offsets(key)
            found = await self._scan(store, key, offsets)
            known = {each.base_offset: each for each in log.taken}
            start = min([offsets.first, *(each.base_offset for each in found[:1])])
            kept = [each for each in log.taken if each.base_offset < start]
            missing = known.keys() - {each.base_offset for each in (*kept, *found)}
            lost = lost or bool(missing)
            if missing and not self._lossy:
                raise Violation(f"{key} has lost what was at {sorted(missing)}")
            if not self._lossy and offsets.first < log.first_offset:
                raise Violation(f"{key} was trimmed to {log.first_offset} and has {offsets}")
            log.taken, log.first_offset, log.end_offset = kept + found, offsets.first, offsets.next
            await self._check_log(store, key, log, offsets)
        await self._check_open(store)
        await self._check_units(store)
        self.counts["batches of transactions lost in a weak mode"] += lost
        self.counts["recoveries checked"] += 1
        await self._learn(store)

    def _forget_everything(self) -> None:
        """The topic itself was never made, or is lost."""
        if any(log.taken for log in self._logs.values()) and not self._lossy:
            raise Violation("the topic is gone")
        self._logs.clear()
        self._unsure.clear()

    async def _scan(self, store: Store, key: PartitionKey, offsets: Offsets) -> list[Taken]:
        found: list[Taken] = []
        offset = offsets.first
        while offset < offsets.next:
            size = self._source.choice((1, 700, 1_000_000))
            (part,) = await store.read([Read(key, offset, size)], max_bytes=size)
            if part.error is not None:
                raise Violation(f"{key} at {offset}: {part.error!r}") from part.error
            if not part.chunks:
                break  # a gap at the end, left by a power cut in a weak mode
            for batch in (each for chunk in part.chunks for each in batches(chunk)):
                if self._sent.get(_unstamped(batch.view)) != key:
                    raise Violation(f"nobody sent the batch at {batch.base_offset} of {key}")
                found.append(Taken.of(batch, batch.base_offset))
                offset = batch.next_offset
        return found

    async def _check_log(
        self, store: Store, key: PartitionKey, log: LogModel, offsets: Offsets
    ) -> None:
        if offsets.stable != log.stable:
            raise Violation(f"{key} is stable up to {log.stable}, not {offsets}: {log.open}")
        producers = await store.producers(key)
        open_ = {
            producer_id: producer.transaction_offset
            for producer_id, producer in producers.items()
            if producer.transaction_offset != NO_TRANSACTION
        }
        if open_ != log.open:
            raise Violation(f"{key} has {log.open} open, its producers say {open_}")
        shown, aborted = await self._read_committed(store, key, offsets)
        if shown != log.committed():
            raise Violation(f"{key} shows {shown} as committed, which are {log.committed()}")
        due: set[AbortedTransaction] = set()
        if offsets.first < offsets.stable:
            due.update(log.aborted_in(offsets.first, offsets.stable - 1))
        if aborted != due:
            raise Violation(f"{key} has {aborted} as aborted, which are {log.aborted}")
        self.counts["aborted transactions checked"] += len(aborted)

    async def _read_committed(
        self, store: Store, key: PartitionKey, offsets: Offsets
    ) -> tuple[list[int], set[AbortedTransaction]]:
        """The offsets that a client would show its user, and all that it was told of as aborted."""
        shown: list[int] = []
        aborted: set[AbortedTransaction] = set()
        offset = offsets.first
        while offset < offsets.stable:
            size = self._source.choice((1, 700, 1_000_000))
            (part,) = await store.read([Read(key, offset, size, committed=True)], max_bytes=size)
            if part.error is not None:
                raise Violation(f"{key} at {offset}: {part.error!r}") from part.error
            if not part.chunks:
                break
            aborted.update(part.aborted)
            for batch in (each for chunk in part.chunks for each in batches(chunk)):
                if not batch.is_control and not (
                    batch.is_transactional and _is_in(batch, part.aborted)
                ):
                    shown += range(max(offset, batch.base_offset), batch.next_offset)
                offset = batch.next_offset
        return shown, aborted

    async def _check_open(self, store: Store) -> None:
        found = await store.open_transactions()
        due = {key: log.open for key, log in self._logs.items() if log.open}
        if found != due:
            raise Violation(f"open are {due}, the store says {found}")

    async def _check_units(self, store: Store) -> None:
        """What never returned is there whole or not at all, markers, cursor and state."""
        states, cursors = await store.states("transaction/"), await store.cursors()
        for unit in self._unsure:
            there = [
                self._holds(key, body)
                for key, body, floor in unit.appends
                if self._logs[key].first_offset <= floor
            ]
            if unit.state is not None:
                there.append(states.get(unit.state[0]) == unit.state[1])
            if unit.cursor is not None:
                found = cursors.get(unit.cursor.key)
                there.append(found is not None and found.offset == unit.cursor.offset)
            if len(set(there)) > 1:
                raise Violation(f"of one call, some is there and some not: {there}, {unit}")
            self.counts["units cut short that were whole"] += all(there)
            self.counts["units cut short that left nothing"] += not any(there)
        self._unsure.clear()

    def _holds(self, key: PartitionKey, body: bytes) -> bool:
        batch = Batch.parse(body)
        return any(
            each.timestamp_ms == batch.base_timestamp and each.producer_id == batch.producer_id
            for each in self._logs[key].taken
        )

    async def _learn(self, store: Store) -> None:
        """What a coordinator finds when it begins."""
        for producer in self._producers:
            producer.version = (await store.state(producer.state_key)).version
            producer.open = {
                key: log.open[producer.producer_id]
                for key, log in self._logs.items()
                if producer.producer_id in log.open
            }


def _is_in(batch: Batch, aborted: tuple[AbortedTransaction, ...]) -> bool:
    return any(
        each.producer_id == batch.producer_id
        and each.first_offset <= batch.base_offset < each.last_offset
        for each in aborted
    )


def _unstamped(body: bytes | memoryview) -> bytes:
    """Without what the broker stamps: offset and leader epoch."""
    return bytes(body[8:12]) + bytes(body[16:])


simulate = TransactionWorld.simulate
