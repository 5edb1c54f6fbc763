"""The local store alone, with small frames: the loop writes them, and the kernel syncs them.

    python -m tests.simulation.quick --seed 42

The other worlds have such syncs too, but among much else. Here nearly every append is one, next to
readers that are slow to send what they read, and trims that remove its segments. So a bug in
`Disk.sync_soon`, in the engine's quick cycles, or in mapped reads shows within few seeds.

Checked: what was acknowledged or read once is there after every crash, at its offset; nothing else
is there but what somebody sent; a slice does not change while it is held; nothing holds on to the
room of removed files.
"""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import dataclass, field
from typing import Final

from quackmq.errors import OffsetOutOfRange, StorageError
from quackmq.model.topic import PartitionKey, Slice
from quackmq.stores.contract import Store
from quackmq.stores.local import LocalOptions, LocalStore
from tests.kit.support import offsets_and_values
from tests.simulation.disk import Faults, SimulatedDisk
from tests.simulation.life import patiently
from tests.simulation.model import Violation
from tests.simulation.soak import main
from tests.simulation.world import Trace, World, innermost
from tests.stores.calls import append_values, new_partitions, read_all, read_one

_PARTITIONS = 2
_PUBLISHERS = 3
#: Limits that a seed shrinks, and to what (see shrunk.py).
LIMITS: Final = {
    "JOURNAL_LOOP_BYTES": (1_000, 2_000),
    "WINDOWS": (1, 2),
    "WRITE_BACK_BYTES": (2_000, 8_000),
}


@dataclass
class Truth:
    """What is known of one partition."""

    #: What was acknowledged or read, by offset.
    known: dict[int, bytes] = field(default_factory=dict)
    #: A trim was asked for before this offset, and made before that one.
    first_at_most: int = 0
    first_at_least: int = 0

    def learn(self, offset: int, value: bytes) -> None:
        if self.known.setdefault(offset, value) != value:
            raise Violation(f"offset {offset} had {self.known[offset]!r}, and has {value!r}")

    def check(self, first: int, found: dict[int, bytes]) -> None:
        if not self.first_at_least <= first <= self.first_at_most:
            raise Violation(f"the log begins at {first}: {self}")
        lost = [at for at in self.known if at >= first and at not in found]
        if lost:
            raise Violation(f"lost: offset {lost[0]}, which was acknowledged or read")
        for offset, value in found.items():
            self.learn(offset, value)


class QuickWorld(World):
    program = "quick"
    limits = LIMITS

    def __init__(self, seed: int, trace: Trace | None = None) -> None:
        super().__init__(seed, trace)
        self._truths = [Truth() for _ in range(_PARTITIONS)]
        self._keys: list[PartitionKey] = []
        self._sent: set[bytes] = set()

    def _make_options(self) -> LocalOptions:
        return _make_options(self._source)

    def _faults(self) -> Faults:
        return _make_faults(self._source)

    def _crash(self, power: bool) -> None:
        if power:
            self._machine.power_cut()
        else:
            self._machine.process_crash()

    async def _life(self, disk: SimulatedDisk, *, last: bool) -> bool:
        failed = False
        try:
            store = await LocalStore.open_on(
                disk, options=self._options, now_ms=self._clock.of_process()
            )
            await self._check(store)
            if not last:
                await self._work(store, disk)
        except* StorageError as errors:
            if not disk.failed:
                raise Violation(f"the store stopped: {innermost(errors)}") from errors
            failed = True
        if failed or (not last and self._source.random() < 0.6):
            return True
        if held := disk.held_for_nothing():
            raise Violation(f"{held[0]} was removed, and its room on the disk is still held")
        await store.close()
        return False

    async def _check(self, store: Store) -> None:
        topic = (await store.topics()).get("news")
        if topic is None:
            if any(truth.known for truth in self._truths):
                raise Violation("the topic is lost")
            self._keys = await new_partitions(store, _PARTITIONS)
        else:
            self._keys = [PartitionKey(topic.id, number) for number in range(_PARTITIONS)]
        for key, truth in zip(self._keys, self._truths, strict=True):
            found = dict(await read_all(store, key))
            if foreign := found.keys() - truth.known.keys():
                if any(found[offset] not in self._sent for offset in foreign):
                    raise Violation("something is there that nobody sent")
            truth.check((await store.offsets(key)).first, found)
        self.counts["recoveries checked"] += 1

    async def _work(self, store: Store, disk: SimulatedDisk) -> None:
        steps = self._source.choice((5, 15, 40))
        async with asyncio.TaskGroup() as group:
            for number in range(_PUBLISHERS):
                group.create_task(patiently(f"publisher-{number}", self._publish(store, steps)))
            for number in range(2):
                group.create_task(patiently(f"reader-{number}", self._read(store, disk, steps)))
            group.create_task(patiently("trimmer", self._trim(store, steps // 3)))

    async def _publish(self, store: Store, steps: int) -> None:
        for _ in range(steps):
            number = self._source.randrange(_PARTITIONS)
            value = b"%d " % len(self._sent) + b"v" * self._source.choice((0, 100, 700))
            self._sent.add(value)
            appended = await append_values(store, self._keys[number], value)
            self._truths[number].learn(appended.base_offset, value)
            self.counts["appends acknowledged"] += 1
            await self._rest()

    async def _read(self, store: Store, disk: SimulatedDisk, steps: int) -> None:
        """Read, and send slowly."""
        sending: list[tuple[Slice, list[bytes]]] = []
        for _ in range(steps):
            number = self._source.randrange(_PARTITIONS)
            key, truth = self._keys[number], self._truths[number]
            offsets = await store.offsets(key)
            offset = self._source.randint(offsets.first, offsets.next)
            found = await read_one(store, key, offset, max_bytes=self._source.choice((500, 9_000)))
            if found.error is not None and not isinstance(found.error, OffsetOutOfRange):
                raise found.error
            for each, value in offsets_and_values(found):
                truth.learn(each, value)
            sending.append((found, [bytes(chunk) for chunk in found.chunks]))
            await self._rest()
            for sent, before in sending:
                if list(sent.chunks) != before and not disk.failed:
                    raise Violation("bytes changed while they were sent")
            if self._source.random() < 0.3:
                sending.pop(0)

    async def _trim(self, store: Store, steps: int) -> None:
        for _ in range(steps):
            number = self._source.randrange(_PARTITIONS)
            key, truth = self._keys[number], self._truths[number]
            offsets = await store.offsets(key)
            before = self._source.randint(offsets.first, offsets.next)
            truth.first_at_most = max(truth.first_at_most, before)
            truth.first_at_least = max(truth.first_at_least, await store.trim(key, before))
            await self._rest()

    async def _rest(self) -> None:
        await asyncio.sleep(self._source.random() ** 3 * 0.01)


def _make_options(source: random.Random) -> LocalOptions:
    return LocalOptions(
        segment_bytes=source.choice((2_000, 8_192)),
        region_bytes=source.choice((300, 1_024)),
        journal_slot_bytes=source.choice((16_384, 32_768)),
        journal_slots=source.choice((2, 3)),
        journal_inline_bytes=2_000,
        checkpoint_bytes=source.choice((5_000, 20_000)),
        tail_bytes=source.choice((0, 0, 3_000)),
        open_files=source.choice((2, 100)),
        # Mostly files of their own, which are mapped and removed.
        packed_bytes=source.choice((0, 0, 300)),
    )


def _make_faults(source: random.Random) -> Faults:
    fate = source.random()
    return Faults(
        crash_at=source.randint(1, 400) if fate < 0.2 else None,
        crash_in_kernel_sync=0.03 if fate > 0.4 else 0.0,
        kernel_failures=0.05 if 0.2 < fate < 0.6 else 0.0,
        kernel_refusals=0.1,
        short_writes=source.choice((0.0, 0.1)),
        pauses=source.choice((0.2, 0.7)),
        write_backs=source.choice((0.0, 0.02)),
    )


quick = QuickWorld.simulate


if __name__ == "__main__":
    sys.exit(main(simulation=quick))
