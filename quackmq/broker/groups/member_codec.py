"""The members of a classic group as JSON fields, and the size of these fields. Pure.

{"state": "Stable" | "CompletingRebalance" | "PreparingRebalance", "protocol": "range",
"leader": member id, "members": [{"member_id": "...", "instance_id": "..." | null,
"client_id": "...", "client_host": "...", "session_timeout_ms": 45000,
"rebalance_timeout_ms": 300000, "protocols": [["range", base64], ...], "assignment": base64}]}
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Final

import msgspec

from quackmq.errors import DamagedStore
from quackmq.groups import GroupState, StoredMember, StoredMembership
from quackmq.model.stored_json import decode_stored, decode_stored_object

#: Size of a member's field names, numbers and punctuation.
_FIELD_BYTES: Final = 256
#: Size of the punctuation of one protocol.
_PROTOCOL_BYTES: Final = 8

_STATES: Final = frozenset(
    {GroupState.STABLE, GroupState.COMPLETING_REBALANCE, GroupState.PREPARING_REBALANCE}
)


def members_bytes(stored: StoredMembership | None) -> int:
    """Return the size of `encode_members` as JSON, or slightly more."""
    if stored is None:
        return 0
    head = _FIELD_BYTES + _text_bytes(stored.protocol) + _text_bytes(stored.leader)
    return head + sum(map(_member_bytes, stored.members))


def encode_members(stored: StoredMembership) -> dict[str, object]:
    """Return the members as JSON fields."""
    members = [
        {
            **member._asdict(),
            "protocols": [[name, _encode_base64(metadata)] for name, metadata in member.protocols],
            "assignment": _encode_base64(member.assignment),
        }
        for member in stored.members
    ]
    return {**stored._asdict(), "members": members}


class _MembershipFields(msgspec.Struct):
    state: GroupState
    protocol: str
    leader: str
    members: list[msgspec.Raw]


def decode_members(
    value: bytes | msgspec.Raw, static_members: Mapping[str, str]
) -> StoredMembership | None:
    """Decode the JSON of `encode_members`; return None for null. Raise DamagedStore for any other
    value, and if the members contradict each other or the static members."""
    if bytes(value) == b"null":
        return None
    fields = decode_stored(value, _MembershipFields, "the members of a group")
    # msgspec decodes bytes from base64.
    members = tuple(
        decode_stored_object(member, StoredMember, "a member of a group")
        for member in fields.members
    )
    stored = StoredMembership(fields.state, fields.protocol, fields.leader, members)
    if stored.state not in _STATES or not _is_consistent(stored, static_members):
        raise DamagedStore(
            f"the members of a group in the store contradict each other: {str(stored)[:200]}"
        )
    return stored


def _is_consistent(stored: StoredMembership, static_members: Mapping[str, str]) -> bool:
    """Return whether the members fit each other, the leader, the protocol and the static
    members."""
    ids = {member.member_id for member in stored.members}
    has_protocol = stored.state is not GroupState.PREPARING_REBALANCE
    return (
        stored.leader in ids
        and len(ids) == len(stored.members)
        and all(member.protocols for member in stored.members)
        and all(
            member.instance_id is None or static_members.get(member.instance_id) == member.member_id
            for member in stored.members
        )
        and not (
            has_protocol
            and any(stored.protocol not in dict(member.protocols) for member in stored.members)
        )
    )


def _member_bytes(member: StoredMember) -> int:
    """Return the size of a member as JSON, or slightly more."""
    texts = (member.member_id, member.instance_id or "", member.client_id, member.client_host)
    return (
        _FIELD_BYTES
        + sum(map(_text_bytes, texts))
        + sum(
            _PROTOCOL_BYTES + _text_bytes(name) + _encoded_bytes(metadata)
            for name, metadata in member.protocols
        )
        + _encoded_bytes(member.assignment)
    )


def _text_bytes(text: str) -> int:
    return len(json.dumps(text))


def _encoded_bytes(value: bytes) -> int:
    return (len(value) + 2) // 3 * 4


def _encode_base64(value: bytes) -> str:
    return base64.b64encode(value).decode()
