"""`trending` against plain Python: windows, growth, publishers, late entries; on a cluster, too.

What a stream should say is computed here from the entries alone: which of them came before their
window was closed, and what each window then has.
"""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession

from quackmq.errors import InvalidRequest, UnknownTopic
from quackmq.spark.pipelines import trending
from quackmq.spark.pipelines.job import Job
from tests.kit.server import Server
from tests.kit.waiting import wait_until
from tests.protocols.http.v1.serving import DEADLINE_S
from tests.spark.cluster import CONFIGS
from tests.spark.pipelines.conftest import RUN_S, command
from tests.spark.serving import Broker
from tests.spark.session import CONFIGS as SMALL

pytestmark = [pytest.mark.needs("java"), pytest.mark.timeout(1200)]

WINDOW_MS = 10_000
WATERMARK_MS = 15_000
#: The beginning of a window.
BEGIN_MS = 1_790_000_000_000
OPTIONS: dict[str, Any] = {
    "window": timedelta(milliseconds=WINDOW_MS),
    "watermark": timedelta(milliseconds=WATERMARK_MS),
}

#: Start and end of a window in ms, name, entries, entries before, publishers.
Row = tuple[int, int, str, int, int, int]


class Entry(NamedTuple):
    topic: str
    publisher: str
    at_ms: int


class Expected:
    """What `trending` has to say, in plain Python."""

    def __init__(self) -> None:
        self.counted: Counter[tuple[int, str, str]] = Counter()
        self.closed_ms = 0
        self.late = 0

    def take(self, entries: Iterable[Entry]) -> None:
        """One batch: what is late by what came before it is left out."""
        before_ms, entries = self.closed_ms, list(entries)
        for topic, publisher, at_ms in entries:
            start_ms = at_ms // WINDOW_MS * WINDOW_MS
            if start_ms + WINDOW_MS <= before_ms:
                self.late += 1
            else:
                self.counted[start_ms, topic, publisher] += 1
        latest_ms = max((entry.at_ms for entry in entries), default=0)
        self.closed_ms = max(before_ms, latest_ms - WATERMARK_MS)

    def rows(self, *, only_closed: bool) -> list[Row]:
        names = {(start_ms, name) for start_ms, name, _ in self.counted}
        windows = names | {(start_ms + WINDOW_MS, name) for start_ms, name in names}
        return sorted(
            self._row(start_ms, name)
            for start_ms, name in windows
            if not only_closed or start_ms + WINDOW_MS <= self.closed_ms
        )

    def _row(self, start_ms: int, name: str) -> Row:
        of = {
            at_ms: [
                n for (at, of_name, _), n in self.counted.items() if (at, of_name) == (at_ms, name)
            ]
            for at_ms in (start_ms, start_ms - WINDOW_MS)
        }
        now, before = of[start_ms], of[start_ms - WINDOW_MS]
        return start_ms, start_ms + WINDOW_MS, name, sum(now), sum(before), len(now)


def batches(seed: int) -> list[list[Entry]]:
    """Each goes on in time where the one before ended; out of order, with some entries that come
    too late, and some that are late and just in time."""
    chance = random.Random(seed)
    made: list[list[Entry]] = []
    for turn in range(3):
        base_ms = BEGIN_MS + turn * 40_000
        entries = [
            Entry(
                chance.choice(["quacks", "honks", "honks"]),
                chance.choice(["ann", "bob", "eve"]),
                base_ms + chance.randrange(40_000),
            )
            for _ in range(120)
        ]
        closed_ms = max((e.at_ms for batch in made for e in batch), default=0) - WATERMARK_MS
        if turn:
            edge_ms = closed_ms // WINDOW_MS * WINDOW_MS
            # The last that is too late, and the first that is not.
            entries += [Entry("quacks", "ann", edge_ms - 1), Entry("quacks", "ann", edge_ms)]
        chance.shuffle(entries)
        made.append(entries)
    return made


def publish(broker: Broker, prefix: str, entries: Sequence[Entry]) -> None:
    """Each publisher under its name, in one transaction."""
    for name in sorted({entry.publisher for entry in entries}):
        producer = Producer({"bootstrap.servers": broker.address, "transactional.id": name})
        producer.init_transactions(DEADLINE_S)
        producer.begin_transaction()
        for topic, publisher, at_ms in entries:
            if publisher == name:
                producer.produce(f"{prefix}{topic}", b"x", timestamp=at_ms)
        producer.commit_transaction(DEADLINE_S)


def results(broker: Broker, topic: str, prefix: str, first: int = 0) -> list[Row]:
    """What is in the results' topic from an entry on, in the order of windows."""
    found = []
    for _, _, value in broker.consumed(topic)[first:]:
        row = json.loads(value or b"")
        name = row["name"].removeprefix(prefix)
        times = (milliseconds(row[each]) for each in ("window_start", "window_end"))
        growth = row["entries"] / row["before"] - 1 if row["before"] else None
        assert row.get("growth") == (None if growth is None else pytest.approx(growth))
        found.append((*times, name, row["entries"], row["before"], row["publishers"]))
    return sorted(found)


def milliseconds(at: str | datetime) -> int:
    if isinstance(at, str):
        at = datetime.fromisoformat(at)
    return round(at.replace(tzinfo=UTC).timestamp() * 1000)


def rows_of(frame: DataFrame, prefix: str = "") -> list[Row]:
    return sorted(
        (
            milliseconds(row.window_start),
            milliseconds(row.window_end),
            row.name.removeprefix(prefix),
            row.entries,
            row.before,
            row.publishers,
        )
        for row in frame.collect()
    )


def frame_of(spark: SparkSession, entries: Iterable[Entry]) -> DataFrame:
    """Entries as the columns of a topic; one publisher has a number only, and one puts by keys."""
    rows = []
    for topic, publisher, at_ms in entries:
        at = datetime.fromtimestamp(at_ms / 1000, UTC)
        number = {"ann": 7, "bob": 8, "eve": 2**62 + at_ms}[publisher]
        name = "ann" if publisher == "ann" else None
        rows.append((topic, at, number, name, publisher.encode()))
    return spark.createDataFrame(rows, f"{trending.COLUMNS}, key binary")


# --- tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["topic", "publisher", "key"])
def test_windows_of_any_frame_are_those_that_python_counts(spark: SparkSession, by: str) -> None:
    entries = [entry for batch in batches(seed=7) for entry in batch]
    found = rows_of(trending.trending(frame_of(spark, entries), by=by, **OPTIONS).na.fill("nobody"))
    # Whoever puts by idempotency keys has signed nothing.
    name_of: dict[str, Callable[[Entry], str]] = {
        "topic": lambda entry: entry.topic,
        "key": lambda entry: entry.publisher,
        "publisher": lambda entry: {"ann": "ann", "bob": "producer 8"}.get(
            entry.publisher, "nobody"
        ),
    }
    expected = Expected()
    expected.take(entry._replace(topic=name_of[by](entry)) for entry in entries)
    rows = expected.rows(only_closed=False)
    unsigned = Counter(
        (entry.at_ms // WINDOW_MS * WINDOW_MS, name_of[by](entry))
        for entry in entries
        if entry.publisher == "eve"
    )
    signed = [(*row[:5], row[5] - bool(unsigned[row[0], row[2]])) for row in rows]
    assert found == signed


def test_a_stream_leaves_out_what_is_late_is_resumed_and_says_everything_once_s5(
    spark: SparkSession,
    broker: Broker,
    topic: str,
    job: Callable[[Path | None], Job],
    tmp_path: Path,
) -> None:
    """Three runs on one checkpoint; before the last, the end of the second is forgotten, as when
    it had been killed between the broker's commit and Spark's."""
    prefix, target, table = f"{topic}-", f"{topic}-trends", tmp_path / "table"
    for name in ("quacks", "honks", "trends"):
        broker.create(prefix + name)
    # What others have put there is none of the pipeline's results.
    broker.publish(target, ['{"name": "somebody else\'s"}'])
    options = trending.Options(
        topics=(f"{prefix}quacks", f"{prefix}honks"), to=target, table=table, **OPTIONS
    )
    expected = Expected()
    reports = []
    for turn, entries in enumerate(batches(seed=11)):
        publish(broker, prefix, entries)
        expected.take(entries)
        if turn == 2:
            forget_last_commit(tmp_path / "checkpoint" / "windows")
            forget_last_commit(tmp_path / "checkpoint" / "results")
        reports.append(trending.run(job(tmp_path / "checkpoint"), options))
    wanted = expected.rows(only_closed=True)
    assert expected.late == 2
    assert results(broker, target, prefix, first=1) == wanted
    assert rows_of(spark.read.parquet(str(table)), prefix) == wanted
    assert sum(report.facts["windows closed"] for report in reports) >= len({r[1] for r in wanted})
    # The last windows are in the report, with what they have.
    *_, last = reports
    assert {(milliseconds(row[1]), row[2], row[3]) for row in last.rows} <= {
        (row[1], prefix + row[2], row[3]) for row in wanted
    }
    assert last.rows


def forget_last_commit(checkpoint: Path) -> None:
    commits = checkpoint / "commits"
    last = max(int(each.name) for each in commits.iterdir() if each.name.isdigit())
    (commits / str(last)).unlink()
    (commits / f".{last}.crc").unlink(missing_ok=True)


def test_without_a_topic_the_stream_fills_the_table_itself(
    spark: SparkSession,
    broker: Broker,
    topic: str,
    job: Callable[[Path | None], Job],
    tmp_path: Path,
) -> None:
    prefix = f"{topic}-"
    for name in ("quacks", "honks"):
        broker.create(prefix + name)
    (entries, *_) = batches(seed=13)
    publish(broker, prefix, entries)
    options = trending.Options(pattern=f"{prefix}.*", table=tmp_path / "table", **OPTIONS)
    trending.run(job(tmp_path / "checkpoint"), options)
    expected = Expected()
    expected.take(entries)
    found = rows_of(spark.read.parquet(str(tmp_path / "table")), prefix)
    assert found == expected.rows(only_closed=True)


def test_what_cannot_be_is_said_before_spark_starts(
    broker: Broker, topic: str, tmp_path: Path
) -> None:
    """Jobs without a session: none is started."""
    broker.create(topic)
    job = Job(broker.address, once=True, checkpoint=tmp_path / "checkpoint", master="nobody")
    with pytest.raises(UnknownTopic, match="there is no topic nowhere|nowhere"):
        trending.run(job, trending.Options(topics=(topic, "nowhere")))
    with pytest.raises(UnknownTopic, match="nowhere"):
        trending.run(job, trending.Options(topics=(topic,), to="nowhere"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(InvalidRequest, match="mine is not of trending"):
        trending.run(job, trending.Options(topics=(topic,), table=tmp_path / "mine"))
    with pytest.raises(InvalidRequest, match="was begun with --window 1m, not 5s"):
        trending.run(job, trending.Options(topics=(topic,), window=timedelta(seconds=5)))
    other = Job(broker.address, once=True, checkpoint=tmp_path / "other", master="nobody")
    with pytest.raises(InvalidRequest, match="mine is not of trending"):
        trending.run(other, trending.Options(topics=(topic,), table=tmp_path / "mine"))


def test_the_command_runs_on_a_cluster_until_it_is_told_to_stop_s6(
    broker: Broker, topic: str, cluster: str, tmp_path: Path
) -> None:
    prefix, target = f"{topic}-", f"{topic}-trends"
    for name in ("quacks", "honks", "trends"):
        broker.create(prefix + name)
    (entries, *_) = batches(seed=17)
    expected = Expected()
    expected.take(entries)
    wanted = expected.rows(only_closed=True)
    publish(broker, prefix, entries)
    configs = {**CONFIGS, **SMALL}
    arguments = [
        *("trending", "--topics", f"{prefix}quacks,{prefix}honks", "--to", target, "--json"),
        *("--window", f"{WINDOW_MS}ms", "--watermark", f"{WATERMARK_MS}ms"),
        *("--broker", broker.address, "--master", cluster, "--spark-log", "error"),
        *("--checkpoint", str(tmp_path / "checkpoint"), "--table", str(tmp_path / "table")),
        *(word for name, value in configs.items() for word in ("--conf", f"{name}={value}")),
    ]
    with command(*arguments) as running:
        wait_until(
            lambda: is_there(running, broker, target, len(wanted)), deadline_s=RUN_S, pause_s=1
        )
        running.send(signal.SIGTERM)
        code = running.process.wait(timeout=RUN_S)
        assert code == 0, running.errors()
        report = json.loads("".join(iter(running.line, "")))
    assert results(broker, target, prefix) == wanted
    assert report["facts"]["entries read"] == len(entries)
    told = {(row["window_end"], row["name"], row["entries"]) for row in report["rows"]}
    assert len(told) == len(wanted)


def is_there(running: Server, broker: Broker, topic: str, count: int) -> bool:
    assert running.process.poll() is None, running.errors()
    return len(broker.consumed(topic)) >= count
