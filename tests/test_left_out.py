"""Tests whose programs are missing are left out by name, and never in continuous integration."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

TESTS = """
import pytest

def test_without_needs(): pass

@pytest.mark.needs("kcat")
def test_with_kcat(): pass
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A suite of its own, with our conftest."""
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = needs(*programs): see conftest")
    (tmp_path / "test_suite.py").write_text(TESTS)
    (tmp_path / "bin").mkdir()
    return tmp_path


def run(suite: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=suite,
        env={"PATH": str(suite / "bin"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, result.stdout + result.stderr


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_a_test_without_its_program_is_left_out_by_name(
    suite: Path, workers: tuple[str, ...]
) -> None:
    exit_code, output = run(suite, *workers)
    assert exit_code == 0
    assert "LEFT OUT test_suite.py::test_with_kcat: no working kcat here" in output
    assert "1 passed" in output


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_in_continuous_integration_that_is_a_failure(suite: Path, workers: tuple[str, ...]) -> None:
    exit_code, output = run(suite, *workers, CI="true")
    assert exit_code == 1
    assert "LEFT OUT test_suite.py::test_with_kcat: no working kcat here" in output
    assert "FAILED, because CI=true" in output


def test_with_its_program_it_runs(suite: Path) -> None:
    program = suite / "bin" / "kcat"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)
    exit_code, output = run(suite, CI="true")
    assert exit_code == 0
    assert "2 passed" in output
    assert "LEFT OUT" not in output


def test_a_program_that_is_there_but_does_not_work_counts_as_missing(suite: Path) -> None:
    program = suite / "bin" / "kcat"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    exit_code, output = run(suite)
    assert exit_code == 0
    assert "LEFT OUT test_suite.py::test_with_kcat" in output
