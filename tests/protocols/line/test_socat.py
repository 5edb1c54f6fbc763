"""A peer that nobody here wrote: socat, typed into as the page says, at a broker of its own."""

from __future__ import annotations

import queue
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.server import DEADLINE_S, Server

pytestmark = pytest.mark.processes

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "line.md").read_text()
#: What is typed and what is heard, of each conversation of the page.
CONVERSATIONS = [
    [(row[4], row[6:]) for row in block.splitlines()]
    for block in re.findall(r"(?:^    [<>] .*\n)+", PAGE, re.MULTILINE)
]


class Terminal:
    """A socat with its stdin and stdout."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._heard: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def type(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        """The next line, or "" at the end."""
        return self._heard.get(timeout=DEADLINE_S)

    def follow(self, rows: list[tuple[str, str]]) -> None:
        """Type and hear as it stands there."""
        for side, text in rows:
            if side == ">":
                self.type(text)
            else:
                assert without_time(self.hear()) == without_time(text)

    def close(self) -> None:
        self._process.kill()
        with self._process:
            self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._heard.put(line.removesuffix("\n"))
        self._heard.put("")


def without_time(line: str) -> str:
    """The line without the time of an entry that was polled."""
    return re.sub(r"^(entry \S+ \d+) \d+ ", r"\1 TIME ", line)


@contextmanager
def terminal(address: str) -> Iterator[Terminal]:
    to = address.replace("unix:", "UNIX-CONNECT:") if "unix:" in address else f"TCP:{address}"
    process = subprocess.Popen(
        ["socat", "-", to], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    typed = Terminal(process)
    try:
        yield typed
    finally:
        typed.close()


@pytest.mark.needs("socat")
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_the_conversations_of_the_page_can_be_typed(kind: str, tmp_path: Path) -> None:
    where = "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path / 'quack'}"
    publisher, subscriber, poller = CONVERSATIONS
    first_entry = next(at for at, (_, text) in enumerate(subscriber) if text.startswith("topic "))
    with Server("serve", "--store", "memory:", "--line", where) as server:
        address = server.listeners()["line"]
        assert kind == "tcp" or address == where
        with terminal(address) as daisy, terminal(address) as donald:
            daisy.follow(subscriber[:first_entry])
            donald.follow(publisher)
            daisy.follow(subscriber[first_entry:])
            assert (donald.hear(), daisy.hear()) == ("", ""), "the broker has hung up"
        with terminal(address) as daisy:
            daisy.follow([*poller, ("<", "")])
        with terminal(address) as idle:
            idle.follow([(">", "pub 7 connect"), ("<", "accept")])
            server.send(signal.SIGTERM)
            idle.follow([("<", "terminate"), ("<", "")])
        assert server.exit_code() == 0
        told = server.errors()
    assert re.search(r"pub donald on .*, topics: 1 connected", told)
    assert re.search(r"sub daisy on .*, topics: 1 ended: terminated", told)
    assert not (tmp_path / "quack").exists()


@pytest.mark.needs("socat")
def test_a_file_of_lines_can_be_piped_in(tmp_path: Path) -> None:
    lines = ["pub 7 connect", "end", "pub 7 topic 1", "end", *(f"topic 1 [{n}]" for n in range(99))]
    with Server("serve", "--store", "memory:", "--line", "127.0.0.1:0") as server:
        address = server.listeners()["line"]
        # It waits so long for answers after its input has ended.
        command = ["socat", "-t", str(DEADLINE_S), "-", f"TCP:{address}"]
        done = subprocess.run(
            command,
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
    assert done.stdout == "accept\n" * 4 + "successful\n" * 99
