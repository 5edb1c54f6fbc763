"""What was tried in transactions, and what the log says of it: the memory of `flow`.

The log decides, by its markers alone: what a producer wrote is committed or aborted by its next
marker, and open as long as there is none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

from quackmq.model.log_transactions import Marker, read_marker
from quackmq.model.topic import PartitionKey, Read, Slice
from quackmq.records.batch import Batch, batches
from quackmq.stores.contract import Store
from tests.broker.transacting import as_clients_see
from tests.kit.support import offsets_and_values
from tests.simulation.model import Violation

SOURCE, TARGET, GROUP = "source", "target", "group"
PARTITIONS = 2
IMAGE = b"image of "


@dataclass(eq=False)
class Deal:
    """One transaction: what it wrote, by topic, and what became of it."""

    number: int
    values: list[tuple[str, bytes]] = field(default_factory=list)
    asked_to_commit: bool = False
    outcome: Marker | None = None
    #: It may be tried again after a try that came to nothing.
    is_repeated: bool = False

    def learn(self, outcome: Marker) -> None:
        if self.outcome not in (None, outcome):
            raise Violation(f"deal {self.number} ended as {self.outcome!r} and is {outcome!r}")
        if outcome is Marker.COMMIT and not self.asked_to_commit:
            raise Violation(f"deal {self.number} is committed, which nobody asked for")
        self.outcome = outcome


class Ledger:
    """Everything that was ever tried. A value begins with the number of its deal; 0 is of none."""

    def __init__(self) -> None:
        self.deals: list[Deal] = [Deal(0, asked_to_commit=True, outcome=Marker.COMMIT)]
        self.written = 0

    def new_deal(self, *, is_repeated: bool = False) -> Deal:
        deal = Deal(len(self.deals), is_repeated=is_repeated)
        self.deals.append(deal)
        return deal

    def value(self, deal: Deal, what: str) -> bytes:
        self.written += 1
        return b"%d|%d|%s" % (deal.number, self.written, what.encode())

    def deal_of(self, value: bytes) -> Deal:
        return self.deals[int(value.partition(b"|")[0])]

    def check_seen(self, value: bytes) -> None:
        """Somebody who reads committed records has seen a value."""
        deal = self.deal_of(value)
        if not deal.asked_to_commit:
            raise Violation(f"{value!r} is seen, and nobody has asked to commit it")
        deal.learn(Marker.COMMIT)


@dataclass
class Truth:
    """One partition, by its markers: what was committed, where, and what is open."""

    committed: list[tuple[int, bytes]] = field(default_factory=list)
    aborted: list[bytes] = field(default_factory=list)
    open: list[bytes] = field(default_factory=list)

    @classmethod
    async def of(cls, store: Store, key: PartitionKey) -> Truth:
        truth = cls()
        undecided: dict[int, list[tuple[int, bytes]]] = {}
        offsets = await store.offsets(key)
        offset = offsets.first
        while offset < offsets.next:
            [part] = await store.read([Read(key, offset, 2**20)], max_bytes=2**20)
            if part.error is not None or not part.chunks:
                raise Violation(f"{key} at {offset}: {part.error!r}")
            for chunk in part.chunks:
                for batch in batches(chunk):
                    truth._take(batch, undecided)
                    offset = batch.next_offset
        truth.open = [value for records in undecided.values() for _, value in records]
        truth.committed.sort()
        return truth

    def _take(self, batch: Batch, undecided: dict[int, list[tuple[int, bytes]]]) -> None:
        if batch.is_control:
            records = undecided.pop(batch.producer_id, [])
            if read_marker(batch) is Marker.COMMIT:
                self.committed.extend(records)
            else:
                self.aborted.extend(value for _, value in records)
            return
        part = Slice(PartitionKey(UUID(int=0), 0), (batch.view,), batch.size, 0, 0)
        records = offsets_and_values(part)
        if batch.is_transactional:
            undecided.setdefault(batch.producer_id, []).extend(records)
        else:
            self.committed.extend(records)


async def check(store: Store, ledger: Ledger) -> None:
    """When nothing is under way."""
    topics = await store.topics()
    if SOURCE not in topics or TARGET not in topics:
        return
    keys = {
        (name, number): PartitionKey(topics[name].id, number)
        for name in (SOURCE, TARGET)
        for number in range(PARTITIONS)
    }
    truths = {place: await Truth.of(store, key) for place, key in keys.items()}
    _check_deals(ledger, truths)
    below: set[bytes] = set()
    cursors = await store.cursors(GROUP)
    for read, cursor in cursors.items():
        truth = truths[SOURCE, read.partition]
        below.update(value for offset, value in truth.committed if offset < (cursor.offset or 0))
    images = [
        value.partition(IMAGE)[2]
        for number in range(PARTITIONS)
        for _, value in truths[TARGET, number].committed
        if IMAGE in value
    ]
    if len(set(images)) < len(images):
        raise Violation("a record has two images")
    if set(images) != below:
        odd = sorted(set(images) ^ below)
        raise Violation(f"images and offsets do not agree: {odd[:3]} of {len(odd)}")
    for place, key in keys.items():
        await _check_committed_reads(store, key, truths[place])


def _check_deals(ledger: Ledger, truths: dict[tuple[str, int], Truth]) -> None:
    there = [(name, value) for (name, _), truth in truths.items() for _, value in truth.committed]
    committed = set(there)
    if len(committed) < len(there):
        raise Violation(f"{len(there) - len(committed)} records are there twice")
    decided = committed | {
        (name, value) for (name, _), truth in truths.items() for value in truth.aborted
    }
    for _, value in committed:
        ledger.check_seen(value)
    for deal in ledger.deals[1:]:
        found = sum(each in committed for each in deal.values)
        if 0 < found < len(deal.values):
            raise Violation(f"deal {deal.number} is there in part")
        if deal.outcome is Marker.COMMIT and found < len(deal.values):
            raise Violation(f"deal {deal.number} was committed, and is not there")
        if not deal.is_repeated and not found and any(each in decided for each in deal.values):
            deal.learn(Marker.ABORT)


async def _check_committed_reads(store: Store, key: PartitionKey, truth: Truth) -> None:
    offsets = await store.offsets(key)
    seen: list[bytes] = []
    offset = offsets.first
    while offset < offsets.stable:
        [part] = await store.read([Read(key, offset, 3_000, committed=True)], max_bytes=3_000)
        seen.extend(as_clients_see(part))
        offset = [each for chunk in part.chunks for each in batches(chunk)][-1].next_offset
    due = [value for offset, value in truth.committed if offset < offsets.stable]
    if seen != due:
        raise Violation(f"{key}: a committed read shows {len(seen)} records, {len(due)} are due")
