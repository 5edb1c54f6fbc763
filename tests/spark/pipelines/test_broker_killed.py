"""A broker killed in the middle of a pipeline: one sentence, exit code 1, nothing half published.

The broker is a process of its own, killed by SIGKILL at a point that the pipeline has come to, and
started again at the same addresses; then the same command is run again, and the result is right.
Pipelines run by their command, on the module's session, and wait less for a broker than users do.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from confluent_kafka import Producer

from quackmq.cli import pipeline as command
from quackmq.cli.main import main
from quackmq.spark import limits as spark_limits
from quackmq.spark.broker import http as connection
from quackmq.spark.pipelines import closed_windows as trends
from quackmq.spark.pipelines import compact, replay
from quackmq.spark.pipelines.job import Job, StreamCounts
from quackmq.spark.pipelines.workers import processes as workers
from tests.kit.server import Server
from tests.kit.waiting import wait_until
from tests.protocols.http.v1.serving import DEADLINE_S, Client
from tests.spark.addresses import reserved
from tests.spark.pipelines.parquet_files import fetched
from tests.spark.pipelines.struck_compaction import offered
from tests.spark.session import STARVED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [pytest.mark.needs("java"), pytest.mark.timeout(1200)]

#: How long a broker is waited for here.
RETRY_MS = 2_000
#: `quackmq`, whose broker merges no files by itself: it would be faster than what is tested.
SERVE = [
    *(sys.executable, "-c"),
    "import sys; from quackmq.broker import limits; limits.MERGE_INTERVAL_MS = 3_600_000; "
    "from quackmq.cli.main import main; sys.exit(main(sys.argv[1:]))",
]
_numbers = count(1)


class Pond:
    """A broker that is killed, and comes back with what it had."""

    def __init__(self, data: Path, kafka: str, http: str) -> None:
        self.address, self.http = kafka, http
        self._arguments = ("serve", "--data", data, "--kafka", kafka, "--http", http)
        self._server: Server | None = None

    def serve(self) -> None:
        self._server = Server(*self._arguments, command=SERVE, environment=dict(os.environ))
        self._server.ready()

    @property
    def is_there(self) -> bool:
        return self._server is not None

    def kill(self) -> None:
        if self._server is not None:
            self._server.__exit__(None, None, None)
            self._server = None

    def ask(self, method: str, path: str, value: object = None) -> Any:
        host, _, port = self.http.rpartition(":")
        client = Client(host, int(port))
        try:
            answer = client.ask(method, f"/v1/{path}", value)
            assert answer.status < 300, answer
            return answer.json if answer.body else None
        finally:
            client.close()

    def create(self, *topics: str) -> None:
        """Archived when they are told to be."""
        policy = {"archive_after_ms": None, "archive_bytes": None}
        for name in topics:
            self.ask("POST", "topics", {"name": name, "policy": policy})

    def publish(
        self, topic: str, values: Sequence[str], first_ms: int = 0, step_ms: int = 1
    ) -> None:
        producer = Producer({"bootstrap.servers": self.address, "linger.ms": 20})
        for at, value in enumerate(values):
            producer.produce(topic, value, partition=0, timestamp=first_ms + at * step_ms)
        assert producer.flush(DEADLINE_S) == 0

    def values(self, topic: str) -> list[str]:
        path = f"topics/{topic}/partitions/0/messages?offset=0&limit=1000"
        return [each["value"] for each in self.ask("GET", path)["messages"]]


class Told(NamedTuple):
    """How a command ended, what it printed, and its last line on stderr."""

    code: int
    report: str
    sentence: str


Run = Callable[..., Told]


@pytest.fixture(scope="module")
def pond(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pond]:
    with ExitStack() as kept:
        kafka, http = (kept.enter_context(reserved()) for _ in range(2))
        made = Pond(tmp_path_factory.mktemp("pond") / "data", kafka, http)
        kept.callback(made.kill)
        yield made


@pytest.fixture
def name(pond: Pond) -> str:
    """Of a topic that no other test has, of a broker that is there."""
    pond.kill()
    pond.serve()
    return f"ducks-{next(_numbers)}"


@pytest.fixture
def run(pond: Pond, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`quackmq pipeline run …`, whose Spark is there already; once more, where Spark was not
    patient enough with a Python process, which says nothing of ours."""

    class Here(Job):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, spark=spark, output=errors, **settings)

        @property
        def broker(self) -> dict[str, str]:
            # Who knows the address need not ask for it, which a busy broker may answer too late.
            short = {"quackmq.http.address": pond.http, "retryTimeoutMs": str(RETRY_MS)}
            return {**super().broker, **short}

    def find(bootstrap: str, *_: Any) -> connection.Access:
        patience_ms = spark_limits.SPARK_RETRY_MS if pond.is_there else RETRY_MS
        return replace(found(bootstrap, retry_ms=patience_ms), retry_ms=RETRY_MS)

    found = connection.find_broker
    errors = io.StringIO()
    printed = io.StringIO()
    monkeypatch.setattr(command, "Job", Here)
    monkeypatch.setattr(connection, "find_broker", find)
    monkeypatch.setattr(compact, "find_broker", find)

    def told(*arguments: str | Path) -> Told:
        while True:
            for output in (errors, printed):
                output.seek(0)
                output.truncate()
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stderr", errors)
                patch.setattr(sys, "stdout", printed)
                words = [*map(str, arguments), "--broker", pond.address, "--json"]
                code = main(["pipeline", "run", *words])
            if STARVED not in errors.getvalue():
                break
        *progress, last = errors.getvalue().splitlines() or [""]
        assert not any("quackmq:" in line or "Traceback" in line for line in progress), progress
        return Told(code, printed.getvalue(), last)

    return told


def assert_told(told: Told) -> None:
    """One sentence, which says who is away, and no report."""
    assert (told.code, told.report) == (1, "")
    assert told.sentence.startswith(f"quackmq: waited {RETRY_MS // 1000} s for "), told
    assert "127.0.0.1:" in told.sentence


def once(kill: Callable[[], None]) -> Callable[[], None]:
    """Which does it the first time."""
    left = [kill]

    def struck() -> None:
        if left:
            left.pop()()

    return struck


# --- batches -------------------------------------------------------------------------------------


def test_a_replay_is_gone_on_with_and_no_portion_is_there_twice_or_in_part(
    pond: Pond, name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again, values = f"{name}-again", [str(at) for at in range(40)]
    pond.create(name, again)
    pond.publish(name, values)
    remember, strike = replay._store_progress, once(pond.kill)

    def struck(directory: Path | None, done: replay._Progress) -> None:
        remember(directory, done)
        if done.portions == 2:
            strike()

    monkeypatch.setattr(replay, "_store_progress", struck)
    arguments = [
        *("replay", "--topic", name, "--to-topic", again),
        *("--portion", "10", "--checkpoint", tmp_path / "checkpoint"),
    ]
    assert_told(run(*arguments))
    pond.serve()
    assert pond.values(again) == values[:20]
    told = run(*arguments)
    assert (told.code, json.loads(told.report)["facts"]["of them by earlier runs"]) == (0, 2)
    assert pond.values(again) == values


def test_a_compaction_leaves_the_archive_as_it_was_and_is_gone_on_with(
    pond: Pond, name: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pond.create(name)
    for number in range(6):
        pond.publish(name, [f"{number}.{each}" for each in range(20)])
        pond.ask("POST", f"topics/{name}/archive/now")
    before, expected = files_of(pond, name), rows(files_of(pond, name))
    strike = once(pond.kill)
    # All is planned, and nothing offered.
    monkeypatch.setattr(compact._Compaction, "_show_progress", lambda *_: strike())
    assert_told(run("compact", "--topics", name))
    pond.serve()
    assert files_of(pond, name) == before
    told = run("compact", "--topics", name)
    (row,) = json.loads(told.report)["rows"]
    assert (told.code, row["files before"], row["files after"]) == (0, 6, 1)
    assert rows(files_of(pond, name)) == expected
    wait_until(lambda: offered(Path(before[0]).parent) == [])


def files_of(pond: Pond, topic: str) -> list[str]:
    told = pond.ask("GET", f"topics/{topic}/archive")
    (partition,) = told["partitions"]
    return [os.path.join(told["directory"], "0", file["name"]) for file in partition["files"]]


def rows(files: list[str]) -> list[tuple[Any, ...]]:
    """By a reader that knows nothing of brokers."""
    found = f'SELECT "offset", value FROM read_parquet({files}) ORDER BY "offset"'
    return fetched(found)


def test_an_audit_proves_nothing_and_says_so(
    pond: Pond, name: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data was read by Spark, and the broker is to explain its holes."""
    pond.create(name)
    pond.publish(name, ["a", "b"])
    pond.ask("POST", f"topics/{name}/archive/now")
    producer = Producer({"bootstrap.servers": pond.address, "transactional.id": name})
    producer.init_transactions(DEADLINE_S)
    producer.begin_transaction()
    producer.produce(name, "never")
    assert producer.flush(DEADLINE_S) == 0
    producer.abort_transaction(DEADLINE_S)
    pond.publish(name, ["c"])
    tell, strike = Job.show_progress, once(pond.kill)

    def struck(self: Job, text: str) -> None:
        tell(self, text)
        if text.startswith("asking the broker about "):
            strike()

    monkeypatch.setattr(Job, "show_progress", struck)
    assert_told(run("audit", "--topics", name))
    pond.serve()
    told = run("audit", "--topics", name)
    (row,) = json.loads(told.report)["rows"]
    assert told.code == 0
    assert (row["records"], row["lost"], row["explained"], row["unexplained"]) == (3, 0, 2, 0)


# --- with workers of their own -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pipeline", "more"),
    [
        ("metrics", ("--processes", "2", "--operations", "1000000", "--topic", "measured")),
        ("simulate", ("--workers", "2", "--requests", "6", "--customers", "300000000")),
    ],
)
def test_workers_are_ended_and_who_started_them_says_once_why(
    pond: Pond,
    name: str,
    run: Run,
    pipeline: str,
    more: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Each of them would wait for every message; what they say is the process's own stderr."""
    monkeypatch.setattr(spark_limits, "PIPELINE_AWAY_MS", RETRY_MS)
    tell, strike = Job.show_progress, once(pond.kill)
    started: list[subprocess.Popen[bytes]] = []
    start = workers.Workers._start

    def struck(self: Job, text: str) -> None:
        tell(self, text)
        if text.startswith(f"run {name}: "):
            strike()

    def noted(self: workers.Workers, argument: str) -> subprocess.Popen[bytes]:
        started.append(start(self, argument))
        return started[-1]

    monkeypatch.setattr(Job, "show_progress", struck)
    monkeypatch.setattr(workers.Workers, "_start", noted)
    told = run(pipeline, "--run", name, *more)
    assert (told.code, told.report) == (1, "")
    assert told.sentence.startswith(f"quackmq: the broker at {pond.address} has been away for ")
    assert capfd.readouterr().err == ""
    assert len(started) == 2 and all(process.poll() is not None for process in started)


# --- a stream ------------------------------------------------------------------------------------

BEGIN_MS = 1_790_000_000_000
PER_WINDOW = 10


def test_trending_is_gone_on_with_and_tells_every_window_once_s5(
    pond: Pond, name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed when a stream that runs on has told its first results; killed when the next run, which
    is to take what there is, has just begun; then a run comes to its end."""
    to, table = f"{name}-trends", tmp_path / "table"
    pond.create(name, to)
    take, run_stream = trends.ClosedWindows.add_batch, Job.run_stream
    strike_early, strike_late = once(pond.kill), once(pond.kill)

    def struck_late(self: trends.ClosedWindows, batch: Any, number: int) -> None:
        take(self, batch, number)
        if self.windows:
            strike_late()

    def struck_early(self: Job, *queries: StreamingQuery) -> StreamCounts:
        if self.once:
            strike_early()
        return run_stream(self, *queries)

    monkeypatch.setattr(trends.ClosedWindows, "add_batch", struck_late)
    monkeypatch.setattr(Job, "run_stream", struck_early)
    arguments = [
        *("trending", "--topics", name, "--to", to, "--table", table),
        *("--window", "1s", "--watermark", "1ms", "--checkpoint", tmp_path / "checkpoint"),
    ]
    publish_windows(pond, name, 0, 4)
    assert_told(run(*arguments))
    pond.serve()
    publish_windows(pond, name, 4, 8)
    assert_told(run(*arguments, "--once"))
    pond.serve()
    told = run(*arguments, "--once")
    assert told.code == 0
    # The last window is open.
    wanted = [(BEGIN_MS + 1000 * (at + 1), PER_WINDOW) for at in range(7)]
    results = [json.loads(value) for value in pond.values(to)]
    assert sorted((result["window_end"], result["entries"]) for result in results) == [
        (of_moment(end_ms), entries) for end_ms, entries in wanted
    ]
    of_table = "SELECT epoch_ms(window_end), entries FROM '{}/*/*.parquet' ORDER BY window_end"
    assert fetched(of_table.format(table)) == wanted


def publish_windows(pond: Pond, topic: str, first: int, end: int) -> None:
    values = ["x"] * (PER_WINDOW * (end - first))
    pond.publish(topic, values, BEGIN_MS + 1000 * first, 1000 // PER_WINDOW)


def of_moment(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
