"""`tools/venv.sh` tells what it does from its first second, and fails with one clear sentence."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parent.parent

#: Stands in for the environment's Python: pip "downloads" a package and ends as it is asked to.
PYTHON = """#!/bin/sh
case "$*" in
    *--version*) exit 0;;
    "-c "*) exit 0;;
    *"pip install"*)
        echo "Collecting duck"
        echo "  Downloading duck-1.2-py3-none-any.whl (3.0 MB)"
        echo "Installing collected packages: duck"
        [ "$PIP_FAILS" = 0 ] || echo "ERROR: no matching distribution"
        exit "$PIP_FAILS";;
esac
exit 9
"""


def set_up(directory: Path, pip_fails: int) -> subprocess.CompletedProcess[str]:
    python = directory / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    return subprocess.run(
        [ROOT / "tools" / "venv.sh", directory / "venv", "spark"],
        env={**os.environ, "PIP_FAILS": str(pip_fails)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_each_package_is_named_while_it_is_fetched(tmp_path: Path) -> None:
    done = set_up(tmp_path, pip_fails=0)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("installing QuackMQ with the extras spark")
    assert rest == ["    duck 1.2 (3.0 MB)", "    unpacking all of them"]


def test_a_failed_installation_shows_the_error_of_pip_and_what_to_look_at(tmp_path: Path) -> None:
    done = set_up(tmp_path, pip_fails=1)
    assert done.returncode == 1
    assert "ERROR: no matching distribution" in done.stdout
    assert "is a package index reachable?" in done.stderr


def test_the_demo_installs_only_its_own_extras() -> None:
    planned = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "venv.sh .venv spark" in planned.stdout
    assert "test" not in planned.stdout
