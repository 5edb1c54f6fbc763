"""`quackmq serve`: reads the settings, decides which doors to open, and runs a broker.

The broker itself is put together in `server`, which is loaded only when there is one to run: help
and complaints about settings need none of it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from pathlib import Path
from typing import Final

from quackmq.cli import logformat
from quackmq.cli.address import Address
from quackmq.cli.settings import (
    CONFIG_VARIABLE,
    MEMORY_STORE,
    Loaded,
    load,
    option_name,
    setting_fields,
    variable_name,
)
from quackmq.errors import InvalidSetting
from quackmq.lean import without_pandas

log = logging.getLogger(__name__)

#: Every door of the interface in the order in which they open, and where it listens unless told
#: otherwise. None: this version does not have it.
DOORS: Final[dict[str, Address | None]] = {
    "kafka": Address("127.0.0.1", 9092),
    "http": Address("127.0.0.1", 8002),
    "zmq": Address("127.0.0.1", 5555),
    "line": None,
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="run a broker",
        description="Run a broker. Without any door named, all doors open on 127.0.0.1; with any, "
        "just those named. Each option is also an environment variable and a key of the settings "
        "file: an option goes before a variable, a variable before the file.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help=f"a TOML file of settings [{CONFIG_VARIABLE}]"
    )
    for schema in setting_fields():
        default = "" if schema.default is None else f"; default {str(schema.default).lower()}"
        missing = " (not in this version)" if DOORS.get(schema.name, ...) is None else ""
        parser.add_argument(
            option_name(schema.name),
            dest=schema.name,
            metavar=schema.metadata["kind"].metavar,
            help=f"{schema.metadata['help']}{missing} [{variable_name(schema.name)}{default}]",
        )


def run(args: argparse.Namespace) -> int:
    options = {schema.name: getattr(args, schema.name) for schema in setting_fields()}
    loaded = load(options, os.environ, args.config)
    settings = loaded.settings
    doors = plan_doors(loaded)
    if settings.store != MEMORY_STORE and settings.data is None:
        raise InvalidSetting(
            "serve needs a directory for its data: give --data DIR, QUACKMQ_DATA or data in the "
            "settings file, or --store memory: to keep nothing"
        )
    logformat.configure(settings.log_level, settings.log_format)
    for doubt in loaded.doubts:
        log.warning("%s", doubt)

    without_pandas()
    from quackmq.cli import server

    with asyncio.Runner(loop_factory=server.loop_factory()) as runner:
        return runner.run(server.serve(settings, doors))


def plan_doors(loaded: Loaded) -> dict[str, Address]:
    """Which doors to open, and where: those named, or all there are where none is."""
    there = {name: default for name, default in DOORS.items() if default is not None}
    named = {name: value for name in DOORS if (value := getattr(loaded.settings, name)) is not None}
    for name in named:
        if name not in there:
            raise InvalidSetting(
                f"{loaded.origins[name]}: this version has no {name} door yet; it has "
                f"{', '.join(there)}"
            )
    return named or there
