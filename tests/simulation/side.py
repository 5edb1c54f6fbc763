"""Side threads in lock-step with the event loop: blocking code whose races replay.

The store hands blocking functions to lanes (`Disk.run`). Here each runs in a thread of its own that
moves only while the loop waits for it: `resume` lets it go until it pauses (at a disk operation) or
ends, and only then goes on. So there are threads, but never two that run; which of them runs next
is decided by the loop's timers, and those by the seed.

A lock that is held over a disk operation would stop the one thread that runs, and with it all of
them. `Lock` takes the place of `threading.Lock` in the code under test: who cannot have it lets
others go on.

Threads are kept and used again, because starting one costs as much as a whole disk operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.simulation.loop import Crash

_idle: list[_Thread] = []
_running: Side | None = None


def running() -> Side | None:
    """The side thread whose turn it is; None if it is the loop's."""
    return _running


class Side:
    """One blocking function on its way. The loop calls `resume`, the function's code `pause`."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._thread: _Thread | None = None
        self.ended = False
        self.result: object = None
        self.error: BaseException | None = None

    def resume(self) -> bool:
        """Let it go on until it pauses or ends; whether it has ended."""
        global _running
        assert _running is None, "only the loop resumes a side thread"
        if self._thread is None:
            self._thread = _idle.pop() if _idle else _Thread()
            self._thread.side = self
        _running = self
        self._thread.go.release()
        self._thread.back.acquire()
        _running = None
        if self.ended:
            _idle.append(self._thread)
            self._thread = None
        return self.ended

    def pause(self) -> None:
        thread = self._thread
        assert thread is not None
        thread.back.release()
        thread.go.acquire()

    @property
    def begun(self) -> bool:
        return self._thread is not None

    def work(self) -> None:
        try:
            self.result = self._function()
        except (Exception, Crash) as error:  # handed to whoever awaits the function
            self.error = error
        self.ended = True


class Lock:
    """Like `threading.Lock`, as far as `with` uses it."""

    def __init__(self) -> None:
        self._held = False
        self._holder: Side | None = None

    def __enter__(self) -> None:
        while self._held:
            if _running is not None:
                _running.pause()
            else:
                # The loop stands still until the holder, which must be a side thread, is done.
                assert self._holder is not None, "the loop waits for itself"
                self._holder.resume()
        self._held, self._holder = True, _running

    def __exit__(self, *error: object) -> None:
        self._held, self._holder = False, None


class _Thread:
    """Two locks, both taken: releasing one is handing over the turn."""

    def __init__(self) -> None:
        self.go = threading.Lock()
        self.go.acquire()
        self.back = threading.Lock()
        self.back.acquire()
        self.side: Side | None = None
        threading.Thread(target=self._serve, name="simulated-lane", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.go.acquire()
            side = self.side
            assert side is not None
            side.work()
            self.side = None
            del side
            self.back.release()
