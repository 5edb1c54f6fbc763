"""Where the process of `quackmq` begins, before anything large is loaded.

Two things cannot wait. Ctrl-C while modules are loaded ends the process as the system does it: with
no traceback, and without unwinding a library that is half there. And descriptors 0 to 2 are open
from here on: where a parent has closed one, the next file would get its number, a journal, say, and
whatever a library writes to stderr would end there.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def main() -> int:
    """The process's own command; the result is its exit code."""
    open_standard_files()
    with ended_by_interrupts():
        from quackmq.cli.main import INTERRUPTED
        from quackmq.cli.main import main as run

    try:
        return run()
    except KeyboardInterrupt:  # a moment before the command has begun, or after its end
        return INTERRUPTED


def open_standard_files() -> None:
    """What is closed reads as empty, and takes everything."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number, which is this one
            os.set_inheritable(descriptor, True)
    if sys.stdin is None:
        sys.stdin = open(0)
    if sys.stdout is None:
        sys.stdout = open(1, "w")
    if sys.stderr is None:
        sys.stderr = open(2, "w")


@contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """A SIGINT ends the process at once, unless its parent has it ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
