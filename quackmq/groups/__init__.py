"""Consumer groups: members, generations, assignments. Pure: no clock, no disk, no network.

Open `classic.group` for the classic protocol, in which members divide the partitions among
themselves, and `consumer.group` for the newer one (KIP-848), in which the broker does. `states` are
the states of both, `deadlines` the sessions that run out. `quackmq.broker.groups` carries out what
these modules decide.
"""

from quackmq.groups.classic.group import Group
from quackmq.groups.classic.messages import (
    GroupDescription,
    JoinedMember,
    JoinRequest,
    JoinResponse,
    LeaveRequest,
    LeaveResponse,
    MemberDescription,
    MemberRef,
    SyncRequest,
    SyncResponse,
    WaiterResponse,
)
from quackmq.groups.classic.stored_members import StoredMember, StoredMembership
from quackmq.groups.consumer.former_members import FormerMembers
from quackmq.groups.consumer.group import ConsumerGroup
from quackmq.groups.consumer.messages import (
    ConsumerGroupDescription,
    ConsumerMemberDescription,
    Heartbeat,
    HeartbeatResponse,
    PatternMatches,
    Timing,
)
from quackmq.groups.states import GroupKind, GroupState

__all__ = [
    "WaiterResponse",
    "ConsumerGroup",
    "ConsumerGroupDescription",
    "ConsumerMemberDescription",
    "FormerMembers",
    "Group",
    "GroupDescription",
    "GroupKind",
    "GroupState",
    "Heartbeat",
    "HeartbeatResponse",
    "JoinRequest",
    "JoinResponse",
    "JoinedMember",
    "StoredMember",
    "StoredMembership",
    "LeaveRequest",
    "LeaveResponse",
    "PatternMatches",
    "MemberDescription",
    "MemberRef",
    "SyncRequest",
    "SyncResponse",
    "Timing",
]
