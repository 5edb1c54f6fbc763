"""Find out what blocks the event loop: a thread samples the loop's stack while the loop is late.

`LoopClock` notices that the loop has paused when the pause is over. To know which code ran, a
thread must look during the pause. It wakes up at every beat of the clock, and only compares two
numbers as long as no beat is late. While a beat is late, it samples the stack of the loop's thread
every `limits.LOOP_SAMPLE_MS`. The line that was sampled most often is the cause, written as the
path from the callback to it:

    Cleaner.run > Retention.clean > Retention._clean
    (quackmq/broker/retention/service.py:232)

Python's garbage collector can run within any line, so its time is measured, and reported as the
cause if it took most of the pause. A pause in which the loop used hardly any processor time comes
from outside: the machine was busy, or the process was stopped.

The longest pause and its cause are in `LoopClock.longest`; long ones are in the log, at most one
line every `limits.LOOP_PAUSE_LOG_INTERVAL_MS`.

Not promised: pauses shorter than a beat. C code that does not release the interpreter's lock keeps
this thread from running, so the line that called it is reported.

Call `start` and `stop` from the loop's thread.
"""

from __future__ import annotations

import asyncio.runners
import gc
import logging
import selectors
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Final

from quackmq import limits
from quackmq.loop_clock import LoopClock, Pause, loop_clock

log = logging.getLogger(__name__)

_ROOT: Final = str(Path(__file__).parent)
#: The innermost frame is in one of these while the loop waits, or works in C.
_LOOP_FILES: Final = frozenset({asyncio.runners.__file__, selectors.__file__})
#: Callers that are named before the line that ran: enough to know which job it was.
_NAMED_CALLERS: Final = 3
#: Different lines that are counted during one pause, and frames that are walked for each.
_LINES: Final = 100
_FRAMES: Final = 200


class LoopWatchdog:
    def __init__(self, clock: LoopClock | None = None) -> None:
        self._clock = clock or loop_clock()
        self._thread_id = 0
        self._thread: threading.Thread | None = None
        self._stop_event = threading.Event()
        #: How often each line was sampled since the last beat. The thread writes it, and the loop
        #: replaces it.
        self._line_counts: Counter[str] = Counter()
        #: How long the garbage collector ran since a beat, and the time of that beat.
        self._collected_s = 0.0
        self._collected_after = 0.0
        self._collecting_since = 0.0
        self._logged_s = -limits.LOOP_PAUSE_LOG_INTERVAL_MS / 1000
        self._unlogged = 0

    def start(self) -> None:
        """Start the thread that watches the loop of the calling thread, and begin to measure the
        garbage collector."""
        self._thread_id = threading.get_ident()
        self._clock.find_cause = self._find_cause
        self._clock.on_pause = self._on_pause
        gc.callbacks.append(self._on_collection)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        self._stop_event.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            gc.callbacks.remove(self._on_collection)

    # --- in the thread ------------------------------------------------------------------------

    def _watch(self) -> None:
        """Sample the loop's stack while a beat is late, until `stop`. This runs in the watchdog's
        thread."""
        beat_s, sample_s = limits.LOOP_BEAT_MS / 1000, limits.LOOP_SAMPLE_MS / 1000
        wait_s, sampled_beat_s = beat_s, 0.0
        while not self._stop_event.wait(wait_s):
            last_beat_s = self._clock.last_beat_s
            if last_beat_s != sampled_beat_s:
                sampled_beat_s = last_beat_s
                self._line_counts = Counter()
            late_s = time.monotonic() - last_beat_s - beat_s
            if not last_beat_s or late_s < sample_s:
                wait_s = beat_s if not last_beat_s else max(sample_s, sample_s - late_s)
                continue
            wait_s = sample_s
            frame = sys._current_frames().get(self._thread_id)
            if frame is not None:
                line = describe_stack(frame)
                if line in self._line_counts or len(self._line_counts) < _LINES:
                    self._line_counts[line] += 1

    # --- on the loop --------------------------------------------------------------------------

    def _find_cause(self, pause_ms: int, cpu_ms: int) -> str:
        """Return the cause of a pause that is just over: the garbage collector, the machine, or the
        line that was sampled most often."""
        seen, self._line_counts = self._line_counts, Counter()
        common = seen.most_common(1)
        line = common[0][0] if common else ""
        location = f", in {line}" if line else ""
        collected_ms = round(self._collected_s * 1000)
        if self._collected_after == self._clock.last_beat_s and 2 * collected_ms > pause_ms:
            return f"Python's garbage collector took {collected_ms} ms{location}"
        # Less than a quarter of the pause: the loop hardly ran.
        if 4 * cpu_ms < pause_ms:
            return f"the machine was busy, or the process was stopped{location}"
        return line or "it is unknown which line ran"

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        """Add up how long the garbage collector has run on the loop's thread since the last
        beat."""
        if threading.get_ident() != self._thread_id:
            return
        if phase == "start":
            self._collecting_since = time.monotonic()
            if self._collected_after != self._clock.last_beat_s:
                self._collected_after, self._collected_s = self._clock.last_beat_s, 0.0
        else:
            self._collected_s += time.monotonic() - self._collecting_since

    def _on_pause(self, pause: Pause) -> None:
        """Log a long pause, or count it if the last line is too recent."""
        if pause.pause_ms < limits.LOOP_PAUSE_LOG_MS:
            return
        now_s = time.monotonic()
        if (now_s - self._logged_s) * 1000 < limits.LOOP_PAUSE_LOG_INTERVAL_MS:
            self._unlogged += 1
            return
        more = f"; {self._unlogged} more since the last line" if self._unlogged else ""
        self._logged_s, self._unlogged = now_s, 0
        log.warning(
            "the broker stood still for %d ms and used %d ms of CPU: %s%s",
            pause.pause_ms,
            pause.cpu_ms,
            pause.cause,
            more,
        )


def describe_stack(frame: FrameType) -> str:
    """Describe a stack by the innermost line of the broker's own code and its callers. Return "" if
    no callback runs. Leave out the frames that started the loop, which are always the same."""
    if frame.f_code.co_filename in _LOOP_FILES:
        return ""
    own_frames: list[FrameType] = []
    current: FrameType | None = frame
    for _ in range(_FRAMES):
        if current is None or current.f_code.co_filename == asyncio.runners.__file__:
            break
        if (
            current.f_code.co_filename.startswith(_ROOT)
            and current.f_code is not describe_stack.__code__
        ):
            own_frames.append(current)
        current = current.f_back
    if not own_frames:
        code = frame.f_code
        return f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})"
    names = [each.f_code.co_qualname for each in reversed(own_frames)]
    if len(names) > _NAMED_CALLERS + 1:
        names = [names[0], "…", *names[-_NAMED_CALLERS:]]
    path = f"quackmq{own_frames[0].f_code.co_filename.removeprefix(_ROOT)}"
    return f"{' > '.join(names)} ({path}:{own_frames[0].f_lineno})"
