"""Regular expressions from clients: whole names, RE2's syntax, and never too long."""

from __future__ import annotations

import asyncio

import pytest

from quackmq import limits
from quackmq.broker import limits as broker_limits
from quackmq.broker.groups.topic_patterns import TopicPatterns, find_matches
from quackmq.errors import GroupLoading, InvalidPattern
from tests.groups.consumer_stage import Topics
from tests.kit.tables import each

#: What keeps a backtracking matcher busy for ever.
HOSTILE = [
    "(a+)+",
    "(a|a)*",
    "(a|aa)+",
    "(.*a){20}",
    "(a?){100}a{100}",
    "^(([a-z])+.)+[A-Z]([a-z])+$",
]


@each(
    ("pattern", "names"),
    [
        ("news", {"news"}),
        ("new.*", {"news", "newsletter", "new.s"}),
        ("^new.*$", {"news", "newsletter", "new.s"}),
        (r"new\.s", {"new.s"}),
        ("(?i)NEWS", {"news"}),
        ("news|weather", {"news", "weather"}),
        (".*", {"news", "newsletter", "new.s", "weather"}),
        ("w", set()),
        ("", set()),
    ],
)
def test_a_pattern_fits_whole_names(pattern: str, names: set[str]) -> None:
    assert find_matches(pattern, ["news", "newsletter", "new.s", "weather"]) == names


@each(
    "pattern", ["(", "[a", "a**", "(?=news)", r"(a)\1", "a{1001}", "((a{100}){100}){100}", "\ud800"]
)
def test_what_is_no_pattern_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(InvalidPattern, match="invalid regular expression"):
        find_matches(pattern, ["news"])


@each("pattern", HOSTILE)
def test_a_hostile_pattern_is_tried_like_any_other(pattern: str) -> None:
    names = ["a" * limits.TOPIC_NAME_CHARS, "a" * (limits.TOPIC_NAME_CHARS - 1) + "b"]
    find_matches(pattern, names)


def test_a_pattern_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_limits, "PATTERN_CPU_MS", -1)
    with pytest.raises(InvalidPattern, match="takes more than"):
        find_matches("news", ["news"])


async def test_what_matched_says_of_which_moment_it_is() -> None:
    topics = Topics(news=1)
    patterns = TopicPatterns(topics)
    (matched,) = (await patterns.match(["n.*"])).values()
    assert (matched.names, matched.changes) == ({"news"}, topics.changes)
    patterns.close()


async def test_not_too_many_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_limits, "PATTERN_WAITERS", 1)
    patterns = TopicPatterns(Topics(news=1))
    first = asyncio.create_task(patterns.match(["n.*"]))
    await asyncio.sleep(0)
    with pytest.raises(GroupLoading):
        await patterns.match(["n.*"])
    await first
    await patterns.match(["n.*"])
    patterns.close()
