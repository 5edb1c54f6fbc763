"""`quackmq archive`: list, verify, export and import the Parquet history of topics.

`ls`, `verify` and `export` read a data directory, whether or not a broker has it open, and change
nothing in it. `import` sends records to a broker. Exit codes are those of
`exit_codes.inspect_directory`, and 1 for an import that failed. A quarantined batch is not damage:
its producer sent it like this.

The actions are in modules of their own, imported only when needed.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from quackmq.cli.exit_codes import inspect_directory
from quackmq.cli.text import parse_count

_ADDRESS = "127.0.0.1:9092"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "archive",
        help="list, verify, export and import the history of topics",
        description="The history of topics, as Parquet files in DIR/archive. Exit codes: 0 no "
        "damage, 1 damage was found, 2 the archive cannot be read.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_ls(actions)
    _add_verify(actions)
    _add_export(actions)
    _add_import(actions)


def run(args: argparse.Namespace) -> int:
    """Run the action and return its exit code."""
    if args.action == "import":
        from quackmq.cli.inspect import archive_import

        return archive_import.run(args)
    if args.action == "export":
        from quackmq.cli.inspect import archive_export

        return inspect_directory(args.directory, lambda: archive_export.export(args))

    from quackmq.cli.inspect import archive_output

    return inspect_directory(args.directory, lambda: archive_output.inspect_archive(args))


def _add_ls(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    listing = actions.add_parser("ls", help="list the archive", allow_abbrev=False)
    _add_selector(listing, "a topic or partition; default all")
    listing.add_argument("--files", action="store_true", help="also list each file")
    listing.add_argument(
        "--json", action="store_true", help="print one JSON object, with all files"
    )


def _add_verify(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verify = actions.add_parser(
        "verify",
        help="check every byte",
        description="Check every byte and every row of the archive, and that it has no gap. If no "
        "broker has the directory open, also check that the archive and the log join. Each "
        "damaged range is named.",
        allow_abbrev=False,
    )
    _add_selector(verify, "a topic or partition; default all")


def _add_export(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    export = actions.add_parser(
        "export",
        help="copy the archive of a topic to another directory",
        description="Copy the archived records of a topic to a directory that is empty or does "
        "not exist: Parquet files and a _manifest.json that lists them, written last. With "
        "bounds, only the matching part of a file is copied. Records that are still in the log "
        "are not archived yet: POST /v1/topics/TOPIC/archive/now archives them.",
        allow_abbrev=False,
    )
    _add_selector(export, "the topic or partition to export", required=True)
    export.add_argument("target", metavar="TARGET", type=Path)
    export.add_argument("--from", dest="start", metavar="OFFSET", type=parse_count, default=0)
    export.add_argument("--before", metavar="OFFSET", type=parse_count)
    export.add_argument(
        "--since",
        metavar="TIME",
        type=_parse_time_ms,
        help="records from this time on: 2026-11-16, 2026-11-16T09:12:00Z, or milliseconds",
    )
    export.add_argument(
        "--until", metavar="TIME", type=_parse_time_ms, help="records before this time"
    )
    export.add_argument(
        "--skip-damaged",
        action="store_true",
        help="leave out damaged ranges and name them, instead of failing",
    )


def _add_import(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    importing = actions.add_parser(
        "import",
        help="import Parquet files into a topic of a running broker, exactly once",
        description="Put the records of an export, or of any Parquet files with a column `value`, "
        "into a topic. If interrupted, run the same command again: it continues, and a repeated "
        "import adds nothing. Optional columns: key, headers, timestamp, partition.",
        allow_abbrev=False,
    )
    importing.add_argument(
        "source", metavar="SOURCE", type=Path, help="a file, or a directory of files"
    )
    importing.add_argument("topic", metavar="TOPIC", help="the target topic; created if missing")
    importing.add_argument(
        "--broker",
        metavar="HOST:PORT",
        default=_ADDRESS,
        help=f"the Kafka address of the broker; default {_ADDRESS}",
    )
    # The name of --broker in earlier versions.
    importing.add_argument("--to", dest="broker", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    importing.add_argument(
        "--name",
        help="name under which the broker stores the progress; default: made from the content of "
        "the files. Give another name to import the same files again",
    )
    importing.add_argument(
        "--by-key",
        action="store_true",
        help="choose partitions by key, instead of the original partitions",
    )


def _add_selector(
    parser: argparse.ArgumentParser, help_text: str, *, required: bool = False
) -> None:
    """Add the arguments DIR and TOPIC[:PARTITION] to an action."""
    parser.add_argument("directory", metavar="DIR", type=Path)
    if required:
        parser.add_argument("topic", metavar="TOPIC[:PARTITION]", help=help_text)
    else:
        parser.add_argument("topic", metavar="TOPIC[:PARTITION]", nargs="?", help=help_text)


def _parse_time_ms(text: str) -> int:
    """Parse milliseconds or an ISO 8601 time; the default time zone is UTC."""
    # Eight digits are a date of ISO 8601, 20261116, and not milliseconds.
    if text.isascii() and text.isdigit() and len(text) > 8:
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time: write 2026-11-16T09:12:00Z, or milliseconds"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)
