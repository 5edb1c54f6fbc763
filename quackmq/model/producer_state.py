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

A producer id may also be made of a key under which a batch is published once: it begins at
`FIRST_KEY_ID`, where no id is that is given out. Many such keys must not make a partition forget
its other producers.

A producer may also write transactions. Its first transactional batch opens one, at its offset; a
marker (a control batch, which has no number) ends it and sets the producer's epoch. What lies in
between is transactional and of one epoch, and a producer in between is never forgotten.

    batch            no transaction open               one is open
    plain            as above                          InvalidTransactionState
    transactional    opens one                         goes on; of a new epoch: InvalidTran…State
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
from quackmq.model import limits
from quackmq.records.batch import CONTROL_FLAG, NO_PRODUCER_ID, TRANSACTIONAL_FLAG, Batch

#: Numbers are counted modulo this: after 2^31 - 1 comes 0.
SEQUENCES: Final = 2**31
#: Producer ids that are made of keys begin here; those that are given out are counted from 0.
FIRST_KEY_ID: Final = 2**62
#: Where a producer has no transaction open.
NO_TRANSACTION: Final = -1
_TRANSACTION_FLAGS: Final = TRANSACTIONAL_FLAG | CONTROL_FLAG
#: A NamedTuple's own constructor is a Python function: a third of the time of an `advance`.
_new_tuple: Final = tuple.__new__


class Remembered(NamedTuple):
    """A batch that the log holds, as far as answering its repeat needs."""

    first_sequence: int
    last_sequence: int
    base_offset: int
    next_offset: int
    append_time_ms: int


class Producer(NamedTuple):
    """A producer's standing in one partition. The batches are of its epoch, oldest first: none if a
    marker has begun it. `transaction_offset` is where its open transaction began."""

    producer_id: int
    epoch: int
    batches: tuple[Remembered, ...]
    last_append_ms: int
    transaction_offset: int = NO_TRANSACTION


def has_producer(batch: Batch) -> bool:
    """Whether `advance` is to be asked about a batch. InvalidRequest for one that belongs to a
    transaction and to no producer."""
    if batch.producer_id != NO_PRODUCER_ID:
        return True
    if batch.attributes & _TRANSACTION_FLAGS:
        raise InvalidRequest("a batch of a transaction, or a control batch, has a producer id")
    return False


def advance(
    state: Producer | None, batch: Batch, base_offset: int, append_time_ms: int
) -> Producer | Remembered:
    """The state after `batch` is appended at `base_offset`, or, if the log has it, where it lies.

    Raises ProducerFenced for an epoch of the past, OutOfOrderSequence for a gap, RepeatForgotten
    for a repeat that is no longer remembered, UnknownProducer where a producer that this partition
    does not know goes on in the middle, InvalidTransactionState where a transaction is open and the
    batch cannot be part of it, InvalidRequest for a batch without epoch or number.
    """
    if batch.attributes & CONTROL_FLAG:
        return _ended(state, batch, append_time_ms)
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
    transaction_offset = NO_TRANSACTION
    if state is not None and state.transaction_offset != NO_TRANSACTION:
        _check_part_of_transaction(state, batch)
        transaction_offset = state.transaction_offset
    elif batch.attributes & TRANSACTIONAL_FLAG:
        transaction_offset = base_offset
    next_offset = base_offset + batch.last_offset_delta + 1
    fields = (batch.base_sequence, _last_sequence(batch), base_offset, next_offset, append_time_ms)
    remembered = _new_tuple(Remembered, fields)
    return _with(earlier, batch.producer_id, batch.producer_epoch, remembered, transaction_offset)


def sequence_after(sequence: int, records: int) -> int:
    """Return the number that comes so many records behind a number: after 2^31 - 1 comes 0."""
    return (sequence + records) % SEQUENCES


def is_repeat(state: Producer | None, batch: Batch) -> bool:
    """Whether `advance` would say where the batch lies."""
    if state is None or batch.producer_epoch != state.epoch:
        return False
    try:
        return _repeated(state, batch) is not None
    except Conflict:
        return False


def replay(state: Producer | None, producer_id: int, epoch: int, batch: Remembered) -> Producer:
    """The state after a batch that `advance` took once, told again from a journal. Of transactions
    it knows nothing: `replay_transaction` is told where they begin and end."""
    if state is None:
        return _with((), producer_id, epoch, batch, NO_TRANSACTION)
    earlier = state.batches if state.epoch == epoch else ()
    return _with(earlier, producer_id, epoch, batch, state.transaction_offset)


def replay_transaction(
    state: Producer | None, producer_id: int, epoch: int, transaction_offset: int, append_ms: int
) -> Producer:
    """The state after a transaction was opened, or ended by a marker of `epoch`; batches that were
    appended behind it may have been told before."""
    if state is None or epoch > state.epoch:
        return Producer(producer_id, epoch, (), append_ms, transaction_offset)
    last_append_ms = max(state.last_append_ms, append_ms)
    return state._replace(transaction_offset=transaction_offset, last_append_ms=last_append_ms)


def expired(states: Mapping[int, Producer], before_ms: int) -> list[int]:
    """Return the producer ids to forget: those that appended nothing after `before_ms`, or the
    longest silent beyond the bound, those that were made of keys first; never one with an open
    transaction. Of very many some are returned, and the others the next time.

    `states` must be in the order of the last appends, the longest silent first (whoever keeps them
    takes a state out and puts its successor at the end), so this looks no further than it must and
    may be asked at every append.
    """
    excess = len(states) - limits.PRODUCERS_PER_PARTITION
    forgotten: dict[int, None] = {}
    if excess > 0:
        looked_at = islice(states, limits.SILENT_PRODUCERS)
        made_of_keys = (producer_id for producer_id in looked_at if producer_id >= FIRST_KEY_ID)
        forgotten = dict.fromkeys(islice(made_of_keys, excess))
    for producer_id, state in states.items():
        if len(forgotten) >= excess and (
            state.last_append_ms > before_ms or len(forgotten) >= limits.FORGOTTEN_PRODUCERS
        ):
            break
        if state.transaction_offset == NO_TRANSACTION:
            forgotten[producer_id] = None
    return list(forgotten)


def _with(
    earlier: tuple[Remembered, ...],
    producer_id: int,
    epoch: int,
    batch: Remembered,
    transaction_offset: int,
) -> Producer:
    kept = (*earlier, batch)[-limits.REMEMBERED_BATCHES :]
    fields = (producer_id, epoch, kept, batch.append_time_ms, transaction_offset)
    return _new_tuple(Producer, fields)


def _ended(state: Producer | None, batch: Batch, append_time_ms: int) -> Producer:
    """The state behind a marker. It is never a repeat: whoever sends it knows what is open."""
    if batch.producer_id < 0 or batch.producer_epoch < 0:
        raise InvalidRequest(
            f"a marker of producer {batch.producer_id} and epoch {batch.producer_epoch}: it ends a "
            "transaction of a producer, and both are counted from 0"
        )
    if state is not None and batch.producer_epoch < state.epoch:
        raise _fenced(state, batch)
    return replay_transaction(
        state, batch.producer_id, batch.producer_epoch, NO_TRANSACTION, append_time_ms
    )


def _check_part_of_transaction(state: Producer, batch: Batch) -> None:
    if not batch.attributes & TRANSACTIONAL_FLAG:
        raise InvalidTransactionState(
            f"producer {batch.producer_id} has a transaction open since offset "
            f"{state.transaction_offset} and sends a batch that is no part of it: end it first"
        )
    if batch.producer_epoch != state.epoch:
        raise InvalidTransactionState(
            f"producer {batch.producer_id} has a transaction of epoch {state.epoch} open since "
            f"offset {state.transaction_offset}: epoch {batch.producer_epoch} cannot go on with it"
        )


def _fenced(state: Producer, batch: Batch) -> ProducerFenced:
    return ProducerFenced(
        f"producer {batch.producer_id} is at epoch {state.epoch}: "
        f"another one took over from epoch {batch.producer_epoch}"
    )


def _check_new_epoch(state: Producer, batch: Batch) -> None:
    if batch.producer_epoch < state.epoch:
        raise _fenced(state, batch)
    if batch.base_sequence != 0:
        raise OutOfOrderSequence(
            f"producer {batch.producer_id} begins epoch {batch.producer_epoch} at sequence "
            f"{batch.base_sequence}: a new epoch begins at 0"
        )


def _repeated(state: Producer, batch: Batch) -> Remembered | None:
    """The batch that this one repeats, None if it is the next one. Raises for all others."""
    first, last = batch.base_sequence, _last_sequence(batch)
    expected = sequence_after(state.batches[-1].last_sequence, 1) if state.batches else 0
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
    return sequence_after(batch.base_sequence, batch.last_offset_delta)


def _is_before(sequence: int, other: int) -> bool:
    """In a ring, the nearer way round decides which of two numbers is the earlier one."""
    return 0 < (other - sequence) % SEQUENCES < SEQUENCES // 2
