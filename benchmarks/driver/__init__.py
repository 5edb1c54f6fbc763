"""The load drivers, built where they are used, and what they say.

One is `loads.c` with the client of one system (see client.h), which works as applications do,
through a library. The other is `crowd.c`, many clients in one thread that do next to nothing
themselves.

Headers and libraries are Debian's `-dev` packages, which belong together; the librdkafka inside the
wheel of confluent-kafka is newer, but has no header of its version beside it, and its name changes
with every build.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks import packages

SOURCES: Final = Path(__file__).parent
FLAGS: Final = ("-O2", "-Wall", "-Wextra", "-Werror", "-pthread")


class Library(NamedTuple):
    """What a client is built on: Debian's package, and what the linker calls it."""

    package: str | None
    links: tuple[str, ...]


#: By the name of the client's source.
LIBRARIES: Final = {
    "kafka": Library("librdkafka-dev", ("-lrdkafka",)),
    "nats": Library("libnats-dev", ("-lnats",)),
    "redis": Library("libhiredis-dev", ("-lhiredis",)),
    "rabbitmq": Library(None, ()),
}


class LoadFailed(Exception):
    """The driver gave up; with what it said last."""


class Driver:
    """A driver built into a directory. Raises packages.Unavailable when that cannot be done."""

    def __init__(self, directory: Path, client: str = "kafka") -> None:
        self._program = directory / f"driver-{client}"
        self._environment = dict(os.environ)
        library = LIBRARIES[client]
        flags: list[str] = []
        if library.package is not None:
            package = packages.fetch(library.package)
            flags = package.compiler_flags
            self._environment |= package.environment
        # A library may need others, which lie beside it and which only the loader will look for.
        flags += [*library.links, "-Wl,--allow-shlib-undefined"]
        _build(self._program, ("loads", client), flags)

    @property
    def client(self) -> str:
        """The client library and its version."""
        return self._run("client").strip()

    def run(self, *arguments: object, timeout_seconds: float | None = None) -> dict[str, float]:
        """A command that comes to an end, and its figures. Raises LoadFailed."""
        figures: dict[str, float] = json.loads(self._run(*arguments, timeout=timeout_seconds))
        return figures

    @contextmanager
    def staying(self, *arguments: object) -> Iterator[None]:
        """A command that stays; everything that it stands for is there."""
        command = [str(self._program), *map(str, arguments)]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=self._environment
        ) as running:
            assert running.stdin is not None and running.stdout is not None
            try:
                if running.stdout.readline() != "ready\n":
                    raise RuntimeError(f"the driver did not get ready: {' '.join(command)}")
                yield
                running.stdin.close()
                running.wait()
            finally:
                running.kill()

    def _run(self, *arguments: object, timeout: float | None = None) -> str:
        command = [str(self._program), *map(str, arguments)]
        return _said_by(command, env=self._environment, timeout=timeout)


class Crowd:
    """Built into a directory. Raises packages.Unavailable when that cannot be done."""

    def __init__(self, directory: Path) -> None:
        self._program = directory / "crowd"
        _build(self._program, ("crowd",), ())

    def run(
        self,
        framing: str,
        address: str,
        connections: int,
        milliseconds: int,
        requests: Sequence[bytes],
        answer: bytes,
    ) -> dict[str, float]:
        """So many clients, each with one request under way; `answer` is how each answer must begin
        behind its framing. Raises LoadFailed."""
        command = [str(self._program), framing, address, str(connections), str(milliseconds)]
        lines = "".join(f"{each.hex()}\n" for each in (answer, *requests))
        figures: dict[str, float] = json.loads(_said_by(command, input=lines))
        return figures


def _build(program: Path, sources: Sequence[str], flags: Sequence[str]) -> None:
    packages.install_compiler()
    files = [str(SOURCES / f"{name}.c") for name in (*sources, "common")]
    subprocess.run(("gcc", *FLAGS, "-o", str(program), *files, *flags), check=True)


def _said_by(command: list[str], timeout: float | None = None, **options: Any) -> str:
    try:
        done: subprocess.CompletedProcess[str] = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=False, **options
        )
    except subprocess.TimeoutExpired:
        raise LoadFailed(f"not done in {timeout:.0f} s") from None
    if done.returncode != 0:
        raise LoadFailed((done.stderr.strip().splitlines() or ["no reason given"])[-1])
    return done.stdout
