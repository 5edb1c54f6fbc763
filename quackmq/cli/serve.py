"""`quackmq serve`: read the settings, decide which listeners to open, and run a broker.

`broker.runner` builds the broker. It is imported only when a broker is about to run, so that help
and errors about settings appear quickly.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

from quackmq.cli import logs as logformat
from quackmq.cli.broker import process
from quackmq.cli.broker.address import LAST_PORT, Address, UnixPath
from quackmq.cli.broker.settings import (
    CONFIG_VARIABLE,
    LOCAL_STORE,
    LoadedSettings,
    load,
    option_name,
    setting_fields,
    variable_name,
)
from quackmq.cli.entry import default_interrupts
from quackmq.cli.text import join_words
from quackmq.errors import InvalidSetting
from quackmq.no_pandas import hide_pandas

log = logging.getLogger(__name__)

#: Every listener, in the order in which they are opened, with its default address.
LISTENERS: Final[dict[str, Address]] = {
    "kafka": Address("127.0.0.1", 9092),
    "http": Address("127.0.0.1", 8002),
    "zmq": Address("127.0.0.1", 5555),
    "line": Address("127.0.0.1", 5550),
}
#: The other ZeroMQ listeners, opened together with `zmq`. By default each uses the port after the
#: previous one.
OTHER_ZMQ_LISTENERS: Final = ("xsub", "xpub", "proxy")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="run a broker",
        description="Run a broker. If no listener is named, all listeners open on 127.0.0.1; "
        "otherwise only the named ones open. Each option is also an environment variable and a "
        "key of the settings file: an option overrides a variable, and a variable overrides the "
        "file.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help=f"a TOML file of settings [{CONFIG_VARIABLE}]"
    )
    for schema in setting_fields():
        has_default = schema.default not in (None, ())
        default = f"; default {str(schema.default).lower()}" if has_default else ""
        if schema.name in LISTENERS:
            default = f"; {LISTENERS[schema.name]} if no listener is named"
        parser.add_argument(
            option_name(schema.name),
            dest=schema.name,
            metavar=schema.metadata["kind"].metavar,
            help=f"{schema.metadata['help']} [{variable_name(schema.name)}{default}]",
        )


def run(args: argparse.Namespace) -> int:
    """Load the settings and run a broker until it is stopped; return its exit code. Raises
    InvalidSetting."""
    options = {schema.name: getattr(args, schema.name) for schema in setting_fields()}
    loaded = load(options, os.environ, args.config)
    settings = loaded.settings
    addresses = plan_listeners(loaded)
    if settings.store == LOCAL_STORE and settings.data is None:
        raise InvalidSetting(
            "serve needs a data directory: give --data DIR, QUACKMQ_DATA or data in the settings "
            "file; or give --store memory: to keep the data in memory only, or --store "
            "postgresql://… to keep it in a database"
        )
    logformat.configure(settings.log_level, settings.log_format)
    for warning in loaded.warnings:
        log.warning("%s", warning)
    if notice := describe_closed_listeners(loaded, addresses):
        log.info("%s", notice)

    # Before the import of the runner, which loads pyarrow.
    hide_pandas()
    with default_interrupts():
        from quackmq.cli.broker import runner as server

    with asyncio.Runner(loop_factory=process.loop_factory()) as runner:
        return runner.run(server.serve(settings, addresses))


def plan_listeners(loaded: LoadedSettings) -> dict[str, Address | UnixPath]:
    """Return the address of each listener to open: the ones that were named, or all if none was."""
    settings = loaded.settings
    named = {name: value for name in LISTENERS if (value := getattr(settings, name)) is not None}
    if any(getattr(settings, name) is not None for name in OTHER_ZMQ_LISTENERS):
        named.setdefault("zmq", LISTENERS["zmq"])
    planned: dict[str, Address | UnixPath] = {}
    for name in LISTENERS:
        if named and name not in named:
            continue
        planned[name] = named.get(name, LISTENERS[name])
        if name == "zmq":
            planned |= _plan_other_zmq_listeners(loaded, named.get(name, LISTENERS[name]))
    return planned


def describe_closed_listeners(loaded: LoadedSettings, planned: Collection[str]) -> str:
    """Return a sentence about the listeners that stay closed because others were named, or "" if
    all open."""
    closed = [name for name in LISTENERS if name not in planned]
    if not closed:
        return ""
    opened = [name for name in LISTENERS if name in planned]
    named = [
        origin
        for name, origin in loaded.origins.items()
        if name in (*LISTENERS, *OTHER_ZMQ_LISTENERS)
    ]
    options = [f"{option_name(name)} {LISTENERS[name]}" for name in closed]
    return (
        f"only {join_words(opened)} will open, because of {join_words(named)}; "
        f"closed: {join_words(closed)}. To open these too, add {' '.join(options)}"
    )


def _plan_other_zmq_listeners(loaded: LoadedSettings, zmq: Address) -> dict[str, Address]:
    """Return the addresses of the other ZeroMQ listeners. If `zmq` has port 0, each gets a free
    port."""
    addresses = {}
    for distance, name in enumerate(OTHER_ZMQ_LISTENERS, start=1):
        port = zmq.port + distance if zmq.port else 0
        configured: Address | None = getattr(loaded.settings, name)
        if configured is None and port > LAST_PORT:
            raise InvalidSetting(
                f"{loaded.origins['zmq']}: the default port {port} of {name} does not exist: give "
                f"{option_name(name)}, or a lower port"
            )
        addresses[name] = configured or Address(zmq.host, port)
    return addresses
