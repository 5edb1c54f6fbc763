"""The APIs of consumer groups: members join, get their assignment and leave; groups are listed,
described and deleted.

This module only translates; `broker.groups` implements the groups. JoinGroup and SyncGroup wait for
other members. When the server closes, they return NOT_COORDINATOR: the client then finds the
coordinator again and retries.

Each API reports a missing group as Kafka does. A member gets UNKNOWN_MEMBER_ID, DescribeGroups
returns the state Dead, and DeleteGroups returns GROUP_ID_NOT_FOUND.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from datetime import timedelta
from typing import Any, Final, TypeVar

from kio.schema.errors import ErrorCode

from quackmq import limits as shared_limits
from quackmq.broker import (
    ConsumerGroupDescription,
    GroupDescription,
    GroupState,
    JoinRequest,
    JoinResponse,
    LeaveRequest,
    MemberDescription,
    MemberRef,
    SyncRequest,
)
from quackmq.errors import (
    BrokerClosing,
    InvalidGroup,
    LimitReached,
    MemberIdRequired,
    QuackError,
    StorageError,
    StoreFenced,
    UnknownGroup,
)
from quackmq.protocols.kafka import limits
from quackmq.protocols.kafka.api import (
    Call,
    gather_in_chunks,
    in_chunks,
    iterate_yielding,
    schema_api,
)
from quackmq.protocols.kafka.codec.writer import Fields
from quackmq.protocols.kafka.errors import code_of

Description = TypeVar("Description", GroupDescription, ConsumerGroupDescription)

HEARTBEAT: Final = 12
LEAVE_GROUP: Final = 13
SYNC_GROUP: Final = 14
JOIN_GROUP: Final = 11
DESCRIBE_GROUPS: Final = 15
LIST_GROUPS: Final = 16
DELETE_GROUPS: Final = 42

#: The first versions with these fields or rules.
_JOIN_WITH_REBALANCE_TIMEOUT: Final = 1
_JOIN_WITH_ID_FIRST: Final = 4
_JOIN_WITH_NULL_PROTOCOL: Final = 7
_JOIN_WITH_SKIPPED_ASSIGNMENT: Final = 9
_SYNC_WITH_PROTOCOL: Final = 5
_LEAVE_WITH_SEVERAL: Final = 3
_DESCRIBE_WITH_NOT_FOUND: Final = 6

#: The operations on a group that every client may do, as bits by Kafka's numbers: read, delete,
#: describe, describe and alter its configs.
GROUP_OPERATIONS: Final = 1 << 3 | 1 << 6 | 1 << 8 | 1 << 10 | 1 << 11
#: The size of a member in a response, without its metadata and assignment.
_MEMBER_BYTES: Final = 256
_MILLISECOND: Final = timedelta(milliseconds=1)


def group_code_of(error: QuackError) -> ErrorCode:
    """Return the code of an error in a group API. If the broker cannot continue, clients must find
    the group's coordinator again and retry.
    """
    if isinstance(error, (BrokerClosing, StoreFenced)):
        return ErrorCode.not_coordinator
    if isinstance(error, StorageError):
        return ErrorCode.coordinator_not_available
    return code_of(error)


# --- for members -------------------------------------------------------------------------------


async def join_group(call: Call, request: Any) -> Fields:
    """Add a member, and wait until the rebalance ends. Return the member's id and generation; the
    leader also gets all members.
    """
    if not call.peer.may_wait:
        return _join_error(call, ErrorCode.not_coordinator, request.member_id)
    try:
        joined = await call.broker.groups.join(
            call.caller, request.group_id, _parse_join(call, request)
        )
    except MemberIdRequired as error:
        # The client joins again with the id that the broker has just made for it.
        return _join_error(call, code_of(error), error.member_id)
    except LimitReached:
        return _join_error(call, ErrorCode.group_max_size_reached, request.member_id)
    except QuackError as error:
        return _join_error(call, _member_code_of(error), request.member_id)
    return _joined_fields(joined)


JOIN_GROUP_API: Final = schema_api(JOIN_GROUP, 0, 9, 6, join_group, may_wait=True)


async def sync_group(call: Call, request: Any) -> Fields:
    """Take the leader's assignments; wait for them, and return the assignment of this member."""
    if not call.peer.may_wait:
        return _sync_error(ErrorCode.not_coordinator)
    protocol_type = getattr(request, "protocol_type", None)
    protocol = getattr(request, "protocol_name", None)
    # Kafka's rule: from this version on, a member must name both.
    if call.version >= _SYNC_WITH_PROTOCOL and None in (protocol_type, protocol):
        return _sync_error(ErrorCode.inconsistent_group_protocol)
    sync = SyncRequest(
        _member_ref(request),
        protocol_type,
        protocol,
        {entry.member_id: entry.assignment for entry in request.assignments},
    )
    try:
        synced = await call.broker.groups.sync(call.caller, request.group_id, sync)
    except QuackError as error:
        return _sync_error(_member_code_of(error))
    return {
        "error_code": ErrorCode.none,
        "protocol_type": synced.protocol_type,
        "protocol_name": synced.protocol,
        "assignment": synced.assignment,
    }


SYNC_GROUP_API: Final = schema_api(SYNC_GROUP, 0, 5, 4, sync_group, may_wait=True)


async def heartbeat(call: Call, request: Any) -> Fields:
    """Restart a member's session timeout, or return the error by which the member learns of a
    rebalance.
    """
    try:
        call.broker.groups.heartbeat(call.caller, request.group_id, _member_ref(request))
    except QuackError as error:
        return {"error_code": _member_code_of(error)}
    return {"error_code": ErrorCode.none}


def heartbeat_arrived(call: Call, request: Any) -> None:
    """Keep the member of a heartbeat alive while the heartbeat waits behind other requests."""
    call.broker.groups.touch(request.group_id, request.member_id)


HEARTBEAT_API: Final = schema_api(HEARTBEAT, 0, 4, 4, heartbeat, on_arrival=heartbeat_arrived)


async def leave_group(call: Call, request: Any) -> Fields:
    """Remove members, and return an error code for each. Other tasks run after every 100
    members.
    """
    if call.version >= _LEAVE_WITH_SEVERAL:
        leaving = [
            LeaveRequest(entry.member_id, entry.group_instance_id) for entry in request.members
        ]
    else:
        leaving = [LeaveRequest(request.member_id, None)]
    outcomes: list[QuackError | None] = []
    try:
        # An invalid name is an error even if the request lists no members.
        call.broker.groups.check_name(request.group_id)
        async for chunk in iterate_yielding(in_chunks(leaving, size=100), every=1):
            outcomes += await call.broker.groups.leave(call.caller, request.group_id, chunk)
    except QuackError as error:
        return {"error_code": _member_code_of(error), "members": []}
    codes = [
        ErrorCode.none if outcome is None else _member_code_of(outcome) for outcome in outcomes
    ]
    # Versions without a list of members report the only member's error as the request's error.
    request_code = codes[0] if call.version < _LEAVE_WITH_SEVERAL else ErrorCode.none
    return {
        "error_code": request_code,
        "members": [
            {
                "member_id": member.member_id,
                "group_instance_id": member.instance_id,
                "error_code": code,
            }
            for member, code in zip(leaving, codes, strict=True)
        ],
    }


LEAVE_GROUP_API: Final = schema_api(LEAVE_GROUP, 0, 5, 4, leave_group)


# --- for administrators ------------------------------------------------------------------------


async def describe_groups(call: Call, request: Any) -> Fields:
    """Describe each requested classic group; return an error or the state Dead for every other
    name.
    """
    with_operations = getattr(request, "include_authorized_operations", False)
    groups: list[Fields] = []
    async for name, group in describe_each(call, request.groups, GroupDescription, _member_bytes):
        if isinstance(group, QuackError):
            groups.append(_error_fields(call, name, group))
        else:
            groups.append(_group_fields(group, with_operations))
    return {"groups": groups}


DESCRIBE_GROUPS_API: Final = schema_api(DESCRIBE_GROUPS, 0, 6, 5, describe_groups)


async def describe_each(
    call: Call,
    names: Iterable[str],
    group_class: type[Description],
    member_bytes: Callable[[Any], int],
) -> AsyncIterator[tuple[str, Description | QuackError]]:
    """Yield the groups of one class, or the error of each that is not described. A repeated name is
    described once. When the response is full, further groups get LimitReached.
    """
    room_bytes = limits.KAFKA_GROUPS_ANSWER_BYTES
    async for name in iterate_yielding(dict.fromkeys(names), every=10):
        try:
            group = call.broker.groups.describe(call.caller, name)
            if not isinstance(group, group_class):
                raise UnknownGroup(f"the group {name} uses the other group protocol")
            # A group that does not fit uses up the room too: every later group then gets the error.
            room_bytes -= sum(_MEMBER_BYTES + member_bytes(member) for member in group.members)
            if room_bytes < 0:
                raise LimitReached(
                    "too many members for one response: request fewer groups at a time"
                )
        except QuackError as error:
            yield name, error
        else:
            yield name, group


async def list_groups(call: Call, request: Any) -> Fields:
    """Return all groups whose state and type pass the filters; an empty filter passes all
    groups.
    """
    # The filters ignore upper and lower case. The values of `GroupKind` are in lower case.
    states = {state.lower() for state in getattr(request, "states_filter", ())}
    types = {kind.lower() for kind in getattr(request, "types_filter", ())}
    try:
        groups = call.broker.groups.all(call.caller)
    except QuackError as error:
        return {"error_code": group_code_of(error), "groups": []}
    return {
        "error_code": ErrorCode.none,
        "groups": [
            {
                "group_id": group.name,
                "protocol_type": group.protocol_type,
                "group_state": group.state.value,
                "group_type": group.kind.value,
            }
            async for group in iterate_yielding(groups, every=1000)
            if not states or group.state.lower() in states
            if not types or group.kind in types
        ],
    }


LIST_GROUPS_API: Final = schema_api(LIST_GROUPS, 0, 5, 3, list_groups)


async def delete_groups(call: Call, request: Any) -> Fields:
    names = dict.fromkeys(request.groups_names)
    return {"results": await gather_in_chunks(_delete_group(call, name) for name in names)}


DELETE_GROUPS_API: Final = schema_api(DELETE_GROUPS, 0, 2, 2, delete_groups)


# --- internal ----------------------------------------------------------------------------------


def _parse_join(call: Call, request: Any) -> JoinRequest:
    """Decode a JoinGroup request of any version. Version 0 has one timeout for both session and
    rebalance.
    """
    session_timeout_ms = request.session_timeout // _MILLISECOND
    rebalance_timeout_ms = session_timeout_ms
    if call.version >= _JOIN_WITH_REBALANCE_TIMEOUT:
        rebalance_timeout_ms = request.rebalance_timeout // _MILLISECOND
    return JoinRequest(
        member_id=request.member_id,
        instance_id=getattr(request, "group_instance_id", None),
        client_id=call.caller.client[: shared_limits.NAME_BYTES],
        client_host=host_of(call),
        protocol_type=request.protocol_type,
        protocols=tuple((protocol.name, protocol.metadata) for protocol in request.protocols),
        session_timeout_ms=session_timeout_ms,
        rebalance_timeout_ms=rebalance_timeout_ms,
        needs_id_first=call.version >= _JOIN_WITH_ID_FIRST,
        may_skip_assignment=call.version >= _JOIN_WITH_SKIPPED_ASSIGNMENT,
    )


def host_of(call: Call) -> str:
    """Return the client's host in Kafka's format, which tools parse: an empty host name, a slash,
    and the address without its port.
    """
    host, _, _ = call.caller.address.rpartition(":")
    return f"/{host}"


def _joined_fields(joined: JoinResponse) -> Fields:
    """Return the response to a member that has joined."""
    return {
        "error_code": ErrorCode.none,
        "generation_id": joined.generation,
        "protocol_type": joined.protocol_type,
        "protocol_name": joined.protocol,
        "leader": joined.leader,
        "skip_assignment": joined.skip_assignment,
        "member_id": joined.member_id,
        "members": [
            {
                "member_id": member.member_id,
                "group_instance_id": member.instance_id,
                "metadata": member.metadata,
            }
            for member in joined.members
        ],
    }


def _join_error(call: Call, code: ErrorCode, member_id: str) -> Fields:
    """Return the response to a refused JoinGroup. Versions before 7 cannot encode a null protocol
    name.
    """
    return {
        "error_code": code,
        "protocol_name": None if call.version >= _JOIN_WITH_NULL_PROTOCOL else "",
        "leader": "",
        "member_id": member_id,
        "members": [],
    }


def _sync_error(code: ErrorCode) -> Fields:
    return {"error_code": code, "assignment": b""}


def _member_ref(request: Any) -> MemberRef:
    instance_id = getattr(request, "group_instance_id", None)
    return MemberRef(request.member_id, request.generation_id, instance_id)


def _member_code_of(error: QuackError) -> ErrorCode:
    """Return the code of an error for a member; a missing group means an unknown member."""
    if isinstance(error, UnknownGroup):
        return ErrorCode.unknown_member_id
    return group_code_of(error)


def _group_fields(group: GroupDescription, with_operations: bool) -> Fields:
    """Return the fields of one described group."""
    fields = {
        "error_code": ErrorCode.none,
        "group_id": group.name,
        "group_state": group.state.value,
        "protocol_type": group.protocol_type,
        "protocol_data": group.protocol,
        "members": [_member_fields(member) for member in group.members],
    }
    return {**fields, "authorized_operations": GROUP_OPERATIONS} if with_operations else fields


def _member_fields(member: MemberDescription) -> Fields:
    """Return the fields of one member of a described group."""
    return {
        "member_id": member.member_id,
        "group_instance_id": member.instance_id,
        "client_id": member.client_id,
        "client_host": member.client_host,
        "member_metadata": member.metadata,
        "member_assignment": member.assignment,
    }


def _member_bytes(member: MemberDescription) -> int:
    return len(member.metadata) + len(member.assignment)


def _error_fields(call: Call, name: str, error: QuackError) -> Fields:
    """Return the fields of a group that is not described. A missing group has the state Dead.
    Versions before 6 report it without an error, as Kafka does.
    """
    message: str | None = str(error)
    if not isinstance(error, UnknownGroup | InvalidGroup):
        code, state = group_code_of(error), ""
    elif call.version < _DESCRIBE_WITH_NOT_FOUND:
        code, state, message = ErrorCode.none, GroupState.DEAD.value, None
    else:
        # A group with an invalid name cannot exist either.
        code, state = ErrorCode.group_id_not_found, GroupState.DEAD.value
    return {
        "error_code": code,
        "error_message": message,
        "group_id": name,
        "group_state": state,
        "protocol_type": "",
        "protocol_data": "",
        "members": [],
    }


async def _delete_group(call: Call, name: str) -> Fields:
    """Delete one group; return its error code."""
    code = ErrorCode.none
    try:
        await call.broker.groups.delete(call.caller, name)
    # A group with an invalid name cannot exist.
    except InvalidGroup:
        code = ErrorCode.group_id_not_found
    except QuackError as error:
        code = group_code_of(error)
    return {"group_id": name, "error_code": code}
