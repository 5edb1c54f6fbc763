"""OffsetCommit, OffsetFetch and OffsetDelete: the committed offsets of groups.

The leader epoch that a client sends with an offset is stored and returned with it. The retention
time that old clients send is ignored: groups expire as a whole.

Kafka stores any committed number, even a negative one, which clients treat as no offset. kafkajs
resets offsets by committing -1 or -2, which mean the end and the start in ListOffsets. Here -2
commits the current start of the partition, and any other negative number removes the committed
offset.

While an open transaction commits offsets of a group, the committed offset may change soon. A client
that requires stable offsets then gets an error and retries.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, Final

from kio.schema.errors import ErrorCode

from quackmq.broker import Commit, MemberRef
from quackmq.errors import LimitReached, QuackError, UnknownGroup, UnknownTopic
from quackmq.model.topic import NO_LEADER_EPOCH, Cursor, PartitionKey, Topic
from quackmq.protocols.kafka import limits
from quackmq.protocols.kafka.api import (
    Call,
    change_together,
    find_partitions,
    find_topic,
    iterate_yielding,
    schema_api,
)
from quackmq.protocols.kafka.codec.writer import Fields
from quackmq.protocols.kafka.handlers.groups import group_code_of

OFFSET_COMMIT: Final = 8
OFFSET_FETCH: Final = 9
OFFSET_DELETE: Final = 47

#: The commit for a partition, or the error code that refuses it.
CommitOrError = Commit | ErrorCode

#: The first versions whose responses have these fields or errors.
_COMMIT_WITH_GROUP_NOT_FOUND: Final = 9
_FETCH_WITH_ERROR: Final = 2
_FETCH_WITH_GROUPS: Final = 8

#: The epoch of a client that is not a member.
_NO_EPOCH: Final = -1
#: The value for an offset that was never committed.
_NO_OFFSET: Final = -1
#: The value for the first offset of the partition.
_EARLIEST: Final = -2
#: No partitions: no transaction commits offsets.
_NO_PARTITIONS: Final[Set[PartitionKey]] = frozenset()
#: The size of a partition in a response, without its metadata.
_PARTITION_BYTES: Final = 32
#: The largest size of a character in UTF-8.
_CHARACTER_BYTES: Final = 4


# --- OffsetCommit ------------------------------------------------------------------------------


async def offset_commit(call: Call, request: Any) -> Fields:
    """Commit offsets of a group; return an error code for each partition."""
    commits_by_topic = [
        await _commits_of_topic(call, topic)
        async for topic in iterate_yielding(request.topics, every=100)
    ]
    commit = partial(_commit_offsets, call, request)
    return await commit_partitions(request.topics, commits_by_topic, commit)


OFFSET_COMMIT_API: Final = schema_api(OFFSET_COMMIT, 2, 10, 8, offset_commit)


async def commit_partitions(
    topics: Sequence[Any],
    commits_by_topic: Sequence[Sequence[CommitOrError]],
    commit: Callable[[list[Commit]], Awaitable[list[ErrorCode]]],
) -> Fields:
    """Commit all valid offsets together, and return the response for each partition. `commit`
    returns an error code for each commit. TxnOffsetCommit uses this too.
    """
    return {"topics": _topic_codes(topics, await change_together(commits_by_topic, commit))}


def _topic_codes(
    topics: Sequence[Any], codes_by_topic: Sequence[Sequence[ErrorCode]]
) -> list[Fields]:
    """Return the fields of the requested topics, with an error code for each partition."""
    return [
        {
            **_topic_fields(topic),
            "partitions": [
                {"partition_index": partition.partition_index, "error_code": code}
                for partition, code in zip(topic.partitions, codes, strict=True)
            ],
        }
        for topic, codes in zip(topics, codes_by_topic, strict=True)
    ]


async def _commits_of_topic(call: Call, topic: Any) -> list[CommitOrError]:
    """Return the commit of each partition of one topic. An unknown topic returns its error code for
    each of them.
    """
    topic_or_error = find_topic(call.broker, _name_or_id(topic))
    if not isinstance(topic_or_error, Topic):
        return [topic_or_error] * len(topic.partitions)
    return [
        await _commit_of_partition(call, topic_or_error, partition)
        for partition in topic.partitions
    ]


async def _commit_of_partition(call: Call, topic: Topic, partition: Any) -> CommitOrError:
    """Return the commit for a partition, or the error code that refuses it. The module's docstring
    explains negative offsets.
    """
    key = PartitionKey(topic.id, partition.partition_index)
    offset: int | None = partition.committed_offset
    if offset == _EARLIEST:
        try:
            offset = (await call.broker.offsets(call.caller, key)).first
        except QuackError as error:
            return group_code_of(error)
    # None removes the committed offset.
    elif partition.committed_offset < 0:
        offset = None
    metadata = partition.committed_metadata or ""
    return Commit(key, offset, metadata, committed_leader_epoch(partition))


def committed_leader_epoch(partition: Any) -> int:
    """Return the leader epoch of a committed offset; NO_LEADER_EPOCH in versions without one."""
    epoch: int = getattr(partition, "committed_leader_epoch", NO_LEADER_EPOCH)
    return epoch


async def _commit_offsets(call: Call, request: Any, commits: list[Commit]) -> list[ErrorCode]:
    """Commit the offsets; return an error code for each. An error of the whole request is repeated
    for each offset, because the response has no field for it.
    """
    if not commits:
        return []
    instance_id = getattr(request, "group_instance_id", None)
    member = MemberRef(request.member_id, request.generation_id_or_member_epoch, instance_id)
    try:
        outcomes = await call.broker.groups.commit(call.caller, request.group_id, member, commits)
    except QuackError as error:
        return [_refusal(call, request.group_id, error)] * len(commits)
    return [outcome_code(outcome) for outcome in outcomes]


def _refusal(call: Call, group: str, error: QuackError) -> ErrorCode:
    """Return the error code; newer versions distinguish a missing group from a wrong generation."""
    code = group_code_of(error)
    if code is ErrorCode.illegal_generation and call.version >= _COMMIT_WITH_GROUP_NOT_FOUND:
        try:
            call.broker.groups.describe(call.caller, group)
        except UnknownGroup as unknown:
            return group_code_of(unknown)
    return code


# --- OffsetFetch -------------------------------------------------------------------------------


async def offset_fetch(call: Call, request: Any) -> Fields:
    """Return the committed offsets of one group (up to version 7) or of several (from version 8
    on). All groups share the room of one response.
    """
    response_room = _ResponseRoom(limits.KAFKA_GROUPS_ANSWER_BYTES)
    requires_stable = getattr(request, "require_stable", False)
    if call.version < _FETCH_WITH_GROUPS:
        return await _fetch_group(call, request, response_room, requires_stable)
    return {
        "groups": [
            await _fetch_group(call, group, response_room, requires_stable)
            async for group in iterate_yielding(request.groups, every=100)
        ]
    }


OFFSET_FETCH_API: Final = schema_api(OFFSET_FETCH, 1, 10, 6, offset_fetch)


class _ResponseRoom:
    """The remaining bytes of a response: a request may name the same group many times."""

    def __init__(self, remaining_bytes: int) -> None:
        self._remaining_bytes = remaining_bytes

    def use(self, cursors: Iterable[Cursor | None] = ()) -> None:
        """Take the room for these offsets; raise LimitReached if the response is full. Without
        offsets, only check whether it is full.
        """
        for cursor in cursors:
            metadata_bytes = 0 if cursor is None else len(cursor.metadata) * _CHARACTER_BYTES
            self._remaining_bytes -= _PARTITION_BYTES + metadata_bytes
        if self._remaining_bytes < 0:
            raise LimitReached("too many offsets for one response: request fewer at a time")


async def _fetch_group(
    call: Call, group: Any, response_room: _ResponseRoom, requires_stable: bool
) -> Fields:
    """Return one group's offsets: of the named partitions, or of all."""
    try:
        # Stop before the group's offsets are read if the response is full already.
        response_room.use()
        call.broker.groups.check_fetch(call.caller, group.group_id, _requesting_member(group))
        # Read the pending offsets first: those that are pending now are not yet committed below.
        pending = _NO_PARTITIONS
        if requires_stable:
            pending = call.broker.transactions.pending_offsets(call.caller, group.group_id)
        if group.topics is None:
            topics = await _fetch_all(call, group.group_id, response_room, pending)
        else:
            topics = await _fetch_named(call, group.group_id, group.topics, response_room, pending)
    except QuackError as error:
        code = group_code_of(error)
        if call.version < _FETCH_WITH_ERROR:
            # These versions have an error field only in each partition.
            return {"topics": [_topic_error(topic, code) for topic in group.topics]}
        return {"group_id": group.group_id, "error_code": code, "topics": []}
    return {"group_id": group.group_id, "error_code": ErrorCode.none, "topics": topics}


def _requesting_member(group: Any) -> MemberRef:
    """Return the member that asks, if the request names one (version 9 and later)."""
    member_id = getattr(group, "member_id", None) or ""
    return MemberRef(member_id, getattr(group, "member_epoch", _NO_EPOCH))


async def _fetch_all(
    call: Call, group: str, response_room: _ResponseRoom, pending: Set[PartitionKey]
) -> list[Fields]:
    """Return all committed offsets of a group, by topic."""
    cursors = await call.broker.groups.committed(call.caller, group)
    response_room.use(cursors.values())
    partitions_by_topic: dict[uuid.UUID, list[Fields]] = {}
    async for key, cursor in iterate_yielding(sorted(cursors.items()), every=1000):
        partitions_by_topic.setdefault(key.topic_id, []).append(
            _partition_offset(key, cursor, pending)
        )
    topics: list[Fields] = []
    for topic_id, partitions in partitions_by_topic.items():
        try:
            name = call.broker.topic_by_id(topic_id).name
        except UnknownTopic:
            # The topic is being deleted, together with its offsets.
            continue
        topics.append({"name": name, "topic_id": topic_id, "partitions": partitions})
    return topics


async def _fetch_named(
    call: Call,
    group: str,
    requested_topics: Iterable[Any],
    response_room: _ResponseRoom,
    pending: Set[PartitionKey],
) -> list[Fields]:
    """Return a group's committed offsets of the requested partitions, in the order of the
    request.
    """
    topics_or_errors = [
        (topic, find_topic(call.broker, _name_or_id(topic))) for topic in requested_topics
    ]
    keys = [
        PartitionKey(topic_or_error.id, partition)
        for topic, topic_or_error in topics_or_errors
        if isinstance(topic_or_error, Topic)
        for partition in topic.partition_indexes
    ]
    cursors = await call.broker.groups.committed(call.caller, group, keys)
    response_room.use(cursors.get(key) for key in keys)
    return [
        _topic_offsets(topic, topic_or_error, cursors, pending)
        async for topic, topic_or_error in iterate_yielding(topics_or_errors, every=100)
    ]


def _topic_offsets(
    topic: Any,
    topic_or_error: Topic | ErrorCode,
    cursors: Mapping[PartitionKey, Cursor],
    pending: Set[PartitionKey],
) -> Fields:
    """Return the committed offsets of one requested topic, or the error if the topic is unknown."""
    if isinstance(topic_or_error, Topic):
        keys = [PartitionKey(topic_or_error.id, partition) for partition in topic.partition_indexes]
        partitions = [_partition_offset(key, cursors.get(key), pending) for key in keys]
        return {**_topic_fields(topic), "partitions": partitions}
    # Kafka's rule: an unknown topic name has no offsets, but an unknown topic id is an error.
    is_by_id = hasattr(topic, "topic_id")
    return _topic_error(topic, topic_or_error if is_by_id else ErrorCode.none)


def _topic_error(topic: Any, code: ErrorCode) -> Fields:
    partitions = [_offset_fields(partition, None, code) for partition in topic.partition_indexes]
    return {**_topic_fields(topic), "partitions": partitions}


def _partition_offset(
    key: PartitionKey, cursor: Cursor | None, pending: Set[PartitionKey]
) -> Fields:
    """Return a group's committed offset of a partition, or an error if a transaction may change
    it."""
    if key in pending:
        return _offset_fields(key.partition, None, ErrorCode.unstable_offset_commit)
    return _offset_fields(key.partition, cursor)


def _offset_fields(
    partition: int, cursor: Cursor | None, code: ErrorCode = ErrorCode.none
) -> Fields:
    """Return the fields of one partition; -1 is the offset if there is no commit."""
    offset = None if cursor is None else cursor.offset
    return {
        "partition_index": partition,
        "committed_offset": _NO_OFFSET if offset is None else offset,
        "committed_leader_epoch": NO_LEADER_EPOCH if cursor is None else cursor.leader_epoch,
        "metadata": "" if cursor is None else cursor.metadata,
        "error_code": code,
    }


# --- OffsetDelete ------------------------------------------------------------------------------


async def offset_delete(call: Call, request: Any) -> Fields:
    """Delete a group's committed offsets of the named partitions; return an error code for each."""
    keys_by_topic = [
        find_partitions(
            call.broker, topic.name, [each.partition_index for each in topic.partitions]
        )
        for topic in request.topics
    ]
    try:
        codes_by_topic = await change_together(
            keys_by_topic, partial(_delete_offsets, call, request.group_id)
        )
    except QuackError as error:
        return {"error_code": group_code_of(error), "topics": []}
    return {"error_code": ErrorCode.none, "topics": _topic_codes(request.topics, codes_by_topic)}


OFFSET_DELETE_API: Final = schema_api(OFFSET_DELETE, 0, 0, 1, offset_delete)


async def _delete_offsets(call: Call, group: str, keys: list[PartitionKey]) -> list[ErrorCode]:
    """Delete a group's committed offsets; return an error code for each."""
    outcomes = await call.broker.groups.delete_offsets(call.caller, group, keys)
    return [outcome_code(outcome) for outcome in outcomes]


# --- shared helpers ----------------------------------------------------------------------------


def _name_or_id(topic: Any) -> str | uuid.UUID | None:
    """Return the name by which a request gives a topic, or its id in versions without names."""
    name: str | None = getattr(topic, "name", None)
    return topic.topic_id if name is None else name


def _topic_fields(topic: Any) -> Fields:
    """Return the topic fields as the request names them."""
    return {"name": getattr(topic, "name", None), "topic_id": getattr(topic, "topic_id", None)}


def outcome_code(outcome: QuackError | None) -> ErrorCode:
    return ErrorCode.none if outcome is None else group_code_of(outcome)
