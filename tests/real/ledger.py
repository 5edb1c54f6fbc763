"""What clients were told, and whether what the log holds agrees with it. Pure; no I/O.

The same promises that the simulation checks, here for publishers who see nothing but answers:

- what was acknowledged is there, at the offset that was told, and whole;
- a publisher's records are in its order within each partition, and none is there twice, unless the
  publisher itself repeats without saying so (`at_least_once`);
- an offset that anybody has read, before whatever crash, still holds the same record;
- offsets have no gap.

One `Account` belongs to one publisher's thread; `check` is called when all of them are at rest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tests.real.records import Identity

#: What a publisher owes by its own settings: `exactly_once` repeats with sequence numbers until it
#: is answered; `at_most_once` never repeats, so what is not acknowledged is there once or not at
#: all; `at_least_once` repeats without numbers, one batch at a time.
Promise = Literal["exactly_once", "at_most_once", "at_least_once"]


class Place(NamedTuple):
    topic: str
    partition: int


class Found(NamedTuple):
    offset: int
    identity: Identity


@dataclass
class Account:
    """Of one publisher: what it gave to each partition, and what it was told of it."""

    publisher: str
    promise: Promise
    given: dict[Place, int] = field(default_factory=lambda: defaultdict(int))
    acknowledged: dict[Place, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    #: What it was told instead, by Kafka's number, and how often.
    failures: Counter[int] = field(default_factory=Counter)

    def next_number(self, place: Place) -> Identity:
        number = self.given[place]
        self.given[place] = number + 1
        return Identity(self.publisher, number)


def check(
    accounts: Sequence[Account],
    logs: Mapping[Place, Sequence[Found]],
    readers: Sequence[Mapping[Place, Sequence[Found]]] = (),
) -> list[str]:
    """Everything in which the log, read from its beginning to its end, breaks a promise."""
    return [
        *_check_offsets(logs),
        *(wrong for reader in readers for wrong in _check_reader(reader, logs)),
        *(wrong for account in accounts for wrong in _check_account(account, logs)),
        *_check_strangers(accounts, logs),
    ]


def _check_offsets(logs: Mapping[Place, Sequence[Found]]) -> Iterator[str]:
    for place, log in logs.items():
        for due, found in enumerate(log):
            if found.offset != due:
                yield f"{place}: offset {found.offset} where {due} was due"
                break


def _check_reader(
    reader: Mapping[Place, Sequence[Found]], logs: Mapping[Place, Sequence[Found]]
) -> Iterator[str]:
    for place, seen in reader.items():
        log = dict(logs.get(place, ()))
        for offset, identity in seen:
            if log.get(offset) != identity:
                yield f"{place}: {identity} was read at {offset}, where {log.get(offset)} is now"


def lost(account: Account, logs: Mapping[Place, Sequence[Found]]) -> Iterator[str]:
    """What was acknowledged and is not where it was said to be."""
    for place, numbers in account.acknowledged.items():
        at = dict(logs.get(place, ()))
        for number, offset in numbers.items():
            identity = Identity(account.publisher, number)
            if at.get(offset) != identity:
                yield f"{place}: {identity}, acknowledged at {offset}, where {at.get(offset)} is"


def _check_account(account: Account, logs: Mapping[Place, Sequence[Found]]) -> Iterator[str]:
    yield from lost(account, logs)
    for place, given in account.given.items():
        log = logs.get(place, ())
        numbers = [found.number for _, found in log if found.publisher == account.publisher]
        wrong = _ORDERS[account.promise](numbers, given, len(account.acknowledged[place]))
        if wrong:
            yield f"{place}: {account.publisher} ({account.promise}): {wrong}"


def _exactly_once(numbers: list[int], given: int, acknowledged: int) -> str:
    if acknowledged != given:
        return f"{given} were published, {acknowledged} acknowledged"
    wrong = next((n for n, found in enumerate(numbers) if found != n), None)
    if wrong is not None:
        return f"number {numbers[wrong]} where {wrong} was due"
    return "" if len(numbers) == given else f"{given} were published, {len(numbers)} are there"


def _at_most_once(numbers: list[int], given: int, acknowledged: int) -> str:
    for earlier, later in zip(numbers, numbers[1:], strict=False):
        if later <= earlier:
            return f"number {later} behind {earlier}"
    return "" if acknowledged <= len(numbers) else f"{acknowledged} acknowledged, {len(numbers)} in"


def _at_least_once(numbers: list[int], given: int, acknowledged: int) -> str:
    due = 0
    for number in numbers:
        if number > due:
            return f"number {number} where {due} was due"
        due = max(due, number + 1)
    return "" if due == given == acknowledged else f"{given} published, {due} are there"


_ORDERS = {
    "exactly_once": _exactly_once,
    "at_most_once": _at_most_once,
    "at_least_once": _at_least_once,
}


def _check_strangers(
    accounts: Sequence[Account], logs: Mapping[Place, Sequence[Found]]
) -> Iterator[str]:
    given = {account.publisher: account.given for account in accounts}
    for place, log in logs.items():
        for offset, identity in log:
            if identity.number >= given.get(identity.publisher, {}).get(place, 0):
                yield f"{place}: nobody gave {identity}, which is at {offset}, to this partition"
