"""Exit codes of the commands that inspect a data directory, and the handling of their errors.

0 no damage, 1 damage was found, 2 the directory cannot be read or does not contain the requested
data. A command ends without an error message if the reader of its output closes the pipe.
"""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from quackmq.errors import NewerFormat, NotFound, StoreLocked, UnusableDirectory

SOUND: Final = 0
DAMAGED: Final = 1
UNREADABLE: Final = 2
#: The exit code of a process that SIGPIPE has ended.
PIPE_CLOSED: Final = 141


def inspect_directory(directory: Path, inspect: Callable[[], bool]) -> int:
    """Run `inspect`, which returns whether it found damage, and return the exit code.
    InvalidRequest is passed on."""
    try:
        if not directory.is_dir():
            raise UnusableDirectory(f"{directory} is not a directory")
        damaged = inspect()
        sys.stdout.flush()
        return DAMAGED if damaged else SOUND
    except BrokenPipeError:
        return end_after_closed_pipe()
    except (NewerFormat, NotFound, StoreLocked, UnusableDirectory) as error:
        return _print_error(str(error))
    except OSError as error:
        if error.errno == errno.ENOSPC:  # only writing the output can cause it
            flush_or_discard_output()
            return _print_error(f"cannot write the output: {error.strerror}")
        path = error.filename or directory
        return _print_error(f"cannot read {path}: {error.strerror or error}")


def is_stdout_closed() -> bool:
    """Return whether stdout is a pipe or a socket whose reader has closed it."""
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in watched.poll(0))


def end_after_closed_pipe() -> int:
    """Discard the buffered output and return the exit code for a closed output."""
    _discard_output()
    return PIPE_CLOSED


def flush_or_discard_output() -> None:
    """Flush stdout; discard the buffered output if that fails."""
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()


def _discard_output() -> None:
    """Redirect stdout to /dev/null, so that Python does not try to flush it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_error(sentence: str) -> int:
    print(f"quackmq: {sentence}", file=sys.stderr)
    return UNREADABLE
