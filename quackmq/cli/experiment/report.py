"""The result of an experiment: the counts, the checks, and their presentation. Pure.

Counts come from two independent sides. Publishers and subscribers report what the broker has
accepted and delivered. The broker reports what its topics hold and what subscriptions have skipped.
For every live subscriber, published = delivered + skipped as old must hold, and the entries of a
publisher and topic must come in order, unless the newest come first; each violation is a
sentence in `problems`. Programs of the user do not report, so the broker's counts stand for theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from signal import strsignal
from typing import Any, Final, NamedTuple

from quackmq.cli.experiment.latency import add_up, percentile_ms
from quackmq.cli.experiment.peer import Behaviour, Report
from quackmq.cli.experiment.plan import Experiment
from quackmq.cli.text import pluralize, table

#: Behaviours that end before the experiment does.
MORTAL: Final = (Behaviour.SILENT, Behaviour.DYING)
_PERCENTILES: Final = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "max_ms": 1.0}


class Sample(NamedTuple):
    """A measurement: the live entries over all topics, and the backlog of the live subscriber
    that is furthest behind."""

    seconds: float
    live: int
    waiting: int


class ProgramResult(NamedTuple):
    """What became of a program of the user. The counts are the broker's: `entries` were accepted
    from a publisher, or acknowledged by a subscriber."""

    command: str
    entries: int
    retries: int
    #: Whether it has chosen its topics.
    has_begun: bool
    #: Whether the connection ended by `terminate`, of either side.
    has_terminated: bool
    #: Whether it ended the connection before the broker did.
    left_early: bool
    #: None if it is still running; negative: the number of the signal that ended it.
    exit_code: int | None
    #: If it did not exit in time at the end: the time that it had. It was killed then.
    killed_after_ms: int | None = None
    #: Messages that the broker rejected after the program had chosen its topics, and the last
    #: reason.
    rejections: int = 0
    last_rejection: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherAccount:
    id: str
    behaviour: Behaviour
    topics: Sequence[str] = ("1",)
    #: None if the process ended without a report, as programs of the user do.
    report: Report | None
    program: ProgramResult | None = None
    end: str

    @property
    def published(self) -> int:
        if self.program is not None:
            return self.program.entries
        return sum(self.report.entries.values()) if self.report is not None else 0

    @property
    def retried(self) -> int:
        if self.program is not None:
            return self.program.retries
        return self.report.retried if self.report is not None else 0

    @property
    def rejected(self) -> int:
        if self.program is not None:
            return self.program.rejections
        return self.report.rejected if self.report is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberAccount:
    id: str
    behaviour: Behaviour
    topics: Sequence[str] = ("1",)
    report: Report | None
    program: ProgramResult | None = None
    end: str
    #: Whether it was silent for too long, or disconnected without `terminate`.
    has_died: bool = False
    #: From the broker: entries of its topics since it subscribed, and what happened to them.
    published: int
    skipped: int
    lost: int
    left: int

    @property
    def delivered(self) -> int:
        if self.program is not None:
            return self.program.entries
        return sum(self.report.entries.values()) if self.report is not None else 0

    @property
    def doubled(self) -> int:
        return 0 if self.report is None else self.report.doubled

    @property
    def reordered(self) -> int:
        return 0 if self.report is None else self.report.reordered

    @property
    def should_die(self) -> bool:
        return self.behaviour in MORTAL

    @property
    def is_live(self) -> bool:
        return not self.should_die and not self.has_died


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveResult:
    """The result of comparing the archive with the accounts. `entries` and `files` are what the
    archive has; `archived_early` of the entries were archived before the end of the experiment."""

    entries: int
    files: int
    archived_early: int
    problems: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    experiment: Experiment
    #: The connection records after all peers had connected.
    records: Sequence[str]
    publishers: Sequence[PublisherAccount]
    subscribers: Sequence[SubscriberAccount]
    #: The number of entries in each topic, from the broker.
    held: Mapping[str, int]
    samples: Sequence[Sample] = ()
    was_interrupted: bool = False
    #: None until the archive was compared with these accounts.
    archive: ArchiveResult | None = None

    # --- sums ---

    @property
    def published(self) -> int:
        return sum(self.held.values())

    @property
    def retried(self) -> int:
        return sum(each.retried for each in self.publishers)

    @property
    def delivered(self) -> int:
        return sum(each.delivered for each in self.subscribers)

    @property
    def skipped(self) -> int:
        return sum(each.skipped for each in self.subscribers)

    @property
    def dead(self) -> int:
        return sum(not each.is_live for each in self.subscribers)

    @property
    def buckets(self) -> Mapping[int, int]:
        """The latency histogram over all subscribers."""
        return add_up(counts for counts in self.slices().values())

    def slices(self) -> dict[int, Mapping[int, int]]:
        """Return the latency histogram of each slice of time, over all subscribers, in order of
        time."""
        reports = [each.report for each in self.subscribers if each.report is not None]
        found = sorted({number for report in reports for number in report.latencies})
        return {
            number: add_up(report.latencies.get(number, {}) for report in reports)
            for number in found
        }

    def latencies(self) -> dict[str, float | None]:
        buckets = self.buckets
        return {name: percentile_ms(buckets, share) for name, share in _PERCENTILES.items()}

    # --- checks ---

    def problems(self) -> list[str]:
        """Return one sentence for each violated check."""
        return [
            *self._problems_of_publishers(),
            *(problem for each in self.subscribers for problem in self._problems_of(each)),
            *(self.archive.problems if self.archive is not None else ()),
        ]

    def _problems_of_publishers(self) -> Iterable[str]:
        """Yield a sentence for each publisher that failed, and one if the topics hold another
        number of entries than the publishers counted as accepted."""
        for each in self.publishers:
            if each.program is not None:
                yield from self._problems_of_program(f"publisher {each.id}", each.program, each.end)
                if each.rejected and not each.published:
                    yield f"publisher {each.id} published nothing: {_rejection_words(each.program)}"
            elif each.report is None or not each.report.terminated:
                yield f"publisher {each.id} did not terminate cleanly: {each.end}"
            elif each.report.rejected:
                yield f"publisher {each.id}: {each.report.rejected} entries were rejected"
        accepted = sum(each.published for each in self.publishers)
        if accepted != self.published:
            yield f"the broker accepted {accepted} entries, but the topics hold {self.published}"

    def _problems_of(self, account: SubscriberAccount) -> Iterable[str]:
        """Yield a sentence for each violated check of one subscriber. A silent or dying subscriber
        is only checked for having ended as planned: its counts may differ, because it left entries
        unanswered."""
        if account.should_die:
            if account.report is not None and account.report.terminated:
                yield f"subscriber {account.id} should have been {account.behaviour}: {account.end}"
            return
        name, program = f"subscriber {account.id}", account.program
        if program is not None:
            yield from self._problems_of_program(name, program, account.end)
        elif account.report is None or not account.report.terminated:
            yield f"{name} did not terminate cleanly: {account.end}"
        if account.report is not None:
            for topic in account.report.entries.keys() - {*account.topics}:
                yield f"{name} received entries of topic {topic}, which it has not chosen"
        # Entries may be left only by an interrupted experiment, or by a program that leaves early.
        may_leave = self.was_interrupted or (program is not None and program.left_early)
        left = account.left if may_leave else 0
        if account.published != account.delivered + account.skipped + left:
            waits = f" and {account.left} left" if account.left else ""
            yield (
                f"{name}: {account.published} entries were published, "
                f"{account.delivered} delivered, {account.skipped} skipped{waits}"
            )
        if account.lost:
            yield f"{name}: {account.lost} entries were lost"
        if account.reordered and self.experiment.reading == "live":
            yield f"{name}: {account.reordered} entries came out of order"

    def _problems_of_program(self, name: str, program: ProgramResult, end: str) -> Iterable[str]:
        """Yield a sentence if a program of the user has not ended as it should: by `terminate`,
        with exit code 0, and in time. An interrupted experiment does not wait for programs that
        have not chosen their topics."""
        name = f"{name} ({program.command!r})"
        if self.was_interrupted and not program.has_begun:
            return
        if program.killed_after_ms is not None:
            yield (
                f"{name} did not exit within {program.killed_after_ms} ms after the end of its "
                "connection, and was killed: a program exits when it reads `terminate`, or the end "
                "of its input"
            )
        elif not program.has_terminated:
            yield f"{name} did not terminate cleanly: {end}; it {describe_exit(program)}"
        elif program.exit_code:
            yield f"{name} {describe_exit(program)}"


def describe_exit(program: ProgramResult) -> str:
    """Return in words how the process of a program has ended."""
    if program.killed_after_ms is not None:
        return "was killed"
    code = program.exit_code
    if code is None:
        return "is still running"
    if code >= 0:
        return f"exited with code {code}"
    return f"was ended by signal {-code} ({strsignal(-code)})"


# --- presentation ------------------------------------------------------------------------


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the counts, the accounts of all peers and the problems of one experiment, for
    `--json`."""
    experiment, problems = outcome.experiment, outcome.problems()
    return {
        "title": experiment.title,
        "shape": experiment.shape,
        "pubs": experiment.all_pubs,
        "subs": experiment.all_subs,
        "topics": experiment.topics,
        "published": outcome.published,
        "retried": outcome.retried,
        "delivered": outcome.delivered,
        "skipped": outcome.skipped,
        "dead": outcome.dead,
        "latency": outcome.latencies(),
        "connections": list(outcome.records),
        "publishers": [
            {
                "id": each.id,
                "behaviour": each.behaviour,
                "topics": list(each.topics),
                "published": each.published,
                "retried": each.retried,
                "rejected": each.rejected,
                "end": each.end,
                **_rejection_as_json(each.program),
                **_program_as_json(each.program),
            }
            for each in outcome.publishers
        ],
        "subscribers": [
            {
                "id": each.id,
                "behaviour": each.behaviour,
                "topics": list(each.topics),
                "is_live": each.is_live,
                "published": each.published,
                "delivered": each.delivered,
                "skipped": each.skipped,
                "left": each.left,
                "doubled": each.doubled,
                "reordered": each.reordered,
                "end": each.end,
                **_program_as_json(each.program),
            }
            for each in outcome.subscribers
        ],
        "archive": _archive_as_json(outcome.archive),
        "problems": problems,
        "is_good": not problems,
    }


def _archive_as_json(archive: ArchiveResult | None) -> dict[str, Any] | None:
    if archive is None:
        return None
    return {
        "entries": archive.entries,
        "files": archive.files,
        "archived_early": archive.archived_early,
        "is_complete": not archive.problems,
        "problems": list(archive.problems),
    }


def _program_as_json(program: ProgramResult | None) -> dict[str, Any]:
    """Return the fields that only the account of a program has."""
    if program is None:
        return {}
    return {
        "command": program.command,
        "exit_code": program.exit_code,
        "was_killed": program.killed_after_ms is not None,
    }


def _rejection_as_json(program: ProgramResult | None) -> dict[str, Any]:
    """Return the field that only the account of a program with rejected messages has."""
    if program is None or not program.rejections:
        return {}
    return {"last_rejection": program.last_rejection}


def as_text(outcome: Outcome) -> str:
    """Format one experiment in full."""
    lines = ["", *_publisher_table(outcome), "", *_subscriber_table(outcome), ""]
    lines += [
        f"{outcome.published} published, "
        f"{outcome.retried} retried, {outcome.delivered} delivered, {outcome.skipped} skipped as "
        f"old, {pluralize(outcome.dead, 'dead subscriber')}",
        f"latency: {_latency_words(outcome)}",
        *_describe_rejections(outcome),
        *_archive_words(outcome),
        format_verdict([outcome]),
    ]
    return "\n".join(lines) + "\n"


def as_table(outcomes: Sequence[Outcome]) -> str:
    """Format several experiments, one line each."""
    numbers_head = ["published", "retried", "delivered", "skipped", "dead", "archived"]
    head = ["experiment", "shape", *numbers_head]
    rows: list[Sequence[str]] = [[*head, "p50 ms", "p99 ms", ""]]
    for outcome in outcomes:
        latency = outcome.latencies()
        numbers = (
            outcome.published,
            outcome.retried,
            outcome.delivered,
            outcome.skipped,
            outcome.dead,
            0 if outcome.archive is None else outcome.archive.entries,
        )
        rows.append(
            [
                outcome.experiment.title,
                outcome.experiment.shape,
                *map(str, numbers),
                _format_ms(latency["p50_ms"]),
                _format_ms(latency["p99_ms"]),
                "WRONG" if outcome.problems() else "ok",
            ]
        )
    lines = [*table(rows, right_aligned=range(2, 10))]
    archives = [outcome.archive for outcome in outcomes]
    if all(archive is not None and not archive.problems for archive in archives):
        lines.append("in every experiment: the archive holds every entry of every topic")
    return "\n".join([*lines, format_verdict(outcomes)]) + "\n"


def format_verdict(outcomes: Sequence[Outcome]) -> str:
    """Return the last lines: the problems, or that there are none."""
    wrong = [
        f"WRONG{where}: {problem}"
        for outcome in outcomes
        for where in [f" in {outcome.experiment.title!r}" if outcome.experiment.title else ""]
        for problem in outcome.problems()
    ]
    if wrong:
        return "\n".join(wrong)
    may_leave = any(
        outcome.was_interrupted or any(each.left for each in outcome.subscribers if each.is_live)
        for outcome in outcomes
    )
    more = " + left" if may_leave else ""
    return f"for every live subscriber: published = delivered + skipped{more}"


def _publisher_table(outcome: Outcome) -> Iterable[str]:
    """Return the lines of a table with one row for each publisher. It has the column `rejected`
    only if the broker rejected something."""
    has_rejected = any(each.rejected for each in outcome.publishers)
    numbers_head = ["published", "retried", *["rejected"] * has_rejected]
    rows: list[Sequence[str]] = [["publisher", "", *numbers_head, "end"]]
    for each in outcome.publishers:
        numbers = [each.published, each.retried, *[each.rejected] * has_rejected]
        end = _end_words(each.end, each.program)
        rows.append([each.id, each.behaviour, *map(str, numbers), end])
    return table(rows, right_aligned=range(2, 2 + len(numbers_head)))


def _subscriber_table(outcome: Outcome) -> Iterable[str]:
    """Return the lines of a table with one row for each subscriber."""
    head = ["subscriber", "", "published", "delivered", "skipped", "left", "doubled"]
    rows: list[Sequence[str]] = [[*head, "p50 ms", "p99 ms", "end"]]
    for each in outcome.subscribers:
        buckets = add_up(each.report.latencies.values()) if each.report is not None else {}
        numbers = (each.published, each.delivered, each.skipped, each.left, each.doubled)
        percentiles = [_format_ms(percentile_ms(buckets, share)) for share in (0.5, 0.99)]
        end = _end_words(each.end, each.program)
        rows.append([each.id, each.behaviour, *map(str, numbers), *percentiles, end])
    return table(rows, right_aligned=range(2, 9))


def _end_words(end: str, program: ProgramResult | None) -> str:
    """Return how a connection has ended and, for a program of the user, how its process has."""
    return end if program is None else f"{end}; {describe_exit(program)}"


def _latency_words(outcome: Outcome) -> str:
    """Return the percentiles of the latency over all subscribers in words."""
    found = outcome.latencies()
    if found["p50_ms"] is None:
        return "unknown for programs" if outcome.delivered else "nothing was delivered"
    names = {"p50_ms": "half within", "p90_ms": "90 %", "p99_ms": "99 %", "max_ms": "all"}
    return ", ".join(f"{word} {_format_ms(found[name])} ms" for name, word in names.items())


def _describe_rejections(outcome: Outcome) -> Iterable[str]:
    """Yield a sentence for each program that has published, and has also had messages rejected. If
    a program has published nothing, `problems` names the rejections."""
    for each in outcome.publishers:
        if each.program is not None and each.rejected and each.published:
            yield f"publisher {each.id}: {_rejection_words(each.program)}"


def _rejection_words(program: ProgramResult) -> str:
    """Return how many messages of a program the broker rejected, and the last reason."""
    messages = pluralize(program.rejections, "message")
    return f"the broker rejected {messages}; the last reason: {program.last_rejection}"


def _archive_words(outcome: Outcome) -> Iterable[str]:
    """Yield a sentence about the archive, if it was compared with the accounts."""
    archive = outcome.archive
    if archive is not None:
        yield (
            f"archive: {'INCOMPLETE' if archive.problems else 'complete'}, "
            f"{archive.entries} entries in {pluralize(archive.files, 'file')}, "
            f"{archive.archived_early} of them archived before the end"
        )


def _format_ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"
