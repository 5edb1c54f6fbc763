"""The process that a broker runs in, set up for it once.

The broker keeps very many small values for a while (the tail, cursors, decoded indexes), makes new
ones all the time, and hardly any of them refer to each other in circles. Python's collector would
walk through all of them again and again to find next to nothing: with its defaults it took about a
quarter of the time of publishing to many topics. So it looks rarely.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
from collections.abc import Callable
from typing import Final

from quackmq.cli import limits

log = logging.getLogger(__name__)

#: New values between two looks at the young ones; how many such looks make one at the middle-aged,
#: and those one at all.
_COLLECTOR: Final = (100_000, 20, 100)


def prepare() -> None:
    gc.freeze()  # what is there now, mostly code, stays
    gc.set_threshold(*_COLLECTOR)
    _allow_open_files()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where there is one, else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _allow_open_files() -> None:
    """As many as this user may have: each connection is one, and each segment in use."""
    present, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    failure: Exception | None = None
    # macOS names no limit, and grants less than that.
    for wanted in (most, limits.OPEN_FILES):
        if most == resource.RLIM_INFINITY or wanted <= most:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
                return
            except (OSError, ValueError) as error:
                failure = error
    log.warning("at most %d files and connections can be open: %s", present, failure)
