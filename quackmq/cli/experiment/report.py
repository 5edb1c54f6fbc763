"""What came of an experiment: the accounts, whether they are right, and how it is shown. Pure.

The accounts are kept twice, by those who do not know of each other. Publishers and subscribers say
what they were told and what they got; the broker says what its topics hold and what subscriptions
have skipped. For every subscriber that lived, what was published is what it got plus what was
skipped as old; whatever is not so is a sentence in `problems`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from quackmq.cli.experiment.latency import percentile_ms, together
from quackmq.cli.experiment.peer import Behaviour, Report
from quackmq.cli.experiment.plan import Experiment
from quackmq.cli.text import counted, table

#: Those that are not expected to be alive at the end.
MORTAL: Final = (Behaviour.SILENT, Behaviour.DYING)
_SHARES: Final = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "max_ms": 1.0}


class Sample(NamedTuple):
    """At one moment: how many entries are live, over all topics, and how many wait for the living
    subscriber that has most to come."""

    seconds: float
    live: int
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherAccount:
    id: str
    behaviour: Behaviour
    #: None if it was not heard of any more.
    report: Report | None
    end: str

    @property
    def published(self) -> int:
        return sum(self.report.entries.values()) if self.report is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberAccount:
    id: str
    behaviour: Behaviour
    report: Report | None
    end: str
    #: By the broker: what came to its topics since it subscribed, and what became of that.
    published: int
    skipped: int
    lost: int
    left: int

    @property
    def delivered(self) -> int:
        return sum(self.report.entries.values()) if self.report is not None else 0

    @property
    def is_live(self) -> bool:
        return self.behaviour not in MORTAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    experiment: Experiment
    #: As the door tells them, when all had connected.
    records: Sequence[str]
    publishers: Sequence[PublisherAccount]
    subscribers: Sequence[SubscriberAccount]
    #: How many entries each topic holds, by the broker.
    held: Mapping[str, int]
    samples: Sequence[Sample] = ()
    was_interrupted: bool = False

    # --- sums ---

    @property
    def published(self) -> int:
        return sum(self.held.values())

    @property
    def retried(self) -> int:
        return sum(each.report.retried for each in self.publishers if each.report is not None)

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
        """How long entries took, over all subscribers."""
        return together(counts for counts in self.slices().values())

    def slices(self) -> dict[int, Mapping[int, int]]:
        reports = [each.report for each in self.subscribers if each.report is not None]
        found = sorted({number for report in reports for number in report.latencies})
        return {
            number: together(report.latencies.get(number, {}) for report in reports)
            for number in found
        }

    def latencies(self) -> dict[str, float | None]:
        buckets = self.buckets
        return {name: percentile_ms(buckets, share) for name, share in _SHARES.items()}

    # --- whether all is right ---

    def problems(self) -> list[str]:
        """One sentence each; none if all is as it should be."""
        return [
            *self._problems_of_publishers(),
            *(problem for each in self.subscribers for problem in self._problems_of(each)),
        ]

    def _problems_of_publishers(self) -> Iterable[str]:
        for each in self.publishers:
            if each.report is None or not each.report.terminated:
                yield f"publisher {each.id} did not end by the protocol: {each.end}"
            elif each.report.rejected:
                yield f"publisher {each.id}: {each.report.rejected} entries were rejected"
        told = sum(each.published for each in self.publishers)
        if told != self.published:
            yield f"publishers were told of {told} entries, and the topics hold {self.published}"

    def _problems_of(self, account: SubscriberAccount) -> Iterable[str]:
        if not account.is_live:
            if account.report is not None and account.report.terminated:
                yield f"subscriber {account.id} was to be {account.behaviour}: {account.end}"
            return
        if account.report is None or not account.report.terminated:
            yield f"subscriber {account.id} did not end by the protocol: {account.end}"
        left = account.left if self.was_interrupted else 0
        if account.published != account.delivered + account.skipped + left:
            waits = f" and {account.left} left" if account.left else ""
            yield (
                f"subscriber {account.id}: {account.published} entries were published, "
                f"{account.delivered} delivered, {account.skipped} skipped{waits}"
            )
        if account.lost:
            yield f"subscriber {account.id}: {account.lost} entries were lost"


# --- how it is shown ------------------------------------------------------------------------


def as_json(outcome: Outcome) -> dict[str, Any]:
    experiment, problems = outcome.experiment, outcome.problems()
    return {
        "title": experiment.title,
        "shape": experiment.shape,
        "pubs": experiment.pubs,
        "subs": experiment.subs,
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
                "published": each.published,
                "retried": 0 if each.report is None else each.report.retried,
                "end": each.end,
            }
            for each in outcome.publishers
        ],
        "subscribers": [
            {
                "id": each.id,
                "behaviour": each.behaviour,
                "is_live": each.is_live,
                "published": each.published,
                "delivered": each.delivered,
                "skipped": each.skipped,
                "left": each.left,
                "doubled": 0 if each.report is None else each.report.doubled,
                "end": each.end,
            }
            for each in outcome.subscribers
        ],
        "problems": problems,
        "is_good": not problems,
    }


def as_text(outcome: Outcome) -> str:
    """Of one experiment, in full."""
    lines = ["", *_publishers(outcome), "", *_subscribers(outcome), ""]
    lines += [
        f"{outcome.published} published, "
        f"{outcome.retried} retried, {outcome.delivered} delivered, {outcome.skipped} skipped as "
        f"old, {counted(outcome.dead, 'dead subscriber')}",
        f"latency: {_latency_words(outcome)}",
        verdict([outcome]),
    ]
    return "\n".join(lines) + "\n"


def as_table(outcomes: Sequence[Outcome]) -> str:
    """Of several, a line each."""
    head = ["experiment", "shape", "published", "retried", "delivered", "skipped", "dead"]
    rows: list[Sequence[str]] = [[*head, "p50 ms", "p99 ms", ""]]
    for outcome in outcomes:
        latency = outcome.latencies()
        numbers = (
            outcome.published,
            outcome.retried,
            outcome.delivered,
            outcome.skipped,
            outcome.dead,
        )
        rows.append(
            [
                outcome.experiment.title,
                outcome.experiment.shape,
                *map(str, numbers),
                _ms(latency["p50_ms"]),
                _ms(latency["p99_ms"]),
                "WRONG" if outcome.problems() else "ok",
            ]
        )
    return "\n".join([*table(rows, range(2, 9)), verdict(outcomes)]) + "\n"


def verdict(outcomes: Sequence[Outcome]) -> str:
    """The last line, or lines: what is wrong is named."""
    wrong = [
        f"WRONG{where}: {problem}"
        for outcome in outcomes
        for where in [f" in {outcome.experiment.title!r}" if outcome.experiment.title else ""]
        for problem in outcome.problems()
    ]
    if wrong:
        return "\n".join(wrong)
    left = any(outcome.was_interrupted for outcome in outcomes)
    more = " + left" if left else ""
    return f"for every live subscriber: published = delivered + skipped{more}"


def _publishers(outcome: Outcome) -> Iterable[str]:
    rows: list[Sequence[str]] = [["publisher", "", "published", "retried", "end"]]
    for each in outcome.publishers:
        retried = 0 if each.report is None else each.report.retried
        rows.append([each.id, each.behaviour, str(each.published), str(retried), each.end])
    return table(rows, (2, 3))


def _subscribers(outcome: Outcome) -> Iterable[str]:
    head = ["subscriber", "", "published", "delivered", "skipped", "left", "doubled"]
    rows: list[Sequence[str]] = [[*head, "p50 ms", "p99 ms", "end"]]
    for each in outcome.subscribers:
        buckets = together(each.report.latencies.values()) if each.report is not None else {}
        doubled = 0 if each.report is None else each.report.doubled
        numbers = (each.published, each.delivered, each.skipped, each.left, doubled)
        percentiles = [_ms(percentile_ms(buckets, share)) for share in (0.5, 0.99)]
        rows.append([each.id, each.behaviour, *map(str, numbers), *percentiles, each.end])
    return table(rows, range(2, 9))


def _latency_words(outcome: Outcome) -> str:
    found = outcome.latencies()
    if found["p50_ms"] is None:
        return "nothing was delivered"
    names = {"p50_ms": "half within", "p90_ms": "90 %", "p99_ms": "99 %", "max_ms": "all"}
    return ", ".join(f"{word} {_ms(found[name])} ms" for name, word in names.items())


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"
