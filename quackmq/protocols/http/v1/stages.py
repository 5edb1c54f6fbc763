"""Staging: many writers, one commit.

Writers stage batches or messages under the key of a stage. Each writer has its own name (a part),
and numbers its calls from 0. One commit makes all staged records visible together. A writer that
gets no response repeats its call unchanged, and so does the committer; a repeat has no further
effect. A part summary describes the content of a part. The commit may list summaries, so that the
parts of failed writers are omitted.

A streaming writer uses a series of stages, one for each turn. The broker remembers the last
committed turn of a series, for a long time, and no earlier ones.

A body of batches is for one partition, or each batch follows its partition:

    | partition, 4 bytes | batch | partition, 4 bytes | batch | …
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from quackmq import limits as shared_limits
from quackmq.broker import CommittedStage, PartSummary, StagedBatch, StageDescription, Turn
from quackmq.errors import (
    CorruptBatch,
    InvalidRequest,
    LimitReached,
    NoSubscriber,
    RecordTooLarge,
    StageCommitted,
    StageConflict,
    StoreReadOnly,
    TurnOutdated,
    UnknownPartition,
    UnknownStage,
    UnknownTopic,
    UnsupportedBatch,
)
from quackmq.model.topic import PartitionKey
from quackmq.protocols.http import limits
from quackmq.protocols.http.types import Request, Response, decode_json
from quackmq.protocols.http.v1.messages import NewMessage, make_record
from quackmq.protocols.http.v1.operations import (
    BYTES,
    INT64_MAX,
    JSON,
    LIMIT,
    NO_CONTENT,
    Body,
    JsonBody,
    Number,
    Operation,
    ResponseInfo,
    Text,
    check_content_type,
    cut_page,
    json_response,
)
from quackmq.records import codec
from quackmq.records.batch import Batch

_TAG: Final = "stages"
_PARTITION_FIELD: Final = struct.Struct(">I")


# --- shapes ---------------------------------------------------------------------------------------


class StagedMessages(Struct, frozen=True, forbid_unknown_fields=True):
    """Messages to be staged. The broker makes one batch of them."""

    messages: Annotated[list[NewMessage], Meta(min_length=1, max_length=limits.HTTP_MESSAGES)]


class PartSummaryShape(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a part: the number of its calls, and the digest of what they staged."""

    part: str
    calls: Annotated[int, Meta(ge=0, le=INT64_MAX)]
    digest: str


class CommitRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The commit of a stage. `receipts` are the summaries of the parts to commit, by default
    all of them. `contents` is a word that identifies the content; by it a repeat is recognized even
    if its parts were staged again. A `turn` of a `series` is committed once, whatever its key and
    contents. A turn before the last committed one is refused."""

    receipts: (
        Annotated[list[PartSummaryShape], Meta(max_length=shared_limits.STAGE_PARTS)] | None
    ) = None
    contents: Annotated[str, Meta(max_length=shared_limits.NAME_BYTES)] = ""
    series: Annotated[str, Meta(min_length=1, max_length=shared_limits.NAME_BYTES)] | None = None
    turn: Annotated[int, Meta(ge=0, le=INT64_MAX)] | None = None


class CommittedShape(Struct, frozen=True):
    """A commit. `repeated` says that the stage was committed before, and nothing was added."""

    key: str
    contents: str
    records: int
    committed_ms: int
    repeated: bool


class StageSummary(Struct, frozen=True):
    """A stage that is neither committed nor aborted."""

    key: str
    part_count: int
    batches: int
    bytes: int
    touched_ms: int


class StagePage(Struct, frozen=True):
    """Stages, ordered by key. Pass `next` as `after` to get more; it is null at the end."""

    stages: list[StageSummary]
    next: str | None


class StageShape(StageSummary, frozen=True):
    """A stage with the summaries of some of its parts, ordered by name. Pass `next_part` as `after`
    to get more; it is null at the end. A committed stage has only its `commit`."""

    parts: list[PartSummaryShape]
    next_part: str | None
    commit: CommittedShape | None = None


class SeriesShape(Struct, frozen=True):
    """A series with its last committed turn. `topics` are the topics of that commit, or null if an
    older version of the broker made it."""

    series: str
    turn: int
    contents: str
    records: int
    committed_ms: int
    topics: tuple[str, ...] | None


class SeriesPage(Struct, frozen=True):
    """Series, ordered by name. Pass `next` as `after` to get more; it is null at the end."""

    series: list[SeriesShape]
    next: str | None


# --- parameters and bodies ------------------------------------------------------------------------

KEY: Final = Text(
    name="key",
    location="path",
    required=True,
    description="A stage's key.",
    max_chars=shared_limits.NAME_BYTES,
)
PART: Final = Text(
    name="part",
    location="path",
    required=True,
    description="The name under which one writer stages.",
    max_chars=shared_limits.NAME_BYTES,
)
CALL: Final = Number(
    name="number",
    location="path",
    required=True,
    maximum=INT64_MAX,
    description="Which of the part's calls this is, counted from 0.",
)
TOPIC: Final = Text(
    name="topic",
    required=True,
    description="The topic of the records.",
    max_chars=shared_limits.TOPIC_NAME_CHARS,
)
PARTITION: Final = Number(
    name="partition",
    maximum=shared_limits.PARTITIONS_PER_TOPIC - 1,
    description="The partition of the records. Without it, each batch of the body follows its "
    "partition in 4 bytes, big-endian.",
)
SERIES: Final = Text(
    name="series",
    description="The series to which the stage belongs, if any.",
    max_chars=shared_limits.NAME_BYTES,
)
TURN: Final = Number(
    name="turn",
    maximum=INT64_MAX,
    description="The number of the turn; later turns have greater numbers.",
)
SERIES_NAME: Final = Text(
    name="series",
    location="path",
    required=True,
    description="A series' name.",
    max_chars=shared_limits.NAME_BYTES,
)
AFTER_SERIES: Final = Text(name="after", description="Only series whose names come after this one.")
TIMESTAMP_MS: Final = Number(
    name="timestamp_ms",
    maximum=2**53,
    description="The timestamp of messages in JSON. It is required for them, because a repeated "
    "call must be identical.",
)
AFTER: Final = Text(name="after", description="Only stages whose keys come after this one.")
AFTER_PART: Final = Text(name="after", description="Only parts whose names come after this one.")

STAGED: Final = Body(
    "Record batches of Kafka's format (magic 2) one after the other, or messages as JSON.",
    {BYTES: bytes, JSON: StagedMessages},
    max_bytes=shared_limits.STAGE_CALL_BYTES,
)
COMMIT: Final = JsonBody(CommitRequest, "The parts to commit.", required=False)

_messages_decoder: Final = msgspec.json.Decoder(StagedMessages)


# --- handlers -------------------------------------------------------------------------------------


async def list_stages(request: Request) -> Response:
    """Return a page of the stages, sorted by key, that are neither committed nor aborted."""
    after, limit = AFTER.get(request) or "", LIMIT.require(request)
    stages = [each for each in request.broker.staging.all(request.caller) if each.key > after]
    stages.sort(key=lambda each: each.key)
    page, last = cut_page(stages, limit)
    summaries = [StageSummary(*_summary_fields(each)) for each in page]
    return json_response(200, StagePage(summaries, None if last is None else last.key))


async def stage(request: Request) -> Response:
    """Stage the batches or messages of one call; return the summary of the part. Messages in JSON
    need `timestamp_ms`, because a repeated call must make an identical batch.
    """
    content_type = check_content_type(request, STAGED)
    topic, partition = request.broker.topic(TOPIC.require(request)), PARTITION.get(request)
    timestamp_ms = TIMESTAMP_MS.get(request)
    turn = _parse_turn(SERIES.get(request), TURN.get(request))
    if content_type == BYTES:
        batches = list(_parse_batches(request.body, partition))
    elif timestamp_ms is None:
        raise InvalidRequest(f"timestamp_ms is missing. {TIMESTAMP_MS.description}")
    elif partition is None:
        raise InvalidRequest("partition is missing: messages in JSON need one")
    else:
        batches = [
            (partition, _make_batch(decode_json(request.body, _messages_decoder), timestamp_ms))
        ]
    summary = await request.broker.staging.stage(
        request.caller,
        KEY.require(request),
        PART.require(request),
        CALL.require(request),
        [StagedBatch(PartitionKey(topic.id, partition), batch) for partition, batch in batches],
        turn,
    )
    return json_response(200, PartSummaryShape(*summary))


async def commit(request: Request) -> Response:
    """Commit a stage: all its parts, or those whose summaries the body lists."""
    key, body = KEY.require(request), COMMIT.decode(request)
    summaries = None
    if body.receipts is not None:
        summaries = [PartSummary(each.part, each.calls, each.digest) for each in body.receipts]
    committed = await request.broker.staging.commit(
        request.caller,
        key,
        summaries,
        contents_digest=body.contents,
        turn=_parse_turn(body.series, body.turn),
    )
    return json_response(200, CommittedShape(key, *committed))


async def abort(request: Request) -> Response:
    key = KEY.require(request)
    if not await request.broker.staging.abort(request.caller, key):
        raise UnknownStage(f"there is no stage {key[:100]!r}")
    return NO_CONTENT


async def list_series(request: Request) -> Response:
    """Return a page of the series, sorted by name, each with its last committed turn."""
    after, limit = AFTER_SERIES.get(request) or "", LIMIT.require(request)
    series = request.broker.staging.series(request.caller)
    names = sorted(name for name in series if name > after)
    page, last = cut_page(names, limit)
    return json_response(200, SeriesPage([SeriesShape(name, *series[name]) for name in page], last))


async def describe_series(request: Request) -> Response:
    """Return the last committed turn of a series. Raise UnknownStage if no turn was committed."""
    name = SERIES_NAME.require(request)
    last = request.broker.staging.series(request.caller).get(name)
    if last is None:
        raise UnknownStage(f"no turn of a series {name[:100]!r} was committed")
    return json_response(200, SeriesShape(name, *last))


async def forget_series(request: Request) -> Response:
    name = SERIES_NAME.require(request)
    if not await request.broker.staging.forget_series(request.caller, name):
        raise UnknownStage(f"no turn of a series {name[:100]!r} was committed")
    return NO_CONTENT


async def describe(request: Request) -> Response:
    """Return a stage with a page of the summaries of its parts, or the commit of the stage."""
    key, after, limit = KEY.require(request), AFTER_PART.get(request) or "", LIMIT.require(request)
    stage = request.broker.staging.describe(request.caller, key)
    if isinstance(stage, CommittedStage):
        # A committed stage has only its commit: the counts are 0, and there are no parts.
        shape = CommittedShape(key, *stage)
        return json_response(200, StageShape(key, 0, 0, 0, stage.committed_ms, [], None, shape))
    parts = sorted(each for each in stage.parts if each.part > after)
    page, last = cut_page(parts, limit)
    summaries = [PartSummaryShape(*each) for each in page]
    next_part = None if last is None else last.part
    return json_response(200, StageShape(*_summary_fields(stage), summaries, next_part))


# --- helpers --------------------------------------------------------------------------------------


def _parse_batches(body: bytes, partition: int | None) -> Iterator[tuple[int, Batch]]:
    """Check and yield each batch of a body with its partition. If `partition` is None, the body has
    a partition number before each batch. Raise CorruptBatch if bytes remain.
    """
    data = memoryview(body)
    while data:
        target = partition
        if target is None:
            if len(data) < _PARTITION_FIELD.size:
                raise CorruptBatch(f"{len(data)} bytes follow the last batch")
            (target,) = _PARTITION_FIELD.unpack_from(data)
            data = data[_PARTITION_FIELD.size :]
        batch = Batch.parse(data)
        yield target, batch
        data = data[batch.size :]


def _parse_turn(series: str | None, number: int | None) -> Turn | None:
    """Return the turn that a request names, or None if its stage belongs to no series. Raise
    InvalidRequest if only one of the two fields is present.
    """
    if series is None and number is None:
        return None
    if series is None or number is None:
        raise InvalidRequest("series and turn go together: send both or neither")
    return Turn(series, number)


def _make_batch(staged: StagedMessages, timestamp_ms: int) -> Batch:
    """Encode messages as one batch. The timestamp comes from the request, so a repeated call makes
    the same bytes and is recognized.
    """
    records = [
        make_record(each, f"messages[{number}]", timestamp_ms)
        for number, each in enumerate(staged.messages)
    ]
    # The broker has just encoded these bytes, so no checksum needs a check.
    return Batch.peek(codec.encode(records))


def _summary_fields(stage: StageDescription) -> tuple[str, int, int, int, int]:
    return stage.key, len(stage.parts), stage.batches, stage.size, stage.touched_ms


# --- operations -----------------------------------------------------------------------------------

OPERATIONS: Final = (
    Operation(
        name="listStages",
        tag=_TAG,
        method="GET",
        path="/v1/stages",
        handler=list_stages,
        description="List the stages that are neither committed nor aborted.",
        parameters=(AFTER, LIMIT),
        responses={200: ResponseInfo("A page of stages.", StagePage)},
    ),
    Operation(
        name="stage",
        tag=_TAG,
        method="PUT",
        path="/v1/stages/{key}/parts/{part}/{number}",
        handler=stage,
        description="Stage batches or messages. Nobody sees them until the stage is committed. The "
        "first call creates the stage.",
        parameters=(KEY, PART, CALL, TOPIC, PARTITION, TIMESTAMP_MS, SERIES, TURN),
        body=STAGED,
        responses={
            200: ResponseInfo("They are on disk. The part's content now.", PartSummaryShape)
        },
        errors=(
            UnknownTopic,
            UnknownPartition,
            CorruptBatch,
            UnsupportedBatch,
            RecordTooLarge,
            StageConflict,
            StageCommitted,
            TurnOutdated,
            LimitReached,
            StoreReadOnly,
        ),
    ),
    Operation(
        name="commitStage",
        tag=_TAG,
        method="POST",
        path="/v1/stages/{key}/commit",
        handler=commit,
        description="Make all staged records visible together. For a week, a repeat adds nothing "
        "and gets the same response.",
        parameters=(KEY,),
        body=COMMIT,
        responses={200: ResponseInfo("The stage is committed.", CommittedShape)},
        errors=(
            UnknownStage,
            UnknownTopic,
            UnknownPartition,
            StageConflict,
            TurnOutdated,
            NoSubscriber,
            LimitReached,
            StoreReadOnly,
        ),
    ),
    Operation(
        name="describeStage",
        tag=_TAG,
        method="GET",
        path="/v1/stages/{key}",
        handler=describe,
        description="Describe a stage, open or committed.",
        parameters=(KEY, AFTER_PART, LIMIT),
        responses={200: ResponseInfo("The stage.", StageShape)},
        errors=(UnknownStage,),
    ),
    Operation(
        name="abortStage",
        tag=_TAG,
        method="DELETE",
        path="/v1/stages/{key}",
        handler=abort,
        description="Abort a stage and delete its records.",
        parameters=(KEY,),
        responses={204: ResponseInfo("The stage is deleted.")},
        errors=(UnknownStage, StageConflict, StoreReadOnly),
    ),
    Operation(
        name="listSeries",
        tag=_TAG,
        method="GET",
        path="/v1/series",
        handler=list_series,
        description="List the series of stages, each with its last committed turn.",
        parameters=(AFTER_SERIES, LIMIT),
        responses={200: ResponseInfo("A page of series.", SeriesPage)},
    ),
    Operation(
        name="describeSeries",
        tag=_TAG,
        method="GET",
        path="/v1/series/{series}",
        handler=describe_series,
        description="Describe a series by its last committed turn.",
        parameters=(SERIES_NAME,),
        responses={200: ResponseInfo("The series.", SeriesShape)},
        errors=(UnknownStage,),
    ),
    Operation(
        name="forgetSeries",
        tag=_TAG,
        method="DELETE",
        path="/v1/series/{series}",
        handler=forget_series,
        description="Forget the last committed turn of a series. Its next turn may have any "
        "number.",
        parameters=(SERIES_NAME,),
        responses={204: ResponseInfo("The series is forgotten.")},
        errors=(UnknownStage, StoreReadOnly),
    ),
)
