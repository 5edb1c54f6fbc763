"""The check of real runs finds what it is there to find, and nothing where all is well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tests.kit.tables import each
from tests.real.ledger import Account, Found, Place, Promise, check
from tests.real.records import Identity, NotOurs, identify, value_of

PLACE = Place("ducks", 0)


def account(promise: Promise, acknowledged: Mapping[int, int], given: int) -> Account:
    made = Account("duck", promise)
    made.given[PLACE] = given
    made.acknowledged[PLACE] = dict(acknowledged)
    return made


def log(*numbers: int) -> dict[Place, list[Found]]:
    """A partition that holds these records of the one publisher, from offset 0 on."""
    return {PLACE: [Found(at, Identity("duck", number)) for at, number in enumerate(numbers)]}


@pytest.mark.parametrize(
    ("promise", "acknowledged", "given", "numbers"),
    [
        ("exactly_once", {0: 0, 1: 1, 2: 2}, 3, [0, 1, 2]),
        ("at_most_once", {0: 0, 3: 2}, 5, [0, 2, 3]),
        ("at_least_once", {0: 0, 1: 3, 2: 4}, 3, [0, 1, 0, 1, 2]),
    ],
)
def test_what_is_as_it_should_be_is_not_complained_of(
    promise: Promise, acknowledged: Mapping[int, int], given: int, numbers: Sequence[int]
) -> None:
    assert check([account(promise, acknowledged, given)], log(*numbers)) == []


@each(
    ("promise", "acknowledged", "given", "numbers", "complaint"),
    [
        ("exactly_once", {0: 0, 1: 1}, 2, [0], "acknowledged at 1, where None is"),
        ("exactly_once", {0: 0, 1: 2}, 2, [0, 0, 1], "number 0 where 1 was due"),
        ("exactly_once", {0: 1, 1: 0}, 2, [1, 0], "number 1 where 0 was due"),
        ("exactly_once", {0: 0}, 2, [0, 1], "2 were published, 1 acknowledged"),
        ("exactly_once", {0: 0}, 1, [0, 7], "nobody gave"),
        ("at_most_once", {0: 0, 1: 1}, 3, [0, 1, 0], "number 0 behind 1"),
        ("at_most_once", {1: 0, 0: 1}, 3, [1, 0], "number 0 behind 1"),
        ("at_most_once", {0: 0, 1: 1}, 3, [0, 2], "acknowledged at 1, where"),
        ("at_least_once", {0: 0, 1: 2}, 2, [0, 0], "2 published, 1 are there"),
        ("at_least_once", {0: 0, 1: 3, 2: 1}, 3, [0, 2, 0, 1], "number 2 where 1 was due"),
    ],
)
def test_each_broken_promise_is_found(
    promise: Promise,
    acknowledged: Mapping[int, int],
    given: int,
    numbers: Sequence[int],
    complaint: str,
) -> None:
    wrong = check([account(promise, acknowledged, given)], log(*numbers))
    assert any(complaint in each for each in wrong), wrong


def test_an_offset_given_to_another_record_than_somebody_read_there_is_found() -> None:
    made = account("at_most_once", {}, 3)
    reader = {PLACE: [Found(0, Identity("duck", 0)), Found(1, Identity("duck", 1))]}
    assert check([made], log(0, 1), [reader]) == []
    [wrong] = check([made], log(0, 2), [reader])
    assert "was read at 1" in wrong
    [wrong] = check([made], log(0), [reader])
    assert "was read at 1, where None is now" in wrong


def test_a_gap_between_offsets_is_found() -> None:
    found = {PLACE: [Found(0, Identity("duck", 0)), Found(2, Identity("duck", 1))]}
    [wrong] = check([account("at_most_once", {}, 2)], found)
    assert "offset 2 where 1 was due" in wrong


@pytest.mark.parametrize("size", [40, 1_000, 200_000])
def test_a_record_is_known_by_its_value_and_one_wrong_byte_is_noticed(size: int) -> None:
    identity = Identity("duck", 1_234_567)
    value = value_of(identity, size)
    assert len(value) == size
    assert identify(value) == identity
    for wrong in (None, b"", value[:-1], value + b"x", value[:-1] + bytes([value[-1] ^ 1])):
        with pytest.raises(NotOurs):
            identify(wrong)
