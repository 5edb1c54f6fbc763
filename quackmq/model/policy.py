"""Topic policies: what a topic keeps, for how long, and what it does when it is full. Pure.

One spelling everywhere. As Kafka topic configs the names carry the prefix `quackmq.`; three of them
have a name of Kafka's as well: `keep_for_ms` is `retention.ms`, `keep_bytes` is `retention.bytes`,
and `batch_bytes`, the largest batch that is taken, is `max.message.bytes`.
None means "for ever" or "without bound"; as a config that is -1.

A `Policy` that exists is a sound one: whatever makes one raises InvalidPolicy otherwise. What a
policy means is said by the functions at the end, each a function of facts about one partition:

    first          old_before, surplus_before      expired_before              next
      |------------------|------------------------------|-----------------------|
      | may be trimmed   | kept, no longer live         | live                  |

Nothing but age by `keep_for_ms`, size by `keep_bytes`, consumption by `keep_until_consumed` and
`drop_oldest` ever lets go of an entry, in whichever tier it lies. The first three stop at
`held_from`, the least cursor of the topic's subscriptions; `drop_oldest` does not. A hold has its
bounds, `hold_for_ms` and `hold_bytes`: what lies before `unheld_before` waits for no subscription.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

from quackmq import limits as shared_limits
from quackmq.errors import InvalidPolicy
from quackmq.model import limits
from quackmq.model.partitioning import Partitioner

CONFIG_PREFIX: Final = "quackmq."
#: Kafka's names for some of ours.
CONFIG_ALIASES: Final = {
    "retention.ms": "keep_for_ms",
    "retention.bytes": "keep_bytes",
    "max.message.bytes": "batch_bytes",
}
#: How a Kafka config says "for ever" or "without bound".
_UNBOUNDED: Final = "-1"
#: The least that each number may be; 0 ms or 0 bytes kept means: gone at the next cleaning.
_LEAST: Final = {
    "live_for_ms": 1,
    "live_entries": 1,
    "keep_for_ms": 0,
    "keep_bytes": 0,
    "hold_for_ms": 0,
    "hold_bytes": 0,
    "archive_after_ms": 0,
    "archive_bytes": 1,
    "batch_bytes": 1,
}
#: What 64 bits with a sign hold: numbers go through Kafka's protocol and into files.
_MOST: Final = 2**63 - 1
#: No topic takes more than the broker does.
_MOST_OF: Final = {"batch_bytes": shared_limits.BATCH_BYTES}
_BOOLEANS: Final = {"true": True, "false": False}

#: What each of a policy's names means, for people.
POLICY_DOCUMENTATION: Final = {
    "live_for_ms": "An entry is live for so long after its append.",
    "live_entries": "So many entries of a partition are live at the most.",
    "when_full": "What happens to a publisher that meets live_entries live entries: the oldest "
    "leave the live tail (archive), it waits (wait), it is refused (refuse), or the oldest are "
    "let go of (drop_oldest).",
    "keep_for_ms": "Entries are let go of at this age, counted from their append.",
    "keep_bytes": "The oldest entries of a partition are let go of when its log and its archive "
    "together are larger than this.",
    "keep_until_consumed": "Entries are let go of when every subscription has consumed them.",
    "hold_for_ms": "For so long after its append an entry is held for subscriptions that have not "
    "consumed it; then they keep it no longer, and one that comes later is told what is gone.",
    "hold_bytes": "So many bytes of a partition, the newest, are held for subscriptions at most.",
    "archive_after_ms": "Entries go from the log to the archive at this age, counted from their "
    "append; with neither this nor archive_bytes they never do.",
    "archive_bytes": "Entries go to the archive when so many bytes of a partition's log are ready.",
    "needs_subscriber": "Nothing is taken while nobody subscribes to the topic.",
    "ephemeral": "The topic comes with its first subscription and goes with its last.",
    "batch_bytes": "The largest batch that is taken.",
    "partitioner": "How a key chooses its partition: by the hash of the Java client (murmur2), by "
    "librdkafka's default (crc32), or as QuackMQ did before topics had this setting (legacy).",
}


class WhenFull(StrEnum):
    """What happens to a publisher that meets `live_entries` live entries."""

    ARCHIVE = "archive"  # the oldest leave the live tail and stay in the history
    WAIT = "wait"
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
    needs_subscriber: bool = False
    ephemeral: bool = False
    batch_bytes: int | None = None
    partitioner: Partitioner = Partitioner.MURMUR2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name), field.name)

    @classmethod
    def from_configs(cls, configs: Mapping[str, str | None], base: Policy | None = None) -> Policy:
        """`base` (the default policy, unless given) with these configs set; a value of None sets
        one back to its default. InvalidPolicy for a name or a value that is none, and for two
        names of one thing that disagree."""
        changes: dict[str, Any] = {}
        for name, text in configs.items():
            field = _field_of(name)
            value = field.default if text is None else _parse(name, field.default, text)
            _check(field, value, name)
            if changes.setdefault(field.name, value) != value:
                raise InvalidPolicy(
                    f"{name} is given twice, by two names with different values: give one of them"
                )
        return dataclasses.replace(base if base is not None else cls(), **changes)

    def to_configs(self) -> dict[str, str]:
        """Every config that there is, with its value; Kafka's names beside our own."""
        configs = {
            CONFIG_PREFIX + field.name: _text(getattr(self, field.name))
            for field in dataclasses.fields(self)
        }
        for alias, name in CONFIG_ALIASES.items():
            configs[alias] = _text(getattr(self, name))
        return configs

    # --- what has to be watched ----------------------------------------------------------------

    @property
    def refuses_or_waits(self) -> bool:
        """Whether a publish has to be asked in for room before it is done."""
        return self.live_entries is not None and self.when_full in (WhenFull.WAIT, WhenFull.REFUSE)

    @property
    def drops_oldest(self) -> bool:
        return self.live_entries is not None and self.when_full is WhenFull.DROP_OLDEST

    @property
    def lets_go(self) -> bool:
        """Whether anything of the topic ever goes by itself."""
        return (
            self.keep_for_ms is not None
            or self.keep_bytes is not None
            or self.keep_until_consumed
            or self.drops_oldest
        )

    @property
    def counts_entries(self) -> bool:
        """Whether what is published has to be counted; if not, publishing costs nothing extra."""
        return self.refuses_or_waits or self.lets_go


class Facts(NamedTuple):
    """What a policy decides by: the state of one partition at one moment."""

    first: int
    next: int
    #: Entries before it are at least `live_for_ms` old.
    expired_before: int = 0
    #: Entries before it are at least `keep_for_ms` old.
    old_before: int = 0
    #: Without the entries before it there are still `keep_bytes`.
    surplus_before: int = 0
    #: The least cursor of the topic's subscriptions; None while there is none.
    held_from: int | None = None
    #: Entries before it are held for nobody: at least `hold_for_ms` old, or too far behind.
    unheld_before: int = 0


def trim_before(policy: Policy, facts: Facts) -> int:
    """The offset up to which entries may be let go of; `facts.first` if nothing may go."""
    before = max(
        facts.old_before if policy.keep_for_ms is not None else 0,
        facts.surplus_before if policy.keep_bytes is not None else 0,
    )
    if facts.held_from is not None:
        held_from = max(facts.held_from, facts.unheld_before)
        before = held_from if policy.keep_until_consumed else min(before, held_from)
    return min(max(before, _drop_before(policy, facts), facts.first), facts.next)


def live_entries(policy: Policy, facts: Facts) -> int:
    """How many entries are live, as far as being full is concerned: young enough, and not such
    as may be let go of at any moment."""
    start = trim_before(policy, facts)
    if policy.live_for_ms is not None:
        start = max(start, facts.expired_before)
    return max(0, facts.next - start)


def has_room(policy: Policy, facts: Facts, entries: int) -> bool:
    """Whether so many more entries can be live."""
    if policy.live_entries is None:
        return True
    return live_entries(policy, facts) + entries <= policy.live_entries


def _drop_before(policy: Policy, facts: Facts) -> int:
    """Where the log has to begin so that no more than `live_entries` are live. Entries that are
    no longer live by age do not make a topic full, and stay."""
    if not policy.drops_oldest or policy.live_entries is None:
        return 0
    start = facts.next - policy.live_entries
    if policy.live_for_ms is not None and start <= facts.expired_before:
        return 0
    return max(0, start)


def number_bounds(name: str) -> tuple[int, int]:
    """The least and the most that a policy's number may be, where it is not None."""
    return _LEAST[name], _MOST_OF.get(name, _MOST)


# --- values and their text -----------------------------------------------------------------------


def _check(field: dataclasses.Field[Any], value: object, name: str) -> None:
    """InvalidPolicy, under the name that was used, for a value that a field cannot have."""
    default = field.default
    if isinstance(default, StrEnum):
        words = type(default)
        if not isinstance(value, words):
            raise InvalidPolicy(f"{name} cannot be {value!r}: it is one of {', '.join(words)}")
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            raise InvalidPolicy(f"{name} cannot be {value!r}: it is true or false")
    elif value is not None:
        least, most = number_bounds(field.name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise InvalidPolicy(
                f"{name} cannot be {value!r}: it is a whole number from {least} to {most}, "
                f"or nothing (as a config: {_UNBOUNDED}) for no bound"
            )


def _field_of(config: str) -> dataclasses.Field[Any]:
    fields = {field.name: field for field in dataclasses.fields(Policy)}
    name = CONFIG_ALIASES.get(config)
    if name is None and config.startswith(CONFIG_PREFIX):
        name = config.removeprefix(CONFIG_PREFIX)
    if name is None or name not in fields:
        known = [*(CONFIG_PREFIX + name for name in fields), *CONFIG_ALIASES]
        raise InvalidPolicy(f"there is no config {config[:100]!r}; there are {', '.join(known)}")
    return fields[name]


def _parse(name: str, default: object, text: str) -> object:
    """The value that a config's text stands for; `_check` says whether it is within its bounds."""
    if isinstance(default, StrEnum):
        words = type(default)
        if text not in list(words):
            raise InvalidPolicy(f"{name} cannot be {text[:100]!r}: it is one of {', '.join(words)}")
        return words(text)
    if isinstance(default, bool):
        if text.lower() not in _BOOLEANS:
            raise InvalidPolicy(f"{name} cannot be {text[:100]!r}: it is true or false")
        return _BOOLEANS[text.lower()]
    if text == _UNBOUNDED:
        return None
    # 20 digits are more than 64 bits hold, and int() of many more takes its time.
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidPolicy(
            f"{name} cannot be {text[:100]!r}: it is a whole number, or {_UNBOUNDED} for no bound"
        )
    return int(text)


def _text(value: object) -> str:
    if value is None:
        return _UNBOUNDED
    return str(value).lower() if isinstance(value, bool) else str(value)
