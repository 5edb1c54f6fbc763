"""Check receipts: which records a subscription took, in which order, how often, and how soon.

The receipts of one subscription and partition are a chain. Each receipt says where the cursor was
and where it went (`quackmq.broker.subscriptions.receipts`). A new stretch of the chain begins where
the cursor was set on purpose. Findings within a stretch:

    doubled     offsets that two receipts report as taken
    reordered   offsets that were taken after later ones, and are not doubled; not reported if
                entries are acknowledged one by one, in any order
    lost        records that were not available, as the broker told the subscriber
    over        offsets that a step skipped: correct if they have no record
    untold      offsets that the cursor has passed, by its own value or by other receipts, and that
                no receipt mentions

The caller judges the last two: it knows which offsets have records. Two cases are not findings, for
a subscription that acknowledges entries one by one:

- Entries after the cursor may still be in delivery.
- If its first receipts were deleted, they may have mentioned all entries that were leased when the
  next receipt was written.

Latency is the time from append to receipt, both by the broker's clock. A receipt holds the append
times of entries that were in the log when it was written. Entries that were archived by then are
`untimed`: their append times come from the records themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as f

from quackmq.spark import limits
from quackmq.spark.pipelines.audit_checks.runs import Array, Covered

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: The JSON fields of a receipt.
_RECEIPT: Final = (
    "subscription STRING, topic STRING, topic_id STRING, partition INT, kind STRING, "
    "from_offset BIGINT, first_offset BIGINT, next_offset BIGINT, lost BIGINT, time_ms BIGINT, "
    "append_times ARRAY<ARRAY<BIGINT>>, lent_to BIGINT"
)
_STEPS: Final = "kind", "from_offset", "first_offset", "next_offset", "lost", "lent_to"
_WHOSE: Final = "subscription", "topic_id", "partition"
#: The findings. `taken` is no finding: it holds the number of offsets taken, and the ends of the
#: chain.
DELIVERIES: Final = (
    "subscription STRING, topic_id STRING, partition INT, kind STRING, "
    "first_offset BIGINT, next_offset BIGINT, records BIGINT"
)
#: The present cursors of subscriptions with receipts, by subscription, topic id and partition.
Cursors = Mapping[tuple[str, str, int], int]
PERCENTILES: Final = (0.5, 0.9, 0.99, 0.999)


def receipts(records: DataFrame) -> DataFrame:
    """Parse the records of the receipts' topic into columns. Records that are no receipts are left
    out."""
    said = f.from_json(f.col("value").cast("string"), _RECEIPT)
    place = f.col("partition").alias("at_partition"), f.col("offset").alias("at_offset")
    parsed = records.select(*place, said.alias("said")).select(
        "at_partition", "at_offset", "said.*"
    )
    parsed = parsed.withColumn("lent_to", f.coalesce("lent_to", f.lit(0)))
    return parsed.dropna(subset=[*_WHOSE, *_STEPS, "time_ms"])


def deliveries(receipts: DataFrame, cursors: Cursors | None = None) -> DataFrame:
    """Return the findings of each subscription and partition, and how many offsets it took
    (`taken`)."""
    known = dict(cursors or {})

    def check(key: tuple[pa.Scalar, ...], chain: pa.Table) -> pa.Table:
        whose = tuple(each.as_py() for each in key)
        rows = [
            {**dict(zip(_WHOSE, whose, strict=True)), **found._asdict()}
            for found in findings_of(chain, known.get((whose[0], whose[1], whose[2])))
        ]
        return pa.Table.from_pylist(rows, schema=_ARROW)

    wanted = receipts.select(*_WHOSE, *_STEPS, "at_partition", "at_offset")
    return wanted.groupBy(*_WHOSE).applyInArrow(check, DELIVERIES)


def latencies(receipts: DataFrame) -> DataFrame:
    """Count the offsets of each latency: columns `subscription`, `topic_id`, `latency_ms`,
    `records`."""
    steps = f.expr(
        "transform(append_times, (step, i) -> struct(time_ms - step[1] AS latency_ms, "
        "coalesce(get(append_times, i + 1)[0], next_offset) - step[0] AS records))"
    )
    taken = receipts.where(f.col("kind").isin("taken", "acked"))
    each = taken.select("subscription", "topic_id", f.explode(steps).alias("step"))
    counted = each.groupBy("subscription", "topic_id", "step.latency_ms")
    return counted.agg(f.sum("step.records").alias("records")).where("records > 0")


def untimed(receipts: DataFrame) -> DataFrame:
    """Return the ranges of offsets whose append times the receipts do not hold: columns
    `subscription`, `topic_id`, `partition`, `first_offset`, `next_offset`, and the `time_ms` of the
    receipt."""
    taken = receipts.where(f.col("kind").isin("taken", "acked"))
    end = f.expr("coalesce(get(get(append_times, 0), 0), next_offset)").alias("next_offset")
    stretches = taken.select(*_WHOSE, "first_offset", end, "time_ms")
    return stretches.where("first_offset < next_offset")


def latencies_of_records(stretches: DataFrame, records: DataFrame) -> DataFrame:
    """Count the latencies of untimed ranges of one topic, by the append times of its records; the
    columns are those of `latencies`. Offsets without a record are left out."""
    # In pieces, because Spark holds all offsets of one piece in memory.
    starts = f.expr(
        f"explode(sequence(first_offset, next_offset - 1, {limits.AUDIT_LOOKUP_OFFSETS}))"
    )
    pieces = stretches.select(*_WHOSE, "time_ms", "next_offset", starts.alias("start"))
    end = f"least(start + {limits.AUDIT_LOOKUP_OFFSETS}, next_offset) - 1"
    offsets = f.expr(f"explode(sequence(start, {end}))").alias("offset")
    wanted = pieces.select(*_WHOSE, "time_ms", offsets)
    appended = records.select("partition", "offset", f.unix_millis("append_time").alias("from_ms"))
    timed = wanted.join(appended.dropna(), ["partition", "offset"])
    latency = (f.col("time_ms") - f.col("from_ms")).alias("latency_ms")
    counted = timed.groupBy("subscription", "topic_id", latency)
    return counted.agg(f.count(f.lit(1)).alias("records"))


_ARROW: Final = pa.schema(
    [
        ("subscription", pa.string()),
        ("topic_id", pa.string()),
        ("partition", pa.int32()),
        ("kind", pa.string()),
        ("first_offset", pa.int64()),
        ("next_offset", pa.int64()),
        ("records", pa.int64()),
    ]
)


# --- one chain -----------------------------------------------------------------------------------


class Delivered(NamedTuple):
    kind: str
    first_offset: int
    next_offset: int
    records: int


class _Steps(NamedTuple):
    """The steps of one stretch in order, as columns."""

    come_from: Array
    first: Array
    next: Array
    lost: Array
    lent_to: Array
    #: `is_acked`: the entries were acknowledged one by one, or were passed without delivery.
    #: `is_passed`: only the second.
    is_acked: Any
    is_passed: Any

    def picked(self, which: Any) -> _Steps:
        return _Steps(*(column[which] for column in self))


def findings_of(chain: pa.Table, cursor: int | None) -> Iterator[Delivered]:
    """Yield the findings of all receipts of one subscription and partition. With `cursor`, which
    must be read before the receipts, also check that the receipts reach it."""
    chain = chain.sort_by([("at_partition", "ascending"), ("at_offset", "ascending")])
    kinds = chain.column("kind").to_numpy(zero_copy_only=False)
    come_from, first, following, lost, lent_to = (
        chain.column(name).to_numpy().astype(np.int64, copy=False) for name in _STEPS[1:]
    )
    is_passed = kinds == "passed"
    is_acked = (kinds == "acked") | is_passed
    steps = _Steps(come_from, first, following, lost, lent_to, is_acked, is_passed)
    is_put = (kinds == "begun") | (kinds == "moved")
    taken = int((steps.next - steps.first)[~is_put & ~is_passed].sum())
    reached = int(steps.next[-1]) if cursor is None else cursor
    yield Delivered("taken", int(steps.come_from[0]), reached, taken)
    borders = np.flatnonzero(is_put).tolist()
    starts = [(int(steps.next[at]), at + 1) for at in borders]
    if not is_put[0]:  # earlier receipts were deleted
        starts.insert(0, (max(int(steps.come_from[0]), int(steps.lent_to[0])), 0))
    ends = [*(borders if is_put[0] else [0, *borders])[1:], len(kinds)]
    for (start, begin), end in zip(starts, ends, strict=True):
        stretch = steps.picked(slice(begin, end))
        yield from _of_stretch(stretch, start, cursor if end == len(kinds) else None)


def _of_stretch(steps: _Steps, start: int, cursor: int | None) -> Iterator[Delivered]:
    """Yield the findings of one stretch. `start` is where the cursor was set."""
    for at in np.flatnonzero(steps.first > steps.come_from):
        first, end = int(steps.come_from[at]), int(steps.first[at])
        yield Delivered("over", first, end, end - first)
    for at in np.flatnonzero(steps.lost > 0):
        span = int(steps.come_from[at]), int(steps.next[at])
        yield Delivered("lost", *span, int(steps.lost[at]))
    end = start if not len(steps.next) else int(steps.next[-1])
    if not _is_straight(steps, start):
        yield from _of_crooked(steps, start, cursor)
    elif cursor is not None and end < cursor:
        yield Delivered("untold", end, cursor, cursor - end)


def _is_straight(steps: _Steps, start: int) -> bool:
    """Return whether each step begins where the one before ended: then nothing can be wrong."""
    ends = np.append([start], steps.next[:-1]) if len(steps.next) else steps.next
    return bool((steps.come_from == ends).all())


def _of_crooked(steps: _Steps, start: int, cursor: int | None) -> Iterator[Delivered]:
    covered, told = Covered(), Covered()
    for come_from, first, end, _, _, is_acked, is_passed in zip(
        *(each.tolist() for each in steps), strict=True
    ):
        told.add(min(come_from, first), end)
        if is_passed or first == end:
            continue
        highest = covered.end
        fresh = first
        for known, known_end in covered.overlaps(first, end):
            yield Delivered("doubled", known, known_end, known_end - known)
            yield from _reordered(fresh, min(known, highest), is_acked)
            fresh = known_end
        yield from _reordered(fresh, min(end, highest), is_acked)
        covered.add(first, end)
    # Entries between acknowledged ones may still be in delivery; entries before the cursor cannot.
    is_open = bool(steps.is_acked.any())
    for begin, end in told.gaps(start):
        begin = max(begin, start)
        if is_open:
            end = min(end, cursor if cursor is not None else begin)
        if begin < end:
            yield Delivered("untold", begin, end, end - begin)
    behind = max(told.end, start)
    if cursor is not None and behind < cursor:
        yield Delivered("untold", behind, cursor, cursor - behind)


def _reordered(first: int, end: int, is_acked: bool) -> Iterator[Delivered]:
    if first < end and not is_acked:
        yield Delivered("reordered", first, end, end - first)
