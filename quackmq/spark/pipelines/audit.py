"""`audit`: prove from the data that nothing was lost, doubled or reordered, or name what was.

The audit compares three sources: the records of topics, archived or not; the broker's knowledge of
their holes; and the receipts that subscriptions have left. It reports:

- for each topic, how many of its producers' sequence numbers are lost, doubled and reordered;
- for each topic, how many offsets without a record are explained, and how many are not;
- for each subscription with receipts, how many records it skipped, received twice or received out
  of order, and the latency of its records.

The audit reads a topic once, and only the columns for offsets and sequence numbers
(`audit_checks.runs` describes the method, and when it is exact). It judges the topic as it was when
the audit read it. Publishers, subscribers and the archive continue meanwhile.

The data cannot prove:

- that a publisher's last records are there, because no later number follows them;
- anything about records without sequence numbers, except that their offsets have records;
- what a subscription without receipts has read. A subscription whose receipts are all deleted is
  named: nothing is wrong with it, and nothing is proved.

    quackmq pipeline run audit --topics orders,payments --plot latency.png

`audit(df)` works on any DataFrame with a topic's columns, and `audit_checks.receipts.deliveries` on
receipts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

from quackmq import limits as shared_limits
from quackmq.errors import UnknownTopic
from quackmq.model.offset_notes import RECEIPTS_TOPIC
from quackmq.spark import limits
from quackmq.spark.broker.archive import ArchivePlan
from quackmq.spark.broker.http import Http, path_of
from quackmq.spark.broker.metadata import BrokerMetadata, TopicOffsets, list_topics
from quackmq.spark.pipelines.audit_checks.holes import (
    Explanation,
    ReadPartition,
    Span,
    Spans,
    explain,
)
from quackmq.spark.pipelines.audit_checks.receipts import (
    PERCENTILES,
    Cursors,
    deliveries,
    find_untimed,
    latencies,
    latencies_from_records,
    receipts,
)
from quackmq.spark.pipelines.audit_checks.runs import FINDINGS, RUNS, check_runs, make_runs
from quackmq.spark.pipelines.options import option
from quackmq.spark.pipelines.report import Report
from quackmq.spark.source.options import Options as SourceOptions
from quackmq.spark.source.options import Subscribe
from quackmq.spark.tables import planned_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from quackmq.spark.pipelines.job import Job

SUMMARY: Final = "prove from the data that nothing was lost, doubled or reordered, or name it"

_POSITION_COLUMNS: Final = ("partition", "offset", "producer_id", "producer_epoch", "sequence")
#: How many topics one Spark job reads: planning very many takes longer than reading them.
_TOPICS_AT_ONCE: Final = 16
_FAULTS: Final = ("lost", "doubled", "reordered")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    topics: tuple[str, ...] = option(
        "the topics to audit (default: all)", default=(), metavar="TOPIC,…"
    )
    named: int = option(
        "how many findings of each kind are named", default=limits.AUDIT_PRINTED, metavar="N"
    )


# --- on any DataFrame ----------------------------------------------------------------------------


def audit(
    records: DataFrame, complete_partitions: Mapping[str, Collection[int]] | None = None
) -> DataFrame:
    """Return the findings about records, by `topic` and `partition`.
    `audit_checks.runs.FINDINGS` lists the other columns.

    `complete_partitions` are the partitions, by topic, from which no record was ever deleted.
    Each of their producers must start at sequence number 0."""
    positions = [f.col(name).cast("bigint") for name in _POSITION_COLUMNS]
    with_topic = records.select("topic", *positions).mapInArrow(
        _make_runs_by_topic, _add_topic_field(RUNS)
    )
    return _check_runs(with_topic, complete_partitions or {})


def _make_runs(records: DataFrame, topic: str) -> DataFrame:
    """Return the runs of the records of one topic. The topic's name is added to the runs, so that
    it is not read in every row."""
    runs = records.select(*_POSITION_COLUMNS).mapInArrow(make_runs, from_arrow_schema(RUNS))
    return runs.withColumn("topic", f.lit(topic))


def _make_runs_by_topic(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the runs of rows of several topics, with a column `topic`. Spark calls this in its
    tasks."""
    for batch in batches:
        names = batch.column("topic")
        for name in names.unique():
            for runs in make_runs([batch.filter(pa.compute.equal(names, name))]):
                topics = pa.repeat(name, runs.num_rows)
                yield runs.append_column("topic", topics)


def _check_runs(runs: DataFrame, complete_partitions: Mapping[str, Collection[int]]) -> DataFrame:
    """Compare the runs of each partition; return the findings with columns for partition and
    topic. `complete_partitions` are the partitions, by topic, from which no record was ever
    deleted."""
    complete_by_topic = {
        topic: frozenset(partitions) for topic, partitions in complete_partitions.items()
    }

    def check(key: tuple[pa.Scalar, ...], share: pa.Table) -> pa.Table:
        """Check the runs of one topic, partition and share, in a task of Spark."""
        topic, partition, *_ = (part.as_py() for part in key)
        findings = check_runs(share, partition in complete_by_topic.get(topic, ()))
        partition_column = pa.array([partition] * findings.num_rows, pa.int32())
        with_partition = findings.append_column("partition", partition_column)
        return with_partition.append_column(
            "topic", pa.array([topic] * findings.num_rows, pa.string())
        )

    schema = from_arrow_schema(
        pa.schema([*FINDINGS, ("partition", pa.int32()), ("topic", pa.string())])
    )
    return runs.groupBy("topic", "partition", "share").applyInArrow(check, schema)


def _add_topic_field(schema: pa.Schema) -> Any:
    return from_arrow_schema(schema.append(pa.field("topic", pa.string())))


# --- the pipeline --------------------------------------------------------------------------------


def run(job: Job, options: Options) -> Report:
    """Audit the topics and their subscriptions; return the report. Raise UnknownTopic for a named
    topic that does not exist, and NoBroker."""
    job.wait_for_broker()
    metadata = BrokerMetadata(SourceOptions(job.address, Subscribe(options.topics), "earliest"))
    try:
        return _Audit(job, options, metadata).report()
    finally:
        metadata.close()


@dataclass(slots=True)
class _Verdict:
    """The counts of findings of a topic, or of a subscription to a topic."""

    records: int = 0
    explained: int | None = None
    unexplained: int | None = None
    faults: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_FAULTS, 0))
    #: The latency in milliseconds at `PERCENTILES`, and the greatest.
    latency_ms: Sequence[float] = ()

    @property
    def is_good(self) -> bool:
        return not self.unexplained and not any(self.faults.values())

    def row(self, topic: str, subscription: str | None) -> list[Any]:
        """Return the row of the report. The row of a topic has no subscription."""
        # A verdict without latencies has empty cells: one for each percentile, one for the
        # greatest.
        latency = [*self.latency_ms, *([None] * (len(PERCENTILES) + 1))][: len(PERCENTILES) + 1]
        counts = [self.faults[kind] for kind in _FAULTS]
        return [
            *(topic, subscription, self.records, *counts),
            *(self.explained, self.unexplained, *latency),
        ]


class _Audit:
    """One run of the audit. Use an instance once, from one thread."""

    def __init__(self, job: Job, options: Options, metadata: BrokerMetadata) -> None:
        self._job = job
        self._options = options
        self._metadata = metadata
        self._topics: dict[str, _Verdict] = {}
        self._subscriptions: dict[tuple[str, str], _Verdict] = {}
        #: The descriptions of the first findings of each kind.
        self._printed: dict[str, list[str]] = defaultdict(list)
        #: The number of records of all findings of each kind.
        self._counts: dict[str, int] = defaultdict(int)
        #: The offsets that were read, by topic id and partition.
        self._partitions: dict[tuple[str, int], ReadPartition] = {}
        #: For the picture: (step of latency, number of records), by topic and subscription.
        self._distribution: dict[tuple[str, str], list[tuple[int, int]]] = {}

    @property
    def _http(self) -> Http:
        return self._metadata.http

    def report(self) -> Report:
        """Run the whole audit; return its report."""
        names = sorted(set(self._options.topics)) or [
            name for name in list_topics(self._http) if name != RECEIPTS_TOPIC
        ]
        # Fetch the cursors before the receipts are read. So a receipt exists for every offset that
        # a cursor has passed.
        cursors, topic_by_id = self._fetch_cursors(names)
        for start in range(0, len(names), _TOPICS_AT_ONCE):
            self._audit_topics(names[start : start + _TOPICS_AT_ONCE])
            self._job.check()
        if topic_by_id:
            self._audit_subscriptions(cursors, topic_by_id)
        return self._make_report()

    # --- topics -----------------------------------------------------------------------------

    def _audit_topics(self, names: Sequence[str]) -> None:
        """Read some topics in one Spark job; judge each of their partitions.

        The broker's offsets are fetched before the records are read. If the first offset of a
        partition is 0 then, nothing was deleted from it, so its producers must start at number
        0. What retention deletes later is asked last: `explain` subtracts it."""
        self._job.show_progress(
            f"reading {names[0]}" + (f" and {len(names) - 1} more" * (len(names) > 1))
        )
        facts = self._fetch_offsets(names)
        complete_partitions = {
            name: [
                partition
                for partition, partition_facts in topic.partitions.items()
                if partition_facts.first == 0
            ]
            for name, topic in facts.topics.items()
        }
        with ArchivePlan(self._metadata.access) as plan:
            runs = reduce(
                lambda left, right: left.unionByName(right),
                [
                    _make_runs(self._table(name, plan, fail_on_data_loss=False), name)
                    for name in names
                ],
            )
            # Collect one more than the bound, to learn whether there are more.
            findings = (
                _check_runs(runs, complete_partitions).limit(limits.AUDIT_FINDINGS + 1).collect()
            )
        if len(findings) > limits.AUDIT_FINDINGS:
            self._record_finding(
                "cut",
                f"more than {limits.AUDIT_FINDINGS:,} holes and findings in {', '.join(names)}: "
                "later ones were not checked",
            )
        by_partition: dict[tuple[str, int], list[Any]] = defaultdict(list)
        for row in findings[: limits.AUDIT_FINDINGS]:
            by_partition[row["topic"], row["partition"]].append(row)
        for name, topic in facts.topics.items():
            verdict = self._topics[name] = _Verdict(explained=0, unexplained=0)
            for partition, partition_facts in sorted(topic.partitions.items()):
                rows = by_partition[name, partition]
                read_partition = _describe_partition(
                    name,
                    topic.id,
                    partition,
                    Span(partition_facts.first, partition_facts.stable),
                    rows,
                )
                self._partitions[topic.id, partition] = read_partition
                self._job.show_progress(f"asking the broker about {name}, partition {partition}")
                self._judge_partition(
                    verdict, read_partition, explain(self._http, read_partition), rows
                )

    def _table(self, name: str, plan: ArchivePlan, *, fail_on_data_loss: bool = True) -> DataFrame:
        """Return the records of a topic; add its archived files to `plan`."""
        frame, table_plan = planned_table(
            self._job.spark,
            name,
            bootstrap_servers=self._job.address,
            fail_on_data_loss=fail_on_data_loss,
        )
        plan.adopt(table_plan)
        return frame

    def _fetch_offsets(self, names: Sequence[str]) -> TopicOffsets:
        """Return the broker's present offsets of topics. Raise UnknownTopic if one is missing."""
        metadata = BrokerMetadata(
            SourceOptions(self._job.address, Subscribe(tuple(names)), "earliest")
        )
        try:
            return metadata.fetch()
        except UnknownTopic as error:
            # The error names the source's option `subscribe`, which users of the audit do not set.
            raise UnknownTopic(str(error).removeprefix("subscribe: ")) from None
        finally:
            metadata.close()

    def _judge_partition(
        self,
        verdict: _Verdict,
        read_partition: ReadPartition,
        explanation: Explanation,
        rows: Sequence[Any],
    ) -> None:
        """Add the findings of one partition to the verdict of its topic, and to the report."""
        partition_name = f"{read_partition.topic}/{read_partition.partition}"
        verdict.explained = (verdict.explained or 0) + explanation.explained
        verdict.unexplained = (verdict.unexplained or 0) + explanation.unexplained
        for damage in explanation.damages:
            self._record_finding(
                "hole",
                f"{partition_name}: {_format_offsets(damage.span)}: {damage.reason}",
                damage.records,
            )
        for damage in explanation.unreadable:
            verdict.faults["lost"] += damage.records
            self._record_finding(
                "lost",
                f"{partition_name}: {_format_offsets(damage.span)}: {damage.reason}",
                damage.records,
            )
        for row in rows:
            if row["kind"] == "seen":
                verdict.records += row["records"]
            elif row["kind"] == "lost":
                self._judge_lost(verdict, read_partition, explanation, row)
            elif row["kind"] in _FAULTS:
                verdict.faults[row["kind"]] += row["records"]
                self._record_finding(
                    row["kind"], f"{partition_name}: {_describe_finding(row)}", row["records"]
                )

    def _judge_lost(
        self, verdict: _Verdict, read_partition: ReadPartition, explanation: Explanation, row: Any
    ) -> None:
        """Count the sequence numbers of a `lost` finding that neither an aborted transaction nor
        retention explains."""
        span = Span(row["first_offset"], row["next_offset"])
        producer = row["producer_id"], row["producer_epoch"], row["first_sequence"]
        unexplained = explanation.count_lost(*producer, row["records"], span)
        if unexplained:
            verdict.faults["lost"] += unexplained
            self._record_finding(
                "lost",
                f"{read_partition.topic}/{read_partition.partition}: {_describe_finding(row)}",
                unexplained,
            )

    # --- subscriptions ----------------------------------------------------------------------

    def _fetch_cursors(self, names: Sequence[str]) -> tuple[Cursors, dict[str, str]]:
        """Return the cursors of subscriptions that leave receipts, and the names of all audited
        topics by id."""
        facts = self._fetch_offsets(names) if names else TopicOffsets("", {})
        topic_by_id = {topic.id: name for name, topic in facts.topics.items()}
        id_by_topic = {name: topic_id for topic_id, name in topic_by_id.items()}
        cursors: dict[tuple[str, str, int], int] = {}
        after: dict[str, str] = {}
        while True:
            page = self._http.get(
                "/v1/subscriptions", limit=shared_limits.HTTP_PAGE_ITEMS, **after
            ).json
            for subscription in page["subscriptions"]:
                if subscription["receipts"] and subscription["topic"] in id_by_topic:
                    target = path_of(
                        "subscriptions", subscription["name"], "topics", subscription["topic"]
                    )
                    response = self._http.get(target).json
                    for partition, offset in enumerate(response["next_offsets"]):
                        cursors[
                            subscription["name"], id_by_topic[subscription["topic"]], partition
                        ] = offset
            if page["next"] is None:
                return cursors, topic_by_id
            after = {"after": page["next"]}

    def _audit_subscriptions(self, cursors: Cursors, topics: Mapping[str, str]) -> None:
        """Judge all subscriptions that leave receipts. Name those without a receipt: nothing is
        proved about them. `topics` maps ids to names."""
        try:
            self._fetch_offsets([RECEIPTS_TOPIC])
        except UnknownTopic:
            reason = f"there is no topic {RECEIPTS_TOPIC}"
        else:
            reason = "all its receipts were deleted"
            self._read_receipts(cursors, topics)
        with_receipts = {(topics[topic_id], name) for name, topic_id, _ in cursors}
        for topic, name in sorted(with_receipts - self._subscriptions.keys()):
            self._record_finding("unproved", f"{topic} for {name}: {reason}")

    def _read_receipts(self, cursors: Cursors, topics: Mapping[str, str]) -> None:
        """Judge the receipts of the audited topics, and record their latencies."""
        self._job.show_progress("reading receipts")
        with ArchivePlan(self._metadata.access) as plan:
            stored_receipts = receipts(self._table(RECEIPTS_TOPIC, plan))
            stored_receipts = stored_receipts.where(f.col("topic_id").isin(list(topics))).persist()
            try:
                self._judge_deliveries(deliveries(stored_receipts, cursors), topics)
                self._record_latencies(
                    self._collect_latencies(stored_receipts, topics, plan), topics
                )
            finally:
                stored_receipts.unpersist()

    def _collect_latencies(
        self, stored_receipts: DataFrame, topics: Mapping[str, str], plan: ArchivePlan
    ) -> DataFrame:
        """Return the latencies that receipts hold, and those of entries that were archived before
        their receipt."""
        counted_latencies = latencies(stored_receipts)
        untimed_ranges = find_untimed(stored_receipts)
        for row in untimed_ranges.select("topic_id").distinct().collect():
            topic_id = row["topic_id"]
            records = self._table(topics[topic_id], plan, fail_on_data_loss=False)
            ranges_of_topic = untimed_ranges.where(f.col("topic_id") == topic_id)
            counted_latencies = counted_latencies.unionByName(
                latencies_from_records(ranges_of_topic, records)
            )
        return counted_latencies

    def _judge_deliveries(self, findings: DataFrame, topics: Mapping[str, str]) -> None:
        """Add the findings about receipts to the verdicts of their subscriptions."""
        for row in findings.collect():
            topic = topics[row["topic_id"]]
            verdict = self._subscriptions.setdefault((topic, row["subscription"]), _Verdict())
            read_partition = self._partitions.get((row["topic_id"], row["partition"]))
            # A partition that was added during the audit is not judged.
            if read_partition is not None:
                self._judge_delivery(verdict, read_partition, row)

    def _judge_delivery(self, verdict: _Verdict, read_partition: ReadPartition, row: Any) -> None:
        """Judge one finding of `audit_checks.receipts`. `over` and `untold` are ranges of offsets:
        only those with a record count as lost."""
        kind, span = row["kind"], Span(row["first_offset"], row["next_offset"])
        partition_name = f"{read_partition.topic}/{read_partition.partition}"
        location = f"{partition_name} for {row['subscription']}: {_format_offsets(span)}"
        count = row["records"]
        if kind == "taken":
            verdict.records += count
            return
        if kind in ("over", "untold"):
            count = read_partition.records(*span)
            if kind == "untold":
                # Offsets that were deleted since then cannot be looked up: count all as records.
                count += max(0, min(read_partition.seen.first, span.next) - span.first)
            reason = "passed without a receipt" if kind == "untold" else "skipped"
            kind = "lost"
        else:
            reason = "deleted before they were read" if kind == "lost" else "by its receipts"
        if count:
            verdict.faults[kind] += count
            self._record_finding(kind, f"{location}: {reason}", count)

    def _record_latencies(self, latencies: DataFrame, topics: Mapping[str, str]) -> None:
        """Store the percentiles of latency in the verdicts, and the distribution for the picture.
        Each row of `latencies` has a latency and the number of its records."""
        shares = ", ".join(map(str, PERCENTILES))
        by_subscription = latencies.groupBy("subscription", "topic_id")
        percentiles = by_subscription.agg(
            f.expr(f"percentile(latency_ms, array({shares}), records)").alias("at"),
            f.max("latency_ms").alias("most"),
        )
        for row in percentiles.collect():
            topic_and_subscription = topics[row["topic_id"]], row["subscription"]
            self._subscriptions[topic_and_subscription].latency_ms = [
                *row["at"],
                float(row["most"]),
            ]
        # Steps of 10 % are fine enough for a picture. Add 1 ms, because 0 has no logarithm.
        step = f.expr("CAST(floor(log(1.1, greatest(latency_ms, 0) + 1)) AS INT)").alias("step")
        steps = latencies.groupBy("subscription", "topic_id", step).agg(f.sum("records").alias("n"))
        for row in steps.orderBy("step").collect():
            topic_and_subscription = topics[row["topic_id"]], row["subscription"]
            self._distribution.setdefault(topic_and_subscription, []).append(
                (row["step"], row["n"])
            )

    # --- the report -------------------------------------------------------------------------

    def _record_finding(self, kind: str, description: str, records: int = 1) -> None:
        """Count a finding; keep its description if fewer than `named` of this kind are kept. "…"
        marks that there are more."""
        self._counts[kind] += records
        if len(self._printed[kind]) < self._options.named:
            self._printed[kind].append(
                f"{description} ({records:,})" if records > 1 else description
            )
        elif len(self._printed[kind]) == self._options.named:
            self._printed[kind].append("…")

    def _make_report(self) -> Report:
        """Return the report: a row for each topic, then one for each topic and subscription. A
        check that was cut short proves nothing, so the report is not good then."""
        rows = [verdict.row(topic, None) for topic, verdict in sorted(self._topics.items())]
        rows += [
            verdict.row(*topic_and_subscription)
            for topic_and_subscription, verdict in sorted(self._subscriptions.items())
        ]
        verdicts = [*self._topics.values(), *self._subscriptions.values()]
        is_good = all(verdict.is_good for verdict in verdicts) and "cut" not in self._counts
        facts: dict[str, Any] = {
            "verdict": "nothing was lost, doubled or reordered"
            if is_good
            else "found: " + ", ".join(f"{n:,} {kind}" for kind, n in sorted(self._counts.items()))
        }
        for kind, descriptions in sorted(self._printed.items()):
            facts |= {
                f"{kind} {number}": description
                for number, description in enumerate(descriptions, 1)
            }
        columns = ["topic", "subscription", "records", *_FAULTS, "explained", "unexplained"]
        columns += [f"p{100 * share:g}_ms" for share in PERCENTILES] + ["max_ms"]
        plot = self._draw if self._distribution else None
        return Report("audit", columns, rows, facts, is_good, plot)

    def _draw(self, axes: Any) -> None:
        """Draw the share of records that the subscriber had after each latency."""
        for (topic, subscription), steps in sorted(self._distribution.items()):
            total = sum(count for _, count in steps)
            # The upper end of each step. `_record_latencies` has added 1 ms to the latencies.
            milliseconds = [1.1 ** (step + 1) - 1 for step, _ in steps]
            shares = [
                sum(count for _, count in steps[: index + 1]) / total for index in range(len(steps))
            ]
            axes.step(milliseconds, shares, where="post", label=f"{subscription}, {topic}")
        axes.set_xscale("log")
        axes.set_xlabel("from publish to delivery, ms")
        axes.set_ylabel("share of the records")
        axes.set_ylim(0, 1.02)
        axes.grid(True, alpha=0.3)
        axes.legend()


def _describe_partition(
    topic: str, topic_id: str, partition: int, reported: Span, rows: Sequence[Any]
) -> ReadPartition:
    """Return the offsets that were read of a partition. `reported` is the range that the broker
    reported before the records were read."""
    holes = [Span(row["first_offset"], row["next_offset"]) for row in rows if row["kind"] == "hole"]
    seen = next((row for row in rows if row["kind"] == "seen"), None)
    # No record was read, so all reported offsets are one hole.
    if seen is None:
        return ReadPartition(
            topic, topic_id, partition, reported, Spans([reported] if reported.size else [])
        )
    read = Span(seen["first_offset"], seen["next_offset"])
    # Reported offsets before the first and after the last record are holes too.
    ends = [Span(reported.first, read.first), Span(read.next, reported.next)]
    holes += [span for span in ends if span.size > 0]
    union = Span(min(reported.first, read.first), max(reported.next, read.next))
    return ReadPartition(topic, topic_id, partition, union, Spans(holes))


def _describe_finding(row: Any) -> str:
    """Describe a finding of `audit_checks.runs` by its sequence numbers, or by its offsets."""
    # Of the findings without a producer, only doubled offsets are described here.
    if row["producer_id"] is None:
        return f"{_format_offsets(Span(row['first_offset'], row['next_offset']))} more than once"
    first, count = row["first_sequence"], row["records"]
    numbers = f"number {first}" if count == 1 else f"numbers {first} to {first + count - 1}"
    numbers_of_producer = (
        f"{numbers} of producer {row['producer_id']}, epoch {row['producer_epoch']}"
    )
    span = Span(row["first_offset"], row["next_offset"])
    # Lost numbers between two records with neighbouring offsets have no offsets of their own.
    if not span.size:
        return f"{numbers_of_producer}, before offset {span.first}"
    return (
        f"{numbers_of_producer}, {'at' if span.size == count else 'among'} {_format_offsets(span)}"
    )


def _format_offsets(span: Span) -> str:
    return f"offset {span.first}" if span.size == 1 else f"offsets {span.first} to {span.next - 1}"
