"""Exit codes of the commands that look into a data directory, and what becomes of their errors.

0 all is well, 1 damage was found, 2 the directory cannot be looked at, or what was asked for is not
in it. Whoever reads our output and has enough of it ends a command quietly.
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
#: As if SIGPIPE had ended the process.
ENOUGH: Final = 141


def outcome(directory: Path, look: Callable[[], bool]) -> int:
    """The exit code of a look, which says whether it found damage. InvalidRequest passes."""
    try:
        if not directory.is_dir():
            raise UnusableDirectory(f"{directory} is no directory")
        damaged = look()
        sys.stdout.flush()
        return DAMAGED if damaged else SOUND
    except BrokenPipeError:
        return had_enough()
    except (NewerFormat, NotFound, StoreLocked, UnusableDirectory) as error:
        return _complain(str(error))
    except OSError as error:
        if error.errno == errno.ENOSPC:  # which nobody has met in reading
            forget_unwritten()
            return _complain(f"what was found cannot be written: {error.strerror}")
        where = error.filename or directory
        return _complain(f"cannot read {where}: {error.strerror or error}")


def nobody_reads() -> bool:
    """Whether stdout is a pipe or a socket whose reader is gone."""
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in watched.poll(0))


def had_enough() -> int:
    """The exit code where nobody reads our output any more."""
    _forget()
    return ENOUGH


def forget_unwritten() -> None:
    """What is still buffered, if it cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        _forget()


def _forget() -> None:
    """It must not be tried again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(sentence: str) -> int:
    print(f"quackmq: {sentence}", file=sys.stderr)
    return UNREADABLE
