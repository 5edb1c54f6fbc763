"""`quackmq log`: inspect a data directory without a broker. Nothing in it is changed.

Exit codes are those of `exit_codes.inspect_directory`. A batch that cannot be decoded is not
damage: its producer sent it like this.

`log_output` prints the results; it is imported only when needed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from quackmq.cli.exit_codes import inspect_directory
from quackmq.cli.text import parse_count


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "log",
        help="inspect a data directory without a broker",
        description="Inspect a data directory that no broker has open. Nothing in it is changed. "
        "Exit codes: 0 no damage, 1 damage was found, 2 the directory cannot be read.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listing = actions.add_parser(
        "ls", help="list topics, partitions and the state of the store", allow_abbrev=False
    )
    listing.add_argument("--json", action="store_true", help="print one JSON object")

    dump = actions.add_parser(
        "dump",
        help="print batches, records or journal frames",
        description="Print batches, one per line; with --records also their records; with "
        "--journal the frames of the journal instead. Damaged ranges are named where they occur.",
        allow_abbrev=False,
    )
    verify = actions.add_parser(
        "verify",
        help="check every byte",
        description="Check every byte that a checksum covers, and name each damaged range.",
        allow_abbrev=False,
    )
    for action in (listing, dump, verify):
        action.add_argument("directory", metavar="DIR", type=Path)

    dump.add_argument(
        "topic", metavar="TOPIC[:PARTITION]", nargs="?", help="a topic or partition; default all"
    )
    dump.add_argument(
        "--from",
        dest="start",
        metavar="OFFSET",
        type=parse_count,
        default=0,
        help="start at this offset in each partition",
    )
    dump.add_argument(
        "--limit", metavar="N", type=parse_count, help="print at most N batches (records, frames)"
    )
    dump.add_argument("--records", action="store_true", help="also print the records")
    dump.add_argument(
        "--journal", action="store_true", help="print the frames and entries of the journal"
    )
    verify.add_argument(
        "--deep",
        action="store_true",
        help="also decode every batch, and name those that cannot be decoded",
    )


def run(args: argparse.Namespace) -> int:
    from quackmq.cli.inspect import log_output

    return inspect_directory(args.directory, lambda: log_output.inspect_log(args))
