"""`quackmq experiment`: run a broker with publishers and subscribers, and check that no entry is
lost.

The broker runs in this process; each publisher and subscriber is a process connected to it by
pipes. The command prints the connection records, lets the peers work, ends them by the protocol,
compares the archive with the counts, and reports. Exit codes: 0 if published = delivered + skipped
for every live subscriber and the archive holds every entry, 1 if not (the report says where), 2
invalid arguments, 130 interrupted.

`plan` defines an experiment and `runner` performs it; both are imported only when needed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from quackmq.cli.broker import process
from quackmq.cli.experiment.temporary import temporary_directory
from quackmq.errors import InvalidRequest

if TYPE_CHECKING:
    from quackmq.cli.experiment.plan import Experiment
    from quackmq.cli.experiment.report import Outcome

GOOD: Final = 0
WRONG: Final = 1
INTERRUPTED: Final = 130
#: With more peers, the limit of open files must be raised.
_MANY_PEERS: Final = 100


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "experiment",
        help="run a broker with publishers and subscribers, and check the counts",
        description="Run a broker with publishers and subscribers in separate processes, "
        "connected by pipes, and check the counts and the archive. Exit codes: 0 if published = "
        "delivered + skipped for every live subscriber and the archive holds every entry, 1 if "
        "not, 2 invalid arguments, 130 interrupted.",
        allow_abbrev=False,
    )
    peers = parser.add_argument_group("participants")
    _add_number_option(peers, "--pubs", None, "publishers; default 1, or 0 with --pub-command")
    _add_number_option(peers, "--subs", None, "subscribers; default 1, or 0 with --sub-command")
    _add_number_option(
        peers, "--topics", None, "topics; default 1, or the highest that is assigned to a peer"
    )
    for role, peer in (("pub", "publishers p1, p2, ..."), ("sub", "subscribers s1, s2, ...")):
        peers.add_argument(
            f"--{role}-topics",
            metavar=f"{role[0].upper()}=K,K",
            action="append",
            default=[],
            help=f"the topics of one or more of the {peer}, as in {role[0]}1=1,2 or "
            f"{role[0]}1,{role[0]}2=3; may be repeated; default: all topics",
        )
    for role, peer in (("pub", "publisher"), ("sub", "subscriber")):
        peers.add_argument(
            f"--{role}-command",
            dest=f"{role}_commands",
            metavar="'PROGRAM ARGS'",
            action="append",
            default=[],
            help=f"a program of yours as a {peer}: it speaks the line protocol on its stdin and "
            "stdout; may be repeated",
        )
    _add_number_option(
        peers, "--slow-pubs", 0, "number of publishers that publish at a tenth of the rate"
    )
    _add_number_option(
        peers, "--slow-subs", 0, "number of subscribers that take --slow-ms for each answer"
    )
    _add_number_option(
        peers,
        "--silent-subs",
        0,
        "number of subscribers that stop answering, and are declared dead",
    )
    _add_number_option(
        peers, "--dying-subs", 0, "number of subscribers that exit before answering an entry"
    )
    _add_number_option(
        peers,
        "--late-subs",
        0,
        "number of subscribers that subscribe, leave, and return after the last publish",
    )
    behaviour = parser.add_argument_group("behaviour")
    behaviour.add_argument(
        "--rate",
        metavar="N",
        type=_parse_amount,
        default=100.0,
        help="entries per second of each publisher; 0: as fast as possible; default 100",
    )
    behaviour.add_argument(
        "--seconds",
        metavar="S",
        type=_parse_amount,
        default=3.0,
        help="duration of publishing in seconds; default 3",
    )
    behaviour.add_argument(
        "--entries", metavar="N", type=_at_least(1), help="largest number of entries per publisher"
    )
    _add_number_option(behaviour, "--bytes", 100, "size of an entry")
    _add_number_option(
        behaviour,
        "--max-entries",
        1_000,
        "largest number of live entries of a topic (MAXENTRIES); 0: no bound",
    )
    _add_number_option(behaviour, "--delta-ms", 1_000, "how long an entry is live (δ); 0: forever")
    _add_number_option(behaviour, "--slow-ms", 20, "answer time of slow subscribers")
    _add_number_option(
        behaviour,
        "--answer-ms",
        2_000,
        "a subscriber that does not answer within this time is dead",
    )
    _add_number_option(
        behaviour,
        "--command-ms",
        10_000,
        "how long a program of --pub-command or --sub-command may take to choose its topics, and "
        "to exit at the end",
    )
    behaviour.add_argument(
        "--line-reading",
        choices=("live", "newest"),
        default="live",
        help="deliver live entries in order, or the newest first, see serve; default live",
    )
    behaviour.add_argument(
        "--sync",
        choices=("always", "interval", "os"),
        default="always",
        help="when entries are synced to disk, see serve; default always",
    )
    behaviour.add_argument(
        "--data",
        metavar="DIR",
        type=Path,
        help="a new directory for the broker's data; default: a temporary one",
    )

    output = parser.add_argument_group("output")
    output.add_argument(
        "--suite",
        action="store_true",
        help="run all experiments: 1/1/1, 1/m/1, n/1/1, the same with 2 topics, n/m/t, and every "
        "boundary case; n, m and t are --pubs, --subs and --topics, default 3",
    )
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument(
        "--plot", metavar="FILE.png", type=Path, help="draw queue depth and latency over time"
    )


def run(args: argparse.Namespace) -> int:
    """Run the experiments and print the results; return the exit code. Raises InvalidRequest for
    parameters that cannot work, before any experiment starts."""
    from quackmq.cli.experiment import plan as experiment_plan

    experiments = [_build_experiment(args)]
    for program in experiments[0].programs():
        if shutil.which(program.arguments[0]) is None:
            raise InvalidRequest(f"{program}: {_explain_missing_program(program.arguments[0])}")
    if args.suite:
        experiments = experiment_plan.suite(experiments[0])
    if args.data is not None and args.data.exists() and any(args.data.iterdir()):
        raise InvalidRequest(f"{args.data} is not empty: an experiment needs an empty directory")
    if args.plot is not None:
        from quackmq.cli.experiment import plot as experiment_plot

        experiment_plot.check(args.plot)
    if max(each.all_pubs + each.all_subs for each in experiments) > _MANY_PEERS:
        process.prepare()
    with asyncio.Runner(loop_factory=process.loop_factory()) as runner:
        outcomes = runner.run(_run_all(args, experiments))
    _print_results(args, outcomes)
    if args.plot is not None:
        experiment_plot.draw(outcomes, args.plot)
    if any(outcome.problems() for outcome in outcomes):
        return WRONG
    return INTERRUPTED if any(outcome.was_interrupted for outcome in outcomes) else GOOD


async def _run_all(args: argparse.Namespace, experiments: Sequence[Experiment]) -> list[Outcome]:
    """Run the experiments one after the other. A signal ends the current one and skips the rest."""
    from quackmq.cli.experiment import runner as experiment_run
    from quackmq.cli.experiment.progress import Watcher

    outcomes: list[Outcome] = []
    with (
        experiment_run.stop_on_signals() as stopping,
        temporary_directory("quackmq-experiment-") as temporary,
        Watcher(experiments, sys.stderr, prints_records=not (args.json or args.suite)) as watcher,
    ):
        root = temporary if args.data is None else args.data
        for number, experiment in enumerate(experiments, start=1):
            # Each experiment needs an empty directory. A single one uses `--data` itself.
            directory = root / str(number) if len(experiments) > 1 or args.data is None else root
            outcomes.append(
                await experiment_run.run(experiment, directory, watcher, args.sync, stopping)
            )
            watcher.done(outcomes[-1])
            if stopping.is_set():
                break
    return outcomes


def _print_results(args: argparse.Namespace, outcomes: Sequence[Outcome]) -> None:
    """Print all reports to stdout: as JSON, as one table for `--suite`, or in full for a single
    experiment."""
    import orjson

    from quackmq.cli.experiment import report as experiment_report

    if args.json:
        reports = [experiment_report.as_json(outcome) for outcome in outcomes]
        is_good = all(each["is_good"] for each in reports)
        whole = {"experiments": reports, "is_good": is_good} if args.suite else reports[0]
        sys.stdout.write(orjson.dumps(whole).decode() + "\n")
    elif args.suite:
        sys.stdout.write(experiment_report.as_table(outcomes))
    else:
        sys.stdout.write(experiment_report.as_text(outcomes[0]))


def _build_experiment(args: argparse.Namespace) -> Experiment:
    """Return the experiment that the options describe. Raises InvalidRequest. For `--rate`,
    `--max-entries` and `--delta-ms`, 0 means no bound, which is None in the plan."""
    from quackmq.cli.experiment.plan import Experiment, highest_topic, parse_topics

    if args.suite:
        _check_options_of_suite(args)
    pub_topics = parse_topics("--pub-topics", args.pub_topics)
    sub_topics = parse_topics("--sub-topics", args.sub_topics)
    # In a suite these are n, m and t, the numbers of its largest experiments.
    pubs, subs, topics = 3, 3, 3
    if not args.suite:
        pubs, subs = int(not args.pub_commands), int(not args.sub_commands)
        topics = highest_topic(pub_topics, sub_topics)
    return Experiment(
        pubs=pubs if args.pubs is None else args.pubs,
        subs=subs if args.subs is None else args.subs,
        topics=topics if args.topics is None else args.topics,
        pub_topics=pub_topics,
        sub_topics=sub_topics,
        pub_commands=args.pub_commands,
        sub_commands=args.sub_commands,
        command_ms=args.command_ms,
        rate=args.rate or None,
        seconds=args.seconds,
        entries=args.entries,
        entry_bytes=args.bytes,
        slow_pubs=args.slow_pubs,
        slow_subs=args.slow_subs,
        silent_subs=args.silent_subs,
        dying_subs=args.dying_subs,
        late_subs=args.late_subs,
        slow_ms=args.slow_ms,
        max_entries=args.max_entries or None,
        delta_ms=args.delta_ms or None,
        answer_ms=args.answer_ms,
        reading=args.line_reading,
    )


def _explain_missing_program(name: str) -> str:
    """Return why no program can be started by this name, and what to write instead."""
    # Unlike those of Path, these functions return False for a name that cannot be a path.
    if os.path.isdir(name):
        return f"{name!r} is a directory: give the path of an executable file"
    is_file = os.path.isfile(name)
    if is_file and "/" in name:
        return f"{name!r} is not executable: run chmod +x on it, or give its interpreter too"
    hint = f"; did you mean ./{name}?" if is_file else ""
    return (
        f"there is no program {name!r}: give the name of a program in PATH, or the path of an "
        f"executable file{hint}"
    )


def _check_options_of_suite(args: argparse.Namespace) -> None:
    """Raise InvalidRequest if an option is given that a suite cannot follow."""
    values = {
        "--pub-topics": args.pub_topics,
        "--sub-topics": args.sub_topics,
        "--pub-command": args.pub_commands,
        "--sub-command": args.sub_commands,
    }
    for option, value in values.items():
        if value:
            raise InvalidRequest(
                f"{option} cannot be used with --suite, which chooses the peers and their topics "
                "itself: use it with a single experiment"
            )


def _add_number_option(
    group: argparse._ArgumentGroup, option: str, default: int | None, text: str
) -> None:
    """Add an option that takes a whole number. With `default` None, the text names the default
    itself. A default of 0 is not mentioned in the help."""
    default_text = "" if not default else f"; default {default}"
    group.add_argument(
        option, metavar="N", type=_at_least(0), default=default, help=text + default_text
    )


def _at_least(least: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers from `least` on."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse


def _parse_amount(text: str) -> float:
    """Parse a finite number of at least 0, as an argparse type. "inf" and "nan" are refused."""
    try:
        amount = float(text)
    except ValueError:
        # Refused by the next check, with the same message.
        amount = -1.0
    if not 0 <= amount < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return amount
