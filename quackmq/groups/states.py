"""The states of a group, as tables: which state follows which, and which requests each allows."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, Literal, NamedTuple

from quackmq.errors import QuackError, RebalanceInProgress

#: Members of this protocol type read topics. Classic members name the topics in their metadata;
#: members of a newer group all have this type.
CONSUMER_PROTOCOL_TYPE: Final = "consumer"


class GroupKind(StrEnum):
    """The protocol of a group's members, by Kafka's names."""

    CLASSIC = "classic"
    CONSUMER = "consumer"


class GroupState(StrEnum):
    """The state of a group, by Kafka's names. Dead describes a group that does not exist.

    A classic group rebalances as a whole, in two phases. In a newer group each member gets a target
    and approaches it on its own.
    """

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"
    DEAD = "Dead"


#: The states of a classic group, and those that may follow each.
NEXT_STATES: Final[Mapping[GroupState, tuple[GroupState, ...]]] = {
    GroupState.EMPTY: (GroupState.PREPARING_REBALANCE,),
    GroupState.PREPARING_REBALANCE: (GroupState.COMPLETING_REBALANCE, GroupState.EMPTY),
    GroupState.COMPLETING_REBALANCE: (GroupState.STABLE, GroupState.PREPARING_REBALANCE),
    GroupState.STABLE: (GroupState.PREPARING_REBALANCE,),
}


class Rules(NamedTuple):
    """How a group in one state responds to requests of a member of the current generation.

    An error refuses the request; None allows it. Members of a rank in `rejoins_without_rebalance`
    that join again unchanged get the current generation. Any other join starts a rebalance.
    """

    heartbeat: type[QuackError] | None
    commit: type[QuackError] | None
    sync: type[QuackError] | Literal["wait for the leader", "respond"]
    rejoins_without_rebalance: tuple[Literal["leader", "follower"], ...]


#: The states that have members. In the others, every member is unknown.
RULES: Final[Mapping[GroupState, Rules]] = {
    # A commit in the ending generation is still valid: members learn of the end by heartbeat.
    GroupState.PREPARING_REBALANCE: Rules(RebalanceInProgress, None, RebalanceInProgress, ()),
    # A join may be repeated because its response was lost.
    GroupState.COMPLETING_REBALANCE: Rules(
        None, RebalanceInProgress, "wait for the leader", ("leader", "follower")
    ),
    # A leader joins again because it wants a rebalance: its topics have changed.
    GroupState.STABLE: Rules(None, None, "respond", ("follower",)),
}


class MemberState(StrEnum):
    """How far a member of the newer protocol is on the way to its target. By Kafka's names."""

    #: It has its whole target.
    STABLE = "Stable"
    #: It must release partitions, and has not confirmed this.
    UNREVOKED = "UnrevokedPartitions"
    #: It waits for partitions that other members have not released.
    UNRELEASED = "UnreleasedPartitions"


#: The event that lets a member in each state take the next step.
STEP_TRIGGERS: Final[
    Mapping[MemberState, Literal["a new target", "a confirmed release", "any heartbeat"]]
] = {
    MemberState.STABLE: "a new target",
    MemberState.UNREVOKED: "a confirmed release",
    MemberState.UNRELEASED: "any heartbeat",
}
