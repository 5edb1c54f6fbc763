"""Who is connected at doors whose peers say who they are: the line door's connection records."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from msgspec import Struct

from quackmq.broker import Connected
from quackmq.protocols.http import limits
from quackmq.protocols.http.types import Request, Response
from quackmq.protocols.http.v1.operations import Answer, Operation, Text, answered
from quackmq.protocols.http.v1.parameters import LIMIT

_TAG: Final = "health"


class Connection(Struct, frozen=True):
    """A peer. Through which `door` it came and in which `role`, `pub` or `sub`; the `id` that it
    calls itself; the `channel`, its address for instance. `topics` are some of those that it has
    chosen, `topic_count` is how many there are."""

    door: str
    role: str
    id: str
    channel: str
    topics: list[str]
    topic_count: int


class ConnectionPage(Struct, frozen=True):
    """Connections by door, role, id and channel. `next` goes into `after` to ask for more; null
    where there are no more."""

    connections: list[Connection]
    next: str | None


#: None of the first three has a space in it.
AFTER: Final = Text(
    name="after", about="It is the `next` of the page before.", pattern="[^ ]+ [^ ]+ [^ ]+ .+"
)


async def list_connections(request: Request) -> Response:
    after, limit = AFTER.given(request), LIMIT.of(request)
    found = request.broker.connections.all()
    if after is not None:
        found = found[bisect_right(found, tuple(after.split(" ", 3)), key=_place) :]
    page = [
        Connection(
            each.door,
            each.role,
            each.id,
            each.channel,
            list(each.topics[: limits.CONNECTION_TOPICS_TOLD]),
            len(each.topics),
        )
        for each in found[:limit]
    ]
    more = " ".join(_place(found[limit - 1])) if len(found) > limit else None
    return answered(200, ConnectionPage(page, more))


def _place(peer: Connected) -> tuple[str, ...]:
    return peer.door, peer.role, peer.id, peer.channel


OPERATIONS: Final = (
    Operation(
        name="list_connections",
        tag=_TAG,
        method="GET",
        path="/v1/connections",
        handler=list_connections,
        about="List who is connected at the line door.",
        parameters=(AFTER, LIMIT),
        answers={200: Answer("A page of connections.", ConnectionPage)},
    ),
)
