"""`quackmq` as a user runs it: the installed script, in a process of its own."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

#: For anything that takes milliseconds when all is well. Long, since machines can be busy.
DEADLINE_S = 60

SCRIPT = [str(Path(sys.executable).with_name("quackmq"))]

#: Before a command that has to meet signals as on a terminal: a test run in the background, or
#: under nohup, was started to ignore some, and so would be what it starts.
AS_ON_A_TERMINAL = [
    sys.executable,
    "-c",
    "import os, signal, sys\n"
    "for each in (signal.SIGINT, signal.SIGHUP): signal.signal(each, signal.SIG_DFL)\n"
    "os.execv(sys.argv[1], sys.argv[1:])",
]


class Server:
    """A process that announces its listeners on stdout. Killed on leaving the block, whatever
    happens.

    Arguments are passed as text: paths and numbers need not be converted. `environment` is all the
    environment that it has.
    """

    def __init__(
        self,
        *arguments: object,
        environment: dict[str, str] | None = None,
        command: Sequence[str] = SCRIPT,
    ) -> None:
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment or {},
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read_lines),
            threading.Thread(target=self._read_errors),
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        with self.process:
            for reader in self._readers:
                reader.join()

    def line(self) -> str:
        """The next line on stdout, or "" at its end."""
        return self._lines.get(timeout=DEADLINE_S)

    def ready(self) -> str:
        """Wait until the broker is ready; where its Kafka listener listens."""
        return self.listeners().get("kafka", "")

    def listeners(self) -> dict[str, str]:
        """Wait until the broker is ready; where each of its listeners listens."""
        addresses = {}
        while (line := self.line()) != "ready\n":
            assert line, f"it ended before it was ready: {self.errors()}"
            name, listening, on, address = line.split()
            assert (listening, on) == ("listening", "on"), line
            addresses[name] = address
        return addresses

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        return self.process.wait(timeout=DEADLINE_S)

    def errors(self) -> str:
        """All of stderr, once the process has ended."""
        self.exit_code()
        self._readers[1].join()
        return "".join(self._errors)

    def _read_lines(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self._errors.extend(self.process.stderr)
