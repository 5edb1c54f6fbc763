"""Build the sdist and the wheel, check what is in them, and try the wheel: `make dist`.

    python -m tests.dist.package [--directory dist] [--python PYTHON]

The changelog must have a dated section for the version. The wheel is built from the sdist, so a
file that the sdist lacks is missed. `twine check` reads the metadata. Then the wheel goes into an
empty environment, and the first example of the README runs there: a broker, and the Python client.
Needs a package index.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from quackmq import __version__
from tests.kit.readme import ROOT, Block, Tour, blocks, section

PACKAGES: Final = ("quackmq", "pyspark_quackmq")
TOOLS: Final = ("build>=1.3", "twine>=6.1")
#: What the sdist has beside the packages.
SDIST_ALSO: Final = (
    *("CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "SECURITY.md", "pyproject.toml"),
    *(".gitignore", "docs"),
)
#: For a slow package index.
STEP_S: Final = 1_800


class BadPackage(AssertionError):
    """A built file does not have the content that it should have."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", default=sys.executable, help="try the wheel with this Python")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quackmq-dist-") as temporary:
        tools = _environment(Path(temporary) / "tools", sys.executable, *TOOLS)
        built = _build(tools, given.directory)
        check_changelog((ROOT / "CHANGELOG.md").read_text(), __version__)
        for path in built:
            check(path)
            print(f"{path.name}: {len(files_of(path))} files, {path.stat().st_size:,} bytes")
        _run(str(tools), "-m", "twine", "check", "--strict", *map(str, built))
        (wheel,) = (path for path in built if path.suffix == ".whl")
        python = _environment(Path(temporary) / "empty", given.python, str(wheel))
        work = Path(temporary) / "work"
        work.mkdir()
        try_first_example(python, work)
    print("the wheel was installed into an empty environment; the README's first example works")


def files_of(path: Path) -> dict[str, bytes]:
    """Return the content of each file of a wheel or sdist, by its path inside the archive.

    The first directory of an sdist, which has its name, is left out.
    """
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(path) as sdist:
        return dict(_members(sdist))


def check(path: Path) -> None:
    """Raise BadPackage if a file is missing, does not belong there, or has a path of this machine.

    Every file of the packages in the work tree must be there.
    """
    content = files_of(path)
    tops = {name.partition("/")[0] for name in content}
    if path.suffix == ".whl":
        expected = {*PACKAGES, *(top for top in tops if top.endswith(".dist-info"))}
    else:
        expected = {*PACKAGES, *SDIST_ALSO}
    if not_expected := sorted(tops - expected):
        raise BadPackage(f"{path.name} has what nobody needs: {', '.join(not_expected)}")
    if missing := sorted(set(package_files(ROOT)) - content.keys()):
        raise BadPackage(f"{path.name} lacks {', '.join(missing)}")
    if not any(Path(name).name == "LICENSE" for name in content):
        raise BadPackage(f"{path.name} has no license")
    _check_texts(path.name, content)


def check_changelog(text: str, version: str) -> None:
    """Raise BadPackage unless the version has a dated section with something in it."""
    released = re.search(
        rf"^## {re.escape(version)} – \d{{4}}-\d{{2}}-\d{{2}}\n(.*?)(?=^## |\Z)",
        text,
        re.MULTILINE | re.DOTALL,
    )
    if released is None or not released[1].strip():
        raise BadPackage(f"CHANGELOG.md says nothing about version {version}")


def package_files(root: Path) -> Iterator[str]:
    """Yield the paths of the packages' files, relative to `root`, without compiled ones."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                yield str(path.relative_to(root))


def try_first_example(python: Path, directory: Path) -> None:
    """Start the broker of the README's tour and run the first program of it."""
    tour = blocks(section((ROOT / "README.md").read_text(), "Five minutes"))
    with Tour(directory, python=python) as running:
        running.run(_first(tour, "console"))
        running.run(_first(tour, "python"))
        running.run(Block("text", "quack\n"))


def _check_texts(name: str, content: Mapping[str, bytes]) -> None:
    here = [f"{path}/".encode() for path in (ROOT, Path.home(), tempfile.gettempdir())]
    for file, data in content.items():
        for path in here:
            if path in data and path != b"/tmp/":
                raise BadPackage(f"{file} in {name} has a path of this machine: {path.decode()}")


def _first(tour: Iterable[Block], kind: str) -> Block:
    return next(block for block in tour if block.kind == kind)


def _members(sdist: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    for member in sdist.getmembers():
        file = sdist.extractfile(member)
        if file is not None:
            yield member.name.partition("/")[2], file.read()


def _build(python: Path, directory: Path) -> list[Path]:
    shutil.rmtree(directory, ignore_errors=True)
    _run(str(python), "-m", "build", "--outdir", str(directory), str(ROOT))
    return sorted(directory.iterdir())


def _environment(directory: Path, python: str, *packages: str) -> Path:
    """Create an environment with these packages and their requirements; return its Python."""
    _run(python, "-m", "venv", str(directory))
    inside = directory / "bin" / "python"
    _run(str(inside), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)
    return inside


def _run(*command: str) -> None:
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STEP_S,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")


if __name__ == "__main__":
    main()
