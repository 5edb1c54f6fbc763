"""Read the setting `topic_defaults`, from text and from a TOML table.

As text, as options and environment variables have it:

    PATTERN:SETTING=VALUE,SETTING=VALUE;PATTERN:SETTING=VALUE

In a settings file a pattern is a table:

    [topic_defaults."logs.*"]
    keep_for_ms = 86400000

Values are written as in Kafka's topic configs: -1 means no bound.
"""

from __future__ import annotations

from collections.abc import Iterable

from quackmq import limits
from quackmq.errors import InvalidRequest
from quackmq.model.policy import format_setting, parse_setting
from quackmq.model.topic_defaults import PolicySettings, check_topic_default

#: Patterns with their settings.
TopicDefaultPairs = tuple[tuple[str, PolicySettings], ...]


def parse_topic_defaults(text: str) -> TopicDefaultPairs:
    """Parse the text form. Raises ValueError with a phrase that continues "the value ..."."""
    defaults: dict[str, PolicySettings] = {}
    for entry in filter(None, (each.strip() for each in text.split(";"))):
        pattern, colon, assignments = entry.partition(":")
        pattern = pattern.strip()
        if not colon:
            raise ValueError(f"has no colon in {entry!r}: write PATTERN:SETTING=VALUE,…")
        if pattern in defaults:
            raise ValueError(f"names the pattern {pattern!r} twice")
        try:
            defaults[pattern] = parse_assignments(assignments.split(","))
            check_topic_default(pattern, defaults[pattern])
        except InvalidRequest as error:
            raise ValueError(f"is invalid: {error}") from None
    if len(defaults) > limits.TOPIC_DEFAULTS:
        raise ValueError(f"has {len(defaults)} patterns: use at most {limits.TOPIC_DEFAULTS}")
    return tuple(defaults.items())


def parse_assignments(words: Iterable[str]) -> PolicySettings:
    """Parse words of the form SETTING=VALUE. Raises InvalidRequest, usually InvalidPolicy."""
    settings: dict[str, object] = {}
    for word in filter(None, (each.strip() for each in words)):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            raise InvalidRequest(f"{word[:100]!r} has no value: write SETTING=VALUE")
        if name in settings:
            raise InvalidRequest(f"{name[:100]} is given twice")
        settings[name] = parse_setting(name, value)
    return settings


def format_toml_table(table: dict[str, object]) -> str:
    """Return the text form of a TOML table. Raises ValueError for a table of another shape."""
    entries = []
    for pattern, settings in table.items():
        if not isinstance(settings, dict):
            raise ValueError(
                f"needs a table for each pattern of names, and {pattern!r} is none: write "
                f'[topic_defaults."PATTERN"] above the settings, for example [topic_defaults."*"]'
            )
        entries.append(f"{pattern}:{_format_assignments(settings)}")
    return ";".join(entries)


def _format_assignments(settings: dict[str, object]) -> str:
    """Return settings from a TOML table in the form of the command line: NAME=VALUE,… . Raise
    ValueError for a value of another type."""
    assignments = []
    for name, value in settings.items():
        if not isinstance(value, bool | int | str):
            raise ValueError(f"has a value for {name} that is no text, number or truth value")
        assignments.append(f"{name}={value if isinstance(value, str) else format_setting(value)}")
    return ",".join(assignments)
