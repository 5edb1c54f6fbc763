"""How the process of `quackmq` begins: what it was left with by its parent, and an early Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.kit.server import AS_ON_A_TERMINAL, DEADLINE_S, Server

pytestmark = pytest.mark.processes

MODULE = [sys.executable, "-m", "quackmq"]

#: What it opens gets a number behind those of the standard files, whichever were closed.
_OPENS = """
import os, sys
from quackmq.cli.entry import open_standard_files
open_standard_files()
print("told", flush=True)
print("complained", file=sys.stderr, flush=True)
opened = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
os.write(opened, f"{opened > 2} {sys.stdin.read() or 'nothing'}".encode())
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_nothing_that_is_opened_takes_the_place_of_a_closed_standard_file(
    closed: str, tmp_path: Path
) -> None:
    found = tmp_path / "found"
    subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", _OPENS, found],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    assert found.read_text() == "True nothing"


def test_a_broker_runs_without_standard_files(tmp_path: Path) -> None:
    socket = tmp_path / "quack"
    arguments = ["serve", "--data", tmp_path / "data", "--line", f"unix:{socket}"]
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *MODULE]
    with Server(*arguments, command=command) as server:
        deadline = time.monotonic() + DEADLINE_S
        while not socket.is_socket() and server.process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        server.send(signal.SIGTERM)
        assert server.exit_code() == 0


#: Whether Python writes at once or when it ends, `""`: the same has to come of it.
AT_ONCE_OR_NOT = pytest.mark.parametrize("at_once", ["1", ""])
SHORT = pytest.mark.parametrize("command", ["pipeline ls", "--help", "put --help"])


@SHORT
@AT_ONCE_OR_NOT
def test_a_command_whose_output_nobody_reads_ends_quietly(command: str, at_once: str) -> None:
    """As SIGPIPE would end it: `quackmq pipeline ls | head -0`."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = said_to(writing, command, at_once)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, b"")


@SHORT
@AT_ONCE_OR_NOT
def test_a_command_whose_output_cannot_be_written_says_so(command: str, at_once: str) -> None:
    with open("/dev/full", "wb") as full:
        ended = said_to(full.fileno(), command, at_once)
    assert (ended.returncode, ended.stderr) == (1, b"quackmq: No space left on device\n")


def said_to(stdout: int, command: str, at_once: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*MODULE, *command.split()],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": at_once},
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("needed", "arguments"),
    [("orjson", ["--version"]), ("httptools", ["serve", "--store", "memory:"])],
)
def test_an_interrupt_while_it_loads_ends_it_without_a_traceback(
    needed: str, arguments: list[str], tmp_path: Path
) -> None:
    """`needed` stands for what is loaded at that moment: here it takes its time."""
    (tmp_path / f"{needed}.py").write_text(
        "import time\nprint('loading', flush=True)\ntime.sleep(600)\n"
    )
    slow = {"PYTHONPATH": str(tmp_path)}
    with Server(*arguments, command=[*AS_ON_A_TERMINAL, *MODULE], environment=slow) as server:
        assert server.line() == "loading\n", server.errors()
        server.send(signal.SIGINT)
        assert server.exit_code() == -signal.SIGINT
        assert server.errors() == ""


def test_a_broker_whose_terminal_is_closed_ends_in_good_order(tmp_path: Path) -> None:
    arguments = ["serve", "--data", tmp_path / "data", "--http", "127.0.0.1:0"]
    with Server(*arguments, command=[*AS_ON_A_TERMINAL, *MODULE]) as server:
        server.listeners()
        server.send(signal.SIGHUP)
        assert server.exit_code() == 0
        assert server.errors().endswith(" closed\n")


def test_a_broker_that_was_started_by_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    arguments = ["serve", "--data", tmp_path / "data", "--http", "127.0.0.1:0"]
    with Server(*arguments, command=["nohup", *MODULE]) as server:
        address = server.listeners()["http"]
        server.send(signal.SIGHUP)
        with urllib.request.urlopen(f"http://{address}/v1/ready", timeout=DEADLINE_S) as answer:
            assert answer.status == 200
        server.send(signal.SIGTERM)
        assert server.exit_code() == 0
