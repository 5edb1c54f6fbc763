"""The broker's own state: whether it lives and takes writes, its clock, who is connected.

`/v1/health` is for a supervisor that restarts a stuck process: it does not touch the disk.
`/v1/ready` is for a load balancer: a broker whose disk is full lives and can be read, but should
not be written to. Both name an archive that is stuck, which keeps nobody from publishing: the log
keeps all records until they are archived. `/v1/clock` shows the broker's clock beside the wall
clock and lets an operator confirm the latter. `/v1/connections` lists the peers of the line door.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from quackmq import __version__
from quackmq.broker import ClockStatus, Connected
from quackmq.errors import BrokerClosing, StoreReadOnly
from quackmq.loop_clock import loop_clock
from quackmq.protocols.http import limits
from quackmq.protocols.http.types import Request, Response
from quackmq.protocols.http.v1.operations import (
    JSON,
    LIMIT,
    Answer,
    Body,
    Operation,
    Text,
    answered,
    json_body,
)

_TAG: Final = "health"


class ArchiveHealth(Struct, frozen=True):
    """How the archive is doing, which nothing that is published waits for. It is `stuck` where
    something needs somebody's help, or time: `problems` are some of what it is, in words, and the
    log keeps everything meanwhile. `backlog_bytes` are about the bytes of the log that are decided
    and not archived, `quarantined` batches that nobody can open; `kept_aside` names some of them.
    """

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
    """The longest time since the start in which the broker served nobody: how long it took, how
    much of it the broker computed, when it ended, and what ran."""

    pause_ms: int
    cpu_ms: int
    ended_ms: int
    cause: str


class Health(Struct, frozen=True):
    """`connections` and `streams` are those of this door; `archive` is null where there is none.
    `not_cleaned` says of topics that cannot let go of what they should what keeps them from it,
    `held_back` which subscriptions keep some from letting go of entries, and since when,
    `not_reached` of some clients of the proxy why they cannot be brought what they have missed.
    `longest_pause` is null where no pause was noticed."""

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
    return answered(200, _health(request, "live"))


async def ready(request: Request) -> Response:
    request.broker.check_writable()
    return answered(200, _health(request, "ready"))


def _health(request: Request, status: Literal["live", "ready"]) -> Health:
    door = request.door
    topics = len(request.broker.topics())
    unreached = request.broker.pushing.unreached
    return Health(
        status,
        __version__,
        topics,
        door.connection_count,
        door.stream_count,
        _archive_health(request),
        [
            f"{failure.topic_name}, partition {failure.partition}: {failure.error}"
            for failure in request.broker.retention_failures()
        ],
        [str(held) for held in request.broker.held_back.all()],
        [
            f"{name}, topic {topic_name}: {reason}"
            for (name, topic_name), reason in islice(unreached.items(), limits.PUSH_TOLD)
        ],
        state_of(request.broker.timekeeping.status(request.caller)),
        None if (pause := loop_clock().longest) is None else LongestPause(*pause),
    )


def _archive_health(request: Request) -> ArchiveHealth | None:
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
    """The broker's clock, which stamps everything and by which everything expires, beside the wall
    clock. `ahead_ms` is how far the wall clock is ahead. `status` is `steady` where they agree,
    `adjusting` while the broker's clock approaches the wall clock, `jumped` where the wall clock
    jumped while the machine ran, and `paused` where it is not known how much time has passed since
    the last start: nothing is deleted or expired by age then. `jumped` and `paused` last until the
    wall clock is set right, or is confirmed."""

    status: Literal["steady", "adjusting", "jumped", "paused"]
    time_ms: int
    wall_ms: int
    ahead_ms: int


class Confirmation(Struct, frozen=True, forbid_unknown_fields=True):
    """`passed` says whether the difference between the two clocks is time that passed. Where it is
    null, that is decided by what the broker knows: while the machine ran the time did not pass;
    after a start of the machine, ages follow the wall clock."""

    passed: bool | None = None


class Confirmed(Struct, frozen=True):
    """`confirmed` is false where there was nothing to confirm."""

    confirmed: Annotated[bool, Meta(description="Whether there was anything to confirm.")]
    clock: ClockState


CONFIRMATION: Final = Body(
    "What is known of the time that passed.", {JSON: Confirmation}, required=False
)
_decoder: Final = msgspec.json.Decoder(Confirmation)


def state_of(status: ClockStatus) -> ClockState:
    return ClockState(*status)


async def show_clock(request: Request) -> Response:
    return answered(200, state_of(request.broker.timekeeping.status(request.caller)))


async def confirm_clock(request: Request) -> Response:
    timekeeping = request.broker.timekeeping
    confirmation = json_body(request, CONFIRMATION, _decoder)
    confirmed = await timekeeping.confirm(request.caller, confirmation.passed)
    return answered(200, Confirmed(confirmed, state_of(timekeeping.status(request.caller))))


# --- connections ----------------------------------------------------------------------------------


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


#: Door, role and id contain no spaces.
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


# --- operations -----------------------------------------------------------------------------------

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
    Operation(
        name="show_clock",
        tag=_TAG,
        method="GET",
        path="/v1/clock",
        handler=show_clock,
        about="Show the broker's clock beside the wall clock.",
        answers={200: Answer("Both clocks.", ClockState)},
    ),
    Operation(
        name="confirm_clock",
        tag=_TAG,
        method="POST",
        path="/v1/clock/confirm",
        handler=confirm_clock,
        about="Confirm that the wall clock is right, after it jumped or the broker was off for "
        "long. Deletion and expiry by age go on from then on.",
        body=CONFIRMATION,
        answers={200: Answer("The clocks from now on.", Confirmed)},
        errors=(StoreReadOnly, BrokerClosing),
    ),
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
