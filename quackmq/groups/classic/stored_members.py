"""The stored form of a classic group's members, so that it continues after a restart. Pure values.

A group that was stable before a restart is stable after it, in the same generation, with the same
leader, members and assignments. So a member that only lost its connection notices nothing. A group
that waited for the leader's assignment continues to wait, and one that was rebalancing rebalances
again.
"""

from __future__ import annotations

from typing import NamedTuple

from quackmq.groups.states import GroupState


class StoredMember(NamedTuple):
    """A member that knows its generation. `protocols` are names with metadata, preferred first."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]
    assignment: bytes


class StoredMembership(NamedTuple):
    """All members of a group, oldest first, and the group's phase. `protocol` is the one chosen for
    the generation."""

    state: GroupState
    protocol: str
    leader: str
    members: tuple[StoredMember, ...]
