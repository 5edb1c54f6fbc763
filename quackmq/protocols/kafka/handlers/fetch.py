"""Fetch: return whole batches as the store holds them, at once or when enough bytes exist.

Fetch sessions (KIP-227) are not supported. The response names session 0, so clients name all their
partitions in each request. A request that continues a session is refused. Responses are smaller
than clients allow (`Peer.response_bytes`), so that slow readers cost little memory; clients fetch
again.

A read_committed consumer gets no batch at or after the start of the first open transaction. The
response lists the aborted transactions, and the consumer skips their batches itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final

from kio.schema.errors import ErrorCode

from quackmq import limits as shared_limits
from quackmq.errors import QuackError
from quackmq.fast_tuples import new_tuple
from quackmq.model.topic import PartitionKey, Read, Slice, Topic
from quackmq.protocols.kafka import limits
from quackmq.protocols.kafka.api import Api, Call, ResponseSlot, Watch, find_topic
from quackmq.protocols.kafka.codec.fetch import (
    API_KEY,
    FIRST_WITH_SESSIONS,
    FLEXIBLE_FROM,
    NO_EPOCH,
    READ_COMMITTED,
    FetchPartition,
    FetchRequest,
    PartitionData,
    TopicData,
    read_request,
    write_one,
    write_response,
)
from quackmq.protocols.kafka.errors import code_of
from quackmq.protocols.kafka.handlers.list_offsets import offsets_in_epoch
from quackmq.records.batch import Buffer

#: Session epochs of a full fetch, whatever session the request names: with -1 the client wants no
#: session, with 0 it wants a new one.
_FULL_FETCH: Final = (-1, 0)


async def handle(call: Call, request: FetchRequest) -> Sequence[Buffer]:
    """Return the records of all requested partitions. If there are too few, wait for more, up to
    the time that the request allows.
    """
    if call.version >= FIRST_WITH_SESSIONS and request.session_epoch not in _FULL_FETCH:
        return write_response(call.version, (), ErrorCode.fetch_session_id_not_found)
    committed_only = request.isolation == READ_COMMITTED
    if len(request.topics) == 1 and len(request.topics[0].partitions) == 1:
        return await _handle_one(call, request, committed_only)
    plans_by_topic: list[list[Read | ErrorCode]] = []
    for requested in request.topics:
        topic = find_topic(call.broker, requested.topic)
        plans_by_topic.append(
            [
                await _plan_read(call, topic, fetch_partition, committed_only)
                for fetch_partition in requested.partitions
            ]
        )
    reads = [plan for plans in plans_by_topic for plan in plans if isinstance(plan, Read)]
    # Wait only if every partition can be read: a refused partition is reported at once. A request
    # without partitions, as from a closing consumer, has nothing to wait for.
    may_wait = 0 < len(reads) == sum(map(len, plans_by_topic)) and call.peer.may_wait
    slices = iter(await _read_slices(call, request, reads, may_wait))
    topics = [
        TopicData(
            requested.topic,
            [
                _partition_data(fetch_partition.partition, plan, slices)
                for fetch_partition, plan in zip(requested.partitions, plans, strict=True)
            ],
        )
        for requested, plans in zip(request.topics, plans_by_topic, strict=True)
    ]
    return write_response(call.version, topics, isolation=request.isolation)


def try_immediately(
    call: Call, request: FetchRequest, response_slot: ResponseSlot
) -> list[Buffer] | Watch | None:
    """Fetch from one partition without a task, if the records are in memory or can be waited for.
    Return None in all other cases, including errors: `handle` then answers.
    """
    if len(request.topics) != 1:
        return None
    ((name_or_id, fetch_partitions),) = request.topics
    if len(fetch_partitions) != 1:
        return None
    if call.version >= FIRST_WITH_SESSIONS and request.session_epoch not in _FULL_FETCH:
        return None
    (fetch_partition,) = fetch_partitions
    topic = find_topic(call.broker, name_or_id)
    if not isinstance(topic, Topic):
        return None
    return _LiveFetch(call, request, response_slot, topic, fetch_partition).begin()


FETCH_API: Final = Api(
    API_KEY,
    4,
    18,
    FLEXIBLE_FROM,
    read_request,
    handle,
    may_wait=True,
    try_immediately=try_immediately,
)


class _LiveFetch:
    """A fetch of one partition's newest records (`quackmq.broker.log.live_reads`)."""

    __slots__ = (
        "_call",
        "_deadline",
        "_min_bytes",
        "_epoch",
        "_max_bytes",
        "_read",
        "_response_slot",
        "_request",
    )

    def __init__(
        self,
        call: Call,
        request: FetchRequest,
        response_slot: ResponseSlot,
        topic: Topic,
        fetch_partition: FetchPartition,
    ) -> None:
        self._call = call
        self._request = request
        self._response_slot = response_slot
        partition, leader_epoch, offset, partition_bytes, *_ = fetch_partition
        response_bytes = call.peer.response_bytes
        self._max_bytes = min(max(request.max_bytes, 1), response_bytes)
        # Do not wait for more bytes than one response may hold.
        self._min_bytes = min(request.min_bytes, response_bytes)
        self._epoch = None if leader_epoch == NO_EPOCH else leader_epoch
        key = new_tuple(PartitionKey, (topic.id, partition))
        committed_only = request.isolation == READ_COMMITTED
        self._read = new_tuple(Read, (key, offset, max(1, partition_bytes), committed_only))
        self._deadline = 0.0

    def begin(self) -> list[Buffer] | Watch | None:
        """Return the response if it has enough bytes or may not wait. Otherwise return a wait,
        after which `_on_wake` answers. Return None if `handle` must answer.
        """
        live = self._call.broker.live_reads
        slice_ = live.read(self._read, self._max_bytes, self._epoch)
        if slice_ is None:
            return None
        missing_bytes = self._min_bytes - slice_.size
        wait_ms = min(self._request.max_wait_ms, shared_limits.READ_WAIT_MS)
        if missing_bytes <= 0 or wait_ms <= 0 or not self._call.peer.may_wait:
            return self._body(slice_)
        if slice_.size:
            return None  # the response may be full already, which only `handle` can tell
        self._deadline = asyncio.get_running_loop().time() + wait_ms / 1000
        return live.watch(self._read, missing_bytes, wait_ms, self._on_wake)

    def _on_wake(self) -> None:
        """Answer if there are enough bytes or the deadline has passed; otherwise pass to
        `handle`."""
        slice_ = self._call.broker.live_reads.read(self._read, self._max_bytes, self._epoch)
        if slice_ is not None and slice_.size >= self._min_bytes:
            self._response_slot.send(self._body(slice_))
            return
        remaining_ms = int((self._deadline - asyncio.get_running_loop().time()) * 1000)
        if slice_ is not None and remaining_ms <= 0:
            self._response_slot.send(self._body(slice_))
        else:
            self._response_slot.handle(self._request._replace(max_wait_ms=max(0, remaining_ms)))

    def _body(self, slice_: Slice) -> list[Buffer]:
        """Return the body of the response; reuse the last one if it has the same content."""
        version, isolation = self._call.version, self._request.isolation
        ((name_or_id, _),) = self._request.topics
        last = self._call.peer.last_response
        inputs = (version, name_or_id, isolation)
        if last.slice_ is not slice_ or last.inputs != inputs:
            data = _slice_data(self._read.key.partition, slice_)
            body = write_one(version, name_or_id, data, isolation)
            if slice_.size <= limits.KAFKA_JOINED_BYTES:
                body = [b"".join(body)]
            last.slice_, last.inputs, last.body = slice_, inputs, body
        return last.body


async def _handle_one(call: Call, request: FetchRequest, committed_only: bool) -> Sequence[Buffer]:
    """Handle a fetch of one partition, the most frequent case. `handle` does the same for any
    number of partitions: the guard then counts 14 % more bytecodes for a fetch from disk.
    """
    ((name_or_id, (fetch_partition,)),) = request.topics
    plan = await _plan_read(
        call, find_topic(call.broker, name_or_id), fetch_partition, committed_only
    )
    if isinstance(plan, ErrorCode):
        refused = TopicData(name_or_id, [PartitionData(fetch_partition.partition, plan)])
        return write_response(call.version, [refused], isolation=request.isolation)
    (slice_,) = await _read_slices(call, request, (plan,), call.peer.may_wait)
    return write_one(
        call.version, name_or_id, _slice_data(fetch_partition.partition, slice_), request.isolation
    )


async def _plan_read(
    call: Call, topic: Topic | ErrorCode, fetch_partition: FetchPartition, committed_only: bool
) -> Read | ErrorCode:
    """Return the read for a requested partition, or the error code that refuses it."""
    if isinstance(topic, ErrorCode):
        return topic
    key = PartitionKey(topic.id, fetch_partition.partition)
    if fetch_partition.leader_epoch != NO_EPOCH:
        try:
            await offsets_in_epoch(call.broker, call.caller, key, fetch_partition.leader_epoch)
        except QuackError as error:
            return code_of(error)
    return Read(key, fetch_partition.offset, max(1, fetch_partition.max_bytes), committed_only)


async def _read_slices(
    call: Call, request: FetchRequest, reads: Sequence[Read], may_wait: bool
) -> Sequence[Slice]:
    """Read all partitions, within the bounds of the request and of this server. An error that
    concerns the whole read is returned in the slice of each partition.
    """
    wait_ms = min(max(request.max_wait_ms, 0), shared_limits.READ_WAIT_MS) if may_wait else 0
    response_bytes = call.peer.response_bytes
    try:
        return await call.broker.read(
            call.caller,
            reads,
            max_bytes=min(max(request.max_bytes, 1), response_bytes),
            # Do not wait for more bytes than one response may hold.
            min_bytes=min(max(request.min_bytes, 0), response_bytes),
            wait_ms=wait_ms,
        )
    except QuackError as error:
        return [Slice(read.key, (), 0, -1, -1, error) for read in reads]


def _partition_data(
    partition: int, plan: Read | ErrorCode, slices: Iterator[Slice]
) -> PartitionData:
    """Return one partition's part of the response. Take the next slice if the partition
    was read.
    """
    if isinstance(plan, ErrorCode):
        return PartitionData(partition, plan)
    return _slice_data(partition, next(slices))


def _slice_data(partition: int, slice_: Slice) -> PartitionData:
    """Return one partition's part of the response from its slice."""
    if slice_.error is not None:
        return PartitionData(partition, code_of(slice_.error))
    return PartitionData(
        partition,
        0,
        slice_.next_offset,
        slice_.first_offset,
        slice_.chunks,
        slice_.size,
        slice_.stable_offset,
        [(aborted.producer_id, aborted.first_offset) for aborted in slice_.aborted]
        if slice_.aborted
        else (),
    )
