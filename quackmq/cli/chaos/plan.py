"""What a chaos client will do, drawn from a seed: pure, so that a seed tells all of it beforehand.

A client of a broker may lose what it was sent, answer late, say things twice, vanish, come back,
and change its mind about what it wants. Each of these is an `Act`; a plan is an endless row of
them. What a broker answers changes nothing about the plan, so one seed gives one plan whatever
broker it meets.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from quackmq.errors import InvalidRequest


class Act(StrEnum):
    #: What any client does.
    PUT = "put"
    TAKE = "take"
    #: Faults: with a message in hand …
    DROP = "drop"  # it is not acknowledged
    DELAY = "delay"  # it is acknowledged after a while
    DOUBLE = "double"  # it is acknowledged twice
    #: … with one that is put …
    DOUBLE_PUT = "double-put"  # the same once more, at once
    CUT_PUT = "cut-put"  # gone before the answer
    #: … and with what it is to its broker.
    DIE = "die"  # gone without a word, and back again
    SUBSCRIBE = "subscribe"
    UNSUBSCRIBE = "unsubscribe"


#: What each is called where faults are chosen, and how often it happens.
FAULTS: Final[dict[str, dict[Act, int]]] = {
    "drop": {Act.DROP: 6, Act.CUT_PUT: 2},
    "delay": {Act.DELAY: 6},
    "double": {Act.DOUBLE: 6, Act.DOUBLE_PUT: 3},
    "die": {Act.DIE: 3},
    "subscribe": {Act.SUBSCRIBE: 4, Act.UNSUBSCRIBE: 2},
}
_GOOD: Final = {Act.PUT: 24, Act.TAKE: 30}
#: Acts that acknowledge nothing, or say something to the broker once more.
PUTS: Final = frozenset({Act.PUT, Act.DOUBLE_PUT, Act.CUT_PUT})
TAKES: Final = frozenset({Act.TAKE, Act.DROP, Act.DELAY, Act.DOUBLE})

#: Between two acts, and before a late acknowledgement.
LONGEST_PAUSE_MS: Final = 20
LONGEST_DELAY_MS: Final = 200


class Step(NamedTuple):
    act: Act
    topic: str
    #: To wait before it; for DELAY also how long the acknowledgement takes.
    pause_ms: int
    delay_ms: int


def check_faults(names: Iterable[str]) -> tuple[str, ...]:
    """InvalidRequest for one that there is not."""
    names = tuple(names)
    for name in names:
        if name not in FAULTS:
            raise InvalidRequest(f"there is no fault {name!r}; there are {', '.join(FAULTS)}")
    return names


def plan(
    seed: int, topics: Sequence[str], faults: Iterable[str] = tuple(FAULTS), *, puts: bool = True
) -> Iterator[Step]:
    """Without an end. It begins by subscribing to each topic. Without `puts` it only takes."""
    draw = random.Random(seed)
    weights = dict(_GOOD)
    for name in check_faults(faults):
        weights |= FAULTS[name]
    if not puts:
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
