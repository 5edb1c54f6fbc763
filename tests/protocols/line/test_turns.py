"""Whose turn it is: round the ready topics, and first those that are preferred."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quackmq.protocols.line.turns import Turns


def turns_of(*ready: int) -> Turns:
    turns = Turns()
    for topic in ready:
        turns.add(topic)
    return turns


def test_topics_take_turns_in_their_order_however_they_became_ready() -> None:
    turns = turns_of(2, 0, 1, 0, 2)
    assert [turns.next() for _ in range(3)] == [0, 1, 2]
    assert not turns.ready


def test_after_a_topic_comes_the_next_one_and_not_the_first_to_become_ready() -> None:
    turns = turns_of(0)
    assert turns.next() == 0
    turns.add(0)
    turns.add(1)
    assert [turns.next(), turns.next()] == [1, 0]


def test_a_preferred_topic_comes_first_once_and_the_turn_goes_on_behind_it() -> None:
    turns = turns_of(0, 1, 2, 3)
    turns.prefer(2)
    assert [turns.next() for _ in range(4)] == [2, 3, 0, 1]
    assert not turns.ready
    turns.prefer(1)
    assert turns.ready and turns.next() == 1, "it need not be ready before"
    turns.add(1)
    turns.add(2)
    assert turns.next() == 2, "once"


@given(st.lists(st.integers(0, 6)), st.integers(1, 40))
def test_no_topic_is_served_twice_while_another_one_waits(more: list[int], rounds: int) -> None:
    turns = turns_of(3, 5)
    waits: dict[int, set[int]] = {3: set(), 5: set()}
    arrivals = iter(more)
    for _ in range(rounds):
        if not turns.ready:
            return
        served = turns.next()
        del waits[served]
        for others in waits.values():
            assert served not in others, "a waiting topic was passed over twice"
            others.add(served)
        for topic in (served, next(arrivals, served)):
            turns.add(topic)
            waits.setdefault(topic, set())
