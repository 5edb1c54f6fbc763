"""Configure the process in which a broker runs: its garbage collector (`collector`), event loop and
limit of open files."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable

from quackmq.cli import limits
from quackmq.cli.broker import collector

log = logging.getLogger(__name__)


def prepare() -> None:
    collector.set_up()
    _allow_open_files()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop factory if uvloop is installed, else None for asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _allow_open_files() -> None:
    """Raise the limit of open files to the highest value that this user may set. Each connection
    and each open segment needs one."""
    present, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    failure: Exception | None = None
    # macOS reports no limit but grants less than infinity.
    for limit in (highest, limits.OPEN_FILES):
        if highest == resource.RLIM_INFINITY or limit <= highest:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, highest))
                return
            except (OSError, ValueError) as error:
                failure = error
    log.warning("at most %d files and connections can be open: %s", present, failure)
