"""The states of a group, as tables: what follows what, and what each makes of a request."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, Literal, NamedTuple

from quackmq.errors import QuackError, RebalanceInProgress

#: Members of this protocol type read topics. Classic ones say in their metadata which; in a group
#: of the newer kind there are no others.
CONSUMER_PROTOCOL_TYPE: Final = "consumer"


class GroupKind(StrEnum):
    """By which protocol its members come together. By Kafka's names."""

    CLASSIC = "classic"
    CONSUMER = "consumer"


class GroupState(StrEnum):
    """By Kafka's names. Dead is what is said of a group that is not there.

    A classic group rebalances as a whole, in two phases; in one of the newer kind a target is set,
    and each member approaches it.
    """

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"
    DEAD = "Dead"


#: The states of a classic group, and those that may follow each.
FOLLOWERS: Final[Mapping[GroupState, tuple[GroupState, ...]]] = {
    GroupState.EMPTY: (GroupState.PREPARING_REBALANCE,),
    GroupState.PREPARING_REBALANCE: (GroupState.COMPLETING_REBALANCE, GroupState.EMPTY),
    GroupState.COMPLETING_REBALANCE: (GroupState.STABLE, GroupState.PREPARING_REBALANCE),
    GroupState.STABLE: (GroupState.PREPARING_REBALANCE,),
}


class Rules(NamedTuple):
    """What a state makes of the requests of a member that is known, and of the right generation.

    An error refuses; None allows. `rejoins_at_once` are those whose join, with nothing changed, is
    answered with the present generation; any other join asks for a rebalance.
    """

    heartbeat: type[QuackError] | None
    commit: type[QuackError] | None
    sync: type[QuackError] | Literal["waits for the leader", "is answered"]
    rejoins_at_once: tuple[Literal["leader", "follower"], ...]


#: The states that have members. Where there are none, every member is an unknown one.
RULES: Final[Mapping[GroupState, Rules]] = {
    # A commit of the generation that ends is still good: the members learn of its end by heartbeat.
    GroupState.PREPARING_REBALANCE: Rules(RebalanceInProgress, None, RebalanceInProgress, ()),
    # A join may be repeated because its answer was lost.
    GroupState.COMPLETING_REBALANCE: Rules(
        None, RebalanceInProgress, "waits for the leader", ("leader", "follower")
    ),
    # A leader joins again because it wants a rebalance: topics have changed.
    GroupState.STABLE: Rules(None, None, "is answered", ("follower",)),
}


class MemberState(StrEnum):
    """How far a member of the newer kind has come on the way to its target. By Kafka's names."""

    #: It has what it shall have.
    STABLE = "Stable"
    #: It shall let go of partitions, and has not said that it did.
    UNREVOKED = "UnrevokedPartitions"
    #: It waits for partitions that others have not let go of.
    UNRELEASED = "UnreleasedPartitions"


#: What lets a member in a state take the next step.
MOVES_ON: Final[
    Mapping[MemberState, Literal["a new target", "its word that it let go", "any heartbeat"]]
] = {
    MemberState.STABLE: "a new target",
    MemberState.UNREVOKED: "its word that it let go",
    MemberState.UNRELEASED: "any heartbeat",
}
