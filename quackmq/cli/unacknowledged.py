"""`quackmq unacknowledged`: which push subscriptions have not acknowledged a message.

Uses the HTTP API of a running broker. It covers the subscribers of the line protocol and the
clients of the reliable ZeroMQ proxy.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, Final
from urllib.parse import quote, urlencode

from quackmq import limits as shared_limits
from quackmq.cli.broker.address import Address
from quackmq.cli.broker.requests import add_http_option, parse_http_option, request
from quackmq.cli.text import format_time, parse_count, pluralize, table
from quackmq.errors import InvalidRequest

#: Subscriptions that are listed by default; a person reads no more.
_DEFAULT_LIMIT: Final = 100


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "unacknowledged",
        help="list the push subscriptions that have not acknowledged a message",
        description="List the push subscriptions that have not acknowledged a message: those of "
        "the line protocol and of the reliable ZeroMQ proxy. waiting: the message is not sent yet, "
        "or is to be sent again; sent: it was sent and may still be acknowledged in time; "
        "unreachable: the subscriber is not connected or cannot be reached. Exit codes: 0 done, 1 "
        "the message does not exist, or the broker cannot be reached.",
        allow_abbrev=False,
    )
    parser.add_argument("topic", metavar="TOPIC")
    message = parser.add_mutually_exclusive_group(required=True)
    message.add_argument("--offset", type=parse_count, metavar="N", help="the message's offset")
    message.add_argument("--id", metavar="ID", help="the message's id, in place of its offset")
    parser.add_argument(
        "--partition",
        type=parse_count,
        metavar="N",
        help="with --offset: the partition; default 0",
    )
    parser.add_argument("--count", action="store_true", help="print only how many they are")
    parser.add_argument(
        "--after", metavar="NAME", help="list only subscriptions whose names come after this one"
    )
    parser.add_argument(
        "--limit",
        type=parse_count,
        metavar="N",
        default=_DEFAULT_LIMIT,
        help=f"list at most this many, up to {shared_limits.HTTP_PAGE_ITEMS}; default %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="print the broker's answer as JSON")
    add_http_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print the subscriptions, or their number. Raises InvalidRequest for invalid options and
    OSError if the broker cannot be reached or does not know the message."""
    address = parse_http_option(args)
    if not 1 <= args.limit <= shared_limits.HTTP_PAGE_ITEMS:
        raise InvalidRequest(f"--limit must be from 1 to {shared_limits.HTTP_PAGE_ITEMS}")
    if args.id is not None and args.partition is not None:
        raise InvalidRequest("--partition needs --offset: an id contains its partition")
    if args.count and args.after is not None:
        raise InvalidRequest("--after lists subscriptions: leave out --count")
    path = f"/v1/topics/{quote(args.topic, safe='')}/unacknowledged"
    options = {"offset": args.offset, "id": args.id, "partition": args.partition}
    message = {name: value for name, value in options.items() if value is not None}
    if args.count:
        answer = request(address, "GET", f"{path}/count?{urlencode(message)}")
        print(json.dumps(answer) if args.json else answer["count"])
        return 0
    answer = _fetch_subscriptions(address, path, message, args.after, args.limit)
    print(json.dumps(answer, indent=2) if args.json else _describe(answer))
    return 0


def _fetch_subscriptions(
    address: Address, path: str, message: dict[str, Any], after: str | None, limit: int
) -> Any:
    """Return the broker's answer with at most `limit` subscriptions. A page of the broker may have
    fewer than were asked for, so this gets pages until there are enough."""
    subscriptions: list[Any] = []
    while True:
        query = message | {"limit": limit - len(subscriptions)}
        query |= {} if after is None else {"after": after}
        answer = request(address, "GET", f"{path}?{urlencode(query)}")
        subscriptions += answer["subscriptions"]
        after = answer["next"]
        if after is None or len(subscriptions) >= limit:
            return answer | {"subscriptions": subscriptions}


def _describe(answer: Any) -> str:
    """Return the lines that list the subscriptions, with their number and how to get more."""
    message_name = f"{answer['topic']}, partition {answer['partition']}, offset {answer['offset']}"
    count = pluralize(answer["count"], "push subscription")
    if answer["count"]:
        lines = [f"{message_name}: {count} not acknowledged"]
    else:
        lines = [f"{message_name}: no push subscription waits for an acknowledgement"]
    listed = answer["subscriptions"]
    if listed:
        rows = [("subscription", "state", "sent", "last sent", "reason")]
        rows += [
            (
                each["name"],
                each["state"],
                str(each["deliveries"]),
                "" if each["sent_ms"] is None else format_time(each["sent_ms"]),
                _printable(each["reason"] or ""),
            )
            for each in listed
        ]
        lines += table(list(rows), right_aligned={2})
    if answer["next"] is not None:
        lines.append(f"There are more: --after {answer['next']}")
    return "\n".join(lines)


def _printable(text: str) -> str:
    """Return a text that may quote a peer, without characters that control a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)
