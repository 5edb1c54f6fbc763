"""The part of docs/http.md about /v1: its curl lines, run against a broker.

`python -m tests.protocols.http.v1.document` prints those that are answered otherwise today.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.protocols.http.v1.serving import DEADLINE_S, Serving, serving

DOCUMENT: Final = Path(__file__).resolve().parents[4] / "docs" / "http.md"
PART: Final = "## The API under /v1"
#: What differs from run to run: ids of messages, topics and plans, times, digests, sizes of files
#: and where they lie, who is connected, how long the machine was busy with something else.
_VARYING: Final = re.compile(
    r"(?<![\w-])[\w-]{39}(?![\w-])|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
    r"|\b[0-9a-f]{32}\b|(?<=_ms\":)1\d{12}|(?<=\"connections\":)\d+|(?<=\"streams\":)\d+"
    r"|\d+\.\d+\.\d+|(?<=\"size\":)\d+|(?<=_bytes\":)\d+|(?<=crc32c\":)\d+"
    r"|(?<=\"directory\":\")[^\"]+|(?<=\"longest_pause\":)(?:null|{[^}]*})"
)
#: Of these, what a later command may name is at least so long.
_ID_CHARS: Final = 32


def part() -> str:
    return DOCUMENT.read_text().partition(PART)[2].partition("\n## ")[0]


def examples() -> Iterator[tuple[str, str]]:
    """Each command and what is printed below it."""
    for block in re.findall(r"```console\n(.*?)```", part(), re.DOTALL):
        for example in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, printed = example.replace("\\\n", "").partition("\n")
            yield command, printed.rstrip("\n")


def answers(served: Serving) -> Iterator[tuple[str, str, str]]:
    """Each command, what is printed below it, and what it is answered with. Ids that one answer is
    printed with are put in the place of those that it really has, in the commands that follow."""
    real: dict[str, str] = {}
    for command, printed in examples():
        said = command
        for in_document, value in real.items():
            said = said.replace(in_document, value)
        lines = printed.count("\n") + 1 if printed else 0
        got = curl(said.replace("localhost:8002", f"{served.host}:{served.port}"), lines)
        pairs = zip(_VARYING.findall(printed), _VARYING.findall(got), strict=False)
        real |= {shown: value for shown, value in pairs if len(shown) >= _ID_CHARS}
        yield command, printed, got


def alike(text: str) -> str:
    """A text without what differs from run to run."""
    return _VARYING.sub("…", text)


def curl(command: str, lines: int) -> str:
    """What curl prints. One that goes on without an end (`--no-buffer`) is ended after so many
    lines."""
    arguments = shlex.split(command)
    assert arguments[0] == "curl", command
    with subprocess.Popen(
        ["curl", "--silent", "--show-error", "--noproxy", "*", *arguments[1:]],
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        try:
            if "--no-buffer" in arguments:
                return "".join(running.stdout.readline() for _ in range(lines)).rstrip("\n")
            return running.communicate(timeout=DEADLINE_S)[0].rstrip("\n")
        finally:
            running.kill()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, serving(directory=Path(directory)) as running:
        for command, printed, got in answers(running):
            if alike(printed) != alike(got):
                print(f"$ {command}\n{got}")
