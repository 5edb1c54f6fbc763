"""Whether the broker lives, and whether it can take what is published.

`/v1/health` is for whoever restarts a process that is stuck: it asks nothing of the disk.
`/v1/ready` is for whoever sends traffic: a broker whose disk is full lives, and can be read, but
should not be written to. An archive that is stuck is named by both, and keeps nobody from
publishing: the log has all of it until it is archived.
"""

from __future__ import annotations

from itertools import islice
from typing import Final, Literal

from msgspec import Struct

from quackmq import __version__
from quackmq.errors import BrokerClosing, StoreReadOnly
from quackmq.loop_clock import loop_clock
from quackmq.protocols.http import limits
from quackmq.protocols.http.types import Request, Response
from quackmq.protocols.http.v1.clock import ClockState, state_of
from quackmq.protocols.http.v1.operations import Answer, Operation, answered

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
