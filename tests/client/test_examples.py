"""Every small example program runs, one after the other, against one broker (M12)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.server import DEADLINE_S, Server

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
#: Programs that are more than an example of one interface; they have tests of their own.
OTHERS = {"copier.py", "demo.py", "demo_cast.py", "pipe_publisher.py", "pipe_subscriber.py"}
FREE = "127.0.0.1:0"
QUACKS = ["quack", "quack quack", "quack quack quack"]
#: The programs by name: the listeners whose addresses they get, further arguments, and lines that
#: they print.
EXAMPLES: dict[str, tuple[list[str], list[list[str]], list[str]]] = {
    "kafka_client.py": (
        ["kafka"],
        [[]],
        ["pond: two mallards", "river: one teal", "lake: ducks without number"],
    ),
    "put_get.py": (
        ["kafka"],
        [["put", "weather", "rain", "sun"], ["get", "weather", "reader"]],
        ["rain", "sun"],
    ),
    "http_client.py": (
        ["http"],
        [["books.db"]],
        ["3 sales of 800 cents are booked, 0 are to come"],
    ),
    "queue_client.py": (["http"], [[]], ["fast: web: GET /pond 200"]),
    "zmq_client.py": (["zmq"], [[]], QUACKS),
    "pubsub_client.py": (["xsub", "xpub"], [[]], QUACKS),
    "proxy_client.py": (["proxy"], [[]], QUACKS),
    "line_client.py": (
        ["line"],
        [[]],
        [
            "daisy got 'Ducks win'",
            r"daisy got 'a path: C:\\pond'",
            r"daisy got 'two\nlines'",
            "huey has read up to entry 3, and the broker says -3",
        ],
    ),
}


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    ports = [word for name in ("kafka", "http", "zmq", "line") for word in (f"--{name}", FREE)]
    with Server("serve", "--store", "memory:", *ports) as server:
        yield server.listeners()


def test_m12_every_example_is_run_here_or_has_a_test_of_its_own() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == EXAMPLES.keys() | OTHERS
    page = (ROOT / "examples" / "README.md").read_text()
    assert [name for name in EXAMPLES.keys() | OTHERS if f"({name})" not in page] == []


def test_m12_the_examples_run_in_turn_against_one_broker(
    addresses: dict[str, str], tmp_path: Path
) -> None:
    for name, (listeners, runs, wanted) in EXAMPLES.items():
        printed: list[str] = []
        deadline = time.monotonic() + DEADLINE_S
        # The ZeroMQ clients do not wait for long: on a busy machine they may need another run.
        while not set(wanted) <= set(printed) and time.monotonic() < deadline:
            for arguments in runs:
                where = [addresses[listener] for listener in listeners]
                printed += run(tmp_path, name, *where, *arguments)
        assert [line for line in printed if line in wanted] == wanted, name


def run(directory: Path, name: str, *arguments: str) -> list[str]:
    """Run an example in a directory; return the lines that it prints."""
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        cwd=directory,
        env=os.environ | {"XDG_STATE_HOME": str(directory), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ran.returncode == 0 or "QuackTimeout" in ran.stderr, f"{name}: {ran.stderr}"
    return ran.stdout.splitlines()
