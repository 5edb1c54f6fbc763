"""Latency histograms of bounded size: counts in logarithmic buckets, for each slice of time.

A bucket is 5 % wide, so a percentile is within 5 % of the true one, whatever the number of entries.
Histograms of several processes are added bucket by bucket. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

#: The natural logarithm of the ratio between the bounds of a bucket.
_BASE: Final = math.log(1.05)
#: The shortest latency that is resolved.
_LEAST_NS: Final = 1_000
#: The largest number of slices of an experiment; later entries count for the last one.
SLICES: Final = 1_000


class Latencies:
    """`slices` maps slice number to bucket to number of entries."""

    __slots__ = ("slices",)

    def __init__(self) -> None:
        self.slices: dict[int, dict[int, int]] = {}

    def add(self, when: int, latency_ns: int) -> None:
        counts = self.slices.setdefault(min(when, SLICES - 1), {})
        bucket = bucket_for(latency_ns)
        counts[bucket] = counts.get(bucket, 0) + 1


def bucket_for(latency_ns: int) -> int:
    return int(math.log(max(latency_ns, _LEAST_NS) / _LEAST_NS) / _BASE)


def add_up(buckets: Iterable[Mapping[int, int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for counts in buckets:
        total.update(counts)
    return total


def percentile_ms(counts: Mapping[int, int], share: float) -> float | None:
    """Return the latency in milliseconds that `share` of the entries do not exceed, or None
    without entries. Share 1.0 is the maximum."""
    left = math.ceil(share * sum(counts.values()))
    for bucket in sorted(counts):
        left -= counts[bucket]
        if left <= 0:
            # The middle of the bucket, on the logarithmic scale.
            return math.exp((bucket + 0.5) * _BASE) * _LEAST_NS / 1e6
    return None
