"""`quackmq get`: messages of a topic, on stdout, one a line.

With a name it is a subscriber like any other: its subscription lasts, and what was printed is done,
so that the next `get` under this name goes on. Without one it reads the topic without subscribing,
and leaves nothing behind in the broker, whatever ends it.

To a program the values go as they are; to a terminal with everything escaped that it might obey.
Where a message is printed and the command then killed, it may be printed once more.
"""

from __future__ import annotations

import argparse
import base64
import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import orjson

from quackmq import limits
from quackmq.cli.broker.settings import suggest
from quackmq.cli.exit_codes import had_enough
from quackmq.cli.put import add_connection
from quackmq.cli.text import counted, moment, shown
from quackmq.errors import QuackTimeout, UnknownTopic

if TYPE_CHECKING:
    from quackmq.client.kafka.client import Client
    from quackmq.client.kafka.types import Message

#: Without a count: the end is there when nothing has come for so long.
_QUIET_S: Final = 1.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "get",
        help="print the messages of a topic",
        description="Print the messages of a topic of a running broker, one a line. With --name "
        "it is a subscription that lasts, and the next get goes on where this one ended. Exit "
        "codes: 0 all is well, 1 fewer came than were asked for, 128 and the number of the signal "
        "that ended it before --count messages came.",
        allow_abbrev=False,
    )
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument(
        "--name",
        help="the subscription's name; without it, print what is there and subscribe to nothing",
    )
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
    from quackmq.client.kafka.client import Client

    with (
        _ended_in_good_order() as ending,
        Client(args.broker, args.name, timeout=args.timeout) as client,
    ):
        printing = _Printing(args)
        try:
            if args.name is None:
                _browse(client, args, printing)
            else:
                _subscribe(client, args)
                printing.run(lambda timeout: client.get(args.topic, timeout))
        except KeyboardInterrupt:
            if args.count is not None:
                return 128 + ending.number
            # Without a count, whoever has seen enough has got all that was wanted.
        except BrokenPipeError:
            return had_enough()
        finally:
            # A message that was not printed comes again.
            client.close(done=printing.has_printed)
    return printing.exit_code()


def _subscribe(client: Client, args: argparse.Namespace) -> None:
    """Say so if the subscription is new: a name or a topic may be a slip of the hand."""
    topics = client.topics()
    if not client.subscribe(args.topic, args.start or "end"):
        return
    said = f"{args.name} is subscribed to {args.topic} from its {args.start or 'end'}"
    if args.topic not in topics:
        said = f"topic {args.topic} is new; {args.name} is subscribed from now on"
    print(f"quackmq: {said}", file=sys.stderr)


def _browse(client: Client, args: argparse.Namespace, printing: _Printing) -> None:
    """Print messages without subscribing, so that nothing is left in the broker."""
    from quackmq.client.consuming.browse import Browser

    if not args.follow:
        _check_there(client, args.topic)
    else:
        client.session.cluster.ensure_topic(args.topic, client.session.begin(None))
    with Browser(client, args.topic, args.start or "beginning") as browser:
        printing.run(browser.get)


def _check_there(client: Client, topic: str) -> None:
    """Who only wants to see what is in a topic should not create one by a slip."""
    topics = client.topics()
    if topic not in topics:
        raise UnknownTopic(f"there is no topic {topic}{suggest(topic, topics)}")


class _Printing:
    """Prints messages until there are enough, or no more come."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._patience_s = limits.CLIENT_TIMEOUT_MS / 1000 if args.timeout is None else args.timeout
        self._got = 0
        #: Whether the last message that was asked for has been printed.
        self.has_printed = False

    def run(self, get: Callable[[float], Message]) -> None:
        args = self._args
        is_terminal = sys.stdout.isatty()
        while args.count is None or self._got < args.count:
            self.has_printed = False
            try:
                message = get(self._wait_s())
            except QuackTimeout:
                if args.follow:
                    raise  # who follows waits for ever, so that something else was waited for
                break
            sys.stdout.buffer.write(_line(message, as_json=args.json, is_terminal=is_terminal))
            sys.stdout.buffer.flush()
            self.has_printed = True
            self._got += 1

    def exit_code(self) -> int:
        wanted = self._args.count
        if wanted is None or self._got >= wanted:
            return 0
        print(
            f"quackmq: only {self._got} of {counted(wanted, 'message')} came: nothing more for "
            f"{self._patience_s:g} s",
            file=sys.stderr,
        )
        return 1

    def _wait_s(self) -> float:
        if self._args.follow:
            return math.inf
        if self._args.count is not None:
            return self._patience_s
        # The first may take longer: joining a group takes its time.
        return _QUIET_S if self._got else max(_QUIET_S, self._patience_s)


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


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


class _Ending:
    """The signal that ended the command, if one did."""

    def __init__(self) -> None:
        self.number = int(signal.SIGINT)  # which Python itself makes a KeyboardInterrupt


@contextmanager
def _ended_in_good_order() -> Iterator[_Ending]:
    """Treat SIGTERM and the closing of the terminal as an interrupt, so that the position of a
    named subscription is committed. A signal that was ignored from the start stays ignored."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}

    ending = _Ending()

    def interrupt(number: int, _: object) -> None:
        ending.number = number
        # Once: a terminal that is closed tells it twice, by the kernel and by the shell.
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for each, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(each, interrupt)
    try:
        yield ending
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
