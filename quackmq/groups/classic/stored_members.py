"""What lasts of the members of a classic group, so that it goes on after a restart. Pure values.

A group that was stable before a restart is stable after it, in the same generation, with the same
leader, members and assignments. So a member that only lost its connection notices nothing. One that
was settling a generation goes on with that, and one that was rebalancing rebalances again.
"""

from __future__ import annotations

from typing import NamedTuple

from quackmq.groups.states import GroupState


class KeptMember(NamedTuple):
    """A member that has been told of a generation. Its protocols are names with metadata, the
    preferred one first."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]
    assignment: bytes


class KeptMembers(NamedTuple):
    """All members of a group that has some, the oldest first, and the phase that they are in.
    `protocol` is the one that was chosen for the generation."""

    state: GroupState
    protocol: str
    leader: str
    members: tuple[KeptMember, ...]
