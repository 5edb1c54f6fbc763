"""Plans: consistent views of a topic's archive that stay valid until their lease ends.

A plan pins the manifests of its partitions, so that none of their files is removed. A plan ends
when it is released or when its lease expires. Files that were offered under it and not taken are
then removed. Plans are in memory only, and their number is bounded.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from quackmq import limits as shared_limits
from quackmq.archive import layout as archive_files
from quackmq.archive.manifest import ArchiveFile, Manifest, Quarantined
from quackmq.broker import limits
from quackmq.errors import InvalidRequest, LimitReached, UnknownPlan
from quackmq.model.topic import PartitionKey, Topic

if TYPE_CHECKING:  # these modules load pyarrow, which a broker without an archive does not need
    from quackmq.archive.manifest_registry import ManifestRegistry
    from quackmq.archive.pins import Pin

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PartitionArchive:
    """A partition's files at one moment, and the log after them. The archive holds the offsets from
    `first_offset` up to, not including, `next_offset`. The log holds decided records from
    `log_first_offset` up to, not including, `end_offset`. The log never begins after the archive's
    end."""

    partition: int
    version: int
    first_offset: int
    next_offset: int
    log_first_offset: int
    end_offset: int
    log_bytes: int
    files: tuple[ArchiveFile, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A lease on the files of these partitions: none is removed until `expires_ms`. If `offers` is
    true, files may be offered under this plan."""

    id: str
    topic: Topic
    expires_ms: int
    offers: bool
    partitions: tuple[int, ...]


#: Describes a partition with the manifest that the given function looks up for it.
Describe = Callable[
    [PartitionKey, Callable[[PartitionKey], Manifest | None]], Awaitable[PartitionArchive]
]


class Plans:
    def __init__(
        self,
        partitions: ManifestRegistry,
        describe: Describe,
        now_ms: Callable[[], int],
        taking: asyncio.Lock,
    ) -> None:
        """`taking` is the lock that the caller holds while it takes offered files."""
        self._taking = taking
        self._partitions = partitions
        self._describe = describe
        self._now_ms = now_ms
        self._plans: dict[str, HeldPlan] = {}
        self._sweeps: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._plans)

    def all(self) -> list[HeldPlan]:
        return list(self._plans.values())

    async def make(
        self, topic: Topic, numbers: Sequence[int], for_ms: int, offers: bool
    ) -> HeldPlan:
        """Make a plan for these partitions and start its lease. Raise InvalidRequest or
        LimitReached."""
        _check_time(for_ms)
        if len(self._plans) >= limits.ARCHIVE_PLANS:
            raise LimitReached(f"{len(self._plans)} plans hold files already: try again later")
        made = HeldPlan(uuid.uuid4().hex, topic, offers)
        self._plans[made.id] = made
        try:
            for number in numbers:
                hold = partial(made.hold, self._partitions)
                key = PartitionKey(topic.id, number)
                made.partitions[number] = await self._describe(key, hold)
        except BaseException:
            self.end(made)
            raise
        self._lease(made, for_ms)
        return made

    def get(self, plan_id: str) -> HeldPlan:
        """Return a plan by its id. Raise UnknownPlan."""
        made = self._plans.get(plan_id)
        if made is None:
            raise UnknownPlan(f"there is no plan {plan_id[:100]!r}, or not any more: plan again")
        return made

    def renew(self, plan_id: str, for_ms: int) -> HeldPlan:
        """Let the lease end `for_ms` from now. Raise InvalidRequest or UnknownPlan."""
        _check_time(for_ms)
        made = self.get(plan_id)
        self._lease(made, for_ms)
        return made

    def end(self, made: HeldPlan) -> None:
        if self._plans.pop(made.id, None) is None:
            return
        made.release()
        if made.offers:
            task = asyncio.get_running_loop().create_task(self._sweep_offered(made))
            self._sweeps.add(task)
            task.add_done_callback(self._sweeps.discard)

    async def close(self) -> None:
        """End all plans; wait until their untaken files are removed."""
        for made in self.all():
            self.end(made)
        while self._sweeps:
            await asyncio.wait(self._sweeps)

    def _lease(self, made: HeldPlan, for_ms: int) -> None:
        made.expires_ms = self._now_ms() + for_ms
        if made.timer is not None:
            made.timer.cancel()
        loop = asyncio.get_running_loop()
        made.timer = loop.call_later(for_ms / 1000, self.end, made)

    async def _sweep_offered(self, made: HeldPlan) -> None:
        """Remove the files that were offered under an ended plan and not taken."""
        disk = self._partitions.disk
        for number in made.partitions:
            if self._partitions.manifest(PartitionKey(made.topic.id, number)) is None:
                continue
            sweep = partial(archive_files.sweep_offered, disk, made.topic.name, number, made.id)
            try:
                async with self._taking:
                    await disk.run(sweep, "archive")
            except OSError as error:
                log.warning(
                    "what was offered under plan %s is still there: %s; it goes when the broker "
                    "opens",
                    *(made.id, error),
                )
                return


class HeldPlan:
    """A plan together with the pins that it holds."""

    def __init__(self, plan_id: str, topic: Topic, offers: bool) -> None:
        self.id = plan_id
        self.topic = topic
        self.offers = offers
        self.expires_ms = 0
        self.timer: asyncio.TimerHandle | None = None
        self.partitions: dict[int, PartitionArchive] = {}
        self._pins: dict[int, Pin] = {}

    def told(self) -> Plan:
        return Plan(self.id, self.topic, self.expires_ms, self.offers, tuple(self.partitions))

    def hold(self, partitions: ManifestRegistry, key: PartitionKey) -> Manifest | None:
        """Pin the present manifest of a partition and return it; None if there is no manifest."""
        if partitions.manifest(key) is None:
            return None
        pin = self._pins[key.partition] = partitions.pin(key)
        return pin.manifest

    def held(self, key: PartitionKey) -> Manifest | None:
        pin = self._pins.get(key.partition)
        return None if pin is None or key.topic_id != self.topic.id else pin.manifest

    def release(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        for pin in self._pins.values():
            pin.release()
        self._pins.clear()


def _check_time(for_ms: int) -> None:
    if not 1 <= for_ms <= shared_limits.ARCHIVE_PLAN_MS:
        raise InvalidRequest(
            f"a plan cannot be for {for_ms} ms: 1 to {shared_limits.ARCHIVE_PLAN_MS} are"
        )
