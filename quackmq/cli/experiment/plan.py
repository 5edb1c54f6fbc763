"""The parameters of an experiment: the numbers of publishers, subscribers and topics, and their
behaviour. Pure.

Experiments are named by their shape, publishers/subscribers/topics. `suite` returns the standard
set: 1/1/1, 1/m/1, n/1/1, the same with two topics, and n/m/t, plus one experiment for each boundary
case, with fast and slow peers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from quackmq import limits as shared_limits
from quackmq.cli import limits
from quackmq.cli.experiment.peer import Behaviour, Part
from quackmq.errors import InvalidRequest
from quackmq.model.policy import Policy, WhenFull
from quackmq.protocols.line.codec import Role

#: The smallest entry, with room for its publisher, number and time.
_LEAST_ENTRY_BYTES: Final = 64
_LONGEST_SECONDS: Final = 24 * 3600.0
#: A silent or dying subscriber first answers this many entries.
_ANSWERED_BEFORE: Final = 3
#: The shortest slice of a time series.
_LEAST_SLICE_MS: Final = 50
#: The number of slices into which the time of publishing is divided.
_SLICES: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An experiment. Invalid parameters raise InvalidRequest. The subscribers are, in this
    order: steady, slow, silent, dying, late. The last `slow_pubs` publishers are slow."""

    title: str = ""
    pubs: int = 1
    subs: int = 1
    topics: int = 1
    #: Entries per second of a publisher, over all topics; None: as fast as possible.
    rate: float | None = 100.0
    seconds: float = 3.0
    #: The largest number of entries per publisher.
    entries: int | None = None
    entry_bytes: int = 100
    slow_pubs: int = 0
    slow_subs: int = 0
    silent_subs: int = 0
    dying_subs: int = 0
    late_subs: int = 0
    #: The answer time of a slow subscriber.
    slow_ms: int = 20
    #: MAXENTRIES and δ; None: no bound.
    max_entries: int | None = 1_000
    delta_ms: int | None = 1_000
    #: A subscriber that does not answer within this time is dead.
    answer_ms: int = 2_000
    #: Whether subscribers get live entries in order, or the newest first.
    reading: Literal["live", "newest"] = "live"

    def __post_init__(self) -> None:
        """Raise InvalidRequest, with the name of the option, for a parameter out of range or for
        parameters that contradict each other."""
        for name in ("pubs", "subs", "topics"):
            if not 1 <= getattr(self, name) <= limits.EXPERIMENT_PEERS:
                raise InvalidRequest(
                    f"--{name}: {getattr(self, name)} is not from 1 to {limits.EXPERIMENT_PEERS}"
                )
        special = self.slow_subs + self.silent_subs + self.dying_subs + self.late_subs
        if special > self.subs:
            raise InvalidRequest(
                f"{special} subscribers should be slow, silent, dying or late, but there are only "
                f"{self.subs}: raise --subs"
            )
        if self.slow_pubs > self.pubs:
            raise InvalidRequest(
                f"--slow-pubs: {self.slow_pubs} is more than the {self.pubs} publishers"
            )
        if self.rate is not None and self.rate <= 0:
            raise InvalidRequest(f"--rate: {self.rate:g} is not a number of entries per second")
        if not 0 < self.seconds <= _LONGEST_SECONDS:
            raise InvalidRequest(
                f"--seconds: {self.seconds:g} is not more than 0 and at most {_LONGEST_SECONDS:g}"
            )
        if self.entries is not None and not 1 <= self.entries <= limits.EXPERIMENT_ENTRIES:
            raise InvalidRequest(
                f"--entries: {self.entries} is not from 1 to {limits.EXPERIMENT_ENTRIES}"
            )
        if (
            self.entries is not None
            and self.silent_subs + self.dying_subs
            and self.pubs * self.entries <= _ANSWERED_BEFORE
        ):
            raise InvalidRequest(
                f"--entries: {self.entries} is too few: silent and dying subscribers first answer "
                f"{_ANSWERED_BEFORE} entries"
            )
        if not _LEAST_ENTRY_BYTES <= self.entry_bytes <= shared_limits.LINE_ENTRY_BYTES:
            raise InvalidRequest(
                f"--bytes: {self.entry_bytes} is not from {_LEAST_ENTRY_BYTES} to "
                f"{shared_limits.LINE_ENTRY_BYTES}"
            )
        if self.slow_ms >= self.answer_ms:
            raise InvalidRequest(
                f"--slow-ms {self.slow_ms} is not below --answer-ms {self.answer_ms}: slow "
                "subscribers would be declared dead"
            )

    @property
    def shape(self) -> str:
        return f"{self.pubs}/{self.subs}/{self.topics}"

    @property
    def topic_names(self) -> list[str]:
        return [str(number + 1) for number in range(self.topics)]

    @property
    def policy(self) -> Policy:
        """The policy of the topics. A full topic makes its publishers retry. Entries leave it by
        age or, if nothing expires, when every subscriber has received them."""
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
        """Yield the part of each publisher. The last `slow_pubs` of them are slow. `control_fd` is
        replaced when a process starts."""
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
        """Yield the part of each subscriber, in the order of behaviours of this class. `control_fd`
        is replaced when a process starts."""
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
        """Return the behaviour of each subscriber. The steady ones come first."""
        special = [
            *[Behaviour.SLOW] * self.slow_subs,
            *[Behaviour.SILENT] * self.silent_subs,
            *[Behaviour.DYING] * self.dying_subs,
            *[Behaviour.LATE] * self.late_subs,
        ]
        return [Behaviour.STEADY] * (self.subs - len(special)) + special


def suite(base: Experiment) -> list[Experiment]:
    """Return the standard experiments and every boundary case, with the sizes, rate and times of
    `base`. The behaviour of the peers is chosen here."""
    base = replace(base, slow_pubs=0, slow_subs=0, silent_subs=0, dying_subs=0, late_subs=0)
    # At least 2, 2 and 3, because the smaller shapes are in the list already.
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
    # Without expiry, the topic needs room for everything that the late subscriber has missed.
    boundaries[-1] = replace(boundaries[-1], max_entries=None)
    return shapes + boundaries
