"""The facts that retention knows about one partition: its offsets, appends in flight, and marks.
Pure, except for the lock that serialises trims.

A partition knows nothing until `begin` makes it ready. After that it follows appends and trims when
they are durable, so it never claims more than the store holds. Moving entries from the log into the
archive changes neither their offsets nor their ages. `follow_archive` updates their sizes.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from quackmq import limits
from quackmq.archive.manifest import Manifest
from quackmq.broker.retention.marks import AppendAgeIndex, LogSizeIndex
from quackmq.clock import Clock
from quackmq.model.agenda import Agenda
from quackmq.model.policy import Facts
from quackmq.model.topic import AppendResult, Offsets, PartitionKey, Topic


class Partition:
    """A partition as retention knows it."""

    __slots__ = (
        "ages",
        "all_sizes",
        "last_cut_ms",
        "_due_ms",
        "_due_times",
        "first",
        "hold_sizes",
        "in_flight",
        "is_closed",
        "is_ready",
        "key",
        "live_ages",
        "lock",
        "next",
        "keep_ages",
        "preparing",
        "sizes",
        "logged_hold",
        "topic",
        "hold_ages",
    )

    def __init__(self, topic: Topic, key: PartitionKey, due_times: Agenda[Partition]) -> None:
        self._due_times = due_times
        self._due_ms = math.inf
        #: Whether the topic was deleted, or its policy no longer deletes anything.
        self.is_closed = False
        self.topic = topic
        self.key = key
        #: Serialises trims.
        self.lock = asyncio.Lock()
        #: The task that makes this partition ready.
        self.preparing: asyncio.Task[Any] | None = None
        #: Entries that are being appended to the store.
        self.in_flight = 0
        self.first = 0
        self.next = 0
        #: The time at which a file of the archive was last cut.
        self.last_cut_ms: int | None = None
        #: The cursor that retention overtook and that was logged last.
        self.logged_hold: int | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all facts, except for appends in flight."""
        self.is_ready = False
        self.live_ages: AppendAgeIndex | None = None
        self.keep_ages: AppendAgeIndex | None = None
        self.hold_ages: AppendAgeIndex | None = None
        self.sizes: LogSizeIndex | None = None
        self.hold_sizes: LogSizeIndex | None = None
        self._collect_indexes()
        self.due_ms = 0 if self.topic.policy.deletes_entries else math.inf

    def close(self) -> None:
        """Stop the cleaning: the topic was deleted, or its policy no longer deletes anything."""
        self.is_closed = True
        self.due_ms = math.inf

    @property
    def due_ms(self) -> float:
        """The time at which the cleaner must look at this partition next."""
        return self._due_ms

    @due_ms.setter
    def due_ms(self, due_ms: float) -> None:
        if due_ms != self._due_ms:
            self._due_ms = due_ms
            if due_ms < math.inf and not self.is_closed:
                self._due_times.put(self, due_ms)
            else:
                self._due_times.drop(self)

    def begin(self, offsets: Offsets, log: Offsets, now_ms: int) -> None:
        """Start the marks. `offsets` cover log and archive, `log` the log alone."""
        policy = self.topic.policy
        self.first, self.next = offsets.first, max(self.next, offsets.next)
        # Ages of live entries matter only where their number is limited.
        if policy.live_for_ms is not None and policy.live_entries is not None:
            self.live_ages = AppendAgeIndex(policy.live_for_ms, offsets.next)
        if policy.keep_for_ms is not None:
            self.keep_ages = AppendAgeIndex(policy.keep_for_ms, offsets.next)
        if policy.keep_bytes is not None:
            self.sizes = LogSizeIndex(policy.keep_bytes, log.first, log.next)
        if policy.deletes_entries and policy.hold_for_ms is not None:
            self.hold_ages = AppendAgeIndex(policy.hold_for_ms, offsets.next)
        if policy.deletes_entries and policy.hold_bytes is not None:
            self.hold_sizes = LogSizeIndex(policy.hold_bytes, log.first, log.next)
        self._collect_indexes()
        self.apply_offsets(offsets, now_ms)
        self.due_ms = 0

    def apply_offsets(self, offsets: Offsets, now_ms: int) -> None:
        """Apply the store's offsets; they may include appends that bypassed retention."""
        self.apply_trim(offsets.first)
        self.next = max(self.next, offsets.next)
        for ages in self.ages:
            ages.cover(self.next, now_ms)

    def apply_manifest(self, manifest: Manifest) -> None:
        for sizes in self.all_sizes:
            sizes.apply_manifest(manifest)

    def has_seen(self, manifest: Manifest) -> bool:
        """Return whether the sizes are those of this manifest."""
        return all(sizes.has_seen(manifest) for sizes in self.all_sizes)

    def apply_append(self, result: AppendResult, size: int) -> None:
        """Record a durable append of `size` bytes."""
        if result.repeated:
            return
        self.next = max(self.next, result.next_offset)
        for ages in self.ages:
            ages.add(result.next_offset, result.append_time_ms)
        for sizes in self.all_sizes:
            sizes.add(result.next_offset, size)
            if sizes.is_due:
                self.due_ms = 0
        for deletion_ages in (self.keep_ages, self.hold_ages):
            if deletion_ages is not None:
                self.due_ms = min(self.due_ms, result.append_time_ms + deletion_ages.age_ms)

    def apply_trim(self, first: int) -> None:
        """Record that the partition begins at `first`."""
        self.first = max(self.first, first)
        for sizes in self.all_sizes:
            sizes.apply_trim(first)
            if sizes.unmeasured_range() is not None:
                self.due_ms = 0  # the rest may be larger than it now counts

    def least_facts(self) -> Facts:
        """Return facts that are cheap to get; they may understate which entries have expired."""
        expired_before = 0 if self.live_ages is None else self.live_ages.before
        return Facts(self.first, self.next, expired_before)

    def now_for(self, ages: AppendAgeIndex, clock: Clock) -> int:
        """Return the time by which this index judges ages. Live entries continue to age while
        deletion is paused: otherwise a full topic would accept nothing more."""
        age_ms = ages.age_ms
        before_ms = clock.before(age_ms) if ages is self.live_ages else clock.expired_before(age_ms)
        return before_ms + age_ms

    def facts(self, clock: Clock, held_from: int | None) -> Facts:
        """Return all facts for a decision, up to now. `held_from` is the lowest cursor that holds
        the partition."""
        return Facts(
            first=self.first,
            next=self.next,
            expired_before=self._advance(self.live_ages, clock),
            old_before=self._advance(self.keep_ages, clock),
            surplus_before=0 if self.sizes is None else self.sizes.surplus_before(),
            held_from=held_from,
            unheld_before=max(
                self._advance(self.hold_ages, clock),
                0 if self.hold_sizes is None else self.hold_sizes.surplus_before(),
            ),
        )

    def _advance(self, ages: AppendAgeIndex | None, clock: Clock) -> int:
        return 0 if ages is None else ages.advance(self.now_for(ages, clock))

    def _collect_indexes(self) -> None:
        """Collect the existing indexes of each kind, so that each append reaches all of them."""
        ages = (self.live_ages, self.keep_ages, self.hold_ages)
        self.ages = tuple(each for each in ages if each is not None)
        sizes = (self.sizes, self.hold_sizes)
        self.all_sizes = tuple(each for each in sizes if each is not None)

    def schedule(self, now_ms: int, has_more: bool) -> None:
        """Set when the cleaner looks next: immediately if there may be more to do. Keep an earlier
        time that was set while the cleaner was running."""
        if has_more:
            self.due_ms = 0
        for ages in self.ages:
            due_ms = ages.due_ms(now_ms)
            if due_ms <= now_ms:  # old but not deleted: the clock is paused, or has a gap
                due_ms = now_ms + limits.CLOCK_STEP_MS
            self.due_ms = min(self.due_ms, due_ms)
