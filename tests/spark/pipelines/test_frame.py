"""The frame of pipelines: options, reports, failures, directories, and the command around them.

All of it is shown without Spark, with pipelines made for it; one is run on Spark, as a user does.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from quackmq.cli.main import main
from quackmq.errors import InvalidRequest, UnknownTopic
from quackmq.spark import limits, pipelines
from quackmq.spark.pipelines.errors import NotInstalled, SparkFailed, shorten_error
from quackmq.spark.pipelines.job import Job
from quackmq.spark.pipelines.options import add_options, format_span, option, options_of, span
from quackmq.spark.pipelines.output_directory import MARK, claim
from quackmq.spark.pipelines.report import Report
from quackmq.spark.python_home import use_compiled_pyspark
from tests.kit.tables import each

NAMES = {"audit", "compact", "metrics", "replay", "simulate", "trending"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    topics: tuple[str, ...] = option("which", metavar="TOPIC,…")
    window: timedelta = option("how long", default=timedelta(minutes=1))
    since: datetime | None = option("from when on", default=None)
    count: int = option("how many", default=3)
    share: float = option("how much", default=0.5)
    by: str = option("what", default="day", choices=("day", "hour"))
    place: Path | None = option("where", default=None)
    dry: bool = option("do nothing", default=False)
    check: bool = option("look twice", default=True)


def parsed(*arguments: str) -> Options:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, Options)
    return options_of(parser.parse_args(arguments), Options)


# --- options -------------------------------------------------------------------------------------


def test_the_fields_of_a_dataclass_are_typed_options() -> None:
    assert parsed("--topics", "a,b", "--topics", "c") == Options(topics=("a", "b", "c"))
    given = parsed(
        *("--topics", "a", "--window", "90s", "--since", "2026-11-16T09:12:00Z", "--count", "-7"),
        *("--share", "1e-3", "--by", "hour", "--place", "here", "--dry", "--no-check"),
    )
    assert given == Options(
        topics=("a",),
        window=timedelta(seconds=90),
        since=datetime(2026, 11, 16, 9, 12, tzinfo=UTC),
        count=-7,
        share=0.001,
        by="hour",
        place=Path("here"),
        dry=True,
        check=False,
    )


@each(
    ("name", "text", "said"),
    [
        ("--window", "soon", "is no span of time"),
        ("--window", "0s", "is no span of time"),
        ("--since", "yesterday", "is no time"),
        ("--count", "3.5", "is no whole number"),
        ("--share", "nan", "is no number"),
        ("--by", "week", "is not one of day, hour"),
        ("--place", "", "is empty"),
    ],
)
def test_a_value_that_cannot_be_is_quoted(name: str, text: str, said: str) -> None:
    with pytest.raises(argparse.ArgumentError) as raised:
        parsed("--topics", "a", name, text)
    assert said in str(raised.value)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize("text", ["1500ms", "30s", "5m", "1h", "7d"])
def test_a_span_is_shown_as_it_is_typed(text: str) -> None:
    assert format_span(span(text)) == text


# --- reports -------------------------------------------------------------------------------------


def test_a_report_is_json_whatever_is_in_it() -> None:
    at = datetime(2026, 11, 16, 9, 12)
    report = Report(
        "all",
        ("at", "share", "rest"),
        [(at, float("nan"), {"a": {1}, "b": timedelta(seconds=2)}), (None, 1.5, b"x")],
        {"place": Path("x"), "list": (1, at)},
    )
    told = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert told == {
        "title": "all",
        "is_good": True,
        "facts": {"place": "x", "list": [1, "2026-11-16T09:12:00Z"]},
        "rows": [
            {"at": "2026-11-16T09:12:00Z", "share": None, "rest": {"a": [1], "b": 2.0}},
            {"at": None, "share": 1.5, "rest": "x"},
        ],
    }


@pytest.mark.sweep
def test_a_report_is_drawn_into_a_file(tmp_path: Path) -> None:
    report = Report("ducks", ("n",), [(1,)], plot=lambda axes: axes.plot([1, 2], [3, 4]))
    report.save_plot(tmp_path / "ducks.png")
    assert (tmp_path / "ducks.png").read_bytes().startswith(b"\x89PNG")


# --- failures ------------------------------------------------------------------------------------


class AnalysisException(Exception):
    """Known by its name, like Spark's."""


def test_of_a_failure_in_spark_our_own_error_is_told() -> None:
    text = (
        "[STREAM_FAILED] Query [id = 3] terminated with exception:\n"
        "  File 'x.py', line 3, in look\n"
        "quackmq.errors.UnknownTopic: there is no topic ducks\n"
        "\tat org.apache.spark.Some.where(Some.scala:7)\n"
    )
    found = shorten_error(RuntimeError(text))
    assert isinstance(found, UnknownTopic)
    assert str(found) == "there is no topic ducks"


def test_of_sparks_own_failures_the_sentence_is_told() -> None:
    text = "\n[PARSE_SYNTAX_ERROR] Syntax error at or near 'of'. SQLSTATE: 42601 (line 1)\n\n== SQL"
    found = shorten_error(AnalysisException(text))
    assert isinstance(found, InvalidRequest)
    assert str(found) == "Syntax error at or near 'of'. (line 1)"
    assert isinstance(shorten_error(RuntimeError("Job aborted\n" * 9)), SparkFailed)
    assert len(str(shorten_error(RuntimeError("x" * 10_000)))) < 500


# --- directories ---------------------------------------------------------------------------------


def test_a_directory_is_marked_once_and_known_again(tmp_path: Path) -> None:
    place = tmp_path / "new" / "table"
    assert claim(place, "trending", {"id": "7"}) == {"id": "7"}
    assert claim(place, "trending", {"id": "8"}) == {"id": "7"}
    assert [each.name for each in place.iterdir()] == [MARK]


def test_a_directory_of_somebody_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "thesis.txt").write_text("mine")
    claim(tmp_path / "replays", "replay", {})
    (tmp_path / "file").write_text("mine")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / MARK).write_text("[]")
    for name, said in (
        ("others", "it holds 'thesis.txt'"),
        ("replays", "belongs to the pipeline replay"),
        ("file", "is not a directory"),
        ("broken", "is not the mark"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            claim(tmp_path / name, "trending", {})
    assert [each.name for each in (tmp_path / "others").iterdir()] == ["thesis.txt"]


# --- the job -------------------------------------------------------------------------------------


def test_without_java_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quackmq.spark.pipelines.job.use_java", lambda: False)
    with Job(output=io.StringIO()) as job, pytest.raises(NotInstalled, match="Java 17 or later"):
        _ = job.spark


def test_sparks_processes_find_the_compiled_pyspark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's home without `python/lib/pyspark.zip`; whoever has set one has it his way."""
    monkeypatch.setenv("SPARK_HOME", "")
    use_compiled_pyspark()
    home = Path(os.environ["SPARK_HOME"])
    assert (home / "bin" / "spark-submit").is_file()
    assert (home / "jars").is_dir()
    assert not (home / "python").exists()
    use_compiled_pyspark()
    assert os.environ["SPARK_HOME"] == str(home)


def test_a_signal_asks_a_job_to_stop_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Job(output=io.StringIO()) as job:
        os.kill(os.getpid(), signal.SIGTERM)
        assert job.stopping.wait(30)
        assert job.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_comes_within_a_wait_for_it_does_not_wait_for_itself() -> None:
    """Who waits for an event holds its lock for a moment, and a handler runs in the same thread."""
    with Job(output=io.StringIO()) as job:
        with cast(Any, job.stopping)._cond:
            signal.raise_signal(signal.SIGTERM)
            assert job.signal == signal.SIGTERM
        assert job.stopping.wait(30)


class Session:
    """As much of Spark as a job that is told to stop needs."""

    def __init__(self) -> None:
        self.sparkContext = self
        self.cancelled = threading.Semaphore(0)

    def cancelAllJobs(self) -> None:
        self.cancelled.release()


def test_jobs_of_a_batch_are_cancelled_until_it_ends_for_one_may_be_about_to_begin() -> None:
    session = Session()
    with Job(output=io.StringIO(), spark=cast(Any, session)) as job:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(3):
            assert session.cancelled.acquire(timeout=30)
    assert job._cancel_thread is not None and not job._cancel_thread.is_alive()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_replaces_itself_on_a_terminal_and_is_seldom_elsewhere() -> None:
    terminal, file = Terminal(), io.StringIO()
    for output in (terminal, file):
        with Job(output=output) as job:
            for number in range(3):
                job.show_progress(f"step {number}")
            job.print_line("noted")
    assert terminal.getvalue().count("\n") == 1
    assert terminal.getvalue().count("\r\x1b[Kstep") == 3
    assert file.getvalue() == "step 0\nnoted\n"


# --- the command ---------------------------------------------------------------------------------


class Fake:
    """A pipeline that needs no Spark."""

    SUMMARY = "for tests"
    Options = Options

    def __init__(self, report: Report | Exception) -> None:
        self.report = report
        self.seen: list[Any] = []

    def run(self, job: Job, options: Any) -> Report:
        self.seen += [job, options]
        if isinstance(self.report, Exception):
            raise self.report
        return self.report


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake(Report("ducks", ("name", "count"), [("a\x1b[2J", 1_234), ("b", None)], {"x": 1.5}))
    monkeypatch.setattr("quackmq.cli.pipeline.pipeline", lambda name: made)
    return made


def test_every_pipeline_is_listed_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "ls"]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert set(listed) >= NAMES
    assert listed == pipelines.summaries()


@pytest.mark.processes
def test_the_commands_start_without_pyspark() -> None:
    """And so does the list of pipelines; to run one, one sentence says what to install."""
    program = (
        "import sys; sys.modules['pyspark'] = None\n"
        "from quackmq.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "sys.exit(code)"
    )
    listing = subprocess.run(
        [sys.executable, "-c", program, "pipeline", "ls"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (listing.returncode, listing.stderr) == (0, "")
    assert "trending" in listing.stdout
    running = subprocess.run(
        [sys.executable, "-c", program, "pipeline", "run", "trending", "--topics", "x"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert running.returncode == 1
    assert running.stderr.count("\n") == 1
    assert "pip install 'quackmq[spark]'" in running.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("trendin",), "there is no pipeline 'trendin': did you mean 'trending'?"),
        (("what",), "there is no pipeline 'what'\n"),
        (("trending", "--windw", "3s"), "there is no option '--windw': did you mean '--window'?"),
        (("trending", "--topics", "a", "--xyz"), "there is no option '--xyz'"),
        (("trending", "--topics", "a", "more"), "there is no argument 'more'"),
        (("trending", "--window", "soon"), "'soon' is no span of time"),
        (("trending", "--conf", "a=b"), "'a=b' is not spark.NAME=VALUE"),
        (("trending", "--plot", "x.txt"), "does not end in .png"),
        (("trending", "--plot", "nowhere/x.png"), "'nowhere' is not a directory"),
        (("trending",), "--topics TOPIC,… or --pattern REGEX"),
        (("trending", "--topics", "a", "--to", "b"), "trending needs --checkpoint DIR"),
        (("simulate", "--workers", "0"), "--workers is 1 to"),
        (("metrics", "--processes", "0"), "give --run NAME"),
    ],
)
def test_what_is_misspelt_or_cannot_be_is_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", "run", *arguments]) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("audit",),
        ("compact",),
        ("metrics",),
        ("replay", "--topic", "a", "--to-topic", "b"),
        ("simulate",),
        ("trending", "--topics", "a"),
    ],
)
def test_a_broker_that_is_not_there_is_one_sentence(
    arguments: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is waited for, here not for as long as by users; Spark is not even started."""
    monkeypatch.setattr(limits, "PIPELINE_BROKER_MS", 100)
    assert main(["pipeline", "run", *arguments, "--broker", "127.0.0.1:1"]) == 1
    told = capsys.readouterr()
    assert told.err.startswith("quackmq: nothing listens at 127.0.0.1:1 after 0.1 s ")
    assert "start a broker there with `quackmq serve`" in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""


def test_a_report_is_a_table_on_the_terminal(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", "run", "fake", "--topics", "t", "--broker", "host:1"]) == 0
    job, options = fake.seen
    assert (job.address, job.once, options.topics) == ("host:1", False, ("t",))
    # Nothing that came from a topic is obeyed by a terminal.
    assert capsys.readouterr().out == (
        "ducks\n\nname        count\n'a\\x1b[2J'  1,234\nb               -\n\nx  1.500\n"
    )


def test_a_report_is_json_or_a_picture_where_asked_and_says_no_by_its_exit_code(
    fake: Fake, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "x.png"
    fake.report = Report(
        "bad", ("n",), [(1,)], is_good=False, plot=lambda axes: axes.plot([1], [1])
    )
    arguments = ["--topics", "t", "--json", "--plot", str(picture), "--once"]
    assert main(["pipeline", "run", "fake", *arguments]) == 1
    assert json.loads(capsys.readouterr().out)["rows"] == [{"n": 1}]
    assert picture.stat().st_size
    assert fake.seen[0].once


def test_a_failure_is_one_sentence_and_one_by_a_signal_is_told_as_that(
    fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["pipeline", "run", "fake", "--topics", "t"]
    fake.report = UnknownTopic("there is no topic t")
    assert main(arguments) == 1
    assert capsys.readouterr().err == "quackmq: there is no topic t\n"

    def stopped(job: Job, options: Any) -> Report:
        os.kill(os.getpid(), signal.SIGTERM)
        job.stopping.wait(30)
        job.check()
        raise AssertionError("it was not stopped")

    monkeypatch.setattr(fake, "run", stopped)
    assert main(arguments) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "quackmq: fake: stopped before it was finished\n"
    assert threading.current_thread() is threading.main_thread()
