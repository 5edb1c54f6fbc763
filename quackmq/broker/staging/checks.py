"""Checks of the arguments of staging calls. Pure."""

from __future__ import annotations

from quackmq import limits
from quackmq.broker.staging.series import Turn
from quackmq.broker.staging.stage_log import Header
from quackmq.errors import InvalidRequest, LimitReached


def check_call(header: Header) -> None:
    """Raise InvalidRequest or LimitReached for a call with an invalid number, or too many batches
    or bytes."""
    if header.number < 0:
        raise InvalidRequest(f"calls are numbered from 0, not {header.number}")
    if not 1 <= len(header.entries) <= limits.STAGE_CALL_BATCHES:
        raise InvalidRequest(
            f"a call stages 1 to {limits.STAGE_CALL_BATCHES} batches, not {len(header.entries)}"
        )
    if header.size > limits.STAGE_CALL_BYTES:
        raise LimitReached(
            f"{header.size} bytes in one call: use at most {limits.STAGE_CALL_BYTES}"
        )


def check_turn(turn: Turn | None) -> None:
    """Raise InvalidRequest for an invalid turn."""
    if turn is None:
        return
    check_name("a series' name", turn.series)
    if turn.number < 0:
        raise InvalidRequest(f"turns are numbered from 0, not {turn.number}")


def check_name(kind: str, name: str) -> None:
    """Raise InvalidRequest for a name that is empty, too long or not valid text."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{kind} cannot be encoded as UTF-8") from None
    if not 1 <= size <= limits.NAME_BYTES:
        raise InvalidRequest(f"{kind} takes 1 to {limits.NAME_BYTES} bytes as UTF-8, not {size}")
