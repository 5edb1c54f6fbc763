"""The checker of histories tells possible ones from impossible ones."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.kit import effort
from tests.simulation.linearizable import Operation, final_states


def put(value: str, began: int, ended: float, *, unknown: bool = False) -> Operation[str]:
    return Operation(f"put {value}", began, lambda _: value, ended, unknown)


def get(value: str, began: int, ended: float) -> Operation[str]:
    return Operation(f"get {value}", began, lambda now: now if now == value else None, ended)


def swap(old: str, new: str, began: int, ended: float, *, unknown: bool = False) -> Operation[str]:
    return Operation(
        f"{old} to {new}", began, lambda now: new if now == old else None, ended, unknown
    )


def test_operations_one_after_the_other_have_one_outcome() -> None:
    assert final_states("", [put("a", 1, 2), get("a", 3, 4), put("b", 5, 6)]) == {"b"}


def test_a_stale_read_is_impossible() -> None:
    assert not final_states("", [put("a", 1, 2), put("b", 3, 4), get("a", 5, 6)])


def test_a_read_beside_a_write_may_see_either() -> None:
    for seen in ("", "a"):
        assert final_states("", [put("a", 1, 4), get(seen, 2, 3)]) == {"a"}
    assert not final_states("", [put("a", 1, 4), get("b", 2, 3)])


def test_what_was_seen_once_is_not_gone_again() -> None:
    beside = [put("a", 1, 8), get("a", 2, 3)]
    assert final_states("", [*beside, get("a", 4, 5)])
    assert not final_states("", [*beside, get("", 4, 5)])


def test_of_two_swaps_from_one_value_only_one_succeeds() -> None:
    assert not final_states("", [swap("", "a", 1, 4), swap("", "b", 2, 3)])
    assert final_states("", [swap("", "a", 1, 4), swap("a", "b", 2, 3)]) == {"b"}


def test_an_unknown_operation_may_have_happened_or_not() -> None:
    cut_short = put("a", 1, 5, unknown=True)
    assert final_states("", [cut_short]) == {"", "a"}
    assert final_states("", [cut_short, get("a", 6, 7)]) == {"a"}
    assert final_states("", [cut_short, get("", 6, 7)]) == {""}


def test_an_unknown_operation_does_not_happen_after_the_crash() -> None:
    history = [put("a", 1, 5, unknown=True), get("", 6, 7), get("a", 8, 9)]
    assert not final_states("", history)


@pytest.mark.parametrize("seed", range(effort.of(30)))
def test_it_agrees_with_trying_all_orders(seed: int) -> None:
    source = random.Random(seed)
    history: list[Operation[str]] = []
    for _ in range(5):
        began, ended = sorted(source.sample(range(20), 2))
        kind = source.choice((put, get))
        history.append(kind(source.choice("ab"), began, ended))

    def outcome(order: tuple[Operation[str], ...]) -> str | None:
        for early, late in itertools.combinations(order, 2):
            if late.ended < early.began:
                return None
        value: str | None = "a"
        for operation in order:
            assert value is not None
            value = operation.apply(value)
            if value is None:
                return None
        return value

    expected = {outcome(order) for order in itertools.permutations(history)} - {None}
    assert final_states("a", history) == expected
