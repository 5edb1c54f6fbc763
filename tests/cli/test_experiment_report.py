"""What is made of an experiment: the plan, the accounts, when they are wrong, bar and picture."""

from __future__ import annotations

import io
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quackmq.cli.experiment import plan as experiment_plan
from quackmq.cli.experiment import plot as experiment_plot
from quackmq.cli.experiment import runner as experiment_run
from quackmq.cli.experiment.latency import Latencies, add_up, bucket_for, percentile_ms
from quackmq.cli.experiment.peer import (
    Behaviour,
    PublishSchedule,
    ReceivedEntries,
    Report,
    make_content,
)
from quackmq.cli.experiment.plan import Experiment, suite
from quackmq.cli.experiment.progress import Watcher
from quackmq.cli.experiment.report import (
    ArchiveResult,
    Outcome,
    ProgramResult,
    PublisherAccount,
    Sample,
    SubscriberAccount,
    as_json,
    as_table,
    as_text,
)
from quackmq.cli.main import main
from quackmq.errors import InvalidRequest
from quackmq.model.policy import WhenFull
from quackmq.protocols.line.codec.messages import Entry
from tests.kit.tables import each


def publisher(entries: int = 10, **changes: Any) -> PublisherAccount:
    report = Report(entries={"1": entries}, terminated=True)
    fields: dict[str, Any] = {"id": "p1", "behaviour": Behaviour.STEADY, "report": report}
    fields["end"] = "terminated"
    return PublisherAccount(**(fields | changes))


def subscriber(delivered: int = 10, **changes: Any) -> SubscriberAccount:
    report = Report(entries={"1": delivered}, terminated=True, latencies={0: {70: delivered}})
    fields: dict[str, Any] = {
        "id": "s1",
        "behaviour": Behaviour.STEADY,
        "report": report,
        "end": "terminated",
        "published": 10,
        "skipped": 0,
        "lost": 0,
        "left": 0,
    }
    return SubscriberAccount(**(fields | changes))


def replace_result(**changes: Any) -> ProgramResult:
    """The result of a program that has done all right, with changes."""
    good = ProgramResult("quack", 10, 0, True, True, left_early=False, exit_code=0)
    return good._replace(**changes)


def outcome(*subscribers: SubscriberAccount, **changes: Any) -> Outcome:
    fields: dict[str, Any] = {
        "experiment": Experiment(title="quack"),
        "records": ["pub p1 on pipes, topics: 1"],
        "publishers": [publisher()],
        "subscribers": subscribers or (subscriber(),),
        "held": {"1": 10},
        "samples": [Sample(0.0, 0, 0), Sample(0.5, 7, 3)],
    }
    return Outcome(**(fields | changes))


# --- accounts --------------------------------------------------------------------------------


def test_accounts_that_add_up_have_no_problems() -> None:
    assert outcome(subscriber(7, skipped=3)).problems() == []


def test_entries_may_come_out_of_order_only_where_the_newest_come_first() -> None:
    experiment = Experiment(title="quack", reading="newest")
    assert outcome(subscriber(report=REORDERED), experiment=experiment).problems() == []


REORDERED = Report(entries={"1": 10}, terminated=True, reordered=2)
SILENT: dict[str, Any] = {"behaviour": Behaviour.SILENT, "left": 7}
CUT_SHORT = Report(entries={"1": 10}, terminated=False)


@each(
    ("wrong", "sentence"),
    [
        (
            outcome(subscriber(8, skipped=1)),
            "subscriber s1: 10 entries were published, 8 delivered, 1 skipped",
        ),
        (
            outcome(subscriber(8, left=2)),
            "subscriber s1: 10 entries were published, 8 delivered, 0 skipped and 2 left",
        ),
        (
            outcome(subscriber(12)),
            "subscriber s1: 10 entries were published, 12 delivered, 0 skipped",
        ),
        (
            outcome(subscriber(report=REORDERED)),
            "subscriber s1: 2 entries came out of order",
        ),
        (
            outcome(subscriber(lost=1)),
            "subscriber s1: 1 entries were lost",
        ),
        (
            outcome(subscriber(report=CUT_SHORT, end="hung up")),
            "subscriber s1 did not terminate cleanly: hung up",
        ),
        (
            outcome(subscriber(**SILENT)),
            "subscriber s1 should have been silent: terminated",
        ),
        (
            outcome(publishers=[publisher(9)]),
            "the broker accepted 9 entries, but the topics hold 10",
        ),
        (
            outcome(publishers=[publisher(report=CUT_SHORT, end="hung up")]),
            "publisher p1 did not terminate cleanly: hung up",
        ),
        (
            outcome(
                publishers=[
                    publisher(report=Report(entries={"1": 10}, rejected=2, terminated=True))
                ]
            ),
            "publisher p1: 2 entries were rejected",
        ),
        (
            outcome(subscriber(topics=("2",))),
            "subscriber s1 received entries of topic 1, which it has not chosen",
        ),
        (
            outcome(subscriber(report=None, program=replace_result(entries=8), left=2)),
            "subscriber s1: 10 entries were published, 8 delivered, 0 skipped and 2 left",
        ),
        (
            outcome(publishers=[publisher(report=None, program=replace_result(exit_code=-11))]),
            "publisher p1 ('quack') was ended by signal 11 (Segmentation fault)",
        ),
    ],
)
def test_what_does_not_add_up_is_named(wrong: Outcome, sentence: str) -> None:
    assert wrong.problems() == [sentence]
    assert as_json(wrong)["is_good"] is False
    assert f"WRONG in 'quack': {sentence}" in as_text(wrong)
    assert "WRONG" in as_table([outcome(), wrong]).splitlines()[2]


def test_a_subscriber_that_was_to_die_and_did_is_no_problem() -> None:
    dead = subscriber(3, behaviour=Behaviour.DYING, report=None, left=7, end="hung up")
    found = outcome(subscriber(), replace(dead, id="s2"))
    assert (found.problems(), found.dead) == ([], 1)


def test_what_a_program_leaves_when_it_ends_early_is_no_problem() -> None:
    left = replace_result(entries=8, left_early=True)
    found = outcome(subscriber(report=None, program=left, left=2))
    assert found.problems() == []
    assert as_text(found).endswith("published = delivered + skipped + left\n")
    assert "latency: unknown for programs\n" in as_text(found)


def test_a_publishing_program_shows_how_many_of_its_messages_were_rejected() -> None:
    rejected = replace_result(rejections=2, last_rejection="too long")
    found = outcome(publishers=[publisher(report=None, program=rejected)])
    assert found.problems() == []
    lines = as_text(found).splitlines()
    assert lines[1].split() == ["publisher", "published", "retried", "rejected", "end"]
    assert lines[2].split()[2:5] == ["10", "0", "2"]
    assert "publisher p1: the broker rejected 2 messages; the last reason: too long" in lines
    (account,) = as_json(found)["publishers"]
    assert (account["rejected"], account["last_rejection"]) == (2, "too long")
    assert "rejected" not in as_text(outcome())


def test_a_program_that_published_nothing_because_all_was_rejected_is_a_problem() -> None:
    rejected = replace_result(entries=0, rejections=1, last_rejection="too long")
    account = publisher(report=None, program=rejected)
    nothing = outcome(subscriber(0, published=0), publishers=[account], held={"1": 0})
    assert nothing.problems() == [
        "publisher p1 published nothing: the broker rejected 1 message; the last reason: too long"
    ]


def test_a_program_that_died_counts_as_dead_and_stays_a_problem() -> None:
    cut = replace_result(entries=3, has_terminated=False, left_early=True)
    account = subscriber(report=None, program=cut, left=7, has_died=True, end="silent for too long")
    found = outcome(account)
    assert found.dead == 1
    assert as_json(found)["subscribers"][0]["is_live"] is False
    assert len(found.problems()) == 1


def test_what_an_interrupt_leaves_is_no_problem() -> None:
    found = outcome(subscriber(8, left=2), was_interrupted=True)
    assert found.problems() == []
    assert as_text(found).endswith("published = delivered + skipped + left\n")


# --- plans -----------------------------------------------------------------------------------


def test_q12_the_suite_has_every_shape_and_every_boundary() -> None:
    experiments = suite(Experiment(pubs=4, subs=5, topics=6, seconds=1.0, silent_subs=5))
    shapes = {each.shape for each in experiments}
    assert {"1/1/1", "1/5/1", "4/1/1", "1/1/2", "1/5/2", "4/1/2", "4/5/6"} <= shapes
    for trait in ("slow_pubs", "slow_subs", "silent_subs", "dying_subs", "late_subs"):
        assert any(getattr(each, trait) for each in experiments), trait
    assert {1, None} <= {each.delta_ms for each in experiments}
    assert any(each.rate is None and (each.max_entries or 1000) < 100 for each in experiments)
    assert len({each.title for each in experiments}) == len(experiments)


@each(
    ("changes", "complaint"),
    [
        ({"pubs": 0}, "--pubs: 0 is not from 1 to 200; 0 is allowed with --pub-command$"),
        ({"topics": 0}, "--topics: 0 is not from 1 to 200$"),
        ({"subs": 2, "slow_subs": 2, "late_subs": 1}, "3 subscribers should be slow, silent"),
        ({"slow_pubs": 2}, "--slow-pubs: 2 is more than the 1 publishers"),
        ({"rate": -1.0}, "--rate: -1 is not a number of entries"),
        ({"seconds": 0.0}, "--seconds: 0 is not more than 0 and at most 86400"),
        ({"pubs": 3, "subs": 2, "dying_subs": 1, "entries": 1}, "--entries: 1 is too few: silent"),
        ({"entries": 10**9}, "--entries: 1000000000 is not"),
        ({"entry_bytes": 5_000}, "--bytes: 5000 is not from 64 to 4096"),
        ({"slow_ms": 2_000}, "--slow-ms 2000 is not below --answer-ms 2000"),
        ({"command_ms": 10**9}, "--command-ms: 1000000000 is not from 1 to 60000"),
        ({"subs": 200, "sub_commands": ["quack"]}, "--subs: 200 is not from 0 to 199"),
        (
            {"topics": 2, "dying_subs": 1, "entries": 6}
            | {"pub_topics": {"p1": ["1", "2"]}, "sub_topics": {"s1": ["2"]}},
            "--entries: 6 is too few: silent and dying subscribers first answer 3 entries",
        ),
        (
            {"topics": 2, "silent_subs": 1}
            | {"pub_topics": {"p1": ["1"]}, "sub_topics": {"s1": ["2"]}},
            "--sub-topics: nobody publishes to a topic of s1, which should be silent after 3",
        ),
    ],
)
def test_an_experiment_that_cannot_be_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        Experiment(**changes)


def test_q6_room_is_made_by_age_or_by_what_everybody_has() -> None:
    by_age = Experiment(max_entries=5, delta_ms=10).policy
    assert (by_age.live_entries, by_age.live_for_ms, by_age.when_full) == (5, 10, WhenFull.WAIT)
    by_consumption = Experiment(max_entries=5, delta_ms=None).policy
    assert by_consumption.when_full is WhenFull.WAIT_UNTIL_CONSUMED
    unbounded = Experiment(max_entries=None, delta_ms=None).policy
    assert not any(policy.deletes_entries for policy in (by_age, by_consumption, unbounded))


# --- what subscribers keep -------------------------------------------------------------------


def test_a_subscriber_knows_an_entry_again() -> None:
    seen = ReceivedEntries(start_ns=0, slice_ms=100)
    for publisher_id, number in [("p1", 0), ("p1", 7), ("p2", 0), ("p1", 7), ("p1", 3)]:
        entry = Entry("1", make_content(publisher_id, number, 1_000, 64))
        assert len(entry.content) == 64
        seen.note(entry, arrived_ns=5_000_000)
    report = seen.report(terminated=True)
    assert (report.entries, report.doubled, seen.answered) == ({"1": 4}, 1, 5)
    assert report.reordered == 1, "number 3 came after number 7"
    assert sum(report.latencies[0].values()) == 4


def test_q6_a_topic_without_room_rests_while_the_others_go_on() -> None:
    (part,) = Experiment(topics=3, rate=None).publishers()
    turns = PublishSchedule(part)
    tried = []
    for _ in range(7):
        tried.append(turns.topic)
        turns.record_answer(turns.topic != "2")
    assert tried[:4] == ["1", "2", "3", "1"]
    assert turns.due_s <= time.monotonic(), "there is always one that may be tried at once"


def test_percentiles_are_within_a_bucket_of_the_true_ones() -> None:
    latencies = Latencies()
    for milliseconds in range(1, 1001):
        latencies.add(when=milliseconds, latency_ns=milliseconds * 1_000_000)
    counts = add_up(latencies.slices.values())
    assert sum(counts.values()) == 1000
    for share, true_ms in ((0.5, 500), (0.99, 990), (1.0, 1000), (0.001, 1)):
        found = percentile_ms(counts, share)
        assert found is not None and math.isclose(found, true_ms, rel_tol=0.05)
    assert percentile_ms({}, 0.5) is None
    assert bucket_for(-5) == bucket_for(0) == 0


# --- the bar ---------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_shown_on_a_terminal_and_goes_away() -> None:
    planned = [Experiment(title="one", seconds=2.0), Experiment(title="two", seconds=2.0)]
    stream = Terminal()
    with Watcher(planned, stream, prints_records=False) as watcher:
        watcher.progress(experiment_run.Progress(planned[0], 1.0, 10, 20))
        assert "25%  one: 10 published, 20 delivered" in stream.getvalue()
        watcher.done(replace(outcome(), experiment=planned[0]))
        watcher.progress(experiment_run.Progress(planned[1], 99.0, 30, 60))
        assert "[##############################] 100%  two: 30" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")
    assert "\n" not in stream.getvalue()


def test_no_bar_is_written_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    planned = Experiment()
    stream = io.StringIO()
    with Watcher([planned], stream, prints_records=True) as watcher:
        watcher.progress(experiment_run.Progress(planned, 1.0))
        watcher.connected(planned, ["pub p1 on pipes, topics: 1"])
    assert stream.getvalue() == ""
    assert capsys.readouterr().out == "pub p1 on pipes, topics: 1\n"


# --- the command -----------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    """The outcomes that experiments will have, one after the other, without being carried out."""
    outcomes: list[Outcome] = []

    async def run(experiment: Experiment, *_: object) -> Outcome:
        return replace(outcomes.pop(0), experiment=experiment)

    monkeypatch.setattr(experiment_run, "run", run)
    return outcomes


def test_accounts_that_are_wrong_end_with_exit_code_1(
    told: list[Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    told.append(outcome(subscriber(9)))
    assert main(["experiment"]) == 1
    assert capsys.readouterr().out.endswith(
        "WRONG: subscriber s1: 10 entries were published, 9 delivered, 0 skipped\n"
    )


def test_q8_an_archive_that_lacks_entries_ends_with_exit_code_1(
    told: list[Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    good = ArchiveResult(entries=10, files=2, archived_early=7)
    told += [outcome(archive=good), outcome(archive=replace(good, entries=9, problems=["quack"]))]
    assert main(["experiment"]) == 0
    line = "archive: complete, 10 entries in 2 files, 7 of them archived before the end\n"
    assert line in capsys.readouterr().out
    assert main(["experiment"]) == 1
    line = line.replace("complete, 10", "INCOMPLETE, 9")
    assert f"{line}WRONG: quack\n" in capsys.readouterr().out
    told.append(outcome(archive=replace(good, problems=["quack"])))
    assert main(["experiment", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["archive"] == {
        "entries": 10,
        "files": 2,
        "archived_early": 7,
        "is_complete": False,
        "problems": ["quack"],
    }
    assert report["problems"] == ["quack"]


def test_the_suite_is_one_table_and_fails_if_one_does(
    told: list[Outcome], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def two(base: Experiment) -> list[Experiment]:
        return suite(base)[:2]

    monkeypatch.setattr(experiment_plan, "suite", two)
    told += [outcome(), outcome()]
    assert main(["experiment", "--suite"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == [
        "experiment",
        "1 pub, 1 sub, 1 topic",
        "m subs",
    ]
    assert lines[3:] == ["for every live subscriber: published = delivered + skipped"]
    told += [outcome(), outcome(subscriber(9))]
    assert main(["experiment", "--suite", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [each["is_good"] for each in found["experiments"]] == [True, False]
    assert found["is_good"] is False


@pytest.mark.processes
def test_a_picture_is_drawn_of_depth_and_latency(
    told: list[Outcome], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told.append(outcome())
    file = tmp_path / "experiment.png"
    assert main(["experiment", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().err == ""


@pytest.mark.sweep
def test_an_experiment_in_which_nothing_came_can_be_drawn(tmp_path: Path) -> None:
    nothing = outcome(subscriber(0, skipped=10, report=None), samples=())
    file = tmp_path / "nothing.svg"
    experiment_plot.draw([nothing, outcome()], file)
    assert b"<svg" in file.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--pubs", "-1"], "--pubs: '-1' is not a whole number of at least 0"),
        (["--rate", "often"], "--rate: 'often' is not a number of at least 0"),
        (["--seconds", "nan"], "--seconds: 'nan' is not a number of at least 0"),
        (["--entries", "0"], "--entries: '0' is not a whole number of at least 1"),
        (["--subs", "0"], "--subs: 0 is not from 1 to"),
        (
            ["--pub-topics", "p1"],
            "--pub-topics: 'p1' does not assign topics to peers: write, for example, --pub-topics",
        ),
        (["--sub-topics", "s1="], "--sub-topics: 's1=' does not assign topics to peers"),
        (["--pub-topics", "p1=1,1"], "--pub-topics: 'p1=1,1' names a topic twice"),
        (
            ["--pub-topics", "p1=1", "--pub-topics", "p1=2"],
            "--pub-topics: p1 is named twice: give all its topics at once, as in p1=1,2",
        ),
        (
            ["--subs", "2", "--sub-topics", "s1,s3=1"],
            "--sub-topics: there is no sub 's3': there are s1 to s2; raise --subs for more",
        ),
        (["--pub-topics", "s1=1"], "--pub-topics: there is no pub 's1': there is only p1; raise"),
        (
            ["--topics", "2", "--sub-topics", "s1=2,3"],
            "--sub-topics: there is no topic '3' for s1: there are 1 to 2; raise --topics for more",
        ),
        (["--sub-topics", f"s1={'9' * 5000}"], "--sub-topics: there is no topic '999"),
        (["--sub-topics", "s1=201"], "--topics: 201 is not from 1 to 200"),
        (["--sub-topics", "s1=pond"], "--sub-topics: there is no topic 'pond' for s1: there is"),
        (
            ["--suite", "--pub-topics", "p1=1"],
            "--pub-topics cannot be used with --suite, which chooses the peers and their topics",
        ),
        (["--suite", "--sub-command", "sh"], "--sub-command cannot be used with --suite"),
        (["--plot", "picture.bmp"], "--plot: picture.bmp does not end with one of .png"),
        (["--plot", "no/such/picture.png"], "--plot: there is no directory no/such"),
    ],
)
def test_a_slip_is_one_sentence_and_exit_code_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        exit_code: object = main(["experiment", *arguments])
    except SystemExit as ending:
        exit_code = ending.code
    err = capsys.readouterr().err
    assert exit_code == 2
    assert complaint in err and err.count("\n") == 1


def test_without_matplotlib_it_is_said_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["experiment", "--plot", "picture.png"]) in (1, 2)
    err = capsys.readouterr().err
    assert "pip install 'quackmq[plot]'" in err and err.count("\n") == 1


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["experiment", "--help"])
    out = capsys.readouterr().out
    for option in ("--pubs", "--slow-subs", "--silent-subs", "--max-entries", "--delta-ms"):
        assert f"{option} N" in out
    for option in ("--suite", "--plot FILE.png", "--json"):
        assert option in out
