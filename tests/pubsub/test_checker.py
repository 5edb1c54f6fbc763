"""The checker of exactly-once finds each way of breaking it, and nothing where it was kept."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from quackmq.model.subscription import RecordPosition, message_id
from tests.kit.tables import each
from tests.pubsub.checker import (
    END,
    Identity,
    Stored,
    Told,
    partition_of,
    pieces_of,
    violations,
)

TOPIC = uuid.UUID(int=7)
Messages = list[Stored]


def at(partition: int, offset: int, value: object) -> Stored:
    return Stored(message_id(TOPIC, RecordPosition(partition, offset)), str(value))


def kept() -> Messages:
    """What each subscriber should have: two producers, two partitions, one put of two messages."""
    first, second = pieces_of("anna", 1, 2)
    return [
        at(0, 0, Identity("anna", 0)),
        at(1, 0, Identity("bert", 0)),
        at(0, 1, first),
        at(1, 1, second),
        at(0, 2, Identity("anna", 2)),
        at(1, 2, END),
        at(0, 3, END),
    ]


PUTS = {("anna", "ducks"): Told(4, [0, 1, 1, 2]), ("bert", "ducks"): Told(1, [0])}


def judged(ones: Messages, others: Messages | None = None) -> str:
    stores = {("one", "ducks"): ones, ("two", "ducks"): kept() if others is None else others}
    return "\n".join(violations(PUTS, stores))


def test_nothing_is_found_where_all_is_well() -> None:
    assert judged(kept()) == ""


def test_what_was_not_acknowledged_may_be_there_once() -> None:
    more = [*kept(), at(0, 4, Identity("anna", 3))]
    assert judged(more, more) == ""


def without(index: int) -> Messages:
    messages = kept()
    del messages[index]
    return messages


def doubled(messages: Messages) -> Messages:
    return [*messages, messages[0]]


BREACHES: dict[str, tuple[Callable[[], Messages], str]] = {
    "lost": (lambda: without(0), "acknowledged and never came"),
    "lost in part": (lambda: without(3), "came in part"),
    "delivered twice": (lambda: doubled(kept()), "stored under one id more than once"),
    "put twice": (lambda: [*kept(), at(0, 4, Identity("anna", 2))], "came more than once"),
    "unacknowledged and twice": (
        lambda: [*kept(), at(0, 4, Identity("anna", 3)), at(1, 3, Identity("anna", 3))],
        "came more than once",
    ),
    "out of order": (lambda: [*kept(), at(0, 4, Identity("anna", 0))], "came out of order"),
    "pieces out of order": (
        lambda: [at(0, 0, Identity("anna", 1, 1, 2)), at(0, 1, Identity("anna", 1, 0, 2))],
        "came out of order",
    ),
    "a stranger": (lambda: [*kept(), at(0, 4, Identity("carl", 0))], "put by nobody"),
    "a number never given": (lambda: [*kept(), at(0, 4, Identity("anna", 4))], "put by nobody"),
    "torn": (lambda: [*kept(), at(0, 4, "anna 1 x")], "put by nobody"),
    "only the other has it": (lambda: without(6), "one lacks what another has"),
    "another message under an id": (
        lambda: [at(0, 0, Identity("anna", 2)), *kept()[1:]],
        "one id for two messages",
    ),
    "a partition backward": (
        lambda: [kept()[4], *kept()[:4], *kept()[5:]],
        "one went back",
    ),
}


@each(("breach", "named"), BREACHES.values())
def test_each_breach_is_found_and_named(breach: Callable[[], Messages], named: str) -> None:
    assert named in judged(breach())


def test_what_all_subscribers_miss_is_found_too() -> None:
    assert "acknowledged and never came" in judged(without(0), without(0))


def test_the_partition_is_read_from_an_id() -> None:
    assert partition_of(message_id(TOPIC, RecordPosition(3, 17))) == 3
