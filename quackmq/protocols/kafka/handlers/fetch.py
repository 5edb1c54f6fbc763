"""Fetch: return whole batches as the store holds them, at once or when enough bytes exist.

Fetch sessions (KIP-227) are not supported. The response names session 0, so clients name all their
partitions in each request. A request that continues a session is refused. Responses are smaller
than clients allow (`Peer.answer_bytes`), so that slow readers cost little memory; clients fetch
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
from quackmq.model.topic import PartitionKey, Read, Slice, Topic
from quackmq.protocols.kafka import limits
from quackmq.protocols.kafka.api import Api, Call, Reply, Watch, find_topic
from quackmq.protocols.kafka.codec.fetch import (
    API_KEY,
    FIRST_WITH_SESSIONS,
    FLEXIBLE_FROM,
    NO_EPOCH,
    READ_COMMITTED,
    FetchRequest,
    PartitionData,
    PartitionWish,
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
_new_tuple: Final = tuple.__new__


async def handle(call: Call, request: FetchRequest) -> Sequence[Buffer]:
    if call.version >= FIRST_WITH_SESSIONS and request.session_epoch not in _FULL_FETCH:
        return write_response(call.version, (), ErrorCode.fetch_session_id_not_found)
    committed = request.isolation == READ_COMMITTED
    if len(request.topics) == 1 and len(request.topics[0].partitions) == 1:
        return await _handle_one(call, request, committed)
    planned: list[list[Read | ErrorCode]] = []
    for wanted in request.topics:
        topic = find_topic(call.broker, wanted.topic)
        planned.append([await _plan(call, topic, wish, committed) for wish in wanted.partitions])
    reads = [plan for plans in planned for plan in plans if isinstance(plan, Read)]
    # A request without partitions, as from a closing consumer, has nothing to wait for.
    may_wait = 0 < len(reads) == sum(map(len, planned)) and call.peer.may_wait
    slices = iter(await _read(call, request, reads, may_wait))
    topics = [
        TopicData(
            wanted.topic,
            [
                _data(wish.partition, plan, slices)
                for wish, plan in zip(wanted.partitions, plans, strict=True)
            ],
        )
        for wanted, plans in zip(request.topics, planned, strict=True)
    ]
    return write_response(call.version, topics, isolation=request.isolation)


def at_once(call: Call, request: FetchRequest, reply: Reply) -> list[Buffer] | Watch | None:
    """Fetch from one partition without a task, if the records are in memory or can be waited for.
    Return None in all other cases, including errors: `handle` then answers.
    """
    topics = request.topics
    if len(topics) != 1 or len(topics[0][1]) != 1:
        return None
    if call.version >= FIRST_WITH_SESSIONS and request.session_epoch not in _FULL_FETCH:
        return None
    ((wanted, (wish,)),) = topics
    topic = find_topic(call.broker, wanted)
    if not isinstance(topic, Topic):
        return None
    return _LiveFetch(call, request, reply, topic, wish).begin()


FETCH_API: Final = Api(
    API_KEY, 4, 18, FLEXIBLE_FROM, read_request, handle, waits=True, at_once=at_once
)


class _LiveFetch:
    """A fetch of one partition's newest records (`quackmq.broker.log.live_reads`)."""

    __slots__ = (
        "_call",
        "_ends_at",
        "_enough",
        "_epoch",
        "_max_bytes",
        "_read",
        "_reply",
        "_request",
    )

    def __init__(
        self, call: Call, request: FetchRequest, reply: Reply, topic: Topic, wish: PartitionWish
    ) -> None:
        self._call = call
        self._request = request
        self._reply = reply
        partition, leader_epoch, offset, most, *_ = wish
        answer_bytes = call.peer.answer_bytes
        self._max_bytes = min(max(request.max_bytes, 1), answer_bytes)
        # Do not wait for more bytes than one response may hold.
        self._enough = min(request.min_bytes, answer_bytes)
        self._epoch = None if leader_epoch == NO_EPOCH else leader_epoch
        # The classes' own constructors take three times as long.
        key = _new_tuple(PartitionKey, (topic.id, partition))
        committed = request.isolation == READ_COMMITTED
        self._read = _new_tuple(Read, (key, offset, max(1, most), committed))
        self._ends_at = 0.0

    def begin(self) -> list[Buffer] | Watch | None:
        live = self._call.broker.live_reads
        part = live.read(self._read, self._max_bytes, self._epoch)
        if part is None:
            return None
        missing = self._enough - part.size
        wait_ms = min(self._request.max_wait_ms, shared_limits.READ_WAIT_MS)
        if missing <= 0 or wait_ms <= 0 or not self._call.peer.may_wait:
            return self._body(part)
        if part.size:
            return None  # perhaps the response is full, which only `handle` knows
        self._ends_at = asyncio.get_running_loop().time() + wait_ms / 1000
        return live.watch(self._read, missing, wait_ms, self._woken)

    def _woken(self) -> None:
        """Answer if there are enough bytes or the deadline has passed; otherwise pass to
        `handle`."""
        part = self._call.broker.live_reads.read(self._read, self._max_bytes, self._epoch)
        if part is not None and part.size >= self._enough:
            self._reply.send(self._body(part))
            return
        left_ms = int((self._ends_at - asyncio.get_running_loop().time()) * 1000)
        if part is not None and left_ms <= 0:
            self._reply.send(self._body(part))
        else:
            self._reply.handle(self._request._replace(max_wait_ms=max(0, left_ms)))

    def _body(self, part: Slice) -> list[Buffer]:
        """Return the body of the response; reuse the last one if it has the same content."""
        version, isolation = self._call.version, self._request.isolation
        ((wanted, _),) = self._request.topics
        last = self._call.peer.last_answer
        made_of = (version, wanted, isolation)
        if last.part is not part or last.made_of != made_of:
            data = _granted(self._read.key.partition, part)
            body = write_one(version, wanted, data, isolation)
            if part.size <= limits.KAFKA_JOINED_BYTES:
                body = [b"".join(body)]
            last.part, last.made_of, last.body = part, made_of, body
        return last.body


async def _handle_one(call: Call, request: FetchRequest, committed: bool) -> Sequence[Buffer]:
    """Handle a fetch of one partition, the most frequent case, in half the steps."""
    ((wanted, (wish,)),) = request.topics
    plan = await _plan(call, find_topic(call.broker, wanted), wish, committed)
    if isinstance(plan, ErrorCode):
        refused = TopicData(wanted, [PartitionData(wish.partition, plan)])
        return write_response(call.version, [refused], isolation=request.isolation)
    (part,) = await _read(call, request, (plan,), call.peer.may_wait)
    return write_one(call.version, wanted, _granted(wish.partition, part), request.isolation)


async def _plan(
    call: Call, topic: Topic | ErrorCode, wish: PartitionWish, committed: bool
) -> Read | ErrorCode:
    """Return the read for a wanted partition, or the error code that refuses it."""
    if isinstance(topic, ErrorCode):
        return topic
    key = PartitionKey(topic.id, wish.partition)
    if wish.leader_epoch != NO_EPOCH:
        try:
            await offsets_in_epoch(call.broker, call.caller, key, wish.leader_epoch)
        except QuackError as error:
            return code_of(error)
    return Read(key, wish.offset, max(1, wish.max_bytes), committed)


async def _read(
    call: Call, request: FetchRequest, reads: Sequence[Read], may_wait: bool
) -> Sequence[Slice]:
    wait_ms = min(max(request.max_wait_ms, 0), shared_limits.READ_WAIT_MS) if may_wait else 0
    answer_bytes = call.peer.answer_bytes
    try:
        return await call.broker.read(
            call.caller,
            reads,
            max_bytes=min(max(request.max_bytes, 1), answer_bytes),
            # Do not wait for more bytes than one response may hold.
            min_bytes=min(max(request.min_bytes, 0), answer_bytes),
            wait_ms=wait_ms,
        )
    except QuackError as error:
        return [Slice(read.key, (), 0, -1, -1, error) for read in reads]


def _data(partition: int, plan: Read | ErrorCode, slices: Iterator[Slice]) -> PartitionData:
    if isinstance(plan, ErrorCode):
        return PartitionData(partition, plan)
    return _granted(partition, next(slices))


def _granted(partition: int, part: Slice) -> PartitionData:
    if part.error is not None:
        return PartitionData(partition, code_of(part.error))
    return PartitionData(
        partition,
        0,
        part.next_offset,
        part.first_offset,
        part.chunks,
        part.size,
        part.stable_offset,
        [(each.producer_id, each.first_offset) for each in part.aborted] if part.aborted else (),
    )
