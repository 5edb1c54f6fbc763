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

#: The partitions of each member. Members without partitions may be left out.
Shares = Mapping[str, Collection[PartitionKey]]


class Pool(NamedTuple):
    """Members that read the same topics, at least one, in a fixed order; and those topics, with
    their numbers of partitions."""

    members: Sequence[str]
    topics: Mapping[uuid.UUID, int]


def uniform(pools: Iterable[Pool], before: Shares) -> dict[str, list[PartitionKey]]:
    # Members with the least choice come first.
    pots = sorted(map(_Pot, pools), key=lambda pot: len(pot.members))
    loads = _keep(pots, before)
    for pot in pots:
        pot.give(loads)
    for _ in range(limits.ASSIGNMENT_PASSES):
        # A list, because every pot has to be levelled, also after the first that has changed.
        if not any([pot.level(loads) for pot in pots]):  # noqa: C419
            break
    shares: dict[str, list[PartitionKey]] = {}
    for pot in pots:
        for member, held in pot.held.items():
            shares.setdefault(member, []).extend(held)
    return shares


def by_range(pools: Iterable[Pool], before: Shares) -> dict[str, list[PartitionKey]]:
    shares: dict[str, list[PartitionKey]] = {}
    for members, topics in pools:
        for topic_id, partitions in topics.items():
            size, longer = divmod(partitions, len(members))
            first = 0
            for number, member in enumerate(members):
                behind = first + size + (number < longer)
                keys = (PartitionKey(topic_id, partition) for partition in range(first, behind))
                shares.setdefault(member, []).extend(keys)
                first = behind
    return shares


#: The assignors by name. The first is the default, if the members name none.
ASSIGNORS: Final[
    Mapping[str, Callable[[Iterable[Pool], Shares], dict[str, list[PartitionKey]]]]
] = {"uniform": uniform, "range": by_range}
DEFAULT_ASSIGNOR: Final = next(iter(ASSIGNORS))


@dataclass(slots=True, eq=False)
class _Pot:
    """A pool while its partitions are assigned: each member's partitions, and the free ones."""

    pool: Pool
    held: dict[str, list[PartitionKey]] = field(init=False)
    free: list[PartitionKey] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.held = {member: [] for member in self.pool.members}

    @property
    def members(self) -> Sequence[str]:
        return self.pool.members

    def keys(self) -> Iterator[PartitionKey]:
        for topic_id, partitions in self.pool.topics.items():
            for partition in range(partitions):
                yield PartitionKey(topic_id, partition)

    def give(self, loads: Counter[str]) -> None:
        """Give each free partition to the member with the lowest load."""
        poor = _Poorest(self.members, loads)
        for key in self.free:
            member = poor.pop()
            self.held[member].append(key)
            loads[member] += 1
            poor.push(member)
        self.free.clear()

    def level(self, loads: Counter[str]) -> bool:
        """Move partitions from the member with the highest load to that with the lowest, while this
        makes their loads more even. Return whether any was moved."""
        poor = _Poorest(self.members, loads)
        rich = [(-loads[member], member) for member, held in self.held.items() if held]
        heapq.heapify(rich)
        has_moved = False
        while rich:
            _, richest = heapq.heappop(rich)
            poorest = poor.pop()
            if loads[richest] - loads[poorest] < 2:
                break
            self.held[poorest].append(self.held[richest].pop())
            loads[richest] -= 1
            loads[poorest] += 1
            has_moved = True
            # The order stays valid: the giver still has more than the receiver.
            poor.push(poorest)
            if self.held[richest]:
                heapq.heappush(rich, (-loads[richest], richest))
        return has_moved


class _Poorest:
    """Members by load, lowest first. Stale entries are corrected when they are reached."""

    def __init__(self, members: Iterable[str], loads: Counter[str]) -> None:
        self._loads = loads
        self._heap = [(loads[member], number, member) for number, member in enumerate(members)]
        self._numbers = {member: number for _, number, member in self._heap}
        heapq.heapify(self._heap)

    def pop(self) -> str:
        while True:
            load, _, member = heapq.heappop(self._heap)
            if load == self._loads[member]:
                return member
            self.push(member)

    def push(self, member: str) -> None:
        heapq.heappush(self._heap, (self._loads[member], self._numbers[member], member))


def _keep(pots: Sequence[_Pot], before: Shares) -> Counter[str]:
    """Let each member keep the partitions that it had and may still read; return the loads."""
    owners = {key: member for member, share in before.items() for key in share}
    loads: Counter[str] = Counter()
    for pot in pots:
        for key in pot.keys():  # noqa: SIM118 - a pot is no dict
            owner = owners.get(key)
            held = None if owner is None else pot.held.get(owner)
            if owner is None or held is None:
                pot.free.append(key)
            else:
                held.append(key)
                loads[owner] += 1
    return loads
