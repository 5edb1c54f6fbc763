"""What should be in a partition under a policy, said as plainly as can be, and random steps to hold
a broker against it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Coroutine, Iterator
from typing import Any, NamedTuple

from quackmq.broker import Broker
from quackmq.model.policy import Policy, WhenFull
from quackmq.model.topic import PartitionKey
from tests.broker.support import CALLER, TOPIC, publish, values_in
from tests.broker.tiers import Tiers
from tests.kit.support import batch_of

#: Topics of these tests are archived when a test says so.
MANUAL: dict[str, Any] = {
    "archive_after_ms": None,
    "archive_bytes": None,
    "archive_after_live_ms": None,
}
Step = tuple[Any, ...]


class Appended(NamedTuple):
    """A batch as the model remembers it."""

    base_offset: int
    next_offset: int
    size: int
    append_ms: int


class Truth:
    """What should be there, said as plainly as can be."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.first = 0
        self.batches: list[Appended] = []
        self.values: list[bytes] = []
        self.cursors: dict[str, int] = {}
        self.lost: dict[str, int] = {}
        #: After a crash, where the partition may begin at the most.
        self.may_begin_at = 0

    @property
    def next(self) -> int:
        return len(self.values)

    def expected_first(self, now_ms: int, units: list[tuple[int, int]]) -> int:
        """Where the partition begins after cleaning; `units` are what can go only as a whole, by
        its end and size: the archive's files, then the log's batches."""
        policy = self.policy
        before = max(self._old(policy.keep_for_ms, now_ms), _surplus(policy.keep_bytes, units))
        if self.cursors:
            unheld = max(self._old(policy.hold_for_ms, now_ms), _surplus(policy.hold_bytes, units))
            held_from = max(min(self.cursors.values()), unheld)
            before = held_from if policy.keep_until_consumed else min(before, held_from)
        if policy.drops_oldest and policy.live_entries is not None:
            before = max(before, self.next - policy.live_entries)
        return max(self.first, min(before, self.next))

    def _old(self, age_ms: int | None, now_ms: int) -> int:
        if age_ms is None:
            return 0
        young = [each for each in self.batches if each.append_ms + age_ms > now_ms]
        return young[0].base_offset if young else self.next


def _surplus(keep_bytes: int | None, units: list[tuple[int, int]]) -> int:
    if keep_bytes is None:
        return 0
    ends = [
        end
        for number, (end, _) in enumerate(units)
        if sum(size for _, size in units[number + 1 :]) >= keep_bytes
    ]
    return max(ends, default=0)


@dataclasses.dataclass
class Run:
    """The broker and the model, step by step."""

    tiers: Tiers
    truth: Truth
    broker: Broker
    key: PartitionKey
    is_exact: bool

    def units(self) -> list[tuple[int, int]]:
        manifest = self.tiers.store.registry.manifest(self.key)
        files = () if manifest is None else manifest.files
        begin = max(files[-1].next_offset if files else 0, self.truth.first)
        log = [each for each in self.truth.batches if each.next_offset > begin]
        return [
            *((file.next_offset, file.size) for file in files),
            # Of a batch that is cut nothing is sure to be left.
            *((each.next_offset, each.size if each.base_offset >= begin else 0) for each in log),
        ]

    async def take(self, step: Step) -> None:
        """One step, and a look at what is there."""
        name, *arguments = step
        if name == "wait":
            self.tiers.clock.advance(*arguments)
        elif name == "merge":
            await self.begin(step)
        else:
            does: Coroutine[Any, Any, None] = getattr(self, name)(*arguments)
            await does
        if name != "publish":
            await self.check()

    async def begin(self, step: Step) -> None:
        """What a step does, whatever becomes of it."""
        name, *arguments = step
        if name == "merge":
            await self.tiers.merge(self.key)
        elif name == "clean":
            await self.broker.clean()
        elif name == "trim":
            await self.broker.trim(CALLER, self.key, self.trimmed_by(*arguments))
        else:
            assert name == "archive"
            await self.archive(*arguments)

    async def publish(self, records: int, size: int) -> None:
        truth = self.truth
        values = [b"%d " % (truth.next + number) + b"x" * size for number in range(records)]
        batch = batch_of(*values)
        base = await publish(self.broker, *values)
        assert base == truth.next
        truth.values += values
        now_ms = self.tiers.clock()
        truth.batches.append(Appended(base, base + records, batch.size, now_ms))
        if truth.policy.drops_oldest:
            first = (await self.broker.offsets(CALLER, self.key)).first
            assert first <= truth.expected_first(now_ms, self.units())
            truth.first = first

    async def clean(self) -> None:
        expected = self.truth.expected_first(self.tiers.clock(), self.units())
        # Where the whole archive goes, what follows it in the log is looked at afterwards.
        for _ in range(3):
            await self.broker.clean()
        first = (await self.broker.offsets(CALLER, self.key)).first
        assert self.truth.first <= first <= expected, "it goes only if it may"
        assert first == expected or not self.is_exact
        self.truth.first = first

    async def trim(self, share: int) -> None:
        before = self.trimmed_by(share)
        await self.broker.trim(CALLER, self.key, before)
        self.truth.first = max(self.truth.first, before)

    def trimmed_by(self, share: int) -> int:
        return self.truth.first + (self.truth.next - self.truth.first) * share // 100

    async def archive(self, share: int, trims: bool) -> None:
        before = self.trimmed_by(share)
        await self.tiers.archive(self.key, before, trims=trims)

    async def consume(self, name: str, count: int) -> None:
        truth = self.truth
        if name not in truth.cursors:
            await self.broker.subscribe(CALLER, name, TOPIC, "beginning")
            truth.cursors[name], truth.lost[name] = truth.first, 0
        for _ in range(count):
            message = await self.broker.get(CALLER, name, TOPIC, None)
            cursor = truth.cursors[name]
            begin = max(cursor, truth.first)
            if message is None:
                assert begin == truth.next
                break
            assert (message.record.offset, message.lost) == (begin, begin - cursor)
            await self.broker.commit(CALLER, name, TOPIC, message.id)
            truth.cursors[name] = begin + 1
            truth.lost[name] += message.lost

    async def check(self) -> None:
        truth = self.truth
        assert await values_in(self.broker) == truth.values[truth.first :]
        for name, cursor in truth.cursors.items():
            lag, lost = await self.broker.lag_and_losses(CALLER, name, TOPIC)
            assert lag == truth.next - max(cursor, truth.first)
            assert lost == truth.lost[name] + max(0, truth.first - cursor)


class Steps:
    """A policy and what happens under it, by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.policy = self._by_size() if seed % 3 == 0 else self._anyhow()

    def __iter__(self) -> Iterator[Step]:
        chosen = self._random
        for _ in range(chosen.randint(12, 36)):
            yield from (("publish", *self._batch()) for _ in range(chosen.randint(0, 3)))
            yield chosen.choice(
                [
                    ("wait", chosen.randint(1, 400)),
                    ("archive", chosen.choice([30, 60, 100, 100]), chosen.random() < 0.8),
                    ("archive", 100, True),
                    ("merge",),
                    ("trim", chosen.randint(0, 40)),
                    ("consume", chosen.choice(["one", "two"]), chosen.randint(0, 8)),
                    ("restart",),
                ]
            )
            if chosen.random() < 0.6:
                yield ("clean",)

    def _batch(self) -> tuple[int, int]:
        return self._random.choice([(1, 10), (4, 10), (1, 1_000), (1, 3_000), (3, 700)])

    def _by_size(self) -> Policy:
        return Policy(keep_bytes=self._random.randint(1_000, 20_000), **MANUAL)

    def _anyhow(self) -> Policy:
        chosen = self._random

        def maybe(most: int) -> int | None:
            return chosen.randint(0, most) if chosen.random() < 0.5 else None

        return Policy(
            keep_for_ms=maybe(1_000),
            keep_bytes=maybe(20_000),
            keep_until_consumed=chosen.random() < 0.5,
            hold_for_ms=maybe(1_000),
            hold_bytes=maybe(20_000),
            live_entries=chosen.choice([None, None, 1, 20]),
            when_full=WhenFull.DROP_OLDEST,
            **MANUAL,
        )


async def run_until_restart(run: Run, steps: Iterator[Step]) -> bool:
    """Whether the steps are at their end."""
    for step in steps:
        if step[0] == "restart":
            return False
        await run.take(step)
    await run.clean()
    await run.check()
    return True
