"""Run one program of the user as a peer of an experiment (`--pub-command`, `--sub-command`).

The program speaks the line protocol on its stdin and stdout. It has no control channel, so it is
known only through its connection and its process: whether it has chosen its topics, how the
connection has ended, and the exit code. Its stderr is that of this process. The environment
variable PEER_ID proposes an id, and PEER_TOPICS proposes topics, separated by spaces.

All waits are bounded. Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Final

from quackmq.cli import limits
from quackmq.cli.experiment.peer_process import start_on_pipes
from quackmq.cli.experiment.plan import Program
from quackmq.cli.experiment.report import ProgramResult, describe_exit
from quackmq.errors import QuackError, QuackTimeout
from quackmq.protocols.line.codec.messages import Role
from quackmq.protocols.line.connection import Connection
from quackmq.protocols.line.records import DEATHS, ConnectionRecord, End

#: Interval between two checks of the connection and the process.
_CHECK_S: Final = 0.02
#: How long the exit code of a program that has closed its output is awaited.
_EXIT_S: Final = 1.0
_ROLE_NAMES: Final = {Role.PUB: "a publisher", Role.SUB: "a subscriber"}

#: Gives the broker's ends of the pipes of a process to the line server. The arguments are read_fd,
#: write_fd and the name of the channel.
Attach = Callable[[int, int, str], Awaitable[Connection]]


class ProgramProcess:
    """A running program and its connection."""

    def __init__(
        self,
        program: Program,
        process: asyncio.subprocess.Process,
        connection: Connection,
        wait_ms: int,
    ) -> None:
        """`wait_ms` is how long it may take to choose its topics, and to exit at the end."""
        self.program = program
        self._process = process
        self._connection = connection
        self._wait_ms = wait_ms
        self._ready_by_s = time.monotonic() + wait_ms / 1000
        self._left_early = False
        self._killed_after_ms: int | None = None

    @classmethod
    async def start(cls, program: Program, attach: Attach, wait_ms: int) -> ProgramProcess:
        """Start the program and connect its pipes to the broker. Raises QuackError if it cannot be
        started."""
        proposed = {"PEER_ID": program.id, "PEER_TOPICS": " ".join(program.topics)}
        try:
            process, read_fd, write_fd = await start_on_pipes(
                *program.arguments, environment=os.environ | proposed
            )
        except OSError as error:
            raise QuackError(
                f"{program} cannot be started: {error.strerror}; a script begins with a line such "
                "as #!/bin/sh, or is started by its interpreter, as in 'sh SCRIPT'"
            ) from None
        try:
            connection = await attach(read_fd, write_fd, f"pipes of process {process.pid}")
        except BaseException:
            _kill_group(process)
            await process.wait()
            raise
        return cls(program, process, connection, wait_ms)

    # --- state ---

    @property
    def record(self) -> ConnectionRecord | None:
        """The broker's record of the connection; None until the program has given its id."""
        return self._connection.record

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that the program has chosen; none until it has ended the list."""
        record = self.record
        return record.topics if record is not None and self._connection.has_begun else ()

    @property
    def has_disconnected(self) -> bool:
        return self._connection.is_over

    @property
    def result(self) -> ProgramResult:
        """What the broker and the system know of the program, once it has ended."""
        record, end = self.record, self._connection.how_ended
        return ProgramResult(
            command=self.program.command,
            entries=0 if record is None else record.entries,
            retries=0 if record is None else record.retries,
            rejections=self._connection.rejections,
            last_rejection=self._connection.last_rejection,
            has_begun=self._connection.has_begun,
            has_terminated=end in (End.TERMINATED, End.CLOSED),
            left_early=self._left_early,
            exit_code=self._process.returncode,
            killed_after_ms=self._killed_after_ms,
        )

    @property
    def has_died(self) -> bool:
        """Whether the program was silent for too long, or disconnected without `terminate`."""
        return self._connection.how_ended in DEATHS

    @property
    def end(self) -> str:
        """How the connection has ended, in words."""
        end = self._connection.how_ended
        if end is None:
            return "still connected"
        if end is End.CLOSED:
            # The words of CLOSED are "the broker is closing". In an experiment the broker goes on,
            # and only this connection was closed.
            return "terminated by the broker"
        detail = self._connection.end_detail
        return f"{end} ({detail})" if detail else str(end)

    # --- phases ---

    async def wait_until_connected(self, other_ids: Collection[str]) -> None:
        """Wait until the program has chosen its topics. Raises QuackError, with the reason, if it
        does not do so in time, or if its id is one of `other_ids`, those of the other peers of its
        role."""
        while not self._connection.has_begun:
            self._check_record(other_ids)
            if self.has_disconnected:
                raise QuackError(f"{self.program} {await self._explain_disconnect()}")
            if time.monotonic() > self._ready_by_s:
                raise QuackTimeout(f"{self.program} {self._explain_silence()}")
            await asyncio.sleep(_CHECK_S)
        self._check_record(other_ids)

    async def wait_until_disconnected(self) -> None:
        while not self.has_disconnected:
            await asyncio.sleep(_CHECK_S)

    async def stop(self, is_interrupted: bool) -> None:
        """End the connection by the protocol if it lasts, and wait for the exit of the process.
        Kill the process if it takes too long; it has less time if the user has interrupted the
        experiment."""
        wait_ms = self._wait_ms
        if is_interrupted:
            wait_ms = min(wait_ms, limits.EXPERIMENT_INTERRUPTED_MS)
        self._left_early = self.has_disconnected
        self._connection.drain()
        try:
            async with asyncio.timeout(wait_ms / 1000):
                await self.wait_until_disconnected()
                await self._process.wait()
        except TimeoutError:
            # An entry that the subscriber has not answered is not acknowledged.
            self._connection.end(End.CLOSED)
            if self._process.returncode is None:
                self._killed_after_ms = wait_ms
                await self.kill()

    async def kill(self) -> None:
        """Kill the program and the processes that it has started, if it is running; wait for its
        end."""
        if self._process.returncode is None:
            _kill_group(self._process)
        await self._process.wait()

    # --- helpers ---

    def _check_record(self, other_ids: Collection[str]) -> None:
        """Raise QuackError if the program has connected in the wrong role, or with the id of
        another peer."""
        record = self.record
        if record is None:
            return
        if record.role is not self.program.role:
            raise QuackError(
                f"{self.program} connected as {_ROLE_NAMES[record.role]}: use "
                f"--{record.role}-command for it"
            )
        if record.id in other_ids:
            raise QuackError(
                f"{self.program} connected as {record.id!r}, the id of another peer: the "
                f"environment variable PEER_ID proposes {self.program.id!r}"
            )

    async def _explain_disconnect(self) -> str:
        """Return in words why the connection ended before the program had chosen its topics. Wait
        a moment for the exit code."""
        if self._connection.how_ended is not End.GONE:
            return f"has not chosen its topics: {self.end}; see docs/line.md"
        with suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_S):
                await self._process.wait()
        is_running = self._process.returncode is None
        ended = "closed its output" if is_running else describe_exit(self.result)
        return f"{ended} before it had chosen its topics; see docs/line.md"

    def _explain_silence(self) -> str:
        """Return in words how far the program has come in its time."""
        role = self.program.role
        if self.record is None:
            missing = f"sent no `{role} ID connect`"
        else:
            missing = f"connected, but has not ended its list of `{role} ID topic K`"
        return (
            f"{missing} within {self._wait_ms} ms: each line must end with a newline, and be "
            "flushed; see docs/line.md, and --command-ms for a longer time"
        )


def _kill_group(process: asyncio.subprocess.Process) -> None:
    """Kill a running process and the processes that it has started. It leads their group."""
    with suppress(ProcessLookupError):  # it has just ended
        os.killpg(process.pid, signal.SIGKILL)
