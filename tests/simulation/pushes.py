"""Pushed subscriptions on a disk that loses, tears and fails, by peers that forget and die.

One seed is a machine and a broker that lives on it several times over. A publisher adds entries to
a topic that keeps them until they are consumed. Peers are pushed them: two that share a
subscription to every entry, one with a subscription of its own, two that read what is live, in
order or the newest first. They take, acknowledge some and not others, hand back, let leases run
out, hang up and come again. A life ends by a crash anywhere, or by closing.

- What was not acknowledged is never passed over: not by a low-water mark, not by retention, and at
  the end everybody who reads every entry has acknowledged every one.
- What was acknowledged is not lent again within a life, nor ever once it was flushed.
- An entry is lent as it was published, and each time counts one delivery more within a life.
- Entries of a partition are lent for the first time in increasing order, unless the newest come
  first. An entry that was given back is lent before any that was never lent.
- Of all offsets it is known what became of them: acknowledged, skipped, absent; none is lost.
- Where receipts are left, they tell this of each offset once, whatever was delivered again.

    python -m tests.simulation.pushes --seed 7               this seed alone, with a trace
    python -m tests.simulation.pushes --seed 7 --seeds 500   this one and 499 more
    python -m tests.simulation.pushes --seconds 600          for so long, from a random one on
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import dataclass, field
from typing import Final

from quackmq.broker import Broker, BrokerSettings, Channel, LeasedEntry, Terms
from quackmq.clock import Clock as BrokerClock
from quackmq.errors import BrokerClosing, LimitReached, StorageError, WriteFailed
from quackmq.model.offset_notes import RECEIPTS_TOPIC
from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey, Read
from quackmq.stores.local import LocalStore
from tests.kit.support import batch_of, offsets_and_values
from tests.simulation.disk import Faults, SimulatedDisk
from tests.simulation.life import CALLER
from tests.simulation.model import Violation
from tests.simulation.platter import Counts
from tests.simulation.shrunk import REACHED
from tests.simulation.soak import main
from tests.simulation.world import Trace, World

#: Limits that a seed shrinks, and to what (see shrunk.py).
LIMITS: Final = {
    "CATCH_UP_BYTES": (100, 300),
    "CHANNELS": (2, 3),
    "LIVE_TAIL_BATCHES": (1, 3),
    "LIVE_TAIL_READ_BYTES": (100, 300),
    "PENDING_BYTES": (100, 500),
    "PUSHED_FLUSH_BYTES": (10, 100),
    "TAKEN_ENTRIES": (1, 2),
    "PENDING_RECEIPT_RANGES": (1, 2),
}
_TOPIC = "news"
_PARTITIONS = 2
_POLICY = Policy(keep_until_consumed=True, live_for_ms=2_000)
_LEASE_MS = 3_000
_SHARED, _ALONE, _LIVE, _NEWEST = "shared", "alone", "live", "newest"
#: A small window for all: only the newest first may depend on it.
_TERMS = {
    _SHARED: Terms(lease_ms=_LEASE_MS, outstanding=5, window=3),
    _ALONE: Terms(lease_ms=_LEASE_MS, window=3),
    _LIVE: Terms("live", lease_ms=_LEASE_MS, window=3),
    _NEWEST: Terms("newest", lease_ms=_LEASE_MS, window=3),
}
#: Who skips what is old.
_SKIPPING = (_LIVE, _NEWEST)
#: Who leaves receipts.
_TELLING = (_SHARED, _LIVE, _NEWEST)
_PATIENCE_SECONDS = 600.0

Place = tuple[int, int]


@dataclass
class Ledger:
    """What everybody was told, over all lives."""

    #: What was seen in the log, by place.
    entries: dict[Place, bytes] = field(default_factory=dict)
    #: What was acknowledged under each name, and of it, what was flushed.
    acked: dict[str, set[Place]] = field(default_factory=lambda: {name: set() for name in _TERMS})
    flushed: dict[str, set[Place]] = field(default_factory=lambda: {name: set() for name in _TERMS})
    published: int = 0


class PushWorld(World):
    program = "pushes"
    limits = LIMITS

    def __init__(self, seed: int, trace: Trace | None = None) -> None:
        super().__init__(seed, trace)
        self._ledger = Ledger()

    def _faults(self) -> Faults:
        return self._mostly_a_crash(other=0.3, operations=400)

    async def _life(self, disk: SimulatedDisk, *, last: bool) -> bool:
        clock = self._clock.of_process()
        self._setter.crashed()
        try:
            store = await LocalStore.open_on(disk, options=self._options, now_ms=clock)
        except StorageError as error:
            if not disk.failed:
                raise Violation(f"a sound directory does not open: {error!r}") from error
            return True
        broker = Broker(store, BrokerSettings(), clock)
        failed = False
        try:
            await broker.open()
            await self._begin(broker)
            life = Life(broker, self._ledger, self._source, self.counts)
            await life.check()
            self.counts["recoveries checked"] += 1
            await (life.finish() if last else self._work(life, clock))
        except* WriteFailed as errors:
            if not disk.failed:
                raise Violation("the store stopped for no reason") from errors
            failed = True
        if failed or (not last and self._source.random() < 0.5):
            return True
        await broker.close()
        try:
            await store.close()
        except StorageError as error:
            if not disk.failed:
                raise Violation(f"a sound store does not close: {error!r}") from error
        return disk.failed

    async def _work(self, life: Life, clock: BrokerClock) -> None:
        async with asyncio.TaskGroup() as group:
            setting = self._setter.run(clock, life.broker.timekeeping, self.counts, 10)
            group.create_task(setting, name=self._setter.name)
            group.create_task(life.work())

    async def _begin(self, broker: Broker) -> None:
        if _TOPIC not in broker.topics():
            await broker.create_topic(CALLER, _TOPIC, partitions=_PARTITIONS, policy=_POLICY)
        for name, terms in _TERMS.items():
            is_new = await broker.pushing.subscribe(
                CALLER, name, _TOPIC, terms, "beginning", receipts=name in _TELLING
            )
            if is_new and (self._ledger.acked[name] or self._ledger.published):
                raise Violation(f"the subscription {name} is gone")


class Life:
    def __init__(
        self, broker: Broker, ledger: Ledger, source: random.Random, counts: Counts
    ) -> None:
        self.broker = broker
        self.ledger = ledger
        self.source = source
        self.counts = counts
        #: Who has acknowledged what in this life.
        self.acked: dict[str, set[Place]] = {name: set() for name in _TERMS}
        #: The last offset that was lent for the first time, by name and partition.
        self.last_new: dict[tuple[str, int], int] = {}
        #: What was lent and given back, and is due again.
        self.given_back: dict[str, set[Place]] = {name: set() for name in _TERMS}

    async def check(self) -> None:
        """Learn what is in the log. Nothing that was not acknowledged is behind a low-water mark,
        nor has the log let go of it."""
        firsts = []
        for partition in range(_PARTITIONS):
            key = PartitionKey(self.broker.topic(_TOPIC).id, partition)
            offsets = await self.broker.offsets(CALLER, key)
            firsts.append(offsets.first)
            (part,) = await self.broker.read(
                CALLER, [Read(key, offsets.first, 2**24)], max_bytes=2**24
            )
            for offset, value in offsets_and_values(part):
                known = self.ledger.entries.setdefault((partition, offset), value)
                if known != value:
                    raise Violation(f"{known!r} became {value!r} at {offset}")
        for each in await self.broker.subscriptions(CALLER):
            if each.name not in _SKIPPING:
                self._check_acked(each.name, firsts, "the log begins behind it")
                self._check_acked(each.name, each.cursors, "it lies behind the low-water mark")

    def _check_acked(self, name: str, before: tuple[int, ...] | list[int], why: str) -> None:
        for place in self.ledger.entries:
            if place[1] < before[place[0]] and place not in self.ledger.acked[name]:
                raise Violation(f"{name} has not acknowledged {place}, and {why}")

    async def work(self) -> None:
        steps = self.source.choice((5, 20, 40))
        peers = [Peer(name, self) for name in (_SHARED, _SHARED, _ALONE, *_SKIPPING)]
        async with asyncio.TaskGroup() as group:
            group.create_task(self._publish(steps))
            for peer in peers:
                group.create_task(peer.run(steps))

    async def finish(self) -> None:
        """Nothing fails any more: everybody takes all that is left."""
        for name in _TERMS:
            peer = Peer(name, self)
            await peer.open()
            while peer.channel is not None and peer.channel.lag():
                await peer.take(100)
                for place in list(peer.holds):
                    peer.ack(place)
                if not peer.found:
                    await asyncio.sleep(1)
            await peer.flush()
            await peer.close()
            await self._check_account(name)
        every = set(self.ledger.entries)
        for name in (_SHARED, _ALONE):
            if missing := every - self.ledger.acked[name]:
                raise Violation(f"{name} never got {sorted(missing)[:3]}")
        await self.check()
        await self._check_receipts()

    async def _check_receipts(self) -> None:
        told: dict[str, list[Place]] = {name: [] for name in _TELLING}
        acked: dict[str, set[Place]] = {name: set() for name in _TELLING}
        key = PartitionKey(self.broker.topic(RECEIPTS_TOPIC).id, 0)
        (part,) = await self.broker.read(CALLER, [Read(key, 0, 2**24)], max_bytes=2**24)
        for _, value in offsets_and_values(part):
            receipt = json.loads(value)
            name, partition, end = (
                receipt[what] for what in ("subscription", "partition", "next_offset")
            )
            told[name] += ((partition, at) for at in range(receipt["from_offset"], end))
            if receipt["kind"] == "acked":
                acked[name] |= {(partition, at) for at in range(receipt["first_offset"], end)}
            self.counts[f"receipts {receipt['kind']}"] += 1
        every: list[Place] = []
        for partition in range(_PARTITIONS):
            key = PartitionKey(self.broker.topic(_TOPIC).id, partition)
            stable = (await self.broker.offsets(CALLER, key)).stable
            every += ((partition, at) for at in range(stable))
        for name in _TELLING:
            if sorted(told[name]) != every:
                raise Violation(f"the receipts of {name} tell of {sorted(told[name])}")
            # Beyond that limit, what lies between counts as acknowledged.
            is_exact = not self.counts[f"{REACHED}PENDING_RECEIPT_RANGES"]
            if (more := acked[name] - self.ledger.acked[name]) and is_exact:
                raise Violation(f"{name} has acknowledged none of {sorted(more)}")
        if missing := set(self.ledger.entries) - acked[_SHARED]:
            raise Violation(f"no receipt of {_SHARED} tells of {sorted(missing)}")

    async def _check_account(self, name: str) -> None:
        total = 0
        for partition in range(_PARTITIONS):
            key = PartitionKey(self.broker.topic(_TOPIC).id, partition)
            total += (await self.broker.offsets(CALLER, key)).stable
        lag, counts, outstanding = await self.broker.pushing.progress(CALLER, name, _TOPIC)
        if (lag, outstanding) != (0, 0) or sum(counts) != total:
            raise Violation(f"{name}: {counts} of {total}, {lag} to come")
        if counts.lost or (name not in _SKIPPING and counts.skipped):
            raise Violation(f"{name} has {counts}")
        self.counts["entries skipped"] += counts.skipped

    async def _publish(self, steps: int) -> None:
        topic = self.broker.topic(_TOPIC)
        for _ in range(steps):
            values = []
            for _ in range(self.source.randint(1, 4)):
                self.ledger.published += 1
                values.append(b"%d" % self.ledger.published)
            partition = self.source.randrange(_PARTITIONS)
            appended = await self.broker.publish(CALLER, topic, partition, batch_of(*values))
            for offset, value in enumerate(values, appended.base_offset):
                self.ledger.entries[partition, offset] = value
            await asyncio.sleep(self.source.random() ** 3)


class Peer:
    def __init__(self, name: str, life: Life) -> None:
        self.name = name
        self.channel: Channel | None = None
        self.holds: dict[Place, LeasedEntry] = {}
        self.found: list[LeasedEntry] = []
        self._life = life
        self._told = asyncio.Event()

    async def run(self, steps: int) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                for _ in range(steps):
                    try:
                        await self._step()
                    except LimitReached:
                        self._life.counts["calls refused by a limit"] += 1
                    await asyncio.sleep(self._life.source.random() ** 3 * 0.2)
        except TimeoutError as error:
            raise Violation(f"{self.name} waits for ever") from error
        except BrokerClosing:
            return

    async def _step(self) -> None:
        source = self._life.source
        if self.channel is None:
            await self.open()
        fate = source.random()
        if fate < 0.5:
            await self.take(source.choice((1, 1, 3, 100)))
        elif fate < 0.8:
            for place in list(self.holds):
                if source.random() < 0.7:
                    self.ack(place)
        elif fate < 0.85 and self.holds:
            self._nack(source.choice(list(self.holds)))
        elif fate < 0.9:
            await self.flush()
        elif fate < 0.95:
            await asyncio.sleep(_LEASE_MS / 1000 * source.random() * 2)
        else:
            await self.close()

    async def open(self) -> None:
        pushing = self._life.broker.pushing
        self.channel = await pushing.open(CALLER, self.name, _TOPIC, self._told.set)

    async def take(self, most: int) -> None:
        assert self.channel is not None
        self.found = await self.channel.take(most)
        if len(self.found) > most:
            raise Violation(f"{self.name} asked for {most} and got {len(self.found)}")
        for each in self.found:
            self._got(each)

    def _got(self, delivery: LeasedEntry) -> None:
        ledger, place = self._life.ledger, (delivery.partition, delivery.offset)
        known = ledger.entries.setdefault(place, delivery.record.value or b"")
        if known != delivery.record.value:
            raise Violation(f"{self.name} got {delivery}, and not {known!r}")
        if place in self._life.acked[self.name]:
            raise Violation(f"{self.name} had acknowledged {place}, and got it again")
        if place in ledger.flushed[self.name]:
            raise Violation(f"{self.name} had flushed {place}, and got it again")
        before = self.holds.get(place)
        if before is not None and before.deliveries >= delivery.deliveries:
            raise Violation(f"{self.name} got {place} for the {delivery.deliveries}. time again")
        if delivery.deliveries == 1:
            self._check_order(delivery)
        self._life.given_back[self.name].discard(place)
        self.holds[place] = delivery
        self._life.counts["entries pushed"] += 1
        self._life.counts["entries pushed again"] += delivery.deliveries > 1

    def _check_order(self, delivery: LeasedEntry) -> None:
        """Check what may come before an entry that is lent for the first time."""
        assert self.channel is not None
        partition, offset = delivery.partition, delivery.offset
        last = self._life.last_new.get((self.name, partition), -1)
        if self.name != _NEWEST and offset <= last:
            raise Violation(f"{self.name} got {offset} of partition {partition} behind {last}")
        self._life.last_new[self.name, partition] = offset
        for place in self._life.given_back[self.name]:
            # It may have been skipped or acknowledged since.
            if place[0] == partition and not self.channel.is_done(*place):
                raise Violation(f"{self.name} got {offset}, and had not acknowledged {place}")
        self._life.counts["entries in order"] += offset > last

    def ack(self, place: Place) -> None:
        assert self.channel is not None
        # Known before it is so: a crash may come in between.
        self._life.ledger.acked[self.name].add(place)
        if self.channel.ack(*place):
            self._life.acked[self.name].add(place)
        elif self.name not in _SKIPPING and place not in self._life.acked[self.name]:
            raise Violation(f"{self.name} may not acknowledge {place}")
        del self.holds[place]

    def _nack(self, place: Place) -> None:
        assert self.channel is not None
        wait_ms = self._life.source.choice((0, 0, 500))
        if self.channel.nack(self.holds.pop(place), wait_ms) and not wait_ms:
            self._life.given_back[self.name].add(place)

    async def flush(self) -> None:
        assert self.channel is not None
        acked = set(self._life.acked[self.name])
        await self.channel.flush()
        self._life.ledger.flushed[self.name] |= acked
        self._life.counts["flushes"] += 1

    async def close(self) -> None:
        channel, self.channel = self.channel, None
        if channel is not None:
            progresses = channel._subscription.partition_progress
            for place, held in self.holds.items():
                # The lease may have run out, and another peer may have the entry.
                if progresses[place[0]].leases.is_leased(place[1], held.deliveries):
                    self._life.given_back[self.name].add(place)
            await channel.close()
        self.holds.clear()


push = PushWorld.simulate


if __name__ == "__main__":
    sys.exit(main(simulation=push))
