"""Whether the broker lives, and whether it can take what is published.

`/v1/health` is for whoever restarts a process that is stuck: it asks nothing of the disk.
`/v1/ready` is for whoever sends traffic: a broker whose disk is full lives, and can be read, but
should not be written to.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from quackmq import __version__
from quackmq.doors.http.v1.operations import Answer, Operation, answered
from quackmq.doors.http.values import Request, Response
from quackmq.errors import BrokerClosing, StoreReadOnly

_TAG: Final = "health"


class Health(Struct, frozen=True):
    """`connections` and `streams` are those of this door."""

    status: Literal["live", "ready"]
    version: str
    topics: int
    connections: int
    streams: int


async def health(request: Request) -> Response:
    return answered(200, _health(request, "live"))


async def ready(request: Request) -> Response:
    request.broker.check_writable()
    return answered(200, _health(request, "ready"))


def _health(request: Request, status: Literal["live", "ready"]) -> Health:
    door = request.door
    topics = len(request.broker.topics())
    return Health(status, __version__, topics, door.connection_count, door.stream_count)


OPERATIONS: Final = (
    Operation(
        name="health",
        tag=_TAG,
        method="GET",
        path="/v1/health",
        handler=health,
        about="Whether the broker lives.",
        answers={200: Answer("It does.", Health)},
    ),
    Operation(
        name="ready",
        tag=_TAG,
        method="GET",
        path="/v1/ready",
        handler=ready,
        about="Whether the broker takes what is published; if not, why.",
        answers={200: Answer("It does.", Health)},
        errors=(StoreReadOnly, BrokerClosing),
    ),
)
