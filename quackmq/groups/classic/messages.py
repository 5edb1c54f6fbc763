"""What members and brokers say to a group, and what it says to them. Frozen values."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from quackmq import limits as shared_limits
from quackmq.errors import InvalidGroup, InvalidSessionTimeout, QuackError
from quackmq.groups import limits
from quackmq.groups.consumer.messages import HeartbeatAnswer
from quackmq.groups.states import GroupKind, GroupState


def patience_ms(rebalance_timeout_ms: int) -> int:
    """Return how long a rebalance waits for a member: as long as the member asks for, up to
    limits.REBALANCE_MAX_MS. Some ask for less than nothing, which is nothing."""
    return min(max(rebalance_timeout_ms, 0), limits.REBALANCE_MAX_MS)


class Join(NamedTuple):
    """What a member says when it joins.

    `member_id` is empty if it has none yet; `instance_id` is a static member's own name; protocols
    are names with metadata, preferred first. With `needs_id_first` (JoinGroup v4+) a new dynamic
    member is only given an id (MemberIdRequired) and joins again with it. `may_skip_assignment`
    (v9+): a leader may be told to leave the assignment as it is.
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
    def patience_ms(self) -> int:
        return patience_ms(self.rebalance_timeout_ms)


class JoinedMember(NamedTuple):
    member_id: str
    instance_id: str | None
    metadata: bytes


class Joined(NamedTuple):
    """`members` is empty but for the leader."""

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


class Sync(NamedTuple):
    """`protocol_type` and `protocol` are None if the request has no such field (before v5)."""

    member: MemberRef
    protocol_type: str | None
    protocol: str | None
    assignments: Mapping[str, bytes]


class Synced(NamedTuple):
    protocol_type: str
    protocol: str
    assignment: bytes
    member_id: str


class Leaving(NamedTuple):
    """`member_id` is empty when an administrator removes a static member by its instance id."""

    member_id: str
    instance_id: str | None


class Left(NamedTuple):
    """The member is gone."""


class MemberDescription(NamedTuple):
    """`metadata` is that of the chosen protocol, and empty where none is chosen."""

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


class Answer(NamedTuple):
    waiter: Hashable
    outcome: Joined | Synced | Left | HeartbeatAnswer | QuackError


def offered(join: Join) -> dict[str, bytes]:
    """The protocols of a member that joins, each once. Raises for what a member cannot be."""
    shortest_ms, longest_ms = shared_limits.SESSION_MIN_MS, shared_limits.SESSION_MAX_MS
    if not shortest_ms <= join.session_timeout_ms <= longest_ms:
        raise InvalidSessionTimeout(
            f"a session lasts {shortest_ms} to {longest_ms} ms, not {join.session_timeout_ms}"
        )
    if len(join.protocols) > limits.MEMBER_PROTOCOLS:
        raise InvalidGroup(f"a member offers {limits.MEMBER_PROTOCOLS} protocols at the most")
    if len(join.protocol_type) > shared_limits.NAME_BYTES:
        raise InvalidGroup(
            f"a type of protocols has {shared_limits.NAME_BYTES} characters at the most"
        )
    if join.instance_id is not None and not 1 <= len(join.instance_id) <= shared_limits.NAME_BYTES:
        raise InvalidGroup(f"an instance id has 1 to {shared_limits.NAME_BYTES} characters")
    protocols: dict[str, bytes] = {}
    for name, metadata in join.protocols:
        protocols.setdefault(name, metadata)
    return protocols
