"""`quackmq experiment`: a broker, publishers and subscribers, all at once, and whether it adds up.

Starts a broker in this process and so many publishers and subscribers in processes of their own,
joined to it by pipes; prints the connection records; lets them work; ends them by the protocol, and
reports. Exit codes: 0 for every live subscriber published = delivered + skipped, 1 it is not so and
what is not is named, 2 it was told nonsense.

What an experiment is stands in `experiment_plan`, how it is carried out in `experiment_run`; both
are loaded only when there is one.
"""

from __future__ import annotations

import argparse
import asyncio
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
#: More of them take more descriptors than many systems give to a process that does not ask.
_MANY_PEERS: Final = 100


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "experiment",
        help="a broker with publishers and subscribers, and whether it adds up",
        description="Run a broker with publishers and subscribers in processes of their own, "
        "joined to it by pipes, and see what comes of it. Exit codes: 0 for every live subscriber "
        "published = delivered + skipped, 1 it is not so, 2 it was told nonsense.",
        allow_abbrev=False,
    )
    who = parser.add_argument_group("who takes part")
    _whole(who, "--pubs", None, "publishers; default 1")
    _whole(who, "--subs", None, "subscribers; default 1")
    _whole(who, "--topics", None, "topics, of interest to everybody; default 1")
    _whole(who, "--slow-pubs", 0, "so many publishers publish at a tenth of the rate")
    _whole(who, "--slow-subs", 0, "so many subscribers take --slow-ms for each answer")
    _whole(who, "--silent-subs", 0, "so many stop answering, and are declared dead")
    _whole(who, "--dying-subs", 0, "so many vanish with an entry in hand")
    _whole(who, "--late-subs", 0, "so many subscribe, go, and are back when all was published")

    how = parser.add_argument_group("how it goes")
    how.add_argument(
        "--rate",
        metavar="N",
        type=_amount,
        default=100.0,
        help="entries a second of each publisher; 0: as fast as it goes; default 100",
    )
    how.add_argument(
        "--seconds",
        metavar="S",
        type=_amount,
        default=3.0,
        help="publish for so long; default 3",
    )
    how.add_argument(
        "--entries", metavar="N", type=_at_least(1), help="of each publisher at the most"
    )
    _whole(how, "--bytes", 100, "of an entry")
    _whole(how, "--max-entries", 1_000, "live entries of a topic (MAXENTRIES); 0: no bound")
    _whole(how, "--delta-ms", 1_000, "an entry is live for so long (δ); 0: for ever")
    _whole(how, "--slow-ms", 20, "what slow subscribers take to answer")
    _whole(how, "--answer-ms", 2_000, "after so long without an answer a subscriber is dead")
    how.add_argument(
        "--sync",
        choices=("always", "interval", "os"),
        default="always",
        help="when entries reach the disk, as with serve; default always",
    )
    how.add_argument(
        "--data",
        metavar="DIR",
        type=Path,
        help="keep the broker's data here, in a new directory; default: a temporary one",
    )

    what = parser.add_argument_group("what is told")
    what.add_argument(
        "--suite",
        action="store_true",
        help="all experiments: 1/1/1, 1/m/1, n/1/1, the same with 2 topics, n/m/t, and every "
        "boundary case; n, m and t are --pubs, --subs and --topics, 3 unless given",
    )
    what.add_argument("--json", action="store_true", help="one JSON object")
    what.add_argument(
        "--plot", metavar="FILE.png", type=Path, help="draw queue depth and latency over time"
    )


def run(args: argparse.Namespace) -> int:
    from quackmq.cli.experiment import plan as experiment_plan

    experiments = [_experiment(args)]
    if args.suite:
        experiments = experiment_plan.suite(experiments[0])
    if args.data is not None and args.data.exists() and any(args.data.iterdir()):
        raise InvalidRequest(f"{args.data} is not empty: an experiment begins with nothing")
    if args.plot is not None:
        from quackmq.cli.experiment import plot as experiment_plot

        experiment_plot.check(args.plot)
    if max(each.pubs + each.subs for each in experiments) > _MANY_PEERS:
        process.prepare()
    with asyncio.Runner(loop_factory=process.loop_factory()) as runner:
        outcomes = runner.run(_run_all(args, experiments))
    _print(args, outcomes)
    if args.plot is not None:
        experiment_plot.draw(outcomes, args.plot)
    if any(outcome.problems() for outcome in outcomes):
        return WRONG
    return INTERRUPTED if any(outcome.was_interrupted for outcome in outcomes) else GOOD


async def _run_all(args: argparse.Namespace, experiments: Sequence[Experiment]) -> list[Outcome]:
    """One after the other; a signal ends the one that runs, and there is no next."""
    from quackmq.cli.experiment import runner as experiment_run
    from quackmq.cli.experiment.progress import Watcher

    outcomes: list[Outcome] = []
    with (
        experiment_run.stopped_by_signals() as stopping,
        temporary_directory("quackmq-experiment-") as temporary,
        Watcher(experiments, sys.stderr, prints_records=not (args.json or args.suite)) as watcher,
    ):
        root = temporary if args.data is None else args.data
        for number, experiment in enumerate(experiments, start=1):
            directory = root / str(number) if len(experiments) > 1 or args.data is None else root
            outcomes.append(
                await experiment_run.run(experiment, directory, watcher, args.sync, stopping)
            )
            watcher.done(outcomes[-1])
            if stopping.is_set():
                break
    return outcomes


def _print(args: argparse.Namespace, outcomes: Sequence[Outcome]) -> None:
    import orjson

    from quackmq.cli.experiment import report as experiment_report

    if args.json:
        told = [experiment_report.as_json(outcome) for outcome in outcomes]
        is_good = all(each["is_good"] for each in told)
        whole = {"experiments": told, "is_good": is_good} if args.suite else told[0]
        sys.stdout.write(orjson.dumps(whole).decode() + "\n")
    elif args.suite:
        sys.stdout.write(experiment_report.as_table(outcomes))
    else:
        sys.stdout.write(experiment_report.as_text(outcomes[0]))


def _experiment(args: argparse.Namespace) -> Experiment:
    from quackmq.cli.experiment.plan import Experiment

    least = 3 if args.suite else 1
    return Experiment(
        pubs=least if args.pubs is None else args.pubs,
        subs=least if args.subs is None else args.subs,
        topics=least if args.topics is None else args.topics,
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
    )


def _whole(group: argparse._ArgumentGroup, option: str, default: int | None, what: str) -> None:
    """An option that takes a whole number; None: what the default is, stands elsewhere."""
    told = "" if not default else f"; default {default}"
    group.add_argument(option, metavar="N", type=_at_least(0), default=default, help=what + told)


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    return parse


def _amount(text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = -1.0
    if not 0 <= amount < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return amount
