"""A broker as its users run it, on one directory and the same ports, through any number of lives.

A port stays ours while the broker is away: a socket that is bound and never listens keeps the
system from giving it to anybody's outgoing connection.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from quackmq.stores.local.open import LOCK_PATH
from tests.kit.server import DEADLINE_S, Server

HOST = "127.0.0.1"
QUACKMQ = (sys.executable, "-m", "quackmq")
#: The same broker with a small journal and small segments (see small.py), so that a short life has
#: everything that a long one has.
SMALL_QUACKMQ = (sys.executable, "-m", "tests.real.small")


def wait_until_opening(server: Server, data: Path) -> None:
    """Until a process has begun to open a directory: it has written its id into the lock file."""
    deadline = time.monotonic() + DEADLINE_S
    lock = data / LOCK_PATH
    while not lock.exists() or lock.read_text() != str(server.process.pid):
        assert server.process.poll() is None, f"it ended before it was killed: {server.errors()}"
        assert time.monotonic() < deadline, f"{data} is not being opened"
        time.sleep(0.000_5)


class Broker:
    """One life at a time. Killed on leaving the block, whatever happens. `addresses` are those of
    its listeners by name, `address` is that of the Kafka listener."""

    def __init__(
        self,
        data: Path,
        *options: str,
        command: Sequence[str] = QUACKMQ,
        listeners: Sequence[str] = ("kafka",),
    ) -> None:
        self.data = data
        self.options = options
        self.command = command
        self._life = ExitStack()
        self._server: Server | None = None
        if "zmq" in listeners:
            listeners = (*listeners, "xsub", "xpub", "proxy")  # which open with it
        self._held = {listener: _held_port() for listener in listeners}
        self.addresses = {
            listener: f"{HOST}:{held.getsockname()[1]}" for listener, held in self._held.items()
        }
        self.address = self.addresses.get("kafka", "")

    def __enter__(self) -> Broker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._life.close()
        for held in self._held.values():
            held.close()

    @property
    def pid(self) -> int:
        return self._running.process.pid

    def start(self) -> None:
        """Until it is ready."""
        self.launch()
        addresses = self._running.listeners()
        assert addresses == self.addresses, f"it listens on {addresses}, not {self.addresses}"

    def launch(self) -> None:
        """Without waiting for anything."""
        assert self._server is None, "it runs already"
        listeners = [
            word
            for listener in self.addresses.items()
            for word in (f"--{listener[0]}", listener[1])
        ]
        arguments = ["--data", str(self.data), *listeners, *self.options]
        server = Server("serve", *arguments, command=self.command)
        self._server = self._life.enter_context(server)

    def wait_until_opening(self) -> None:
        wait_until_opening(self._running, self.data)

    def kill(self) -> str:
        """SIGKILL, at this instant; what it had logged."""
        exit_code, log = self._end(signal.SIGKILL)
        assert exit_code == -signal.SIGKILL, f"it ended before it was killed ({exit_code}): {log}"
        return log

    def stop(self) -> tuple[int, str]:
        """SIGTERM; its exit code and what it had logged."""
        return self._end(signal.SIGTERM)

    def wait(self) -> tuple[int, str]:
        """Until it ends by itself; its exit code and what it had logged."""
        return self._end(None)

    def _end(self, number: signal.Signals | None) -> tuple[int, str]:
        server = self._running
        if number is not None:
            server.send(number)
        exit_code, log = server.exit_code(), server.errors()
        self._life.close()
        self._server = None
        return exit_code, log

    @property
    def _running(self) -> Server:
        assert self._server is not None, "it does not run"
        return self._server


def _held_port() -> socket.socket:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((HOST, 0))
    return held
