"""The broker's own state: whether it lives and accepts writes, its clock, its connections.

`/v1/health` is for a supervisor that restarts a stuck process: it does not touch the disk.
`/v1/ready` is for a load balancer: a broker whose disk is full lives and can be read, but should
not be written to. Both report a stuck archive. Publishing continues meanwhile, because the log
keeps all records until they are archived. `/v1/clock` shows the broker's clock beside the wall
clock and lets an operator confirm the latter. `/v1/connections` lists the peers of the line
protocol.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from quackmq import __version__
from quackmq.broker import ClockStatus, Connected
from quackmq.errors import BrokerClosing, StoreReadOnly, StoreUnavailable
from quackmq.loop_clock import loop_clock
from quackmq.protocols.http import limits
from quackmq.protocols.http.types import Request, Response
from quackmq.protocols.http.v1.operations import (
    LIMIT,
    JsonBody,
    Operation,
    ResponseInfo,
    Text,
    cut_page,
    json_response,
)

_TAG: Final = "health"


class ArchiveHealth(Struct, frozen=True):
    """The state of the archive. Publishing does not depend on it. The status is `stuck` if
    archiving needs help or time. `problems` describes some of the reasons; the log keeps all
    records meanwhile. `backlog_bytes` is about the size of the records that can be archived and are
    not yet. `quarantined` is the number of batches that cannot be decoded; `kept_aside` names some
    of them."""

    status: Literal["well", "stuck"]
    problems: list[str]
    backlog_bytes: int
    due_partitions: int
    failing_partitions: int
    quarantined: int
    kept_aside: list[str]
    files_archived: int
    merges: int
    plans: int


class LongestPause(Struct, frozen=True):
    """The longest pause since the start, in which the broker served no peer: its duration, the
    processor time that the broker used in it, when it ended, and what ran."""

    pause_ms: int
    cpu_ms: int
    ended_ms: int
    cause: str


class Health(Struct, frozen=True):
    """The broker's health. `connections` and `streams` are those of the HTTP listener. `archive`
    is null if the broker has none. `not_cleaned` lists topics for which retention failed, with the
    reason. `held_back` lists subscriptions that keep topics from deleting entries, and since when.
    `not_reached` lists some clients of the proxy to which missed messages cannot be sent, with the
    reason. `longest_pause` is null if no pause was noticed."""

    status: Literal["live", "ready"]
    version: str
    topics: int
    connections: int
    streams: int
    archive: ArchiveHealth | None
    not_cleaned: list[str]
    held_back: list[str]
    not_reached: list[str]
    clock: ClockState
    longest_pause: LongestPause | None


async def health(request: Request) -> Response:
    return json_response(200, _health(request, "live"))


async def ready(request: Request) -> Response:
    request.broker.check_writable()
    return json_response(200, _health(request, "ready"))


def _health(request: Request, status: Literal["live", "ready"]) -> Health:
    """Return the broker's health. `status` is the check that was requested and has passed."""
    server = request.server
    topics = len(request.broker.topics())
    unreached_clients = request.broker.pushing.unreached
    return Health(
        status,
        __version__,
        topics,
        server.connection_count,
        server.stream_count,
        _archive_health(request),
        [
            f"{failure.topic_name}, partition {failure.partition}: {failure.error}"
            for failure in request.broker.retention_failures()
        ],
        [str(held_back) for held_back in request.broker.held_back.all()],
        [
            f"{name}, topic {topic_name}: {reason}"
            for (name, topic_name), reason in islice(
                unreached_clients.items(), limits.UNREACHED_CLIENTS_LISTED
            )
        ],
        state_of(request.broker.timekeeping.status(request.caller)),
        None if (pause := loop_clock().longest) is None else LongestPause(*pause),
    )


def _archive_health(request: Request) -> ArchiveHealth | None:
    """Return the state of the archive, or None if the broker has no archive."""
    if request.broker.archive is None:
        return None
    state = request.broker.archive.state(request.caller)
    return ArchiveHealth(
        "stuck" if state.problems else "well",
        list(state.problems),
        state.archiver.backlog_bytes,
        state.archiver.due_partitions,
        state.archiver.failing,
        state.quarantined,
        list(state.kept_aside),
        state.archiver.done.files,
        state.merged.merges,
        state.plans,
    )


# --- the clock ------------------------------------------------------------------------------------


class ClockState(Struct, frozen=True):
    """The broker's clock, by which records are stamped and expire, beside the wall clock.
    `ahead_ms` is how far the wall clock is ahead. `status` is `steady` if they agree, `adjusting`
    while the broker's clock approaches the wall clock, `jumped` if the wall clock jumped while the
    machine ran, and `paused` if it is unknown how much time has passed since the last start.
    While the clock is paused, nothing is deleted or expires by age. `jumped` and `paused` last
    until the wall clock is corrected or confirmed."""

    status: Literal["steady", "adjusting", "jumped", "paused"]
    time_ms: int
    wall_ms: int
    ahead_ms: int


class Confirmation(Struct, frozen=True, forbid_unknown_fields=True):
    """A confirmation that the wall clock is right. `passed` says whether the difference between the
    two clocks is time that has really passed. If it is null, the broker decides: if the machine ran
    all the time, it has not passed; after a start of the machine, it has."""

    passed: bool | None = None


class Confirmed(Struct, frozen=True):
    """The clocks after a confirmation. `confirmed` is false if there was nothing to confirm."""

    confirmed: Annotated[bool, Meta(description="Whether there was anything to confirm.")]
    clock: ClockState


CONFIRMATION: Final = JsonBody(
    Confirmation, "Whether the difference is time that has passed.", required=False
)


def state_of(status: ClockStatus) -> ClockState:
    return ClockState(*status)


async def show_clock(request: Request) -> Response:
    return json_response(200, state_of(request.broker.timekeeping.status(request.caller)))


async def confirm_clock(request: Request) -> Response:
    timekeeping = request.broker.timekeeping
    confirmation = CONFIRMATION.decode(request)
    confirmed = await timekeeping.confirm(request.caller, confirmation.passed)
    return json_response(200, Confirmed(confirmed, state_of(timekeeping.status(request.caller))))


# --- connections ----------------------------------------------------------------------------------


class Connection(Struct, frozen=True):
    """A connected peer: its listener (`door`), its `role`, `pub` or `sub`, its own `id`, and its
    `channel`, usually an address. `topics` are some of its topics, `topic_count` is their
    number."""

    door: str
    role: str
    id: str
    channel: str
    topics: list[str]
    topic_count: int


class ConnectionPage(Struct, frozen=True):
    """Connections, ordered by `door`, `role`, `id` and `channel`. Pass `next` as `after` to get
    more; it is null at the end."""

    connections: list[Connection]
    next: str | None


#: Listener, role and id contain no spaces.
AFTER: Final = Text(
    name="after", description="It is the `next` of the page before.", pattern="[^ ]+ [^ ]+ [^ ]+ .+"
)


async def list_connections(request: Request) -> Response:
    """Return a page of the connected peers."""
    after, limit = AFTER.get(request), LIMIT.require(request)
    connections = request.broker.connections.all()
    if after is not None:
        # The peers are sorted by `_sort_key`. Continue after the last peer of the page before.
        connections = connections[
            bisect_right(connections, tuple(after.split(" ", 3)), key=_sort_key) :
        ]
    page, last = cut_page(connections, limit)
    described = [
        Connection(
            each.listener,
            each.role,
            each.id,
            each.channel,
            list(each.topics[: limits.CONNECTION_TOPICS_LISTED]),
            len(each.topics),
        )
        for each in page
    ]
    next_after = None if last is None else " ".join(_sort_key(last))
    return json_response(200, ConnectionPage(described, next_after))


def _sort_key(peer: Connected) -> tuple[str, ...]:
    return peer.listener, peer.role, peer.id, peer.channel


# --- operations -----------------------------------------------------------------------------------

OPERATIONS: Final = (
    Operation(
        name="health",
        tag=_TAG,
        method="GET",
        path="/v1/health",
        handler=health,
        description="Check that the broker lives.",
        responses={200: ResponseInfo("It lives.", Health)},
    ),
    Operation(
        name="ready",
        tag=_TAG,
        method="GET",
        path="/v1/ready",
        handler=ready,
        description="Check that the broker accepts writes; an error says why not.",
        responses={200: ResponseInfo("It accepts writes.", Health)},
        errors=(StoreReadOnly, StoreUnavailable, BrokerClosing),
    ),
    Operation(
        name="show_clock",
        tag=_TAG,
        method="GET",
        path="/v1/clock",
        handler=show_clock,
        description="Show the broker's clock beside the wall clock.",
        responses={200: ResponseInfo("Both clocks.", ClockState)},
    ),
    Operation(
        name="confirm_clock",
        tag=_TAG,
        method="POST",
        path="/v1/clock/confirm",
        handler=confirm_clock,
        description="Confirm that the wall clock is right, after it jumped or the broker was off "
        "for long. Then deletion and expiry by age continue.",
        body=CONFIRMATION,
        responses={200: ResponseInfo("The clocks from now on.", Confirmed)},
        errors=(StoreReadOnly, BrokerClosing),
    ),
    Operation(
        name="list_connections",
        tag=_TAG,
        method="GET",
        path="/v1/connections",
        handler=list_connections,
        description="List the connected peers of the line protocol.",
        parameters=(AFTER, LIMIT),
        responses={200: ResponseInfo("A page of connections.", ConnectionPage)},
    ),
)
