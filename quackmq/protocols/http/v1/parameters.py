"""Parameters and shapes that several operations share: names, pages, where to begin."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from quackmq import limits as shared_limits
from quackmq.broker import Offset, Start, Time
from quackmq.errors import InvalidRequest
from quackmq.protocols.http import limits
from quackmq.protocols.http.v1.operations import Number, Schema, Text, one_of

GREATEST: Final = 2**63 - 1

TOPIC: Final = Text(
    name="topic",
    where="path",
    required=True,
    about="A topic's name.",
    pattern=f"[A-Za-z0-9._-]{{1,{shared_limits.TOPIC_NAME_CHARS}}}",
)
PARTITION: Final = Number(
    name="partition",
    where="path",
    required=True,
    most=shared_limits.PARTITIONS_PER_TOPIC - 1,
    about="A partition of the topic, counted from 0.",
)
LIMIT: Final = Number(
    name="limit",
    least=1,
    most=shared_limits.HTTP_PAGE_ITEMS,
    default=100,
    about="How many to answer at the most.",
)
WAIT_MS: Final = Number(
    name="wait_ms",
    most=limits.HTTP_WAIT_MS,
    default=0,
    about="How long to wait for a message where there is none yet.",
)

OffsetField = Annotated[int, Meta(ge=0, le=GREATEST)]
WaitField = Annotated[int, Meta(ge=0, le=limits.HTTP_WAIT_MS)]


class Position(Struct, frozen=True, forbid_unknown_fields=True):
    """A place in every partition of a topic: an offset, or the first message with a timestamp that
    is this or a later one."""

    MORE: ClassVar[Schema] = one_of("offset", "timestamp_ms")

    offset: OffsetField | UnsetType = UNSET
    timestamp_ms: OffsetField | UnsetType = UNSET


#: Where to begin, as JSON has it.
StartField = Annotated[
    Literal["beginning", "end"] | Position,
    Meta(description="Where to begin: at what is there, at what comes, or at a place."),
]


def start_of(start: Literal["beginning", "end"] | Position) -> Start:
    if not isinstance(start, Position):
        return start
    if isinstance(start.offset, int) == isinstance(start.timestamp_ms, int):
        raise InvalidRequest("a place is told by offset or by timestamp_ms: give one of them")
    if isinstance(start.offset, int):
        return Offset(start.offset)
    assert isinstance(start.timestamp_ms, int)
    return Time(start.timestamp_ms)


def start_shown(start: Start) -> Literal["beginning", "end"] | Position:
    if isinstance(start, Offset):
        return Position(offset=start.value)
    return Position(timestamp_ms=start.timestamp_ms) if isinstance(start, Time) else start
