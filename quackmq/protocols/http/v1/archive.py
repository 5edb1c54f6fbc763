"""The archive: list its files, keep them with plans, read their bytes, and replace them.

Files are Parquet and never change: a name means the same bytes as long as the file exists. A reader
that shares a disk with the broker reads them in `directory`, in the directory of their partition.
Other readers get the bytes here, whole or by range.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from operator import attrgetter
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from quackmq import limits as shared_limits
from quackmq.broker import Archives, PartitionArchive, Plan, TopicArchive
from quackmq.errors import (
    DamagedData,
    LimitReached,
    NotFound,
    OffsetOutOfRange,
    StateChanged,
    StorageError,
    UnknownFile,
    UnknownPartition,
    UnknownPlan,
    UnknownTopic,
)
from quackmq.protocols.http import limits
from quackmq.protocols.http.errors import HttpFailure
from quackmq.protocols.http.types import Request, Response, Stream
from quackmq.protocols.http.v1.operations import (
    BYTES,
    GREATEST,
    JSON,
    NOTHING,
    PARTITION,
    TOPIC,
    Answer,
    Body,
    Number,
    Operation,
    Text,
    answered,
    json_body,
)

_TAG: Final = "archive"
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")

# --- shapes ---------------------------------------------------------------------------------------

NameField = Annotated[str, Meta(min_length=1, max_length=shared_limits.NAME_BYTES)]
NamesField = Annotated[
    list[NameField], Meta(min_length=1, max_length=shared_limits.ARCHIVE_REPLACED_FILES)
]
PartitionField = Annotated[int, Meta(ge=0, lt=shared_limits.PARTITIONS_PER_TOPIC)]
LeaseField = Annotated[int, Meta(ge=1, le=shared_limits.ARCHIVE_PLAN_MS)]


class ArchivedFile(Struct, frozen=True):
    """A Parquet file: all records from `first_offset` up to, not including, `next_offset`, but for
    those that are quarantined. Its last `tail_bytes` have the checksum `tail_crc32c`; the times are
    null where it has no records."""

    name: str
    first_offset: int
    next_offset: int
    records: int
    size: int
    tail_bytes: int
    tail_crc32c: int
    least_timestamp_ms: int | None
    greatest_timestamp_ms: int | None
    least_append_ms: int | None
    greatest_append_ms: int | None


class QuarantinedBatch(Struct, frozen=True):
    """A batch that nobody can open, kept as it came in a file of its own; and why."""

    name: str
    first_offset: int
    next_offset: int
    size: int
    crc32c: int
    reason: str


class ArchivedPartition(Struct, frozen=True):
    """Archived is what lies from `first_offset` up to, not including, `next_offset`. The log holds
    what lies from `log_first_offset`, which is never behind that, up to `end_offset`, where all
    transactions are decided; `log_bytes` is what it takes, with what is archived and has not left
    it yet. `version` grows with each change; `problem` says why nothing more is archived, where
    that is so."""

    partition: int
    version: int
    first_offset: int
    next_offset: int
    log_first_offset: int
    end_offset: int
    log_bytes: int
    files: list[ArchivedFile]
    quarantined: list[QuarantinedBatch]
    problem: str | None


class ArchivedTopic(Struct, frozen=True):
    """Partitions of a topic, by number; each has a directory of that name in `directory`, once
    something of it is archived. `next_partition` goes into `from_partition` to ask for more; null
    where there are no more."""

    topic: str
    topic_id: str
    directory: str
    partitions: list[ArchivedPartition]
    next_partition: int | None


class NewPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """For how long files are to be kept, and of which partitions; of all, if none are named.
    `offers` says that files will be offered under the plan."""

    for_ms: LeaseField
    partitions: (
        Annotated[list[PartitionField], Meta(max_length=shared_limits.PARTITIONS_PER_TOPIC)] | None
    ) = None
    offers: bool = False


class Renewal(Struct, frozen=True, forbid_unknown_fields=True):
    """For how long from now on."""

    for_ms: LeaseField


class PlanSummary(Struct, frozen=True):
    """A plan, which is over at `expires_ms`."""

    plan: str
    expires_ms: int
    offers: bool
    topic: str
    topic_id: str


class PlanPage(Struct, frozen=True):
    """Every plan that there is."""

    plans: list[PlanSummary]


class PlannedTopic(ArchivedTopic, frozen=True):
    """A plan, with what it keeps: the partitions are as they were when it was made."""

    plan: str
    expires_ms: int
    offers: bool


class Replacement(Struct, frozen=True, forbid_unknown_fields=True):
    """Names of `old` files that follow on each other, as they were listed at `version`, and of the
    `new` ones that have their records, each by offset: those lie in the partition's directory as
    `_offered-PLAN-WORD.new`."""

    version: Annotated[int, Meta(ge=0, le=GREATEST)]
    old: NamesField
    new: NamesField


class ArchivedNow(Struct, frozen=True):
    """What was archived: files, their records and bytes, batches that were quarantined, and the
    bytes of the log that all of it was read from."""

    files: int
    records: int
    file_bytes: int
    quarantined: int
    log_bytes: int


class MergedNow(Struct, frozen=True):
    """What was merged."""

    merges: int
    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int


# --- parameters and bodies ------------------------------------------------------------------------

FROM_PARTITION: Final = Number(
    name="from_partition",
    most=shared_limits.PARTITIONS_PER_TOPIC - 1,
    default=0,
    about="The first partition to list.",
)
PLAN: Final = Text(name="plan", where="path", required=True, about="A plan's id.")
FILE: Final = Text(
    name="file", where="path", required=True, about="A file's name, as it is listed."
)
RANGE: Final = Text(
    name="Range",
    where="header",
    about="Which bytes: bytes=FIRST-LAST, bytes=FIRST- or bytes=-COUNT. One that is none of these "
    "is not looked at.",
)
IF_RANGE: Final = Text(
    name="If-Range",
    where="header",
    about="The ETag of a file, for which alone the range is meant.",
)
NEW_PLAN: Final = Body("For how long, and what.", {JSON: NewPlan})
RENEWAL: Final = Body("For how long.", {JSON: Renewal})
REPLACEMENT: Final = Body("What goes, and what comes.", {JSON: Replacement})

_file_fields: Final = attrgetter(*ArchivedFile.__struct_fields__)
_aside_fields: Final = attrgetter(*QuarantinedBatch.__struct_fields__)
_new_plan: Final = msgspec.json.Decoder(NewPlan)
_renewal: Final = msgspec.json.Decoder(Renewal)
_replacement: Final = msgspec.json.Decoder(Replacement)


# --- handlers -------------------------------------------------------------------------------------


async def describe(request: Request) -> Response:
    topic, start = TOPIC.of(request), FROM_PARTITION.of(request)
    found = await _archives(request).describe(request.caller, topic, start)
    return answered(200, ArchivedTopic(*_topic_shown(found)))


async def make_plan(request: Request) -> Response:
    topic, body = TOPIC.of(request), json_body(request, NEW_PLAN, _new_plan)
    archives = _archives(request)
    made = await archives.plan(
        request.caller, topic, body.for_ms, body.partitions, offers=body.offers
    )
    return answered(201, _planned(*await archives.planned(request.caller, made.id)))


async def describe_plan(request: Request) -> Response:
    plan, start = PLAN.of(request), FROM_PARTITION.of(request)
    return answered(200, _planned(*await _archives(request).planned(request.caller, plan, start)))


async def list_plans(request: Request) -> Response:
    plans = _archives(request).plans(request.caller)
    return answered(200, PlanPage([_summary(plan) for plan in plans]))


async def renew_plan(request: Request) -> Response:
    plan, body = PLAN.of(request), json_body(request, RENEWAL, _renewal)
    return answered(
        200, _summary(await _archives(request).renew(request.caller, plan, body.for_ms))
    )


async def release_plan(request: Request) -> Response:
    await _archives(request).release(request.caller, PLAN.of(request))
    return NOTHING


async def replace(request: Request) -> Response:
    topic, partition = TOPIC.of(request), PARTITION.of(request)
    body = json_body(request, REPLACEMENT, _replacement)
    replaced = await _archives(request).replace(
        request.caller, topic, partition, body.version, body.old, body.new
    )
    return answered(200, _partition_shown(replaced))


async def archive_now(request: Request) -> Response:
    done = await _archives(request).archive(request.caller, TOPIC.of(request))
    return answered(200, ArchivedNow(*done))


async def merge_now(request: Request) -> Response:
    done = await _archives(request).merge(request.caller, TOPIC.of(request))
    return answered(200, MergedNow(*done))


async def read_file(request: Request) -> Response | Stream:
    place = TOPIC.of(request), PARTITION.of(request), FILE.of(request)
    archives = _archives(request)
    size = archives.file_size(request.caller, *place)
    tag = f'"{place[2]}"'
    headers: tuple[tuple[str, str], ...] = (("accept-ranges", "bytes"), ("etag", tag))
    asked = None
    if IF_RANGE.given(request) in (None, tag):
        asked = range_of(RANGE.given(request), size)
    first, end = asked or (0, size)
    if asked is not None:
        headers = (*headers, ("content-range", f"bytes {first}-{end - 1}/{size}"))
    # Read the first chunk now, so that a file that cannot be read gets an error status.
    piece = b"" if request.method == "HEAD" else await _piece(request, place, first, end)
    pieces = _pieces(request, place, piece, first + len(piece), end)
    return Stream(BYTES, pieces, headers, 200 if asked is None else 206, end - first)


# --- bytes ----------------------------------------------------------------------------------------


def range_of(header: str | None, size: int) -> tuple[int, int] | None:
    """Return the start and the end of a range; None without a range in a supported form. Raise
    HttpFailure with status 416 if the range starts at or after the end of the file.
    """
    found = None if header is None else _RANGE.fullmatch(header.strip())
    if found is None or found[0] == "bytes=-":
        return None
    if not found[1]:
        first, end = max(0, size - int(found[2])), size
    else:
        first, end = int(found[1]), min(size, int(found[2] or size) + 1)
        if found[2] and int(found[2]) < first:
            return None
    if first >= size:
        raise HttpFailure(
            416,
            OffsetOutOfRange.code,
            f"the file has {size} bytes",
            (("content-range", f"bytes */{size}"),),
        )
    return first, end


async def _piece(request: Request, place: tuple[str, int, str], first: int, end: int) -> bytes:
    file = _archives(request).file(request.caller, *place)
    try:
        return await file.read(first, min(limits.ARCHIVE_CHUNK_BYTES, end - first))
    finally:
        file.close()


async def _pieces(
    request: Request, place: tuple[str, int, str], piece: bytes, position: int, end: int
) -> AsyncIterator[bytes]:
    """Yield the chunk that was already read, then the chunks from `position` on."""
    yield piece
    if position == end:
        return
    file = _archives(request).file(request.caller, *place)
    try:
        for start in range(position, end, limits.ARCHIVE_CHUNK_BYTES):
            yield await file.read(start, min(limits.ARCHIVE_CHUNK_BYTES, end - start))
    finally:
        file.close()


# --- helpers --------------------------------------------------------------------------------------


def _archives(request: Request) -> Archives:
    if request.broker.archive is None:
        raise NotFound("this broker has no archive: its store keeps nothing on disk")
    return request.broker.archive


def _topic_shown(
    found: TopicArchive,
) -> tuple[str, str, str, list[ArchivedPartition], int | None]:
    topic = found.topic
    partitions = [_partition_shown(each) for each in found.partitions]
    return topic.name, str(topic.id), found.directory, partitions, found.next_partition


def _partition_shown(found: PartitionArchive) -> ArchivedPartition:
    return ArchivedPartition(
        found.partition,
        found.version,
        found.first_offset,
        found.next_offset,
        found.log_first_offset,
        found.end_offset,
        found.log_bytes,
        [ArchivedFile(*_file_fields(file)) for file in found.files],
        [QuarantinedBatch(*_aside_fields(aside)) for aside in found.quarantined],
        found.problem,
    )


def _planned(plan: Plan, found: TopicArchive) -> PlannedTopic:
    return PlannedTopic(*_topic_shown(found), plan.id, plan.expires_ms, plan.offers)


def _summary(plan: Plan) -> PlanSummary:
    topic = plan.topic
    return PlanSummary(plan.id, plan.expires_ms, plan.offers, topic.name, str(topic.id))


# --- operations -----------------------------------------------------------------------------------

OPERATIONS: Final = (
    Operation(
        name="describeArchive",
        tag=_TAG,
        method="GET",
        path="/v1/topics/{topic}/archive",
        handler=describe,
        about="List the files that are archived of a topic, and where its log goes on. A file that "
        "is listed may be merged with others and go at any moment: a plan keeps it.",
        parameters=(TOPIC, FROM_PARTITION),
        answers={200: Answer("The partitions, or the first of them.", ArchivedTopic)},
        errors=(UnknownTopic, NotFound),
    ),
    Operation(
        name="makePlan",
        tag=_TAG,
        method="POST",
        path="/v1/topics/{topic}/archive/plans",
        handler=make_plan,
        about="List the files that are archived of a topic and keep them for a time. What is "
        "merged, or let go of, meanwhile stays on disk until no plan has it. After a restart of "
        "the broker, plan again.",
        parameters=(TOPIC,),
        body=NEW_PLAN,
        answers={201: Answer("The plan, and the partitions, or the first of them.", PlannedTopic)},
        errors=(UnknownTopic, UnknownPartition, LimitReached, NotFound),
    ),
    Operation(
        name="listPlans",
        tag=_TAG,
        method="GET",
        path="/v1/archive/plans",
        handler=list_plans,
        about="List the plans that keep files of the archive.",
        answers={200: Answer("All of them.", PlanPage)},
        errors=(NotFound,),
    ),
    Operation(
        name="describePlan",
        tag=_TAG,
        method="GET",
        path="/v1/archive/plans/{plan}",
        handler=describe_plan,
        about="Describe a plan and what it keeps.",
        parameters=(PLAN, FROM_PARTITION),
        answers={200: Answer("The plan, and its partitions, or some of them.", PlannedTopic)},
        errors=(UnknownPlan, NotFound),
    ),
    Operation(
        name="renewPlan",
        tag=_TAG,
        method="POST",
        path="/v1/archive/plans/{plan}",
        handler=renew_plan,
        about="Let a plan keep its files for so long from now on.",
        parameters=(PLAN,),
        body=RENEWAL,
        answers={200: Answer("The plan.", PlanSummary)},
        errors=(UnknownPlan, NotFound),
    ),
    Operation(
        name="releasePlan",
        tag=_TAG,
        method="DELETE",
        path="/v1/archive/plans/{plan}",
        handler=release_plan,
        about="Let go of a plan. Files that only it kept go, and so does what was offered under it "
        "and not taken.",
        parameters=(PLAN,),
        answers={204: Answer("It is over.")},
        errors=(UnknownPlan, NotFound),
    ),
    Operation(
        name="readArchivedFile",
        tag=_TAG,
        method="GET",
        path="/v1/topics/{topic}/archive/partitions/{partition}/files/{file}",
        handler=read_file,
        about="A file's bytes: of one that is listed, or that a plan keeps.",
        parameters=(TOPIC, PARTITION, FILE, RANGE, IF_RANGE),
        answers={
            200: Answer("All of it.", content_type=BYTES, schema={}),
            206: Answer("The range.", content_type=BYTES, schema={}),
        },
        errors=(
            UnknownTopic,
            UnknownPartition,
            UnknownFile,
            NotFound,
            OffsetOutOfRange,
            DamagedData,
            StorageError,
        ),
    ),
    Operation(
        name="replaceFiles",
        tag=_TAG,
        method="POST",
        path="/v1/topics/{topic}/archive/partitions/{partition}/replace",
        handler=replace,
        about="Put files that were made beside the broker in the place of others. They are read "
        "and compared with those that they are for, record by record, and then taken at once. What "
        "was archived since the version does no harm.",
        parameters=(TOPIC, PARTITION),
        body=REPLACEMENT,
        answers={200: Answer("The partition as it is now.", ArchivedPartition)},
        errors=(
            UnknownTopic,
            UnknownPartition,
            UnknownPlan,
            NotFound,
            StateChanged,
            DamagedData,
            StorageError,
        ),
    ),
    Operation(
        name="archiveNow",
        tag=_TAG,
        method="POST",
        path="/v1/topics/{topic}/archive/now",
        handler=archive_now,
        about="Archive all of a topic that is decided, whatever its policy says, and wait for it.",
        parameters=(TOPIC,),
        answers={200: Answer("What was done.", ArchivedNow)},
        errors=(UnknownTopic, NotFound, StorageError),
        waits=True,
    ),
    Operation(
        name="mergeNow",
        tag=_TAG,
        method="POST",
        path="/v1/topics/{topic}/archive/merge",
        handler=merge_now,
        about="Merge all files of a topic for which that is worth it, and wait for it.",
        parameters=(TOPIC,),
        answers={200: Answer("What was done.", MergedNow)},
        errors=(UnknownTopic, NotFound, StorageError),
        waits=True,
    ),
)
