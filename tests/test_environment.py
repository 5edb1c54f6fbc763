"""What sets up a developer: `tools/venv.sh`, the lock file, the linters, the hooks of commits.

`tools/venv.sh` tells what it does from its first second, and fails with one clear sentence.
"""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


@pytest.mark.processes
def test_each_package_is_named_while_it_is_fetched(tmp_path: Path) -> None:
    done = set_up(tmp_path, pip_fails=0)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("installing QuackMQ with the extras spark")
    assert rest == ["    duck 1.2 (3.0 MB)", "    unpacking all of them"]


@pytest.mark.processes
def test_a_failed_installation_shows_the_error_of_pip_and_what_to_look_at(tmp_path: Path) -> None:
    done = set_up(tmp_path, pip_fails=1)
    assert done.returncode == 1
    assert "ERROR: no matching distribution" in done.stdout
    assert "is a package index reachable?" in done.stderr


@pytest.mark.processes
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


@pytest.mark.processes
def test_the_hooks_of_a_commit_are_the_commands_of_lint() -> None:
    planned = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "lint"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lint = [line for line in planned.stdout.splitlines() if line.startswith(".venv/bin/python")]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert len(lint) == 3
    assert re.findall(r"entry: (.+)", hooks) == lint
    assert re.findall(r"repo: (.+)", hooks) == ["local"], "a hook of elsewhere is a download"


def test_mypy_checks_every_program() -> None:
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    directories = {path.parent.name for path in ROOT.glob("[!.]*/*.py")}
    assert set(checked["packages"]) == directories - {"examples"}
    examples = [path.relative_to(ROOT / "examples") for path in ROOT.glob("examples/**/*.py")]
    assert checked["modules"] == sorted(".".join(path.with_suffix("").parts) for path in examples)


def test_the_lock_file_has_a_version_that_fits_every_requirement() -> None:
    locked: dict[str, str] = {}
    for line in (ROOT / "requirements-dev.lock").read_text().splitlines():
        if not line.startswith("#"):
            name, equals, version = line.partition("==")
            assert equals and version, f"{line} is no pinned version"
            locked[canonicalize_name(name)] = version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for each in (project["dependencies"], *project["optional-dependencies"].values()):
        for requirement in map(Requirement, each):
            pinned = locked.get(canonicalize_name(requirement.name))
            assert pinned is not None, f"{requirement.name} is not locked: make lock"
            assert pinned in requirement.specifier, f"{requirement} is locked at {pinned}"
