"""What receipts have yet to say, against a plain count of what became of every offset (S5)."""

from __future__ import annotations

import random
import uuid

import pytest

from quackmq.broker import limits as broker_limits
from quackmq.broker.push.receipt_ranges import PendingReceipts
from quackmq.broker.subscriptions.receipts import ReceiptEvent
from quackmq.model.leases import LeaseRange, Leases
from quackmq.model.policy import Policy
from quackmq.model.subscription import Reading, Terms
from quackmq.model.topic import Topic
from tests.kit import effort

PLACE = ("puddles", Topic(uuid.UUID(int=1), "ducks", 1, Policy(), 0), 0)


class Followed:
    """A subscription whose every step is noted beside its receipts."""

    def __init__(self, terms: Terms, chance: random.Random) -> None:
        self.leases = Leases(terms, 0)
        self.pending = PendingReceipts(self.leases, has_begun=False)
        self.chance = chance
        self.now_ms = 0
        self.events: list[ReceiptEvent] = []
        self.acked: set[int] = set()

    def lease(self) -> None:
        """Something of what is wanted next, in which some offsets hold nothing."""
        end = self.leases.frontier + self.chance.randrange(12)
        wanted = self.leases.next_range(self.now_ms, end, self._live_from())
        if wanted is not None:
            entries = [at for at in range(*wanted[:2]) if wanted.is_redelivery or at % 5]
            self.leases.lease(LeaseRange(*wanted), entries, end, self.now_ms)

    def ack(self) -> None:
        for lease in self.chance.sample(self.leases.leases(), self.leases.outstanding // 2):
            assert self.leases.ack(lease.offset)
            self.pending.ack(lease.offset, self.leases)
            self.acked.add(lease.offset)

    def lose(self) -> None:
        self.leases.lose_before(self.leases.low_water_mark + self.chance.randrange(4))

    def pass_time(self) -> None:
        self.now_ms += self.chance.randrange(2 * self.leases.terms.lease_ms)

    def flush(self, works: bool) -> None:
        told = self.pending.build(*PLACE, self.leases)
        # More may be acknowledged while it is on its way.
        self.ack()
        if works:
            self.pending.mark_written(told)
            self.events += told.events
        else:
            self.pending.mark_failed(told)

    def _live_from(self) -> int:
        if self.leases.terms.reading == "every":
            return 0
        return max(0, self.leases.frontier - self.chance.randrange(60))


@pytest.mark.parametrize("reading", ["every", "live", "newest"])
@pytest.mark.parametrize("seed", range(effort.of(8)))
def test_each_offset_that_is_done_is_told_once_as_what_it_was(seed: int, reading: Reading) -> None:
    chance = random.Random(seed)
    terms = Terms(reading, lease_ms=100, outstanding=20, window=5)
    followed = Followed(terms, chance)
    for _ in range(300):
        chance.choice([followed.lease, followed.lease, followed.ack, followed.pass_time])()
        if not chance.randrange(12):
            followed.lose()
        if not chance.randrange(6):
            followed.flush(works=chance.random() < 0.7)
    while followed.leases.outstanding:
        followed.ack()
        if followed.leases.outstanding == 1:
            (last,) = followed.leases.leases()
            followed.leases.ack(last.offset)
            followed.pending.ack(last.offset, followed.leases)
            followed.acked.add(last.offset)
    followed.flush(works=True)
    begun, *steps = followed.events
    assert (begun.kind, begun.next_offset) == ("begun", 0)
    taken = [
        at
        for step in steps
        if step.kind == "acked"
        for at in range(step.first_offset, step.next_offset)
    ]
    told = [at for step in steps for at in range(step.from_offset, step.next_offset)]
    assert sorted(taken) == sorted(followed.acked)
    counts = followed.leases.counts
    done = [at for at in range(followed.leases.frontier) if followed.leases.is_done(at)]
    assert sorted(told) == done
    assert sum(step.lost for step in steps) == counts.lost
    assert len(told) == counts.acked + counts.skipped + counts.lost + counts.absent
    passed = any(step.kind == "passed" for step in steps)
    assert passed == (counts.skipped > 0)


def test_beyond_its_bound_what_lies_between_counts_as_acknowledged_and_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_limits, "PENDING_RECEIPT_RANGES", 4)
    leases = Leases(Terms(), 0)
    untold = PendingReceipts(leases, has_begun=True)
    leases.lease(LeaseRange(0, 40), range(1, 40, 2), 40, 0)
    held = [lease.offset for lease in leases.leases() if lease.offset not in (9, 21)]
    for offset in held:
        assert leases.ack(offset)
        untold.ack(offset, leases)
    told = untold.build(*PLACE, leases)
    untold.mark_written(told)
    assert [(step.from_offset, step.next_offset) for step in told.events] == [
        *((0, 9), (10, 21), (22, 40)),
    ]
    leases.ack(9)
    untold.ack(9, leases)
    (step,) = untold.build(*PLACE, leases).events
    assert (step.first_offset, step.next_offset) == (9, 10)
