"""The parameters of an experiment: the numbers of publishers, subscribers and topics, and their
behaviour. Pure.

Experiments are named by their shape, publishers/subscribers/topics. `suite` returns the standard
set: 1/1/1, 1/m/1, n/1/1, the same with two topics, and n/m/t, plus one experiment for each boundary
case, with fast and slow peers.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final, Literal, NamedTuple

from quackmq import limits as shared_limits
from quackmq.cli import limits
from quackmq.cli.experiment.peer import Behaviour, Part
from quackmq.errors import InvalidRequest
from quackmq.model.policy import Policy, WhenFull
from quackmq.protocols.line.codec.messages import Role

#: The smallest entry, with room for its publisher, number and time.
_LEAST_ENTRY_BYTES: Final = 64
_LONGEST_SECONDS: Final = 24 * 3600.0
#: Entries that are no longer live are archived within this time: an experiment lasts seconds.
_ARCHIVE_AFTER_LIVE_MS: Final = 1_000
#: The name of a topic: a number of a few digits.
_TOPIC_NUMBER: Final = re.compile("[1-9][0-9]{0,8}")
#: A silent or dying subscriber first answers this many entries.
_ANSWERED_BEFORE: Final = 3
#: The shortest slice of a time series.
_LEAST_SLICE_MS: Final = 50
#: The number of slices into which the time of publishing is divided.
_SLICES: Final = 200


class Program(NamedTuple):
    """A program of the user that is a peer. `id` and `topics` are proposed to it; it may use
    others."""

    role: Role
    id: str
    topics: list[str]
    #: The command line, as the user wrote it.
    command: str

    def __str__(self) -> str:
        return f"--{self.role}-command {self.command!r}"

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.command)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An experiment. Invalid parameters raise InvalidRequest. The subscribers are, in this
    order: steady, slow, silent, dying, late. The last `slow_pubs` publishers are slow. Programs of
    the user are publishers and subscribers too, and come after all others."""

    title: str = ""
    #: Publishers and subscribers, without the programs of the user.
    pubs: int = 1
    subs: int = 1
    topics: int = 1
    #: The topics of a publisher or subscriber by its id. Others use all topics.
    pub_topics: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sub_topics: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: The command lines of the user's programs.
    pub_commands: Sequence[str] = ()
    sub_commands: Sequence[str] = ()
    #: How long a program may take to connect, and to exit at the end.
    command_ms: int = 10_000
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
        self._check_numbers_of_peers()
        self._check_assigned_topics("pub", _ids("p", self.all_pubs), self.pub_topics)
        self._check_assigned_topics("sub", _ids("s", self.all_subs), self.sub_topics)
        for program in self.programs():
            _check_command(program)
        self._check_behaviour()
        self._check_entries()

    def _check_numbers_of_peers(self) -> None:
        """Check the numbers of publishers, subscribers and topics, and how many of the peers are
        special. Raises InvalidRequest."""
        for option, least, number, programs in (
            ("--pubs", 0 if self.pub_commands else 1, self.pubs, self.pub_commands),
            ("--subs", 0 if self.sub_commands else 1, self.subs, self.sub_commands),
            ("--topics", 1, self.topics, ()),
        ):
            most = limits.EXPERIMENT_PEERS - len(programs)
            if not least <= number <= most:
                # The options are --pub-command and --sub-command; no program replaces a topic.
                role = option.removeprefix("--").removesuffix("s")
                with_program = f"; 0 is allowed with --{role}-command"
                hint = with_program if number == 0 and option != "--topics" else ""
                raise InvalidRequest(f"{option}: {number} is not from {least} to {most}{hint}")
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

    def _check_assigned_topics(
        self, role: str, ids: Sequence[str], assigned: Mapping[str, Sequence[str]]
    ) -> None:
        """Check that the topics that are assigned and the peers that get them exist. `role` is the
        word in the names of the options. Raises InvalidRequest."""
        for peer, topics in assigned.items():
            if peer not in ids:
                raise InvalidRequest(
                    f"--{role}-topics: there is no {role} {peer!r}: {_describe_names(ids)}; raise "
                    f"--{role}s for more"
                )
            for topic in topics:
                if topic not in self.topic_names:
                    raise InvalidRequest(
                        f"--{role}-topics: there is no topic {topic[:100]!r} for {peer}: "
                        f"{_describe_names(self.topic_names)}; raise --topics for more"
                    )

    def _check_behaviour(self) -> None:
        """Check rate, times and sizes. Raises InvalidRequest."""
        if self.rate is not None and self.rate <= 0:
            raise InvalidRequest(f"--rate: {self.rate:g} is not a number of entries per second")
        if not 0 < self.seconds <= _LONGEST_SECONDS:
            raise InvalidRequest(
                f"--seconds: {self.seconds:g} is not more than 0 and at most {_LONGEST_SECONDS:g}"
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
        if not 1 <= self.command_ms <= limits.EXPERIMENT_LONGEST_COMMAND_MS:
            raise InvalidRequest(
                f"--command-ms: {self.command_ms} is not from 1 to "
                f"{limits.EXPERIMENT_LONGEST_COMMAND_MS}"
            )

    def _check_entries(self) -> None:
        """Check the number of entries per publisher. It must be enough for silent and dying
        subscribers to reach the entry that they do not answer. Raises InvalidRequest."""
        if self.entries is not None and not 1 <= self.entries <= limits.EXPERIMENT_ENTRIES:
            raise InvalidRequest(
                f"--entries: {self.entries} is not from 1 to {limits.EXPERIMENT_ENTRIES}"
            )
        for part in self.subscribers():
            if part.behaviour not in (Behaviour.SILENT, Behaviour.DYING) or self.pub_commands:
                continue
            expected = self._least_entries_for(part)
            if expected == 0:
                raise InvalidRequest(
                    f"--sub-topics: nobody publishes to a topic of {part.id}, which should be "
                    f"{part.behaviour} after {_ANSWERED_BEFORE} entries: give them a common topic"
                )
            if expected <= _ANSWERED_BEFORE:
                raise InvalidRequest(
                    f"--entries: {self.entries} is too few: silent and dying subscribers first "
                    f"answer {_ANSWERED_BEFORE} entries"
                )

    def _least_entries_for(self, subscriber: Part) -> int:
        """Return how many entries the publishers will publish to the subscriber's topics if no
        topic is full. Each publisher visits its topics in turn."""
        total = 0
        for publisher in self.publishers():
            rounds, remaining = divmod(publisher.entries, len(publisher.topics))
            for index, topic in enumerate(publisher.topics):
                if topic in subscriber.topics:
                    total += rounds + (index < remaining)
        return total

    @property
    def shape(self) -> str:
        return f"{self.all_pubs}/{self.all_subs}/{self.topics}"

    @property
    def all_pubs(self) -> int:
        """The number of publishers, with the programs of the user."""
        return self.pubs + len(self.pub_commands)

    @property
    def all_subs(self) -> int:
        """The number of subscribers, with the programs of the user."""
        return self.subs + len(self.sub_commands)

    @property
    def topic_names(self) -> list[str]:
        return [str(number + 1) for number in range(self.topics)]

    @property
    def policy(self) -> Policy:
        """The policy of the topics. A full topic makes its publishers retry. It has room again
        when entries expire or, if nothing expires, when every subscriber has received them. No
        entry is deleted: entries that are no longer live go to the archive soon."""
        return Policy(
            live_for_ms=self.delta_ms,
            live_entries=self.max_entries,
            when_full=WhenFull.WAIT if self.delta_ms is not None else WhenFull.WAIT_UNTIL_CONSUMED,
            archive_after_live_ms=_ARCHIVE_AFTER_LIVE_MS,
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
                topics=self._topics_of(f"p{number + 1}", self.pub_topics),
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
                topics=self._topics_of(f"s{number + 1}", self.sub_topics),
                control_fd=control_fd,
                behaviour=behaviour,
                answer_ms=self.slow_ms if behaviour is Behaviour.SLOW else 0,
                after=_ANSWERED_BEFORE,
                slice_ms=self.slice_ms,
            )

    def programs(self) -> Iterator[Program]:
        """Yield the programs of the user, the subscribers first. Their numbers follow those of the
        other peers."""
        for number, command in enumerate(self.sub_commands, start=self.subs + 1):
            topics = self._topics_of(f"s{number}", self.sub_topics)
            yield Program(Role.SUB, f"s{number}", topics, command)
        for number, command in enumerate(self.pub_commands, start=self.pubs + 1):
            topics = self._topics_of(f"p{number}", self.pub_topics)
            yield Program(Role.PUB, f"p{number}", topics, command)

    def _topics_of(self, peer: str, assigned: Mapping[str, Sequence[str]]) -> list[str]:
        return list(assigned.get(peer, self.topic_names))

    def _behaviours(self) -> list[Behaviour]:
        """Return the behaviour of each subscriber. The steady ones come first."""
        special = [
            *[Behaviour.SLOW] * self.slow_subs,
            *[Behaviour.SILENT] * self.silent_subs,
            *[Behaviour.DYING] * self.dying_subs,
            *[Behaviour.LATE] * self.late_subs,
        ]
        return [Behaviour.STEADY] * (self.subs - len(special)) + special


def parse_topics(option: str, texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse the values of `--pub-topics` or `--sub-topics`, such as "p1=1,2" or "p1,p2=3". Return
    the topics of each peer that is named. Raises InvalidRequest."""
    assigned: dict[str, tuple[str, ...]] = {}
    for text in texts:
        peers, equals, names = text.partition("=")
        topics = tuple(names.split(","))
        if not equals or not all((*peers.split(","), *topics)):
            raise InvalidRequest(
                f"{option}: {text!r} does not assign topics to peers: write, for example, "
                f"{option} {option[2]}1=1,2"
            )
        if len(set(topics)) < len(topics):
            raise InvalidRequest(f"{option}: {text!r} names a topic twice: name each topic once")
        for peer in peers.split(","):
            if peer in assigned:
                raise InvalidRequest(
                    f"{option}: {peer} is named twice: give all its topics at once, as in "
                    f"{peer}={','.join(dict.fromkeys([*assigned[peer], *topics]))}"
                )
            assigned[peer] = topics
    return assigned


def highest_topic(*assigned: Mapping[str, Sequence[str]]) -> int:
    """Return the highest number of an assigned topic; 1 without any. Names that cannot be topics
    are ignored; `Experiment` refuses them."""
    names = chain.from_iterable(topics for each in assigned for topics in each.values())
    numbers = (int(name) for name in names if _TOPIC_NUMBER.fullmatch(name))
    return max(numbers, default=1)


def _check_command(program: Program) -> None:
    """Raise InvalidRequest if a command line cannot be split into words or is empty."""
    try:
        words = program.arguments
    except ValueError as error:
        raise InvalidRequest(f"{program}: it cannot be split into words: {error}") from None
    if not words:
        raise InvalidRequest(f"{program}: it names no program")


def _ids(letter: str, number: int) -> list[str]:
    return [f"{letter}{each + 1}" for each in range(number)]


def _describe_names(names: Sequence[str]) -> str:
    """Return which names there are, in words. There is at least one."""
    if len(names) == 1:
        return f"there is only {names[0]}"
    return f"there are {names[0]} to {names[-1]}"


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
