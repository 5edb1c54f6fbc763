"""The findings of an examination: values, and a function that joins adjacent ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

_Other = TypeVar("_Other")


class Kind(StrEnum):
    DAMAGE = "damage"  # written bytes that have changed
    POISON = "poison"  # a batch as its producer sent it, which cannot be decoded
    NOTE = "note"  # unusual but harmless


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding about bytes [start, end) of a file, or about the whole file."""

    kind: Kind
    path: str
    what: str
    start: int | None = None
    end: int | None = None
    #: The offsets of the partition that lie there, [first, next).
    first_offset: int | None = None
    next_offset: int | None = None

    def __str__(self) -> str:
        where = self.path
        if self.start is not None:
            where += f", bytes {self.start} to {self.end}"
        if self.first_offset is not None and self.next_offset is not None:
            where += f", offsets {self.first_offset} to {self.next_offset - 1}"
        return f"{self.kind}: {where}: {self.what}"


def join_adjacent(items: Iterable[_Other | Finding]) -> Iterator[_Other | Finding]:
    """Join findings that are adjacent and equal; pass everything else through."""
    last: Finding | None = None
    for item in items:
        if not isinstance(item, Finding):
            if last is not None:
                yield last
            last = None
            yield item
        elif last is not None and _are_adjacent(last, item):
            last = replace(last, end=item.end, next_offset=item.next_offset)
        else:
            if last is not None:
                yield last
            last = item
    if last is not None:
        yield last


def _are_adjacent(first: Finding, second: Finding) -> bool:
    """Return whether two findings say the same about adjacent bytes and offsets."""
    return (
        (first.kind, first.path, first.what) == (second.kind, second.path, second.what)
        and first.end is not None
        and first.end == second.start
        and first.next_offset == second.first_offset
    )
