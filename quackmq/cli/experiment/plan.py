"""What an experiment is: so many publishers, subscribers and topics, and how they behave. Pure.

The document proposes its experiments by their shape, publishers/subscribers/topics: 1/1/1, 1/m/1,
n/1/1, the same with two topics, n/m/t, each with fast and slow ones, so that boundary cases occur.
`suite` has all of them, and one for each boundary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from quackmq import limits as shared_limits
from quackmq.cli import limits
from quackmq.cli.experiment.peer import Behaviour, Part
from quackmq.errors import InvalidRequest
from quackmq.model.policy import Policy, WhenFull
from quackmq.protocols.line.codec import Role

#: An entry has room for its publisher, its number and its time.
_LEAST_ENTRY_BYTES: Final = 64
_LONGEST_SECONDS: Final = 24 * 3600.0
#: A silent or dying subscriber answers so many entries before.
_ANSWERED_BEFORE: Final = 3
#: What fits between two entries of a series, at the least.
_LEAST_SLICE_MS: Final = 50
_SLICES: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """InvalidRequest for one that cannot be. Of the subscribers some are slow, silent, dying or
    late, in this order behind the steady ones; of the publishers some are slow."""

    title: str = ""
    pubs: int = 1
    subs: int = 1
    topics: int = 1
    #: Entries a second of a publisher, over all topics; None: as fast as it goes.
    rate: float | None = 100.0
    seconds: float = 3.0
    #: So many of a publisher at the most.
    entries: int | None = None
    entry_bytes: int = 100
    slow_pubs: int = 0
    slow_subs: int = 0
    silent_subs: int = 0
    dying_subs: int = 0
    late_subs: int = 0
    #: How long a slow subscriber takes to answer.
    slow_ms: int = 20
    #: MAXENTRIES and δ; None: without bound.
    max_entries: int | None = 1_000
    delta_ms: int | None = 1_000
    #: After so long without an answer a subscriber is dead.
    answer_ms: int = 2_000

    def __post_init__(self) -> None:
        for name in ("pubs", "subs", "topics"):
            if not 1 <= getattr(self, name) <= limits.EXPERIMENT_PEERS:
                raise InvalidRequest(
                    f"--{name}: {getattr(self, name)} is not from 1 to {limits.EXPERIMENT_PEERS}"
                )
        special = self.slow_subs + self.silent_subs + self.dying_subs + self.late_subs
        if special > self.subs:
            raise InvalidRequest(
                f"{special} subscribers are to be slow, silent, dying or late, and there are "
                f"{self.subs}: give more with --subs"
            )
        if self.slow_pubs > self.pubs:
            raise InvalidRequest(f"{self.slow_pubs} of {self.pubs} publishers cannot be slow")
        if self.rate is not None and self.rate <= 0:
            raise InvalidRequest(f"--rate: {self.rate:g} is no number of entries a second")
        if not 0 < self.seconds <= _LONGEST_SECONDS:
            raise InvalidRequest(f"--seconds: {self.seconds:g} is not above 0 and below a day")
        if self.entries is not None and not 1 <= self.entries <= limits.EXPERIMENT_ENTRIES:
            raise InvalidRequest(
                f"--entries: {self.entries} is not from 1 to {limits.EXPERIMENT_ENTRIES}"
            )
        if not _LEAST_ENTRY_BYTES <= self.entry_bytes <= shared_limits.LINE_ENTRY_BYTES:
            raise InvalidRequest(
                f"--bytes: {self.entry_bytes} is not from {_LEAST_ENTRY_BYTES} to "
                f"{shared_limits.LINE_ENTRY_BYTES}"
            )
        if self.slow_ms >= self.answer_ms:
            raise InvalidRequest(
                f"a subscriber that takes {self.slow_ms} ms to answer is dead after "
                f"{self.answer_ms} ms: let it be faster, or wait longer"
            )

    @property
    def shape(self) -> str:
        return f"{self.pubs}/{self.subs}/{self.topics}"

    @property
    def topic_names(self) -> list[str]:
        return [str(number + 1) for number in range(self.topics)]

    @property
    def policy(self) -> Policy:
        """A full topic makes its publishers retry. Room is made by age, or, where nothing gets
        old, by what every subscriber has."""
        return Policy(
            live_for_ms=self.delta_ms,
            live_entries=self.max_entries,
            when_full=WhenFull.WAIT,
            keep_until_consumed=self.max_entries is not None and self.delta_ms is None,
        )

    @property
    def slice_ms(self) -> int:
        return max(_LEAST_SLICE_MS, round(self.seconds * 1000 / _SLICES))

    def publishers(self, control_fd: int = -1) -> Iterator[Part]:
        for number in range(self.pubs):
            is_slow = number >= self.pubs - self.slow_pubs
            yield Part(
                role=Role.PUB,
                id=f"p{number + 1}",
                topics=self.topic_names,
                control_fd=control_fd,
                behaviour=Behaviour.SLOW if is_slow else Behaviour.STEADY,
                rate=self.rate,
                seconds=self.seconds,
                entries=limits.EXPERIMENT_ENTRIES if self.entries is None else self.entries,
                entry_bytes=self.entry_bytes,
            )

    def subscribers(self, control_fd: int = -1) -> Iterator[Part]:
        for number, behaviour in enumerate(self._behaviours()):
            yield Part(
                role=Role.SUB,
                id=f"s{number + 1}",
                topics=self.topic_names,
                control_fd=control_fd,
                behaviour=behaviour,
                answer_ms=self.slow_ms if behaviour is Behaviour.SLOW else 0,
                after=_ANSWERED_BEFORE,
                slice_ms=self.slice_ms,
            )

    def _behaviours(self) -> list[Behaviour]:
        special = [
            *[Behaviour.SLOW] * self.slow_subs,
            *[Behaviour.SILENT] * self.silent_subs,
            *[Behaviour.DYING] * self.dying_subs,
            *[Behaviour.LATE] * self.late_subs,
        ]
        return [Behaviour.STEADY] * (self.subs - len(special)) + special


def suite(base: Experiment) -> list[Experiment]:
    """All experiments of the document and every boundary, with `base`'s n, m, t, rate and times.
    Who is slow, silent, dying or late is decided here."""
    base = replace(base, slow_pubs=0, slow_subs=0, silent_subs=0, dying_subs=0, late_subs=0)
    n, m, t = max(2, base.pubs), max(2, base.subs), max(3, base.topics)
    shapes = [
        replace(base, title="1 pub, 1 sub, 1 topic", pubs=1, subs=1, topics=1),
        replace(base, title="m subs", pubs=1, subs=m, topics=1),
        replace(base, title="n pubs", pubs=n, subs=1, topics=1),
        replace(base, title="1 pub, 1 sub, 2 topics", pubs=1, subs=1, topics=2),
        replace(base, title="m subs, 2 topics", pubs=1, subs=m, topics=2),
        replace(base, title="n pubs, 2 topics", pubs=n, subs=1, topics=2),
        replace(base, title="n pubs, m subs, t topics", pubs=n, subs=m, topics=t),
    ]
    everyone = replace(base, pubs=n, subs=m, topics=2)
    boundaries = [
        replace(everyone, title="fast pubs, slow subs", rate=None, slow_subs=m),
        replace(everyone, title="slow pubs, fast subs", slow_pubs=n),
        replace(everyone, title="some of each slow", slow_pubs=1, slow_subs=1),
        replace(everyone, title="full topics", rate=None, max_entries=20, delta_ms=200),
        replace(everyone, title="full, nothing gets old", rate=None, max_entries=20, delta_ms=None),
        replace(everyone, title="a silent sub", subs=m + 1, silent_subs=1),
        replace(everyone, title="a dying sub", subs=m + 1, dying_subs=1),
        replace(everyone, title="late, and all is old", subs=m + 1, late_subs=1, delta_ms=1),
        replace(everyone, title="late, and nothing is", subs=m + 1, late_subs=1, delta_ms=None),
    ]
    # A topic in which nothing gets old must have room for all that a late subscriber waits for.
    boundaries[-1] = replace(boundaries[-1], max_entries=None)
    return shapes + boundaries
