"""The list of planted bugs is kept up to date: every one applies, and names tests that exist."""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants.__main__ import ENVIRONMENT, Outcome, make_environment, summarise, try_mutant
from tests.mutants.plan import ROOT, Mutant, StaleMutant, load


def test_a_mutant_applies_and_its_tests_exist() -> None:
    wrong = [problem for mutant in load() for problem in problems_of(mutant)]
    assert not wrong, "\n".join(wrong)


def problems_of(mutant: Mutant) -> Iterator[str]:
    try:
        compile(mutant.planted((ROOT / mutant.file).read_text()), mutant.file, "exec")
    except (StaleMutant, SyntaxError) as error:
        yield str(error)
    for test in mutant.tests:
        path, _, name = test.partition("::")
        function = name.rpartition("::")[2].partition("[")[0]
        if not (ROOT / path).exists():
            yield f"{mutant.name} names {path}, which is not there"
        elif name and f"def {function}(" not in (ROOT / path).read_text():
            yield f"{mutant.name} names {function}, which is not in {path}"


def test_a_mutant_whose_text_has_gone_is_stale() -> None:
    mutant = Mutant("gone", "x.py", "old", "new", ("tests",))
    with pytest.raises(StaleMutant, match="occurs 0 times in x.py"):
        mutant.planted("something else")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A tree with one function and one test, and its environment."""
    make_environment(tmp_path)
    (tmp_path / "one.py").write_text("def one() -> int:\n    return 1\n")
    (tmp_path / "test_one.py").write_text(
        "from one import one\ndef test_one(): assert one() == 1\n"
    )
    return tmp_path


@pytest.mark.processes
@pytest.mark.parametrize(
    ("new", "verdict", "test"),
    [("return 2", "caught", "test_one"), ("return 1  # same", "survived", "")],
)
def test_a_mutant_is_caught_when_its_tests_fail(
    copy: Path, new: str, verdict: str, test: str
) -> None:
    mutant = Mutant("one", "one.py", "return 1", new, ("test_one.py",))
    outcome = try_mutant(mutant, copy)
    assert (outcome.verdict, outcome.failed_test) == (verdict, test)
    assert (copy / "one.py").read_text() == "def one() -> int:\n    return 1\n"


@pytest.mark.processes
def test_no_process_of_a_test_outlives_the_run(copy: Path) -> None:
    (copy / "one.py").write_text("LEAVES = False\n")
    (copy / "test_one.py").write_text(LEAVING_TEST)
    mutant = Mutant("one", "one.py", "False", "True", ("test_one.py",))
    assert try_mutant(mutant, copy).verdict == "caught"
    with (copy / "held").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # the process that held it has ended


#: Its process holds a lock until it ends.
LEAVING_TEST = """
import fcntl, subprocess
from one import LEAVES

def test_one():
    with open("held", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        subprocess.Popen(["sleep", "600"], pass_fds=[held.fileno()])
    assert not LEAVES
"""


@pytest.mark.processes
def test_a_process_without_an_environment_runs_the_copy(copy: Path) -> None:
    (copy / "quackmq").mkdir()
    (copy / "quackmq" / "__init__.py").touch()
    (copy / "quackmq" / "cli").mkdir()
    (copy / "quackmq" / "cli" / "entry.py").write_text("def main(): print('the copy')\n")
    script = copy / ENVIRONMENT / "bin" / "quackmq"
    ran = subprocess.run([script], cwd="/", env={}, capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("the copy\n", "")


@pytest.mark.processes
def test_two_bugs_of_one_size_are_both_run(copy: Path) -> None:
    """Python would take the bytecode of the first for the second's, if both had the same time."""
    for new in ("return 2", "return 1", "return 3"):
        mutant = Mutant("one", "one.py", "return 1", new, ("test_one.py",))
        expected = "survived" if new == "return 1" else "caught"
        assert try_mutant(mutant, copy).verdict == expected


def test_a_stale_mutant_counts_against_the_score(capsys: pytest.CaptureFixture[str]) -> None:
    mutant = Mutant("gone", "x.py", "old", "new", ("tests",))
    assert summarise([Outcome(mutant, "stale", 0)]) == 1
    assert "0 of 1 planted bugs caught" in capsys.readouterr().out
