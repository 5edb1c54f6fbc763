"""The broker's clock beside the wall clock, and an operator's word that the latter is right."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from quackmq.broker import ClockStatus
from quackmq.errors import BrokerClosing, StoreReadOnly
from quackmq.protocols.http.types import Request, Response
from quackmq.protocols.http.v1.operations import JSON, Answer, Body, Operation, answered, json_body

_TAG: Final = "health"


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


OPERATIONS: Final = (
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
)
