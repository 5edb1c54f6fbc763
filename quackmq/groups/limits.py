"""Bounds of consumer groups, each with its reason. Sizes are bytes unless the name says
otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import KIB, MIB

# --- consumer groups -----------------------------------------------------------------------

#: Metadata of all members of a group; its leader receives it in one response.
GROUP_METADATA_BYTES: Final = 32 * MIB
#: Topic names read from the subscriptions of a group, over all members, before giving up.
GROUP_SUBSCRIBED_TOPICS: Final = 200_000
#: Assignment protocols that a member may offer; clients know five.
MEMBER_PROTOCOLS: Final = 64
#: Instance ids and member ids of a group's static members, which are stored as one small state.
STATIC_MEMBER_BYTES: Final = 128 * KIB
#: Ids of a group's members, stored in the same state so that they are known after a restart.
MEMBER_IDS_BYTES: Final = 64 * KIB
#: How often a member that returns after a restart is asked for a full heartbeat before it has to
#: join again. Not once: its next heartbeat may already be in flight.
FULL_HEARTBEAT_REQUESTS: Final = 3
#: How long a new member waits for its first rebalance to end before it must ask again; as in Kafka.
NEW_MEMBER_WAIT_MS: Final = 5 * 60_000
#: The longest that a rebalance waits for busy members: some ask for ever.
REBALANCE_MAX_MS: Final = 24 * 3_600_000
#: Heartbeat interval of members that wait for partitions or have to release some.
RECONCILING_HEARTBEAT_MS: Final = 500
#: How often partitions are moved between pools of members to make their loads even. Each pass makes
#: them more even; after a few passes almost nothing is left to move.
ASSIGNMENT_PASSES: Final = 10
#: Partitions of a group that are reassigned per millisecond at most, over time. A group of 10,000
#: partitions whose membership keeps changing gets a new target every 100 ms, which takes 30 ms.
ASSIGNED_PER_MS: Final = 100
#: Regular expressions among the subscriptions of one group: each is tried on every topic.
GROUP_PATTERNS: Final = 8
#: While topics change, the expressions are tried again at most this often.
PATTERN_REFRESH_MS: Final = 2_000
