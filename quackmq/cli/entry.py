"""The entry point of the `quackmq` process, which runs before large modules are imported.

Two things must happen first:

- Ctrl-C during the imports ends the process through the default signal handler: without a
  traceback, and without unwinding a half-imported library.
- File descriptors 0 to 2 are opened if the parent has closed them. Otherwise the next opened file,
  for example a journal, would get such a number, and output to stderr would be written into it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def main() -> int:
    """Run the command of this process and return its exit code."""
    open_standard_files()
    with default_interrupts():
        from quackmq.cli.main import INTERRUPTED
        from quackmq.cli.main import main as run

    try:
        return run()
    except KeyboardInterrupt:  # before the command started, or after it ended
        return INTERRUPTED


def open_standard_files() -> None:
    """Open /dev/null for each standard file descriptor that is closed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # opens as the lowest free number, which is `descriptor`
            os.set_inheritable(descriptor, True)
    if sys.stdin is None:
        sys.stdin = open(0)
    if sys.stdout is None:
        sys.stdout = open(1, "w")
    if sys.stderr is None:
        sys.stderr = open(2, "w")


@contextmanager
def default_interrupts() -> Iterator[None]:
    """Let SIGINT end the process immediately within this context, unless the parent process
    ignores SIGINT."""
    former_handler = signal.getsignal(signal.SIGINT)
    if former_handler is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former_handler)
