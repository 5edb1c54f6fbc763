"""`quackmq get`: messages of a topic, on stdout, one a line.

With a name it is a subscriber like any other: its subscription lasts, and what was printed is done,
so that the next `get` under this name goes on. Without one it subscribes for as long as it runs and
leaves nothing behind.

To a program the values go as they are; to a terminal with everything escaped that it might obey.
Where a message is printed and the command then killed, it may be printed once more.
"""

from __future__ import annotations

import argparse
import base64
import math
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import orjson

from quackmq.cli.outcome import had_enough
from quackmq.cli.put import add_connection
from quackmq.cli.settings import suggest
from quackmq.cli.text import counted, moment, shown
from quackmq.errors import QuackTimeout, UnknownSubscription, UnknownTopic

if TYPE_CHECKING:
    from quackmq.client.client import Client
    from quackmq.client.values import Message, StartLike

#: Without a count: the end is there when nothing has come for so long.
_QUIET_S: Final = 1.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "get",
        help="print the messages of a topic",
        description="Print the messages of a topic of a running broker, one a line. With --name "
        "it is a subscription that lasts, and the next get goes on where this one ended. Exit "
        "codes: 0 all is well, 1 fewer came than were asked for.",
        allow_abbrev=False,
    )
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument("--name", help="of the subscription; default: one for this command alone")
    parser.add_argument(
        "--from",
        dest="start",
        choices=("beginning", "end"),
        help="where a new subscription begins; default the end, without a name the beginning",
    )
    how_many = parser.add_mutually_exclusive_group()
    how_many.add_argument("--count", metavar="N", type=_count, help="so many, waiting for them")
    how_many.add_argument("--follow", action="store_true", help="all that ever come")
    parser.add_argument(
        "--json", action="store_true", help="each as a JSON object: id, key, headers, value …"
    )
    add_connection(parser)


def run(args: argparse.Namespace) -> int:
    from quackmq.client.client import Client

    is_unnamed = args.name is None
    name = f"get-{uuid.uuid4().hex[:12]}" if is_unnamed else args.name
    start: StartLike = args.start or ("beginning" if is_unnamed else "end")
    with _ended_in_good_order(), tempfile.TemporaryDirectory(prefix="quackmq-get-") as temporary:
        directory = temporary if is_unnamed else None
        options: dict[str, Any] = {"timeout": args.timeout, "directory": directory}
        with Client(args.broker, name, on_crash="repeat", **options) as client:
            if is_unnamed and not args.follow:
                _check_there(client, args.topic)
            client.subscribe(args.topic, start)
            try:
                got = _print(client, args)
            except KeyboardInterrupt:
                got = args.count or 0  # who has seen enough has got all that was wanted
            except BrokenPipeError:
                return had_enough()
            finally:
                if is_unnamed:
                    _unsubscribe(client, args.topic)
    if args.count is not None and got < args.count:
        print(
            f"quackmq: {counted(got, 'message')} of {args.count} came within {args.timeout:g} s "
            "of each other",
            file=sys.stderr,
        )
        return 1
    return 0


def _check_there(client: Client, topic: str) -> None:
    """Who only wants to see what is in a topic should not create one by a slip."""
    topics = client.topics()
    if topic not in topics:
        raise UnknownTopic(f"there is no topic {topic}{suggest(topic, topics)}")


def _print(client: Client, args: argparse.Namespace) -> int:
    """How many there were."""
    wait_s = _QUIET_S
    if args.follow:
        wait_s = math.inf
    elif args.count is not None:
        wait_s = args.timeout
    got = 0
    is_terminal = sys.stdout.isatty()
    while args.count is None or got < args.count:
        try:
            # The first may take longer: joining a group takes its time.
            message = client.get(args.topic, max(wait_s, args.timeout) if not got else wait_s)
        except QuackTimeout:
            break
        sys.stdout.buffer.write(_line(message, as_json=args.json, is_terminal=is_terminal))
        sys.stdout.buffer.flush()
        got += 1
    return got


def _line(message: Message, *, as_json: bool, is_terminal: bool) -> bytes:
    if as_json:
        return orjson.dumps(_object(message)) + b"\n"
    data = message.data or b""
    if is_terminal:
        text = data.decode(errors="replace")
        return (text if text.isprintable() else shown(data)).encode() + b"\n"
    return data + b"\n"


def _object(message: Message) -> dict[str, object]:
    return {
        "id": message.id,
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "timestamp": moment(message.timestamp_ms),
        "key": _text(message.key),
        "headers": {name: _text(value) for name, value in message.headers.items()},
        "value": _text(message.data),
    }


def _text(data: bytes | None) -> object:
    """Text where it is any, else as base64."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _unsubscribe(client: Client, topic: str) -> None:
    try:
        client.unsubscribe(topic)
    except UnknownSubscription:
        return  # the topic went, and took it along


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


@contextmanager
def _ended_in_good_order() -> Iterator[None]:
    """Whoever ends this command, also by closing its terminal, does it as by an interrupt: a
    subscription for this command alone is not left. One that it was started to ignore stays so."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}

    def interrupt(*_: object) -> None:
        # Once: a terminal that is closed tells it twice, by the kernel and by the shell.
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for each, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(each, interrupt)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
