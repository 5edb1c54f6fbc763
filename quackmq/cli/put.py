"""`quackmq put`: messages into a topic of a running broker, from the command line or from stdin.

Over the Python client, so that a message that this command has taken is on disk when it ends, and
the same command puts into a topic of a Kafka cluster. From stdin each line is a message, put with
those that came together with it: a pipe that is busy is put in large pieces, a person's line at
once. The last line may lack its newline.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

from quackmq import limits
from quackmq.cli.text import counted
from quackmq.errors import InvalidRequest, RecordTooLarge

DEFAULT_BROKER: Final = "127.0.0.1:9092"
_STDIN: Final = "-"
_READ_BYTES: Final = 256 * limits.KIB


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "put",
        help="put messages into a topic",
        description="Put messages into a topic of a running broker; they are on disk when this "
        "ends. Without messages, or with -, each line of stdin is one.",
        allow_abbrev=False,
    )
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument(
        "messages", metavar="MESSAGE", nargs="*", default=[], help="or - for lines of stdin"
    )
    parser.add_argument("--key", metavar="TEXT", help="messages of one key stay in order")
    parser.add_argument(
        "--header",
        dest="headers",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="beside each message; may be given several times",
    )
    parser.add_argument("--ids", action="store_true", help="print the id of each message")
    add_connection(parser)
    _let_options_come_anywhere(parser)


def add_connection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--broker",
        metavar="HOST:PORT",
        default=DEFAULT_BROKER,
        help="the broker's Kafka door, or that of any Kafka cluster; default %(default)s",
    )
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=_seconds,
        help="how long an answer may take, and a broker to start; default: "
        f"{limits.CLIENT_TIMEOUT_MS // 1000} for an answer, no wait for a broker",
    )


def run(args: argparse.Namespace) -> int:
    from quackmq.client.kafka.client import Client

    headers = [_header(text) for text in args.headers]
    put = 0
    with Client(args.broker, timeout=args.timeout) as client:
        for messages in _messages(args.messages):
            ids = client.put_many(args.topic, messages, key=args.key, headers=headers)
            put += len(ids)
            if args.ids:
                print("\n".join(map(str, ids)), flush=True)
    if not args.ids:
        print(f"{counted(put, 'message')} put into {args.topic}")
    return 0


def _let_options_come_anywhere(parser: argparse.ArgumentParser) -> None:
    """Also between the topic and the messages, where argparse by itself would not look for any
    message behind them."""
    plain = parser.parse_known_args

    def parse(args: Any = None, namespace: Any = None) -> Any:
        parser.parse_known_args = plain  # type: ignore[method-assign]  # which this asks for
        return parser.parse_known_intermixed_args(args, namespace)

    parser.parse_known_args = parse  # type: ignore[method-assign]


def _messages(words: list[str]) -> Iterator[list[bytes]]:
    """What is put together."""
    if words and words != [_STDIN]:
        yield [os.fsencode(word) for word in words]
        return
    yield from lines(sys.stdin.fileno())


def lines(fd: int) -> Iterator[list[bytes]]:
    """What comes in lines, as it comes. RecordTooLarge for one that no broker takes."""
    rest = b""
    while data := os.read(fd, _READ_BYTES):
        *whole, rest = (rest + data).split(b"\n")
        if whole:
            yield [line.removesuffix(b"\r") for line in whole]
        if len(rest) > limits.BATCH_BYTES:
            raise RecordTooLarge(f"a line of more than {limits.BATCH_BYTES} bytes")
    if rest:
        yield [rest]


def _header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise InvalidRequest(f"--header: {text!r} is not NAME=VALUE")
    return name, value


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= limits.CLIENT_LONGEST_MS / 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds
