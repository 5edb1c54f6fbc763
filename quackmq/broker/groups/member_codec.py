"""The members of a classic group as JSON fields, and the size of these fields. Pure.

{"state": "Stable" | "CompletingRebalance" | "PreparingRebalance", "protocol": "range",
"leader": member id, "members": [{"member_id": "...", "instance_id": "..." | null,
"client_id": "...", "client_host": "...", "session_timeout_ms": 45000,
"rebalance_timeout_ms": 300000, "protocols": [["range", base64], ...], "assignment": base64}]}
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Final

from quackmq.errors import DamagedStore
from quackmq.groups import GroupState, StoredMember, StoredMembership

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
    members = [
        {
            **member._asdict(),
            "protocols": [[name, _encode(metadata)] for name, metadata in member.protocols],
            "assignment": _encode(member.assignment),
        }
        for member in stored.members
    ]
    return {**stored._asdict(), "members": members}


def decode_members(fields: object, static_members: Mapping[str, str]) -> StoredMembership | None:
    """Decode the value of `encode_members`; return None for None. Raise DamagedStore for any other
    value, and if the members contradict each other or the static members."""
    if fields is None:
        return None
    match fields:
        case {
            "state": str(state),
            "protocol": str(protocol),
            "leader": str(leader),
            "members": list(members),
        } if state in _STATES:
            stored = StoredMembership(
                GroupState(state), protocol, leader, tuple(_decode_member(each) for each in members)
            )
            if _is_consistent(stored, static_members):
                return stored
    raise DamagedStore(f"the members of a group in the store make no sense: {str(fields)[:200]}")


def _decode_member(fields: object) -> StoredMember:
    match fields:
        case {
            "member_id": str(member_id),
            "instance_id": str() | None as instance_id,
            "client_id": str(client_id),
            "client_host": str(client_host),
            "session_timeout_ms": int(session_timeout_ms),
            "rebalance_timeout_ms": int(rebalance_timeout_ms),
            "protocols": list(protocols),
            "assignment": str(assignment),
        }:
            return StoredMember(
                member_id,
                instance_id,
                client_id,
                client_host,
                session_timeout_ms,
                rebalance_timeout_ms,
                tuple(_decode_protocol(each) for each in protocols),
                _decode(assignment),
            )
    raise DamagedStore(f"cannot decode a member of a group in the store: {str(fields)[:200]}")


def _decode_protocol(fields: object) -> tuple[str, bytes]:
    match fields:
        case [str(name), str(metadata)]:
            return name, _decode(metadata)
    raise DamagedStore(f"cannot decode a protocol of a group in the store: {str(fields)[:200]}")


def _is_consistent(stored: StoredMembership, static_members: Mapping[str, str]) -> bool:
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


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise DamagedStore(f"a member of a group in the store is not base64: {error}") from None
