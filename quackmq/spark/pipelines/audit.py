"""`audit`: prove from the data that nothing was lost, doubled or reordered, or name what was.

The audit compares three sources: the records of topics, archived or not; the broker's knowledge of
their holes; and the receipts that subscriptions have left. It reports:

- for each topic, how many of its producers' sequence numbers are lost, doubled and reordered;
- for each topic, how many offsets without a record are explained, and how many are not;
- for each subscription with receipts, how many records it passed without taking them, took twice or
  took out of order, and the latency of its records.

The audit reads a topic once, and only the columns for offsets and sequence numbers
(`audit_checks.runs` describes the method, and when it is exact). It judges the topic as it was when
the audit read it. Publishers, subscribers and the archive go on meanwhile.

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

from quackmq import limits as shared_limits
from quackmq.errors import QuackError, UnknownTopic
from quackmq.model.offset_notes import RECEIPTS_TOPIC
from quackmq.spark import limits
from quackmq.spark.broker.archive import Plan, release
from quackmq.spark.broker.http import Http, path_of
from quackmq.spark.broker.metadata import BrokerMetadata, TopicOffsets
from quackmq.spark.pipelines.audit_checks.holes import Explained, Partition, Span, Spans, explain
from quackmq.spark.pipelines.audit_checks.receipts import (
    PERCENTILES,
    Cursors,
    deliveries,
    latencies,
    latencies_of_records,
    receipts,
    untimed,
)
from quackmq.spark.pipelines.audit_checks.runs import FINDINGS, RUNS, findings_of, runs_of
from quackmq.spark.pipelines.options import option
from quackmq.spark.pipelines.report import Report
from quackmq.spark.source.options import Options as SourceOptions
from quackmq.spark.source.options import Subscribe
from quackmq.spark.tables import planned_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from quackmq.spark.pipelines.job import Job

SUMMARY: Final = "prove from the data that nothing was lost, doubled or reordered, or name it"

_PLACES: Final = ("partition", "offset", "producer_id", "producer_epoch", "sequence")
#: How many topics one Spark job reads: planning very many takes longer than reading them.
_TOPICS_AT_ONCE: Final = 16
_WRONG: Final = ("lost", "doubled", "reordered")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    topics: tuple[str, ...] = option(
        "the topics to audit (default: all)", default=(), metavar="TOPIC,…"
    )
    named: int = option(
        "how many findings of each kind are named", default=limits.AUDIT_PRINTED, metavar="N"
    )


# --- on any DataFrame ----------------------------------------------------------------------------


def audit(records: DataFrame, whole: Mapping[str, Collection[int]] | None = None) -> DataFrame:
    """Return what is wrong with records, by `topic` and `partition`. `audit_checks.runs.FINDINGS`
    lists the other columns.

    `whole` names the partitions, by topic, from which no record was ever deleted. Each of their
    producers must begin at sequence number 0."""
    places = [f.col(name).cast("bigint") for name in _PLACES]
    with_topic = records.select("topic", *places).mapInArrow(_by_topic, _with_topic(RUNS))
    return _findings(with_topic, whole or {})


def _runs(records: DataFrame, topic: str) -> DataFrame:
    """Return the runs of the records of one topic. The topic's name is added to the runs, so that
    it is not read in every row."""
    runs = records.select(*_PLACES).mapInArrow(runs_of, from_arrow_schema(RUNS))
    return runs.withColumn("topic", f.lit(topic))


def _by_topic(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        names = batch.column("topic")
        for name in names.unique():
            for runs in runs_of([batch.filter(pa.compute.equal(names, name))]):
                topics = pa.repeat(name, runs.num_rows)
                yield runs.append_column("topic", topics)


def _findings(runs: DataFrame, whole: Mapping[str, Collection[int]]) -> DataFrame:
    is_whole = {topic: frozenset(partitions) for topic, partitions in whole.items()}

    def check(key: tuple[pa.Scalar, ...], of_share: pa.Table) -> pa.Table:
        topic, partition = key[0].as_py(), key[1].as_py()
        found = findings_of(of_share, partition in is_whole.get(topic, ()))
        place = pa.array([partition] * found.num_rows, pa.int32())
        named = found.append_column("partition", place)
        return named.append_column("topic", pa.array([topic] * found.num_rows, pa.string()))

    schema = from_arrow_schema(
        pa.schema([*FINDINGS, ("partition", pa.int32()), ("topic", pa.string())])
    )
    return runs.groupBy("topic", "partition", "share").applyInArrow(check, schema)


def _with_topic(schema: pa.Schema) -> Any:
    return from_arrow_schema(schema.append(pa.field("topic", pa.string())))


# --- the pipeline --------------------------------------------------------------------------------


def run(job: Job, options: Options) -> Report:
    survey = BrokerMetadata(SourceOptions(job.address, Subscribe(options.topics), "earliest"))
    try:
        return _Audit(job, options, survey).report()
    finally:
        survey.close()


@dataclass(slots=True)
class _Line:
    """Count the findings of a topic, or of a subscription to a topic."""

    records: int = 0
    explained: int | None = None
    unexplained: int | None = None
    wrong: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_WRONG, 0))
    #: The latency in milliseconds at `PERCENTILES`, and the greatest.
    latency_ms: Sequence[float] = ()

    @property
    def is_good(self) -> bool:
        return not self.unexplained and not any(self.wrong.values())

    def row(self, topic: str, subscription: str | None) -> list[Any]:
        latency = [*self.latency_ms, *([None] * (len(PERCENTILES) + 1))][: len(PERCENTILES) + 1]
        counts = [self.wrong[kind] for kind in _WRONG]
        return [
            *(topic, subscription, self.records, *counts),
            *(self.explained, self.unexplained, *latency),
        ]


class _Audit:
    def __init__(self, job: Job, options: Options, survey: BrokerMetadata) -> None:
        self._job = job
        self._options = options
        self._survey = survey
        self._topics: dict[str, _Line] = {}
        self._subscriptions: dict[tuple[str, str], _Line] = {}
        self._named: dict[str, list[str]] = defaultdict(list)
        self._counts: dict[str, int] = defaultdict(int)
        self._partitions: dict[tuple[str, int], Partition] = {}
        self._distribution: dict[tuple[str, str], list[tuple[int, int]]] = {}

    @property
    def _http(self) -> Http:
        return self._survey.http

    def report(self) -> Report:
        names = sorted(set(self._options.topics)) or self._all_topics()
        cursors, subscribed = self._subscribed(names)
        for start in range(0, len(names), _TOPICS_AT_ONCE):
            self._audit_topics(names[start : start + _TOPICS_AT_ONCE])
            self._job.check()
        if subscribed:
            self._audit_subscriptions(cursors, subscribed)
        return self._made()

    # --- topics -----------------------------------------------------------------------------

    def _all_topics(self) -> list[str]:
        names: list[str] = []
        after: dict[str, str] = {}
        while True:
            page = self._http.get("/v1/topics", limit=shared_limits.HTTP_PAGE_ITEMS, **after).json
            names += [topic["name"] for topic in page["topics"]]
            if page["next"] is None:
                return [name for name in names if name != RECEIPTS_TOPIC]
            after = {"after": page["next"]}

    def _audit_topics(self, names: Sequence[str]) -> None:
        self._job.tell(f"reading {names[0]}" + (f" and {len(names) - 1} more" * (len(names) > 1)))
        facts = self._look(names)
        whole = {
            name: [at for at, of in topic.partitions.items() if of.first == 0]
            for name, topic in facts.topics.items()
        }
        with _plans(self._survey) as plans:
            runs = reduce(
                lambda one, other: one.unionByName(other),
                [_runs(self._table(name, plans, fails=False), name) for name in names],
            )
            found = _findings(runs, whole).limit(limits.AUDIT_FINDINGS + 1).collect()
        if len(found) > limits.AUDIT_FINDINGS:
            self._note(
                "cut",
                f"more than {limits.AUDIT_FINDINGS:,} holes and findings in {', '.join(names)}: "
                "what is behind them was not looked at",
            )
        by_partition: dict[tuple[str, int], list[Any]] = defaultdict(list)
        for row in found[: limits.AUDIT_FINDINGS]:
            by_partition[row["topic"], row["partition"]].append(row)
        for name, topic in facts.topics.items():
            line = self._topics[name] = _Line(explained=0, unexplained=0)
            for partition, of in sorted(topic.partitions.items()):
                rows = by_partition[name, partition]
                read = _partition(name, topic.id, partition, Span(of.first, of.stable), rows)
                self._partitions[topic.id, partition] = read
                self._job.tell(f"asking the broker about {name}, partition {partition}")
                self._judge(line, read, explain(self._http, read), rows)

    def _table(self, name: str, plans: list[Plan], *, fails: bool = True) -> DataFrame:
        """Return the records of a topic; add the plan that pins its archived files to `plans`."""
        frame, plan = planned_table(
            self._job.spark,
            name,
            bootstrap_servers=self._job.address,
            fail_on_data_loss=fails,
        )
        plans.append(plan)
        return frame

    def _look(self, names: Sequence[str]) -> TopicOffsets:
        survey = BrokerMetadata(
            SourceOptions(self._job.address, Subscribe(tuple(names)), "earliest")
        )
        try:
            return survey.fetch()
        except UnknownTopic as error:
            raise UnknownTopic(str(error).removeprefix("subscribe: ")) from None
        finally:
            survey.close()

    def _judge(self, line: _Line, read: Partition, why: Explained, rows: Sequence[Any]) -> None:
        where = f"{read.topic}/{read.partition}"
        line.explained = (line.explained or 0) + why.explained
        line.unexplained = (line.unexplained or 0) + why.unexplained
        for damage in why.damages:
            self._note("hole", f"{where}: {_offsets(damage.span)}: {damage.words}", damage.records)
        for damage in why.unreadable:
            line.wrong["lost"] += damage.records
            self._note("lost", f"{where}: {_offsets(damage.span)}: {damage.words}", damage.records)
        for row in rows:
            if row["kind"] == "seen":
                line.records += row["records"]
            elif row["kind"] == "lost":
                self._judge_lost(line, read, why, row)
            elif row["kind"] in _WRONG:
                line.wrong[row["kind"]] += row["records"]
                self._note(row["kind"], f"{where}: {_words(row)}", row["records"])

    def _judge_lost(self, line: _Line, read: Partition, why: Explained, row: Any) -> None:
        between = Span(row["first_offset"], row["next_offset"])
        producer = row["producer_id"], row["producer_epoch"], row["first_sequence"]
        left = why.lost(*producer, row["records"], between)
        if left:
            line.wrong["lost"] += left
            self._note("lost", f"{read.topic}/{read.partition}: {_words(row)}", left)

    # --- subscriptions ----------------------------------------------------------------------

    def _subscribed(self, names: Sequence[str]) -> tuple[Cursors, dict[str, str]]:
        """Return the cursors of subscriptions that leave receipts, and the names of all audited
        topics by id."""
        facts = self._look(names) if names else TopicOffsets("", {})
        ids = {topic.id: name for name, topic in facts.topics.items()}
        by_name = {name: topic_id for topic_id, name in ids.items()}
        cursors: dict[tuple[str, str, int], int] = {}
        after: dict[str, str] = {}
        while True:
            page = self._http.get(
                "/v1/subscriptions", limit=shared_limits.HTTP_PAGE_ITEMS, **after
            ).json
            for each in page["subscriptions"]:
                if each["receipts"] and each["topic"] in by_name:
                    target = path_of("subscriptions", each["name"], "topics", each["topic"])
                    told = self._http.get(target).json
                    for partition, offset in enumerate(told["next_offsets"]):
                        cursors[each["name"], by_name[each["topic"]], partition] = offset
            if page["next"] is None:
                return cursors, ids
            after = {"after": page["next"]}

    def _audit_subscriptions(self, cursors: Cursors, topics: Mapping[str, str]) -> None:
        try:
            self._look([RECEIPTS_TOPIC])
        except UnknownTopic:
            why = f"there is no topic {RECEIPTS_TOPIC}"
        else:
            why = "of its receipts none is left"
            self._read_receipts(cursors, topics)
        with_receipts = {(topics[topic_id], name) for name, topic_id, _ in cursors}
        for topic, name in sorted(with_receipts - self._subscriptions.keys()):
            self._note("unproved", f"{topic} for {name}: {why}")

    def _read_receipts(self, cursors: Cursors, topics: Mapping[str, str]) -> None:
        self._job.tell("reading receipts")
        with _plans(self._survey) as plans:
            left = receipts(self._table(RECEIPTS_TOPIC, plans))
            left = left.where(f.col("topic_id").isin(list(topics))).persist()
            try:
                self._judge_deliveries(deliveries(left, cursors), topics)
                self._time(self._latencies(left, topics, plans), topics)
            finally:
                left.unpersist()

    def _latencies(
        self, left: DataFrame, topics: Mapping[str, str], plans: list[Plan]
    ) -> DataFrame:
        """Return the latencies that receipts hold, and those of entries that were archived before
        their receipt."""
        found = latencies(left)
        stretches = untimed(left)
        for row in stretches.select("topic_id").distinct().collect():
            topic_id = row["topic_id"]
            records = self._table(topics[topic_id], plans, fails=False)
            of_topic = stretches.where(f.col("topic_id") == topic_id)
            found = found.unionByName(latencies_of_records(of_topic, records))
        return found

    def _judge_deliveries(self, found: DataFrame, topics: Mapping[str, str]) -> None:
        for row in found.collect():
            topic = topics[row["topic_id"]]
            line = self._subscriptions.setdefault((topic, row["subscription"]), _Line())
            read = self._partitions.get((row["topic_id"], row["partition"]))
            if read is not None:  # a partition that was added during the audit is not judged
                self._judge_delivery(line, read, row)

    def _judge_delivery(self, line: _Line, read: Partition, row: Any) -> None:
        kind, span = row["kind"], Span(row["first_offset"], row["next_offset"])
        where = f"{read.topic}/{read.partition} for {row['subscription']}: {_offsets(span)}"
        count = row["records"]
        if kind == "taken":
            line.records += count
            return
        if kind in ("over", "untold"):
            count = read.records(*span)
            if kind == "untold":  # records deleted since then were there
                count += max(0, min(read.seen.first, span.next) - span.first)
            words = "passed without a receipt" if kind == "untold" else "gone over"
            kind = "lost"
        else:
            words = "let go of before they were taken" if kind == "lost" else "by its receipts"
        if count:
            line.wrong[kind] += count
            self._note(kind, f"{where}: {words}", count)

    def _time(self, latencies: DataFrame, topics: Mapping[str, str]) -> None:
        shares = ", ".join(map(str, PERCENTILES))
        by_subscription = latencies.groupBy("subscription", "topic_id")
        told = by_subscription.agg(
            f.expr(f"percentile(latency_ms, array({shares}), records)").alias("at"),
            f.max("latency_ms").alias("most"),
        )
        for row in told.collect():
            whose = topics[row["topic_id"]], row["subscription"]
            self._subscriptions[whose].latency_ms = [*row["at"], float(row["most"])]
        # Steps of 10 % are fine enough for a picture.
        step = f.expr("CAST(floor(log(1.1, greatest(latency_ms, 0) + 1)) AS INT)").alias("step")
        steps = latencies.groupBy("subscription", "topic_id", step).agg(f.sum("records").alias("n"))
        for row in steps.orderBy("step").collect():
            whose = topics[row["topic_id"]], row["subscription"]
            self._distribution.setdefault(whose, []).append((row["step"], row["n"]))

    # --- the report -------------------------------------------------------------------------

    def _note(self, kind: str, words: str, records: int = 1) -> None:
        self._counts[kind] += records
        if len(self._named[kind]) < self._options.named:
            self._named[kind].append(f"{words} ({records:,})" if records > 1 else words)
        elif len(self._named[kind]) == self._options.named:
            self._named[kind].append("…")

    def _made(self) -> Report:
        rows = [line.row(topic, None) for topic, line in sorted(self._topics.items())]
        rows += [line.row(*whose) for whose, line in sorted(self._subscriptions.items())]
        lines = [*self._topics.values(), *self._subscriptions.values()]
        is_good = all(line.is_good for line in lines) and "cut" not in self._counts
        facts: dict[str, Any] = {
            "verdict": "nothing was lost, doubled or reordered"
            if is_good
            else "found: " + ", ".join(f"{n:,} {kind}" for kind, n in sorted(self._counts.items()))
        }
        for kind, words in sorted(self._named.items()):
            facts |= {f"{kind} {number}": each for number, each in enumerate(words, 1)}
        columns = ["topic", "subscription", "records", *_WRONG, "explained", "unexplained"]
        columns += [f"p{100 * share:g}_ms" for share in PERCENTILES] + ["max_ms"]
        plot = self._draw if self._distribution else None
        return Report("audit", columns, rows, facts, is_good, plot)

    def _draw(self, axes: Any) -> None:
        """Draw the share of records that the subscriber had after each latency."""
        for (topic, subscription), steps in sorted(self._distribution.items()):
            total = sum(count for _, count in steps)
            milliseconds = [1.1 ** (step + 1) for step, _ in steps]
            shares = [sum(n for _, n in steps[: i + 1]) / total for i in range(len(steps))]
            axes.step(milliseconds, shares, where="post", label=f"{subscription}, {topic}")
        axes.set_xscale("log")
        axes.set_xlabel("from publish to delivery, ms")
        axes.set_ylabel("share of the records")
        axes.set_ylim(0, 1.02)
        axes.grid(True, alpha=0.3)
        axes.legend()


@contextmanager
def _plans(survey: BrokerMetadata) -> Iterator[list[Plan]]:
    """Yield a list of plans; release all plans in it when the block is left."""
    made: list[Plan] = []
    try:
        yield made
    except BaseException:
        # Report the first error. The broker may be the cause, so wait for it briefly and once, not
        # once for each plan.
        with Http(survey.access.http, limits.SPARK_STOP_MS) as broker, suppress(QuackError):
            for plan in made:
                release(broker, plan)
        raise
    for plan in made:
        release(survey.http, plan)


def _partition(
    topic: str, topic_id: str, partition: int, there: Span, rows: Sequence[Any]
) -> Partition:
    """Return what was read of a partition. `there` is the range that the broker reported when the
    reading began."""
    holes = [Span(row["first_offset"], row["next_offset"]) for row in rows if row["kind"] == "hole"]
    seen = next((row for row in rows if row["kind"] == "seen"), None)
    if seen is None:
        return Partition(topic, topic_id, partition, there, Spans([there] if there.size else []))
    read = Span(seen["first_offset"], seen["next_offset"])
    ends = [Span(there.first, read.first), Span(read.next, there.next)]
    holes += [span for span in ends if span.size > 0]
    whole = Span(min(there.first, read.first), max(there.next, read.next))
    return Partition(topic, topic_id, partition, whole, Spans(holes))


def _words(row: Any) -> str:
    if row["producer_id"] is None:
        return f"{_offsets(Span(row['first_offset'], row['next_offset']))} more than once"
    first, count = row["first_sequence"], row["records"]
    numbers = f"number {first}" if count == 1 else f"numbers {first} to {first + count - 1}"
    whose = f"{numbers} of producer {row['producer_id']}, epoch {row['producer_epoch']}"
    span = Span(row["first_offset"], row["next_offset"])
    if not span.size:
        return f"{whose}, before offset {span.first}"
    return f"{whose}, {'at' if span.size == count else 'among'} {_offsets(span)}"


def _offsets(span: Span) -> str:
    return f"offset {span.first}" if span.size == 1 else f"offsets {span.first} to {span.next - 1}"
