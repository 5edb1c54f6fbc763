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
(see `broker.transactions`), so there are no states in between. Two answers differ from Kafka's,
each where Kafka's answer does harm. An InitProducerId that names an old epoch is refused without
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
    """The identity that a client claims."""

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
    """How a request is answered."""

    DO = auto()
    #: It was done before: answer as the first time.
    AGAIN = auto()
    FENCED = auto()
    INVALID = auto()


class Ends(NamedTuple):
    """The verdicts of one state on an end: an abort or a commit, which names the current epoch or,
    as a repeat may, the previous one."""

    abort_repeat: Verdict
    abort: Verdict
    commit_repeat: Verdict
    commit: Verdict


_DO, _AGAIN, _FENCED, _INVALID = Verdict.DO, Verdict.AGAIN, Verdict.FENCED, Verdict.INVALID

EXPLICIT_ENDS: Final[Mapping[TransactionState, Ends]] = {
    TransactionState.EMPTY: Ends(_FENCED, _INVALID, _FENCED, _INVALID),
    TransactionState.ONGOING: Ends(_FENCED, _DO, _FENCED, _DO),
    TransactionState.COMPLETE_COMMIT: Ends(_FENCED, _INVALID, _FENCED, _AGAIN),
    TransactionState.COMPLETE_ABORT: Ends(_FENCED, _AGAIN, _FENCED, _INVALID),
}

#: The same for an id that was not used since a restart: before it, it may have begun a transaction
#: that wrote nothing and left no trace. Aborting that transaction changes nothing.
ENDS_AFTER_RESTART: Final[Mapping[TransactionState, Ends]] = {
    **EXPLICIT_ENDS,
    TransactionState.EMPTY: Ends(_FENCED, _DO, _FENCED, _INVALID),
    TransactionState.COMPLETE_COMMIT: Ends(_FENCED, _DO, _FENCED, _AGAIN),
}

#: An abort takes a new epoch even if nothing is open: a client does this to fence batches that were
#: never answered. A commit after the broker's own abort (a timeout) is too late: its producer is
#: fenced.
BUMPING_ENDS: Final[Mapping[TransactionState, Ends]] = {
    TransactionState.EMPTY: Ends(_FENCED, _DO, _FENCED, _INVALID),
    TransactionState.ONGOING: Ends(_FENCED, _DO, _FENCED, _DO),
    TransactionState.COMPLETE_COMMIT: Ends(_INVALID, _DO, _AGAIN, _INVALID),
    TransactionState.COMPLETE_ABORT: Ends(_AGAIN, _DO, _FENCED, _INVALID),
}


class Inits(NamedTuple):
    """The verdicts of one state on a producer that begins. It names no producer, the current one,
    the previous one (as a repeat may), or another."""

    unnamed: Verdict
    current: Verdict
    repeat: Verdict
    other: Verdict


#: An open transaction is aborted first. A repeat is too late once its epoch has been used.
INITS: Final[Mapping[TransactionState, Inits]] = {
    TransactionState.EMPTY: Inits(_DO, _DO, _AGAIN, _FENCED),
    TransactionState.ONGOING: Inits(_DO, _DO, _FENCED, _FENCED),
    TransactionState.COMPLETE_COMMIT: Inits(_DO, _DO, _AGAIN, _FENCED),
    TransactionState.COMPLETE_ABORT: Inits(_DO, _DO, _AGAIN, _FENCED),
}


def is_exhausted(epoch: int) -> bool:
    return epoch >= LAST_EPOCH - 1


# --- beginning -----------------------------------------------------------------------------


def begins(
    standing: TransactionalIdState,
    state: TransactionState,
    producer_id: int,
    epoch: int,
    transactional_id: str,
) -> bool:
    """Return whether a producer takes the next epoch; False if it repeats a request and gets the
    current epoch again. A producer may name its id and epoch, else NO_PRODUCER and NO_EPOCH. Raises
    ProducerFenced."""
    row = INITS[state]
    if producer_id == NO_PRODUCER:
        verdict = row.unnamed
    elif producer_id == standing.producer_id and epoch == standing.epoch:
        verdict = row.current
    elif _is_former(standing, producer_id, epoch):
        verdict = row.repeat
    else:
        verdict = row.other
    if verdict is Verdict.FENCED:
        raise _fenced(standing, ProducerRef(transactional_id, producer_id, epoch))
    return verdict is Verdict.DO


def first_standing(producer_id: int, timeout_ms: int, now_ms: int) -> TransactionalIdState:
    """Return the state of a new transactional id."""
    return TransactionalIdState(producer_id, 0, TransactionState.EMPTY, timeout_ms, now_ms)


def begun(
    standing: TransactionalIdState,
    timeout_ms: int,
    now_ms: int,
    *,
    named: bool,
    new_producer_id: int | None,
) -> TransactionalIdState:
    """Return the state after a producer begins. `named`: it named its current epoch and may repeat
    the request. An exhausted id needs `new_producer_id`."""
    _check_new_id(standing.is_exhausted, new_producer_id)
    return TransactionalIdState(
        producer_id=standing.producer_id if new_producer_id is None else new_producer_id,
        epoch=standing.epoch + 1 if new_producer_id is None else 0,
        state=TransactionState.EMPTY,
        timeout_ms=timeout_ms,
        updated_ms=now_ms,
        previous_producer_id=standing.producer_id,
        previous_epoch=standing.epoch if named else NO_EPOCH,
    )


def _is_former(standing: TransactionalIdState, producer_id: int, epoch: int) -> bool:
    if epoch == NO_EPOCH or epoch != standing.previous_epoch:
        return False
    is_of_before = producer_id == standing.previous_producer_id and is_exhausted(epoch)
    return producer_id == standing.producer_id or is_of_before


# --- taking part ---------------------------------------------------------------------------


def check_current(standing: TransactionalIdState | None, ref: ProducerRef) -> TransactionalIdState:
    """Check that a producer is the current one of this id and may take part in a transaction.
    Raises InvalidProducerIdMapping, ProducerFenced."""
    if standing is None or standing.producer_id != ref.producer_id:
        raise _not_mapped(ref)
    if standing.epoch != ref.epoch:
        raise _fenced(standing, ref)
    return standing


# --- ending --------------------------------------------------------------------------------


def ends(
    standing: TransactionalIdState | None,
    state: TransactionState,
    ref: ProducerRef,
    *,
    commit: bool,
    bump: bool,
    is_recovered: bool = False,
) -> bool:
    """Return whether to end the transaction now; False if the request repeats an earlier end.
    `bump` is the newer way. `is_recovered`: the id was not used since a restart. Raises
    InvalidProducerIdMapping, ProducerFenced, InvalidTransactionState."""
    if standing is None:
        raise _not_mapped(ref)
    is_current = standing.epoch == ref.epoch
    is_repeat = standing.epoch == ref.epoch + 1
    if standing.producer_id != ref.producer_id:
        is_repeat = bump and _is_from_before_the_new_id(standing, ref)
        if not is_repeat:
            raise _not_mapped(ref)
        is_current = False
    if not is_current and not is_repeat:
        raise _fenced(standing, ref)
    explicit = ENDS_AFTER_RESTART if is_recovered else EXPLICIT_ENDS
    row = (BUMPING_ENDS if bump else explicit)[state]
    if commit:
        verdict = row.commit if is_current else row.commit_repeat
    else:
        verdict = row.abort if is_current else row.abort_repeat
    if verdict is Verdict.FENCED and bump and state is TransactionState.COMPLETE_ABORT:
        # If the producer itself aborted, it was not fenced.
        if ref.epoch == standing.previous_epoch:
            verdict = Verdict.INVALID
    if verdict is Verdict.FENCED:
        raise _fenced(standing, ref)
    if verdict is Verdict.INVALID:
        wanted = "committed" if commit else "aborted"
        raise InvalidTransactionState(
            f"the last transaction of {ref.transactional_id} is {state}: no open transaction can "
            f"be {wanted}"
        )
    return verdict is Verdict.DO


class Ended(NamedTuple):
    """The epoch of the markers, and the state to store with them."""

    marker_epoch: int
    standing: TransactionalIdState


def ended(
    standing: TransactionalIdState,
    now_ms: int,
    *,
    commit: bool,
    bump: bool,
    new_producer_id: int | None,
) -> Ended:
    """Return the state after a client ends its transaction. Bumping an exhausted epoch needs
    `new_producer_id`."""
    _check_new_id(bump and standing.is_exhausted, new_producer_id)
    state = TransactionState.COMPLETE_COMMIT if commit else TransactionState.COMPLETE_ABORT
    kept = standing._replace(state=state, updated_ms=now_ms)
    if not bump:
        return Ended(standing.epoch, kept)
    kept = kept._replace(
        producer_id=standing.producer_id if new_producer_id is None else new_producer_id,
        epoch=standing.epoch + 1 if new_producer_id is None else 0,
        previous_producer_id=standing.producer_id,
        previous_epoch=standing.epoch,
    )
    return Ended(standing.epoch + 1, kept)


def fenced(standing: TransactionalIdState, now_ms: int) -> Ended:
    """Return the state after the broker aborts a transaction by itself: its producer is fenced."""
    kept = standing._replace(
        epoch=standing.epoch + 1,
        state=TransactionState.COMPLETE_ABORT,
        updated_ms=now_ms,
        previous_producer_id=standing.producer_id,
        previous_epoch=NO_EPOCH,
    )
    return Ended(kept.epoch, kept)


def _is_from_before_the_new_id(standing: TransactionalIdState, ref: ProducerRef) -> bool:
    """Return whether the last end exhausted the producer id and the client may not know it yet."""
    is_of_before = ref.producer_id == standing.previous_producer_id
    return is_of_before and ref.epoch == LAST_EPOCH - 1 and standing.epoch == 0


def _not_mapped(ref: ProducerRef) -> InvalidProducerIdMapping:
    return InvalidProducerIdMapping(
        f"the transactional id {ref.transactional_id} does not belong to producer "
        f"{ref.producer_id}: initialise the producer again"
    )


def _fenced(standing: TransactionalIdState, ref: ProducerRef) -> ProducerFenced:
    return ProducerFenced(
        f"the transactional id {ref.transactional_id} is at epoch {standing.epoch} of producer "
        f"{standing.producer_id}: epoch {ref.epoch} of producer {ref.producer_id} was replaced by "
        f"another producer, or its transaction timed out"
    )


def _check_new_id(is_needed: bool, new_producer_id: int | None) -> None:
    """Check this, since without a new id where it is needed, epochs would be assigned twice."""
    if is_needed is not (new_producer_id is not None):
        raise InternalError("a new producer id is needed exactly when the epochs are used up")
