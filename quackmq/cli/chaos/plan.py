"""The actions of a chaos client, drawn from a seed. Pure: the seed determines all actions in
advance.

A client may lose a message, answer late, send a request twice, vanish, come back, or change its
subscriptions. Each of these is an `Act`, and a plan is an endless sequence of acts. The answers of
the broker do not change the plan, so that one seed gives the same plan with any broker.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from quackmq.errors import InvalidRequest


class Act(StrEnum):
    #: Normal behaviour.
    PUT = "put"
    TAKE = "take"
    #: Faults after receiving a message:
    DROP = "drop"  # do not acknowledge it
    DELAY = "delay"  # acknowledge it late
    DOUBLE = "double"  # acknowledge it twice
    #: Faults while putting a message:
    DOUBLE_PUT = "double-put"  # send it twice
    CUT_PUT = "cut-put"  # disconnect before the answer
    #: Faults of the client itself:
    DIE = "die"  # disconnect without a word, then reconnect
    SUBSCRIBE = "subscribe"
    UNSUBSCRIBE = "unsubscribe"


#: The faults by name, with their relative frequencies.
FAULTS: Final[dict[str, dict[Act, int]]] = {
    "drop": {Act.DROP: 6, Act.CUT_PUT: 2},
    "delay": {Act.DELAY: 6},
    "double": {Act.DOUBLE: 6, Act.DOUBLE_PUT: 3},
    "die": {Act.DIE: 3},
    "subscribe": {Act.SUBSCRIBE: 4, Act.UNSUBSCRIBE: 2},
}
_NORMAL: Final = {Act.PUT: 24, Act.TAKE: 30}
#: Acts that put a message, and acts that receive one.
PUTS: Final = frozenset({Act.PUT, Act.DOUBLE_PUT, Act.CUT_PUT})
TAKES: Final = frozenset({Act.TAKE, Act.DROP, Act.DELAY, Act.DOUBLE})

#: The longest pause between two acts, and the longest delay of an acknowledgement.
LONGEST_PAUSE_MS: Final = 20
LONGEST_DELAY_MS: Final = 200


class Step(NamedTuple):
    act: Act
    topic: str
    #: The pause before the act, and for DELAY the delay of the acknowledgement.
    pause_ms: int
    delay_ms: int


def check_faults(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names. Raises InvalidRequest for an unknown fault."""
    names = tuple(names)
    for name in names:
        if name not in FAULTS:
            raise InvalidRequest(f"there is no fault {name!r}; there are {', '.join(FAULTS)}")
    return names


def plan(
    seed: int,
    topics: Sequence[str],
    faults: Iterable[str] = tuple(FAULTS),
    *,
    with_puts: bool = True,
) -> Iterator[Step]:
    """Yield steps endlessly, first one SUBSCRIBE for each topic. Without `with_puts`, no message
    is put."""
    draw = random.Random(seed)
    weights = dict(_NORMAL)
    for name in check_faults(faults):
        weights |= FAULTS[name]
    if not with_puts:
        weights = {act: weight for act, weight in weights.items() if act not in PUTS}
    for topic in topics:
        yield Step(Act.SUBSCRIBE, topic, 0, 0)
    acts, shares = list(weights), list(weights.values())
    while True:
        (act,) = draw.choices(acts, shares)
        yield Step(
            act,
            draw.choice(topics),
            draw.randint(0, LONGEST_PAUSE_MS),
            draw.randint(1, LONGEST_DELAY_MS),
        )
