"""`trending`: count the entries and publishers of topics in each window of time, and their growth.

Windows follow each other without a gap, by the timestamps of the entries. A window closes when an
entry comes that is later than its end by the watermark. Entries that come for a closed window are
late, and are not counted.

Results go to a topic, exactly once, by our streaming sink: the query's checkpoint and the broker
agree on which batches are published. A second stream reads that topic and fills a Parquet table and
the terminal. Each of its batches is a directory, which a repeated batch overwrites. Without a topic
the first stream fills the table itself.

Growth needs the window before, at almost no extra cost. Entries are first counted by window and
publisher. The few resulting rows are then counted by pairs of neighbouring windows. Each pair
begins with the second window of the pair before.

A window whose end the watermark has not reached has no result yet. It stays in the checkpoint until
later entries close it.
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
from quackmq.spark.pipelines.closed_windows import ClosedWindows, draw
from quackmq.spark.pipelines.job import Job
from quackmq.spark.pipelines.options import format_span, option
from quackmq.spark.pipelines.output_directory import claim
from quackmq.spark.pipelines.report import Report
from quackmq.spark.source.options import batch_options

SUMMARY: Final = "count entries, publishers and growth of topics by window of time"
NAME: Final = "trending"

#: The values of `by`, and the column that each needs besides `COLUMNS`.
BY: Final[Mapping[str, str | None]] = {"topic": None, "publisher": None, "key": "key binary"}
COLUMNS: Final = "topic string, timestamp timestamp, producer_id bigint, publisher string"
#: The fields of a result: in the JSON of its topic, and as columns of the table.
RESULT: Final = (
    "window_start timestamp, window_end timestamp, name string, entries bigint, before bigint, "
    "growth double, publishers bigint"
)
#: The record header that holds the id of the pipeline's run.
HEADER: Final = "pipeline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    topics: tuple[str, ...] = option("topics to read", default=(), metavar="TOPIC,…")
    pattern: str | None = option(
        "or all topics whose names match, also later ones", default=None, metavar="REGEX"
    )
    by: str = option("what entries are counted by", default="topic", choices=tuple(BY))
    window: timedelta = option("how long a window is", default=timedelta(minutes=1))
    watermark: timedelta = option(
        "how late entries may come", default=timedelta(minutes=1), metavar="SPAN"
    )
    start: str = option("where to start", default="earliest", choices=("earliest", "latest"))
    to: str | None = option("topic for the results, exactly once", default=None, metavar="TOPIC")
    table: Path | None = option("directory for the results as Parquet", default=None, metavar="DIR")
    top: int = option("how many names of each window the report has", default=10)


def trending(
    df: DataFrame,
    *,
    window: timedelta = timedelta(minutes=1),
    watermark: timedelta = timedelta(minutes=1),
    by: str = "topic",
) -> DataFrame:
    """Return a row for each window and name that has entries in this window or the one before.

    The columns are the `entries` of the window, the entries of the window `before`, their `growth`
    (0.5 is 50 % more; null if the window before had none), and the number of `publishers`. `df`
    needs the columns of a topic, at least `COLUMNS`. It may be a stream, with the output mode
    `append`. Raise InvalidRequest for an unknown `by`."""
    if by not in BY:
        raise InvalidRequest(f"by cannot be {by!r}: it is one of {', '.join(BY)}")
    length, pair = (_to_microseconds(span) for span in (window, 2 * window))
    counted = (
        df.withColumn("number", _unnamed_producer())
        .withWatermark("timestamp", _to_microseconds(watermark))
        .groupBy(f.window("timestamp", length), "publisher", "number", *_GROUP_COLUMNS[by])
        .agg(f.count(f.lit(1)).alias("entries"))
    )
    paired = counted.select(
        f.window("window", pair, length).alias("pair"),
        "window",
        _counted_name(by).alias("name"),
        _publisher_name().alias("publisher"),
        "entries",
    )
    is_second = f.col("window.start") > f.col("pair.start")
    entries, before = (
        f.coalesce(f.sum(f.when(is_in_window, f.col("entries"))), f.lit(0))
        for is_in_window in (is_second, ~is_second)
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
    """Run until the job is stopped; with `once`, up to the records that exist now."""
    with ExitStack() as cleanup:
        state = _prepare(job, options, cleanup)
        closed_windows = ClosedWindows(job, options.table, options.top)
        windows = _read_windows(job, options, state)
        if options.to is None:
            query = _start(job, windows, state.checkpoint / "windows", closed_windows)
            streamed = job.run_stream(query)
        else:
            queries = [_publish(job, options, state, windows)]
            if not job.once:
                queries.append(_follow(job, options, state, closed_windows, once=False))
            streamed = job.run_stream(*queries)
            # The first stream has ended. Read the results that it published last.
            job.finish(_follow(job, options, state, closed_windows, once=True))
    facts = {
        "entries read": streamed.rows,
        "windows closed": closed_windows.windows,
        "late groups left out": streamed.late,
        "results in topic": options.to,
        "results in table": options.table,
    }
    return Report(
        f"entries by {options.by}, in windows of {format_span(options.window)}",
        closed_windows.columns,
        closed_windows.rows(),
        {name: value for name, value in facts.items() if value is not None},
        plot=lambda axes: draw(axes, closed_windows.rows()),
    )


# --- preparation ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RunState:
    """The id of a run, and where its checkpoint and its results are."""

    checkpoint: Path
    id: str
    #: The end of the results' topic before the first result, as `startingOffsets`.
    results_start: str | None
    is_permanent: bool


def _prepare(job: Job, options: Options, cleanup: ExitStack) -> _RunState:
    """Check all options before Spark starts; return the state of the run. Raise InvalidRequest,
    UnknownTopic."""
    if bool(options.topics) == (options.pattern is not None):
        raise InvalidRequest("trending reads --topics TOPIC,… or --pattern REGEX: give one of them")
    if options.top < 1:
        raise InvalidRequest("--top is at least 1")
    checkpoint, is_permanent = job.checkpoint, job.checkpoint is not None
    if checkpoint is None:
        if options.to is not None or options.table is not None:
            raise InvalidRequest(
                "trending needs --checkpoint DIR, where it stores which results it has published"
            )
        checkpoint = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="quackmq-")))
    job.wait_for_broker()
    # Raise UnknownTopic for a named topic before Spark starts.
    _fetch_ends({**job.broker, **_selection_options(options)})
    results_start = None
    if options.to is not None:
        results_start = json.dumps(_fetch_ends({**job.broker, "subscribe": options.to}))
    # The state of a query depends on these options: it cannot continue with others.
    fixed = {
        "topics": sorted(options.topics),
        "pattern": options.pattern,
        "by": options.by,
        "window": format_span(options.window),
        "to": options.to,
    }
    stored_facts = claim(
        checkpoint, NAME, {**fixed, "id": str(uuid.uuid4()), "begins": results_start}
    )
    for name, value in fixed.items():
        if stored_facts.get(name) != value:
            raise InvalidRequest(
                f"{checkpoint} was begun with --{name} {_format_value(stored_facts.get(name))}, "
                f"not {_format_value(value)}: give the same option, or another --checkpoint"
            )
    if options.table is not None:
        table = claim(options.table, NAME, {"id": stored_facts["id"]})
        if table.get("id") != stored_facts["id"]:
            raise InvalidRequest(
                f"{options.table} was filled with another checkpoint than {checkpoint}: give that "
                "checkpoint, or another --table"
            )
    return _RunState(checkpoint, stored_facts["id"], stored_facts["begins"], is_permanent)


def _fetch_ends(options: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Return the end of each partition of the selected topics. Raise UnknownTopic, QuackTimeout."""
    metadata = BrokerMetadata(batch_options(options))
    try:
        ends = metadata.fetch().ends()
    finally:
        metadata.close()
    return {
        topic: {str(partition): end for partition, end in position.offsets.items()}
        for topic, position in ends.items()
    }


def _format_value(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


# --- streams -------------------------------------------------------------------------------------


def _selection_options(options: Options) -> dict[str, str]:
    if options.pattern is not None:
        return {"subscribePattern": options.pattern}
    return {"subscribe": ",".join(options.topics)}


def _read_windows(job: Job, options: Options, state: _RunState) -> DataFrame:
    """Return the stream of results. A batch reads all available records of all topics.
    Otherwise a batch with a part of each topic could close windows that the rest of another
    topic belongs to."""
    extra_column = BY[options.by]
    source = (
        job.spark.readStream.format("quackmq")
        .schema(COLUMNS if extra_column is None else f"{COLUMNS}, {extra_column}")
        .options(**job.broker, **_selection_options(options), startingOffsets=options.start)
        # Nothing continues from a temporary checkpoint, so it must not hold records.
        .option("holdRetention", state.is_permanent)
        .load()
    )
    return trending(source, window=options.window, watermark=options.watermark, by=options.by)


def _publish(job: Job, options: Options, state: _RunState, windows: DataFrame) -> StreamingQuery:
    """Start the stream that writes the results to their topic, by our own sink."""
    run_id = f.encode(f.lit(state.id), "utf-8")
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
        .option("checkpointLocation", str(state.checkpoint / "windows"))
    )
    return job.start(writer.trigger(availableNow=True) if job.once else writer)


def _follow(
    job: Job, options: Options, state: _RunState, closed_windows: ClosedWindows, *, once: bool
) -> StreamingQuery:
    """Start the stream that reads this run's results from their topic into the table and onto the
    terminal."""
    source = (
        job.spark.readStream.format("quackmq")
        .schema("value binary, headers array<struct<key:string,value:binary>>")
        .options(
            **job.broker,
            subscribe=str(options.to),
            startingOffsets=str(state.results_start),
            includeHeaders="true",
        )
        .load()
    )
    is_of_run = f.expr(
        f"exists(headers, h -> h.key = '{HEADER}' AND h.value = binary('{state.id}'))"
    )
    parsed = f.from_json(f.col("value").cast("string"), RESULT)
    results = source.where(is_of_run).select(parsed.alias("result")).select("result.*")
    return _start(job, results, state.checkpoint / "results", closed_windows, once=once)


def _start(
    job: Job,
    results: DataFrame,
    checkpoint: Path,
    closed_windows: ClosedWindows,
    *,
    once: bool | None = None,
) -> StreamingQuery:
    """Start a stream that adds its results to `closed_windows`. `once` takes precedence over the
    job's own setting."""
    writer = results.writeStream.foreachBatch(closed_windows.add_batch).option(
        "checkpointLocation", str(checkpoint)
    )
    is_once = job.once if once is None else once
    return job.start(writer.trigger(availableNow=True) if is_once else writer)


# --- columns -------------------------------------------------------------------------------------

#: The columns to group by, besides the publisher.
_GROUP_COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "topic": ("topic",),
    "publisher": (),
    "key": ("key",),
}


def _unnamed_producer() -> Column:
    """Return the producer id of a publisher without a name. It is null if the entry has no
    publisher: for example a put over HTTP that was not numbered."""
    is_producer_id = f.col("producer_id").between(0, FIRST_KEY_ID - 1)
    return f.when(f.col("publisher").isNull() & is_producer_id, f.col("producer_id"))


def _publisher_name() -> Column:
    """Return the publisher by name or by number. Apply it to counted rows, which are few."""
    return f.coalesce(f.col("publisher"), f.concat(f.lit("producer "), f.col("number")))


def _counted_name(by: str) -> Column:
    """Return the column of the name that entries are counted by."""
    match by:
        case "publisher":
            return _publisher_name()
        case "key":
            return f.col("key").cast("string")
    return f.col("topic")


def _to_microseconds(span: timedelta) -> str:
    return f"{span // timedelta(microseconds=1)} microseconds"
