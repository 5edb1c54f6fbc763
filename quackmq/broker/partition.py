"""What retention knows of one partition: its range, what is on its way into it, its marks. Pure but
for the lock that keeps trims apart.

Until it is ready, a partition knows nothing and has to be told by `begin`. After that it follows
appends and trims as they become durable, so it never claims more than the store holds.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from quackmq.broker.marks import AgeMarks, SizeMarks
from quackmq.policy import Facts
from quackmq.topic import Appended, Offsets, PartitionKey, Topic


class Partition:
    __slots__ = (
        "due_ms",
        "first",
        "in_flight",
        "is_ready",
        "key",
        "live",
        "lock",
        "next",
        "old",
        "preparing",
        "sizes",
        "topic",
    )

    def __init__(self, topic: Topic, key: PartitionKey) -> None:
        self.topic = topic
        self.key = key
        #: Held while the log is cut.
        self.lock = asyncio.Lock()
        #: The task that makes it ready.
        self.preparing: asyncio.Task[Any] | None = None
        #: Entries on their way to the store.
        self.in_flight = 0
        self.first = 0
        self.next = 0
        self.forget()

    def forget(self) -> None:
        """Know nothing, as at the beginning; what is in flight stays in flight."""
        self.is_ready = False
        self.live: AgeMarks | None = None
        self.old: AgeMarks | None = None
        self.sizes: SizeMarks | None = None
        #: The cleaner need not look before this time.
        self.due_ms: float = 0 if self.topic.policy.lets_go else math.inf

    def begin(self, offsets: Offsets, now_ms: int) -> None:
        policy = self.topic.policy
        self.first, self.next = offsets.first, max(self.next, offsets.next)
        if policy.live_for_ms is not None and policy.live_entries is not None:
            self.live = AgeMarks(policy.live_for_ms, offsets.next)
        if policy.keep_for_ms is not None:
            self.old = AgeMarks(policy.keep_for_ms, offsets.next)
        if policy.keep_bytes is not None:
            self.sizes = SizeMarks(policy.keep_bytes, offsets)
        self.follow(offsets, now_ms)
        self.due_ms = 0

    def ages(self) -> list[AgeMarks]:
        return [ages for ages in (self.live, self.old) if ages is not None]

    def follow(self, offsets: Offsets, now_ms: int) -> None:
        """What the store says; it may know of appends that did not come this way."""
        self.trimmed(offsets.first)
        self.next = max(self.next, offsets.next)
        for ages in self.ages():
            ages.cover(self.next, now_ms)

    def appended(self, answer: Appended, size: int) -> None:
        if answer.repeated:
            return
        self.next = max(self.next, answer.next_offset)
        for ages in self.ages():
            ages.add(answer.next_offset, answer.append_time_ms)
        if self.sizes is not None:
            self.sizes.add(answer.next_offset, size)
            if self.sizes.surplus_bytes > 0 or self.sizes.surplus_before() > self.first:
                self.due_ms = 0
        if self.old is not None:
            self.due_ms = min(self.due_ms, answer.append_time_ms + self.old.age_ms)

    def trimmed(self, first: int, gone_bytes: int | None = None) -> None:
        self.first = max(self.first, first)
        if self.sizes is not None:
            self.sizes.trimmed(first, gone_bytes)

    def least_facts(self) -> Facts:
        """Facts that cost nothing and claim less than is so."""
        expired_before = 0 if self.live is None else self.live.before
        return Facts(self.first, self.next, expired_before)

    def facts(self, now_ms: int, held_from: int | None) -> Facts:
        return Facts(
            first=self.first,
            next=self.next,
            expired_before=0 if self.live is None else self.live.advance(now_ms),
            old_before=0 if self.old is None else self.old.advance(now_ms),
            surplus_before=0 if self.sizes is None else self.sizes.surplus_before(),
            held_from=held_from,
        )

    def schedule(self, now_ms: int, again: bool) -> None:
        """When the cleaner should look next: at once if there may be more to do. What became due
        while it was looking stays due."""
        if again:
            self.due_ms = 0
        for ages in self.ages():
            self.due_ms = min(self.due_ms, ages.due_ms(now_ms))
