"""Bounds of consumer groups, each with its reason. Sizes are bytes unless the name says
otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import KIB, MIB

# --- consumer groups -----------------------------------------------------------------------

#: Metadata of all members of a group; its leader is sent it in one answer.
GROUP_METADATA_BYTES: Final = 32 * MIB
#: Topic names read out of the subscriptions of a group, all members added up, before giving up.
GROUP_SUBSCRIBED_TOPICS: Final = 200_000
#: Ways of assigning partitions that a member may offer; clients know of five.
MEMBER_PROTOCOLS: Final = 64
#: Instance ids and member ids of a group's static members, which are kept as one small state.
STATIC_MEMBER_BYTES: Final = 128 * KIB
#: Ids of a group's members, as far as they are kept in the same state to be known after a restart.
MEMBER_IDS_BYTES: Final = 64 * KIB
#: How often a member that is back after a restart is asked to say everything, before it has to join
#: anew: what it says first may be on its way already.
MEMBER_ASKED: Final = 3
#: A new member waits so long for its first rebalance to end, and then has to ask again; Kafka's.
NEW_MEMBER_WAIT_MS: Final = 5 * 60_000
#: A rebalance waits so long for busy members, whatever they ask for: some ask for ever.
REBALANCE_MAX_MS: Final = 24 * 3_600_000
#: Members that wait for partitions, or are to let go of some, are asked to be heard so often.
RECONCILING_HEARTBEAT_MS: Final = 500
#: Times that partitions are moved between pools of members until their loads are even: each moves
#: at least one nearer, and after a few there is next to nothing left to move.
ASSIGNMENT_PASSES: Final = 10
#: Partitions of a group that are dealt out again in a millisecond at the most, over time: one that
#: has 10,000, and that members keep joining, gets a new target every 100 ms, which takes 30.
ASSIGNED_PER_MS: Final = 100
#: Regular expressions among the subscriptions of one group: each is tried on every topic.
GROUP_PATTERNS: Final = 8
#: They are tried again so often at the most while topics come and go.
PATTERN_REFRESH_MS: Final = 2_000
