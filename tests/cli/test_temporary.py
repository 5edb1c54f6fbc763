"""Temporary directories of commands: gone at the end, and those that a kill has left are swept."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from quackmq.cli.experiment.temporary import temporary_directory


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_empty_and_goes_with_all_that_is_in_it(root: Path) -> None:
    with temporary_directory("quack-") as directory:
        assert directory.parent == root and directory.name.startswith("quack-")
        assert list(directory.iterdir()) == []
        (directory / "deep").mkdir()
        (directory / "deep" / "file").write_text("quack")
    assert list(root.iterdir()) == []


def test_it_goes_when_something_fails(root: Path) -> None:
    with pytest.raises(ZeroDivisionError), temporary_directory("quack-"):
        raise ZeroDivisionError
    assert list(root.iterdir()) == []


def test_what_nobody_uses_is_swept_and_what_somebody_uses_is_not(root: Path) -> None:
    (root / "quack-left" / "deep").mkdir(parents=True)
    with temporary_directory("quack-") as first, temporary_directory("quack-") as second:
        assert sorted(root.iterdir()) == sorted([first, second])


def test_what_is_called_otherwise_or_is_no_directory_is_let_alone(root: Path) -> None:
    others = [root / "duck-left", root / "quack-file", root / "quack-link"]
    others[0].mkdir()
    others[1].write_text("precious")
    others[2].symlink_to(others[0])
    with temporary_directory("quack-"):
        pass
    assert sorted(root.iterdir()) == sorted(others)
