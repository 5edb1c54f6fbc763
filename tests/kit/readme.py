"""Runs what a section of a README tells its readers to type.

A section's code is fenced, and what a fence says is what happens:

    ```sh        each line is run by a shell, in an empty directory; it must end well. A line
                 `quackmq serve …` runs on beside the others, until the next such line or the end.
    ```console   the same of what stands behind a "$ "; the lines below it must have been printed
    ```python    is run as a program
    ```text      is what the block before it must have printed, line by line, with "…" for anything

Of what is only indented, `make` is asked whether it could; the rest of it is what make would print.
Ports that a broker has by default are free ones here, wherever they stand, and a `quackmq.Client`
without an address gets one. What sets up a machine is not run, and SET_UP says so.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tests.kit.server import Server

ROOT: Final = Path(__file__).resolve().parents[2]
#: The ports of a broker's listeners, unless it is told otherwise.
PORTS: Final = {
    "kafka": "9092",
    "http": "8002",
    "zmq": "5555",
    "xsub": "5556",
    "xpub": "5557",
    "proxy": "5558",
    "line": "5550",
}
#: Lines that change the machine of whoever types them.
SET_UP: Final = (". .venv/bin/activate", "pip install")
SERVE: Final = "quackmq serve"
LINE_SECONDS: Final = 60

_BLOCK: Final = re.compile(
    r"^```(?P<kind>\w*)\n(?P<code>.*?)^```$|^(?P<indented>(?: {4}[^\n]+\n)+)",
    re.MULTILINE | re.DOTALL,
)
INDENTED: Final = "indented"
KINDS: Final = {"sh", "console", "python", "text", INDENTED}
#: What a client has by default, and a client of ours must not.
_NO_ADDRESS: Final = re.compile(r"(?<=quackmq\.Client\()(?=\)|\w+=)")
#: A refusal is a failure, also for curl.
_CURLRC: Final = "silent\nfail-with-body\n"


class Block(NamedTuple):
    """`kind` is what stands behind the fence."""

    kind: str
    text: str


class Wrong(AssertionError):
    """Something in a README is not so."""


def section(readme: str, title: str) -> str:
    """What stands between a heading and the next one of its kind."""
    _, found, rest = readme.partition(f"\n## {title}\n")
    if not found:
        raise Wrong(f"there is no section {title!r}")
    return rest.partition("\n## ")[0]


def blocks(text: str) -> list[Block]:
    found = [
        Block(INDENTED, textwrap.dedent(each["indented"]))
        if each["indented"]
        else Block(each["kind"], each["code"])
        for each in _BLOCK.finditer(text)
    ]
    unknown = {block.kind for block in found} - KINDS
    if unknown:
        raise Wrong(f"nobody knows how to run {sorted(unknown)}")
    return found


def commands(shell: str) -> Iterator[str]:
    """The lines of a block, put together where they go on, without comments of their own."""
    for line in re.sub(r"\\\n\s*", "", shell).splitlines():
        if line.strip() and not line.startswith("#"):
            yield line


def typed(console: str) -> Iterator[tuple[str, str]]:
    """Each command of a session, and what stands below it."""
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        command, _, printed = re.sub(r"\\\n\s*", "", part).partition("\n")
        yield command, printed


class Tour:
    """Goes through blocks in an empty directory. A context manager, which ends what it started."""

    def __init__(
        self,
        directory: Path,
        line_seconds: float = LINE_SECONDS,
        python: Path = Path(sys.executable),
    ) -> None:
        """`python` is the one of an environment in which QuackMQ is installed."""
        self._directory = directory
        self._python = python
        self._line_seconds = line_seconds
        (directory / ".curlrc").write_text(_CURLRC)
        self._printed = ""
        self._server: Server | None = None
        self._addresses: Mapping[str, str] = {}

    def __enter__(self) -> Tour:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def run(self, block: Block) -> None:
        if block.kind == "text":
            self._compare(block.text)
        elif block.kind == "python":
            self._printed = self._call(
                [str(self._python), "-c", self._here(block.text)], block.text
            )
        elif block.kind == "console":
            for command, printed in typed(block.text):
                self._printed = self._shell(command)
                self._compare(printed)
        elif block.kind == INDENTED:
            for line in commands(block.text):
                if line.startswith("make "):
                    self._shell(line)
        else:
            self._printed = "".join(map(self._shell, commands(block.text)))

    def _shell(self, line: str) -> str:
        if line.startswith(SET_UP):
            return ""
        if line.startswith(SERVE):
            return self._serve(line)
        if line.startswith("make "):
            dry = line.replace("make", f"make --dry-run --directory {ROOT}", 1)
            self._call(["bash", "-c", dry], line)
            return ""
        return self._call(["bash", "-o", "pipefail", "-c", self._here(line)], line)

    def _serve(self, line: str) -> str:
        self._stop()
        words = line.partition("#")[0].split()[1:]
        options = [word for listener in PORTS for word in (f"--{listener}", "127.0.0.1:0")]
        # A path in a README is one below where its reader stands.
        words = [str(self._directory / word) if word.startswith("./") else word for word in words]
        self._server = Server(*words, *options, command=[str(self._python.with_name("quackmq"))])
        self._server.__enter__()
        self._addresses = self._server.listeners()
        return "".join(
            f"{listener} listening on 127.0.0.1:{port}\n" for listener, port in PORTS.items()
        ) + ("ready\n")

    def _stop(self) -> None:
        if self._server is not None:
            self._server.__exit__(None, None, None)
            self._server = None

    def _here(self, text: str) -> str:
        """With the ports that our broker has."""
        for listener, address in self._addresses.items():
            text = re.sub(rf"(?<=:){PORTS[listener]}\b", address.rpartition(":")[2], text)
        return _NO_ADDRESS.sub(f'"{self._addresses.get("kafka", "")}", ', text)

    def _call(self, command: list[str], what: str) -> str:
        path = f"{self._python.parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            command,
            cwd=self._directory,
            env={
                **os.environ,
                "PATH": path,
                "CURL_HOME": str(self._directory),
                "XDG_STATE_HOME": str(self._directory / "state"),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=self._line_seconds,
            check=False,
        )
        if done.returncode != 0:
            raise Wrong(f"{what}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def _compare(self, expected: str) -> None:
        printed = self._printed.splitlines()
        for line in expected.splitlines():
            pattern = ".*".join(map(re.escape, line.split("…")))
            if not any(re.fullmatch(pattern, each) for each in printed):
                raise Wrong(f"{line!r} was to be printed, but this was:\n{self._printed}")
