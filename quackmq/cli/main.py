"""The `quackmq` command: finds the subcommand, and turns errors into one sentence and an exit code.

Not here: what a subcommand does. Each has its own file in this package.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Final, NoReturn, Protocol

from quackmq import __version__
from quackmq.cli import archive, log, serve
from quackmq.cli.settings import suggest
from quackmq.errors import InvalidRequest, QuackError

FAILED: Final = 1
MISUSED: Final = 2
INTERRUPTED: Final = 130


class Command(Protocol):
    """What the module of a command offers."""

    def add_parser(
        self, subparsers: argparse._SubParsersAction[argparse.ArgumentParser]
    ) -> object: ...

    def run(self, args: argparse.Namespace) -> int: ...


#: By the word typed. A new command is a module and a line here.
COMMANDS: Final[dict[str, Command]] = {"serve": serve, "log": log, "archive": archive}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the result is the process's exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    args = build_parser().parse_args(arguments)
    try:
        return COMMANDS[args.command].run(args)
    except InvalidRequest as error:
        return _complain(error, MISUSED)
    except (QuackError, OSError) as error:
        return _complain(error, FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = Parser(
        prog="quackmq",
        description="A publish/subscribe broker that acknowledges only what is on disk.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"quackmq {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS.values():
        command.add_parser(subparsers)
    return parser


class Parser(argparse.ArgumentParser):
    """argparse, with its complaints in one sentence and a suggestion for a misspelt word."""

    def error(self, message: str) -> NoReturn:
        self.exit(MISUSED, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            raise argparse.ArgumentError(
                None, f"there is no command {value!r}{suggest(str(value), action.choices)}"
            )
        super()._check_value(action, value)


def _complain(error: Exception, exit_code: int) -> int:
    print(f"quackmq: {error}", file=sys.stderr)
    return exit_code
