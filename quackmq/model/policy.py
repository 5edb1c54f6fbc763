"""Topic policies: what a topic keeps, for how long, and what it does when it is full. Pure.

The names are the same everywhere. As Kafka topic configs they have the prefix `quackmq.`. Three of
them also have Kafka's name: `keep_for_ms` is `retention.ms`, `keep_bytes` is `retention.bytes`, and
`batch_bytes`, the largest batch that is accepted, is `max.message.bytes`.
None means "for ever" or "without bound"; as a config that is -1.

Every `Policy` object is valid: constructing an invalid one raises InvalidPolicy. The functions at
the end apply a policy to facts about one partition:

    first          old_before, surplus_before      expired_before              next
      |------------------|------------------------------|-----------------------|
      | may be trimmed   | kept, no longer live         | live                  |

Only four settings ever delete an entry, in whichever tier it lies: age (`keep_for_ms`), size
(`keep_bytes`), consumption (`keep_until_consumed`) and `drop_oldest`. The first three stop at
`held_from`, the lowest cursor of the topic's subscriptions; `drop_oldest` does not. A hold has its
bounds, `hold_for_ms` and `hold_bytes`: entries before `unheld_before` wait for no subscription.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

from quackmq import limits as shared_limits
from quackmq.errors import InvalidPolicy
from quackmq.model import limits
from quackmq.model.partitioning import Partitioner

CONFIG_PREFIX: Final = "quackmq."
#: Kafka's names for some of our settings.
CONFIG_ALIASES: Final = {
    "retention.ms": "keep_for_ms",
    "retention.bytes": "keep_bytes",
    "max.message.bytes": "batch_bytes",
}
#: The value of a Kafka config that means "for ever" or "without bound".
_UNBOUNDED: Final = "-1"
#: The smallest value of each number. Entries that are kept for 0 ms, or within 0 bytes, are deleted
#: at the next cleaning.
_LEAST_BY_SETTING: Final = {
    "live_for_ms": 1,
    "live_entries": 1,
    "keep_for_ms": 0,
    "keep_bytes": 0,
    "hold_for_ms": 0,
    "hold_bytes": 0,
    "archive_after_ms": 0,
    "archive_bytes": 1,
    "archive_after_live_ms": 0,
    "batch_bytes": 1,
    "entry_bytes": 1,
}
#: The largest signed 64-bit number: values go through Kafka's protocol and into files.
_GREATEST_NUMBER: Final = 2**63 - 1
#: No topic accepts larger batches than the broker, and an entry lies in a batch.
_GREATEST_BY_SETTING: Final = {
    "batch_bytes": shared_limits.BATCH_BYTES,
    "entry_bytes": shared_limits.BATCH_BYTES,
}
_BOOLEANS: Final = {"true": True, "false": False}
#: Characters of a wrong name that an error message quotes.
_SHOWN_CHARS: Final = 100
#: A config of Kafka that we do not have, such as local.retention.ms, is no misspelling of ours.
_SIMILARITY: Final = 0.85

#: The description of each setting, for users.
POLICY_DOCUMENTATION: Final = {
    "live_for_ms": "How long an entry is live after its append.",
    "live_entries": "The most entries of a partition that are live (MAXENTRIES).",
    "when_full": "What happens to a publisher when live_entries entries are live: the oldest "
    "leave the live tail (archive), the publisher waits (wait), it waits until every subscription "
    "has consumed the oldest (wait_until_consumed), its publish is refused (refuse), or the oldest "
    "are deleted (drop_oldest).",
    "keep_for_ms": "Entries are deleted at this age, counted from their append.",
    "keep_bytes": "The oldest entries of a partition are deleted when its log and its archive "
    "together are larger than this.",
    "keep_until_consumed": "Entries are deleted when every subscription has consumed them.",
    "hold_for_ms": "How long after its append an entry is held for subscriptions that have not "
    "consumed it. Later it may be deleted; the subscription's next answer then names the lost "
    "offsets.",
    "hold_bytes": "The most bytes of a partition, the newest, that are held for subscriptions.",
    "archive_after_ms": "Entries move from the log to the archive at this age, counted from their "
    "append.",
    "archive_bytes": "Entries move to the archive when this many bytes of a partition's log are "
    "ready.",
    "archive_after_live_ms": "Entries that are no longer live, by live_for_ms or live_entries, "
    "move to the archive within this time.",
    "needs_subscriber": "Publishing is refused while the topic has no subscription.",
    "ephemeral": "The topic is created with its first subscription and deleted with its last.",
    "batch_bytes": "The largest batch that is accepted.",
    "entry_bytes": "The largest entry that is accepted: the bytes of its value (QUACKSIZE).",
    "partitioner": "How a key chooses its partition: by the hash of the Java client (murmur2), by "
    "librdkafka's default (crc32), or as QuackMQ did before topics had this setting (legacy).",
}


class WhenFull(StrEnum):
    """What happens to a publisher when `live_entries` entries are live."""

    ARCHIVE = "archive"  # the oldest leave the live tail and stay in the history
    WAIT = "wait"
    #: As `wait`, but entries that every subscription has consumed do not make a topic full.
    WAIT_UNTIL_CONSUMED = "wait_until_consumed"
    REFUSE = "refuse"
    DROP_OLDEST = "drop_oldest"


@dataclass(frozen=True, slots=True)
class Policy:
    live_for_ms: int | None = None
    live_entries: int | None = None
    when_full: WhenFull = WhenFull.ARCHIVE
    keep_for_ms: int | None = None
    keep_bytes: int | None = None
    keep_until_consumed: bool = False
    hold_for_ms: int | None = None
    hold_bytes: int | None = None
    archive_after_ms: int | None = limits.ARCHIVE_AFTER_MS
    archive_bytes: int | None = limits.ARCHIVE_READY_BYTES
    archive_after_live_ms: int | None = limits.ARCHIVE_AFTER_LIVE_MS
    needs_subscriber: bool = False
    ephemeral: bool = False
    batch_bytes: int | None = None
    entry_bytes: int | None = None
    partitioner: Partitioner = Partitioner.MURMUR2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name), field.name)

    @classmethod
    def from_configs(cls, configs: Mapping[str, str | None], base: Policy | None = None) -> Policy:
        """Return `base` (the default policy, unless given) with these configs set. A value of None
        resets a config to its default. Raises InvalidPolicy for an unknown name, an invalid value,
        and two names of one setting with different values."""
        changes: dict[str, Any] = {}
        for name, text in configs.items():
            field = _find_field(name)
            value = field.default if text is None else _parse(name, field.default, text)
            _check(field, value, name)
            if changes.setdefault(field.name, value) != value:
                raise InvalidPolicy(
                    f"{name} is given under two names with different values: give one of them"
                )
        return dataclasses.replace(base if base is not None else cls(), **changes)

    def to_configs(self) -> dict[str, str]:
        """Return every config with its value, under our names and under Kafka's."""
        configs = {
            CONFIG_PREFIX + field.name: _format_value(getattr(self, field.name))
            for field in dataclasses.fields(self)
        }
        for alias, name in CONFIG_ALIASES.items():
            configs[alias] = _format_value(getattr(self, name))
        return configs

    # --- duties of the broker ------------------------------------------------------------------

    @property
    def refuses_or_waits(self) -> bool:
        """Whether a publish must be checked for room first."""
        return self.live_entries is not None and (
            self.waits_when_full or self.when_full is WhenFull.REFUSE
        )

    @property
    def waits_when_full(self) -> bool:
        """Whether publishers wait for room in a full topic."""
        return self.when_full in (WhenFull.WAIT, WhenFull.WAIT_UNTIL_CONSUMED)

    @property
    def drops_oldest(self) -> bool:
        """Whether the oldest entries are deleted when the topic is full."""
        return self.live_entries is not None and self.when_full is WhenFull.DROP_OLDEST

    @property
    def deletes_entries(self) -> bool:
        """Whether any entry of the topic is ever deleted automatically."""
        return (
            self.keep_for_ms is not None
            or self.keep_bytes is not None
            or self.keep_until_consumed
            or self.drops_oldest
        )

    @property
    def archives_entries(self) -> bool:
        """Whether any entry of the topic ever moves to the archive automatically."""
        if self.archive_after_ms is not None or self.archive_bytes is not None:
            return True
        has_live_bound = self.live_for_ms is not None or self.live_entries is not None
        return self.archive_after_live_ms is not None and has_live_bound

    @property
    def counts_entries(self) -> bool:
        """Whether published entries must be counted; if not, publishing costs nothing extra."""
        return self.refuses_or_waits or self.deletes_entries


class Facts(NamedTuple):
    """The facts by which a policy decides: the state of one partition at one moment."""

    first: int
    next: int
    #: Entries before it are at least `live_for_ms` old.
    expired_before: int = 0
    #: Entries before it are at least `keep_for_ms` old.
    old_before: int = 0
    #: The entries from it on still have `keep_bytes`.
    surplus_before: int = 0
    #: The lowest cursor of the topic's subscriptions; None without subscriptions.
    held_from: int | None = None
    #: Entries before it are held for no subscription: they exceed `hold_for_ms` or `hold_bytes`.
    unheld_before: int = 0


def trim_before(policy: Policy, facts: Facts) -> int:
    """Return the offset before which entries may be deleted; `facts.first` if none may."""
    before = max(
        facts.old_before if policy.keep_for_ms is not None else 0,
        facts.surplus_before if policy.keep_bytes is not None else 0,
    )
    if facts.held_from is not None:
        held_from = max(facts.held_from, facts.unheld_before)
        before = held_from if policy.keep_until_consumed else min(before, held_from)
    return min(max(before, _drop_before(policy, facts), facts.first), facts.next)


def live_entries(policy: Policy, facts: Facts) -> int:
    """Count the entries that make a topic full: those that are young enough to be live and may not
    be deleted yet. With `wait_until_consumed`, only those that a subscription has not consumed; a
    topic without subscriptions fills up."""
    start = trim_before(policy, facts)
    if policy.live_for_ms is not None:
        start = max(start, facts.expired_before)
    if policy.when_full is WhenFull.WAIT_UNTIL_CONSUMED and facts.held_from is not None:
        start = max(start, facts.held_from, facts.unheld_before)
    return max(0, facts.next - start)


def has_room(policy: Policy, facts: Facts, entries: int) -> bool:
    """Return whether `entries` more entries can be live."""
    if policy.live_entries is None:
        return True
    return live_entries(policy, facts) + entries <= policy.live_entries


def _drop_before(policy: Policy, facts: Facts) -> int:
    """Return where the log must begin so that at most `live_entries` are live. Entries too old to
    be live do not make a topic full; they stay."""
    if not policy.drops_oldest or policy.live_entries is None:
        return 0
    start = facts.next - policy.live_entries
    if policy.live_for_ms is not None and start <= facts.expired_before:
        return 0
    return max(0, start)


POLICY_SETTINGS: Final = frozenset(field.name for field in dataclasses.fields(Policy))


def check_setting(name: str, value: object) -> None:
    """Raise InvalidPolicy for an unknown setting of a policy, and for an invalid value."""
    _check(_find_setting(name), value, name)


def parse_setting(name: str, text: str) -> object:
    """Return the value of a setting that is written as text, as in a Kafka config. Raises
    InvalidPolicy for an unknown setting and an invalid value."""
    field = _find_setting(name)
    value = _parse(name, field.default, text)
    _check(field, value, name)
    return value


def format_setting(value: object) -> str:
    """Return the text of a value, which `parse_setting` parses."""
    return _format_value(value)


def number_bounds(name: str) -> tuple[int, int]:
    """Return the smallest and the largest value of a number in a policy."""
    return _LEAST_BY_SETTING[name], _GREATEST_BY_SETTING.get(name, _GREATEST_NUMBER)


# --- values and their text form ------------------------------------------------------------------


def _check(field: dataclasses.Field[Any], value: object, name: str) -> None:
    """Check a value of a field. Raises InvalidPolicy, which names the setting as the caller did."""
    default = field.default
    if isinstance(default, StrEnum):
        choices = type(default)
        if not isinstance(value, choices):
            raise InvalidPolicy(f"{name} cannot be {value!r}: use one of {', '.join(choices)}")
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            raise InvalidPolicy(f"{name} cannot be {value!r}: use true or false")
    elif value is not None:
        least, most = number_bounds(field.name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise InvalidPolicy(
                f"{name} cannot be {value!r}: use a whole number from {least} to {most}, "
                f"or nothing (as a config: {_UNBOUNDED}) for no bound"
            )


def _find_setting(name: str) -> dataclasses.Field[Any]:
    """Return the field of a setting. Raises InvalidPolicy."""
    for field in dataclasses.fields(Policy):
        if field.name == name:
            return field
    settings = sorted(POLICY_SETTINGS)
    near = difflib.get_close_matches(name[:_SHOWN_CHARS], settings, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(settings)}"
    raise InvalidPolicy(f"a topic has no setting {name[:_SHOWN_CHARS]!r}: {hint}")


def _find_field(config: str) -> dataclasses.Field[Any]:
    """Return the field of a config, by our name or Kafka's. Raises InvalidPolicy."""
    fields = {field.name: field for field in dataclasses.fields(Policy)}
    name = CONFIG_ALIASES.get(config)
    if name is None and config.startswith(CONFIG_PREFIX):
        name = config.removeprefix(CONFIG_PREFIX)
    if name is None or name not in fields:
        config_names = [*(CONFIG_PREFIX + name for name in fields), *CONFIG_ALIASES]
        near = difflib.get_close_matches(
            config[:_SHOWN_CHARS], config_names, n=1, cutoff=_SIMILARITY
        )
        near = [CONFIG_PREFIX + config] if config in fields else near
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(config_names)}"
        raise InvalidPolicy(f"unknown config {config[:_SHOWN_CHARS]!r}: {hint}")
    return fields[name]


def _parse(name: str, default: object, text: str) -> object:
    """Parse a config's text; `_check` checks its bounds."""
    if isinstance(default, StrEnum):
        choices = type(default)
        if text not in list(choices):
            raise InvalidPolicy(f"{name} cannot be {text[:100]!r}: use one of {', '.join(choices)}")
        return choices(text)
    if isinstance(default, bool):
        if text.lower() not in _BOOLEANS:
            raise InvalidPolicy(f"{name} cannot be {text[:100]!r}: use true or false")
        return _BOOLEANS[text.lower()]
    if text == _UNBOUNDED:
        return None
    # 20 digits exceed 64 bits, and int() of very many digits is slow.
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidPolicy(
            f"{name} cannot be {text[:100]!r}: use a whole number, or {_UNBOUNDED} for no bound"
        )
    return int(text)


def _format_value(value: object) -> str:
    """Return the text of a value as a config."""
    if value is None:
        return _UNBOUNDED
    return str(value).lower() if isinstance(value, bool) else str(value)
