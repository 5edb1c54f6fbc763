"""The process that a broker runs in, set up for it once: its garbage collector (`collector`), its
event loop and its open files."""

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
