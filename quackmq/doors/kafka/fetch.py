"""Fetch: whole batches out, as the store holds them, now or as soon as there are enough.

Sessions are refused in the way that KIP-227 has for it: the answer says session 0, so clients name
all their partitions each time. Answers are smaller than a client allows (`Peer.answer_bytes`), so
that slow readers cost little; it asks again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kio.schema.errors import ErrorCode

from quackmq import limits
from quackmq.doors.kafka.api import Api, Call, find_topic
from quackmq.doors.kafka.errors import code_of
from quackmq.errors import QuackError
from quackmq.record import Buffer
from quackmq.topic import PartitionKey, Read, Slice, Topic
from quackmq.wire.kafka.fetch import (
    API_KEY,
    FIRST_WITH_SESSIONS,
    FLEXIBLE_FROM,
    FetchRequest,
    PartitionData,
    PartitionWish,
    TopicData,
    TopicWish,
    read_request,
    write_response,
)

#: A request without a session; with 0 the client would like one, if there were any.
_SESSIONLESS: Final = (-1, 0)


async def handle(call: Call, request: FetchRequest) -> Sequence[Buffer]:
    if call.version >= FIRST_WITH_SESSIONS:
        if request.session_id != 0:
            return write_response(call.version, (), ErrorCode.fetch_session_id_not_found)
        if request.session_epoch not in _SESSIONLESS:
            return write_response(call.version, (), ErrorCode.invalid_fetch_session_epoch)
    found = [(wish, find_topic(call.broker, wish.topic)) for wish in request.topics]
    reads = [
        Read(PartitionKey(topic.id, wish.partition), wish.offset, max(1, wish.max_bytes))
        for topic_wish, topic in found
        if isinstance(topic, Topic)
        for wish in topic_wish.partitions
    ]
    all_found = all(isinstance(topic, Topic) for _, topic in found)
    slices = iter(await _read(call, request, reads, may_wait=all_found and call.peer.may_wait))
    topics = [_topic(wish, topic, slices) for wish, topic in found]
    return write_response(call.version, topics, isolation=request.isolation)


FETCH_API: Final = Api(API_KEY, 4, 18, FLEXIBLE_FROM, read_request, handle, waits=True)


async def _read(
    call: Call, request: FetchRequest, reads: Sequence[Read], may_wait: bool
) -> Sequence[Slice]:
    wait_ms = min(max(request.max_wait_ms, 0), limits.READ_WAIT_MS) if may_wait else 0
    answer_bytes = call.peer.answer_bytes
    try:
        return await call.broker.read(
            call.caller,
            reads,
            max_bytes=min(max(request.max_bytes, 1), answer_bytes),
            # More than we would ever send at once is not worth waiting for.
            min_bytes=min(max(request.min_bytes, 0), answer_bytes),
            wait_ms=wait_ms,
        )
    except QuackError as error:
        return [Slice(read.key, (), 0, -1, -1, error) for read in reads]


def _topic(wish: TopicWish, topic: Topic | ErrorCode, slices: Iterator[Slice]) -> TopicData:
    if isinstance(topic, Topic):
        partitions = [_data(partition, next(slices)) for partition in wish.partitions]
    else:
        partitions = [PartitionData(partition.partition, topic) for partition in wish.partitions]
    return TopicData(wish.topic, partitions)


def _data(wish: PartitionWish, part: Slice) -> PartitionData:
    if part.error is not None:
        code = code_of(part.error)
        return PartitionData(wish.partition, code, part.next_offset, part.first_offset)
    return PartitionData(
        wish.partition, 0, part.next_offset, part.first_offset, part.chunks, part.size
    )
