"""The stored state of a consumer group, besides its cursors. Pure.

    "group/NAME": {"kind": "classic" | "consumer", "generation": 7, "protocol_type": "consumer",
    "static_members": {instance id: member id}, "member_ids": [member id, ...],
    "empty_since_ms": 1700000000000 | null, "settings": {"holds_retention": false,
    "session_timeout_ms": 45000, "heartbeat_interval_ms": 5000}, "members": MEMBERS | absent}

    MEMBERS: see `quackmq.broker.groups.member_codec`

After a restart generations (epochs in the newer protocol) continue to grow, and a replaced static
member stays replaced. The stored members of a classic group are members again. The members of a
very large group are not stored, and an older broker stored none; they must join again. Members of
the newer protocol report their own state; their ids are stored to recognise them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from quackmq import limits as shared_limits
from quackmq.broker import limits
from quackmq.broker.groups.member_codec import decode_members, encode_members
from quackmq.errors import InvalidSetting
from quackmq.groups import GroupKind, StoredMembership, Timing
from quackmq.model.stored_json import decode_stored, decode_stored_object

#: Prefix of the state keys of groups.
STATE_PREFIX: Final = "group/"


class GroupSettings(NamedTuple):
    """The settings that users may change for a group. With `holds_retention`, records that the
    group has not committed are not deleted, as with a subscription, and the group does not expire.
    The two times apply to the newer protocol; in the classic one each member sends its own."""

    holds_retention: bool = False
    session_timeout_ms: int = shared_limits.CONSUMER_SESSION_MS
    heartbeat_interval_ms: int = shared_limits.CONSUMER_HEARTBEAT_MS

    @property
    def timing(self) -> Timing:
        return Timing(self.session_timeout_ms, self.heartbeat_interval_ms)

    def check(self) -> None:
        """Raise InvalidSetting for a time outside its limits."""
        shortest_ms, longest_ms = shared_limits.SESSION_MIN_MS, shared_limits.SESSION_MAX_MS
        if not shortest_ms <= self.session_timeout_ms <= longest_ms:
            raise InvalidSetting(
                f"a session lasts {shortest_ms} to {longest_ms} ms, not {self.session_timeout_ms}"
            )
        least_ms = limits.CONSUMER_HEARTBEAT_MIN_MS
        if not least_ms <= self.heartbeat_interval_ms < self.session_timeout_ms:
            raise InvalidSetting(
                f"heartbeats come every {least_ms} ms or less often, and more than once in a "
                f"session of {self.session_timeout_ms} ms: {self.heartbeat_interval_ms} ms does not"
            )


class StoredGroup(NamedTuple):
    """The stored state of a group. `empty_since_ms` is wall time; None while the group has members.
    `members` belong to a classic group; None if it has none, or too many to store."""

    kind: GroupKind
    generation: int
    protocol_type: str
    static_members: Mapping[str, str]
    member_ids: Sequence[str]
    settings: GroupSettings
    empty_since_ms: int | None
    members: StoredMembership | None = None


def state_key(name: str) -> str:
    return STATE_PREFIX + name


def group_name_in(key: str) -> str:
    return key.removeprefix(STATE_PREFIX)


def encode_group(stored: StoredGroup) -> bytes:
    """Encode a group for the store, as JSON."""
    fields: dict[str, object] = {
        "kind": stored.kind,
        "generation": stored.generation,
        "protocol_type": stored.protocol_type,
        "static_members": dict(stored.static_members),
        "member_ids": list(stored.member_ids),
        "settings": stored.settings._asdict(),
        "empty_since_ms": stored.empty_since_ms,
    }
    if stored.members is not None:
        fields["members"] = encode_members(stored.members)
    return json.dumps(fields, ensure_ascii=False).encode()


class _GroupFields(msgspec.Struct):
    kind: GroupKind
    generation: int
    protocol_type: str
    static_members: dict[str, str]
    member_ids: tuple[str, ...]
    settings: msgspec.Raw
    empty_since_ms: int | None
    members: msgspec.Raw = msgspec.Raw(b"null")


def decode_group(value: bytes) -> StoredGroup:
    """Decode the value of `encode_group`. Raise DamagedStore for any other value."""
    fields = decode_stored(value, _GroupFields, "a group")
    return StoredGroup(
        fields.kind,
        fields.generation,
        fields.protocol_type,
        fields.static_members,
        fields.member_ids,
        decode_stored_object(fields.settings, GroupSettings, "the settings of a group"),
        fields.empty_since_ms,
        decode_members(fields.members, fields.static_members),
    )
