"""wrk, the load generator for HTTP: one thread, keep-alive, one request under way a connection."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.driver import LoadFailed
from benchmarks.packages import Unavailable

SCRIPT: Final = Path(__file__).with_name("requests.lua")


def run(
    address: str, connections: int, seconds: int, method: str, paths: Sequence[str], body: str = ""
) -> float:
    """Requests a second, of which every one has been answered with success. Raises LoadFailed."""
    if (program := shutil.which("wrk")) is None:
        raise Unavailable("wrk is not here: tools/programs.sh installs it where it may")
    amount = ("--threads", "1", "--connections", str(connections), "--duration", f"{seconds}s")
    command = (program, *amount, "--timeout", "30s", "--script", str(SCRIPT), f"http://{address}")
    done = subprocess.run(
        (*command, "--", method, body, *paths), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise LoadFailed(f"wrk: {done.stderr.strip() or done.stdout.strip()}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    if figures["refused"] or figures["not_answered"] or not figures["requests"]:
        raise LoadFailed(f"{method} {paths[0]}: {figures}")
    return figures["requests"] / figures["seconds"]
