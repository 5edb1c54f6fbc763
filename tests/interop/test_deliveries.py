"""The checker of the groups' scenarios sees what it has to see."""

from __future__ import annotations

from functools import reduce

import pytest

from tests.interop.deliveries import Event, held_after, violations


def assigned(at_ms: float, *partitions: int) -> Event:
    return Event("assigned", at_ms, partitions)


def revoked(at_ms: float, *partitions: int) -> Event:
    return Event("revoked", at_ms, partitions)


def records(at_ms: float, partition: int, *offsets: int) -> list[Event]:
    return [Event("record", at_ms, (partition,), offset, str(offset)) for offset in offsets]


def committed(at_ms: float, partition: int, offset: int) -> Event:
    return Event("committed", at_ms, (partition,), offset)


FIVE = [str(number) for number in range(5)]
ANN = [assigned(1, 0), *records(2, 0, 0, 1, 2), committed(3, 0, 2), revoked(4, 0)]


def test_what_was_not_committed_may_come_again() -> None:
    ben = [assigned(5, 0), *records(6, 0, 2, 3, 4)]
    assert violations({"ann": ANN, "ben": ben}, FIVE) == []


@pytest.mark.parametrize(
    ("ben", "complaint"),
    [
        ([assigned(5, 0), *records(6, 0, 1, 2, 3, 4)], "ben got [1] of partition 0"),
        ([assigned(5, 0), *records(6, 0, 3)], "1 records came to nobody"),
        ([assigned(5, 0), *records(6, 0, 2, 4)], "ben got 4 after 2"),
        ([assigned(5, 0), *records(6, 0, 2, 3, 4, 3)], "ben got 3 after 4"),
        (records(6, 0, 3, 4), "without holding the partition"),
        ([assigned(5, 0), revoked(5, 0), *records(6, 0, 3, 4)], "without holding the partition"),
        ([assigned(5, 0), *records(6, 0, 3, 4, 5)], "records that nobody published: ['5']"),
    ],
)
def test_what_breaks_a_promise_is_named(ben: list[Event], complaint: str) -> None:
    assert complaint in " ".join(violations({"ann": ANN, "ben": ben}, FIVE))


def test_tenures_are_put_in_the_order_in_which_they_began() -> None:
    late = [assigned(9, 0), *records(9, 0, 2, 3, 4)]
    assert violations({"late": late, "ann": ANN}, FIVE) == []


def test_a_member_holds_what_was_assigned_and_not_revoked() -> None:
    events = [assigned(1, 0, 1), revoked(2, 1), assigned(3, 2), *records(4, 0, 7)]
    nothing: frozenset[int] = frozenset()
    assert reduce(held_after, events, nothing) == {0, 2}
