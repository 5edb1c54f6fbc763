"""`quackmq pipeline`: list the pipelines that come with the broker, and run one on Spark.

Each pipeline has options of its own (`quackmq pipeline run NAME --help`). Progress goes to stderr,
and the report goes to stdout as a table or as one JSON object. Exit codes: 0 success, 1 the report
names problems, or the pipeline failed, 2 invalid arguments, 128 + the number of the signal that
stopped a batch job early. Stopping a stream is its normal end.

PySpark is imported only to run or explain a pipeline.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import orjson

from quackmq.cli import limits
from quackmq.cli.broker.settings import suggest
from quackmq.cli.text import format_bytes, table
from quackmq.errors import InvalidRequest, QuackError
from quackmq.spark.pipelines import Pipeline, pipeline, summaries
from quackmq.spark.pipelines.errors import Stopped, shorten_error
from quackmq.spark.pipelines.job import DEFAULT_ADDRESS, DEFAULT_MASTER, Job
from quackmq.spark.pipelines.options import add_options, options_of
from quackmq.spark.pipelines.report import Report, import_figure, moment

GOOD: Final = 0
BAD: Final = 1
SIGNALLED: Final = 128
_PICTURES: Final = (".png", ".svg", ".pdf")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "pipeline",
        help="list and run Spark pipelines",
        description="Pipelines on Spark that come with the broker.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("ls", help="list the pipelines", allow_abbrev=False)
    running = actions.add_parser(
        "run",
        help="run a pipeline",
        description="Run a pipeline. `quackmq pipeline run NAME --help` lists its options.",
        usage="quackmq pipeline run NAME [OPTION …]",
        allow_abbrev=False,
    )
    running.add_argument("name", metavar="NAME", help="a pipeline of `quackmq pipeline ls`")
    options = running.add_argument(
        "arguments", metavar="OPTION", nargs=argparse.REMAINDER, help="options of the pipeline"
    )
    # Otherwise the error about a missing name says that options are missing, too.
    options.required = False


def run(args: argparse.Namespace) -> int:
    """List the pipelines or run one; return the exit code. Raises InvalidRequest for an unknown
    pipeline or option."""
    if args.action == "ls":
        return _print_pipelines()
    try:
        module = pipeline(args.name)
    except KeyError:
        raise InvalidRequest(
            f"there is no pipeline {args.name!r}{suggest(args.name, summaries())}"
        ) from None
    parsed = _parse_options(args.name, module, args.arguments)
    if parsed.plot is not None:
        import_figure()  # fail now rather than after the run if it is not installed
    return _run(args.name, module, parsed)


def _print_pipelines() -> int:
    for line in table([[name, summary] for name, summary in summaries().items()]):
        print(line)
    return GOOD


def _run(name: str, module: Pipeline, parsed: argparse.Namespace) -> int:
    """Run one pipeline on Spark and print its report; return the exit code. An error of Spark is
    shortened to one sentence."""
    options = options_of(parsed, module.Options)
    job = Job(
        parsed.broker,
        master=parsed.master,
        configs=dict(parsed.conf or ()),
        log_level=parsed.spark_log.upper(),
        once=parsed.once,
        checkpoint=parsed.checkpoint,
    )
    with job:
        try:
            report = module.run(job, options)
        except Exception as error:
            # A signal stops Spark, and the pipeline then fails with some error. The signal is the
            # cause.
            if job.signal is not None:
                _print_error(name, Stopped("stopped before it was finished"))
                return SIGNALLED + job.signal
            if isinstance(error, QuackError | OSError) or not _is_spark_error(error):
                raise
            raise shorten_error(error) from error
    if parsed.plot is not None:
        _draw(report, name, parsed.plot)
    _print_json(report) if parsed.json else _print_report(report)
    return GOOD if report.is_good else BAD


def _is_spark_error(error: Exception) -> bool:
    """Return whether Spark raised the error. Other errors are bugs and keep their traceback."""
    return type(error).__module__.partition(".")[0] in ("pyspark", "py4j")


# --- options -------------------------------------------------------------------------------------


def _parse_options(name: str, module: Pipeline, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of one pipeline: its own, and those that every pipeline has. Raises
    InvalidRequest."""
    parser = _Parser(
        prog=f"quackmq pipeline run {name}", description=module.SUMMARY, allow_abbrev=False
    )
    add_options(parser, module.Options)
    common = parser.add_argument_group("options of every pipeline")
    common.add_argument(
        "--broker",
        metavar="HOST:PORT",
        default=DEFAULT_ADDRESS,
        help=f"the Kafka address of the broker (default {DEFAULT_ADDRESS})",
    )
    common.add_argument(
        "--master",
        metavar="URL",
        default=DEFAULT_MASTER,
        help=f"where Spark runs: local[N], spark://HOST:PORT, yarn, k8s://… "
        f"(default {DEFAULT_MASTER})",
    )
    common.add_argument(
        "--conf",
        metavar="NAME=VALUE",
        action="append",
        type=_parse_spark_setting,
        help="a Spark setting; may be repeated",
    )
    common.add_argument(
        "--once", action="store_true", help="for a stream: process the existing records, then stop"
    )
    common.add_argument(
        "--checkpoint",
        metavar="DIR",
        type=Path,
        help="where Spark stores the progress; a later run with it continues",
    )
    common.add_argument("--json", action="store_true", help="print the report as one JSON object")
    common.add_argument(
        "--plot", metavar="FILE.png", type=_parse_picture, help="also draw the report"
    )
    common.add_argument(
        "--spark-log",
        metavar="LEVEL",
        choices=("off", "error", "warn", "info"),
        default="off",
        help="Spark's log level on stderr: off, error, warn or info (default off)",
    )
    return parser.parse_checked(arguments)


class _Parser(argparse.ArgumentParser):
    """An argparse parser that suggests a correction for a misspelt option and reports an error
    as one sentence."""

    def parse_checked(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments. Raises InvalidRequest for an unknown option or argument."""
        # Check the spelling first, because argparse would only report a required option as missing.
        known_options = [name for name in self._option_string_actions if name.startswith("--")]
        for word in (each.partition("=")[0] for each in arguments):
            if (
                word.startswith("--")
                and word not in known_options
                and (near := suggest(word, known_options))
            ):
                self.error(f"there is no option {word!r}{near}")
        parsed, unknown = self.parse_known_args(arguments)
        if unknown:
            kind = "option" if unknown[0].startswith("-") else "argument"
            self.error(f"there is no {kind} {unknown[0]!r}")
        return parsed

    def error(self, message: str) -> NoReturn:
        raise InvalidRequest(f"{message} (see {self.prog} --help)")


def _parse_spark_setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.startswith("spark."):
        raise argparse.ArgumentTypeError(f"{text!r} is not spark.NAME=VALUE")
    return name, value


def _parse_picture(text: str) -> Path:
    """Parse the name of a picture file in an existing directory, as an argparse type, before the
    pipeline runs."""
    file = Path(text)
    if file.suffix not in _PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r} does not end in {', '.join(_PICTURES)}")
    if not file.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{str(file.parent)!r} is not a directory")
    return file


# --- the report ----------------------------------------------------------------------------------


def _print_json(report: Report) -> None:
    sys.stdout.write(orjson.dumps(report.as_json(), option=orjson.OPT_INDENT_2).decode() + "\n")


def _print_report(report: Report) -> None:
    """Print the report as text: its title, the first rows as a table, and its facts."""
    print(report.title)
    rows = [
        [_format_cell(value) for value in row] for row in report.rows[: limits.PIPELINE_SHOWN_ROWS]
    ]
    # Align a column to the right if all its values are numbers, also in rows that are not shown.
    numbers = {
        index
        for index in range(len(report.columns))
        if all(isinstance(row[index], int | float | None) for row in report.rows)
    }
    if rows:
        print()
        for line in table([list(report.columns), *rows], right_aligned=numbers):
            print(line)
    if hidden_rows := len(report.rows) - len(rows):
        print(f"… and {hidden_rows} more rows: --json prints all")
    if report.facts:
        print()
        for line in table([[name, _format_cell(value)] for name, value in report.facts.items()]):
            print(line)


def _format_cell(value: Any) -> str:
    """Return a value of a report as text: numbers with thousands separators, and data from peers
    with control characters escaped."""
    match value:
        case None:
            return "-"
        # Before int: a bool is an int, too.
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.3f}"
        case datetime():
            return moment(value)
        case bytes():
            return format_bytes(value)
        case str():
            # Values from a topic may contain control characters.
            return value if value.isprintable() else repr(value)
        case list() | tuple():
            return ", ".join(map(_format_cell, value)) or "-"
    return str(value)


def _draw(report: Report, name: str, file: Path) -> None:
    if report.plot is None:
        print(f"quackmq: {name} has no plot", file=sys.stderr)
        return
    report.save_plot(file)


def _print_error(name: str, error: QuackError) -> None:
    print(f"quackmq: {name}: {error}", file=sys.stderr)
