"""Experiments as they are run: real processes, real pipes, and accounts that have to be right.

How much is published is fixed by the number of entries, so that no account depends on how fast the
machine is; where time plays a part, only what holds at any speed is asserted.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quackmq.cli.experiment import report as experiment_report
from quackmq.cli.experiment import runner as experiment_run
from quackmq.cli.experiment.plan import Experiment, suite
from quackmq.cli.experiment.report import Outcome, as_table
from quackmq.cli.experiment.temporary import temporary_directory
from quackmq.cli.main import main
from quackmq.protocols.line.records import End
from tests.kit.server import DEADLINE_S, Server

#: As many as are published, as fast as it goes, and nothing gets old; nobody is too slow to live.
CALM: dict[str, Any] = {
    "rate": None,
    "seconds": 100.0,
    "max_entries": None,
    "delta_ms": None,
    "answer_ms": 60_000,
}
ENTRIES = 20
#: More than the 20 that a topic has room for where the suite fills its topics.
SUITE_ENTRIES = 25


def outcome_of(directory: Path, **settings: Any) -> Outcome:
    experiment = Experiment(**(CALM | {"entries": ENTRIES} | settings))
    observer = experiment_run.Observer()
    return asyncio.run(experiment_run.run(experiment, directory / "data", observer, "os"))


@pytest.mark.processes
def test_q2_the_records_name_everybody_with_channel_and_topics(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, pubs=2, subs=1, topics=2, entries=1)
    shape = r"pipes of process \d+, topics: 1, 2"
    assert [re.sub(shape, "…", record) for record in outcome.records] == [
        "pub p1 on …",
        "pub p2 on …",
        "sub s1 on …",
    ]


@pytest.mark.processes
def test_q10_what_a_slow_subscriber_comes_too_late_for_is_skipped_and_counted(
    tmp_path: Path,
) -> None:
    outcome = outcome_of(tmp_path, subs=2, slow_subs=1, slow_ms=20, delta_ms=10, topics=2)
    assert outcome.problems() == [], "delivered and skipped are all that was published"


@pytest.mark.processes
def test_q6_a_full_topic_makes_its_publisher_retry(tmp_path: Path) -> None:
    """Room comes by what the subscriber has, and that one stops taking any."""
    outcome = outcome_of(
        tmp_path, subs=1, silent_subs=1, max_entries=2, seconds=8.0, answer_ms=8_000
    )
    assert outcome.problems() == []
    assert outcome.retried > 0
    assert 1 <= outcome.published <= 5, "three that it has answered, and two that are live"


# --- the command -----------------------------------------------------------------------------


def run_to_end(*arguments: object) -> tuple[int, str, str]:
    with Server("experiment", *arguments) as command:
        lines = []
        while line := command.line():
            lines.append(line)
        return command.exit_code(), "".join(lines), command.errors()


CALM_OPTIONS = ("--rate", 0, "--max-entries", 0, "--delta-ms", 0, "--answer-ms", 60_000)


@pytest.mark.processes
def test_q1_the_command_runs_all_processes_and_tells_what_came_of_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    who = ("--pubs", 2, "--subs", 2, "--topics", 2, "--entries", 10, "--data", data)
    exit_code, out, err = run_to_end(*who, *CALM_OPTIONS, "--seconds", 100)
    assert (exit_code, err) == (0, ""), "no bar where nobody looks"
    assert out.startswith("pub p1 on pipes of process ")
    assert re.search(r"^s2 +steady +20 +20 +0 +0 +0 .* terminated$", out, re.MULTILINE)
    assert "20 published, 0 retried, 40 delivered, 0 skipped as old, 0 dead subscribers" in out
    assert out.endswith("for every live subscriber: published = delivered + skipped\n")
    assert any(data.iterdir()), "it is kept where that was asked for"


@pytest.mark.processes
def test_q12_the_report_can_be_read_by_programs() -> None:
    exit_code, out, err = run_to_end("--entries", 5, "--json", *CALM_OPTIONS, "--seconds", 100)
    assert (exit_code, err) == (0, "")
    told = json.loads(out)
    assert (told["published"], told["delivered"], told["skipped"]) == (5, 5, 0)
    assert told["is_good"] is True and told["problems"] == []
    assert told["subscribers"][0]["end"] == "terminated"


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_q12_the_suite_is_every_experiment_and_each_adds_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command whole, with what it makes its table of: 16 experiments of a few entries each."""
    outcomes: list[Outcome] = []

    def noting(made: Sequence[Outcome]) -> str:
        outcomes.extend(made)
        return as_table(made)

    monkeypatch.setattr(experiment_report, "as_table", noting)
    sizes = f"--pubs 2 --subs 2 --topics 3 --entries {SUITE_ENTRIES} --slow-ms 2".split()
    times = ("--rate 0 --seconds 100 --delta-ms 600000 --answer-ms 8000 --sync os").split()
    assert main(["experiment", "--suite", *sizes, *times]) == 0
    head, *rows, archives, verdict = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["experiment", "shape", "published", "retried"]
    assert archives == "in every experiment: the archive holds every entry of every topic"
    assert verdict == "for every live subscriber: published = delivered + skipped"
    planned = suite(Experiment(pubs=2, subs=2, topics=3))
    assert [(each.experiment.title, each.experiment.shape) for each in outcomes] == [
        (each.title, each.shape) for each in planned
    ]
    for row, outcome in zip(rows, outcomes, strict=True):
        assert row.startswith(outcome.experiment.title) and row.endswith("  ok")
        numbers = (outcome.published, outcome.retried, outcome.delivered, outcome.skipped)
        words = row.removeprefix(outcome.experiment.title).split()
        archived = str(outcome.published)
        assert words[:7] == [
            outcome.experiment.shape,
            *map(str, numbers),
            str(outcome.dead),
            archived,
        ]
        assert_adds_up(outcome)
        assert_ends_as_planned(outcome)
    assert sum(outcome.dead for outcome in outcomes) == 2, "the silent one and the dying one"


def assert_adds_up(outcome: Outcome) -> None:
    """Every publisher has published all, and every live subscriber has or has skipped all."""
    assert outcome.published == SUITE_ENTRIES * outcome.experiment.pubs
    assert [each.published for each in outcome.publishers] == (
        [SUITE_ENTRIES] * outcome.experiment.pubs
    )
    assert list(outcome.held) == [str(each + 1) for each in range(outcome.experiment.topics)]
    assert all(outcome.held.values()), "publishers go round their topics"
    assert all(each.end == End.TERMINATED for each in outcome.publishers)
    assert (outcome.latencies()["p50_ms"] is not None) == (outcome.delivered > 0)
    for each in outcome.subscribers:
        if each.is_live:
            assert each.published == outcome.published == each.delivered + each.skipped
            assert (each.left, each.end) == (0, End.TERMINATED)
            assert each.report is not None and each.report.doubled == 0
        else:  # what it left is still its own, or got old meanwhile
            assert each.delivered == 3
            assert each.published == 3 + each.skipped + each.left


def assert_ends_as_planned(outcome: Outcome) -> None:
    """Entries get old in two of the experiments only, and dead are those who are to be."""
    title, (*others, last) = outcome.experiment.title, outcome.subscribers
    if title == "late, and all is old":
        assert (last.delivered, last.skipped) == (0, outcome.published)
    elif title != "full topics":
        assert outcome.skipped == 0, title
    if title in ("a silent sub", "a dying sub"):
        assert last.end == (End.DEAD if title == "a silent sub" else End.GONE)
        assert [each.delivered for each in others] == [outcome.published] * len(others)


@pytest.mark.processes
def test_q11_an_interrupt_ends_everybody_by_the_protocol() -> None:
    with Server("experiment", *CALM_OPTIONS, "--rate", 50, "--seconds", 1000) as command:
        peers = [_pid_in(command.line()) for _ in range(2)]
        command.send(signal.SIGINT)
        out = []
        while line := command.line():
            out.append(line)
        assert command.exit_code() == 130
        assert re.search(r"^p1 .* terminated$", "".join(out), re.MULTILINE)
        assert re.search(r"^s1 .* terminated$", "".join(out), re.MULTILINE)
        assert out[-1] == "for every live subscriber: published = delivered + skipped + left\n"
        assert command.errors() == ""
    assert not any(map(is_running, peers))


@pytest.mark.processes
def test_peers_do_not_outlive_a_command_that_is_killed_nor_does_its_data_outlive_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*CALM_OPTIONS, "--subs", 2, "--seconds", 1000)
    with Server("experiment", *options, environment={"TMPDIR": str(tmp_path)}) as command:
        peers = [_pid_in(command.line()) for _ in range(3)]
        command.send(signal.SIGKILL)
        command.exit_code()
    (left,) = tmp_path.iterdir()
    assert any(left.rglob("*")), "nobody was there to remove it"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_directory("quackmq-experiment-") as directory:
        assert list(tmp_path.iterdir()) == [directory]
    end_s = time.monotonic() + DEADLINE_S
    while any(map(is_running, peers)):
        assert time.monotonic() < end_s, "a peer is still there"
        time.sleep(0.01)


@pytest.mark.processes
def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("quack")
    exit_code, out, err = run_to_end("--data", tmp_path)
    assert (exit_code, out) == (2, "")
    assert err == f"quackmq: {tmp_path} is not empty: an experiment needs an empty directory\n"


def _pid_in(record: str) -> int:
    found = re.search(r"process (\d+)", record)
    assert found is not None, record
    return int(found[1])


def is_running(pid: int) -> bool:
    """Neither gone, nor waiting for whoever adopted it to look at it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
