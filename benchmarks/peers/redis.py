"""Redis Streams, with a file of all commands that is synced before each answer."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks import packages
from benchmarks.peers.base import Peer
from benchmarks.processes import HOST, Command

PACKAGE: Final = "redis-server"


class Redis(Peer):
    name = "redis"
    title = "Redis Streams"
    client = "redis"
    settings = "`appendonly yes`, `appendfsync always`, no snapshots; all data is in memory too"
    is_synced = True

    def fetch(self) -> None:
        packages.fetch(PACKAGE)

    def version(self) -> str:
        program, environment = _program()
        command = (program, "--version")
        said = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, check=False
        ).stdout
        return next(word[2:] for word in said.split() if word.startswith("v="))

    def prepare(self, directory: Path, port: int) -> Sequence[Command]:
        program, environment = _program()
        where = ("--bind", HOST, "--port", str(port), "--dir", str(directory))
        durable = ("--appendonly", "yes", "--appendfsync", "always", "--save", "")
        return [Command((program, *where, *durable), environment)]


def _program() -> tuple[str, dict[str, str]]:
    package = packages.fetch(PACKAGE)
    return str(package.find("usr/bin/redis-server")), package.environment
