"""Policies by name pattern: which settings a new topic gets if its creator names none. Pure.

A pattern is the name of a topic in which `*` stands for any characters, also for none, and `?` for
one character. A pattern sets some settings of a policy. If several patterns match a name, each
setting comes from the most specific pattern that sets it. Of two patterns, the more specific one is

1. the one with more characters that stand for themselves;
2. then the one with fewer `*`, so that an exact name comes before all others;
3. then the one that comes later in the alphabet.

Settings that no matching pattern sets come from the broker's default policy.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from quackmq import limits as shared_limits
from quackmq.errors import InvalidPattern, InvalidPolicy
from quackmq.model.policy import Policy, check_setting

#: Some settings of a policy with their values, by name.
PolicySettings = Mapping[str, Any]

_PATTERN: Final = re.compile(r"[A-Za-z0-9._*?-]+")


def check_topic_default(pattern: str, settings: PolicySettings) -> None:
    """Raise InvalidPattern for a pattern that matches no topic's name, and InvalidPolicy for an
    unknown setting, an invalid value, or no setting at all."""
    most_chars = shared_limits.TOPIC_NAME_CHARS
    if len(pattern) > most_chars or _PATTERN.fullmatch(pattern) is None:
        raise InvalidPattern(
            f"{pattern[:most_chars]!r} is not a pattern of topic names: use 1 to {most_chars} "
            "letters, digits, '.', '_' and '-', with * for any characters and ? for one"
        )
    if not settings:
        raise InvalidPolicy(f"the defaults of {pattern} set nothing: name at least one setting")
    for name, value in settings.items():
        check_setting(name, value)


class NamePolicies:
    """The policy of a new topic, by its name. Immutable."""

    __slots__ = ("_base", "_rules")

    def __init__(
        self, base: Policy, settings_by_pattern: Mapping[str, PolicySettings] | None = None
    ) -> None:
        """`base` is the policy of names that no pattern matches."""
        self._base = base
        #: The most specific pattern is last: its settings replace those of the others.
        self._rules: list[tuple[Callable[[str], object], PolicySettings]] = [
            (_compile(pattern), settings)
            for pattern, settings in sorted(
                (settings_by_pattern or {}).items(), key=lambda rule: _specificity(rule[0])
            )
        ]

    def policy_for(self, name: str) -> Policy:
        """Return the policy that a topic of this name gets."""
        settings: dict[str, Any] = {}
        for matches, rule in self._rules:
            if matches(name):
                settings |= rule
        return dataclasses.replace(self._base, **settings) if settings else self._base


def _specificity(pattern: str) -> tuple[int, int, str]:
    """Return a key by which patterns are sorted, the most specific one last."""
    stars = pattern.count("*")
    return len(pattern) - stars - pattern.count("?"), -stars, pattern


def _compile(pattern: str) -> Callable[[str], object]:
    # `fnmatch` writes expressions that never try one part of a name twice: matching is linear.
    return re.compile(fnmatch.translate(pattern)).match
