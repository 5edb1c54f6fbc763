"""Processes that a pipeline starts to do its work: watched, started again, and never left behind.

A worker is a module of this package that is run with one argument, a JSON object. It ends when its
standard input does: when the pipeline closes it, or is gone, however it went. One that dies earlier
is started again, as a service manager would, a bounded number of times.

Workers wait for a broker that is away, each by itself and again for every message. So whoever has
started them looks after it, and says once that it is gone (`Watch`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from quackmq.errors import QuackError, QuackTimeout
from quackmq.spark import limits
from quackmq.spark.broker import http as connection


class Workers:
    """In a `with` block. One thread at a time."""

    def __init__(self, module: str, arguments: Sequence[Mapping[str, Any]]) -> None:
        """A process for each of these arguments."""
        self._module = module
        self._arguments = [json.dumps(each) for each in arguments]
        self._processes: list[subprocess.Popen[bytes]] = []
        self.restarts = 0

    def __enter__(self) -> Self:
        self._processes = [self._started(each) for each in self._arguments]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Those that do not end by themselves are killed."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(0 if kind is not None else limits.PIPELINE_WORKER_END_MS / 1000)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def tend(self) -> None:
        """Start again what has died. QuackError if that happens too often."""
        for number, process in enumerate(self._processes):
            if not process.poll():  # it runs, or has come to its end
                continue
            if self.restarts >= limits.PIPELINE_RESTARTS:
                raise QuackError(
                    f"workers ended too early {self.restarts + 1} times, the last with exit code "
                    f"{process.returncode}: what they say about it is above"
                )
            self.restarts += 1
            assert process.stdin is not None
            process.stdin.close()
            self._processes[number] = self._started(self._arguments[number])

    def are_done(self) -> bool:
        """Whether all have come to their end."""
        return all(process.poll() == 0 for process in self._processes)

    def kill(self, number: int) -> None:
        """As a power cut would."""
        self._processes[number].kill()
        self._processes[number].wait()

    def _started(self, argument: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.{self._module}", argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )


class Watch:
    """Whether the broker is there. In a `with` block, by one thread. QuackTimeout if it is away
    from the beginning."""

    def __init__(self, address: str) -> None:
        self._address = address
        found = connection.find(address)
        self._broker = connection.Http(found.http, limits.PIPELINE_LOOK_MS)
        self._looked_at = time.monotonic()
        #: When it was first asked for in vain.
        self._missed_at: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._broker.close()

    def look(self) -> None:
        """Called often; it is asked now and then. QuackTimeout if it stays away."""
        asked_at = time.monotonic()
        if asked_at - self._looked_at < limits.PIPELINE_LOOK_MS / 1000:
            return
        try:
            self._broker.get("/v1/health")
        except QuackTimeout as error:
            if self._missed_at is None:
                self._missed_at = asked_at
            away_s = time.monotonic() - self._missed_at
            if away_s >= limits.PIPELINE_AWAY_MS / 1000:
                raise QuackTimeout(
                    f"the broker at {self._address} has been away for {away_s:.0f} s: {error}"
                ) from error
        else:
            self._missed_at = None
        self._looked_at = time.monotonic()


def end_with_input(ending: threading.Event) -> None:
    """For a worker: the event is set when nobody wants it any more; if it does not end by itself
    then, it is ended."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        ending.set()
        threading.Timer(limits.PIPELINE_WORKER_END_MS / 1000, os._exit, [1]).start()

    threading.Thread(target=watch, daemon=True).start()
