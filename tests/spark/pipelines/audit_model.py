"""An audit done the slow way: record by record, in plain Python, with sets. The judge of the fast
one. And histories that are whole, and the ways to spoil them."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import pyarrow as pa

TOPIC = "ducks"
#: (kind, partition, producer, epoch, number or offset): one for each record that is concerned.
Fact = tuple[str, int, int, int, int]
COLUMNS = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("producer_id", pa.int64()),
        ("producer_epoch", pa.int16()),
        ("sequence", pa.int32()),
    ]
)


class Row(NamedTuple):
    partition: int
    offset: int
    producer_id: int | None = None
    producer_epoch: int | None = None
    sequence: int | None = None


def history(chance: random.Random, partitions: int = 2, batches: int = 40) -> list[Row]:
    """What well-behaved producers leave: some with numbers, some without, of several epochs."""
    rows: list[Row] = []
    for partition in range(partitions):
        offset = 0
        numbers: dict[tuple[int, int], int] = defaultdict(int)
        epochs: dict[int, int] = defaultdict(int)
        for _ in range(batches):
            producer = chance.choice([None, 7, 8, 9])
            if producer is not None and chance.random() < 0.05:
                epochs[producer] += 1
            for _ in range(chance.choice([1, 2, 5, 12])):
                if producer is None:
                    rows.append(Row(partition, offset))
                else:
                    whose = (producer, epochs[producer])
                    rows.append(Row(partition, offset, *whose, numbers[whose]))
                    numbers[whose] += 1
                offset += 1
    return rows


def lose(chance: random.Random, rows: list[Row]) -> None:
    del rows[chance.randrange(len(rows))]


def double(chance: random.Random, rows: list[Row]) -> None:
    """Once more at the end of its partition."""
    row = chance.choice([row for row in rows if row.sequence is not None])
    end = max(each.offset for each in rows if each.partition == row.partition) + 1
    at = max(i for i, each in enumerate(rows) if each.partition == row.partition) + 1
    rows.insert(at, row._replace(offset=end))


def double_offset(chance: random.Random, rows: list[Row]) -> None:
    """The very same record in two files."""
    at = chance.randrange(len(rows))
    rows.insert(at, rows[at])


def swap(chance: random.Random, rows: list[Row]) -> None:
    """Two records of a producer have each other's place."""
    one = chance.choice([i for i, row in enumerate(rows) if row.sequence is not None])
    whose = rows[one][2:4]
    others = [
        i
        for i, row in enumerate(rows)
        if row[2:4] == whose and row.partition == rows[one].partition and i != one
    ]
    if not others:
        return
    other = chance.choice(others)
    first, second = rows[one], rows[other]
    rows[one] = first._replace(sequence=second.sequence)
    rows[other] = second._replace(sequence=first.sequence)


def judged(rows: Iterable[Row], *, is_whole: bool = False) -> set[Fact]:
    """What is wrong, each record by itself. An offset's facts have -1 for the producer."""
    facts: set[Fact] = set()
    offsets: dict[int, set[int]] = defaultdict(set)
    numbers: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row.partition, row.offset)):
        if row.offset in offsets[row.partition]:
            facts.add(("doubled", row.partition, -1, -1, row.offset))
        offsets[row.partition].add(row.offset)
        if row.producer_id is None or row.producer_epoch is None or row.sequence is None:
            continue
        whose = (row.partition, row.producer_id, row.producer_epoch)
        before = numbers[whose]
        if row.sequence in before:
            facts.add(("doubled", *whose, row.sequence))
        elif before and row.sequence < max(before):
            facts.add(("reordered", *whose, row.sequence))
        before.append(row.sequence)
    for partition, there in offsets.items():
        for offset in set(range(min(there), max(there))) - there:
            facts.add(("hole", partition, -1, -1, offset))
    for whose, seen in numbers.items():
        start = 0 if is_whole else min(seen)
        for number in set(range(start, max(seen))) - set(seen):
            facts.add(("lost", *whose, number))
    return facts


def told(findings: Iterable[dict[str, Any]]) -> set[Fact]:
    """The findings of the fast audit, record by record."""
    facts: set[Fact] = set()
    for each in findings:
        if each["kind"] == "seen":
            continue
        is_offset = each["producer_id"] is None
        first = each["first_offset"] if is_offset else each["first_sequence"]
        whose = (-1, -1) if is_offset else (each["producer_id"], each["producer_epoch"])
        for number in range(first, first + each["records"]):
            facts.add((each["kind"], each["partition"], *whose, number))
    return facts


def arrow(rows: Iterable[Row], topic: str = TOPIC) -> pa.Table:
    return pa.Table.from_pylist([{"topic": topic, **row._asdict()} for row in rows], schema=COLUMNS)
