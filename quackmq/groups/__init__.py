"""Consumer groups: members, generations, assignments. Pure. The rules are in `groups.group` for the
classic protocol, and in `groups.consumer` for the newer one."""

from quackmq.groups.consumer import ConsumerGroup
from quackmq.groups.consumer_values import (
    ConsumerGroupDescription,
    ConsumerMemberDescription,
    Heartbeat,
    HeartbeatAnswer,
    Matched,
    Timing,
)
from quackmq.groups.former import FormerMembers
from quackmq.groups.group import Group
from quackmq.groups.kept import KeptMember, KeptMembers
from quackmq.groups.states import GroupKind, GroupState
from quackmq.groups.values import (
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
