"""Idempotent producers: which batch is new, which is a repeat, which is out of order. Pure.

A producer numbers its records a partition; a batch carries the first number (`base_sequence`) and
its count. Numbers go from 0 to 2^31 - 1 and wrap. The state of one producer in one partition is a
frozen value; `advance` makes the next one. Whoever owns a partition's log owns its states and asks
`advance` at the moment at which it gives out offsets, so that check and append are one step.

Promised, for batches of one producer id and epoch: each number is appended once and in order; one
of the last `limits.REMEMBERED_BATCHES` batches, sent again as it was, is answered with the place
of the first. A repeat is known by its numbers, not by its bytes. Not promised: anything for batches
without a producer id, which are not to be asked about, nor after a producer was forgotten (see
`expired`): it must then begin anew, at number 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from quackmq import limits
from quackmq.errors import (
    Conflict,
    InvalidRequest,
    OutOfOrderSequence,
    ProducerFenced,
    RepeatForgotten,
    UnknownProducer,
)
from quackmq.record import Batch

#: Numbers are counted modulo this: after 2^31 - 1 comes 0.
SEQUENCES: Final = 2**31


class Remembered(NamedTuple):
    """A batch that the log holds, as far as answering its repeat needs."""

    first_sequence: int
    last_sequence: int
    base_offset: int
    next_offset: int
    append_time_ms: int


class Producer(NamedTuple):
    """A producer's standing in one partition; the batches oldest first, never none."""

    producer_id: int
    epoch: int
    batches: tuple[Remembered, ...]
    last_append_ms: int


def advance(
    state: Producer | None, batch: Batch, base_offset: int, append_time_ms: int
) -> Producer | Remembered:
    """The state after `batch` is appended at `base_offset`, or, if the log has it, where it lies.

    Raises ProducerFenced for an epoch of the past, OutOfOrderSequence for a gap, RepeatForgotten
    for a repeat that is no longer remembered, UnknownProducer where a producer that this partition
    does not know goes on in the middle, InvalidRequest for a batch without epoch or number.
    """
    if batch.producer_epoch < 0 or batch.base_sequence < 0:
        raise InvalidRequest(
            f"a batch of producer {batch.producer_id} has epoch {batch.producer_epoch} and "
            f"sequence {batch.base_sequence}: both are counted from 0"
        )
    if state is None:
        if batch.base_sequence != 0:
            raise UnknownProducer(
                f"producer {batch.producer_id} is not known here and goes on at sequence "
                f"{batch.base_sequence}: begin at 0 with a new epoch"
            )
        earlier: tuple[Remembered, ...] = ()
    elif batch.producer_epoch == state.epoch:
        repeated = _repeated(state, batch)
        if repeated is not None:
            return repeated
        earlier = state.batches
    else:
        _check_new_epoch(state, batch)
        earlier = ()
    remembered = Remembered(
        batch.base_sequence,
        _last_sequence(batch),
        base_offset,
        base_offset + batch.last_offset_delta + 1,
        append_time_ms,
    )
    return _with(earlier, batch.producer_id, batch.producer_epoch, remembered)


def is_repeat(state: Producer | None, batch: Batch) -> bool:
    """Whether `advance` would say where the batch lies."""
    if state is None or batch.producer_epoch != state.epoch:
        return False
    try:
        return _repeated(state, batch) is not None
    except Conflict:
        return False


def replay(state: Producer | None, producer_id: int, epoch: int, batch: Remembered) -> Producer:
    """The state after a batch that `advance` took once, told again from a journal."""
    earlier = state.batches if state is not None and state.epoch == epoch else ()
    return _with(earlier, producer_id, epoch, batch)


def expired(states: Mapping[int, Producer], now_ms: int) -> list[int]:
    """The producer ids to forget: silent too long, or the longest silent beyond the bound.

    `states` must be in the order of the last appends, the longest silent first (whoever keeps them
    takes a state out and puts its successor at the end), so this looks no further than it must and
    may be asked at every append.
    """
    excess = len(states) - limits.PRODUCERS_PER_PARTITION
    oldest_ms = now_ms - limits.PRODUCER_EXPIRY_MS
    forgotten: list[int] = []
    for producer_id, state in states.items():
        if len(forgotten) >= excess and state.last_append_ms > oldest_ms:
            break
        forgotten.append(producer_id)
    return forgotten


def _with(
    earlier: tuple[Remembered, ...], producer_id: int, epoch: int, batch: Remembered
) -> Producer:
    kept = (*earlier, batch)[-limits.REMEMBERED_BATCHES :]
    return Producer(producer_id, epoch, kept, batch.append_time_ms)


def _check_new_epoch(state: Producer, batch: Batch) -> None:
    if batch.producer_epoch < state.epoch:
        raise ProducerFenced(
            f"producer {batch.producer_id} is at epoch {state.epoch}: "
            f"another one took over from epoch {batch.producer_epoch}"
        )
    if batch.base_sequence != 0:
        raise OutOfOrderSequence(
            f"producer {batch.producer_id} begins epoch {batch.producer_epoch} at sequence "
            f"{batch.base_sequence}: a new epoch begins at 0"
        )


def _repeated(state: Producer, batch: Batch) -> Remembered | None:
    """The batch that this one repeats, None if it is the next one. Raises for all others."""
    first, last = batch.base_sequence, _last_sequence(batch)
    expected = (state.batches[-1].last_sequence + 1) % SEQUENCES
    if first == expected:
        return None
    for remembered in reversed(state.batches):
        if remembered.first_sequence == first and remembered.last_sequence == last:
            return remembered
    # Clients take "a repeat, forgotten" for success, so it is said only of a batch that lies before
    # the remembered ones as a whole, and only if any can have been forgotten at all.
    if len(state.batches) >= limits.REMEMBERED_BATCHES and _is_before(
        last, state.batches[0].first_sequence
    ):
        raise RepeatForgotten(
            f"producer {batch.producer_id} repeats sequence {first} to {last}, which this "
            "partition holds; where, is no longer remembered"
        )
    raise OutOfOrderSequence(
        f"producer {batch.producer_id} sends sequence {first} to {last} where {expected} is next"
    )


def _last_sequence(batch: Batch) -> int:
    return (batch.base_sequence + batch.last_offset_delta) % SEQUENCES


def _is_before(sequence: int, other: int) -> bool:
    """In a ring, the nearer way round decides which of two numbers is the earlier one."""
    return 0 < (other - sequence) % SEQUENCES < SEQUENCES // 2
