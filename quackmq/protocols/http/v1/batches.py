"""Bulk reading: record batches in their stored form, and the offsets of many partitions.

These operations are for readers that decode batches themselves and read ranges of offsets, as
Spark's tasks do. The broker decodes nothing for them and keeps no state about them. An offset is
served from the log or the archive, whichever has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from quackmq import limits as shared_limits
from quackmq.broker.log.committed import is_committed, left_out
from quackmq.errors import (
    DamagedData,
    LimitReached,
    OffsetOutOfRange,
    UnknownPartition,
    UnknownTopic,
)
from quackmq.model.topic import AbortedTransaction, OffsetTime, PartitionKey, Read, Topic
from quackmq.protocols.http import limits
from quackmq.protocols.http.errors import HttpFailure, status_of
from quackmq.protocols.http.types import Request, Response
from quackmq.protocols.http.v1.operations import (
    BYTES,
    GREATEST,
    JSON,
    PARTITION,
    TOPIC,
    WAIT_MS,
    Answer,
    Body,
    Number,
    OffsetField,
    Operation,
    Text,
    WaitField,
    answered,
    json_body,
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
    """A place that the asker has read up to."""

    topic: TopicName
    partition: Annotated[int, Meta(ge=0, lt=shared_limits.PARTITIONS_PER_TOPIC)]
    offset: OffsetField


class OffsetsAsked(Struct, frozen=True, forbid_unknown_fields=True):
    """Whose offsets are wanted. With `wait_ms` the answer waits until something lies beyond one of
    the places in `beyond`, unless something does already."""

    topics: Annotated[list[TopicName], Meta(max_length=shared_limits.HTTP_OFFSETS_TOPICS)]
    beyond: Annotated[list[Beyond], Meta(max_length=shared_limits.HTTP_OFFSETS_PARTITIONS)] = []
    wait_ms: WaitField = 0


class SizedPartition(PartitionOffsets, frozen=True):
    """`bytes` is about what lies from `first_offset` on, as it is kept."""

    bytes: int


class TopicOffsets(Struct, frozen=True):
    topic: str
    id: str
    partitions: list[SizedPartition]


class OffsetsFound(Struct, frozen=True):
    """Topics that are not there are left out."""

    cluster_id: str
    topics: list[TopicOffsets]


class PublishersAsked(Struct, frozen=True, forbid_unknown_fields=True):
    """Producer ids as they stand in batches."""

    producer_ids: Annotated[
        list[Annotated[int, Meta(ge=0, le=GREATEST)]],
        Meta(max_length=shared_limits.HTTP_PAGE_ITEMS),
    ]


class Publisher(Struct, frozen=True):
    """A durable name, which is a transactional id, and the producer id that it has."""

    producer_id: int
    name: str


class PublishersFound(Struct, frozen=True):
    """Those that have, or had until lately, a durable name."""

    publishers: list[Publisher]


# --- handlers -------------------------------------------------------------------------------------

OFFSET: Final = Number(name="offset", required=True, most=GREATEST, about="Where to begin.")
TOPIC_ID: Final = Text(
    name="topic_id",
    about="The topic's id: one that was made anew under the same name is not read.",
    pattern="[0-9a-f-]{36}",
)
END: Final = Number(
    name="end", most=GREATEST, about="Batches that begin here or later are left out."
)
APPEND_TIMES: Final = Text(
    name="append_times",
    choices=("true", "false"),
    about=f"Whether to tell when batches were appended, in the header `{TIMES}`.",
)
MAX_BYTES: Final = Number(
    name="max_bytes",
    least=1,
    most=limits.HTTP_BATCHES_BYTES,
    default=limits.HTTP_BATCHES_BYTES,
    about="How many bytes to answer at the most; the first batch is given whole.",
)
ASKED: Final = Body("Whose offsets are wanted.", {JSON: OffsetsAsked})
PRODUCERS: Final = Body("Whose names are wanted.", {JSON: PublishersAsked})
_producers: Final = msgspec.json.Decoder(PublishersAsked)
_asked: Final = msgspec.json.Decoder(OffsetsAsked)


async def read_batches(request: Request) -> Response:
    broker, caller = request.broker, request.caller
    topic = check_id(broker.topic(TOPIC.of(request)), TOPIC_ID.given(request))
    key = PartitionKey(topic.id, PARTITION.of(request))
    offset, end = OFFSET.of(request), END.given(request)
    max_bytes, wait_ms = MAX_BYTES.of(request), WAIT_MS.of(request)
    reads = [Read(key, offset, max_bytes, committed=True)]
    (found,) = await broker.read(caller, reads, max_bytes=max_bytes, wait_ms=wait_ms)
    if isinstance(found.error, DamagedData):
        raise damaged(found.error)
    if found.error is not None:
        raise found.error
    chunks: Sequence[Buffer] = found.chunks if end is None else _before(found.chunks, end)
    headers = [(FIRST_OFFSET, str(found.first_offset)), (END_OFFSET, str(found.stable_offset))]
    if chunks:
        next_offset = _end_of(chunks[-1])
    else:
        # The next batch begins at or after the requested end. The offsets before it are a hole, as
        # aborted records leave one in the archive.
        next_offset = end if end is not None and found.chunks else offset
    if APPEND_TIMES.given(request) == "true" and chunks:
        times = await broker.append_times(caller, key, offset, next_offset)
        if len(times) > limits.HTTP_APPEND_TIMES:
            chunks = _before(chunks, times[limits.HTTP_APPEND_TIMES].offset)
            next_offset = _end_of(chunks[-1])
        headers.append((TIMES, _times(times[: limits.HTTP_APPEND_TIMES])))
    if found.aborted:
        chunks = _committed(chunks, found.aborted)
    headers.append((NEXT_OFFSET, str(max(next_offset, offset))))
    return Response(200, b"".join(chunks), BYTES, tuple(headers))


async def find_publishers(request: Request) -> Response:
    asked = json_body(request, PRODUCERS, _producers)
    name_of = request.broker.transactions.name_of
    names = ((producer_id, name_of(producer_id)) for producer_id in asked.producer_ids)
    publishers = [Publisher(producer_id, name) for producer_id, name in names if name is not None]
    return answered(200, PublishersFound(publishers))


async def find_offsets(request: Request) -> Response:
    broker, caller = request.broker, request.caller
    asked = json_body(request, ASKED, _asked)
    found = await _offsets_of(request, asked.topics)
    if asked.wait_ms and asked.beyond:
        reads = _waits(found, asked.beyond)
        if reads:
            await broker.read(caller, reads, max_bytes=1, wait_ms=asked.wait_ms)
            found = await _offsets_of(request, asked.topics)
    topics = [
        TopicOffsets(topic.name, str(topic.id), partitions) for topic, partitions in found.values()
    ]
    return answered(200, OffsetsFound(broker.cluster_id, topics))


# --- helpers --------------------------------------------------------------------------------------


def check_id(topic: Topic, wanted_id: str | None) -> Topic:
    """Return the topic; raise UnknownTopic if its id is not `wanted_id`."""
    if wanted_id is not None and wanted_id != str(topic.id):
        raise UnknownTopic(f"topic {topic.name} was made anew: there is none with id {wanted_id}")
    return topic


def damaged(error: DamagedData) -> HttpFailure:
    """Return the same failure with a header for the offset at which reading can continue, if
    known."""
    headers = () if error.next_offset is None else ((NEXT_OFFSET, str(error.next_offset)),)
    return HttpFailure(status_of(error), error.code, str(error), headers)


_Found = dict[str, tuple[Topic, list[SizedPartition]]]


async def _offsets_of(request: Request, names: Iterable[str]) -> _Found:
    broker = request.broker
    found: _Found = {}
    count = 0
    for name in names:
        try:
            topic = broker.topic(name)
            count += topic.partitions
            if count > shared_limits.HTTP_OFFSETS_PARTITIONS:
                raise LimitReached(
                    f"{shared_limits.HTTP_OFFSETS_PARTITIONS} partitions are the most "
                    "in one answer: ask "
                    "for fewer topics at a time"
                )
            partitions = []
            for partition in range(topic.partitions):
                first, end, size, _, stable = await broker.offsets(
                    request.caller, PartitionKey(topic.id, partition)
                )
                partitions.append(SizedPartition(partition, first, end, stable, size))
        except UnknownTopic:
            continue
        found[name] = topic, partitions
        await asyncio.sleep(0)  # let other tasks run between topics
    return found


def _waits(found: _Found, beyond: Iterable[Beyond]) -> list[Read]:
    """Return the reads to wait for. Return none if a place is not the end of its partition, because
    there is news already.
    """
    reads = []
    for name, partition, offset in ((each.topic, each.partition, each.offset) for each in beyond):
        topic, partitions = found.get(name, (None, []))
        if topic is None or partition >= len(partitions):
            return []
        if offset != partitions[partition].stable_offset:
            return []
        reads.append(Read(PartitionKey(topic.id, partition), offset, 1, committed=True))
    return reads


def _before(chunks: Sequence[Buffer], end: int) -> Sequence[Buffer]:
    """Remove the batches that begin at or after `end`. A chunk holds whole batches; only the last
    remaining chunk, which may contain `end`, is scanned.
    """
    kept: list[Buffer] = []
    for chunk in chunks:
        if _base_of(chunk) >= end:
            break
        kept.append(chunk)
    if kept and _base_of(kept[-1]) < end:
        last = kept[-1]
        for span in spans(last):
            if span.base_offset >= end:
                kept[-1] = memoryview(last)[: span.position]
                break
    return kept


def _committed(chunks: Sequence[Buffer], aborted: Sequence[AbortedTransaction]) -> list[Buffer]:
    return [
        batch.view for chunk in chunks for batch in batches(chunk) if is_committed(batch, aborted)
    ]


def _base_of(chunk: Buffer) -> int:
    return int.from_bytes(memoryview(chunk)[:8], "big", signed=True)


def _end_of(chunk: Buffer) -> int:
    end = 0
    for span in spans(chunk):
        end = span.next_offset
    return end


def _times(times: Sequence[OffsetTime]) -> str:
    """Encode the append times as differences, which are short."""
    told = []
    offset = time_ms = 0
    for each in times:
        told.append(f"{each.offset - offset}:{each.timestamp_ms - time_ms}")
        offset, time_ms = each
    return ",".join(told)


# --- operations -----------------------------------------------------------------------------------


# --- offsets that hold no record for readers ------------------------------------------------------
#
# Offsets have no gaps, but a reader of committed records sees gaps: transaction markers and the
# records of aborted transactions. A program that has to prove that nothing is missing asks here
# what each gap is. The answer covers the log only. An archive file holds only committed records;
# its manifest has the number of records that it was made with.


class Hole(Struct, frozen=True):
    """From `first_offset` to before `next_offset` lies a batch of an aborted transaction, or a
    marker that ended one. `first_sequence` is the producer's number of its first record, -1 for a
    marker."""

    first_offset: int
    next_offset: int
    reason: Literal["aborted", "marker"]
    producer_id: int
    producer_epoch: int
    first_sequence: int


class HolesFound(Struct, frozen=True):
    """All up to `next_offset`, where to go on; nothing lies beyond `end_offset`, as far as it is
    decided."""

    holes: list[Hole]
    next_offset: int
    end_offset: int


async def find_holes(request: Request) -> Response:
    broker = request.broker
    topic = check_id(broker.topic(TOPIC.of(request)), TOPIC_ID.given(request))
    key, offset = PartitionKey(topic.id, PARTITION.of(request)), OFFSET.of(request)
    most = limits.HTTP_HOLES_BYTES
    reads = [Read(key, offset, most, committed=True)]
    (found,) = await broker.read(request.caller, reads, max_bytes=most)
    if isinstance(found.error, DamagedData):
        raise damaged(found.error)
    if found.error is not None:
        raise found.error
    holes = [Hole(*each) for each in left_out(found)]
    next_offset = offset
    for chunk in found.chunks[-1:]:
        for batch in batches(chunk):
            next_offset = batch.next_offset
    return answered(200, HolesFound(holes, next_offset, found.stable_offset))


# --- operations -----------------------------------------------------------------------------------

OPERATIONS: Final = (
    Operation(
        name="readBatches",
        tag=_TAG,
        method="GET",
        path="/v1/topics/{topic}/partitions/{partition}/batches",
        handler=read_batches,
        about="Read a partition from an offset on as record batches of Kafka's format (magic 2), "
        "one after the other. The first may begin before the offset asked for. Only what is "
        "committed is there; markers of transactions may be among it. The header "
        f"`{NEXT_OFFSET}` tells where to go on, `{FIRST_OFFSET}` and `{END_OFFSET}` what can be "
        f"read. `{TIMES}` has pairs `offset:milliseconds`, with commas in between: from which "
        "offset on which append time, the first as it is, each further as what it is more than the "
        "one before; nothing of what is archived.",
        parameters=(TOPIC, PARTITION, OFFSET, END, TOPIC_ID, APPEND_TIMES, MAX_BYTES, WAIT_MS),
        answers={200: Answer("Batches, or nothing where there is none yet.", bytes, BYTES)},
        errors=(UnknownTopic, UnknownPartition, OffsetOutOfRange, DamagedData),
        waits=True,
    ),
    Operation(
        name="findOffsets",
        tag="topics",
        method="POST",
        path="/v1/offsets",
        handler=find_offsets,
        about="Tell where the partitions of topics begin and end, and wait for more.",
        body=ASKED,
        answers={200: Answer("Their offsets.", OffsetsFound)},
        errors=(LimitReached,),
        waits=True,
    ),
    Operation(
        name="findPublishers",
        tag=_TAG,
        method="POST",
        path="/v1/publishers",
        handler=find_publishers,
        about="Tell the durable names of producers.",
        body=PRODUCERS,
        answers={200: Answer("Their names, as far as they have any.", PublishersFound)},
    ),
    Operation(
        name="findHoles",
        tag="messages",
        method="GET",
        path="/v1/topics/{topic}/partitions/{partition}/holes",
        handler=find_holes,
        about="Tell which offsets hold nothing for readers, and why: of what is in the log, from "
        "an offset on, a stretch at a time. What is damaged is refused, and the header "
        f"`{NEXT_OFFSET}` tells where to go on.",
        parameters=(TOPIC, PARTITION, OFFSET, TOPIC_ID),
        answers={200: Answer("The holes of a stretch.", HolesFound)},
        errors=(UnknownTopic, UnknownPartition, OffsetOutOfRange, DamagedData),
    ),
)
