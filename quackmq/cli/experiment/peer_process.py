"""Start, control and end one peer process of an experiment. `peer` documents the control channel.
`program` does the same for programs of the user, which have no control channel.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from quackmq import limits
from quackmq.cli.experiment.peer import Part, Report
from quackmq.errors import QuackError

#: The longest line on the control channel. A report has one count for each slice and bucket.
_REPORT_BYTES: Final = 64 * limits.MIB


async def start_on_pipes(
    *arguments: str, pass_fds: Sequence[int] = (), environment: Mapping[str, str] | None = None
) -> tuple[asyncio.subprocess.Process, int, int]:
    """Start a program with pipes as its stdin and stdout. Return the process and the other ends of
    its pipes: (process, read_fd, write_fd). `environment` None: that of this process. Raises
    OSError if the program cannot be started."""
    stdin, to_process = os.pipe()
    from_process, stdout = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=stdin,
            stdout=stdout,
            pass_fds=pass_fds,
            env=environment,
            # Ctrl-C at the terminal goes to this process only.
            start_new_session=True,
        )
    except BaseException:
        os.close(to_process)
        os.close(from_process)
        raise
    finally:
        os.close(stdin)
        os.close(stdout)
    return process, from_process, to_process


class PeerProcess:
    """One peer process. The future `ended` is done when the process has closed its control
    channel, which is when it exits."""

    def __init__(self, part: Part, process: asyncio.subprocess.Process) -> None:
        self.part = part
        self.report: Report | None = None
        self._process = process
        self._writer: asyncio.StreamWriter | None = None
        #: For each word that the peer has sent, or that somebody waits for: set once it was sent.
        self._heard: dict[str, asyncio.Event] = {}
        self.ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, part: Part) -> tuple[PeerProcess, int, int]:
        """Start a peer; return it and the broker's ends of its pipes: (peer, read_fd, write_fd)."""
        ours, theirs = socket.socketpair()
        try:
            part = msgspec.structs.replace(part, control_fd=theirs.fileno())
            process, read_fd, write_fd = await start_on_pipes(
                sys.executable,
                "-P",  # do not import modules from the current directory
                "-m",
                "quackmq.cli.experiment.peer",
                msgspec.json.encode(part).decode(),
                pass_fds=(theirs.fileno(),),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        started = cls(part, process)
        await started._listen(ours)
        return started, read_fd, write_fd

    @property
    def id(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self.ended.done()

    def send(self, message: list[object]) -> None:
        """Send a command; does nothing if the process has ended."""
        if self._writer is not None and not self.has_ended:
            self._writer.write(msgspec.json.encode(message) + b"\n")

    async def wait_for(self, word: str) -> None:
        """Wait until the peer has sent this word. Raises QuackError if it ends before."""
        event = self._heard.setdefault(word, asyncio.Event())
        heard: asyncio.Future[Any] = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait([heard, self.ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            heard.cancel()
        if not event.is_set():
            raise QuackError(f"{self.part.role} {self.part.id} ended before it was {word}")

    async def kill(self) -> None:
        """Kill the process if it is running; wait for its end."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self.ended

    async def _listen(self, control: socket.socket) -> None:
        """Receive the messages of the peer in a task, until it closes the control channel."""
        reader, self._writer = await asyncio.open_connection(sock=control, limit=_REPORT_BYTES)
        # Keep a reference: the event loop holds tasks only weakly.
        self._listening = asyncio.get_running_loop().create_task(self._receive(reader))

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        """Note each message of the peer and keep its report. At the end of the control channel,
        complete `ended`."""
        try:
            while line := await reader.readline():
                word, *more = msgspec.json.decode(line, type=list[object])
                if word == "report":
                    self.report = msgspec.convert(more[0], Report, strict=False)
                self._heard.setdefault(str(word), asyncio.Event()).set()
        except ConnectionError:
            pass  # the peer exited before it read a command
        finally:
            assert self._writer is not None, "set before this task was started"
            self._writer.close()
            self.ended.set_result(None)
