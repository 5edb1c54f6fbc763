"""The life of a transactional id: Kafka's rules for beginning and ending, as tables. Pure.

A transactional id stands for one producer at a time: a producer id and an epoch. A producer that
begins takes a new epoch, and so fences the producer that had the previous one. There are two ways
of ending a transaction:

- *explicit*, the older one: the epoch stays the same, a separate request adds partitions, and a
  repeated end is recognised by the state alone;
- *bumping*, the newer one (transaction version 2, KIP-890): every end takes the next epoch, so no
  batch sent before the end can get into the next transaction. A repeated end is recognised because
  it names the previous epoch.

Epochs go up to `LAST_EPOCH`, which no client receives, so that every client can be fenced. After
the last epoch that clients receive comes a new producer id with epoch 0.

Kafka ends a transaction in two steps, deciding and then writing markers. Here this is one step
(see `broker.transactions`), so there are no states in between. Two responses differ from Kafka's,
each where Kafka's response does harm. An InitProducerId that names an old epoch is refused without
first aborting the open transaction. After a restart, only transactions that reached the log are
still open, so an abort of a transaction that had written nothing succeeds (`ENDS_AFTER_RESTART`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum, auto
from typing import Final, NamedTuple

from quackmq.errors import (
    InternalError,
    InvalidProducerIdMapping,
    InvalidTransactionState,
    ProducerFenced,
)

#: The greatest 16-bit epoch; only markers have it.
LAST_EPOCH: Final = 2**15 - 1
NO_PRODUCER: Final = -1
NO_EPOCH: Final = -1


class TransactionState(StrEnum):
    """Kafka's names. Ongoing is not stored: it follows from the log."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"


class ProducerRef(NamedTuple):
    """The transactional id, producer id and epoch that a client claims to have."""

    transactional_id: str
    producer_id: int
    epoch: int


class TransactionalIdState(NamedTuple):
    """The stored state of a transactional id: its producer, how its last transaction ended, and the
    previous producer id and epoch, which identify a repeated request."""

    producer_id: int
    epoch: int
    state: TransactionState
    timeout_ms: int
    updated_ms: int
    previous_producer_id: int = NO_PRODUCER
    previous_epoch: int = NO_EPOCH

    @property
    def is_exhausted(self) -> bool:
        """Whether the next producer needs a new producer id."""
        return is_exhausted(self.epoch)


class Verdict(Enum):
    """The coordinator's decision about a request."""

    DO = auto()
    #: It was done before: send the first response again.
    REPEAT = auto()
    FENCED = auto()
    INVALID = auto()


class EndVerdicts(NamedTuple):
    """The verdicts of one state on an end: an abort or a commit, which names the current epoch or,
    as a repeat may, the previous one."""

    abort_repeat: Verdict
    abort: Verdict
    commit_repeat: Verdict
    commit: Verdict


_DO, _REPEAT, _FENCED, _INVALID = Verdict.DO, Verdict.REPEAT, Verdict.FENCED, Verdict.INVALID

EXPLICIT_ENDS: Final[Mapping[TransactionState, EndVerdicts]] = {
    TransactionState.EMPTY: EndVerdicts(_FENCED, _INVALID, _FENCED, _INVALID),
    TransactionState.ONGOING: EndVerdicts(_FENCED, _DO, _FENCED, _DO),
    TransactionState.COMPLETE_COMMIT: EndVerdicts(_FENCED, _INVALID, _FENCED, _REPEAT),
    TransactionState.COMPLETE_ABORT: EndVerdicts(_FENCED, _REPEAT, _FENCED, _INVALID),
}

#: The same for an id that was not used since a restart: before it, it may have begun a transaction
#: that wrote nothing and left no trace. Aborting that transaction changes nothing.
ENDS_AFTER_RESTART: Final[Mapping[TransactionState, EndVerdicts]] = {
    **EXPLICIT_ENDS,
    TransactionState.EMPTY: EndVerdicts(_FENCED, _DO, _FENCED, _INVALID),
    TransactionState.COMPLETE_COMMIT: EndVerdicts(_FENCED, _DO, _FENCED, _REPEAT),
}

#: An abort takes a new epoch even if nothing is open: a client does this to fence batches that were
#: never acknowledged. A commit after the broker's own abort (a timeout) is too late: its producer
#: is fenced.
BUMPING_ENDS: Final[Mapping[TransactionState, EndVerdicts]] = {
    TransactionState.EMPTY: EndVerdicts(_FENCED, _DO, _FENCED, _INVALID),
    TransactionState.ONGOING: EndVerdicts(_FENCED, _DO, _FENCED, _DO),
    TransactionState.COMPLETE_COMMIT: EndVerdicts(_INVALID, _DO, _REPEAT, _INVALID),
    TransactionState.COMPLETE_ABORT: EndVerdicts(_REPEAT, _DO, _FENCED, _INVALID),
}


class InitVerdicts(NamedTuple):
    """The verdicts of one state on a producer that begins. It names no producer, the current one,
    the previous one (as a repeat may), or another."""

    unnamed: Verdict
    current: Verdict
    repeat: Verdict
    other: Verdict


#: An open transaction is aborted first. A repeat is too late once its epoch has been used.
INITS: Final[Mapping[TransactionState, InitVerdicts]] = {
    TransactionState.EMPTY: InitVerdicts(_DO, _DO, _REPEAT, _FENCED),
    TransactionState.ONGOING: InitVerdicts(_DO, _DO, _FENCED, _FENCED),
    TransactionState.COMPLETE_COMMIT: InitVerdicts(_DO, _DO, _REPEAT, _FENCED),
    TransactionState.COMPLETE_ABORT: InitVerdicts(_DO, _DO, _REPEAT, _FENCED),
}


def is_exhausted(epoch: int) -> bool:
    """Return whether no client may receive an epoch after this one."""
    # Clients receive epochs up to LAST_EPOCH - 1. LAST_EPOCH is reserved for fencing.
    return epoch >= LAST_EPOCH - 1


# --- beginning -----------------------------------------------------------------------------


def must_begin(
    id_state: TransactionalIdState,
    transaction_state: TransactionState,
    producer_id: int,
    epoch: int,
    transactional_id: str,
) -> bool:
    """Return whether a producer that begins takes the next epoch. Return False if it repeats a
    request: then it gets the current epoch again. A producer that names no id and epoch passes
    NO_PRODUCER and NO_EPOCH. Raises ProducerFenced."""
    verdicts = INITS[transaction_state]
    if producer_id == NO_PRODUCER:
        verdict = verdicts.unnamed
    elif producer_id == id_state.producer_id and epoch == id_state.epoch:
        verdict = verdicts.current
    elif _is_previous(id_state, producer_id, epoch):
        verdict = verdicts.repeat
    else:
        verdict = verdicts.other
    if verdict is Verdict.FENCED:
        raise _fenced_error(id_state, ProducerRef(transactional_id, producer_id, epoch))
    return verdict is Verdict.DO


def new_id_state(producer_id: int, timeout_ms: int, now_ms: int) -> TransactionalIdState:
    """Return the state of a new transactional id."""
    return TransactionalIdState(producer_id, 0, TransactionState.EMPTY, timeout_ms, now_ms)


def begin_producer(
    id_state: TransactionalIdState,
    timeout_ms: int,
    now_ms: int,
    *,
    is_repeatable: bool,
    new_producer_id: int | None,
) -> TransactionalIdState:
    """Return the state after a producer begins. With `is_repeatable`, the producer named its
    current epoch and may repeat the request. An exhausted id needs `new_producer_id`."""
    _check_new_producer_id(id_state.is_exhausted, new_producer_id)
    return TransactionalIdState(
        producer_id=id_state.producer_id if new_producer_id is None else new_producer_id,
        epoch=id_state.epoch + 1 if new_producer_id is None else 0,
        state=TransactionState.EMPTY,
        timeout_ms=timeout_ms,
        updated_ms=now_ms,
        previous_producer_id=id_state.producer_id,
        previous_epoch=id_state.epoch if is_repeatable else NO_EPOCH,
    )


def _is_previous(id_state: TransactionalIdState, producer_id: int, epoch: int) -> bool:
    """Return whether a producer names the epoch before the current one, as a repeat does."""
    if epoch == NO_EPOCH or epoch != id_state.previous_epoch:
        return False
    is_exhausted_previous_id = producer_id == id_state.previous_producer_id and is_exhausted(epoch)
    return producer_id == id_state.producer_id or is_exhausted_previous_id


# --- taking part ---------------------------------------------------------------------------


def check_current(id_state: TransactionalIdState | None, ref: ProducerRef) -> TransactionalIdState:
    """Check that a producer is the current one of this id and may take part in a transaction.
    Raises InvalidProducerIdMapping, ProducerFenced."""
    if id_state is None or id_state.producer_id != ref.producer_id:
        raise _not_mapped_error(ref)
    if id_state.epoch != ref.epoch:
        raise _fenced_error(id_state, ref)
    return id_state


# --- ending --------------------------------------------------------------------------------


def must_end(
    id_state: TransactionalIdState | None,
    transaction_state: TransactionState,
    ref: ProducerRef,
    *,
    commit: bool,
    bump: bool,
    is_recovered: bool = False,
) -> bool:
    """Return whether to end the transaction now; False if the request repeats an earlier end.
    With `bump` the end takes the next epoch (the newer way). With `is_recovered` the id was not
    used since a restart. Raises
    InvalidProducerIdMapping, ProducerFenced, InvalidTransactionState."""
    if id_state is None:
        raise _not_mapped_error(ref)
    is_current = id_state.epoch == ref.epoch
    is_repeat = id_state.epoch == ref.epoch + 1
    if id_state.producer_id != ref.producer_id:
        is_repeat = bump and _is_repeat_under_previous_id(id_state, ref)
        if not is_repeat:
            raise _not_mapped_error(ref)
        is_current = False
    if not is_current and not is_repeat:
        raise _fenced_error(id_state, ref)
    explicit = ENDS_AFTER_RESTART if is_recovered else EXPLICIT_ENDS
    verdicts = (BUMPING_ENDS if bump else explicit)[transaction_state]
    if commit:
        verdict = verdicts.commit if is_current else verdicts.commit_repeat
    else:
        verdict = verdicts.abort if is_current else verdicts.abort_repeat
    if verdict is Verdict.FENCED and bump and transaction_state is TransactionState.COMPLETE_ABORT:
        # If the producer itself aborted, it was not fenced.
        if ref.epoch == id_state.previous_epoch:
            verdict = Verdict.INVALID
    if verdict is Verdict.FENCED:
        raise _fenced_error(id_state, ref)
    if verdict is Verdict.INVALID:
        outcome = "committed" if commit else "aborted"
        raise InvalidTransactionState(
            f"the last transaction of {ref.transactional_id} is {transaction_state}: no open "
            f"transaction can be {outcome}"
        )
    return verdict is Verdict.DO


class TransactionEnd(NamedTuple):
    """How a transaction ends: the epoch of its markers, and the id's state to store with them."""

    marker_epoch: int
    id_state: TransactionalIdState


def end_transaction(
    id_state: TransactionalIdState,
    now_ms: int,
    *,
    commit: bool,
    bump: bool,
    new_producer_id: int | None,
) -> TransactionEnd:
    """Return the state after a client ends its transaction. Bumping an exhausted epoch needs
    `new_producer_id`."""
    _check_new_producer_id(bump and id_state.is_exhausted, new_producer_id)
    state = TransactionState.COMPLETE_COMMIT if commit else TransactionState.COMPLETE_ABORT
    new_state = id_state._replace(state=state, updated_ms=now_ms)
    if not bump:
        return TransactionEnd(id_state.epoch, new_state)
    new_state = new_state._replace(
        producer_id=id_state.producer_id if new_producer_id is None else new_producer_id,
        epoch=id_state.epoch + 1 if new_producer_id is None else 0,
        previous_producer_id=id_state.producer_id,
        previous_epoch=id_state.epoch,
    )
    return TransactionEnd(id_state.epoch + 1, new_state)


def fence_producer(id_state: TransactionalIdState, now_ms: int) -> TransactionEnd:
    """Return the state after the broker aborts a transaction by itself: its producer is fenced."""
    new_state = id_state._replace(
        epoch=id_state.epoch + 1,
        state=TransactionState.COMPLETE_ABORT,
        updated_ms=now_ms,
        previous_producer_id=id_state.producer_id,
        # The producer did not ask for this end, so it cannot repeat the request.
        previous_epoch=NO_EPOCH,
    )
    return TransactionEnd(new_state.epoch, new_state)


def _is_repeat_under_previous_id(id_state: TransactionalIdState, ref: ProducerRef) -> bool:
    """Return whether the last end exhausted the producer id and the client may not know it yet."""
    names_previous_id = ref.producer_id == id_state.previous_producer_id
    return names_previous_id and ref.epoch == LAST_EPOCH - 1 and id_state.epoch == 0


def _not_mapped_error(ref: ProducerRef) -> InvalidProducerIdMapping:
    return InvalidProducerIdMapping(
        f"the transactional id {ref.transactional_id} does not belong to producer "
        f"{ref.producer_id}: initialise the producer again"
    )


def _fenced_error(id_state: TransactionalIdState, ref: ProducerRef) -> ProducerFenced:
    """Return the error for a producer that was fenced."""
    return ProducerFenced(
        f"the transactional id {ref.transactional_id} is at epoch {id_state.epoch} of producer "
        f"{id_state.producer_id}: epoch {ref.epoch} of producer {ref.producer_id} was replaced by "
        f"another producer, or its transaction timed out"
    )


def _check_new_producer_id(is_needed: bool, new_producer_id: int | None) -> None:
    """Raise InternalError if a needed new producer id is missing, or one is passed in vain: epochs
    would be assigned twice."""
    if is_needed is not (new_producer_id is not None):
        raise InternalError("a new producer id is needed exactly when the epochs are used up")
