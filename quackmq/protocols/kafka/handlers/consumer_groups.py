"""The APIs of the newer group protocol (KIP-848): ConsumerGroupHeartbeat and ConsumerGroupDescribe.

Members send everything with the heartbeat. This module only translates; `broker.groups` implements
the groups. For ConsumerGroupDescribe a classic group does not exist, and for DescribeGroups a group
of the newer protocol does not exist. Tools call one API and then the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

from kio.schema.errors import ErrorCode

from quackmq import limits
from quackmq.broker import (
    ConsumerGroupDescription,
    ConsumerMemberDescription,
    Heartbeat,
)
from quackmq.errors import (
    InvalidRequest,
    LimitReached,
    OtherGroupProtocol,
    QuackError,
)
from quackmq.model.topic import PartitionKey
from quackmq.protocols.kafka.api import Call, group_by_topic, group_by_topic_id, schema_api
from quackmq.protocols.kafka.codec.writer import Fields
from quackmq.protocols.kafka.handlers.groups import (
    GROUP_OPERATIONS,
    describe_each,
    group_code_of,
    heartbeat_arrived,
    host_of,
)

CONSUMER_GROUP_HEARTBEAT: Final = 68
CONSUMER_GROUP_DESCRIBE: Final = 69

#: The first version in which a client makes its member id itself and may subscribe by a pattern.
_HEARTBEAT_WITH_OWN_ID: Final = 1
#: The epoch of a member that joins.
_JOINING_EPOCH: Final = 0
#: The value for a timeout that has not changed.
_UNCHANGED: Final = timedelta(milliseconds=-1)
_MILLISECOND: Final = timedelta(milliseconds=1)
#: The type by which tools distinguish these members from classic ones in the same group.
_CONSUMER_MEMBER: Final = 1
#: The estimated size of a partition in a response.
_PARTITION_BYTES: Final = 8


async def consumer_group_heartbeat(call: Call, request: Any) -> Fields:
    """Pass a heartbeat to the group; return the member's epoch and, if it has changed, its
    assignment.
    """
    try:
        _check_request(call, request)
        response = await call.broker.groups.consumer_heartbeat(
            call.caller, request.group_id, _parse_heartbeat(call, request)
        )
    except QuackError as error:
        return {
            "error_code": _heartbeat_code_of(error),
            "error_message": str(error),
            "member_epoch": 0,
            "heartbeat_interval": 0,
        }
    assignment = None
    if response.assignment is not None:
        assignment = {
            "topic_partitions": [
                {"topic_id": topic_id, "partitions": partitions}
                for topic_id, partitions in group_by_topic_id(response.assignment).items()
            ]
        }
    return {
        "error_code": ErrorCode.none,
        "member_id": response.member_id,
        "member_epoch": response.epoch,
        "heartbeat_interval": response.heartbeat_interval_ms,
        "assignment": assignment,
    }


CONSUMER_GROUP_HEARTBEAT_API: Final = schema_api(
    CONSUMER_GROUP_HEARTBEAT, 0, 1, 0, consumer_group_heartbeat, on_arrival=heartbeat_arrived
)


async def consumer_group_describe(call: Call, request: Any) -> Fields:
    """Describe each requested group of the newer protocol; return an error for every other name."""
    groups: list[Fields] = []
    group_class = ConsumerGroupDescription
    async for name, group in describe_each(call, request.group_ids, group_class, _member_bytes):
        if isinstance(group, QuackError):
            groups.append(_error_fields(name, group))
            continue
        fields = _group_fields(call, group)
        if request.include_authorized_operations:
            fields = {**fields, "authorized_operations": GROUP_OPERATIONS}
        groups.append(fields)
    return {"groups": groups}


CONSUMER_GROUP_DESCRIBE_API: Final = schema_api(
    CONSUMER_GROUP_DESCRIBE, 0, 1, 0, consumer_group_describe
)


# --- internal ----------------------------------------------------------------------------------


def _heartbeat_code_of(error: QuackError) -> ErrorCode:
    """Return the code of a refused heartbeat. Two errors have another code here than in the other
    group APIs.
    """
    if isinstance(error, LimitReached):
        return ErrorCode.group_max_size_reached
    if isinstance(error, OtherGroupProtocol):
        # While classic members use the name, there is no group of the newer protocol.
        return ErrorCode.group_id_not_found
    return group_code_of(error)


def _check_request(call: Call, request: Any) -> None:
    """Raise InvalidRequest for requests that only this API refuses."""
    if not request.group_id.strip():
        raise InvalidRequest("a group has a name: group.id is empty")
    if call.version >= _HEARTBEAT_WITH_OWN_ID and not request.member_id.strip():
        raise InvalidRequest("a member makes its id itself, and names it from the beginning")
    if request.member_epoch == _JOINING_EPOCH and request.topic_partitions:
        raise InvalidRequest("a member that joins owns no partitions")


def _parse_heartbeat(call: Call, request: Any) -> Heartbeat:
    """Decode a heartbeat. None in a field means that the value has not changed since the member's
    last heartbeat.
    """
    timeout, topics = request.rebalance_timeout, request.subscribed_topic_names
    owned = request.topic_partitions
    return Heartbeat(
        member_id=request.member_id,
        epoch=request.member_epoch,
        client_id=call.caller.client[: limits.NAME_BYTES],
        client_host=host_of(call),
        instance_id=request.instance_id,
        rack_id=request.rack_id,
        rebalance_timeout_ms=None if timeout == _UNCHANGED else timeout // _MILLISECOND,
        topics=None if topics is None else frozenset(topics),
        pattern=getattr(request, "subscribed_topic_regex", None),
        assignor=request.server_assignor,
        owned=None if owned is None else frozenset(_partition_keys(owned)),
    )


def _partition_keys(topics: Iterable[Any]) -> Iterable[PartitionKey]:
    """Yield the keys of the partitions that a heartbeat lists by topic."""
    for topic in topics:
        # The codec decodes an id of zeros as None. It names no topic: its partitions are ignored.
        if topic.topic_id is not None:
            for partition in topic.partitions:
                yield PartitionKey(topic.topic_id, partition)


def _group_fields(call: Call, group: ConsumerGroupDescription) -> Fields:
    """Return the fields of one described group."""
    return {
        "error_code": ErrorCode.none,
        "group_id": group.name,
        "group_state": group.state.value,
        "group_epoch": group.epoch,
        "assignment_epoch": group.assignment_epoch,
        "assignor_name": group.assignor,
        "members": [_member_fields(call, member) for member in group.members],
    }


def _member_fields(call: Call, member: ConsumerMemberDescription) -> Fields:
    """Return the fields of one member, with the partitions that it has now and those that it will
    get.
    """
    return {
        "member_id": member.member_id,
        "instance_id": member.instance_id,
        "rack_id": member.rack_id,
        "member_epoch": member.epoch,
        "client_id": member.client_id,
        "client_host": member.client_host,
        "subscribed_topic_names": sorted(member.topics),
        "subscribed_topic_regex": member.pattern,
        "assignment": {"topic_partitions": _partition_fields(call, member.assigned)},
        "target_assignment": {"topic_partitions": _partition_fields(call, member.target)},
        "member_type": _CONSUMER_MEMBER,
    }


def _partition_fields(call: Call, keys: Iterable[PartitionKey]) -> list[Fields]:
    return [
        {"topic_id": topic.id, "topic_name": topic.name, "partitions": partitions}
        for topic, partitions in group_by_topic(call.broker, keys)
    ]


def _member_bytes(member: ConsumerMemberDescription) -> int:
    """Estimate the size of a member in a response; `describe_each` adds the fixed part."""
    partitions = len(member.assigned) + len(member.target)
    return sum(map(len, member.topics)) + _PARTITION_BYTES * partitions


def _error_fields(name: str, error: QuackError) -> Fields:
    """Return the fields of a group that is not described: the error, and empty values for
    the rest.
    """
    # The group with the empty name only holds offsets, so it is never a group of this protocol.
    code = group_code_of(error) if name else ErrorCode.invalid_group_id
    return {
        "error_code": code,
        "error_message": str(error),
        "group_id": name,
        "group_state": "",
        "group_epoch": 0,
        "assignment_epoch": 0,
        "assignor_name": "",
        "members": [],
    }
