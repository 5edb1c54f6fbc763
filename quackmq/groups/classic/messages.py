"""Requests to a classic group and its responses. Frozen values."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from quackmq import limits as shared_limits
from quackmq.errors import InvalidGroup, InvalidSessionTimeout, QuackError
from quackmq.groups import limits
from quackmq.groups.consumer.messages import HeartbeatResponse
from quackmq.groups.states import GroupKind, GroupState


def bounded_rebalance_timeout_ms(rebalance_timeout_ms: int) -> int:
    """Return how long a rebalance waits for a member: the time that it asks for, but at least 0 and
    at most limits.REBALANCE_MAX_MS. Some members ask for a negative time."""
    return min(max(rebalance_timeout_ms, 0), limits.REBALANCE_MAX_MS)


class JoinRequest(NamedTuple):
    """A member's request to join.

    `member_id` is empty if it has none yet. `instance_id` is a static member's own name. Protocols
    are names with metadata, preferred first. With `needs_id_first` (JoinGroup v4+) a new dynamic
    member only gets an id (MemberIdRequired) and joins again with it. With `may_skip_assignment`
    (v9+) the response may tell a leader to leave the assignment unchanged.
    """

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    protocol_type: str
    protocols: tuple[tuple[str, bytes], ...]
    session_timeout_ms: int
    rebalance_timeout_ms: int
    needs_id_first: bool = True
    may_skip_assignment: bool = False

    @property
    def bounded_timeout_ms(self) -> int:
        return bounded_rebalance_timeout_ms(self.rebalance_timeout_ms)


class JoinedMember(NamedTuple):
    member_id: str
    instance_id: str | None
    metadata: bytes


class JoinResponse(NamedTuple):
    """The response to a join. Only the leader gets `members`."""

    generation: int
    protocol_type: str
    protocol: str
    leader: str
    member_id: str
    members: tuple[JoinedMember, ...]
    skip_assignment: bool


class MemberRef(NamedTuple):
    member_id: str
    generation: int
    instance_id: str | None = None


class SyncRequest(NamedTuple):
    """A member's request for its assignment; the leader's contains all assignments.
    `protocol_type` and `protocol` are None if the request has no such field (before v5)."""

    member: MemberRef
    protocol_type: str | None
    protocol: str | None
    assignments: Mapping[str, bytes]


class SyncResponse(NamedTuple):
    protocol_type: str
    protocol: str
    assignment: bytes
    member_id: str


class LeaveRequest(NamedTuple):
    """`member_id` is empty when an administrator removes a static member by its instance id."""

    member_id: str
    instance_id: str | None


class LeaveResponse(NamedTuple):
    """The response to a member that has left."""


class MemberDescription(NamedTuple):
    """`metadata` is that of the chosen protocol; empty if none is chosen."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    assignment: bytes


class GroupDescription(NamedTuple):
    name: str
    state: GroupState
    protocol_type: str
    protocol: str
    members: tuple[MemberDescription, ...]

    @property
    def kind(self) -> GroupKind:
        return GroupKind.CLASSIC


class WaiterResponse(NamedTuple):
    """The response to one request, which `waiter` identifies. An error is a response, too."""

    waiter: Hashable
    outcome: JoinResponse | SyncResponse | LeaveResponse | HeartbeatResponse | QuackError


def check_join(join: JoinRequest) -> dict[str, bytes]:
    """Check a join request; return its protocols without duplicates. Raises
    InvalidSessionTimeout, InvalidGroup."""
    shortest_ms, longest_ms = shared_limits.SESSION_MIN_MS, shared_limits.SESSION_MAX_MS
    if not shortest_ms <= join.session_timeout_ms <= longest_ms:
        raise InvalidSessionTimeout(
            f"session timeout {join.session_timeout_ms} ms: use {shortest_ms} to {longest_ms} ms"
        )
    if len(join.protocols) > limits.MEMBER_PROTOCOLS:
        raise InvalidGroup(f"a member may offer at most {limits.MEMBER_PROTOCOLS} protocols")
    if len(join.protocol_type) > shared_limits.NAME_BYTES:
        raise InvalidGroup(
            f"a protocol type may have at most {shared_limits.NAME_BYTES} characters"
        )
    if join.instance_id is not None and not 1 <= len(join.instance_id) <= shared_limits.NAME_BYTES:
        raise InvalidGroup(f"an instance id must have 1 to {shared_limits.NAME_BYTES} characters")
    protocols: dict[str, bytes] = {}
    for name, metadata in join.protocols:
        protocols.setdefault(name, metadata)
    return protocols
