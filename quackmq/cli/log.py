"""`quackmq log`: a look into a data directory without a broker. Nothing in it is changed.

Exit codes: 0 all is well, 1 damage was found, 2 the directory cannot be looked at, or what was
asked for is not in it. A batch that nobody can decode is no damage: its producer sent it so.

What is printed is made in `look`, which is loaded only when there is something to look at.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Final

from quackmq.errors import NewerFormat, NotFound, StoreLocked, UnusableDirectory

SOUND: Final = 0
DAMAGED: Final = 1
UNREADABLE: Final = 2
#: As if SIGPIPE had ended the process: whoever read our output has enough of it.
ENOUGH: Final = 141


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
        type=_count,
        default=0,
        help="in each partition from this offset on",
    )
    dump.add_argument(
        "--limit", metavar="N", type=_count, help="so many batches (records, frames) at the most"
    )
    dump.add_argument("--records", action="store_true", help="also the records")
    dump.add_argument("--journal", action="store_true", help="the journal's frames and entries")
    verify.add_argument(
        "--deep", action="store_true", help="also decode every batch, and name those that cannot be"
    )


def run(args: argparse.Namespace) -> int:
    from quackmq.cli import look

    try:
        if not args.directory.is_dir():
            raise UnusableDirectory(f"{args.directory} is no directory")
        damaged = look.look(args)
        sys.stdout.flush()
        return DAMAGED if damaged else SOUND
    except BrokenPipeError:
        # What is still buffered must not be tried again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ENOUGH
    except (NewerFormat, NotFound, StoreLocked, UnusableDirectory) as error:
        return _complain(str(error))
    except OSError as error:
        where = error.filename or args.directory
        return _complain(f"cannot read {where}: {error.strerror or error}")


def _complain(sentence: str) -> int:
    print(f"quackmq: {sentence}", file=sys.stderr)
    return UNREADABLE


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return int(text)
