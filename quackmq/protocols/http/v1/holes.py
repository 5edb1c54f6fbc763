"""Holes: offsets of a partition that no reader is given, and why.

Offsets are given without a gap, and yet a reader of committed records sees gaps: markers, and what
was aborted. Whoever has to prove that nothing is missing asks here which of them are which.

Of what is in the log. A file of the archive has only what is committed: that what lies between was
left out on purpose can be told from its number of records, and not from here.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from quackmq.broker.log.committed import left_out
from quackmq.errors import DamagedData, OffsetOutOfRange, UnknownPartition, UnknownTopic
from quackmq.model.topic import PartitionKey, Read
from quackmq.protocols.http import limits
from quackmq.protocols.http.types import Request, Response
from quackmq.protocols.http.v1.batches import NEXT_OFFSET, OFFSET, TOPIC_ID, check_id, damaged
from quackmq.protocols.http.v1.operations import Answer, Operation, answered
from quackmq.protocols.http.v1.parameters import PARTITION, TOPIC
from quackmq.records.batch import batches


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


OPERATIONS: Final = (
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
