"""The APIs of the newer group protocol (KIP-848): ConsumerGroupHeartbeat, by which members say all
that they have to say, and ConsumerGroupDescribe.

Only translation: what a group does is the broker's (`broker.groups`). A group that goes by the
classic protocol is, to ConsumerGroupDescribe, not there, as a group of this kind is not to
DescribeGroups: tools ask one and then the other.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

from kio.schema.errors import ErrorCode

from quackmq import limits
from quackmq.broker import (
    ConsumerGroupDescription,
    ConsumerMemberDescription,
    GroupState,
    Heartbeat,
)
from quackmq.doors.kafka.api import Call, schema_api, unhurried
from quackmq.doors.kafka.groups import GROUP_OPERATIONS, group_code_of, host_of
from quackmq.errors import (
    InvalidGroup,
    InvalidRequest,
    LimitReached,
    QuackError,
    UnknownGroup,
    UnknownTopic,
)
from quackmq.topic import PartitionKey
from quackmq.wire.kafka.writer import Fields

CONSUMER_GROUP_HEARTBEAT: Final = 68
CONSUMER_GROUP_DESCRIBE: Final = 69

#: From this version on a client makes its member id itself, and may subscribe by a pattern.
_HEARTBEAT_WITH_OWN_ID: Final = 1
#: What stands for a time that has not changed.
_AS_BEFORE: Final = timedelta(milliseconds=-1)
_MILLISECOND: Final = timedelta(milliseconds=1)
#: How tools tell members of this protocol from classic ones in the same group.
_CONSUMER_MEMBER: Final = 1
#: A member's share of an answer beside its words, and a partition's.
_MEMBER_BYTES: Final = 256
_PARTITION_BYTES: Final = 8


async def consumer_group_heartbeat(call: Call, request: Any) -> Fields:
    try:
        if not request.member_id and call.version >= _HEARTBEAT_WITH_OWN_ID:
            raise InvalidRequest("a member makes its id itself, and names it from the beginning")
        answer = await call.broker.groups.consumer_heartbeat(
            call.caller, request.group_id, _heartbeat(call, request)
        )
    except QuackError as error:
        is_full = isinstance(error, LimitReached)
        code = ErrorCode.group_max_size_reached if is_full else group_code_of(error)
        return {
            "error_code": code,
            "error_message": str(error),
            "member_epoch": 0,
            "heartbeat_interval": 0,
        }
    assignment = None
    if answer.assignment is not None:
        assignment = {"topic_partitions": _by_topic(answer.assignment)}
    return {
        "error_code": ErrorCode.none,
        "member_id": answer.member_id,
        "member_epoch": answer.epoch,
        "heartbeat_interval": answer.heartbeat_interval_ms,
        "assignment": assignment,
    }


CONSUMER_GROUP_HEARTBEAT_API: Final = schema_api(
    CONSUMER_GROUP_HEARTBEAT, 0, 1, 0, consumer_group_heartbeat
)


async def consumer_group_describe(call: Call, request: Any) -> Fields:
    found: list[Fields] = []
    room_bytes = limits.KAFKA_GROUPS_ANSWER_BYTES
    # Each group once, however often it is asked for: the answer is large where groups are.
    async for name in unhurried(dict.fromkeys(request.group_ids), every=10):
        try:
            group = call.broker.groups.describe(call.caller, name)
            if not isinstance(group, ConsumerGroupDescription):
                raise UnknownGroup(f"the group {name} goes by the classic protocol")
            room_bytes -= _described_bytes(group)
            if room_bytes < 0:
                raise LimitReached("too many members for one answer: ask for fewer groups at once")
        except QuackError as error:
            found.append(_not_described(name, error))
        else:
            fields = _described(call, group)
            if request.include_authorized_operations:
                fields = {**fields, "authorized_operations": GROUP_OPERATIONS}
            found.append(fields)
    return {"groups": found}


CONSUMER_GROUP_DESCRIBE_API: Final = schema_api(
    CONSUMER_GROUP_DESCRIBE, 0, 1, 0, consumer_group_describe
)


# --- inside ------------------------------------------------------------------------------------


def _heartbeat(call: Call, request: Any) -> Heartbeat:
    timeout, topics = request.rebalance_timeout, request.subscribed_topic_names
    owned = request.topic_partitions
    return Heartbeat(
        member_id=request.member_id,
        epoch=request.member_epoch,
        client_id=call.caller.client[: limits.NAME_BYTES],
        client_host=host_of(call),
        instance_id=request.instance_id,
        rack_id=request.rack_id,
        rebalance_timeout_ms=None if timeout == _AS_BEFORE else timeout // _MILLISECOND,
        topics=None if topics is None else frozenset(topics),
        pattern=getattr(request, "subscribed_topic_regex", None),
        assignor=request.server_assignor,
        owned=None if owned is None else frozenset(_keys(owned)),
    )


def _keys(topics: Iterable[Any]) -> Iterable[PartitionKey]:
    for topic in topics:
        # An id of zeros is none, and no partition of ours.
        if topic.topic_id is not None:
            for partition in topic.partitions:
                yield PartitionKey(topic.topic_id, partition)


def _by_topic(keys: Iterable[PartitionKey]) -> list[Fields]:
    topics: dict[uuid.UUID, list[int]] = {}
    for topic_id, partition in keys:
        topics.setdefault(topic_id, []).append(partition)
    return [
        {"topic_id": topic_id, "partitions": sorted(partitions)}
        for topic_id, partitions in topics.items()
    ]


def _described(call: Call, group: ConsumerGroupDescription) -> Fields:
    return {
        "error_code": ErrorCode.none,
        "group_id": group.name,
        "group_state": group.state.value,
        "group_epoch": group.epoch,
        "assignment_epoch": group.assignment_epoch,
        "assignor_name": group.assignor,
        "members": [_described_member(call, member) for member in group.members],
    }


def _described_member(call: Call, member: ConsumerMemberDescription) -> Fields:
    return {
        "member_id": member.member_id,
        "instance_id": member.instance_id,
        "rack_id": member.rack_id,
        "member_epoch": member.epoch,
        "client_id": member.client_id,
        "client_host": member.client_host,
        "subscribed_topic_names": sorted(member.topics),
        "subscribed_topic_regex": member.pattern or None,
        "assignment": {"topic_partitions": _named(call, member.assigned)},
        "target_assignment": {"topic_partitions": _named(call, member.target)},
        "member_type": _CONSUMER_MEMBER,
    }


def _named(call: Call, keys: Iterable[PartitionKey]) -> list[Fields]:
    topics: list[Fields] = []
    for fields in _by_topic(keys):
        try:
            name = call.broker.topic_by_id(fields["topic_id"]).name
        except UnknownTopic:
            # It is gone, and its reader has not let go of it yet.
            continue
        topics.append({**fields, "topic_name": name})
    return topics


def _described_bytes(group: ConsumerGroupDescription) -> int:
    return sum(
        _MEMBER_BYTES
        + sum(map(len, member.topics))
        + _PARTITION_BYTES * (len(member.assigned) + len(member.target))
        for member in group.members
    )


def _not_described(name: str, error: QuackError) -> Fields:
    code, state = group_code_of(error), ""
    if isinstance(error, UnknownGroup | InvalidGroup):
        # There is no group of a name that none can have, either.
        code, state = ErrorCode.group_id_not_found, GroupState.DEAD.value
    return {
        "error_code": code,
        "error_message": str(error),
        "group_id": name,
        "group_state": state,
        "group_epoch": 0,
        "assignment_epoch": 0,
        "assignor_name": "",
        "members": [],
    }
