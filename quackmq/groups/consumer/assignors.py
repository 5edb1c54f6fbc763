"""Assigns the partitions of a group to its members, in the broker (KIP-848). Pure.

Topics that are read by the same members form a pool; if all subscriptions are equal there is one
pool. An assignor is a function of the pools and of the previous assignment. Clients name it:

- uniform: shares are as even as the subscriptions allow, and as many partitions as possible stay
  where they were. With one pool, sizes differ by one at most, and no partition moves without need.
- range: each member gets a contiguous range of each topic, in the order of the members. So the
  same partition number of topics of equal size has the same reader. The previous assignment does
  not matter.

Promised by both: each partition of a pool has exactly one reader, a member of that pool.
"""

from __future__ import annotations

import heapq
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from quackmq.groups import limits
from quackmq.model.topic import PartitionKey

#: The partitions of each member. A member without partitions may be missing.
Assignment = Mapping[str, Collection[PartitionKey]]


class Pool(NamedTuple):
    """Members that read the same topics, at least one, in a fixed order; and those topics, with
    their numbers of partitions."""

    members: Sequence[str]
    topics: Mapping[uuid.UUID, int]


def uniform(pools: Iterable[Pool], previous: Assignment) -> dict[str, list[PartitionKey]]:
    """Return an even assignment that moves as few partitions as possible."""
    # Pools with the fewest members come first: their partitions have the least choice.
    assignments = sorted(map(_PoolAssignment, pools), key=lambda each: len(each.pool.members))
    loads = _keep_previous(assignments, previous)
    for assignment in assignments:
        assignment.assign_free(loads)
    for _ in range(limits.ASSIGNMENT_PASSES):
        # A list, because every pool has to be balanced, even after one has changed.
        if not any([assignment.balance(loads) for assignment in assignments]):  # noqa: C419
            break
    result: dict[str, list[PartitionKey]] = {}
    for assignment in assignments:
        for member, keys in assignment.partitions_by_member.items():
            result.setdefault(member, []).extend(keys)
    return result


def by_range(pools: Iterable[Pool], previous: Assignment) -> dict[str, list[PartitionKey]]:
    """Return contiguous ranges of each topic. `previous` is unused: all assignors take it."""
    result: dict[str, list[PartitionKey]] = {}
    for members, topics in pools:
        for topic_id, partitions in topics.items():
            range_size, longer_ranges = divmod(partitions, len(members))
            start = 0
            for number, member in enumerate(members):
                end = start + range_size + (number < longer_ranges)
                keys = (PartitionKey(topic_id, partition) for partition in range(start, end))
                result.setdefault(member, []).extend(keys)
                start = end
    return result


#: The assignors by name. The first is the default, if the members name none.
ASSIGNORS: Final[
    Mapping[str, Callable[[Iterable[Pool], Assignment], dict[str, list[PartitionKey]]]]
] = {"uniform": uniform, "range": by_range}
DEFAULT_ASSIGNOR: Final = next(iter(ASSIGNORS))


@dataclass(slots=True, eq=False)
class _PoolAssignment:
    """A pool while its partitions are assigned: each member's partitions, and the free ones."""

    pool: Pool
    partitions_by_member: dict[str, list[PartitionKey]] = field(init=False)
    free: list[PartitionKey] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.partitions_by_member = {member: [] for member in self.pool.members}

    def all_partitions(self) -> Iterator[PartitionKey]:
        for topic_id, partitions in self.pool.topics.items():
            for partition in range(partitions):
                yield PartitionKey(topic_id, partition)

    def assign_free(self, loads: Counter[str]) -> None:
        """Give each free partition to the member with the lowest load."""
        least_loaded = _LeastLoaded(self.pool.members, loads)
        for key in self.free:
            member = least_loaded.pop()
            self.partitions_by_member[member].append(key)
            loads[member] += 1
            least_loaded.push(member)
        self.free.clear()

    def balance(self, loads: Counter[str]) -> bool:
        """Move partitions from the member with the highest load to that with the lowest, while this
        makes their loads more even. Return whether any was moved."""
        least_loaded = _LeastLoaded(self.pool.members, loads)
        most_loaded = [
            (-loads[member], member) for member, keys in self.partitions_by_member.items() if keys
        ]
        heapq.heapify(most_loaded)
        has_moved = False
        while most_loaded:
            _, giver = heapq.heappop(most_loaded)
            receiver = least_loaded.pop()
            if loads[giver] - loads[receiver] < 2:
                break
            self.partitions_by_member[receiver].append(self.partitions_by_member[giver].pop())
            loads[giver] -= 1
            loads[receiver] += 1
            has_moved = True
            # The order stays valid: the giver still has more than the receiver.
            least_loaded.push(receiver)
            if self.partitions_by_member[giver]:
                heapq.heappush(most_loaded, (-loads[giver], giver))
        return has_moved


class _LeastLoaded:
    """Members by load, lowest first. Stale entries are corrected when they are reached."""

    def __init__(self, members: Iterable[str], loads: Counter[str]) -> None:
        self._loads = loads
        self._heap = [(loads[member], number, member) for number, member in enumerate(members)]
        self._numbers = {member: number for _, number, member in self._heap}
        heapq.heapify(self._heap)

    def pop(self) -> str:
        """Remove and return the member with the lowest load."""
        while True:
            load, _, member = heapq.heappop(self._heap)
            if load == self._loads[member]:
                return member
            self.push(member)

    def push(self, member: str) -> None:
        heapq.heappush(self._heap, (self._loads[member], self._numbers[member], member))


def _keep_previous(assignments: Sequence[_PoolAssignment], previous: Assignment) -> Counter[str]:
    """Let each member keep the partitions that it had and may still read; return the loads."""
    owners = {key: member for member, keys in previous.items() for key in keys}
    loads: Counter[str] = Counter()
    for assignment in assignments:
        for key in assignment.all_partitions():
            owner = owners.get(key)
            owned = None if owner is None else assignment.partitions_by_member.get(owner)
            if owner is None or owned is None:
                assignment.free.append(key)
            else:
                owned.append(key)
                loads[owner] += 1
    return loads
