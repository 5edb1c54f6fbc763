"""Staging: many writers, one commit.

Writers stage batches or messages under a key, each under a name of its own (a part), in calls that
they number from 0; one commit makes all of it visible at once. A call that was not heard of is made
again as it was, and so is a commit: neither is taken twice. What a part holds is told by its
receipt, which the commit may name, so that parts of writers that failed come to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from quackmq import codec, limits
from quackmq.broker import CommittedStage, Receipt, StagedBatch, StageDescription
from quackmq.doors.http.v1.common import GREATEST, LIMIT
from quackmq.doors.http.v1.messages import NewMessage, record_of
from quackmq.doors.http.v1.operations import (
    BYTES,
    JSON,
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
from quackmq.doors.http.values import Request, Response, decoded
from quackmq.errors import (
    CorruptBatch,
    InvalidRequest,
    LimitReached,
    NoSubscriber,
    RecordTooLarge,
    StageConflict,
    StoreReadOnly,
    UnknownPartition,
    UnknownStage,
    UnknownTopic,
    UnsupportedBatch,
)
from quackmq.record import Batch
from quackmq.topic import PartitionKey

_TAG: Final = "stages"


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
    what that is, so that a repeat is known as one also if its parts were staged anew."""

    receipts: Annotated[list[ReceiptShape], Meta(max_length=limits.STAGE_PARTS)] | None = None
    contents: Annotated[str, Meta(max_length=limits.NAME_BYTES)] = ""


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


# --- parameters and bodies ------------------------------------------------------------------------

KEY: Final = Text(
    name="key", where="path", required=True, about="A stage's key.", most=limits.NAME_BYTES
)
PART: Final = Text(
    name="part",
    where="path",
    required=True,
    about="The name under which one writer stages.",
    most=limits.NAME_BYTES,
)
CALL: Final = Number(
    name="number",
    where="path",
    required=True,
    most=GREATEST,
    about="Which of the part's calls this is, counted from 0.",
)
TOPIC: Final = Text(
    name="topic", required=True, about="The topic that it is for.", most=limits.TOPIC_NAME_CHARS
)
PARTITION: Final = Number(
    name="partition",
    required=True,
    most=limits.PARTITIONS_PER_TOPIC - 1,
    about="The partition that it is for.",
)
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
    bytes=limits.STAGE_CALL_BYTES,
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
    key = PartitionKey(request.broker.topic(TOPIC.of(request)).id, PARTITION.of(request))
    timestamp_ms = TIMESTAMP_MS.given(request)
    if kind == BYTES:
        batches = list(_batches(request.body))
    elif timestamp_ms is None:
        raise InvalidRequest(f"timestamp_ms is missing. {TIMESTAMP_MS.about}")
    else:
        batches = [_batch_of(decoded(request.body, _messages), timestamp_ms)]
    receipt = await request.broker.staging.stage(
        request.caller,
        KEY.of(request),
        PART.of(request),
        CALL.of(request),
        [StagedBatch(key, batch) for batch in batches],
    )
    return answered(200, ReceiptShape(*receipt))


async def commit(request: Request) -> Response:
    key, body = KEY.of(request), json_body(request, COMMITTING, _committing)
    receipts = None
    if body.receipts is not None:
        receipts = [Receipt(each.part, each.calls, each.digest) for each in body.receipts]
    committed = await request.broker.staging.commit(
        request.caller, key, receipts, contents=body.contents
    )
    return answered(200, CommittedShape(key, *committed))


async def abort(request: Request) -> Response:
    key = KEY.of(request)
    if not await request.broker.staging.abort(request.caller, key):
        raise UnknownStage(f"there is no stage {key[:100]!r}")
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


def _batches(body: bytes) -> Iterator[Batch]:
    """Batches one after the other, each checked."""
    data = memoryview(body)
    while data:
        batch = Batch.parse(data)
        yield batch
        data = data[batch.size :]


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
        parameters=(KEY, PART, CALL, TOPIC, PARTITION, TIMESTAMP_MS),
        body=STAGED,
        answers={200: Answer("They are on disk. What the part holds now.", ReceiptShape)},
        errors=(
            UnknownTopic,
            UnknownPartition,
            CorruptBatch,
            UnsupportedBatch,
            RecordTooLarge,
            StageConflict,
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
            NoSubscriber,
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
)
