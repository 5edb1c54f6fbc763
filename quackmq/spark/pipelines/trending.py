"""`trending`: entries and publishers of topics in each window of time, and how they grow.

Windows lie side by side and follow the entries' own times. A window is closed when an entry comes
that is later than its end by the watermark; what comes for it after that is late, and left out.

Results go to a topic, exactly once, by our streaming sink: the query's checkpoint and the broker
agree on which batches are there. A Parquet table and the terminal are filled by a second stream,
which reads that topic; its batches are directories, written over where one is repeated. Without a
topic the first stream fills the table itself.

Growth needs the window before, and costs nothing more than the counts do. Entries are counted by
window and publisher first; the few rows that this makes are counted again by pairs of windows, each
beginning where the second half of the one before does.

Not promised: a window whose end no watermark has reached. It stays in the checkpoint until later
entries close it.
"""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from quackmq.errors import InvalidRequest
from quackmq.model.producer_state import FIRST_KEY_ID
from quackmq.spark.broker.metadata import BrokerMetadata
from quackmq.spark.pipelines.closed_windows import Trends, draw
from quackmq.spark.pipelines.job import Job
from quackmq.spark.pipelines.options import option, spelt
from quackmq.spark.pipelines.output_directory import claim
from quackmq.spark.pipelines.report import Report
from quackmq.spark.source.options import batch_options

SUMMARY: Final = "entries, publishers and growth of topics by window, as they come"
NAME: Final = "trending"

#: What is counted, and the column that it needs beside these.
BY: Final[Mapping[str, str | None]] = {"topic": None, "publisher": None, "key": "key binary"}
COLUMNS: Final = "topic string, timestamp timestamp, producer_id bigint, publisher string"
#: Of a result, as JSON in its topic and as columns of the table.
RESULT: Final = (
    "window_start timestamp, window_end timestamp, name string, entries bigint, before bigint, "
    "growth double, publishers bigint"
)
#: The header that says which run of the pipeline a result is of.
HEADER: Final = "pipeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    topics: tuple[str, ...] = option("topics to read", default=(), metavar="TOPIC,…")
    pattern: str | None = option(
        "or all topics whose names match, also later ones", default=None, metavar="REGEX"
    )
    by: str = option("what is counted", default="topic", choices=tuple(BY))
    window: timedelta = option("how long a window is", default=timedelta(minutes=1))
    watermark: timedelta = option(
        "how late entries may come", default=timedelta(minutes=1), metavar="SPAN"
    )
    start: str = option("where to begin", default="earliest", choices=("earliest", "latest"))
    to: str | None = option("topic for the results, exactly once", default=None, metavar="TOPIC")
    table: Path | None = option("directory for the results as Parquet", default=None, metavar="DIR")
    top: int = option("names of each window that the report has", default=10)


def trending(
    df: DataFrame,
    *,
    window: timedelta = timedelta(minutes=1),
    watermark: timedelta = timedelta(minutes=1),
    by: str = "topic",
) -> DataFrame:
    """A row for each window and name that has entries in it or in the window before: `entries`,
    those of the window `before`, their `growth` (0.5 is half as many again; null where there were
    none), and how many `publishers` there were. `df` has the columns of a topic, `COLUMNS` at
    least; it may be a stream, for the output mode `append`."""
    if by not in BY:
        raise InvalidRequest(f"by cannot be {by!r}: it is one of {', '.join(BY)}")
    length, pair = (_micros(span) for span in (window, 2 * window))
    counted = (
        df.withColumn("number", _number())
        .withWatermark("timestamp", _micros(watermark))
        .groupBy(f.window("timestamp", length), "publisher", "number", *_COLUMN[by])
        .agg(f.count(f.lit(1)).alias("entries"))
    )
    paired = counted.select(
        f.window("window", pair, length).alias("pair"),
        "window",
        _name(by).alias("name"),
        _publisher().alias("publisher"),
        "entries",
    )
    is_second = f.col("window.start") > f.col("pair.start")
    entries, before = (
        f.coalesce(f.sum(f.when(half, f.col("entries"))), f.lit(0))
        for half in (is_second, ~is_second)
    )
    return (
        paired.groupBy("pair", "name")
        .agg(
            entries.alias("entries"),
            before.alias("before"),
            f.count(f.when(is_second, f.col("publisher"))).alias("publishers"),
        )
        .select(
            (f.col("pair.start") + f.expr(f"INTERVAL {length}")).alias("window_start"),
            f.col("pair.end").alias("window_end"),
            "name",
            "entries",
            "before",
            (f.try_divide(f.col("entries"), f.col("before")) - 1).alias("growth"),
            "publishers",
        )
    )


def run(job: Job, options: Options) -> Report:
    """Until it is stopped, or `once` up to what there is now."""
    with ExitStack() as kept:
        place = _begun(job, options, kept)
        trends = Trends(job, options.table, options.top)
        windows = _windows(job, options, place)
        if options.to is None:
            query = _start(job, windows, place.checkpoint / "windows", trends)
            streamed = job.run_stream(query)
        else:
            queries = [_publish(job, options, place, windows)]
            if not job.once:
                queries.append(_follow(job, options, place, trends, once=False))
            streamed = job.run_stream(*queries)
            job.finish(_follow(job, options, place, trends, once=True))
    facts = {
        "entries read": streamed.rows,
        "windows closed": trends.windows,
        "late groups left out": streamed.late,
        "results in topic": options.to,
        "results in table": options.table,
    }
    return Report(
        f"entries by {options.by}, in windows of {spelt(options.window)}",
        trends.columns,
        trends.rows(),
        {name: value for name, value in facts.items() if value is not None},
        plot=lambda axes: draw(axes, trends.rows()),
    )


# --- before it begins ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a run keeps what it must remember, and what it is called."""

    checkpoint: Path
    id: str
    #: Where the results' topic ended before there were any, as `startingOffsets`.
    begins: str | None
    is_kept: bool


def _begun(job: Job, options: Options, kept: ExitStack) -> _Place:
    """Everything that can be said against it is said here, before Spark starts."""
    if bool(options.topics) == (options.pattern is not None):
        raise InvalidRequest("trending reads --topics TOPIC,… or --pattern REGEX: give one of them")
    if options.top < 1:
        raise InvalidRequest("--top is at least 1")
    checkpoint, is_kept = job.checkpoint, job.checkpoint is not None
    if checkpoint is None:
        if options.to is not None or options.table is not None:
            raise InvalidRequest(
                "trending needs --checkpoint DIR, where it remembers which results are out already"
            )
        checkpoint = Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="quackmq-")))
    _ends({**job.broker, **_which(options)})
    begins = None
    if options.to is not None:
        begins = json.dumps(_ends({**job.broker, "subscribe": options.to}))
    # What a query was begun with is in its state: with other windows it would be another one.
    fixed = {
        "topics": sorted(options.topics),
        "pattern": options.pattern,
        "by": options.by,
        "window": spelt(options.window),
        "to": options.to,
    }
    told = claim(checkpoint, NAME, {**fixed, "id": str(uuid.uuid4()), "begins": begins})
    for name, value in fixed.items():
        if told.get(name) != value:
            raise InvalidRequest(
                f"{checkpoint} was begun with --{name} {_shown(told.get(name))}, not "
                f"{_shown(value)}: go on with that, or give another --checkpoint"
            )
    if options.table is not None:
        table = claim(options.table, NAME, {"id": told["id"]})
        if table.get("id") != told["id"]:
            raise InvalidRequest(
                f"{options.table} was filled under another checkpoint than {checkpoint}: give that "
                "one, or another --table"
            )
    return _Place(checkpoint, told["id"], told["begins"], is_kept)


def _ends(given: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Where each partition of these topics ends now. UnknownTopic, QuackTimeout."""
    survey = BrokerMetadata(batch_options(given))
    try:
        ends = survey.look().ends()
    finally:
        survey.close()
    return {
        topic: {str(partition): end for partition, end in of.offsets.items()}
        for topic, of in ends.items()
    }


def _shown(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


# --- streams -------------------------------------------------------------------------------------


def _which(options: Options) -> dict[str, str]:
    if options.pattern is not None:
        return {"subscribePattern": options.pattern}
    return {"subscribe": ",".join(options.topics)}


def _windows(job: Job, options: Options, place: _Place) -> DataFrame:
    """All there is at once: a batch that had a part of each history would close windows that the
    rest of another topic belongs to."""
    more = BY[options.by]
    source = (
        job.spark.readStream.format("quackmq")
        .schema(COLUMNS if more is None else f"{COLUMNS}, {more}")
        .options(**job.broker, **_which(options), startingOffsets=options.start)
        # Of a checkpoint that is thrown away, nobody comes back for the rest.
        .option("holdRetention", place.is_kept)
        .load()
    )
    return trending(source, window=options.window, watermark=options.watermark, by=options.by)


def _publish(job: Job, options: Options, place: _Place, windows: DataFrame) -> StreamingQuery:
    """Results to their topic, by our own sink."""
    run_id = f.encode(f.lit(place.id), "utf-8")
    header = f.struct(f.lit(HEADER).alias("key"), run_id.alias("value"))
    results = windows.select(
        f.col("name").alias("key"),
        f.to_json(f.struct(*windows.columns)).alias("value"),
        f.col("window_end").alias("timestamp"),
        f.array(header).alias("headers"),
    )
    writer = (
        results.writeStream.format("quackmq")
        .options(**job.broker, topic=str(options.to))
        .option("checkpointLocation", str(place.checkpoint / "windows"))
    )
    return job.start(writer.trigger(availableNow=True) if job.once else writer)


def _follow(
    job: Job, options: Options, place: _Place, trends: Trends, *, once: bool
) -> StreamingQuery:
    """Results of ours out of their topic, into the table and onto the terminal."""
    source = (
        job.spark.readStream.format("quackmq")
        .schema("value binary, headers array<struct<key:string,value:binary>>")
        .options(
            **job.broker,
            subscribe=str(options.to),
            startingOffsets=str(place.begins),
            includeHeaders="true",
        )
        .load()
    )
    of_run = f.expr(f"exists(headers, h -> h.key = '{HEADER}' AND h.value = binary('{place.id}'))")
    parsed = f.from_json(f.col("value").cast("string"), RESULT)
    results = source.where(of_run).select(parsed.alias("result")).select("result.*")
    return _start(job, results, place.checkpoint / "results", trends, once=once)


def _start(
    job: Job,
    results: DataFrame,
    checkpoint: Path,
    trends: Trends,
    *,
    once: bool | None = None,
) -> StreamingQuery:
    writer = results.writeStream.foreachBatch(trends.take).option(
        "checkpointLocation", str(checkpoint)
    )
    is_once = job.once if once is None else once
    return job.start(writer.trigger(availableNow=True) if is_once else writer)


# --- columns -------------------------------------------------------------------------------------

#: What is counted by, beside who has published it.
_COLUMN: Final[Mapping[str, tuple[str, ...]]] = {
    "topic": ("topic",),
    "publisher": (),
    "key": ("key",),
}


def _number() -> Column:
    """Of a publisher that has no name. Null where nobody has signed the entry: a put over HTTP
    that was not numbered, for instance."""
    is_given = f.col("producer_id").between(0, FIRST_KEY_ID - 1)
    return f.when(f.col("publisher").isNull() & is_given, f.col("producer_id"))


def _publisher() -> Column:
    """By name or by number; made of counted rows, which are few."""
    return f.coalesce(f.col("publisher"), f.concat(f.lit("producer "), f.col("number")))


def _name(by: str) -> Column:
    match by:
        case "publisher":
            return _publisher()
        case "key":
            return f.col("key").cast("string")
    return f.col("topic")


def _micros(span: timedelta) -> str:
    return f"{span // timedelta(microseconds=1)} microseconds"
