"""The parts that a consumer group is made of: deadlines, and what a subscription says."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quackmq.groups import limits as groups_limits
from quackmq.groups.classic.subscription_metadata import subscribed_topics
from quackmq.groups.deadlines import Deadlines
from quackmq.groups.states import NEXT_STATES, RULES, GroupState
from tests.groups.classic_stage import subscription
from tests.kit.tables import each

KEYS = st.sampled_from("abcd")
TIMES = st.integers(0, 50)


# --- deadlines ------------------------------------------------------------------------------------


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("set"), KEYS, TIMES),
            st.tuples(st.just("drop"), KEYS, TIMES),
            st.tuples(st.just("due"), KEYS, TIMES),
        ),
        max_size=60,
    )
)
def test_deadlines_are_due_when_a_plain_dictionary_says_so(
    steps: list[tuple[str, str, int]],
) -> None:
    deadlines, plain = Deadlines(), dict[str, int]()
    for action, key, time_ms in steps:
        if action == "set":
            deadlines.set(key, time_ms)
            plain[key] = time_ms
        elif action == "drop":
            deadlines.drop(key)
            plain.pop(key, None)
        else:
            due = {name for name, at_ms in plain.items() if at_ms <= time_ms}
            assert sorted(deadlines.pop_expired(time_ms)) == sorted(due)
            for name in due:
                del plain[name]
        assert {name for name in "abcd" if deadlines.has(name)} == plain.keys()
        assert (deadlines.next_ms is None) == (not plain)
        if deadlines.next_ms is not None:
            assert deadlines.next_ms <= min(plain.values())


def test_what_is_dropped_and_set_again_does_not_pile_up() -> None:
    deadlines = Deadlines()
    for number in range(100_000):
        deadlines.set(str(number), number)
        deadlines.drop(str(number))
    for number in range(100_000):
        deadlines.set("one", 100_000 - number)
    assert len(deadlines._heap) < 1_000
    assert deadlines.pop_expired(1) == ["one"]


def test_a_deadline_that_moves_on_does_not_touch_the_heap() -> None:
    deadlines = Deadlines()
    for time_ms in range(1_000):
        deadlines.set("one", time_ms)
    assert len(deadlines._heap) == 1
    assert deadlines.pop_expired(998) == []
    assert deadlines.pop_expired(999) == ["one"]


# --- the tables -----------------------------------------------------------------------------------


def test_every_state_with_members_has_its_rules_and_its_followers() -> None:
    of_the_newer_kind = {GroupState.ASSIGNING, GroupState.RECONCILING}
    classic = set(GroupState) - {GroupState.DEAD} - of_the_newer_kind
    assert set(RULES) == classic - {GroupState.EMPTY}
    assert set(NEXT_STATES) == classic
    assert all(state in NEXT_STATES for states in NEXT_STATES.values() for state in states)


# --- subscriptions --------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 1, 2, 3, 99])
def test_a_subscription_of_any_version_names_its_topics(version: int) -> None:
    said = subscription("news", "weather", version=version, user_data=b"what they please")
    assert subscribed_topics([said]) == frozenset({"news", "weather"})


def test_subscriptions_are_added_up() -> None:
    said = [subscription("a", "b"), subscription(), subscription("b", "c")]
    assert subscribed_topics(said) == frozenset("abc")
    assert subscribed_topics([]) == frozenset()


@each(
    "said",
    [
        b"",
        b"\x00",
        struct.pack(">hi", -1, 0),
        struct.pack(">hi", 0, -1),
        struct.pack(">hi", 0, 1),
        struct.pack(">hi", 0, 2**31 - 1),
        struct.pack(">hih", 0, 1, -1),
        struct.pack(">hih", 0, 1, 5) + b"four",
        struct.pack(">hih", 0, 1, 1) + b"\xff",
    ],
)
def test_words_that_are_no_subscription_are_told_as_such(said: bytes) -> None:
    assert subscribed_topics([subscription("news"), said]) is None


def test_more_topics_than_anybody_reads_are_not_counted_out() -> None:
    most = groups_limits.GROUP_SUBSCRIBED_TOPICS
    said = struct.pack(">hi", 0, most) + b"\0\0" * most
    assert subscribed_topics([said]) == frozenset({""})
    assert subscribed_topics([said, subscription("one more")]) is None


@given(st.binary(max_size=64))
def test_any_bytes_are_a_subscription_or_none(said: bytes) -> None:
    topics = subscribed_topics([said])
    assert topics is None or all(isinstance(topic, str) for topic in topics)


@given(st.binary(max_size=40), st.integers(0, 20))
def test_a_subscription_cut_short_names_no_topics(user_data: bytes, cut: int) -> None:
    said = subscription("news", "weather", user_data=user_data)
    names = len(subscription("news", "weather")) - 4
    whole = subscribed_topics([said[: names + cut]])
    assert whole == frozenset({"news", "weather"})
    assert subscribed_topics([said[: max(names - 1 - cut, 0)]]) is None
