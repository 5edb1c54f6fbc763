"""Ourselves, as users have it: in an environment of its own, without the tools of the tests.

That makes a difference: where Hypothesis is installed, the library with Kafka's schemas loads it
and prepares for it, which takes some seconds and 200 MB at each start.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import quackmq
from benchmarks import packages
from benchmarks.packages import TARGET
from benchmarks.peers.base import Peer
from benchmarks.processes import HOST, Command

ROOT: Final = TARGET.parent.parent
ENVIRONMENT: Final = TARGET / "quackmq"


class QuackMQ(Peer):
    name = "quackmq"
    title = "QuackMQ"
    client = "kafka"
    settings = "its defaults, that is, `sync = always`"
    is_synced = True

    def fetch(self) -> None:
        project = ROOT / "pyproject.toml"
        if packages.is_made_from(project, ENVIRONMENT):
            return
        command = (str(ROOT / "tools" / "venv.sh"), str(ENVIRONMENT), "bench")
        done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            raise packages.unavailable("what it depends on", done.stderr)
        packages.mark_made_from(project, ENVIRONMENT)

    def version(self) -> str:
        return f"{quackmq.__version__}, Python {platform.python_version()}"

    def prepare(self, directory: Path, port: int) -> Sequence[Command]:
        program = str(ENVIRONMENT / "bin" / "quackmq")
        options = ("--data", str(directory / "data"), "--kafka", f"{HOST}:{port}")
        # An installed program is compiled once, and not at each start.
        compiled = {"PYTHONDONTWRITEBYTECODE": ""}
        return [Command((program, "serve", *options, "--log-level", "warning"), compiled)]
