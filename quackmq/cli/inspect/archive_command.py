"""`quackmq archive`: the history of topics as Parquet, looked at, checked, taken out and put in.

`ls`, `verify` and `export` read a data directory, whether a broker has it open or not, and change
nothing in it; `import` speaks to a broker. Exit codes are those of `outcome`, and 1 for an import
that did not come through. A quarantined batch is no damage: its producer sent it so.

What they do is done in modules of their own, which are loaded only when they are needed.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from quackmq.cli.exit_codes import outcome
from quackmq.cli.inspect.log_command import count

_ADDRESS = "127.0.0.1:9092"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "archive",
        help="the history of topics: look at it, check it, export and import it",
        description="The history of topics, as Parquet files below DIR/archive. Exit codes: 0 all "
        "is well, 1 damage was found, 2 it cannot be looked at.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_ls(actions)
    _add_verify(actions)
    _add_export(actions)
    _add_import(actions)


def run(args: argparse.Namespace) -> int:
    if args.action == "import":
        from quackmq.cli.inspect import archive_import

        return archive_import.run(args)
    if args.action == "export":
        from quackmq.cli.inspect import archive_export

        return outcome(args.directory, lambda: archive_export.export(args))

    from quackmq.cli.inspect import archive_output as archive_look

    return outcome(args.directory, lambda: archive_look.look(args))


def _add_ls(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    listing = actions.add_parser("ls", help="what is archived", allow_abbrev=False)
    _add_place(listing, "of these alone; default all")
    listing.add_argument("--files", action="store_true", help="also each file")
    listing.add_argument("--json", action="store_true", help="one JSON object, with all files")


def _add_verify(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verify = actions.add_parser(
        "verify",
        help="check every byte",
        description="Check every byte and every row of the archive, that it has no gap, and, where "
        "no broker has the directory open, that it meets the log. Each damaged range is named.",
        allow_abbrev=False,
    )
    _add_place(verify, "of these alone; default all")


def _add_export(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    export = actions.add_parser(
        "export",
        help="a topic's archive as plain Parquet in another directory",
        description="Copy what is archived of a topic into a directory that is empty or not there: "
        "Parquet files, and a _manifest.json that lists them, which comes last. With bounds, files "
        "are cut where they lie. What is still in the log is not archived yet: POST "
        "/v1/topics/TOPIC/archive/now archives it.",
        allow_abbrev=False,
    )
    _add_place(export, "what is exported", required=True)
    export.add_argument("target", metavar="TARGET", type=Path)
    export.add_argument("--from", dest="start", metavar="OFFSET", type=count, default=0)
    export.add_argument("--before", metavar="OFFSET", type=count)
    export.add_argument(
        "--since",
        metavar="TIME",
        type=_time_ms,
        help="records of this time or later: 2026-11-16, 2026-11-16T09:12:00Z, or milliseconds",
    )
    export.add_argument("--until", metavar="TIME", type=_time_ms, help="records before this time")
    export.add_argument(
        "--skip-damaged",
        action="store_true",
        help="leave out what is damaged, and name it, instead of giving up",
    )


def _add_import(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    importing = actions.add_parser(
        "import",
        help="Parquet files into a topic of a running broker, each record once",
        description="Put the records of an export, or of any Parquet files with a column `value`, "
        "into a topic. Interrupted, the same command goes on where it was; repeated, it adds "
        "nothing. Columns that are taken where they are there: key, headers, timestamp, partition.",
        allow_abbrev=False,
    )
    importing.add_argument(
        "source", metavar="SOURCE", type=Path, help="a file, or a directory of files"
    )
    importing.add_argument("topic", metavar="TOPIC", help="made if it is not there")
    importing.add_argument(
        "--broker",
        metavar="HOST:PORT",
        default=_ADDRESS,
        help=f"the broker's Kafka door; default {_ADDRESS}",
    )
    # The name of --broker in earlier versions.
    importing.add_argument("--to", dest="broker", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    importing.add_argument(
        "--name",
        help="under which the broker remembers what is there; made of the files' content unless "
        "given, and to be given to import the same files once more",
    )
    importing.add_argument(
        "--by-key",
        action="store_true",
        help="let keys choose the partitions, instead of those that records were in",
    )


def _add_place(parser: argparse.ArgumentParser, help_text: str, *, required: bool = False) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path)
    if required:
        parser.add_argument("topic", metavar="TOPIC[:PARTITION]", help=help_text)
    else:
        parser.add_argument("topic", metavar="TOPIC[:PARTITION]", nargs="?", help=help_text)


def _time_ms(text: str) -> int:
    """Milliseconds, or a moment as ISO 8601 has it; without a zone it is UTC."""
    if text.isascii() and text.isdigit() and len(text) > 8:
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time: write 2026-11-16T09:12:00Z, or milliseconds"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)
