"""Consumer groups: members, generations, assignments. Pure: no clock, no disk, no network.

Open `classic.group` for the classic protocol, in which members divide the partitions among
themselves, and `consumer.group` for the newer one (KIP-848), in which the broker does. `states` are
the states of both, `deadlines` the sessions that run out. `quackmq.broker.groups` carries out what
these modules decide.
"""

from quackmq.groups.classic.group import Group
from quackmq.groups.classic.messages import (
    Answer,
    GroupDescription,
    Join,
    Joined,
    JoinedMember,
    Leaving,
    Left,
    MemberDescription,
    MemberRef,
    Sync,
    Synced,
)
from quackmq.groups.classic.stored_members import KeptMember, KeptMembers
from quackmq.groups.consumer.former_members import FormerMembers
from quackmq.groups.consumer.group import ConsumerGroup
from quackmq.groups.consumer.messages import (
    ConsumerGroupDescription,
    ConsumerMemberDescription,
    Heartbeat,
    HeartbeatAnswer,
    Matched,
    Timing,
)
from quackmq.groups.states import GroupKind, GroupState

__all__ = [
    "Answer",
    "ConsumerGroup",
    "ConsumerGroupDescription",
    "ConsumerMemberDescription",
    "FormerMembers",
    "Group",
    "GroupDescription",
    "GroupKind",
    "GroupState",
    "Heartbeat",
    "HeartbeatAnswer",
    "Join",
    "Joined",
    "JoinedMember",
    "KeptMember",
    "KeptMembers",
    "Leaving",
    "Left",
    "Matched",
    "MemberDescription",
    "MemberRef",
    "Sync",
    "Synced",
    "Timing",
]
