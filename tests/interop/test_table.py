"""The table of docs/kafka.md is what the tests prove, and each cell is proved or explained."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.interop import suite, table
from tests.interop.table import DOCUMENT, Cell, Collected


@pytest.mark.processes
def test_each_cell_is_proved_or_explained_and_the_document_says_so() -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "tests.interop.table", "--check"],
        cwd=DOCUMENT.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of two clients and two capabilities, of which nothing is proved yet."""
    monkeypatch.setattr(table, "CLIENTS", {"one": lambda: "1.0", "two": lambda: None})
    monkeypatch.setattr(table, "CAPABILITIES", {"fly": (), "swim": ("fast", "slow")})
    monkeypatch.setattr(table, "MISSING", {Cell("two", "fly"): "has no wings"})


def proofs(*cells: Cell) -> Collected:
    collected = Collected()
    collected.proofs = {cell: [f"test of {table.named(cell)}"] for cell in cells}
    return collected


ONE = (Cell("one", "fly"), Cell("one", "swim", "fast"), Cell("one", "swim", "slow"))


@pytest.mark.usefixtures("small")
def test_what_is_neither_proved_nor_explained_is_named() -> None:
    assert table.complaints(proofs(*ONE, Cell("two", "swim", "slow"))) == [
        "two/swim/fast is proved by no test, nor explained in MISSING"
    ]


@pytest.mark.usefixtures("small")
def test_what_is_proved_and_said_to_be_missing_is_named() -> None:
    both = [Cell("two", "swim", part) for part in ("fast", "slow")]
    assert table.complaints(proofs(*ONE, *both, Cell("two", "fly"))) == [
        "two/fly is missing (has no wings), but test of two/fly proves it"
    ]


@pytest.mark.usefixtures("small")
def test_an_explanation_of_something_that_is_not_in_the_table_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reasons = {Cell("two", "fly"): "no", Cell("two", "swim"): "no", Cell("two", "walk"): "no"}
    monkeypatch.setattr(table, "MISSING", reasons)
    assert table.complaints(proofs(*ONE)) == ["two/walk in MISSING is no cell"]


@pytest.mark.usefixtures("small")
def test_a_cell_shows_what_is_proved_and_where_to_read_why_something_is_not() -> None:
    shown = table.table(proofs(*ONE, Cell("two", "swim", "slow")), {"one": "1.0", "two": "0.9"})
    assert shown.splitlines() == [
        "|  | one | two |",
        "| --- | :-: | :-: |",
        "| version | 1.0 | 0.9 |",
        "| fly | ✓ | – (1) |",
        "| swim | ✓ | slow |",
        "",
        "1. has no wings",
    ]
    assert table.versions_in(shown) == {"one": "1.0", "two": "0.9"}


def test_a_proof_runs_with_each_client_that_has_the_capability() -> None:
    assert suite.capable({}, "produce") == list(suite.ADAPTERS)
    assert "kcat" not in suite.capable({}, "create topics")
    assert "kcat" in suite.capable({}, "transactions", "commit and abort")
    assert "kcat" not in suite.capable({}, "transactions", "commit and abort", "fencing")
    assert "kafkajs" not in suite.capable({"kafkajs": "does it otherwise"}, "produce")


@pytest.mark.parametrize("name", ["kcat", "a client that is not there"])
def test_a_reason_why_a_proof_does_not_fit_is_refused_for_a_client_that_would_not_run_it(
    name: str,
) -> None:
    with pytest.raises(AssertionError, match=f"create topics: .*{name}"):
        suite.capable({name: "for some reason"}, "create topics")
