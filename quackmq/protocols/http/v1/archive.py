"""The archive: list its files, protect them with plans, read their bytes, and replace them.

Files are Parquet and never change: a name means the same bytes as long as the file exists. A reader
that shares a disk with the broker reads them in `directory`, in the directory of their partition.
Other readers get the bytes here, whole or by range.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from operator import attrgetter
from typing import Annotated, Final

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
    INT64_MAX,
    NO_CONTENT,
    PARTITION,
    TOPIC,
    JsonBody,
    Number,
    Operation,
    ResponseInfo,
    Text,
    json_response,
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
    """A Parquet file. It holds all records from `first_offset` up to, not including, `next_offset`,
    except those that are quarantined. Its last `tail_bytes` have the checksum `tail_crc32c`. The
    times are null if it has no records."""

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
    """A batch that cannot be decoded, with the reason. Its bytes are stored unchanged in a file."""

    name: str
    first_offset: int
    next_offset: int
    size: int
    crc32c: int
    reason: str


class ArchivedPartition(Struct, frozen=True):
    """The archive of a partition. The records from `first_offset` up to, not including,
    `next_offset` are archived. The log holds those from `log_first_offset`, which is not greater
    than `next_offset`, up to `end_offset`; no transaction is open before that. `log_bytes` is the
    size of the log, with archived records that were not deleted from it yet. `version` grows with
    each change. `problem` says why archiving has stopped, or is null."""

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
    """Partitions of a topic, by number. A partition with archived records has a directory of that
    name in `directory`. Pass `next_partition` as `from_partition` to get more; it is null at the
    end."""

    topic: str
    topic_id: str
    directory: str
    partitions: list[ArchivedPartition]
    next_partition: int | None


class NewPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """A plan to be made: how long it keeps files, and of which partitions, by default of all.
    `offers` says that replacement files will be offered under the plan."""

    for_ms: LeaseField
    partitions: (
        Annotated[list[PartitionField], Meta(max_length=shared_limits.PARTITIONS_PER_TOPIC)] | None
    ) = None
    offers: bool = False


class Renewal(Struct, frozen=True, forbid_unknown_fields=True):
    """How long a plan is to keep its files from now on."""

    for_ms: LeaseField


class PlanSummary(Struct, frozen=True):
    """A plan, which ends at `expires_ms`."""

    plan: str
    expires_ms: int
    offers: bool
    topic: str
    topic_id: str


class PlanPage(Struct, frozen=True):
    """All plans."""

    plans: list[PlanSummary]


class PlannedTopic(ArchivedTopic, frozen=True):
    """A plan with the files that it keeps. The partitions are shown as of the time when the plan
    was made."""

    plan: str
    expires_ms: int
    offers: bool


class Replacement(Struct, frozen=True, forbid_unknown_fields=True):
    """Consecutive `old` files, as listed at `version`, and the `new` files with the same records.
    Both are ordered by offset. The new files are in the partition's directory and are named
    `_offered-PLAN-WORD.new`."""

    version: Annotated[int, Meta(ge=0, le=INT64_MAX)]
    old: NamesField
    new: NamesField


class ArchivedNow(Struct, frozen=True):
    """What was archived: files, their records and bytes, quarantined batches, and the bytes of the
    log that were read for them."""

    files: int
    records: int
    file_bytes: int
    quarantined: int
    log_bytes: int


class MergedNow(Struct, frozen=True):
    """What was merged: the number of merges, and the files and bytes before and after."""

    merges: int
    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int


# --- parameters and bodies ------------------------------------------------------------------------

FROM_PARTITION: Final = Number(
    name="from_partition",
    maximum=shared_limits.PARTITIONS_PER_TOPIC - 1,
    default=0,
    description="The first partition to list.",
)
PLAN: Final = Text(name="plan", location="path", required=True, description="A plan's id.")
FILE: Final = Text(
    name="file", location="path", required=True, description="The name of a listed file."
)
RANGE: Final = Text(
    name="Range",
    location="header",
    description="Which bytes: bytes=FIRST-LAST, bytes=FIRST- or bytes=-COUNT. Other forms are "
    "ignored.",
)
IF_RANGE: Final = Text(
    name="If-Range",
    location="header",
    description="The ETag of a file. If it differs, the range is ignored.",
)
NEW_PLAN: Final = JsonBody(NewPlan, "The plan to be made.")
RENEWAL: Final = JsonBody(Renewal, "The new duration.")
REPLACEMENT: Final = JsonBody(Replacement, "The old and the new files.")

_file_fields: Final = attrgetter(*ArchivedFile.__struct_fields__)
_quarantined_fields: Final = attrgetter(*QuarantinedBatch.__struct_fields__)


# --- handlers -------------------------------------------------------------------------------------


async def describe(request: Request) -> Response:
    topic, start = TOPIC.require(request), FROM_PARTITION.require(request)
    archive = await _archives(request).describe(request.caller, topic, start)
    return json_response(200, ArchivedTopic(*_topic_fields(archive)))


async def make_plan(request: Request) -> Response:
    """Make a plan, which keeps archive files of a topic; return it with the files that it keeps."""
    topic, body = TOPIC.require(request), NEW_PLAN.decode(request)
    archives = _archives(request)
    plan = await archives.plan(
        request.caller, topic, body.for_ms, body.partitions, offers=body.offers
    )
    return json_response(
        201, _planned_topic(*await archives.describe_plan(request.caller, plan.id))
    )


async def describe_plan(request: Request) -> Response:
    plan, start = PLAN.require(request), FROM_PARTITION.require(request)
    return json_response(
        200, _planned_topic(*await _archives(request).describe_plan(request.caller, plan, start))
    )


async def list_plans(request: Request) -> Response:
    plans = _archives(request).plans(request.caller)
    return json_response(200, PlanPage([_plan_summary(plan) for plan in plans]))


async def renew_plan(request: Request) -> Response:
    plan, body = PLAN.require(request), RENEWAL.decode(request)
    return json_response(
        200, _plan_summary(await _archives(request).renew(request.caller, plan, body.for_ms))
    )


async def release_plan(request: Request) -> Response:
    await _archives(request).release(request.caller, PLAN.require(request))
    return NO_CONTENT


async def replace(request: Request) -> Response:
    """Replace archive files of a partition; return the partition after the change."""
    topic, partition = TOPIC.require(request), PARTITION.require(request)
    body = REPLACEMENT.decode(request)
    replaced = await _archives(request).replace(
        request.caller, topic, partition, body.version, body.old, body.new
    )
    return json_response(200, _partition_shape(replaced))


async def archive_now(request: Request) -> Response:
    counts = await _archives(request).archive(request.caller, TOPIC.require(request))
    return json_response(200, ArchivedNow(*counts))


async def merge_now(request: Request) -> Response:
    counts = await _archives(request).merge(request.caller, TOPIC.require(request))
    return json_response(200, MergedNow(*counts))


async def read_file(request: Request) -> Response | Stream:
    """Return an archive file in chunks, or the range of its bytes that the request names."""
    file_key = TOPIC.require(request), PARTITION.require(request), FILE.require(request)
    archives = _archives(request)
    size = archives.file_size(request.caller, *file_key)
    # A file never changes, so its name can be its ETag.
    tag = f'"{FILE.require(request)}"'
    headers: tuple[tuple[str, str], ...] = (("accept-ranges", "bytes"), ("etag", tag))
    byte_range = None
    # Use the range only if the client means this file, or does not say which file it means.
    if IF_RANGE.get(request) in (None, tag):
        byte_range = parse_range(RANGE.get(request), size)
    first, end = byte_range or (0, size)
    if byte_range is not None:
        # `content-range` names the last byte itself, so it is one less than `end`.
        headers = (*headers, ("content-range", f"bytes {first}-{end - 1}/{size}"))
    # Read the first chunk now, so that a file that cannot be read gets an error status.
    chunk = b"" if request.method == "HEAD" else await _read_chunk(request, file_key, first, end)
    chunks = _stream_chunks(request, file_key, chunk, first + len(chunk), end)
    return Stream(BYTES, chunks, headers, 200 if byte_range is None else 206, end - first)


# --- bytes ----------------------------------------------------------------------------------------


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Return the start and the end of a range; None without a range in a supported form. Raise
    HttpFailure with status 416 if the range starts at or after the end of the file.
    """
    match = None if header is None else _RANGE.fullmatch(header.strip())
    # `bytes=-` has neither a first byte nor a count.
    if match is None or match[0] == "bytes=-":
        return None
    if not match[1]:
        # The form `bytes=-COUNT` asks for the last COUNT bytes.
        first, end = max(0, size - int(match[2])), size
    else:
        # The last byte belongs to the range, so `end` is one more.
        first, end = int(match[1]), min(size, int(match[2] or size) + 1)
        # RFC 9110 allows a server to ignore an invalid range.
        if match[2] and int(match[2]) < first:
            return None
    if first >= size:
        raise HttpFailure(
            416,
            OffsetOutOfRange.code,
            f"the file has {size} bytes",
            (("content-range", f"bytes */{size}"),),
        )
    return first, end


async def _read_chunk(
    request: Request, file_key: tuple[str, int, str], first: int, end: int
) -> bytes:
    """Return the bytes from `first` up to `end`, at most one chunk. Close the file afterwards: if
    the peer disconnects before the stream starts, no other code would close it.
    """
    file = _archives(request).file(request.caller, *file_key)
    try:
        return await file.read(first, min(limits.ARCHIVE_CHUNK_BYTES, end - first))
    finally:
        file.close()


async def _stream_chunks(
    request: Request, file_key: tuple[str, int, str], chunk: bytes, position: int, end: int
) -> AsyncIterator[bytes]:
    """Yield the chunk that was already read, then the chunks from `position` on."""
    yield chunk
    if position == end:
        return
    file = _archives(request).file(request.caller, *file_key)
    try:
        for start in range(position, end, limits.ARCHIVE_CHUNK_BYTES):
            yield await file.read(start, min(limits.ARCHIVE_CHUNK_BYTES, end - start))
    finally:
        file.close()


# --- helpers --------------------------------------------------------------------------------------


def _archives(request: Request) -> Archives:
    if request.broker.archive is None:
        raise NotFound(f"a broker with a {request.broker.store_kind} store has no archive")
    return request.broker.archive


def _topic_fields(
    archive: TopicArchive,
) -> tuple[str, str, str, list[ArchivedPartition], int | None]:
    """Return the fields that `ArchivedTopic` and `PlannedTopic` share, in their order."""
    topic = archive.topic
    partitions = [_partition_shape(each) for each in archive.partitions]
    return topic.name, str(topic.id), archive.directory, partitions, archive.next_partition


def _partition_shape(archive: PartitionArchive) -> ArchivedPartition:
    """Convert the description of a partition's archive for JSON."""
    return ArchivedPartition(
        archive.partition,
        archive.version,
        archive.first_offset,
        archive.next_offset,
        archive.log_first_offset,
        archive.end_offset,
        archive.log_bytes,
        [ArchivedFile(*_file_fields(file)) for file in archive.files],
        [QuarantinedBatch(*_quarantined_fields(batch)) for batch in archive.quarantined],
        archive.problem,
    )


def _planned_topic(plan: Plan, archive: TopicArchive) -> PlannedTopic:
    return PlannedTopic(*_topic_fields(archive), plan.id, plan.expires_ms, plan.offers)


def _plan_summary(plan: Plan) -> PlanSummary:
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
        description="List the archive files of a topic, and where its log continues. A listed file "
        "may be merged and deleted at any time, unless a plan keeps it.",
        parameters=(TOPIC, FROM_PARTITION),
        responses={200: ResponseInfo("The partitions, or the first of them.", ArchivedTopic)},
        errors=(UnknownTopic, NotFound),
    ),
    Operation(
        name="makePlan",
        tag=_TAG,
        method="POST",
        path="/v1/topics/{topic}/archive/plans",
        handler=make_plan,
        description="List the archive files of a topic and keep them for a time. Files that are "
        "merged or deleted meanwhile stay on disk until no plan keeps them. Plans end when the "
        "broker restarts.",
        parameters=(TOPIC,),
        body=NEW_PLAN,
        responses={
            201: ResponseInfo("The plan, and the partitions, or the first of them.", PlannedTopic)
        },
        errors=(UnknownTopic, UnknownPartition, LimitReached, NotFound),
    ),
    Operation(
        name="listPlans",
        tag=_TAG,
        method="GET",
        path="/v1/archive/plans",
        handler=list_plans,
        description="List the plans that keep files of the archive.",
        responses={200: ResponseInfo("All plans.", PlanPage)},
        errors=(NotFound,),
    ),
    Operation(
        name="describePlan",
        tag=_TAG,
        method="GET",
        path="/v1/archive/plans/{plan}",
        handler=describe_plan,
        description="Describe a plan and what it keeps.",
        parameters=(PLAN, FROM_PARTITION),
        responses={
            200: ResponseInfo("The plan, and its partitions, or some of them.", PlannedTopic)
        },
        errors=(UnknownPlan, NotFound),
    ),
    Operation(
        name="renewPlan",
        tag=_TAG,
        method="POST",
        path="/v1/archive/plans/{plan}",
        handler=renew_plan,
        description="Extend a plan: it keeps its files for this long from now on.",
        parameters=(PLAN,),
        body=RENEWAL,
        responses={200: ResponseInfo("The plan.", PlanSummary)},
        errors=(UnknownPlan, NotFound),
    ),
    Operation(
        name="releasePlan",
        tag=_TAG,
        method="DELETE",
        path="/v1/archive/plans/{plan}",
        handler=release_plan,
        description="End a plan. Files that only it kept are deleted, and so are files that were "
        "offered under it and not used.",
        parameters=(PLAN,),
        responses={204: ResponseInfo("The plan is ended.")},
        errors=(UnknownPlan, NotFound),
    ),
    Operation(
        name="readArchivedFile",
        tag=_TAG,
        method="GET",
        path="/v1/topics/{topic}/archive/partitions/{partition}/files/{file}",
        handler=read_file,
        description="Read the bytes of a file that is listed or that a plan keeps.",
        parameters=(TOPIC, PARTITION, FILE, RANGE, IF_RANGE),
        responses={
            200: ResponseInfo("The whole file.", content_type=BYTES, schema={}),
            206: ResponseInfo("The range.", content_type=BYTES, schema={}),
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
        description="Replace files by files that another program has made. The broker compares "
        "the new files with the old ones, record by record, and then replaces all of them "
        "together. Records that were archived since the version are not affected.",
        parameters=(TOPIC, PARTITION),
        body=REPLACEMENT,
        responses={200: ResponseInfo("The partition after the change.", ArchivedPartition)},
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
        description="Archive all decided records of a topic now, whatever its policy says, and "
        "wait until that is done.",
        parameters=(TOPIC,),
        responses={200: ResponseInfo("What was done.", ArchivedNow)},
        errors=(UnknownTopic, NotFound, StorageError),
        may_wait=True,
    ),
    Operation(
        name="mergeNow",
        tag=_TAG,
        method="POST",
        path="/v1/topics/{topic}/archive/merge",
        handler=merge_now,
        description="Merge the files of a topic that are worth merging, and wait until that is "
        "done.",
        parameters=(TOPIC,),
        responses={200: ResponseInfo("What was done.", MergedNow)},
        errors=(UnknownTopic, NotFound, StorageError),
        may_wait=True,
    ),
)
