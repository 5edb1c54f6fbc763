"""Staging: many writers, one commit.

Writers stage batches or messages under the key of a stage. Each writer has its own name (a part),
and numbers its calls from 0. One commit makes all staged records visible at once. A writer repeats
a call without a response unchanged, and so does the committer; a repeat has no further effect. A
receipt describes the content of a part. The commit may list receipts, so that the parts of failed
writers are left out.

A streaming writer uses a series of stages, one for each turn. Of a series the broker remembers only
the last committed turn, for a long time.

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
from quackmq.broker import CommittedStage, Receipt, StagedBatch, StageDescription, Turn
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
from quackmq.protocols.http.types import Request, Response, decoded
from quackmq.protocols.http.v1.messages import NewMessage, record_of
from quackmq.protocols.http.v1.operations import (
    BYTES,
    GREATEST,
    JSON,
    LIMIT,
    NOTHING,
    Answer,
    Body,
    Number,
    Operation,
    Text,
    answered,
    content_type_of,
    json_body,
)
from quackmq.records import codec
from quackmq.records.batch import Batch

_TAG: Final = "stages"
_PARTITION_FIELD: Final = struct.Struct(">I")


# --- shapes ---------------------------------------------------------------------------------------


class StagedMessages(Struct, frozen=True, forbid_unknown_fields=True):
    """Messages to be staged, which the broker makes a batch of."""

    messages: Annotated[list[NewMessage], Meta(min_length=1, max_length=limits.HTTP_MESSAGES)]


class ReceiptShape(Struct, frozen=True, forbid_unknown_fields=True):
    """What a part holds: so many calls, of what this digest says."""

    part: str
    calls: Annotated[int, Meta(ge=0, le=GREATEST)]
    digest: str


class Committing(Struct, frozen=True, forbid_unknown_fields=True):
    """What is committed: the parts of these receipts; all, without any. `contents` says in a word
    what that is, so that a repeat is known as one also if its parts were staged anew. The `turn`
    of a `series` is committed once, whatever its key and contents; a turn before the last one that
    was committed is refused."""

    receipts: Annotated[list[ReceiptShape], Meta(max_length=shared_limits.STAGE_PARTS)] | None = (
        None
    )
    contents: Annotated[str, Meta(max_length=shared_limits.NAME_BYTES)] = ""
    series: Annotated[str, Meta(min_length=1, max_length=shared_limits.NAME_BYTES)] | None = None
    turn: Annotated[int, Meta(ge=0, le=GREATEST)] | None = None


class CommittedShape(Struct, frozen=True):
    """A commit. `repeated` says that it was made before, and nothing was added."""

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
    """Stages by key. `next` goes into `after` to ask for more; null where there are no more."""

    stages: list[StageSummary]
    next: str | None


class StageShape(StageSummary, frozen=True):
    """A stage, with the receipts of some of its parts, by name. `next_part` goes into `after` to
    ask for more; null where there are no more. A stage that was committed has nothing but its
    `commit`."""

    parts: list[ReceiptShape]
    next_part: str | None
    commit: CommittedShape | None = None


class SeriesShape(Struct, frozen=True):
    """A series, with the last of its turns that was committed. `topics` are those that it was
    written to; null where an older version of the broker committed it."""

    series: str
    turn: int
    contents: str
    records: int
    committed_ms: int
    topics: tuple[str, ...] | None


class SeriesPage(Struct, frozen=True):
    """Series by name. `next` goes into `after` to ask for more; null where there are no more."""

    series: list[SeriesShape]
    next: str | None


# --- parameters and bodies ------------------------------------------------------------------------

KEY: Final = Text(
    name="key", where="path", required=True, about="A stage's key.", most=shared_limits.NAME_BYTES
)
PART: Final = Text(
    name="part",
    where="path",
    required=True,
    about="The name under which one writer stages.",
    most=shared_limits.NAME_BYTES,
)
CALL: Final = Number(
    name="number",
    where="path",
    required=True,
    most=GREATEST,
    about="Which of the part's calls this is, counted from 0.",
)
TOPIC: Final = Text(
    name="topic",
    required=True,
    about="The topic that it is for.",
    most=shared_limits.TOPIC_NAME_CHARS,
)
PARTITION: Final = Number(
    name="partition",
    most=shared_limits.PARTITIONS_PER_TOPIC - 1,
    about="The partition that it is for. Without it each batch of the body has its own before it, "
    "in 4 bytes, the most significant first.",
)
SERIES: Final = Text(
    name="series",
    about="The series that the stage is a turn of, if it is of one.",
    most=shared_limits.NAME_BYTES,
)
TURN: Final = Number(
    name="turn", most=GREATEST, about="Which turn of the series it is; later ones are greater."
)
NAME: Final = Text(
    name="series",
    where="path",
    required=True,
    about="A series' name.",
    most=shared_limits.NAME_BYTES,
)
AFTER_SERIES: Final = Text(name="after", about="Only series whose names come after this one.")
TIMESTAMP_MS: Final = Number(
    name="timestamp_ms",
    most=2**53,
    about="The time of the messages, which JSON needs: the same call made again must be the same.",
)
AFTER: Final = Text(name="after", about="Only stages whose keys come after this one.")
AFTER_PART: Final = Text(name="after", about="Only parts whose names come after this one.")

STAGED: Final = Body(
    "Record batches of Kafka's format (magic 2) one after the other, or messages as JSON.",
    {BYTES: bytes, JSON: StagedMessages},
    bytes=shared_limits.STAGE_CALL_BYTES,
)
COMMITTING: Final = Body("What is committed.", {JSON: Committing}, required=False)

_messages: Final = msgspec.json.Decoder(StagedMessages)
_committing: Final = msgspec.json.Decoder(Committing)


# --- handlers -------------------------------------------------------------------------------------


async def list_stages(request: Request) -> Response:
    after, limit = AFTER.given(request) or "", LIMIT.of(request)
    stages = [each for each in request.broker.staging.all(request.caller) if each.key > after]
    stages.sort(key=lambda each: each.key)
    page = [StageSummary(*_summary(each)) for each in stages[:limit]]
    return answered(200, StagePage(page, page[-1].key if len(stages) > limit else None))


async def stage(request: Request) -> Response:
    kind = content_type_of(request, STAGED)
    topic, partition = request.broker.topic(TOPIC.of(request)), PARTITION.given(request)
    timestamp_ms = TIMESTAMP_MS.given(request)
    turn = _turn(SERIES.given(request), TURN.given(request))
    if kind == BYTES:
        batches = list(_batches(request.body, partition))
    elif timestamp_ms is None:
        raise InvalidRequest(f"timestamp_ms is missing. {TIMESTAMP_MS.about}")
    elif partition is None:
        raise InvalidRequest("partition is missing: JSON is for one")
    else:
        batches = [(partition, _batch_of(decoded(request.body, _messages), timestamp_ms))]
    receipt = await request.broker.staging.stage(
        request.caller,
        KEY.of(request),
        PART.of(request),
        CALL.of(request),
        [StagedBatch(PartitionKey(topic.id, partition), batch) for partition, batch in batches],
        turn,
    )
    return answered(200, ReceiptShape(*receipt))


async def commit(request: Request) -> Response:
    key, body = KEY.of(request), json_body(request, COMMITTING, _committing)
    receipts = None
    if body.receipts is not None:
        receipts = [Receipt(each.part, each.calls, each.digest) for each in body.receipts]
    committed = await request.broker.staging.commit(
        request.caller, key, receipts, contents=body.contents, turn=_turn(body.series, body.turn)
    )
    return answered(200, CommittedShape(key, *committed))


async def abort(request: Request) -> Response:
    key = KEY.of(request)
    if not await request.broker.staging.abort(request.caller, key):
        raise UnknownStage(f"there is no stage {key[:100]!r}")
    return NOTHING


async def list_series(request: Request) -> Response:
    after, limit = AFTER_SERIES.given(request) or "", LIMIT.of(request)
    known = request.broker.staging.series(request.caller)
    names = sorted(name for name in known if name > after)
    page = [SeriesShape(name, *known[name]) for name in names[:limit]]
    return answered(200, SeriesPage(page, page[-1].series if len(names) > limit else None))


async def describe_series(request: Request) -> Response:
    name = NAME.of(request)
    last = request.broker.staging.series(request.caller).get(name)
    if last is None:
        raise UnknownStage(f"no turn of a series {name[:100]!r} was committed")
    return answered(200, SeriesShape(name, *last))


async def forget_series(request: Request) -> Response:
    name = NAME.of(request)
    if not await request.broker.staging.forget_series(request.caller, name):
        raise UnknownStage(f"no turn of a series {name[:100]!r} was committed")
    return NOTHING


async def describe(request: Request) -> Response:
    key, after, limit = KEY.of(request), AFTER_PART.given(request) or "", LIMIT.of(request)
    found = request.broker.staging.describe(request.caller, key)
    if isinstance(found, CommittedStage):
        shape = CommittedShape(key, *found)
        return answered(200, StageShape(key, 0, 0, 0, found.committed_ms, [], None, shape))
    parts = sorted(each for each in found.parts if each.part > after)
    page = [ReceiptShape(*each) for each in parts[:limit]]
    more = page[-1].part if len(parts) > limit else None
    return answered(200, StageShape(*_summary(found), page, more))


# --- helpers --------------------------------------------------------------------------------------


def _batches(body: bytes, partition: int | None) -> Iterator[tuple[int, Batch]]:
    """Yield the checked batches and their partitions; if `partition` is None, each is prefixed."""
    data = memoryview(body)
    while data:
        target = partition
        if target is None:
            if len(data) < _PARTITION_FIELD.size:
                raise CorruptBatch(f"{len(data)} bytes behind the last batch")
            (target,) = _PARTITION_FIELD.unpack_from(data)
            data = data[_PARTITION_FIELD.size :]
        batch = Batch.parse(data)
        yield target, batch
        data = data[batch.size :]


def _turn(series: str | None, number: int | None) -> Turn | None:
    if series is None and number is None:
        return None
    if series is None or number is None:
        raise InvalidRequest("series and turn belong together: give both, or neither")
    return Turn(series, number)


def _batch_of(staged: StagedMessages, timestamp_ms: int) -> Batch:
    records = [
        record_of(each, f"messages[{number}]", timestamp_ms)
        for number, each in enumerate(staged.messages)
    ]
    return Batch.peek(codec.encode(records))


def _summary(stage: StageDescription) -> tuple[str, int, int, int, int]:
    return stage.key, len(stage.parts), stage.batches, stage.size, stage.touched_ms


# --- operations -----------------------------------------------------------------------------------

OPERATIONS: Final = (
    Operation(
        name="listStages",
        tag=_TAG,
        method="GET",
        path="/v1/stages",
        handler=list_stages,
        about="List the stages that are neither committed nor aborted.",
        parameters=(AFTER, LIMIT),
        answers={200: Answer("A page of stages.", StagePage)},
    ),
    Operation(
        name="stage",
        tag=_TAG,
        method="PUT",
        path="/v1/stages/{key}/parts/{part}/{number}",
        handler=stage,
        about="Keep batches or messages for a partition until the stage is committed. Nobody sees "
        "them before. The stage begins by its first call.",
        parameters=(KEY, PART, CALL, TOPIC, PARTITION, TIMESTAMP_MS, SERIES, TURN),
        body=STAGED,
        answers={200: Answer("They are on disk. What the part holds now.", ReceiptShape)},
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
        about="Make what was staged visible, all of it at once. A repeat adds nothing, and is "
        "answered like the first for a week.",
        parameters=(KEY,),
        body=COMMITTING,
        answers={200: Answer("It is committed.", CommittedShape)},
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
        about="Describe a stage, also one that was committed.",
        parameters=(KEY, AFTER_PART, LIMIT),
        answers={200: Answer("The stage.", StageShape)},
        errors=(UnknownStage,),
    ),
    Operation(
        name="abortStage",
        tag=_TAG,
        method="DELETE",
        path="/v1/stages/{key}",
        handler=abort,
        about="Let go of a stage.",
        parameters=(KEY,),
        answers={204: Answer("Nothing is left of it.")},
        errors=(UnknownStage, StageConflict, StoreReadOnly),
    ),
    Operation(
        name="listSeries",
        tag=_TAG,
        method="GET",
        path="/v1/series",
        handler=list_series,
        about="List the series of stages, each with its last turn that was committed.",
        parameters=(AFTER_SERIES, LIMIT),
        answers={200: Answer("A page of series.", SeriesPage)},
    ),
    Operation(
        name="describeSeries",
        tag=_TAG,
        method="GET",
        path="/v1/series/{series}",
        handler=describe_series,
        about="Describe a series by the last of its turns that was committed.",
        parameters=(NAME,),
        answers={200: Answer("The series.", SeriesShape)},
        errors=(UnknownStage,),
    ),
    Operation(
        name="forgetSeries",
        tag=_TAG,
        method="DELETE",
        path="/v1/series/{series}",
        handler=forget_series,
        about="Forget which turns of a series were committed: its next one may be any.",
        parameters=(NAME,),
        answers={204: Answer("Nothing is known of it.")},
        errors=(UnknownStage, StoreReadOnly),
    ),
)
