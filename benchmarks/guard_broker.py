"""A broker whose work can be counted: the same for the same requests, whatever the machine does.

    python -m benchmarks.guard_broker COUNTS bytecodes|nothing [--data DIR …]

Takes the options of `quackmq serve`. Whatever the broker decides by the time of day or by the speed
of the machine is fixed:

- Broker time stands still: appends in the same millisecond share an entry of the index.
- The loop's clock and its watchdog do not beat; nothing is cleaned or archived by the clock.
- The state of a pushed subscription is written whenever it has changed.
- The loop itself waits for the sync of a small frame, however long the last one took.
- Python's cyclic garbage collector does not run.

With `bytecodes`, SIGUSR1 starts the count of bytecode instructions and of calls into C. COUNTS is a
file of three unsigned 64-bit integers in this machine's byte order: the broker's pid, the bytecode
instructions, the C calls. It can be read at any time.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final

from quackmq import limits

PID, BYTECODES, C_CALLS = range(3)
COUNTS_BYTES: Final = 3 * 8
#: Longer than any run.
_NEVER_MS: Final = 24 * 60 * 60 * 1000


class WorkCounter:
    """Counts in shared memory. It is called by the interpreter, in every thread."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._counts = memoryview(mmap.mmap(file.fileno(), COUNTS_BYTES)).cast("Q")
        self._is_counting = False

        self._counts[PID] = os.getpid()

    def watch_new_threads(self) -> None:
        """Watch the threads that start after this call."""
        threading.settrace(self._enter_frame)
        threading.setprofile(self._count_c_call)

    def begin(self) -> None:
        """Count from now on. Call in the loop's thread."""
        self._is_counting = True
        sys.settrace(self._enter_frame)
        sys.setprofile(self._count_c_call)

    def _enter_frame(
        self, frame: FrameType, event: str, argument: Any
    ) -> Callable[..., Any] | None:
        if not self._is_counting:
            return None
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return self._count_bytecode

    def _count_bytecode(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "opcode":
            self._counts[BYTECODES] += 1
        return self._count_bytecode

    def _count_c_call(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and self._is_counting:
            self._counts[C_CALLS] += 1


def fix_what_depends_on_time() -> None:
    """Call before any other module of the broker is imported: some read a limit only then."""
    _replace(limits, "LOOP_BEAT_MS", _NEVER_MS)
    _replace(limits, "LOOP_LATE_MS", _NEVER_MS)
    from quackmq.archive import limits as archive_limits
    from quackmq.broker import limits as broker_limits

    _replace(archive_limits, "ARCHIVE_CHECK_MS", _NEVER_MS)
    _replace(broker_limits, "CLEAN_INTERVAL_MS", _NEVER_MS)
    from quackmq.cli import limits as cli_limits

    _replace(cli_limits, "QUIET_MS", _NEVER_MS)
    _replace(broker_limits, "PUSHED_FLUSH_MS", 0)
    _replace(broker_limits, "PUSHED_FLUSH_EACH_MS", 0)
    from quackmq.cli.broker import process
    from quackmq.clock import Clock, wall_clock_ms
    from quackmq.disk.loop_sync import LoopSyncPolicy

    began_ms = wall_clock_ms()
    _replace(Clock, "of_system", lambda: Clock.of(lambda: began_ms))
    ask, prepare = LoopSyncPolicy.may_wait, process.prepare

    def may_wait(self: LoopSyncPolicy, now_s: float) -> bool:
        ask(self, now_s)
        return True

    def prepare_without_collector() -> None:
        prepare()
        gc.disable()

    _replace(LoopSyncPolicy, "may_wait", may_wait)
    _replace(process, "prepare", prepare_without_collector)


def _replace(owner: object, name: str, value: object) -> None:
    if not hasattr(owner, name):
        raise AttributeError(f"{owner!r} has no {name} any more: the guard has to fix it elsewhere")
    setattr(owner, name, value)


def main(counts: Path, counted: str, words: list[str]) -> int:
    fix_what_depends_on_time()
    from quackmq.cli import main as command
    from quackmq.cli.broker import runner as server

    counter = WorkCounter(counts)
    if counted == "bytecodes":
        counter.watch_new_threads()
    serve = server.serve

    async def serve_and_count(settings: Any, listeners: Mapping[str, Any]) -> int:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, counter.begin)
        return await serve(settings, listeners)

    _replace(server, "serve", serve_and_count)
    return command.main(["serve", *words])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
