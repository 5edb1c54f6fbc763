"""`quackmq log`: a look into a data directory without a broker. Nothing in it is changed.

Exit codes are those of `outcome`. A batch that nobody can decode is no damage: its producer sent
it so.

What is printed is made in `look`, which is loaded only when there is something to look at.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from quackmq.cli.exit_codes import outcome


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "log",
        help="look into a data directory without a broker",
        description="Look into a data directory that no broker has open; nothing in it is changed. "
        "Exit codes: 0 all is well, 1 damage was found, 2 it cannot be looked at.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listing = actions.add_parser(
        "ls", help="topics, partitions and how the store was left", allow_abbrev=False
    )
    listing.add_argument("--json", action="store_true", help="one JSON object")

    dump = actions.add_parser(
        "dump",
        help="batches, records or journal frames",
        description="Batches, one a line; with --records also what is in them; with --journal the "
        "frames of the journal instead. Damaged ranges are named in their place.",
        allow_abbrev=False,
    )
    verify = actions.add_parser(
        "verify",
        help="check every byte",
        description="Check every byte that something vouches for, and name each damaged range.",
        allow_abbrev=False,
    )
    for action in (listing, dump, verify):
        action.add_argument("directory", metavar="DIR", type=Path)

    dump.add_argument(
        "topic", metavar="TOPIC[:PARTITION]", nargs="?", help="of these alone; default all"
    )
    dump.add_argument(
        "--from",
        dest="start",
        metavar="OFFSET",
        type=count,
        default=0,
        help="in each partition from this offset on",
    )
    dump.add_argument(
        "--limit", metavar="N", type=count, help="so many batches (records, frames) at the most"
    )
    dump.add_argument("--records", action="store_true", help="also the records")
    dump.add_argument("--journal", action="store_true", help="the journal's frames and entries")
    verify.add_argument(
        "--deep", action="store_true", help="also decode every batch, and name those that cannot be"
    )


def run(args: argparse.Namespace) -> int:
    from quackmq.cli.inspect import log_output as look

    return outcome(args.directory, lambda: look.look(args))


def count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return int(text)
