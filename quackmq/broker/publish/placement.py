"""Find the partitions of a put's records, also for a repeat of a put with an idempotency key.

A `Placement` is the rule by which records are distributed over partitions: the partitioner and the
number of partitions. A topic's rule changes when the topic gets more partitions or another
partitioner. The records of a put stay where they are, so a repeat must use the rule of the first
put. The rule is stored with the records: each idempotency key has a producer id of its own, and the
epoch of this producer, which has no other use, is the number of the placement:

    epoch 0         one partition has all records, or an older version stored no placement
    epoch 1 + …     position of the partitioner in `_NUMBERED` * 10,000 + partitions - 1

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from quackmq.broker import limits
from quackmq.model.partitioning import (
    Partitioner,
    add_murmur2_words,
    begin_murmur2,
    choose_partition,
    finish_murmur2,
    partition_for_hash,
)
from quackmq.model.producer_state import Producer
from quackmq.model.topic import Topic

#: The order is durable: only append to it.
_NUMBERED: Final = (Partitioner.MURMUR2, Partitioner.CRC32, Partitioner.LEGACY)
#: Durable, too; `shared_limits.PARTITIONS_PER_TOPIC` cannot be greater.
_EPOCHS_PER_PARTITIONER: Final = 10_000
#: Hashing any key costs about as much as this many more bytes.
_KEY_BYTES: Final = 32
#: The epoch of a put without a stored placement: all its records are in one partition, or a version
#: before 0.1.0 stored them.
NO_PLACEMENT: Final = 0


class Placement(NamedTuple):
    partitioner: Partitioner
    partitions: int

    @property
    def epoch(self) -> int:
        number = _NUMBERED.index(self.partitioner)
        return 1 + number * _EPOCHS_PER_PARTITIONER + self.partitions - 1


def current_placement(topic: Topic) -> Placement:
    """Return the rule for new records of a topic."""
    return Placement(topic.policy.partitioner, topic.partitions)


def is_short_key(key: bytes | None) -> bool:
    """Return whether a key can be hashed in one step, without delaying other requests."""
    return key is None or len(key) <= limits.HASHED_KEY_BYTES


async def choose_partitions(
    placement: Placement, keys: Iterable[bytes | None], any_partition: int
) -> list[int]:
    """Return the partition of each key; `any_partition` for keys that may go to any.

    Hash long keys, and many keys, in several steps, so that other requests are not delayed.
    """
    partitioner, partitions = placement
    chosen: list[int] = []
    cost = 0
    for key in keys:
        if partitioner is Partitioner.MURMUR2 and key is not None and not is_short_key(key):
            chosen.append(partition_for_hash(await _hash_in_steps(key), partitions))
            continue
        partition = choose_partition(partitioner, key, partitions)
        chosen.append(any_partition if partition is None else partition)
        cost += _KEY_BYTES + len(key or b"")
        if cost > limits.HASHED_KEY_BYTES:
            await asyncio.sleep(0)
            cost = 0
    return chosen


async def find_stored_placement(
    producers: Mapping[int, Producer],
    keys: Sequence[bytes | None],
    idempotency_key: bytes,
    topic: Topic,
) -> tuple[list[int], int] | None:
    """Return the partition of each record of a repeated put, and the epoch of the first put.
    `producers` are the states of the idempotency key's producer, by partition. Return None if the
    stored records cannot be those of this put."""
    counts = {partition: _count_records(state) for partition, state in producers.items()}
    epochs = {state.epoch for state in producers.values()}
    if sum(counts.values()) != len(keys) or len(epochs) > 1:
        return None
    (epoch,) = epochs
    if len(counts) == 1:
        (only,) = counts
        return [only] * len(keys), epoch
    for placement in _list_candidate_placements(epoch, topic):
        any_partition = partition_for_any(placement, idempotency_key)
        partitions = await choose_partitions(placement, keys, any_partition)
        if Counter(partitions) == counts:
            return partitions, epoch
    return None


def partition_for_any(placement: Placement, idempotency_key: bytes) -> int:
    """Return the partition for those records of a put that may go to any partition."""
    return choose_partition(placement.partitioner, idempotency_key, placement.partitions) or 0


def _list_candidate_placements(epoch: int, topic: Topic) -> Iterator[Placement]:
    """Yield the rules that may have distributed the records of a put with this epoch."""
    if epoch == NO_PLACEMENT:
        # An older version stored no placement: the topic had as many partitions as now, or fewer.
        for partitions in range(topic.partitions, 0, -1):
            yield Placement(Partitioner.LEGACY, partitions)
        return
    number, partitions = divmod(epoch - 1, _EPOCHS_PER_PARTITIONER)
    if number < len(_NUMBERED):
        yield Placement(_NUMBERED[number], partitions + 1)


def _count_records(state: Producer) -> int:
    """Return how many records an idempotency key's producer has put into a partition."""
    return sum(batch.next_offset - batch.base_offset for batch in state.batches)


async def _hash_in_steps(key: bytes) -> int:
    """Hash a long key; yield to other tasks after each step."""
    state = begin_murmur2(key)
    for start in range(0, len(key), limits.HASHED_KEY_BYTES):
        end = min(start + limits.HASHED_KEY_BYTES, len(key))
        state = add_murmur2_words(state, key, start, end)
        await asyncio.sleep(0)
    return finish_murmur2(state, key)
