"""Start, watch, restart and stop the worker processes of a pipeline; leave none behind.

A worker is a module of this package that runs with one argument, a JSON object. It ends when its
standard input ends: the pipeline closes it, or dies. A worker that dies earlier is started again,
as a service manager would, a bounded number of times.

Each worker waits for a missing broker by itself, again for every message. So the pipeline checks
the broker too, and reports once that it is unreachable (`Watch`).
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
from quackmq.spark.broker import http as broker_http


class Workers:
    """Worker processes that run during a `with` block. Not thread-safe: call from one thread at a
    time."""

    def __init__(self, module: str, arguments: Sequence[Mapping[str, Any]]) -> None:
        """Prepare one process for each of `arguments`."""
        self._module = module
        self._arguments = [json.dumps(argument) for argument in arguments]
        self._processes: list[subprocess.Popen[bytes]] = []
        self.restarts = 0

    def __enter__(self) -> Self:
        self._processes = [self._start(argument) for argument in self._arguments]
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the workers' input and wait for their end; kill those that do not end in time.
        After an error, do not wait."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(0 if error_type is not None else limits.PIPELINE_WORKER_END_MS / 1000)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def restart_dead(self) -> None:
        """Restart workers that died. Raise QuackError after `PIPELINE_RESTARTS` restarts."""
        for number, process in enumerate(self._processes):
            if not process.poll():  # it runs, or has exited with 0
                continue
            if self.restarts >= limits.PIPELINE_RESTARTS:
                raise QuackError(
                    f"workers ended too early {self.restarts + 1} times, the last with exit code "
                    f"{process.returncode}: their error output is above"
                )
            self.restarts += 1
            assert process.stdin is not None
            process.stdin.close()
            self._processes[number] = self._start(self._arguments[number])

    def are_done(self) -> bool:
        """Return whether all workers have exited with 0."""
        return all(process.poll() == 0 for process in self._processes)

    def kill(self, number: int) -> None:
        """Kill a worker without warning; wait for its end."""
        self._processes[number].kill()
        self._processes[number].wait()

    def _start(self, argument: str) -> subprocess.Popen[bytes]:
        """Start a worker. Its standard input is a pipe, which the system closes if the pipeline
        dies, so that the worker ends too."""
        return subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.{self._module}", argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )


class Watch:
    """A check that the broker responds, for a `with` block. Raise QuackTimeout if no broker
    responds at the start. Not thread-safe: call from one thread."""

    def __init__(self, address: str) -> None:
        self._address = address
        access = broker_http.find_broker(address)
        self._broker = broker_http.Http(access.http, limits.PIPELINE_CHECK_MS)
        self._checked_at = time.monotonic()
        #: When the first request without a response was sent; None if the broker responds.
        self._unreachable_since: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._broker.close()

    def check(self) -> None:
        """Ask the broker for its health, at most once in `PIPELINE_CHECK_MS`. Raise QuackTimeout if
        it has been unreachable for `PIPELINE_AWAY_MS`."""
        now_s = time.monotonic()
        if now_s - self._checked_at < limits.PIPELINE_CHECK_MS / 1000:
            return
        try:
            self._broker.get("/v1/health")
        except QuackTimeout as error:
            if self._unreachable_since is None:
                self._unreachable_since = now_s
            away_s = time.monotonic() - self._unreachable_since
            if away_s >= limits.PIPELINE_AWAY_MS / 1000:
                raise QuackTimeout(
                    f"the broker at {self._address} has been away for {away_s:.0f} s: {error}"
                ) from error
        else:
            self._unreachable_since = None
        self._checked_at = time.monotonic()


def end_with_input(ending: threading.Event) -> None:
    """Set `ending` when standard input ends, in a worker. End the process if it still runs
    `PIPELINE_WORKER_END_MS` later."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        ending.set()
        threading.Timer(limits.PIPELINE_WORKER_END_MS / 1000, os._exit, [1]).start()

    threading.Thread(target=watch, daemon=True).start()
