"""Heartbeats of the newer group protocol (KIP-848) and their responses. Frozen values.

A member sends all its data in heartbeats, and each heartbeat contains only what has changed since
the last: None means "unchanged".
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple, Protocol

from quackmq import limits
from quackmq.errors import InvalidGroup, InvalidPattern, InvalidRequest, UnsupportedAssignor
from quackmq.groups.consumer.assignors import ASSIGNORS
from quackmq.groups.states import CONSUMER_PROTOCOL_TYPE, GroupKind, GroupState
from quackmq.model.topic import PartitionKey, Topic

#: Epochs that a member may name instead of its own: it joins, without any partitions; it leaves; it
#: leaves and, being static, will return.
JOIN_EPOCH: Final = 0
LEAVE_EPOCH: Final = -1
LEAVE_TEMPORARILY_EPOCH: Final = -2


class Heartbeat(NamedTuple):
    """`pattern` is a regular expression of topics that are read beside `topics`; empty for none.
    `owned` are the partitions that the member has not released."""

    member_id: str
    epoch: int
    client_id: str = ""
    client_host: str = ""
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_timeout_ms: int | None = None
    topics: frozenset[str] | None = None
    pattern: str | None = None
    assignor: str | None = None
    owned: frozenset[PartitionKey] | None = None

    @property
    def is_full(self) -> bool:
        """Whether this heartbeat omits nothing, as after a lost response. Then its response omits
        nothing either."""
        says_topics = self.topics is not None or self.pattern is not None
        return self.rebalance_timeout_ms is not None and says_topics and self.owned is not None


class HeartbeatResponse(NamedTuple):
    """`assignment` is everything that the member may read now; None if unchanged."""

    member_id: str
    epoch: int
    heartbeat_interval_ms: int
    assignment: frozenset[PartitionKey] | None = None


class Timing(NamedTuple):
    """How long members may be silent, and how often they send heartbeats."""

    session_timeout_ms: int = limits.CONSUMER_SESSION_MS
    heartbeat_interval_ms: int = limits.CONSUMER_HEARTBEAT_MS


class Subscription(NamedTuple):
    """The topics that a member reads. Members with equal subscriptions share one object."""

    topics: frozenset[str] = frozenset()
    pattern: str = ""


class Catalog(Protocol):
    """The existing topics."""

    @property
    def changes(self) -> int:
        """Grows when a topic is created, changed or deleted."""

    @property
    def by_name(self) -> dict[str, Topic]: ...


class PatternMatches(NamedTuple):
    """The names of topics that match a pattern, as of `changes` of the catalog."""

    names: Collection[str]
    changes: int


class ConsumerMemberDescription(NamedTuple):
    """`assigned` are its current partitions; `target` those it will have in the end."""

    member_id: str
    instance_id: str | None
    rack_id: str | None
    epoch: int
    client_id: str
    client_host: str
    topics: frozenset[str]
    pattern: str
    assigned: frozenset[PartitionKey]
    target: frozenset[PartitionKey]


class ConsumerGroupDescription(NamedTuple):
    name: str
    state: GroupState
    epoch: int
    assignment_epoch: int
    assignor: str
    members: tuple[ConsumerMemberDescription, ...]

    @property
    def kind(self) -> GroupKind:
        return GroupKind.CONSUMER

    @property
    def protocol_type(self) -> str:
        return CONSUMER_PROTOCOL_TYPE


def check_heartbeat(heartbeat: Heartbeat) -> None:
    """Check a heartbeat by itself. Raises InvalidRequest, InvalidGroup, InvalidPattern,
    UnsupportedAssignor."""
    epoch, instance_id, rack_id = heartbeat.epoch, heartbeat.instance_id, heartbeat.rack_id
    if epoch < LEAVE_TEMPORARILY_EPOCH:
        raise InvalidRequest(f"invalid member epoch {epoch}: use {LEAVE_TEMPORARILY_EPOCH} or more")
    if not heartbeat.member_id and epoch != JOIN_EPOCH:
        raise InvalidRequest("a member without an id must join: send epoch 0")
    for kind, name in (("member", heartbeat.member_id), ("instance", instance_id or "")):
        if len(name) > limits.NAME_BYTES:
            raise InvalidGroup(f"a {kind} id may have at most {limits.NAME_BYTES} characters")
    if instance_id == "" or rack_id == "":
        raise InvalidRequest("an instance id or rack id must not be empty: leave it out")
    if len(rack_id or "") > limits.NAME_BYTES:
        raise InvalidGroup(f"a rack id may have at most {limits.NAME_BYTES} characters")
    if epoch == LEAVE_TEMPORARILY_EPOCH and instance_id is None:
        raise InvalidRequest("only a member with an instance id can leave temporarily")
    if epoch == JOIN_EPOCH:
        _check_joining(heartbeat)
    if heartbeat.assignor is not None and heartbeat.assignor not in ASSIGNORS:
        assignor_names = ", ".join(ASSIGNORS)
        raise UnsupportedAssignor(
            f"unknown assignor {heartbeat.assignor[:100]!r}: use one of {assignor_names}"
        )
    if len(heartbeat.pattern or "") > limits.PATTERN_CHARS:
        raise InvalidPattern(
            f"a regular expression may have at most {limits.PATTERN_CHARS} characters"
        )


def _check_joining(heartbeat: Heartbeat) -> None:
    """Check the fields that only a join must have."""
    if heartbeat.rebalance_timeout_ms is None:
        raise InvalidRequest("a joining member must send its rebalance timeout")
    if heartbeat.topics is None and heartbeat.pattern is None:
        raise InvalidRequest("a joining member must send the topics that it reads")
    if heartbeat.owned is None or heartbeat.owned:
        raise InvalidRequest("a joining member must send an empty list of owned partitions")
