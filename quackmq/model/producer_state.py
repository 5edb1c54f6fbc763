"""Idempotent producers: which batch is new, which is a repeat, which is out of order. Pure.

A producer numbers its records per partition. A batch carries the first number (`base_sequence`) and
its count. Numbers go from 0 to 2^31 - 1 and wrap. The state of one producer in one partition is a
frozen value; `advance` returns the next one. The owner of a partition's log also owns these states.
It calls `advance` when it assigns offsets, so that check and append are one step.

Promised, for batches of one producer id and epoch: each number is appended once and in order. If
one of the last `limits.REMEMBERED_BATCHES` batches is sent again unchanged, its producer gets the
position of the first. A repeat is recognised by its numbers, not by its bytes. Not promised:
anything for batches without a producer id, or after a producer was forgotten (see
`expired_producers`). A forgotten producer must begin again at number 0.

A producer id may also be derived from an idempotency key, under which one batch is published once.
Such ids begin at `FIRST_KEY_ID`, above all ids that the broker assigns. Many keys must not make a
partition forget its other producers.

A producer may also write transactions. Its first transactional batch opens one, at its offset. A
marker (a control batch, which has no number) ends it and sets the producer's epoch. All batches in
between are transactional and of one epoch. A producer with an open transaction is never forgotten.

    batch            no transaction open               one is open
    plain            as above                          InvalidTransactionState
    transactional    opens one                         continues; new epoch: InvalidTransactionState
    marker           sets the epoch, if not smaller    ends it, and sets the epoch, if not smaller
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Final, NamedTuple

from quackmq.errors import (
    Conflict,
    InvalidRequest,
    InvalidTransactionState,
    OutOfOrderSequence,
    ProducerFenced,
    RepeatForgotten,
    UnknownProducer,
)
from quackmq.fast_tuples import new_tuple
from quackmq.model import limits
from quackmq.records.batch import CONTROL_FLAG, NO_PRODUCER_ID, TRANSACTIONAL_FLAG, Batch

#: Numbers are counted modulo this: after 2^31 - 1 comes 0.
SEQUENCES: Final = 2**31
#: Producer ids derived from idempotency keys begin here; assigned ids count from 0.
FIRST_KEY_ID: Final = 2**62
#: The `transaction_offset` of a producer without an open transaction.
NO_TRANSACTION: Final = -1
_TRANSACTION_FLAGS: Final = TRANSACTIONAL_FLAG | CONTROL_FLAG


class RememberedBatch(NamedTuple):
    """An appended batch, with the facts that the response to its repeat needs."""

    first_sequence: int
    last_sequence: int
    base_offset: int
    next_offset: int
    append_time_ms: int


class Producer(NamedTuple):
    """A producer's state in one partition. `batches` are those of its epoch, oldest first; empty if
    a marker began the epoch. `transaction_offset` is where its open transaction began."""

    producer_id: int
    epoch: int
    batches: tuple[RememberedBatch, ...]
    last_append_ms: int
    transaction_offset: int = NO_TRANSACTION


def has_producer(batch: Batch) -> bool:
    """Return whether `advance` must check a batch. Raises InvalidRequest for a batch that belongs
    to a transaction but has no producer."""
    if batch.producer_id != NO_PRODUCER_ID:
        return True
    if batch.attributes & _TRANSACTION_FLAGS:
        raise InvalidRequest("a transactional batch or control batch must have a producer id")
    return False


def advance(
    state: Producer | None, batch: Batch, base_offset: int, append_time_ms: int
) -> Producer | RememberedBatch:
    """Return the state after `batch` is appended at `base_offset`, or the batch that it repeats.

    Raises ProducerFenced for an old epoch, OutOfOrderSequence for a gap, RepeatForgotten for a
    repeat that is no longer remembered, UnknownProducer if this partition does not know the
    producer and the batch does not begin at 0, InvalidTransactionState if a transaction is open and
    the batch cannot be part of it, InvalidRequest for a batch without epoch or number.
    """
    if batch.attributes & CONTROL_FLAG:
        return _apply_marker(state, batch, append_time_ms)
    if batch.producer_epoch < 0 or batch.base_sequence < 0:
        raise InvalidRequest(
            f"a batch of producer {batch.producer_id} has epoch {batch.producer_epoch} and "
            f"sequence {batch.base_sequence}: both must be 0 or more"
        )
    if state is None:
        if batch.base_sequence != 0:
            raise UnknownProducer(
                f"producer {batch.producer_id} is unknown here and continues at sequence "
                f"{batch.base_sequence}: begin at 0 with a new epoch"
            )
        earlier: tuple[RememberedBatch, ...] = ()
    elif batch.producer_epoch == state.epoch:
        repeated = _find_repeated(state, batch)
        if repeated is not None:
            return repeated
        earlier = state.batches
    else:
        _check_new_epoch(state, batch)
        earlier = ()
    transaction_offset = NO_TRANSACTION
    if state is not None and state.transaction_offset != NO_TRANSACTION:
        _check_part_of_transaction(state, batch)
        transaction_offset = state.transaction_offset
    elif batch.attributes & TRANSACTIONAL_FLAG:
        transaction_offset = base_offset
    next_offset = base_offset + batch.last_offset_delta + 1
    fields = (batch.base_sequence, _last_sequence(batch), base_offset, next_offset, append_time_ms)
    remembered = new_tuple(RememberedBatch, fields)
    return _add_batch(
        earlier, batch.producer_id, batch.producer_epoch, remembered, transaction_offset
    )


def sequence_after(sequence: int, records: int) -> int:
    """Return the number that is `records` after `sequence`; 0 follows 2^31 - 1."""
    return (sequence + records) % SEQUENCES


def is_repeat(state: Producer | None, batch: Batch) -> bool:
    """Return whether `advance` would return the batch that this one repeats."""
    if state is None or batch.producer_epoch != state.epoch:
        return False
    try:
        return _find_repeated(state, batch) is not None
    except Conflict:
        # `advance` would raise this error, so the batch is not a repeat that it recognises.
        return False


def replay(
    state: Producer | None, producer_id: int, epoch: int, batch: RememberedBatch
) -> Producer:
    """Return the state after a batch that was accepted before, read again from a journal. Its
    transaction is not changed: `replay_transaction` replays where transactions begin and end."""
    if state is None:
        return _add_batch((), producer_id, epoch, batch, NO_TRANSACTION)
    earlier = state.batches if state.epoch == epoch else ()
    return _add_batch(earlier, producer_id, epoch, batch, state.transaction_offset)


def replay_transaction(
    state: Producer | None, producer_id: int, epoch: int, transaction_offset: int, append_ms: int
) -> Producer:
    """Return the state after a transaction was opened, or ended by a marker of `epoch`. Batches
    appended after it may already have been replayed."""
    if state is None or epoch > state.epoch:
        return Producer(producer_id, epoch, (), append_ms, transaction_offset)
    last_append_ms = max(state.last_append_ms, append_ms)
    return state._replace(transaction_offset=transaction_offset, last_append_ms=last_append_ms)


def expired_producers(states: Mapping[int, Producer], before_ms: int) -> list[int]:
    """Return the producer ids to forget: those that appended nothing after `before_ms`, and
    those silent for longest if there are more than the bound. Ids derived from keys are chosen
    first. A producer with an open transaction is never chosen. If there are very many, later
    calls return the others.

    `states` must be ordered by last append, the longest silent first. (The owner removes a state
    and inserts its successor at the end.) So this function examines few states and may be called
    at every append."""
    excess = len(states) - limits.PRODUCERS_PER_PARTITION
    forgotten: dict[int, None] = {}
    if excess > 0:
        examined = islice(states, limits.SILENT_PRODUCERS)
        ids_of_keys = (producer_id for producer_id in examined if producer_id >= FIRST_KEY_ID)
        forgotten = dict.fromkeys(islice(ids_of_keys, excess))
    for producer_id, state in states.items():
        is_recent = state.last_append_ms > before_ms
        is_enough = is_recent or len(forgotten) >= limits.FORGOTTEN_PRODUCERS
        if is_enough and len(forgotten) >= excess:
            break
        if state.transaction_offset == NO_TRANSACTION:
            forgotten[producer_id] = None
    return list(forgotten)


def _add_batch(
    earlier: tuple[RememberedBatch, ...],
    producer_id: int,
    epoch: int,
    batch: RememberedBatch,
    transaction_offset: int,
) -> Producer:
    """Return the state with one more batch; the oldest remembered batch is dropped if there are too
    many."""
    batches = (*earlier, batch)[-limits.REMEMBERED_BATCHES :]
    fields = (producer_id, epoch, batches, batch.append_time_ms, transaction_offset)
    return new_tuple(Producer, fields)


def _apply_marker(state: Producer | None, batch: Batch, append_time_ms: int) -> Producer:
    """Return the state after a marker. It is never a repeat: its sender knows what is open."""
    if batch.producer_id < 0 or batch.producer_epoch < 0:
        raise InvalidRequest(
            f"a marker has producer {batch.producer_id} and epoch {batch.producer_epoch}: both "
            "must be 0 or more"
        )
    if state is not None and batch.producer_epoch < state.epoch:
        raise _fenced_error(state, batch)
    return replay_transaction(
        state, batch.producer_id, batch.producer_epoch, NO_TRANSACTION, append_time_ms
    )


def _check_part_of_transaction(state: Producer, batch: Batch) -> None:
    """Check that a batch may continue the producer's open transaction. Raises
    InvalidTransactionState."""
    if not batch.attributes & TRANSACTIONAL_FLAG:
        raise InvalidTransactionState(
            f"producer {batch.producer_id} has a transaction open since offset "
            f"{state.transaction_offset} and sends a batch outside it: end the transaction first"
        )
    if batch.producer_epoch != state.epoch:
        raise InvalidTransactionState(
            f"producer {batch.producer_id} has a transaction of epoch {state.epoch} open since "
            f"offset {state.transaction_offset}: epoch {batch.producer_epoch} cannot continue it"
        )


def _fenced_error(state: Producer, batch: Batch) -> ProducerFenced:
    return ProducerFenced(
        f"producer {batch.producer_id} is at epoch {state.epoch}: "
        f"a newer producer has replaced epoch {batch.producer_epoch}"
    )


def _check_new_epoch(state: Producer, batch: Batch) -> None:
    """Check that a batch may begin a new epoch. Raises ProducerFenced if the epoch is older,
    OutOfOrderSequence if the batch does not begin at 0."""
    if batch.producer_epoch < state.epoch:
        raise _fenced_error(state, batch)
    if batch.base_sequence != 0:
        raise OutOfOrderSequence(
            f"producer {batch.producer_id} begins epoch {batch.producer_epoch} at sequence "
            f"{batch.base_sequence}: a new epoch must begin at 0"
        )


def _find_repeated(state: Producer, batch: Batch) -> RememberedBatch | None:
    """Return the batch that this one repeats, or None if it is the next one. Raises otherwise."""
    first, last = batch.base_sequence, _last_sequence(batch)
    expected = sequence_after(state.batches[-1].last_sequence, 1) if state.batches else 0
    if first == expected:
        return None
    for remembered in reversed(state.batches):
        if remembered.first_sequence == first and remembered.last_sequence == last:
            return remembered
    # Clients treat RepeatForgotten as success. So it is raised only for a batch that lies wholly
    # before the remembered ones, and only if any batch can have been forgotten.
    if len(state.batches) >= limits.REMEMBERED_BATCHES and _is_before(
        last, state.batches[0].first_sequence
    ):
        raise RepeatForgotten(
            f"producer {batch.producer_id} repeats sequence {first} to {last}: this partition has "
            "the batch but no longer remembers its offset"
        )
    raise OutOfOrderSequence(
        f"producer {batch.producer_id} sends sequence {first} to {last}, but {expected} is next"
    )


def _last_sequence(batch: Batch) -> int:
    return sequence_after(batch.base_sequence, batch.last_offset_delta)


def _is_before(sequence: int, other: int) -> bool:
    """Return whether one number precedes another; in a ring, the shorter way round decides."""
    return 0 < (other - sequence) % SEQUENCES < SEQUENCES // 2
