"""Derive ranges of offsets, partitions and times from the filters of a query, to skip the rest.

Spark still applies all filters; here ranges only become smaller. A lower bound on timestamps
determines where to start: at the first record with such a time. An upper bound cannot determine the
end, because producers set timestamps freely, but archived files without a matching timestamp are
skipped. Pure.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a query; None means no bound. `first` and `next` are offsets, [first, next)."""

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    first: int | None = None
    next: int | None = None
    least_ms: int | None = None
    greatest_ms: int | None = None

    def has(self, topic: str, partition: int) -> bool:
        return (self.topics is None or topic in self.topics) and (
            self.partitions is None or partition in self.partitions
        )

    def may_hold(self, least_ms: int | None, greatest_ms: int | None) -> bool:
        """Return whether data with timestamps in this range may contain a wanted one."""
        if least_ms is None or greatest_ms is None:
            return True
        return not (
            (self.least_ms is not None and greatest_ms < self.least_ms)
            or (self.greatest_ms is not None and least_ms > self.greatest_ms)
        )


def bounds_of(filters: Iterable[Filter]) -> Bounds:
    bounds = Bounds()
    for each in filters:
        attribute = getattr(each, "attribute", None)
        narrow = _COLUMNS.get(attribute[0]) if attribute and len(attribute) == 1 else None
        if narrow is not None and type(each) in _KINDS:
            bounds = narrow(bounds, each)
    return bounds


_EQUAL: Final = (EqualTo, EqualNullSafe)
_KINDS: Final = (*_EQUAL, In, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)


def _values(each: Any) -> frozenset[Any] | None:
    """Return the values that the filter accepts; None if it is not such a filter."""
    if isinstance(each, In):
        return frozenset(value for value in each.value if value is not None)
    return frozenset({each.value}) if isinstance(each, _EQUAL) and each.value is not None else None


def _topics(bounds: Bounds, each: Any) -> Bounds:
    values = _values(each)
    return bounds if values is None else replace(bounds, topics=_both(bounds.topics, values))


def _partitions(bounds: Bounds, each: Any) -> Bounds:
    values = _values(each)
    return (
        bounds if values is None else replace(bounds, partitions=_both(bounds.partitions, values))
    )


def _offsets(bounds: Bounds, each: Any) -> Bounds:
    least, most = _ends(each, lambda value: value if type(value) is int else None)
    return replace(
        bounds,
        first=_later(bounds.first, least),
        next=_earlier(bounds.next, None if most is None else most + 1),
    )


def _timestamps(bounds: Bounds, each: Any) -> Bounds:
    least, most = _ends(each, _milliseconds, whole=False)
    return replace(
        bounds,
        least_ms=_later(bounds.least_ms, least),
        greatest_ms=_earlier(bounds.greatest_ms, most),
    )


_COLUMNS: Final[Mapping[str, Callable[[Bounds, Any], Bounds]]] = {
    "topic": _topics,
    "partition": _partitions,
    "offset": _offsets,
    "timestamp": _timestamps,
}


def _ends(
    each: Any, number: Callable[[Any], int | None], whole: bool = True
) -> tuple[int | None, int | None]:
    """Return the smallest and the largest accepted value, both inclusive; fractions are rounded
    so that no value is lost."""
    values = _values(each)
    if values is not None:
        numbers = [number(value) for value in values]
        if not numbers or any(value is None for value in numbers):
            return None, None
        return min(n for n in numbers if n is not None), max(n for n in numbers if n is not None)
    value = number(each.value)
    if value is None:
        return None, None
    if isinstance(each, GreaterThan):
        return value + (1 if whole else 0), None
    if isinstance(each, GreaterThanOrEqual):
        return value, None
    if isinstance(each, LessThan):
        return None, value - (1 if whole else 0)
    return None, value


def _milliseconds(value: Any) -> int | None:
    """Return whole milliseconds, rounded down."""
    if not isinstance(value, datetime.datetime):
        return None
    since = value.astimezone(datetime.UTC) - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return since // datetime.timedelta(milliseconds=1)


def _both(one: frozenset[Any] | None, other: frozenset[Any]) -> frozenset[Any]:
    return other if one is None else one & other


def _later(one: int | None, other: int | None) -> int | None:
    return max((each for each in (one, other) if each is not None), default=None)


def _earlier(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)
