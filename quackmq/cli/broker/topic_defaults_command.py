"""`quackmq topic-defaults`: show, set and remove the defaults of new topics by name pattern.

Uses the HTTP API of a running broker. docs/policies.md explains the defaults.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from quackmq.cli.broker.requests import add_http_option, parse_http_option, request
from quackmq.cli.broker.topic_defaults import parse_assignments
from quackmq.cli.text import table
from quackmq.errors import InvalidRequest
from quackmq.model.policy import format_setting
from quackmq.model.topic_defaults import check_topic_default


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "topic-defaults",
        help="show or set the policies of new topics by name pattern",
        description="Show the settings that new topics get, by patterns of their names: * stands "
        "for any characters, ? for one character. With set: set the defaults of a pattern; they "
        "replace those that it had. With remove: remove them. Changes are durable, and topics that "
        "exist keep their policies. Exit codes: 0 done, 1 the broker refused it or cannot be "
        "reached.",
        epilog="example: quackmq topic-defaults set '*' needs_subscriber=true",
        allow_abbrev=False,
    )
    parser.add_argument("action", nargs="?", choices=["show", "set", "remove"], default="show")
    parser.add_argument("pattern", nargs="?", metavar="PATTERN", help="with set and remove")
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="SETTING=VALUE",
        help="with set: settings of a topic's policy; -1 means no bound",
    )
    add_http_option(parser)


def run(args: argparse.Namespace) -> int:
    """Show or change the defaults; return 0. Raises InvalidRequest for invalid arguments, and
    OSError if the broker cannot be reached or refuses the change."""
    address = parse_http_option(args)
    pattern, path = args.pattern, "/v1/topic-defaults"
    if args.action == "show":
        if pattern is not None:
            raise InvalidRequest("a pattern needs the action set or remove")
        for line in _format_defaults(request(address, "GET", path)["topic_defaults"]):
            print(line)
        return 0
    if pattern is None:
        raise InvalidRequest(f"{args.action} needs a pattern of topic names, such as 'logs.*'")
    path = f"{path}/{quote(pattern, '')}"
    if args.action == "remove":
        if args.settings:
            raise InvalidRequest("remove takes a pattern only: it removes all its settings")
        request(address, "DELETE", path)
        print(f"The topic defaults of {pattern} are removed.")
        return 0
    settings = parse_assignments(args.settings)
    check_topic_default(pattern, settings)
    request(address, "PUT", path, {"policy": dict(settings)})
    print(f"The topic defaults of {pattern} are set. Topics that exist keep their policies.")
    return 0


def _format_defaults(defaults: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines that show all patterns, or that there are none."""
    if not defaults:
        yield "There are no topic defaults."
        return
    rows: list[tuple[str, ...]] = [("pattern", "set by", "settings")]
    for default in defaults:
        settings = (f"{name}={format_setting(value)}" for name, value in default["policy"].items())
        set_by = "the broker's settings" if default["source"] == "settings" else "a request"
        rows.append((default["pattern"], set_by, " ".join(settings)))
    yield from table(list(rows))
