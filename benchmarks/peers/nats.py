"""NATS JetStream, which keeps its streams in files.

Debian's is version 2.9, which syncs every two minutes and cannot be told otherwise; the setting for
that came with 2.10.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks import packages
from benchmarks.peers.base import Peer
from benchmarks.processes import HOST, Command

PACKAGE: Final = "nats-server"


class Nats(Peer):
    name = "nats"
    title = "NATS JetStream"
    client = "nats"
    settings = "file storage, otherwise its defaults: a sync every two minutes"
    is_synced = False

    def fetch(self) -> None:
        packages.fetch(PACKAGE)

    def version(self) -> str:
        said = subprocess.run(
            (_program(), "--version"), capture_output=True, text=True, check=False
        ).stdout
        return said.split()[-1].removeprefix("v")

    def prepare(self, directory: Path, port: int) -> Sequence[Command]:
        configuration = directory / "nats.conf"
        configuration.write_text(
            f'listen: {HOST}:{port}\njetstream {{ store_dir: "{directory / "data"}" }}\n'
        )
        return [Command((_program(), "--config", str(configuration)))]


def _program() -> str:
    return str(packages.fetch(PACKAGE).find("usr/sbin/nats-server"))
