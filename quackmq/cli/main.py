"""The `quackmq` command: parse the arguments, run the subcommand, and turn an error into one
sentence and an exit code.

Each subcommand has its own module in this package.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Final, NoReturn, Protocol

from quackmq import __version__
from quackmq.cli import clock, get, limits_command, pipeline, put, serve, unacknowledged
from quackmq.cli import logs as logformat
from quackmq.cli.broker import topic_defaults_command as topic_defaults
from quackmq.cli.broker.settings import suggest
from quackmq.cli.chaos import command as chaos
from quackmq.cli.exit_codes import end_after_closed_pipe, flush_or_discard_output, is_stdout_closed
from quackmq.cli.experiment import command as experiment
from quackmq.cli.inspect import archive_command as archive
from quackmq.cli.inspect import log_command as log
from quackmq.errors import InvalidRequest, QuackError
from quackmq.no_pandas import hide_pandas

FAILED: Final = 1
MISUSED: Final = 2
INTERRUPTED: Final = 130
_NO_MORE_OPTIONS: Final = "--"


class Command(Protocol):
    """The interface of a command module."""

    def add_parser(
        self, subparsers: argparse._SubParsersAction[argparse.ArgumentParser]
    ) -> object: ...

    def run(self, args: argparse.Namespace) -> int: ...


#: Commands by name. To add a command, add its module and a line here.
COMMANDS: Final[dict[str, Command]] = {
    "serve": serve,
    "log": log,
    "archive": archive,
    "pipeline": pipeline,
    "put": put,
    "get": get,
    "unacknowledged": unacknowledged,
    "clock": clock,
    "topic-defaults": topic_defaults,
    "limits": limits_command,
    "experiment": experiment,
    "chaos-client": chaos,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. If `arguments` is None, parse `sys.argv` and
    configure the logging of the process."""
    try:
        args = build_parser().parse_args(arguments)
        if arguments is None and args.command != "serve":  # `serve` configures its own logging
            logformat.configure_tool(os.environ)
            if COMMANDS[args.command] is experiment:
                hide_pandas()  # its broker uses pyarrow, as that of `serve` does
        exit_code = COMMANDS[args.command].run(args)
        sys.stdout.flush()  # a failure to write is reported below
        return exit_code
    except InvalidRequest as error:
        return _print_error(error, MISUSED)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and is_stdout_closed():
            return end_after_closed_pipe()
        flush_or_discard_output()
        return _print_error(_describe_os_error(error), FAILED)
    except QuackError as error:
        return _print_error(error, FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line, with one subparser for each command."""
    parser: argparse.ArgumentParser = Parser(
        prog="quackmq",
        formatter_class=_HelpFormatter,
        description="A publish/subscribe broker that acknowledges only what is on disk.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"quackmq {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS.values():
        command.add_parser(subparsers)
    return parser


class Parser(argparse.ArgumentParser):
    """An argparse parser that reports an error as one sentence and suggests a correction for a
    misspelt word."""

    #: The arguments that are being parsed, for error messages.
    _words: Sequence[str] = ()

    def parse_known_args(  # type: ignore[override]  # covers all of argparse's overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Reject unknown options here, where the options of the subcommand are known; the parent
        parser does not know them."""
        self._words = sys.argv[1:] if args is None else list(args)
        parsed, unknown = super().parse_known_args(args, namespace)
        for word in takewhile(lambda word: word != _NO_MORE_OPTIONS, unknown):
            if _is_option(word):
                self.error(f"there is no option {word.partition('=')[0]!r}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        message = self._find_misspelt_option() or message
        self.exit(MISUSED, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write help and version to stdout without argparse's error suppression, so that `main`
        sees a closed pipe."""
        if file is not sys.stdout:
            super()._print_message(message, file)
            return
        file.write(message)
        file.flush()

    def _find_misspelt_option(self) -> str | None:
        """Return an error about the first misspelt option, or None. Checked first, because
        argparse would only report a required option as missing."""
        options = [name for name in self._option_string_actions if name.startswith("--")]
        for word in self._words:
            is_command = self._subparsers is not None and not word.startswith("-")
            if is_command or word == _NO_MORE_OPTIONS:
                return None  # the remaining words belong to a subcommand, or are positional
            name = word.partition("=")[0]
            if _is_option(word) and name not in options and (near := suggest(name, options)):
                return f"there is no option {name!r}{near}"
        return None

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Raise ArgumentError for an unknown command or choice. Suggest a similar one if there is
        one; otherwise argparse lists all choices."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            raise argparse.ArgumentError(
                None, f"there is no command {value!r}{suggest(str(value), action.choices)}"
            )
        choices = [str(each) for each in action.choices or ()]
        if choices and value not in choices and (near := suggest(str(value), choices)):
            raise argparse.ArgumentError(action, f"{value!r} is not a valid choice{near}")
        super()._check_value(action, value)


def _is_option(word: str) -> bool:
    """Return whether argparse takes the word for an option; a text with spaces is a value."""
    return word.startswith("--") and " " not in word


class _HelpFormatter(argparse.HelpFormatter):
    """A help formatter that includes the indent when it computes the width of the column of
    command names."""

    def add_argument(self, action: argparse.Action) -> None:
        """Widen the column for each command name and its indent."""
        super().add_argument(action)
        for command in self._iter_indented_subactions(action):
            length = len(self._format_action_invocation(command)) + self._current_indent
            self._action_max_length = max(self._action_max_length, length)


def _describe_os_error(error: OSError) -> object:
    """Return the operating system's error text with the file name and without the error number."""
    if error.strerror is None:
        return error
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


def _print_error(error: object, exit_code: int) -> int:
    print(f"quackmq: {error}", file=sys.stderr)
    return exit_code
