"""Plans: consistent views of a topic's archive that stay valid until their lease ends.

A plan pins the manifests of its partitions, so that none of their files is removed. A plan ends
when it is released or when its lease expires. Files that were offered under it and not accepted are
then removed. Plans are in memory only, and their number is bounded.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from quackmq import limits as shared_limits
from quackmq.archive import layout as archive_files
from quackmq.archive.manifest import ArchiveFile, Manifest, Quarantined
from quackmq.broker import limits
from quackmq.errors import InvalidRequest, LimitReached, UnknownPlan
from quackmq.model.topic import PartitionKey, Topic
from quackmq.tasks import TaskSet

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
    """All plans that have not ended, by id."""

    def __init__(
        self,
        registry: ManifestRegistry,
        describe: Describe,
        now_ms: Callable[[], int],
        replace_lock: asyncio.Lock,
    ) -> None:
        """The caller holds `replace_lock` while it accepts offered files."""
        self._replace_lock = replace_lock
        self._registry = registry
        self._describe = describe
        self._now_ms = now_ms
        self._plans: dict[str, ActivePlan] = {}
        self._sweep_tasks = TaskSet()

    def __len__(self) -> int:
        return len(self._plans)

    def all(self) -> list[ActivePlan]:
        return list(self._plans.values())

    async def make(
        self, topic: Topic, numbers: Sequence[int], for_ms: int, offers: bool
    ) -> ActivePlan:
        """Make a plan for these partitions and start its lease. Raise InvalidRequest or
        LimitReached."""
        _check_time(for_ms)
        if len(self._plans) >= limits.ARCHIVE_PLANS:
            raise LimitReached(f"there are {len(self._plans)} plans, the limit: try again later")
        plan = ActivePlan(uuid.uuid4().hex, topic, offers)
        self._plans[plan.id] = plan
        try:
            pin_manifest = partial(plan.pin_manifest, self._registry)
            for number in numbers:
                key = PartitionKey(topic.id, number)
                plan.partitions[number] = await self._describe(key, pin_manifest)
        except BaseException:
            self.end(plan)
            raise
        self._lease(plan, for_ms)
        return plan

    def get(self, plan_id: str) -> ActivePlan:
        """Return a plan by its id. Raise UnknownPlan."""
        plan = self._plans.get(plan_id)
        if plan is None:
            raise UnknownPlan(f"there is no plan {plan_id[:100]!r}, or it has ended: plan again")
        return plan

    def renew(self, plan_id: str, for_ms: int) -> ActivePlan:
        """Let the lease end `for_ms` from now. Raise InvalidRequest or UnknownPlan."""
        _check_time(for_ms)
        plan = self.get(plan_id)
        self._lease(plan, for_ms)
        return plan

    def end(self, plan: ActivePlan) -> None:
        """Release the files of a plan, unless it has ended; remove files offered under it."""
        if self._plans.pop(plan.id, None) is None:
            return
        plan.release()
        if plan.offers:
            self._sweep_tasks.start(self._sweep_offered(plan))

    async def close(self) -> None:
        """End all plans; wait until the offered files are removed."""
        for plan in self.all():
            self.end(plan)
        await self._sweep_tasks.finish()

    def _lease(self, plan: ActivePlan, for_ms: int) -> None:
        """Let a plan end `for_ms` from now."""
        plan.expires_ms = self._now_ms() + for_ms
        if plan.timer is not None:
            plan.timer.cancel()
        loop = asyncio.get_running_loop()
        plan.timer = loop.call_later(for_ms / 1000, self.end, plan)

    async def _sweep_offered(self, plan: ActivePlan) -> None:
        """Remove the files that were offered under an ended plan and not accepted."""
        disk = self._registry.disk
        for number in plan.partitions:
            if self._registry.manifest(PartitionKey(plan.topic.id, number)) is None:
                continue
            sweep = partial(archive_files.sweep_offered, disk, plan.topic.name, number, plan.id)
            try:
                async with self._replace_lock:
                    await disk.run(sweep, "archive")
            except OSError as error:
                log.warning(
                    "cannot remove the files offered under plan %s until the broker opens again: "
                    "%s",
                    *(plan.id, error),
                )
                return


@dataclass(slots=True, eq=False)
class ActivePlan:
    """A plan together with the pins that it holds."""

    id: str
    topic: Topic
    offers: bool
    expires_ms: int = 0
    timer: asyncio.TimerHandle | None = None
    partitions: dict[int, PartitionArchive] = field(default_factory=dict)
    _pins: dict[int, Pin] = field(default_factory=dict)

    def describe(self) -> Plan:
        """Return the plan as callers see it."""
        return Plan(self.id, self.topic, self.expires_ms, self.offers, tuple(self.partitions))

    def pin_manifest(self, registry: ManifestRegistry, key: PartitionKey) -> Manifest | None:
        """Pin the present manifest of a partition and return it; None if there is no manifest."""
        if registry.manifest(key) is None:
            return None
        pin = self._pins[key.partition] = registry.pin(key)
        return pin.manifest

    def pinned_manifest(self, key: PartitionKey) -> Manifest | None:
        """Return the manifest of a partition that this plan pins; None if it pins none."""
        pin = self._pins.get(key.partition)
        return None if pin is None or key.topic_id != self.topic.id else pin.manifest

    def release(self) -> None:
        """Stop the lease and release all pins."""
        if self.timer is not None:
            self.timer.cancel()
        for pin in self._pins.values():
            pin.release()
        self._pins.clear()


def _check_time(for_ms: int) -> None:
    if not 1 <= for_ms <= shared_limits.ARCHIVE_PLAN_MS:
        raise InvalidRequest(
            f"invalid lease of {for_ms} ms: use 1 to {shared_limits.ARCHIVE_PLAN_MS} ms"
        )
