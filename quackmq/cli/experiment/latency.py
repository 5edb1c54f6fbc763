"""How long entries took, kept small: counts by logarithmic buckets, for each slice of time.

A bucket is 5 % wide, so a percentile is within 5 % of the true one, however many entries there
were, and what many processes saw is added up bucket by bucket. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

_BASE: Final = math.log(1.05)
#: What takes less is not told apart from it.
_LEAST_NS: Final = 1_000
#: An experiment has so many slices at the most; what comes later counts to the last one.
SLICES: Final = 1_000


class Latencies:
    """`slices` says how many entries of each slice of time took how long, by bucket."""

    __slots__ = ("slices",)

    def __init__(self) -> None:
        self.slices: dict[int, dict[int, int]] = {}

    def add(self, when: int, latency_ns: int) -> None:
        counts = self.slices.setdefault(min(when, SLICES - 1), {})
        bucket = bucket_of(latency_ns)
        counts[bucket] = counts.get(bucket, 0) + 1


def bucket_of(latency_ns: int) -> int:
    return int(math.log(max(latency_ns, _LEAST_NS) / _LEAST_NS) / _BASE)


def together(buckets: Iterable[Mapping[int, int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for counts in buckets:
        total.update(counts)
    return total


def percentile_ms(counts: Mapping[int, int], share: float) -> float | None:
    """The latency that `share` of the entries do not exceed, in milliseconds; None of no entries.
    1.0 is the longest."""
    left = math.ceil(share * sum(counts.values()))
    for bucket in sorted(counts):
        left -= counts[bucket]
        if left <= 0:
            return math.exp((bucket + 0.5) * _BASE) * _LEAST_NS / 1e6
    return None
