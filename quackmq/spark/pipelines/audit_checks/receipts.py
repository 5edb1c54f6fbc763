"""Check receipts: which records a subscription received, in which order, how often, and how soon.

The receipts of one subscription and partition are a chain. Each receipt is a step of the cursor:
it has the offsets before and after (`quackmq.broker.subscriptions.receipts`). A new stretch of the
chain starts where a user set the cursor. Findings within a stretch:

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
from quackmq.spark.pipelines.audit_checks.runs import Array, NumberSet

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: The JSON fields of a receipt.
_RECEIPT: Final = (
    "subscription STRING, topic STRING, topic_id STRING, partition INT, kind STRING, "
    "from_offset BIGINT, first_offset BIGINT, next_offset BIGINT, lost BIGINT, time_ms BIGINT, "
    "append_times ARRAY<ARRAY<BIGINT>>, lent_to BIGINT"
)
_STEP_COLUMNS: Final = "kind", "from_offset", "first_offset", "next_offset", "lost", "lent_to"
_CHAIN_KEY: Final = "subscription", "topic_id", "partition"
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
    """Parse the records of the receipts' topic into columns. Drop records that are no receipts."""
    fields = f.from_json(f.col("value").cast("string"), _RECEIPT)
    record_position = f.col("partition").alias("at_partition"), f.col("offset").alias("at_offset")
    parsed = records.select(*record_position, fields.alias("said")).select(
        "at_partition", "at_offset", "said.*"
    )
    # Only receipts of push subscriptions have `lent_to`: earlier receipts may cover the offsets
    # before it. 0 means that there are no such offsets.
    parsed = parsed.withColumn("lent_to", f.coalesce("lent_to", f.lit(0)))
    return parsed.dropna(subset=[*_CHAIN_KEY, *_STEP_COLUMNS, "time_ms"])


def deliveries(receipts: DataFrame, cursors: Cursors | None = None) -> DataFrame:
    """Return the findings of each subscription and partition, and how many offsets it received
    (`taken`)."""
    cursor_by_chain = dict(cursors or {})

    def check(key: tuple[pa.Scalar, ...], chain: pa.Table) -> pa.Table:
        """Check the receipts of one subscription and partition, in a task of Spark."""
        chain_key = tuple(part.as_py() for part in key)
        rows = [
            {**dict(zip(_CHAIN_KEY, chain_key, strict=True)), **finding._asdict()}
            for finding in check_chain(chain, cursor_by_chain.get(chain_key))
        ]
        return pa.Table.from_pylist(rows, schema=_ARROW_SCHEMA)

    steps = receipts.select(*_CHAIN_KEY, *_STEP_COLUMNS, "at_partition", "at_offset")
    return steps.groupBy(*_CHAIN_KEY).applyInArrow(check, DELIVERIES)


def latencies(receipts: DataFrame) -> DataFrame:
    """Count the offsets of each latency: columns `subscription`, `topic_id`, `latency_ms`,
    `records`."""
    steps = f.expr(
        "transform(append_times, (step, i) -> struct(time_ms - step[1] AS latency_ms, "
        "coalesce(get(append_times, i + 1)[0], next_offset) - step[0] AS records))"
    )
    delivered = receipts.where(f.col("kind").isin("taken", "acked"))
    timed_steps = delivered.select("subscription", "topic_id", f.explode(steps).alias("step"))
    counted = timed_steps.groupBy("subscription", "topic_id", "step.latency_ms")
    return counted.agg(f.sum("step.records").alias("records")).where("records > 0")


def find_untimed(receipts: DataFrame) -> DataFrame:
    """Return the ranges of offsets whose append times the receipts do not hold: columns
    `subscription`, `topic_id`, `partition`, `first_offset`, `next_offset`, and the `time_ms` of the
    receipt."""
    delivered = receipts.where(f.col("kind").isin("taken", "acked"))
    end = f.expr("coalesce(get(get(append_times, 0), 0), next_offset)").alias("next_offset")
    ranges = delivered.select(*_CHAIN_KEY, "first_offset", end, "time_ms")
    return ranges.where("first_offset < next_offset")


def latencies_from_records(untimed_ranges: DataFrame, records: DataFrame) -> DataFrame:
    """Count the latencies of untimed ranges of one topic, by the append times of its records; the
    columns are those of `latencies`. Offsets without a record are left out."""
    # Cut the ranges into pieces, because Spark holds all offsets of one piece in memory.
    starts = f.expr(
        f"explode(sequence(first_offset, next_offset - 1, {limits.AUDIT_LOOKUP_OFFSETS}))"
    )
    pieces = untimed_ranges.select(*_CHAIN_KEY, "time_ms", "next_offset", starts.alias("start"))
    end = f"least(start + {limits.AUDIT_LOOKUP_OFFSETS}, next_offset) - 1"
    offsets = f.expr(f"explode(sequence(start, {end}))").alias("offset")
    untimed_offsets = pieces.select(*_CHAIN_KEY, "time_ms", offsets)
    append_times = records.select(
        "partition", "offset", f.unix_millis("append_time").alias("from_ms")
    )
    joined = untimed_offsets.join(append_times.dropna(), ["partition", "offset"])
    latency = (f.col("time_ms") - f.col("from_ms")).alias("latency_ms")
    counted = joined.groupBy("subscription", "topic_id", latency)
    return counted.agg(f.count(f.lit(1)).alias("records"))


_ARROW_SCHEMA: Final = pa.schema(
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


class DeliveryFinding(NamedTuple):
    kind: str
    first_offset: int
    next_offset: int
    records: int


class _Steps(NamedTuple):
    """The steps of one stretch in order, as columns."""

    from_offset: Array
    first: Array
    next: Array
    lost: Array
    lent_to: Array
    #: `is_acked`: the entries were acknowledged one by one, or were passed without delivery.
    #: `is_passed`: only the second.
    is_acked: Any
    is_passed: Any

    def select(self, rows: Any) -> _Steps:
        return _Steps(*(column[rows] for column in self))


def check_chain(chain: pa.Table, cursor: int | None) -> Iterator[DeliveryFinding]:
    """Yield the findings of all receipts of one subscription and partition. With `cursor`, which
    must be read before the receipts, also check that the receipts reach it."""
    chain = chain.sort_by([("at_partition", "ascending"), ("at_offset", "ascending")])
    kinds = chain.column("kind").to_numpy(zero_copy_only=False)
    from_offset, first, next_offset, lost, lent_to = (
        chain.column(name).to_numpy().astype(np.int64, copy=False) for name in _STEP_COLUMNS[1:]
    )
    is_passed = kinds == "passed"
    is_acked = (kinds == "acked") | is_passed
    steps = _Steps(from_offset, first, next_offset, lost, lent_to, is_acked, is_passed)
    is_cursor_set = (kinds == "begun") | (kinds == "moved")
    taken_count = int((steps.next - steps.first)[~is_cursor_set & ~is_passed].sum())
    reached = int(steps.next[-1]) if cursor is None else cursor
    yield DeliveryFinding("taken", int(steps.from_offset[0]), reached, taken_count)
    set_steps = np.flatnonzero(is_cursor_set).tolist()
    starts = [(int(steps.next[step]), step + 1) for step in set_steps]
    if not is_cursor_set[0]:  # earlier receipts were deleted
        starts.insert(0, (max(int(steps.from_offset[0]), int(steps.lent_to[0])), 0))
    ends = [*(set_steps if is_cursor_set[0] else [0, *set_steps])[1:], len(kinds)]
    for (start, first_step), end_step in zip(starts, ends, strict=True):
        stretch = steps.select(slice(first_step, end_step))
        yield from _check_stretch(stretch, start, cursor if end_step == len(kinds) else None)


def _check_stretch(steps: _Steps, start: int, cursor: int | None) -> Iterator[DeliveryFinding]:
    """Yield the findings of one stretch. `start` is where the cursor was set."""
    for step in np.flatnonzero(steps.first > steps.from_offset):
        first, end = int(steps.from_offset[step]), int(steps.first[step])
        yield DeliveryFinding("over", first, end, end - first)
    for step in np.flatnonzero(steps.lost > 0):
        span = int(steps.from_offset[step]), int(steps.next[step])
        yield DeliveryFinding("lost", *span, int(steps.lost[step]))
    end = start if not len(steps.next) else int(steps.next[-1])
    if not _is_contiguous(steps, start):
        yield from _check_overlapping_steps(steps, start, cursor)
    elif cursor is not None and end < cursor:
        yield DeliveryFinding("untold", end, cursor, cursor - end)


def _is_contiguous(steps: _Steps, start: int) -> bool:
    """Return whether each step begins where the one before ended: then nothing can be wrong."""
    ends = np.append([start], steps.next[:-1]) if len(steps.next) else steps.next
    return bool((steps.from_offset == ends).all())


def _check_overlapping_steps(
    steps: _Steps, start: int, cursor: int | None
) -> Iterator[DeliveryFinding]:
    """Yield the doubled, reordered and untold offsets of a stretch whose steps overlap or leave
    gaps."""
    taken, mentioned = NumberSet(), NumberSet()
    for from_offset, first, end, _, _, is_acked, is_passed in zip(
        *(column.tolist() for column in steps), strict=True
    ):
        # A step mentions all offsets that it moves over, and takes only those from `first` on.
        mentioned.add(min(from_offset, first), end)
        if is_passed or first == end:
            continue
        highest = taken.end
        unchecked = first
        for doubled_start, doubled_end in taken.overlaps(first, end):
            yield DeliveryFinding(
                "doubled", doubled_start, doubled_end, doubled_end - doubled_start
            )
            yield from _find_reordered(unchecked, min(doubled_start, highest), is_acked)
            unchecked = doubled_end
        yield from _find_reordered(unchecked, min(end, highest), is_acked)
        taken.add(first, end)
    # Entries between acknowledged ones may still be in delivery; entries before the cursor cannot.
    may_be_in_delivery = bool(steps.is_acked.any())
    for gap_start, end in mentioned.gaps(start):
        gap_start = max(gap_start, start)
        if may_be_in_delivery:
            end = min(end, cursor if cursor is not None else gap_start)
        if gap_start < end:
            yield DeliveryFinding("untold", gap_start, end, end - gap_start)
    mentioned_end = max(mentioned.end, start)
    if cursor is not None and mentioned_end < cursor:
        yield DeliveryFinding("untold", mentioned_end, cursor, cursor - mentioned_end)


def _find_reordered(first: int, end: int, is_acked: bool) -> Iterator[DeliveryFinding]:
    if first < end and not is_acked:
        yield DeliveryFinding("reordered", first, end, end - first)
