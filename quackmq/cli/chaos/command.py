"""`quackmq chaos-client`: a faulty client, to see that a broker and its other clients are not
affected.

The client drops messages, acknowledges late or twice, puts twice, disconnects in the middle of a
request, dies, subscribes and unsubscribes, over any protocol. A seed determines the order. It harms
no other client: it uses only subscriptions of its own name, and deletes them at the end unless
`--keep` is given.

`plan` draws the actions, `runner` performs them through one module per protocol. All are imported
only when needed.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Final

from quackmq.cli.broker.address import parse_address_or_path, parse_advertised_address
from quackmq.cli.chaos.plan import FAULTS, check_faults
from quackmq.errors import InvalidRequest

#: The supported protocols and their default addresses.
ADDRESSES: Final = {
    "line": "127.0.0.1:5550",
    "zmq": "127.0.0.1:5555",
    "xpub": "127.0.0.1:5558",
    "kafka": "127.0.0.1:9092",
}
DONE: Final = 0
INTERRUPTED: Final = 130
_TCP: Final = "tcp://"
_SEEDS: Final = 1_000_000
_LONGEST_S: Final = 7 * 24 * 3600.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "chaos-client",
        help="run a faulty client that drops, delays, duplicates and dies",
        description="Run a faulty client against a running broker: it drops, delays, duplicates, "
        "dies, subscribes and unsubscribes at random. The same seed gives the same actions. A "
        "summary is printed at the end. Exit codes: 0 done, 1 the broker cannot be reached, "
        "2 invalid arguments, 130 interrupted by Ctrl-C.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--door", dest="protocol", choices=list(ADDRESSES), required=True, help="the protocol"
    )
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="the address of that listener; line: also unix:PATH; xpub: the proxy; default: the "
        "usual address",
    )
    parser.add_argument(
        "--broker",
        metavar="HOST:PORT",
        help="with --door kafka: the same as --address, for consistency with other commands",
    )
    parser.add_argument(
        "--name", default="chaos", help="name of the client and of its subscriptions"
    )
    parser.add_argument(
        "--topic",
        dest="topics",
        metavar="TOPIC",
        action="append",
        help="a topic to use; may be repeated; default chaos",
    )
    parser.add_argument(
        "--seed",
        metavar="N",
        type=int,
        help="seed of the random actions; default: random, and printed",
    )
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=_parse_seconds,
        default=10.0,
        help="duration in seconds; default 10",
    )
    parser.add_argument("--acts", metavar="N", type=int, help="stop after N actions")
    parser.add_argument(
        "--faults",
        metavar="LIST",
        default=",".join(FAULTS),
        help="the faults, separated by commas; default all: %(default)s; none: ''",
    )
    parser.add_argument(
        "--no-puts", dest="puts", action="store_false", help="only receive; put nothing"
    )
    parser.add_argument(
        "--settle",
        metavar="S",
        type=_parse_seconds,
        help="then behave well, and receive until no message has arrived for S seconds",
    )
    parser.add_argument(
        "--expect",
        metavar="N",
        type=int,
        help="with --settle: stop when it has received N messages, including those in the file of "
        "--seen",
    )
    parser.add_argument(
        "--seen",
        metavar="FILE",
        type=Path,
        help="append each acknowledged message to FILE, once, as a line of JSON; messages that are "
        "already in the file are not appended again",
    )
    parser.add_argument(
        "--keep", action="store_true", help="do not delete its subscriptions at the end"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the chaos client and print its summary; return the exit code. Raises InvalidRequest for
    invalid options and OSError if the broker was never reached."""
    from quackmq.cli.chaos import runner as chaos_run

    faults = check_faults(filter(None, args.faults.split(",")))
    for option in ("acts", "expect"):
        if (number := getattr(args, option)) is not None and number < 1:
            raise InvalidRequest(f"--{option}: {number} is not a number greater than 0")
    seed = random.randrange(_SEEDS) if args.seed is None else args.seed
    options = chaos_run.ChaosOptions(
        protocol=args.protocol,
        address=_check_address(args.protocol, _address_option(args)),
        name=args.name,
        # Each topic once, in the given order.
        topics=tuple(dict.fromkeys(args.topics or ["chaos"])),
        seed=seed,
        seconds=args.seconds,
        acts=args.acts,
        faults=faults,
        puts=args.puts,
        settle_seconds=args.settle,
        expected=args.expect,
        seen=args.seen,
        keeps_subscriptions=args.keep,
    )
    summary = chaos_run.run(options)
    sys.stdout.write(summary.json() if args.json else summary.text())
    return INTERRUPTED if summary.was_interrupted else DONE


def _address_option(args: argparse.Namespace) -> str | None:
    """Return the address as given by --address or --broker, or None. Raises InvalidRequest if both
    are given, or --broker for another protocol than Kafka."""
    if args.broker is None:
        address_text: str | None = args.address
        return address_text
    if args.protocol != "kafka":
        raise InvalidRequest(
            f"--broker is the address of the kafka listener: use --address for the "
            f"{args.protocol} listener"
        )
    if args.address is not None:
        raise InvalidRequest("--broker and --address mean the same: give only one of them")
    broker: str = args.broker
    return broker


def _check_address(protocol: str, address_text: str | None) -> str:
    """Return the address after checking it, or the default. A Kafka address may be a list, and a
    ZeroMQ address may start with tcp://."""
    if address_text is None:
        return ADDRESSES[protocol]
    parse = parse_address_or_path if protocol == "line" else parse_advertised_address
    plain = address_text.removeprefix(_TCP) if protocol in ("zmq", "xpub") else address_text
    try:
        for broker_address in plain.split(",") if protocol == "kafka" else [plain]:
            parse(broker_address)
    except ValueError as error:
        raise InvalidRequest(f"--address: {address_text!r} {error}") from None
    return address_text


def _parse_seconds(text: str) -> float:
    """Parse a number of seconds, at most a week, as an argparse type."""
    try:
        seconds = float(text)
    except ValueError:
        # Refused by the next check, with the same message.
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds
