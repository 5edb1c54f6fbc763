"""Experiments whose peers have different topics, or are programs of the user: real processes that
speak the line protocol on their pipes, or fail to.

Shell scripts are used where the language does not matter, because they start fast.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from quackmq import limits as shared_limits
from quackmq.cli import limits
from quackmq.cli.experiment import runner as experiment_run
from quackmq.cli.experiment.plan import Experiment
from quackmq.cli.experiment.report import Outcome
from quackmq.cli.main import main
from quackmq.errors import QuackError, QuackTimeout
from tests.cli.test_experiment import CALM, is_running, run_to_end
from tests.kit.server import DEADLINE_S, Server
from tests.kit.tables import each

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PUBLISHER = f"{sys.executable} {EXAMPLES / 'pipe_publisher.py'}"
SUBSCRIBER = f"{sys.executable} {EXAMPLES / 'pipe_subscriber.py'}"

#: The beginning of a script: it connects and chooses its topics. $ROLE is pub or sub.
CONNECT = """
say() { echo "$1"; read -r answer; }
say "$ROLE $PEER_ID connect"; say end
for topic in $PEER_TOPICS; do say "$ROLE $PEER_ID topic $topic"; done
say end
"""
PUBLISH = f"""ROLE=pub {CONNECT}
for number in 1 2 3; do for topic in $PEER_TOPICS; do say "topic $topic [quack $number]"; done; done
say terminate
"""
CONNECT_AS_SUB = f"ROLE=sub; {CONNECT}"
ANSWER = 'while read -r line && [ "$line" != terminate ]; do echo successful; done'
SUBSCRIBE = f"{CONNECT_AS_SUB} {ANSWER}"


class Scripts:
    """Shell scripts in files, and experiments with them as peers."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def command(self, name: str, text: str) -> str:
        """Write a script; return the command that runs it."""
        (self._directory / name).write_text(text)
        return f"sh {self._directory / name}"

    def outcome(self, *, pubs: int = 0, subs: int = 0, **settings: Any) -> Outcome:
        """Run an experiment; without other commands, a script publishes and one subscribes."""
        commands: dict[str, Any] = {"command_ms": limits.EXPERIMENT_LONGEST_COMMAND_MS}
        commands["pub_commands"] = [self.command("publish.sh", PUBLISH)]
        commands["sub_commands"] = [self.command("subscribe.sh", SUBSCRIBE)]
        experiment = Experiment(**(CALM | commands | {"pubs": pubs, "subs": subs} | settings))
        data = tempfile.mkdtemp(dir=self._directory)
        run = experiment_run.run(experiment, Path(data), experiment_run.Observer(), "os")
        return asyncio.run(run)


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


# --- good programs and different topics --------------------------------------------------------


def test_q1_each_peer_has_its_own_topics_and_is_accounted_for_them(scripts: Scripts) -> None:
    outcome = scripts.outcome(
        pubs=2,
        subs=2,
        topics=3,
        entries=12,
        pub_topics={"p1": ["1", "2"], "p2": ["3"], "p3": ["2"]},
        sub_topics={"s1": ["1"], "s2": ["2", "3"]},
    )
    assert outcome.problems() == []
    assert outcome.held == {"1": 6, "2": 6 + 3, "3": 12}
    published = {each.id: (each.topics, each.published) for each in outcome.publishers}
    assert {name: (list(topics), count) for name, (topics, count) in published.items()} == {
        "p1": (["1", "2"], 12),
        "p2": (["3"], 12),
        "p3": (["2"], 3),
    }
    received = {
        each.id: (list(each.topics), each.published, each.delivered) for each in outcome.subscribers
    }
    assert received == {
        "s1": (["1"], 6, 6),
        "s2": (["2", "3"], 21, 21),
        "s3": (["1", "2", "3"], 27, 27),
    }
    assert [
        re.sub(" on pipes of process [0-9]+, topics", "", line) for line in outcome.records
    ] == [
        "pub p1: 1, 2",
        "pub p2: 3",
        "pub p3: 2",
        "sub s1: 1",
        "sub s2: 2, 3",
        "sub s3: 1, 2, 3",
    ]


def test_q1_m12_the_example_programs_are_peers_on_the_pipes_that_they_inherit() -> None:
    exit_code, out, err = run_to_end(
        *("--json", "--topics", 2, "--seconds", 100, "--delta-ms", 0),
        *("--command-ms", 60_000, "--answer-ms", 60_000),
        *("--pub-command", PUBLISHER, "--sub-command", SUBSCRIBER),
    )
    assert exit_code == 0, out + err
    report = json.loads(out)
    (publisher,), (subscriber,) = report["publishers"], report["subscribers"]
    assert (publisher["published"], publisher["end"]) == (10, "terminated")
    assert (publisher["command"], publisher["exit_code"]) == (PUBLISHER, 0)
    assert (subscriber["published"], subscriber["delivered"]) == (10, 10)
    assert (subscriber["exit_code"], subscriber["was_killed"]) == (0, False)
    assert subscriber["end"] == "terminated by the broker"
    # The order between two topics is not fixed.
    wanted = [f"s1 got 'quack {each}' of topic {each % 2 + 1}" for each in range(10)]
    assert sorted(err.splitlines()) == wanted, "stderr is passed on"


def test_q1_a_program_may_choose_other_topics_and_another_id(scripts: Scripts) -> None:
    renamed = "PEER_ID=daisy; PEER_TOPICS=pond;"
    outcome = scripts.outcome(
        pub_commands=[scripts.command("pub.sh", f"PEER_TOPICS=pond; {PUBLISH}")],
        sub_commands=[scripts.command("sub.sh", f"{renamed} {SUBSCRIBE}")],
    )
    assert outcome.problems() == []
    assert outcome.held == {"1": 0, "pond": 3}
    (subscriber,) = outcome.subscribers
    assert (subscriber.id, subscriber.delivered) == ("daisy", 3)


def test_a_program_may_leave_early_and_its_rest_is_counted(scripts: Scripts) -> None:
    leave = f"{CONNECT_AS_SUB} read -r line; echo successful; read -r line; echo terminate"
    outcome = scripts.outcome(sub_commands=[scripts.command("leave.sh", leave)])
    (subscriber,) = outcome.subscribers
    assert outcome.problems() == []
    assert (subscriber.delivered, subscriber.left, subscriber.end) == (1, 2, "terminated")


def test_q11_a_publisher_that_does_not_stop_is_terminated_when_its_time_is_over(
    scripts: Scripts,
) -> None:
    endless = f"""ROLE=pub {CONNECT}
    while [ "$answer" != terminate ]; do say "topic 1 [quack]"; done"""
    outcome = scripts.outcome(pub_commands=[scripts.command("pub.sh", endless)], seconds=0.2)
    (publisher,) = outcome.publishers
    assert outcome.problems() == []
    assert publisher.end == "terminated by the broker"
    assert publisher.published == outcome.published > 0


def test_entries_of_a_program_that_the_broker_rejected_are_counted(scripts: Scripts) -> None:
    too_long = "x" * (shared_limits.LINE_ENTRY_BYTES + 1)
    bad = scripts.command(
        "bad.sh",
        f'ROLE=pub {CONNECT} say "topic 9 [quack]"; say "topic 1 [{too_long}]"; say terminate',
    )
    mixed = scripts.command(
        "mixed.sh",
        f'ROLE=pub {CONNECT} say "topic 9 [quack]"; say "topic 1 [quack]"; say terminate',
    )
    outcome = scripts.outcome(pub_commands=[bad, mixed])
    assert [(each.published, each.rejected) for each in outcome.publishers] == [(0, 2), (1, 1)]
    (sentence,) = outcome.problems()
    assert sentence.startswith(
        "publisher p1 published nothing: the broker rejected 2 messages; the last reason: "
    )
    assert str(shared_limits.LINE_ENTRY_BYTES) in sentence, "the reason is that of the second entry"


# --- programs that fail ------------------------------------------------------------------------


@each(
    ("script", "reason"),
    [
        ("exit 3", "exited with code 3 before it had chosen its topics"),
        ("kill -KILL $$", r"was ended by signal 9 \(Killed\) before it had chosen its topics"),
        ("exec >&-; exec sleep 100", "closed its output before it had chosen its topics"),
        (
            "echo quack; read -r line; read -r line",
            r"did not keep to the protocol \(begin with pub",
        ),
        (PUBLISH, "connected as a publisher: use --pub-command for it"),
    ],
)
def test_a_program_that_does_not_get_ready_ends_the_experiment_with_the_reason(
    script: str, reason: str, scripts: Scripts
) -> None:
    command = scripts.command("bad.sh", script)
    with pytest.raises(QuackError, match=f"^--sub-command '{re.escape(command)}' .*{reason}"):
        scripts.outcome(sub_commands=[command])


@each(
    ("script", "wait_ms", "reason"),
    [
        ("read -r line", 100, "sent no `sub ID connect`"),
        (
            "echo sub s1 connect; while :; do read -r line; done",
            1_000,
            "connected, but has not ended its list of `sub ID topic K`",
        ),
    ],
)
def test_a_program_that_keeps_silent_is_not_waited_for_longer_than_its_time(
    script: str, wait_ms: int, reason: str, scripts: Scripts
) -> None:
    command = scripts.command("silent.sh", script)
    hint = "each line must end with a newline, and be flushed"
    with pytest.raises(QuackTimeout, match=f"{reason} within {wait_ms} ms: {hint}"):
        scripts.outcome(sub_commands=[command], command_ms=wait_ms)


def test_two_programs_cannot_have_one_id(scripts: Scripts) -> None:
    daisy = scripts.command("daisy.sh", f"PEER_ID=daisy; {SUBSCRIBE}")
    with pytest.raises(QuackError, match="connected as 'daisy', the id of another peer: .*'s2'"):
        scripts.outcome(sub_commands=[daisy, daisy])


@each(
    ("script", "settings", "problem"),
    [
        (
            "read -r line; exit 4",
            {},
            "did not terminate cleanly: disconnected without terminate; it exited with code 4",
        ),
        (f"{ANSWER}; exit 5", {}, "exited with code 5"),
        (
            "while read -r line; do :; done",
            {"answer_ms": 200},
            "did not terminate cleanly: silent for too long (no answer to an entry for 200 ms",
        ),
    ],
)
def test_a_program_that_does_not_end_well_is_named_in_the_report(
    script: str, settings: dict[str, int], problem: str, scripts: Scripts
) -> None:
    command = scripts.command("bad.sh", CONNECT_AS_SUB + script)
    outcome = scripts.outcome(sub_commands=[command], slow_ms=0, **settings)
    (sentence,) = outcome.problems()
    assert sentence.startswith(f"subscriber s1 ({command!r}) {problem}")
    (subscriber,) = outcome.subscribers
    assert subscriber.published == 3 == subscriber.delivered + subscriber.left
    # A program that only exits with another code has terminated before.
    assert outcome.dead == int("did not terminate" in problem)


def test_a_program_that_does_not_exit_is_killed_with_the_processes_that_it_has_started(
    scripts: Scripts, tmp_path: Path
) -> None:
    stubborn = f"{SUBSCRIBE}; sleep 100 & echo $! > {tmp_path}/child; wait"
    outcome = scripts.outcome(
        sub_commands=[scripts.command("stubborn.sh", stubborn)], command_ms=1_000
    )
    (sentence,) = outcome.problems()
    assert "did not exit within 1000 ms after the end of its connection, and was killed" in sentence
    assert outcome.subscribers[0].delivered == 3
    child = int((tmp_path / "child").read_text())
    end_s = time.monotonic() + DEADLINE_S
    while is_running(child):
        assert time.monotonic() < end_s, "the process that it has started is still there"
        time.sleep(0.01)


@each(
    ("command", "complaint"),
    [
        ("no-such-program", "there is no program 'no-such-program': give the name of a program in"),
        ("", "it names no program"),
        ("it's", "it cannot be split into words: No closing quotation"),
    ],
)
def test_a_command_that_cannot_be_run_is_refused_before_anything_starts(
    command: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["experiment", "--pub-command", command]) == 2
    assert capsys.readouterr().err == f"quackmq: --pub-command {command!r}: {complaint}" + (
        " PATH, or the path of an executable file\n" if "no-such" in command else "\n"
    )


def test_a_file_or_directory_that_cannot_be_run_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sub.sh").write_text("#!/bin/sh\n")
    Path("pond").mkdir()
    for command, hint in (
        ("sub.sh", "or the path of an executable file; did you mean ./sub.sh?"),
        ("./sub.sh", "'./sub.sh' is not executable: run chmod +x on it"),
        ("./pond", "'./pond' is a directory"),
        ("x" * 5_000, "there is no program 'xxx"),
    ):
        assert main(["experiment", "--sub-command", command]) == 2
        assert hint in capsys.readouterr().err


def test_q11_an_interrupt_ends_programs_too_and_does_not_wait_long_for_them(
    scripts: Scripts,
) -> None:
    publish = scripts.command("pub.sh", f"ROLE=pub {CONNECT} echo published >&2; {ANSWER}")
    stubborn = scripts.command("sub.sh", f"{SUBSCRIBE}; exec sleep 100")
    options = ("--seconds", 1000, "--pub-command", publish, "--sub-command", stubborn)
    with Server("experiment", *options, environment={"PATH": "/usr/bin:/bin"}) as command:
        assert command.line().startswith("pub p1")
        command.send(signal.SIGINT)
        out = []
        while line := command.line():
            out.append(line)
        assert command.exit_code() == 1
        assert re.search("^p1 .*terminated by the broker; exited with code 0$", "".join(out), re.M)
        assert f"did not exit within {limits.EXPERIMENT_INTERRUPTED_MS} ms" in out[-1]
