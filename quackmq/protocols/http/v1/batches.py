"""Bulk reading: record batches in their stored form, and the offsets of many partitions.

These operations are for readers that decode batches themselves and read ranges of offsets, as
Spark's tasks do. The broker decodes nothing for them and keeps no state about them. An offset is
served from the log or the archive, whichever has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from quackmq import limits as shared_limits
from quackmq.errors import (
    DamagedData,
    LimitReached,
    OffsetOutOfRange,
    UnknownPartition,
    UnknownTopic,
)
from quackmq.model.topic import (
    AbortedTransaction,
    OffsetTime,
    PartitionKey,
    Read,
    Slice,
    Topic,
    is_committed,
)
from quackmq.protocols.http import limits
from quackmq.protocols.http.errors import HttpFailure, status_for
from quackmq.protocols.http.types import Request, Response
from quackmq.protocols.http.v1.operations import (
    BYTES,
    INT64_MAX,
    PARTITION,
    TOPIC,
    WAIT_MS,
    JsonBody,
    Number,
    OffsetField,
    Operation,
    ResponseInfo,
    Text,
    WaitField,
    json_response,
)
from quackmq.protocols.http.v1.topics import PartitionOffsets, TopicName
from quackmq.records.batch import Buffer, batches, spans

_TAG: Final = "messages"
NEXT_OFFSET: Final = "quackmq-next-offset"
FIRST_OFFSET: Final = "quackmq-first-offset"
END_OFFSET: Final = "quackmq-end-offset"
TIMES: Final = "quackmq-append-times"


# --- shapes ---------------------------------------------------------------------------------------


class Beyond(Struct, frozen=True, forbid_unknown_fields=True):
    """A position up to which the client has read."""

    topic: TopicName
    partition: Annotated[int, Meta(ge=0, lt=shared_limits.PARTITIONS_PER_TOPIC)]
    offset: OffsetField


class OffsetsRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The topics whose offsets are requested. With `wait_ms` the response waits until a partition
    has records beyond its position in `beyond`."""

    topics: Annotated[list[TopicName], Meta(max_length=shared_limits.HTTP_OFFSETS_TOPICS)]
    beyond: Annotated[list[Beyond], Meta(max_length=shared_limits.HTTP_OFFSETS_PARTITIONS)] = []
    wait_ms: WaitField = 0


class SizedPartition(PartitionOffsets, frozen=True):
    """The offsets of a partition. `bytes` is about the stored size of its records."""

    bytes: int


class TopicOffsets(Struct, frozen=True):
    topic: str
    id: str
    partitions: list[SizedPartition]


class OffsetsFound(Struct, frozen=True):
    """The offsets of the topics that exist; the others are omitted."""

    cluster_id: str
    topics: list[TopicOffsets]


class PublishersRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Producer ids, as batches contain them."""

    producer_ids: Annotated[
        list[Annotated[int, Meta(ge=0, le=INT64_MAX)]],
        Meta(max_length=shared_limits.HTTP_PAGE_ITEMS),
    ]


class Publisher(Struct, frozen=True):
    """A durable name, which is a transactional id, with its producer id."""

    producer_id: int
    name: str


class PublishersFound(Struct, frozen=True):
    """The producers that have a durable name, or had one recently."""

    publishers: list[Publisher]


# --- handlers -------------------------------------------------------------------------------------

OFFSET: Final = Number(
    name="offset", required=True, maximum=INT64_MAX, description="The first offset."
)
TOPIC_ID: Final = Text(
    name="topic_id",
    description="The topic's id. If the topic was deleted and created again, the request fails.",
    pattern="[0-9a-f-]{36}",
)
END: Final = Number(
    name="end",
    maximum=INT64_MAX,
    description="Batches that begin at this offset or later are omitted.",
)
APPEND_TIMES: Final = Text(
    name="append_times",
    choices=("true", "false"),
    description=f"Whether to send the append times of batches, in the header `{TIMES}`.",
)
MAX_BYTES: Final = Number(
    name="max_bytes",
    minimum=1,
    maximum=limits.HTTP_BATCHES_BYTES,
    default=limits.HTTP_BATCHES_BYTES,
    description="The greatest size of the response; the first batch is always whole.",
)
OFFSETS_REQUEST: Final = JsonBody(OffsetsRequest, "The requested topics.")
PUBLISHERS_REQUEST: Final = JsonBody(PublishersRequest, "The producer ids.")


async def read_batches(request: Request) -> Response:
    """Return whole batches of a partition from an offset on, and in headers the offsets that the
    reader needs. Wait up to `wait_ms` if there are no batches yet. Raise HttpFailure for damaged
    data; its header says where reading can continue.
    """
    broker, caller = request.broker, request.caller
    topic = check_topic_id(broker.topic(TOPIC.require(request)), TOPIC_ID.get(request))
    key = PartitionKey(topic.id, PARTITION.require(request))
    offset, end = OFFSET.require(request), END.get(request)
    max_bytes, wait_ms = MAX_BYTES.require(request), WAIT_MS.require(request)
    reads = [Read(key, offset, max_bytes, committed=True)]
    (slice_,) = await broker.read(caller, reads, max_bytes=max_bytes, wait_ms=wait_ms)
    if isinstance(slice_.error, DamagedData):
        raise damaged_failure(slice_.error)
    if slice_.error is not None:
        raise slice_.error
    chunks: Sequence[Buffer] = (
        slice_.chunks if end is None else _drop_batches_from(slice_.chunks, end)
    )
    headers = [(FIRST_OFFSET, str(slice_.first_offset)), (END_OFFSET, str(slice_.stable_offset))]
    if chunks:
        next_offset = _next_offset(chunks[-1])
    else:
        # The next batch begins at or after the requested end. The offsets before it are a hole, as
        # aborted records leave one in the archive.
        next_offset = end if end is not None and slice_.chunks else offset
    if APPEND_TIMES.get(request) == "true" and chunks:
        times = await broker.append_times(caller, key, offset, next_offset)
        if len(times) > limits.HTTP_APPEND_TIMES:
            # Drop the batches whose append times do not fit into the header.
            chunks = _drop_batches_from(chunks, times[limits.HTTP_APPEND_TIMES].offset)
            next_offset = _next_offset(chunks[-1])
        headers.append((TIMES, _encode_append_times(times[: limits.HTTP_APPEND_TIMES])))
    if slice_.aborted:
        chunks = _committed_batches(chunks, slice_.aborted)
    # An `end` before `offset` must not move the reader back.
    headers.append((NEXT_OFFSET, str(max(next_offset, offset))))
    return Response(200, b"".join(chunks), BYTES, tuple(headers))


async def find_publishers(request: Request) -> Response:
    """Return the durable names of producers; omit producer ids without a name."""
    body = PUBLISHERS_REQUEST.decode(request)
    name_of = request.broker.transactions.name_of
    names = ((producer_id, name_of(producer_id)) for producer_id in body.producer_ids)
    publishers = [Publisher(producer_id, name) for producer_id, name in names if name is not None]
    return json_response(200, PublishersFound(publishers))


async def find_offsets(request: Request) -> Response:
    """Return the offsets of topics. If the request says so, first wait until a partition has
    records beyond the position that the client names.
    """
    broker, caller = request.broker, request.caller
    body = OFFSETS_REQUEST.decode(request)
    offsets_by_topic = await _find_offsets(request, body.topics)
    if body.wait_ms and body.beyond:
        reads = _reads_to_wait_for(offsets_by_topic, body.beyond)
        if reads:
            # The read only waits until a partition has a record, so one byte is enough.
            await broker.read(caller, reads, max_bytes=1, wait_ms=body.wait_ms)
            offsets_by_topic = await _find_offsets(request, body.topics)
    topics = [
        TopicOffsets(topic.name, str(topic.id), partitions)
        for topic, partitions in offsets_by_topic.values()
    ]
    return json_response(200, OffsetsFound(broker.cluster_id, topics))


# --- helpers --------------------------------------------------------------------------------------


def check_topic_id(topic: Topic, expected_id: str | None) -> Topic:
    """Return the topic; raise UnknownTopic if its id is not `expected_id`."""
    if expected_id is not None and expected_id != str(topic.id):
        raise UnknownTopic(
            f"topic {topic.name} was deleted and created again: no topic has the id {expected_id}"
        )
    return topic


def damaged_failure(error: DamagedData) -> HttpFailure:
    """Return the HTTP failure for damaged data. If it is known where reading can continue, a
    header names that offset."""
    headers = () if error.next_offset is None else ((NEXT_OFFSET, str(error.next_offset)),)
    return HttpFailure(status_for(type(error)), error.code, str(error), headers)


_OffsetsByTopic = dict[str, tuple[Topic, list[SizedPartition]]]


async def _find_offsets(request: Request, names: Iterable[str]) -> _OffsetsByTopic:
    """Return each topic with the offsets of its partitions, by topic name; omit unknown topics.
    Raise LimitReached if the topics have too many partitions for one response.
    """
    broker = request.broker
    offsets_by_topic: _OffsetsByTopic = {}
    count = 0
    for name in names:
        try:
            topic = broker.topic(name)
            count += topic.partitions
            if count > shared_limits.HTTP_OFFSETS_PARTITIONS:
                raise LimitReached(
                    f"one response lists at most {shared_limits.HTTP_OFFSETS_PARTITIONS} "
                    "partitions: request fewer topics at a time"
                )
            partitions = []
            for partition in range(topic.partitions):
                first, end, size, _, stable = await broker.offsets(
                    request.caller, PartitionKey(topic.id, partition)
                )
                partitions.append(SizedPartition(partition, first, end, stable, size))
        except UnknownTopic:
            # The topic does not exist, or was deleted while its offsets were read.
            continue
        offsets_by_topic[name] = topic, partitions
        await asyncio.sleep(0)  # let other tasks run between topics
    return offsets_by_topic


def _reads_to_wait_for(offsets_by_topic: _OffsetsByTopic, beyond: Iterable[Beyond]) -> list[Read]:
    """Return the reads to wait for. Return none if a position is not the end of its partition: then
    there are new records already.
    """
    reads = []
    for name, partition, offset in ((each.topic, each.partition, each.offset) for each in beyond):
        topic, partitions = offsets_by_topic.get(name, (None, []))
        # The topic or partition does not exist. Do not wait, so that the client notices it.
        if topic is None or partition >= len(partitions):
            return []
        if offset != partitions[partition].stable_offset:
            return []
        reads.append(Read(PartitionKey(topic.id, partition), offset, 1, committed=True))
    return reads


def _drop_batches_from(chunks: Sequence[Buffer], end: int) -> Sequence[Buffer]:
    """Remove the batches that begin at or after `end`. A chunk holds whole batches; only the last
    remaining chunk, which may contain `end`, is scanned.
    """
    remaining: list[Buffer] = []
    for chunk in chunks:
        if _first_offset(chunk) >= end:
            break
        remaining.append(chunk)
    if remaining and _first_offset(remaining[-1]) < end:
        last = remaining[-1]
        for span in spans(last):
            if span.base_offset >= end:
                remaining[-1] = memoryview(last)[: span.position]
                break
    return remaining


def _committed_batches(
    chunks: Sequence[Buffer], aborted: Sequence[AbortedTransaction]
) -> list[Buffer]:
    """Return the batches that are neither transaction markers nor parts of aborted transactions."""
    return [
        batch.view for chunk in chunks for batch in batches(chunk) if is_committed(batch, aborted)
    ]


def _first_offset(chunk: Buffer) -> int:
    """Return the offset of the first record. The first 8 bytes of a batch hold it."""
    return int.from_bytes(memoryview(chunk)[:8], "big", signed=True)


def _next_offset(chunk: Buffer) -> int:
    """Return the offset after the last record. Only the headers of the batches are read."""
    end = 0
    for span in spans(chunk):
        end = span.next_offset
    return end


def _encode_append_times(times: Sequence[OffsetTime]) -> str:
    """Encode the append times as differences to the previous pair, which are short."""
    pairs = []
    offset = time_ms = 0
    for each in times:
        pairs.append(f"{each.offset - offset}:{each.timestamp_ms - time_ms}")
        offset, time_ms = each
    return ",".join(pairs)


# --- offsets that hold no record for readers ------------------------------------------------------
#
# Offsets have no gaps, but a reader of committed records sees gaps: transaction markers and the
# records of aborted transactions. A program that must prove that no record is missing can find out
# here what each gap is. The response covers the log only. An archive file holds only committed
# records; its manifest has the number of records that it was made with.


class Hole(Struct, frozen=True):
    """A batch of an aborted transaction, or a marker that ended a transaction, from `first_offset`
    up to, not including, `next_offset`. `first_sequence` is the sequence number of the batch's
    first record, or -1 for a marker."""

    first_offset: int
    next_offset: int
    reason: Literal["aborted", "marker"]
    producer_id: int
    producer_epoch: int
    first_sequence: int


class HolesFound(Struct, frozen=True):
    """The holes before `next_offset`, where the next request starts. `end_offset` is the
    partition's stable offset."""

    holes: list[Hole]
    next_offset: int
    end_offset: int


async def find_holes(request: Request) -> Response:
    """Return the transaction markers and the aborted batches in a part of the log. They are the
    offsets that readers of committed records do not get.
    """
    broker = request.broker
    topic = check_topic_id(broker.topic(TOPIC.require(request)), TOPIC_ID.get(request))
    key, offset = PartitionKey(topic.id, PARTITION.require(request)), OFFSET.require(request)
    max_bytes = limits.HTTP_HOLES_BYTES
    reads = [Read(key, offset, max_bytes, committed=True)]
    (slice_,) = await broker.read(request.caller, reads, max_bytes=max_bytes)
    if isinstance(slice_.error, DamagedData):
        raise damaged_failure(slice_.error)
    if slice_.error is not None:
        raise slice_.error
    holes = _find_holes(slice_)
    next_offset = offset
    # The next request continues after the last batch, which is in the last chunk.
    for chunk in slice_.chunks[-1:]:
        for batch in batches(chunk):
            next_offset = batch.next_offset
    return json_response(200, HolesFound(holes, next_offset, slice_.stable_offset))


def _find_holes(log_slice: Slice) -> list[Hole]:
    """Return the batches of a committed read that hold no messages: markers, and batches of aborted
    transactions."""
    return [
        Hole(
            batch.base_offset,
            batch.next_offset,
            "marker" if batch.is_control else "aborted",
            batch.producer_id,
            batch.producer_epoch,
            batch.base_sequence,
        )
        for chunk in log_slice.chunks
        for batch in batches(chunk)
        if not is_committed(batch, log_slice.aborted)
    ]


# --- operations -----------------------------------------------------------------------------------

OPERATIONS: Final = (
    Operation(
        name="readBatches",
        tag=_TAG,
        method="GET",
        path="/v1/topics/{topic}/partitions/{partition}/batches",
        handler=read_batches,
        description="Read a partition from an offset on as record batches of Kafka's format "
        "(magic 2), one after the other. The first batch may begin before the requested offset. "
        "Only committed batches are sent; transaction markers may be among them. The header "
        f"`{NEXT_OFFSET}` is the offset for the next request; `{FIRST_OFFSET}` and `{END_OFFSET}` "
        f"bound the readable offsets. `{TIMES}` has pairs `offset:milliseconds`, separated by "
        "commas: the points where the append time changes. The first pair is absolute, later ones "
        "are differences. Archived batches have no append times here.",
        parameters=(TOPIC, PARTITION, OFFSET, END, TOPIC_ID, APPEND_TIMES, MAX_BYTES, WAIT_MS),
        responses={200: ResponseInfo("Batches, or nothing if there are none yet.", bytes, BYTES)},
        errors=(UnknownTopic, UnknownPartition, OffsetOutOfRange, DamagedData),
        may_wait=True,
    ),
    Operation(
        name="findOffsets",
        tag="topics",
        method="POST",
        path="/v1/offsets",
        handler=find_offsets,
        description="Find the first and last offsets of topics' partitions, and wait for records.",
        body=OFFSETS_REQUEST,
        responses={200: ResponseInfo("The offsets.", OffsetsFound)},
        errors=(LimitReached,),
        may_wait=True,
    ),
    Operation(
        name="findPublishers",
        tag=_TAG,
        method="POST",
        path="/v1/publishers",
        handler=find_publishers,
        description="Find the durable names of producers.",
        body=PUBLISHERS_REQUEST,
        responses={200: ResponseInfo("The names of the producers that have one.", PublishersFound)},
    ),
    Operation(
        name="findHoles",
        tag="messages",
        method="GET",
        path="/v1/topics/{topic}/partitions/{partition}/holes",
        handler=find_holes,
        description="Find offsets in the log that hold no record for readers, with the reason: a "
        "range of offsets at a time, from an offset on. Damaged batches are refused; then the "
        f"header `{NEXT_OFFSET}` says where to continue.",
        parameters=(TOPIC, PARTITION, OFFSET, TOPIC_ID),
        responses={200: ResponseInfo("The holes in a range of offsets.", HolesFound)},
        errors=(UnknownTopic, UnknownPartition, OffsetOutOfRange, DamagedData),
    ),
)
