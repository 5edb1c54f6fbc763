"""What members of the newer group protocol (KIP-848) say, and what they are told. Frozen values.

A member says everything with its heartbeats, and with each only what has changed since the last:
None stands for "as before".
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple, Protocol

from quackmq import limits
from quackmq.errors import InvalidGroup, InvalidPattern, InvalidRequest, UnsupportedAssignor
from quackmq.groups.consumer.assignors import ASSIGNORS
from quackmq.groups.states import CONSUMER_PROTOCOL_TYPE, GroupKind, GroupState
from quackmq.model.topic import PartitionKey, Topic

#: Epochs that a member may name instead of its own: it joins, with nothing in its hands; it leaves;
#: it leaves and, being static, will be back.
JOINS: Final = 0
LEAVES: Final = -1
LEAVES_FOR_A_WHILE: Final = -2


class Heartbeat(NamedTuple):
    """`pattern` is a regular expression of topics that are read beside `topics`, empty for none.
    `owned` are the partitions that the member has not let go of."""

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
        """Whether it leaves nothing out, as after a lost answer: then neither does the answer."""
        says_topics = self.topics is not None or self.pattern is not None
        return self.rebalance_timeout_ms is not None and says_topics and self.owned is not None


class HeartbeatAnswer(NamedTuple):
    """`assignment` is all that the member may read now, None if that is as before."""

    member_id: str
    epoch: int
    heartbeat_interval_ms: int
    assignment: frozenset[PartitionKey] | None = None


class Timing(NamedTuple):
    """How long members may be silent, and how often they are to be heard."""

    session_timeout_ms: int = limits.CONSUMER_SESSION_MS
    heartbeat_interval_ms: int = limits.CONSUMER_HEARTBEAT_MS


class Subscription(NamedTuple):
    """The topics that a member reads. Members that say the same share one value."""

    topics: frozenset[str] = frozenset()
    pattern: str = ""


class Catalog(Protocol):
    """The topics that there are."""

    @property
    def changes(self) -> int:
        """Grows when a topic comes, changes or goes."""

    @property
    def by_name(self) -> dict[str, Topic]: ...


class Matched(NamedTuple):
    """The names of topics that fit a pattern, as the catalog was after so many changes."""

    names: Collection[str]
    changes: int


class ConsumerMemberDescription(NamedTuple):
    """`assigned` is what it has been given, `target` what it shall have in the end."""

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


def check(heartbeat: Heartbeat) -> None:
    """Raises for what no member can say."""
    epoch, instance_id, rack_id = heartbeat.epoch, heartbeat.instance_id, heartbeat.rack_id
    if epoch < LEAVES_FOR_A_WHILE:
        raise InvalidRequest(f"no member is in epoch {epoch}")
    if not heartbeat.member_id and epoch != JOINS:
        raise InvalidRequest("only who joins has no member id")
    for what, name in (("member", heartbeat.member_id), ("instance", instance_id or "")):
        if len(name) > limits.NAME_BYTES:
            raise InvalidGroup(f"the id of a {what} has {limits.NAME_BYTES} characters at the most")
    if instance_id == "" or rack_id == "":
        raise InvalidRequest("the id of an instance or a rack is left out, if there is none")
    if len(rack_id or "") > limits.NAME_BYTES:
        raise InvalidGroup(f"the id of a rack has {limits.NAME_BYTES} characters at the most")
    if epoch == LEAVES_FOR_A_WHILE and instance_id is None:
        raise InvalidRequest("only a member with an instance id can leave for a while")
    if epoch == JOINS:
        _check_joining(heartbeat)
    if heartbeat.assignor is not None and heartbeat.assignor not in ASSIGNORS:
        known = ", ".join(ASSIGNORS)
        raise UnsupportedAssignor(f"no assignor {heartbeat.assignor[:100]!r}: there are {known}")
    if len(heartbeat.pattern or "") > limits.PATTERN_CHARS:
        raise InvalidPattern(
            f"a regular expression has {limits.PATTERN_CHARS} characters at the most"
        )


def _check_joining(heartbeat: Heartbeat) -> None:
    if heartbeat.rebalance_timeout_ms is None:
        raise InvalidRequest("who joins says how long it may take to let go of partitions")
    if heartbeat.topics is None and heartbeat.pattern is None:
        raise InvalidRequest("who joins says which topics it reads")
    if heartbeat.owned is None or heartbeat.owned:
        raise InvalidRequest("who joins has let go of all partitions, and says so")
