"""What becomes of a transactional id: Kafka's rules for beginning and ending, as tables. Pure.

A transactional id stands for one producer at a time: a producer id and an epoch. Who begins takes a
new epoch, and so fences whoever had the one before. There are two ways of ending:

- the older, *explicit* one: the epoch stays as it is, partitions are added by a request of their
  own, and a repeated end is known by the state alone;
- the newer, *bumping* one (transaction version 2, KIP-890): every end takes the next epoch, so that
  nothing that was sent before it can get into what comes after; a repeated end is known by naming
  the epoch before.

Epochs go up to `LAST_EPOCH`, which no client is given, so that every client can be fenced. Behind
the last one that is given comes a new producer id with epoch 0.

The two steps that Kafka takes to end a transaction, deciding and then writing markers, are one here
(see `broker.transactions`), so there are no states between them. Two answers differ, each where
Kafka's own harms somebody: a beginning that names an epoch of the past does not abort what is open
before it is refused; and after a restart, of which only what reached the log is left of an open
transaction, an abort of one that had written nothing is taken (`ENDS_AFTER_RESTART`).
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

#: The greatest epoch that 16 bits hold; only markers have it.
LAST_EPOCH: Final = 2**15 - 1
NO_PRODUCER: Final = -1
NO_EPOCH: Final = -1


class TransactionState(StrEnum):
    """By Kafka's names. Ongoing is not kept: it follows from what the log holds."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"


class ProducerRef(NamedTuple):
    """Who a client says it is."""

    transactional_id: str
    producer_id: int
    epoch: int


class TransactionalIdState(NamedTuple):
    """What is kept of a transactional id: its producer, how its last transaction ended, and the
    producer id and epoch before, by which a repeat is known."""

    producer_id: int
    epoch: int
    state: TransactionState
    timeout_ms: int
    updated_ms: int
    previous_producer_id: int = NO_PRODUCER
    previous_epoch: int = NO_EPOCH

    @property
    def is_exhausted(self) -> bool:
        """Whether the next producer needs another id."""
        return is_exhausted(self.epoch)


class Verdict(Enum):
    """What becomes of a request."""

    DO = auto()
    #: It was done before: it is answered like the first.
    AGAIN = auto()
    FENCED = auto()
    INVALID = auto()


class Ends(NamedTuple):
    """What a state makes of an end, by whether it is an abort or a commit, and whether it names the
    epoch that is current or, as a repeat may, the one before."""

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

#: The same for an id that has done nothing since a restart: it may have begun a transaction before
#: that wrote nothing, of which nothing is left. To abort that one changes nothing.
ENDS_AFTER_RESTART: Final[Mapping[TransactionState, Ends]] = {
    **EXPLICIT_ENDS,
    TransactionState.EMPTY: Ends(_FENCED, _DO, _FENCED, _INVALID),
    TransactionState.COMPLETE_COMMIT: Ends(_FENCED, _DO, _FENCED, _AGAIN),
}

#: An abort where nothing is open takes a new epoch, too: a client does so to be rid of what it sent
#: and never heard of. A commit that meets an abort of the broker's own, because time was up, was
#: too late: its producer is fenced.
BUMPING_ENDS: Final[Mapping[TransactionState, Ends]] = {
    TransactionState.EMPTY: Ends(_FENCED, _DO, _FENCED, _INVALID),
    TransactionState.ONGOING: Ends(_FENCED, _DO, _FENCED, _DO),
    TransactionState.COMPLETE_COMMIT: Ends(_INVALID, _DO, _AGAIN, _INVALID),
    TransactionState.COMPLETE_ABORT: Ends(_AGAIN, _DO, _FENCED, _INVALID),
}


class Inits(NamedTuple):
    """What a state makes of a producer that begins, by whom it says it is: nobody in particular,
    the producer that is current, the one before (as a repeat may), or any other."""

    unnamed: Verdict
    current: Verdict
    repeat: Verdict
    other: Verdict


#: Where one is open, it is aborted first. The repeat of a beginning that was used since is late.
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
    """Whether a producer takes the next epoch, or is answered with the present one, as before. It
    may name the id and epoch that it has (NO_PRODUCER and NO_EPOCH if none). ProducerFenced."""
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
    """Of a transactional id that is new."""
    return TransactionalIdState(producer_id, 0, TransactionState.EMPTY, timeout_ms, now_ms)


def begun(
    standing: TransactionalIdState,
    timeout_ms: int,
    now_ms: int,
    *,
    named: bool,
    new_producer_id: int | None,
) -> TransactionalIdState:
    """The standing of a producer that begins. `named` is one that named its present epoch, and may
    have to ask again. The new producer id is for an exhausted one."""
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


# --- going on ------------------------------------------------------------------------------


def check_current(standing: TransactionalIdState | None, ref: ProducerRef) -> TransactionalIdState:
    """Whether a producer may take part in a transaction of this id: it must be the current one.
    InvalidProducerIdMapping, ProducerFenced."""
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
    """Whether a transaction is to be ended, or was, as is said once more. `bump` is the newer way;
    `is_recovered` an id that has done nothing since a restart. InvalidProducerIdMapping,
    ProducerFenced, InvalidTransactionState."""
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
        # It was not fenced if it was the producer itself that aborted.
        if ref.epoch == standing.previous_epoch:
            verdict = Verdict.INVALID
    if verdict is Verdict.FENCED:
        raise _fenced(standing, ref)
    if verdict is Verdict.INVALID:
        wanted = "committed" if commit else "aborted"
        raise InvalidTransactionState(
            f"the last transaction of {ref.transactional_id} is {state}: there is none that could "
            f"be {wanted}"
        )
    return verdict is Verdict.DO


class Ended(NamedTuple):
    """The epoch of the markers, and what is kept with them."""

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
    """How a client's end leaves a transactional id. A new producer id is for one that bumps an
    exhausted epoch."""
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
    """How an abort of the broker's own leaves a transactional id: its producer is fenced."""
    kept = standing._replace(
        epoch=standing.epoch + 1,
        state=TransactionState.COMPLETE_ABORT,
        updated_ms=now_ms,
        previous_producer_id=standing.producer_id,
        previous_epoch=NO_EPOCH,
    )
    return Ended(kept.epoch, kept)


def _is_from_before_the_new_id(standing: TransactionalIdState, ref: ProducerRef) -> bool:
    """Whether a producer may not have heard that its id was exhausted by its last end."""
    is_of_before = ref.producer_id == standing.previous_producer_id
    return is_of_before and ref.epoch == LAST_EPOCH - 1 and standing.epoch == 0


def _not_mapped(ref: ProducerRef) -> InvalidProducerIdMapping:
    return InvalidProducerIdMapping(
        f"the transactional id {ref.transactional_id} is not that of producer {ref.producer_id}: "
        "begin anew"
    )


def _fenced(standing: TransactionalIdState, ref: ProducerRef) -> ProducerFenced:
    return ProducerFenced(
        f"the transactional id {ref.transactional_id} is at epoch {standing.epoch} of producer "
        f"{standing.producer_id}: another one took over from epoch {ref.epoch} of producer "
        f"{ref.producer_id}, or its time was up"
    )


def _check_new_id(is_needed: bool, new_producer_id: int | None) -> None:
    """Without one where it is needed, epochs would be given twice."""
    if is_needed is not (new_producer_id is not None):
        raise InternalError("a new producer id comes exactly when the epochs of one are used up")
