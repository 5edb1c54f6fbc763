"""Where an epoch ended, by the batches' own stamps; over a store of a model, and a real one."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quackmq.broker.log.epoch_lookup import EpochEnd, find_epoch_end
from quackmq.errors import BrokerClosing, DamagedData, OffsetOutOfRange, UnknownPartition
from quackmq.model.topic import Append, Offsets, PartitionKey, Read, Slice
from quackmq.records.batch import stamp
from quackmq.stores import limits as stores_limits
from quackmq.stores.contract import Store
from quackmq.stores.local import LocalOptions, LocalStore
from quackmq.stores.local.options import SyncMode
from quackmq.stores.memory import MemoryStore
from tests.broker.support import CALLER, TOPIC, key_of, open_broker, publish
from tests.kit.support import batch_of
from tests.stores.local.directories import QuickDisk, fill, leave_crashed

KEY = PartitionKey(uuid.UUID(int=1), 0)


class Piece(NamedTuple):
    """Some offsets of one epoch: a batch of them, nothing at all, or what is damaged."""

    epoch: int
    kind: str
    records: int


class ModelStore(MemoryStore):
    """One partition, made of pieces; it counts the reads."""

    def __init__(self, pieces: Sequence[Piece], epoch: int, first: int = 0) -> None:
        super().__init__()
        self.reads = 0
        self.epoch = epoch
        self.pieces: list[tuple[int, int, Piece]] = []
        self.next = 0
        for piece in pieces:
            self.pieces.append((self.next, self.next + piece.records, piece))
            self.next += piece.records
        self.first = min(first, self.next)

    async def offsets(self, key: PartitionKey) -> Offsets:
        return Offsets(self.first, self.next, 0, self.epoch)

    async def read(
        self, reads: Sequence[Read], *, max_bytes: int, min_bytes: int = 1, wait_ms: int = 0
    ) -> list[Slice]:
        self.reads += 1
        (read,) = reads
        chunk = self._chunk(read.offset)
        error = chunk if isinstance(chunk, Exception) else None
        chunks = (chunk,) if isinstance(chunk, bytearray) else ()
        return [Slice(read.key, chunks, sum(map(len, chunks)), self.first, self.next, error)]

    def _chunk(self, offset: int) -> bytearray | Exception | None:
        if not self.first <= offset <= self.next:
            return OffsetOutOfRange("…")
        for base, end, piece in self.pieces:
            if end <= offset or piece.kind == "gap":
                continue
            if piece.kind == "damage":
                return DamagedData("…", end)
            data = bytearray(batch_of(*[b"a"] * piece.records).view)
            stamp(data, 0, base, piece.epoch)
            return data
        return None

    def expected(self, epoch: int) -> EpochEnd:
        """The end of an epoch before the present one, the slow way."""
        batches = [
            (base, end, piece.epoch)
            for base, end, piece in self.pieces
            if piece.kind == "batch" and end > self.first
        ]
        up_to = [each for _, _, each in batches if each <= epoch]
        later = [base for base, _, each in batches if each > epoch]
        end = max(later[0], self.first) if later else self.next
        return EpochEnd(up_to[-1] if up_to else epoch, end)


pieces = st.lists(
    st.builds(
        Piece,
        st.integers(0, 5),
        st.sampled_from(["batch", "batch", "gap", "damage"]),
        st.integers(1, 4),
    ),
    max_size=12,
).map(lambda pieces: sorted(pieces, key=lambda piece: piece.epoch))


@settings(deadline=None)
@given(pieces, st.integers(0, 30))
def test_the_end_of_every_epoch_is_found(pieces: list[Piece], first: int) -> None:
    store = ModelStore(pieces, epoch=6, first=first)

    async def ends() -> list[EpochEnd | None]:
        return [await find_epoch_end(store, KEY, epoch) for epoch in range(6)]

    assert asyncio.run(ends()) == [store.expected(epoch) for epoch in range(6)]


async def test_the_present_epoch_ends_at_the_end_and_no_later_one_has_begun() -> None:
    store = ModelStore([Piece(3, "batch", 5)], epoch=4)
    assert await find_epoch_end(store, KEY, 4) == EpochEnd(4, 5)
    assert await find_epoch_end(store, KEY, 5) is None
    assert await find_epoch_end(store, KEY, -1) is None
    assert store.reads == 0


async def test_an_epoch_that_ended_a_short_while_ago_is_found_in_a_few_reads() -> None:
    long_ago = [Piece(1, "batch", 10)] * 1_000
    assert (store := ModelStore([*long_ago], epoch=2)).next == 10_000
    assert await find_epoch_end(store, KEY, 1) == EpochEnd(1, 10_000)
    assert store.reads == 1
    store = ModelStore([*long_ago, *[Piece(2, "batch", 1)] * 8], epoch=2)
    assert await find_epoch_end(store, KEY, 1) == EpochEnd(1, 10_000)
    assert store.reads < 8


@pytest.mark.parametrize("sync", ["always", "os"])
async def test_no_reader_is_ever_beyond_the_end_of_its_epoch(
    tmp_path: Path, sync: SyncMode
) -> None:
    """Nor after a power cut, which with a weak sync mode leaves a gap of offsets."""
    key, read_up_to = KEY, {}
    for run in range(4):
        store = await _after_a_power_cut(tmp_path, run, sync)
        key = await fill(store, 0) if run == 0 else key
        for _ in range(run):  # nothing at all in the first one
            await store.append([Append(key, batch_of(b"a", b"b"))])
        offsets = await store.offsets(key)
        read_up_to[offsets.epoch] = offsets.next
        leave_crashed(tmp_path / str(run), tmp_path / str(run + 1))
        await store.close()
    store = await _after_a_power_cut(tmp_path, 4, sync)
    first_epoch = min(read_up_to)
    present = await store.offsets(key)
    assert present.epoch == first_epoch + 4
    for epoch, end in read_up_to.items():
        found = await find_epoch_end(store, key, epoch)
        assert found is not None
        assert found.epoch == epoch
        assert found.offset == end + (stores_limits.UNSYNCED_OFFSETS if sync == "os" else 0)
    await store.close()


async def _after_a_power_cut(directory: Path, run: int, sync: SyncMode) -> Store:
    class Booted(QuickDisk):
        def boot_id(self) -> str:
            return f"boot {run}"

    (directory / str(run)).mkdir(exist_ok=True)
    options = LocalOptions(sync=sync)
    return await LocalStore.open_on(Booted(directory / str(run)), options=options)


async def test_the_broker_knows_it_of_partitions_that_are_there() -> None:
    async with open_broker() as broker:
        key = key_of(await broker.create_topic(CALLER, TOPIC))
        await publish(broker, b"a", b"b")
        assert await broker.epoch_end(CALLER, key, 0) == EpochEnd(0, 2)
        with pytest.raises(UnknownPartition):
            await broker.epoch_end(CALLER, key._replace(partition=1), 0)
    with pytest.raises(BrokerClosing):
        await broker.epoch_end(CALLER, key, 0)
