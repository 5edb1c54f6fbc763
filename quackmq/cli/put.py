"""`quackmq put`: put messages into a topic of a running broker, from the command line or from
stdin.

It uses the Python client. So all messages are on disk when the command ends, and the command also
works with a Kafka cluster. Each line of stdin is a message; the last line may lack its newline.
Lines that arrive together are put together: large batches from a busy pipe, single lines from a
person.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

from quackmq import limits
from quackmq.cli.text import pluralize
from quackmq.errors import InvalidRequest, RecordTooLarge

DEFAULT_BROKER: Final = "127.0.0.1:9092"
_STDIN: Final = "-"
_READ_BYTES: Final = 256 * limits.KIB


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "put",
        help="put messages into a topic",
        description="Put messages into a topic of a running broker. They are on disk when the "
        "command ends. Without messages, or with -, each line of stdin is a message.",
        allow_abbrev=False,
    )
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument(
        "messages",
        metavar="MESSAGE",
        nargs="*",
        default=[],
        help="a message, or - to read lines from stdin",
    )
    parser.add_argument(
        "--key", metavar="TEXT", help="the key; messages with the same key stay in order"
    )
    parser.add_argument(
        "--header",
        dest="headers",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a header of each message; may be repeated",
    )
    parser.add_argument("--ids", action="store_true", help="print the id of each message")
    add_connection_options(parser)
    _allow_options_between_arguments(parser)


def add_connection_options(parser: argparse.ArgumentParser) -> None:
    """Add the options --broker and --timeout, which `put` and `get` share."""
    parser.add_argument(
        "--broker",
        metavar="HOST:PORT",
        default=DEFAULT_BROKER,
        help="the Kafka address of the broker or of a Kafka cluster; default %(default)s",
    )
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=_parse_seconds,
        help="timeout in seconds for an answer and for a broker that is starting; default: "
        f"{limits.CLIENT_TIMEOUT_MS // 1000} for an answer, 0 for a starting broker",
    )


def run(args: argparse.Namespace) -> int:
    """Put all messages and print how many, or their ids. Return 0; failures are raised as
    QuackError. After Ctrl-C, print how many messages the broker has acknowledged."""
    from quackmq.client.kafka.client import Client

    headers = [_parse_header(text) for text in args.headers]
    acknowledged_count = 0
    # Messages of the present call, for which the broker has not responded.
    sent_count = 0
    try:
        with Client(args.broker, timeout=args.timeout) as client:
            for messages in _message_batches(args.messages):
                sent_count = len(messages)
                ids = client.put_many(args.topic, messages, key=args.key, headers=headers)
                acknowledged_count += len(ids)
                sent_count = 0
                if args.ids:
                    print("\n".join(map(str, ids)), flush=True)
    except KeyboardInterrupt:
        _report_interrupt(acknowledged_count, sent_count)
        raise
    if not args.ids:
        print(f"{pluralize(acknowledged_count, 'message')} put into {args.topic}")
    return 0


def _report_interrupt(acknowledged_count: int, sent_count: int) -> None:
    """Print to stderr how many messages are stored for certain, and how many perhaps."""
    report = f"interrupted: {pluralize(acknowledged_count, 'message')} acknowledged"
    if sent_count:
        report += f", {pluralize(sent_count, 'message')} sent and perhaps stored"
    print(f"quackmq: {report}", file=sys.stderr)


def _allow_options_between_arguments(parser: argparse.ArgumentParser) -> None:
    """Accept options between the topic and the messages, too. By default, argparse would find no
    messages after such an option."""
    parse_without_options = parser.parse_known_args

    def parse(args: Any = None, namespace: Any = None) -> Any:
        parser.parse_known_args = parse_without_options  # type: ignore[method-assign]  # called by the next line
        return parser.parse_known_intermixed_args(args, namespace)

    parser.parse_known_args = parse  # type: ignore[method-assign]


def _message_batches(words: list[str]) -> Iterator[list[bytes]]:
    """Yield lists of messages; each list is put with one call."""
    if words and words != [_STDIN]:
        yield [os.fsencode(word) for word in words]
        return
    yield from read_lines(sys.stdin.fileno())


def read_lines(fd: int) -> Iterator[list[bytes]]:
    """Yield lists of complete lines as they arrive. Raises RecordTooLarge for a line that
    exceeds the largest batch."""
    incomplete_line = b""
    while data := os.read(fd, _READ_BYTES):
        *complete_lines, incomplete_line = (incomplete_line + data).split(b"\n")
        if complete_lines:
            yield [line.removesuffix(b"\r") for line in complete_lines]
        if len(incomplete_line) > limits.BATCH_BYTES:
            raise RecordTooLarge(f"a line of more than {limits.BATCH_BYTES} bytes")
    if incomplete_line:
        yield [incomplete_line]


def _parse_header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise InvalidRequest(f"--header: {text!r} is not NAME=VALUE")
    return name, value


def _parse_seconds(text: str) -> float:
    """Parse a number of seconds from 0 to the longest timeout of the client, as an argparse
    type."""
    try:
        seconds = float(text)
    except ValueError:
        # Refused by the next check, with the same message.
        seconds = -1.0
    if not 0 <= seconds <= limits.CLIENT_LONGEST_MS / 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds
