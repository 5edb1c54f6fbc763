"""`quackmq get`: print the messages of a topic to stdout, one per line.

With `--name` it uses a durable subscription: printed messages are acknowledged, and the next `get`
with this name continues after them. Without a name it reads the topic without a subscription and
leaves nothing behind in the broker.

Values are written raw to a pipe or file. On a terminal, control characters are escaped. If the
command is killed after printing a message, the message may be printed again.
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
from quackmq.cli.exit_codes import end_after_closed_pipe
from quackmq.cli.put import add_connection_options
from quackmq.cli.text import format_bytes, format_time, pluralize
from quackmq.errors import QuackTimeout, UnknownTopic

if TYPE_CHECKING:
    from quackmq.client.kafka.client import Client
    from quackmq.client.kafka.types import Message

#: Without --count, the command ends when no message has arrived for this time.
_IDLE_S: Final = 1.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "get",
        help="print the messages of a topic",
        description="Print the messages of a topic of a running broker, one per line. With "
        "--name, use a durable subscription: the next get continues where this one ended. Exit "
        "codes: 0 success, 1 fewer messages arrived than requested, 128 + the number of the "
        "signal that stopped the command before --count messages arrived.",
        allow_abbrev=False,
    )
    parser.add_argument("topic", metavar="TOPIC")
    parser.add_argument(
        "--name",
        help="name of the subscription; without it, print all messages and do not subscribe",
    )
    parser.add_argument(
        "--from",
        dest="start",
        choices=("beginning", "end"),
        help="where a new subscription starts; default: end, or beginning without --name",
    )
    how_many = parser.add_mutually_exclusive_group()
    how_many.add_argument(
        "--count", metavar="N", type=_parse_count, help="print N messages; wait for them"
    )
    how_many.add_argument(
        "--follow", action="store_true", help="wait for new messages until stopped"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print each message as a JSON object: id, key, headers, value …",
    )
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the messages and return the exit code. On every way out, the client is closed so that
    printed messages are acknowledged and the others are not."""
    from quackmq.client.kafka.client import Client

    with (
        _signals_as_interrupt() as stop_signal,
        Client(args.broker, args.name, timeout=args.timeout) as client,
    ):
        printer = _MessagePrinter(args)
        try:
            if args.name is None:
                _browse(client, args, printer)
            else:
                _subscribe(client, args)
                printer.run(lambda timeout: client.get(args.topic, timeout))
        except KeyboardInterrupt:
            if args.count is not None:
                return 128 + stop_signal.number
            # Without --count, stopping the command is the normal end.
        except BrokenPipeError:
            return end_after_closed_pipe()
        finally:
            # A message that was not printed is delivered again.
            client.close(done=printer.has_printed)
    return printer.exit_code()


def _subscribe(client: Client, args: argparse.Namespace) -> None:
    """Subscribe. Print a notice if the subscription is new, because the name or the topic may be
    misspelt."""
    topics = client.topics()
    if not client.subscribe(args.topic, args.start or "end"):
        return
    notice = f"{args.name} is subscribed to {args.topic}, starting at its {args.start or 'end'}"
    if args.topic not in topics:
        notice = f"topic {args.topic} was created, and {args.name} is subscribed to it"
    print(f"quackmq: {notice}", file=sys.stderr)


def _browse(client: Client, args: argparse.Namespace, printer: _MessagePrinter) -> None:
    """Print messages without subscribing, so that nothing is left in the broker."""
    from quackmq.client.consuming.browse import Browser

    if not args.follow:
        _check_topic_exists(client, args.topic)
    else:
        client.session.cluster.ensure_topic(args.topic, client.session.start_call(None))
    with Browser(client, args.topic, args.start or "beginning") as browser:
        printer.run(browser.get)


def _check_topic_exists(client: Client, topic: str) -> None:
    """Raise UnknownTopic for a missing topic, instead of creating one because of a misspelt
    name."""
    topics = client.topics()
    if topic not in topics:
        raise UnknownTopic(f"there is no topic {topic}{suggest(topic, topics)}")


class _MessagePrinter:
    """Print messages until there are enough or no more arrive."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._timeout_s = limits.CLIENT_TIMEOUT_MS / 1000 if args.timeout is None else args.timeout
        self._printed = 0
        #: Whether the message requested last has been printed.
        self.has_printed = False

    def run(self, get: Callable[[float], Message]) -> None:
        """Call `get` with a timeout in seconds and print its message, until --count messages are
        printed or no more arrive. Raises QuackTimeout only with --follow."""
        args = self._args
        is_terminal = sys.stdout.isatty()
        while args.count is None or self._printed < args.count:
            self.has_printed = False
            try:
                message = get(self._next_timeout_s())
            except QuackTimeout:
                if args.follow:
                    raise  # `get` waits forever here, so another request has timed out
                break
            sys.stdout.buffer.write(
                _format_line(message, as_json=args.json, is_terminal=is_terminal)
            )
            # Flush before the message counts as printed: a closed pipe must fail here, so that the
            # message is not acknowledged.
            sys.stdout.buffer.flush()
            self.has_printed = True
            self._printed += 1

    def exit_code(self) -> int:
        """Return 0 if all requested messages were printed. Otherwise print a sentence and return
        1."""
        requested = self._args.count
        if requested is None or self._printed >= requested:
            return 0
        print(
            f"quackmq: only {self._printed} of {pluralize(requested, 'message')} arrived: "
            f"no more within {self._timeout_s:g} s",
            file=sys.stderr,
        )
        return 1

    def _next_timeout_s(self) -> float:
        """Return how long to wait for the next message: forever with --follow, the full timeout
        with --count, else until the topic is idle."""
        if self._args.follow:
            return math.inf
        if self._args.count is not None:
            return self._timeout_s
        # The first message may take longer, because the client has to join a group.
        return _IDLE_S if self._printed else max(_IDLE_S, self._timeout_s)


def _format_line(message: Message, *, as_json: bool, is_terminal: bool) -> bytes:
    """Return the output line of a message: a JSON object, or its value. On a terminal, a value with
    control characters is escaped."""
    if as_json:
        return orjson.dumps(_to_json_object(message)) + b"\n"
    data = message.data or b""
    if is_terminal:
        text = data.decode(errors="replace")
        return (text if text.isprintable() else format_bytes(data)).encode() + b"\n"
    return data + b"\n"


def _to_json_object(message: Message) -> dict[str, object]:
    """Return the message as --json prints it. Data that is not UTF-8 becomes base64."""
    return {
        "id": message.id,
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "timestamp": format_time(message.timestamp_ms),
        "key": _text_or_base64(message.key),
        "headers": {name: _text_or_base64(value) for name, value in message.headers.items()},
        "value": _text_or_base64(message.data),
    }


def _text_or_base64(data: bytes | None) -> object:
    """Return UTF-8 data as text, and other data as base64."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _parse_count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number greater than 0")
    return int(text)


class _StopSignal:
    """The signal that ended the command, if one did."""

    def __init__(self) -> None:
        self.number = int(signal.SIGINT)  # Python raises KeyboardInterrupt for it


@contextmanager
def _signals_as_interrupt() -> Iterator[_StopSignal]:
    """Treat SIGTERM and the closing of the terminal as an interrupt, so that the position of a
    named subscription is committed. A signal that was ignored from the start stays ignored."""
    old_handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}

    stop_signal = _StopSignal()

    def interrupt(number: int, _: object) -> None:
        """Record which signal it is, then raise KeyboardInterrupt in the main thread."""
        stop_signal.number = number
        # Ignore further signals: closing a terminal sends SIGHUP twice, from the kernel and from
        # the shell.
        for each in old_handlers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for each, handler in old_handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(each, interrupt)
    try:
        yield stop_signal
    finally:
        for each, handler in old_handlers.items():
            signal.signal(each, handler)
