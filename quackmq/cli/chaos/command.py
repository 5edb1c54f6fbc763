"""`quackmq chaos-client`: a client that does what clients do on bad days, by a seed.

It drops messages, acknowledges late and twice, puts twice, hangs up in the middle, dies, subscribes
and unsubscribes, through any door. A broker that keeps its promises is not impressed, nor are its
other clients; this is for whoever wants to see that. It harms nobody but itself: its subscriptions
are its own, by its name, and end with it unless it is told to keep them.

The acts stand in `chaos_plan`, how they are carried out at each door in a module of that door's
name; both are loaded only when there is something to do.
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

#: The doors that it knows, and where they listen unless told otherwise.
ADDRESSES: Final = {
    "line": "127.0.0.1:5550",
    "zmq": "127.0.0.1:5555",
    "xpub": "127.0.0.1:5558",
    "kafka": "127.0.0.1:9092",
}
_TCP: Final = "tcp://"
_SEEDS: Final = 1_000_000
_LONGEST_S: Final = 7 * 24 * 3600.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "chaos-client",
        help="a client that drops, delays, doubles and dies, by a seed",
        description="Be a bad client of a running broker: drop, delay, double, die, subscribe and "
        "unsubscribe at random. The same seed does the same things. What it did is printed at the "
        "end. Exit codes: 0 it did as planned, 1 it could not, 2 it was told nonsense.",
        allow_abbrev=False,
    )
    parser.add_argument("--door", choices=list(ADDRESSES), required=True, help="which way in")
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="where that door listens; line: also unix:PATH; xpub: the proxy; default the door's "
        "usual place",
    )
    parser.add_argument(
        "--broker",
        metavar="HOST:PORT",
        help="with --door kafka: the same as --address, as other commands have it",
    )
    parser.add_argument("--name", default="chaos", help="its name, and that of its subscriptions")
    parser.add_argument(
        "--topic",
        dest="topics",
        metavar="TOPIC",
        action="append",
        help="a topic to work on; may be given several times; default chaos",
    )
    parser.add_argument("--seed", metavar="N", type=int, help="default: one that is printed")
    parser.add_argument(
        "--seconds", metavar="S", type=_seconds, default=10.0, help="for so long; default 10"
    )
    parser.add_argument("--acts", metavar="N", type=int, help="so many acts at the most")
    parser.add_argument(
        "--faults",
        metavar="LIST",
        default=",".join(FAULTS),
        help="which faults, with commas between them; default all: %(default)s; none: ''",
    )
    parser.add_argument(
        "--no-puts", dest="puts", action="store_false", help="only take, and put nothing"
    )
    parser.add_argument(
        "--settle",
        metavar="S",
        type=_seconds,
        help="then be good, and take until nothing has come for so long",
    )
    parser.add_argument(
        "--expect",
        metavar="N",
        type=int,
        help="with --settle: no longer than until it has seen so many messages, those of the file "
        "included",
    )
    parser.add_argument(
        "--seen",
        metavar="FILE",
        type=Path,
        help="append each message that it acknowledged, once, as a line of JSON; what the file "
        "holds already is not written again",
    )
    parser.add_argument("--keep", action="store_true", help="keep its subscriptions when it ends")
    parser.add_argument("--json", action="store_true", help="the summary as one JSON object")


def run(args: argparse.Namespace) -> int:
    from quackmq.cli.chaos import runner as chaos_run

    faults = check_faults(filter(None, args.faults.split(",")))
    for option in ("acts", "expect"):
        if (number := getattr(args, option)) is not None and number < 1:
            raise InvalidRequest(f"--{option}: {number} is not a number from 1 on")
    seed = random.randrange(_SEEDS) if args.seed is None else args.seed
    orders = chaos_run.ChaosOptions(
        door=args.door,
        address=_address(args.door, _told_address(args)),
        name=args.name,
        topics=tuple(dict.fromkeys(args.topics or ["chaos"])),
        seed=seed,
        seconds=args.seconds,
        acts=args.acts,
        faults=faults,
        puts=args.puts,
        settle_seconds=args.settle,
        expected=args.expect,
        seen=args.seen,
        keeps=args.keep,
    )
    summary = chaos_run.run(orders)
    sys.stdout.write(summary.json() if args.json else summary.text())
    return 0


def _told_address(args: argparse.Namespace) -> str | None:
    if args.broker is None:
        told: str | None = args.address
        return told
    if args.door != "kafka":
        raise InvalidRequest(
            f"--broker is the address of the Kafka door: give that of the {args.door} door with "
            "--address"
        )
    if args.address is not None:
        raise InvalidRequest("--broker and --address mean the same here: give one of them")
    broker: str = args.broker
    return broker


def _address(door: str, told: str | None) -> str:
    """As it was told, if it is one. A Kafka cluster may have several, and a ZeroMQ socket's may
    be written as these are."""
    if told is None:
        return ADDRESSES[door]
    parse = parse_address_or_path if door == "line" else parse_advertised_address
    plain = told.removeprefix(_TCP) if door in ("zmq", "xpub") else told
    try:
        for one in plain.split(",") if door == "kafka" else [plain]:
            parse(one)
    except ValueError as error:
        raise InvalidRequest(f"--address: {told!r} {error}") from None
    return told


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds
