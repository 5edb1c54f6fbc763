"""Policies: what is one, how it is spelled, and what it decides."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quackmq.errors import InvalidPolicy
from quackmq.model.partitioning import Partitioner
from quackmq.model.policy import (
    POLICY_DOCUMENTATION,
    Facts,
    Policy,
    WhenFull,
    has_room,
    live_entries,
    trim_before,
)
from tests.kit.tables import each

NUMBERS = st.none() | st.integers(1, 2**63 - 1)
POLICIES = st.builds(
    Policy,
    live_for_ms=NUMBERS,
    live_entries=NUMBERS,
    when_full=st.sampled_from(WhenFull),
    keep_for_ms=NUMBERS,
    keep_bytes=NUMBERS,
    keep_until_consumed=st.booleans(),
    hold_for_ms=NUMBERS,
    hold_bytes=NUMBERS,
    archive_after_ms=NUMBERS,
    archive_bytes=NUMBERS,
    archive_after_live_ms=NUMBERS,
    needs_subscriber=st.booleans(),
    ephemeral=st.booleans(),
    batch_bytes=st.none() | st.integers(1, 2**24),
    entry_bytes=st.none() | st.integers(1, 2**24),
    partitioner=st.sampled_from(Partitioner),
)


# --- what is a policy ---------------------------------------------------------------------------


@each(
    "fields",
    [
        {"live_for_ms": 0},
        {"live_entries": 0},
        {"live_entries": -5},
        {"keep_for_ms": -1},
        {"keep_bytes": 2**63},
        {"hold_for_ms": -1},
        {"hold_bytes": "all"},
        {"archive_after_ms": -1},
        {"archive_bytes": 0},
        {"archive_after_live_ms": -1},
        {"batch_bytes": 0},
        {"batch_bytes": 16 * 1024 * 1024 + 1},
        {"entry_bytes": 0},
        {"entry_bytes": 16 * 1024 * 1024 + 1},
        {"live_for_ms": 1.5},
        {"live_for_ms": True},
        {"live_entries": "5"},
        {"when_full": "sometimes"},
        {"ephemeral": 1},
        {"needs_subscriber": None},
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidPolicy, match=next(iter(fields))):
        Policy(**fields)


def test_nothing_may_be_kept_at_all() -> None:
    assert Policy(keep_for_ms=0, keep_bytes=0).deletes_entries


@each(
    ("fields", "archives"),
    [
        ({}, True),
        ({"archive_after_ms": None}, True),
        ({"archive_bytes": None}, True),
        ({"archive_after_ms": None, "archive_bytes": None}, False),
        ({"archive_after_ms": None, "archive_bytes": None, "live_for_ms": 1}, True),
        ({"archive_after_ms": None, "archive_bytes": None, "live_entries": 1}, True),
    ],
)
def test_a_topic_is_archived_if_any_bound_applies_to_it(
    fields: dict[str, Any], archives: bool
) -> None:
    assert Policy(**fields).archives_entries is archives
    unbounded = {"archive_after_ms": None, "archive_bytes": None, "archive_after_live_ms": None}
    assert not Policy(**{**fields, **unbounded}).archives_entries


# --- as configs ---------------------------------------------------------------------------------


@given(POLICIES)
def test_a_policy_survives_being_spelled_as_configs(policy: Policy) -> None:
    assert Policy.from_configs(policy.to_configs()) == policy


def test_the_default_is_spelled_out() -> None:
    configs = Policy().to_configs()
    assert configs["quackmq.when_full"] == "archive"
    assert configs["quackmq.keep_for_ms"] == configs["retention.ms"] == "-1"
    assert configs["quackmq.keep_until_consumed"] == "false"
    assert configs["quackmq.hold_for_ms"] == configs["quackmq.hold_bytes"] == "-1"
    assert configs["quackmq.partitioner"] == "murmur2"
    assert len(configs) == 19


def test_kafkas_names_mean_ours() -> None:
    policy = Policy.from_configs(
        {"retention.ms": "1000", "retention.bytes": "-1", "max.message.bytes": "500"}
    )
    assert policy == Policy(keep_for_ms=1000, keep_bytes=None, batch_bytes=500)


def test_configs_change_a_policy_and_leave_the_rest() -> None:
    base = Policy(live_entries=5, keep_for_ms=7)
    changed = Policy.from_configs(
        {"quackmq.live_entries": None, "quackmq.when_full": "wait", "quackmq.ephemeral": "TRUE"},
        base,
    )
    assert changed == Policy(keep_for_ms=7, when_full=WhenFull.WAIT, ephemeral=True)


def test_two_names_of_one_thing_may_agree_and_not_disagree() -> None:
    agreeing = {"retention.ms": "5", "quackmq.keep_for_ms": "5"}
    assert Policy.from_configs(agreeing) == Policy(keep_for_ms=5)
    with pytest.raises(InvalidPolicy, match="different"):
        Policy.from_configs({"retention.ms": "5", "quackmq.keep_for_ms": "6"})


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InvalidPolicy, match="'segment.ms'.*quackmq.live_for_ms.*retention.bytes"):
        Policy.from_configs({"segment.ms": "1"})
    with pytest.raises(InvalidPolicy, match="quackmq.colour"):
        Policy.from_configs({"quackmq.colour": "blue"})
    with pytest.raises(InvalidPolicy, match="'live_for_ms': did you mean 'quackmq.live_for_ms'"):
        Policy.from_configs({"live_for_ms": "1"})
    with pytest.raises(InvalidPolicy, match="did you mean 'retention.ms'"):
        Policy.from_configs({"retentoin.ms": "1"})
    with pytest.raises(InvalidPolicy, match="'local.retention.ms': use one of"):
        Policy.from_configs({"local.retention.ms": "1"})


@each(
    ("name", "text"),
    [
        ("quackmq.live_for_ms", "soon"),
        ("quackmq.live_for_ms", ""),
        ("quackmq.live_for_ms", "-2"),
        ("quackmq.live_for_ms", "1e3"),
        ("quackmq.live_entries", "٣"),
        ("retention.ms", "9" * 5000),
        ("quackmq.live_entries", "0"),
        ("quackmq.when_full", "explode"),
        ("quackmq.ephemeral", "yes"),
    ],
)
def test_a_text_that_is_no_value_is_refused(name: str, text: str) -> None:
    with pytest.raises(InvalidPolicy):
        Policy.from_configs({name: text})


def test_every_policy_stands_in_the_document() -> None:
    document = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
    table = [line for line in document.splitlines() if line.startswith("| `")]
    missing = [
        name for name in POLICY_DOCUMENTATION if not any(f"`{name}`" in row for row in table)
    ]
    assert missing == []
    assert set(POLICY_DOCUMENTATION) == {field.name for field in dataclasses.fields(Policy)}


# --- what may be trimmed ------------------------------------------------------------------------


def test_by_default_nothing_ever_goes() -> None:
    facts = Facts(0, 100, expired_before=90, old_before=80, surplus_before=70, held_from=60)
    assert trim_before(Policy(), facts) == 0
    assert not Policy().counts_entries


def test_age_and_size_each_let_go() -> None:
    facts = Facts(5, 100, old_before=30, surplus_before=40)
    assert trim_before(Policy(keep_for_ms=1), facts) == 30
    assert trim_before(Policy(keep_bytes=1), facts) == 40
    assert trim_before(Policy(keep_for_ms=1, keep_bytes=1), facts) == 40


def test_subscriptions_hold_back_age_and_size() -> None:
    facts = Facts(5, 100, old_before=30, surplus_before=40, held_from=20)
    assert trim_before(Policy(keep_for_ms=1, keep_bytes=1), facts) == 20


def test_what_all_subscriptions_have_consumed_goes() -> None:
    policy = Policy(keep_until_consumed=True)
    assert trim_before(policy, Facts(5, 100, held_from=60)) == 60


def test_nothing_is_consumed_while_nobody_subscribes() -> None:
    assert trim_before(Policy(keep_until_consumed=True), Facts(5, 100)) == 5


def test_a_hold_has_its_bounds() -> None:
    facts = Facts(5, 100, old_before=60, surplus_before=70, held_from=20, unheld_before=30)
    assert trim_before(Policy(keep_for_ms=1, hold_for_ms=2), facts) == 30
    assert trim_before(Policy(keep_until_consumed=True, hold_bytes=2), facts) == 30
    ahead = facts._replace(held_from=40)
    assert trim_before(Policy(keep_until_consumed=True, hold_bytes=2), ahead) == 40
    assert trim_before(Policy(keep_for_ms=1, hold_for_ms=2), facts._replace(old_before=25)) == 25


def test_what_is_held_no_longer_is_kept_for_as_long_as_anything_else_keeps_it() -> None:
    facts = Facts(5, 100, held_from=20, unheld_before=90)
    assert trim_before(Policy(keep_for_ms=1, hold_for_ms=0), facts) == 5
    assert trim_before(Policy(hold_for_ms=0), facts) == 5
    assert trim_before(Policy(keep_until_consumed=True), Facts(5, 100, unheld_before=90)) == 5


def test_dropping_the_oldest_is_not_held_back() -> None:
    policy = Policy(live_entries=10, when_full=WhenFull.DROP_OLDEST)
    assert trim_before(policy, Facts(5, 100, held_from=20)) == 90
    assert trim_before(policy, Facts(95, 100, held_from=20)) == 95


def test_entries_that_have_expired_do_not_make_a_topic_full() -> None:
    policy = Policy(live_for_ms=1, live_entries=10, when_full=WhenFull.DROP_OLDEST)
    assert trim_before(policy, Facts(0, 100, expired_before=95)) == 0
    assert trim_before(policy, Facts(0, 100, expired_before=85)) == 90


@given(
    POLICIES,
    *[st.integers(0, 100)] * 5,
    st.none() | st.integers(0, 100),
)
def test_a_trim_stays_within_the_log(
    policy: Policy, first: int, entries: int, expired: int, old: int, surplus: int, held: int | None
) -> None:
    facts = Facts(first, first + entries, expired, old, surplus, held)
    assert first <= trim_before(policy, facts) <= first + entries


@given(POLICIES, *[st.integers(0, 100)] * 4, st.integers(0, 100))
def test_nothing_but_dropping_goes_beyond_a_subscription(
    policy: Policy, first: int, entries: int, old: int, surplus: int, held: int
) -> None:
    facts = Facts(first, first + entries, 0, old, surplus, held)
    if not policy.drops_oldest:
        assert trim_before(policy, facts) <= max(first, held)


# --- room ---------------------------------------------------------------------------------------


def test_live_entries_are_those_that_are_young_and_not_to_go() -> None:
    assert live_entries(Policy(), Facts(10, 100)) == 90
    assert live_entries(Policy(), Facts(10, 100, expired_before=70)) == 90
    assert live_entries(Policy(live_for_ms=1), Facts(10, 100, expired_before=70)) == 30
    assert live_entries(Policy(keep_until_consumed=True), Facts(10, 100, held_from=95)) == 5
    assert live_entries(Policy(live_for_ms=1), Facts(10, 20, expired_before=90)) == 0


def test_there_is_room_up_to_the_number_of_live_entries() -> None:
    policy = Policy(live_entries=10, when_full=WhenFull.REFUSE)
    assert has_room(policy, Facts(0, 7), 3)
    assert not has_room(policy, Facts(0, 7), 4)
    assert has_room(policy, Facts(7, 7), 10)
    assert has_room(Policy(), Facts(0, 10**9), 10**9)


def test_consumed_entries_make_no_topic_full_whose_publishers_wait_for_consumption() -> None:
    policy = Policy(live_entries=10, when_full=WhenFull.WAIT_UNTIL_CONSUMED)
    assert policy.waits_when_full and policy.refuses_or_waits and not policy.deletes_entries
    assert has_room(policy, Facts(0, 100, held_from=95), 5)
    assert not has_room(policy, Facts(0, 100, held_from=95), 6)
    assert has_room(policy, Facts(0, 100, held_from=0, unheld_before=95), 5), (
        "a hold has its bounds"
    )
    assert not has_room(policy, Facts(0, 10), 1), "without subscriptions the topic fills up"
    assert trim_before(policy, Facts(0, 100, held_from=95)) == 0, "and nothing is deleted"
    waits = Policy(live_entries=10, when_full=WhenFull.WAIT)
    assert not has_room(waits, Facts(0, 100, held_from=95), 5)


@each(
    ("policy", "counts"),
    [
        (Policy(), False),
        (Policy(live_for_ms=1), False),
        (Policy(live_entries=1), False),
        (Policy(when_full=WhenFull.WAIT), False),
        (Policy(archive_after_ms=1, archive_bytes=1), False),
        (Policy(ephemeral=True), False),
        (Policy(needs_subscriber=True), False),
        (Policy(live_entries=1, when_full=WhenFull.WAIT), True),
        (Policy(live_entries=1, when_full=WhenFull.REFUSE), True),
        (Policy(live_entries=1, when_full=WhenFull.DROP_OLDEST), True),
        (Policy(keep_for_ms=1), True),
        (Policy(keep_bytes=1), True),
        (Policy(keep_until_consumed=True), True),
    ],
)
def test_only_a_policy_that_must_count_does(policy: Policy, counts: bool) -> None:
    assert policy.counts_entries is counts
