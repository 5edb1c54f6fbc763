"""Settings of new topics by name pattern: which patterns match, and which of them wins."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quackmq import limits
from quackmq.errors import InvalidPattern, InvalidPolicy
from quackmq.model.policy import (
    POLICY_SETTINGS,
    Policy,
    WhenFull,
    check_setting,
    format_setting,
    parse_setting,
)
from quackmq.model.topic_defaults import NamePolicies, check_topic_default
from tests.kit.tables import each


@each(
    ("pattern", "name", "is_match"),
    [
        ("*", "anything", True),
        ("logs.*", "logs.", True),
        ("logs.*", "logs.a.b", True),
        ("logs.*", "logsxa", False),
        ("logs.*", "old.logs.a", False),
        ("logs.?", "logs.a", True),
        ("logs.?", "logs.", False),
        ("logs.?", "logs.ab", False),
        ("logs", "logs", True),
        ("logs", "Logs", False),
        ("logs", "logs2", False),
        ("*-?-*", "a-b-c", True),
    ],
)
def test_a_star_is_any_characters_and_a_question_mark_is_one(
    pattern: str, name: str, is_match: bool
) -> None:
    policies = NamePolicies(Policy(), {pattern: {"ephemeral": True}})
    assert policies.policy_for(name).ephemeral is is_match


@each(
    ("patterns", "winner"),
    [
        (("*", "logs.*"), "logs.*"),
        (("logs.*", "logs.app.*"), "logs.app.*"),
        (("logs.app.*", "logs.app.web"), "logs.app.web"),
        (("*logs.app.web", "logs.app.web"), "logs.app.web"),
        (("logs.app.web*", "logs.app.web"), "logs.app.web"),
        (("logs.app.we?", "logs.app.w*"), "logs.app.we?"),
        (("logs.*.web", "logs.a*"), "logs.*.web"),
        (("logs.a*", "logs.*b"), "logs.a*"),
        (("*.app.*", "logs.*p*"), "logs.*p*"),
    ],
)
def test_of_two_patterns_that_set_the_same_the_more_specific_wins(
    patterns: tuple[str, str], winner: str
) -> None:
    for order in (patterns, patterns[::-1]):
        rules = {pattern: {"keep_bytes": len(pattern) * 100} for pattern in order}
        policy = NamePolicies(Policy(), rules).policy_for("logs.app.web")
        assert policy.keep_bytes == len(winner) * 100


def test_each_setting_comes_from_the_most_specific_pattern_that_has_it() -> None:
    policies = NamePolicies(
        Policy(keep_bytes=1, batch_bytes=9),
        {
            "*": {"needs_subscriber": True, "keep_bytes": 2, "keep_for_ms": 2},
            "logs.*": {"keep_for_ms": 3, "keep_bytes": None},
            "news": {"needs_subscriber": False},
        },
    )
    assert policies.policy_for("logs.a") == Policy(
        needs_subscriber=True, keep_for_ms=3, keep_bytes=None, batch_bytes=9
    )
    assert policies.policy_for("news") == Policy(keep_for_ms=2, keep_bytes=2, batch_bytes=9)


def test_without_a_matching_pattern_the_policy_is_the_default_itself() -> None:
    base = Policy(keep_bytes=1)
    assert NamePolicies(base, {"logs.*": {"ephemeral": True}}).policy_for("news") is base


def test_a_pattern_of_many_stars_is_matched_at_once() -> None:
    """By backtracking this would take longer than the universe is old."""
    policies = NamePolicies(Policy(), {"*a" * 120: {"ephemeral": True}})
    assert not policies.policy_for("a" * 248 + "b").ephemeral
    assert policies.policy_for("a" * 249).ephemeral


@given(st.text("ab.*?", min_size=1, max_size=8), st.text("ab.", max_size=8))
def test_patterns_are_globs(pattern: str, name: str) -> None:
    policies = NamePolicies(Policy(), {pattern: {"ephemeral": True}})
    assert policies.policy_for(name).ephemeral is fnmatchcase(name, pattern)


@each("pattern", ["", "a b", "a/b", "[ab]", "ü", "a\n", "x" * (limits.TOPIC_NAME_CHARS + 1)])
def test_a_pattern_that_no_name_has_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidPattern, match="is not a pattern of topic names"):
        check_topic_default(pattern, {"ephemeral": True})
    check_topic_default("x" * limits.TOPIC_NAME_CHARS, {"ephemeral": True})


@each(
    ("settings", "why"),
    [
        ({}, "set nothing"),
        ({"need_subscriber": True}, "did you mean 'needs_subscriber'"),
        ({"quack": 1}, "use one of archive_after_live_ms, archive_after_ms"),
        ({"needs_subscriber": 1}, "use true or false"),
        ({"keep_bytes": -1}, "whole number from 0"),
        ({"when_full": "explode"}, "use one of archive, wait, wait_until_consumed, refuse"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidPolicy, match=why):
        check_topic_default("*", settings)


def test_every_setting_is_read_back_from_its_text() -> None:
    for policy in (Policy(), Policy(needs_subscriber=True, when_full=WhenFull.WAIT, keep_bytes=7)):
        for name in POLICY_SETTINGS:
            value = getattr(policy, name)
            check_setting(name, value)
            assert parse_setting(name, format_setting(value)) == value
