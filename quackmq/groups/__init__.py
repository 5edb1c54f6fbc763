"""Consumer groups: members, generations, assignments. Pure. The rules are in `groups.group` for the
classic protocol, and in `groups.consumer` for the newer one."""

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
