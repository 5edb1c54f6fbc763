"""Debian packages, unpacked and not installed: nothing on the machine changes but a directory here.

Servers and headers that only a benchmark needs are downloaded with what they depend on and is not
installed, and unpacked below `target/`. So no service is enabled or started, no user is made, no
right beyond reading the package lists is needed, and removing the directory removes everything.
What is installed on the machine already is used from there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

#: All that is fetched or built for a benchmark; git does not look at it.
TARGET: Final = Path(__file__).with_name("target")

_QUIET: Final = {"DEBIAN_FRONTEND": "noninteractive"}
_SAID_LINES: Final = 10
#: Stands in a package's directory once all of it is there.
_WHOLE: Final = ".whole"
#: Holds a copy of the file that a directory was made from.
_MADE_FROM: Final = ".made-from"


class Unavailable(Exception):
    """Something could not be fetched; the message says what and why."""


@dataclass(frozen=True)
class Package:
    """A package that is there, and where to look for its files."""

    name: str
    unpacked: Path

    def find(self, pattern: str) -> Path:
        """The file that a pattern of a path below the root fits; of several, the last by name."""
        for root in (self.unpacked, Path("/")):
            if found := sorted(root.glob(pattern)):
                return found[-1]
        raise Unavailable(f"{self.name} has no {pattern}")

    @property
    def compiler_flags(self) -> list[str]:
        """For a program in C that uses it."""
        includes = [f"-I{path}" for path in self._existing("usr/include")]
        return [*includes, *(f"-L{path}" for path in self._libraries())]

    @property
    def environment(self) -> dict[str, str]:
        """For a program that uses it, in addition to what there is."""
        libraries = ":".join(str(path) for path in self._libraries())
        return {"LD_LIBRARY_PATH": libraries} if libraries else {}

    def _libraries(self) -> Iterator[Path]:
        yield from self._existing("usr/lib/*-linux-*")
        yield from self._existing("lib/*-linux-*")

    def _existing(self, pattern: str) -> list[Path]:
        return sorted(self.unpacked.glob(pattern))


def fetch(name: str) -> Package:
    """A package by its name, unpacked unless it is installed or was unpacked before."""
    package = Package(name, TARGET / "debian" / name)
    if _is_installed(name) or (package.unpacked / _WHOLE).exists():
        return package
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise Unavailable(f"{name}: this is no Debian")
    shutil.rmtree(package.unpacked, ignore_errors=True)
    package.unpacked.mkdir(parents=True)
    try:
        _download(name, package.unpacked)
    except subprocess.CalledProcessError:
        # Lists may be old or missing, so ask for them only when a first try fails.
        _update()
        try:
            _download(name, package.unpacked)
        except subprocess.CalledProcessError as error:
            raise unavailable(f"Debian's package {name}", error.stderr) from error
    for archive in package.unpacked.glob("*.deb"):
        _run("dpkg-deb", "-x", str(archive), str(package.unpacked))
        archive.unlink()
    shutil.rmtree(package.unpacked / "usr/share", ignore_errors=True)  # documents
    (package.unpacked / _WHOLE).touch()
    return package


def unavailable(what: str, said: str) -> Unavailable:
    """What failed says why, with names of machines that are nobody's business later on."""
    print("\n".join(said.strip().splitlines()[-_SAID_LINES:]), file=sys.stderr)
    return Unavailable(f"{what} could not be fetched")


def is_made_from(source: Path, directory: Path) -> bool:
    """Whether a directory was made from a file that has not changed since."""
    stamp = directory / _MADE_FROM
    return stamp.exists() and stamp.read_text() == source.read_text()


def mark_made_from(source: Path, directory: Path) -> None:
    (directory / _MADE_FROM).write_text(source.read_text())


def install_compiler() -> None:
    """A compiler is a tool of its own, so it is installed for good, where that is ours to do."""
    if shutil.which("gcc") is not None:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Unavailable("gcc is not here, and not ours to install")
    command = ("apt-get", "install", "--yes", "--quiet", "--no-install-recommends")
    try:
        _run(*command, "gcc", "libc6-dev")
    except subprocess.CalledProcessError:
        _update()
        _run(*command, "gcc", "libc6-dev")


def _is_installed(name: str) -> bool:
    if shutil.which("dpkg-query") is None:
        return False
    command = ("dpkg-query", "--show", "--showformat=${db:Status-Status}", name)
    return (
        subprocess.run(command, capture_output=True, text=True, check=False).stdout == "installed"
    )


def _download(name: str, directory: Path) -> None:
    """A package and all that it needs beyond what is installed."""
    planned = _run("apt-get", "install", "--simulate", "--no-install-recommends", name)
    missing = [line.split()[1] for line in planned.splitlines() if line.startswith("Inst ")]
    # Another user, to which apt would change, may not write here.
    as_we_are = ("-o", "APT::Sandbox::User=root")
    _run("apt-get", *as_we_are, "--quiet", "download", *missing, directory=directory)


def _update() -> None:
    if os.geteuid() == 0:
        subprocess.run(
            ("apt-get", "update", "--quiet"),
            env=os.environ | _QUIET,
            capture_output=True,
            check=False,
        )


def _run(*command: str, directory: Path | None = None) -> str:
    environment = os.environ | _QUIET
    done = subprocess.run(
        command, cwd=directory, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout
