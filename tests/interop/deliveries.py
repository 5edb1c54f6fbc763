"""What members of a group say happened to them, and whether that is what a group promises. Pure.

Promised is: every record is delivered to somebody, nothing below a committed offset is delivered
again, and a member gets only what it holds, in order and without gaps. Not promised: that a record
comes once. What was delivered and not committed when a partition changed hands comes again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple


class Event(NamedTuple):
    """One line of a member; see programs.py for what each kind means."""

    kind: str
    at_ms: float
    partitions: tuple[int, ...] = ()
    offset: int = -1
    value: str = ""
    total: int = -1


@dataclass
class Tenure:
    """The time for which one member holds one partition."""

    member: str
    partition: int
    began_ms: float
    offsets: list[int] = field(default_factory=list)
    committed: int = 0
    over: bool = False


def held_after(held: frozenset[int], event: Event) -> frozenset[int]:
    """The partitions that a member has, which had these before."""
    if event.kind == "assigned":
        return held | set(event.partitions)
    if event.kind == "revoked":
        return held - set(event.partitions)
    return held


def violations(members: dict[str, Sequence[Event]], published: Iterable[str]) -> list[str]:
    """All that speaks against the promises; nothing, if they were kept."""
    found: list[str] = []
    tenures: list[Tenure] = []
    delivered: set[str] = set()
    for member, events in members.items():
        delivered |= {event.value for event in events if event.kind == "record"}
        tenures += tenures_of(member, events, found)
    for partition in {tenure.partition for tenure in tenures}:
        found += doubled(tenure for tenure in tenures if tenure.partition == partition)
    found += [gap for tenure in tenures for gap in gaps(tenure)]
    missed = sorted(set(published) - delivered, key=int)
    if missed:
        found.append(f"{len(missed)} records came to nobody, the first of them {missed[:5]}")
    strange = sorted(delivered - set(published))
    if strange:
        found.append(f"records that nobody published: {strange[:5]}")
    return found


def tenures_of(member: str, events: Iterable[Event], found: list[str]) -> list[Tenure]:
    ended: list[Tenure] = []
    current: dict[int, Tenure] = {}
    for event in events:
        for partition in event.partitions:
            tenure = current.get(partition)
            if event.kind == "assigned":
                current[partition] = Tenure(member, partition, event.at_ms)
                ended.append(current[partition])
            elif tenure is None or (tenure.over and event.kind == "record"):
                found.append(f"{member} has {event} without holding the partition")
            elif event.kind == "revoked":
                tenure.over = True
            elif event.kind == "record":
                tenure.offsets.append(event.offset)
            elif event.kind == "committed":
                tenure.committed = max(tenure.committed, event.offset)
    return ended


def doubled(tenures: Iterable[Tenure]) -> list[str]:
    """What came again of one partition although an earlier holder had committed it."""
    found = []
    floor = 0
    for tenure in sorted(tenures, key=lambda tenure: tenure.began_ms):
        again = [offset for offset in tenure.offsets if offset < floor]
        if again:
            found.append(
                f"{tenure.member} got {again[:5]} of partition {tenure.partition}, "
                f"where all below {floor} was committed before"
            )
        floor = max(floor, tenure.committed)
    return found


def gaps(tenure: Tenure) -> list[str]:
    return [
        f"{tenure.member} got {after} after {before} of partition {tenure.partition}"
        for before, after in pairwise(tenure.offsets)
        if after != before + 1
    ]
