"""Clients as processes of their own, in whatever language, that say what happens to them.

A program is started with one argument, a JSON object, and does what `role` says until its stdin is
closed; then it ends in good order, with exit code 0. On stdout it writes one JSON object a line and
flushes it, and nothing else. `at_ms` in each is the time of day in milliseconds (of Unix).

role "member": join `group` and read `topic`, from the start where nothing is committed. Write each
record down before it is committed, and commit by hand, after each few records, waiting for the
answer. A commit that is refused because the group rebalances is no error and is not written down.
    {"kind": "assigned", "partitions": [0, 1]}      newly given to this member
    {"kind": "revoked", "partitions": [0]}          taken away or lost; told before others get it
    {"kind": "record", "partitions": [0], "offset": 5, "value": "17"}
    {"kind": "committed", "partitions": [0], "offset": 6}       the broker has said yes
Settings: `address`, `topic`, `group`, `session_ms`, `heartbeat_ms`, `cooperative` (whether to use
the cooperative protocol; with the eager one all is revoked and assigned anew each time, by the
assignor `range` where there is a choice), `instance` (the name of a static member, or null),
`protocol` ("classic", or "consumer" for clients that have KIP-848; then the times are the broker's,
and `cooperative` means nothing).

role "producer": send "0", "1", "2", … to partition 0 of `topic`, idempotently, some thousand a
second with many under way, whatever becomes of the broker meanwhile. When stdin is closed, wait
until all is acknowledged, and write how many there were. A record that fails is an error: exit
with another code.
    {"kind": "sent", "count": 4711}
Settings: `address`, `topic`.

role "transformer": join `group` and read `source`, committed records only; for each record write
"image of " and its value to `target`, to the partition of its own number modulo 2. Some records at
a time and the offsets behind them are one transaction; if it fails it is aborted, and begun again
from what is committed. One that cannot go on exits with code 3 and is started anew.
With `transactions` false the same is done in separate steps: write, then commit. Pauses of up to
`dawdle_ms`, drawn from `seed`, between the steps.
    {"kind": "produced"}                            all is written, and nothing is committed yet
    {"kind": "committed", "count": 50}              a transaction of so many records
    {"kind": "aborted", "value": "why"}
Settings: `address`, `source`, `target`, `group`, `session_ms`, `heartbeat_ms`, `transactional_id`,
`transactions`, `dawdle_ms`, `seed`.

A client that is a program already (kcat) is not wrapped, but a `Client` of its own translates.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from tests.interop.deliveries import Event, held_after
from tests.interop.running import DEADLINE_SECONDS

ROOT: Final = Path(__file__).resolve().parent.parent.parent


class Client:
    """How to start a client's program, to understand it and to end it."""

    #: Whether a member that is told to leave drops what it was just given and commits it all the
    #: same: then it leaves while nothing comes.
    drops_when_it_leaves = False

    def __init__(self, *command: str) -> None:
        self._command = command

    def command(self, settings: dict[str, Any]) -> list[str]:
        return [*self._command, json.dumps(settings)]

    def begun(self, process: subprocess.Popen[str]) -> None:
        """It has been started."""

    def understand(self, line: str) -> list[Event]:
        told = json.loads(line)
        return [
            Event(
                told["kind"],
                told["at_ms"],
                tuple(told.get("partitions", ())),
                told.get("offset", -1),
                told.get("value", ""),
                told.get("count", -1),
            )
        ]

    def end(self, process: subprocess.Popen[str]) -> None:
        """Tell it to end in good order."""
        assert process.stdin is not None
        process.stdin.close()

    def afterword(self, events: Sequence[Event]) -> list[Event]:
        """What is known, without being told, of one that has ended in good order."""
        return []


class Program:
    """One such process, with what it has said. Killed by its Cast, if by nobody before."""

    def __init__(
        self, name: str, client: Client, said: threading.Condition, settings: dict[str, Any]
    ) -> None:
        self.name = name
        self.client = client
        self.events: list[Event] = []
        self.errors = ""
        #: What follows from the events: the partitions that it has, how many records it got of
        #: each, and which.
        self.held: frozenset[int] = frozenset()
        self.counts: Counter[int] = Counter()
        self.values: set[str] = set()
        self._said = said
        # A group of its own, so that a program that starts another one is killed with it.
        self._process = subprocess.Popen(
            client.command(settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=self._read_events),
            threading.Thread(target=self._read_errors),
        ]
        for reader in self._readers:
            reader.start()
        client.begun(self._process)

    def ended(self) -> int | None:
        """Its exit code, if it has ended."""
        return self._process.poll()

    def leave(self) -> None:
        """In good order."""
        self.client.end(self._process)
        code = self._process.wait(DEADLINE_SECONDS)
        self._finish()
        assert code == 0, f"{self.name} ended with {code}: {self.errors}"
        self.events += self.client.afterword(self.events)

    def signal(self, number: signal.Signals) -> None:
        """If it is still there."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Without a goodbye, and all that it has started."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(DEADLINE_SECONDS)
        self._finish()

    def _finish(self) -> None:
        for reader in self._readers:
            reader.join(DEADLINE_SECONDS)
        with self._process:
            pass

    def _read_events(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            events = self.client.understand(line)
            with self._said:
                for event in events:
                    self._note(event)
                self._said.notify_all()
        with self._said:
            self._said.notify_all()

    def _note(self, event: Event) -> None:
        self.events.append(event)
        self.held = held_after(self.held, event)
        if event.kind == "record":
            self.counts[event.partitions[0]] += 1
            self.values.add(event.value)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.errors += line


class Cast:
    """The programs of one scenario. A context manager; whoever is still there at its end is killed.

    Of several clients, each program is the next one's. What they said to stderr is printed, which
    pytest shows for a test that fails.
    """

    def __init__(self, *clients: Client) -> None:
        self.programs: dict[str, Program] = {}
        self._clients = cycle(clients)
        self._said = threading.Condition()

    def __enter__(self) -> Cast:
        return self

    def __exit__(self, *error: object) -> None:
        for program in self.programs.values():
            program.kill()
            if program.errors:
                print(f"--- {program.name} said:\n{program.errors}")

    def start(self, name: str, **settings: Any) -> Program:
        assert name not in self.programs
        self.programs[name] = Program(name, next(self._clients), self._said, settings)
        return self.programs[name]

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Looked at whenever a program says something; nobody may end meanwhile."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        running = [program for program in self.programs.values() if program.ended() is None]
        with self._said:
            while not condition():
                for program in running:
                    assert program.ended() is None, f"{program.name} ended: {program.errors}"
                left = deadline - time.monotonic()
                assert left > 0, f"{what}: not after {DEADLINE_SECONDS} s; {self.summary()}"
                self._said.wait(left)

    def events(self) -> dict[str, Sequence[Event]]:
        return {name: list(program.events) for name, program in self.programs.items()}

    def summary(self) -> str:
        return "; ".join(
            f"{program.name} holds {sorted(program.held)} and had {len(program.values)} records"
            for program in self.programs.values()
        )
