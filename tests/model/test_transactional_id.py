"""The rules of transactional ids, cell by cell: who may begin, who may end, what epoch follows.

The tables below say what Kafka answers; they are written out here once more, in words, so that a
change of the rules has to be made twice.
"""

from __future__ import annotations

import pytest

from quackmq.errors import (
    InvalidProducerIdMapping,
    InvalidTransactionState,
    ProducerFenced,
    QuackError,
)
from quackmq.model.transactional_id import (
    BUMPING_ENDS,
    ENDS_AFTER_RESTART,
    EXPLICIT_ENDS,
    INITS,
    LAST_EPOCH,
    NO_EPOCH,
    NO_PRODUCER,
    ProducerRef,
    TransactionalIdState,
    TransactionState,
    begin_producer,
    check_current,
    end_transaction,
    fence_producer,
    is_exhausted,
    must_begin,
    must_end,
    new_id_state,
)
from tests.kit.tables import each

ID = "duck"
#: The last epoch that a client is given.
LAST_GIVEN = LAST_EPOCH - 1
EMPTY, ONGOING, COMMITTED, ABORTED = (
    TransactionState.EMPTY,
    TransactionState.ONGOING,
    TransactionState.COMPLETE_COMMIT,
    TransactionState.COMPLETE_ABORT,
)
FENCED, INVALID, OTHER = ProducerFenced, InvalidTransactionState, InvalidProducerIdMapping

Cell = bool | type[QuackError]


def standing(
    epoch: int = 5, *, previous_epoch: int = NO_EPOCH, state: TransactionState = EMPTY
) -> TransactionalIdState:
    return TransactionalIdState(7, epoch, state, 60_000, 1, 7, previous_epoch)


def ref(epoch: int = 5, producer_id: int = 7) -> ProducerRef:
    return ProducerRef(ID, producer_id, epoch)


# --- ending --------------------------------------------------------------------------------

#: By state: an abort that names the epoch before, an abort of the current one, a commit that names
#: the epoch before, a commit of the current one. True: it is done; False: it was done before.
EXPLICIT: dict[TransactionState, tuple[Cell, Cell, Cell, Cell]] = {
    EMPTY: (FENCED, INVALID, FENCED, INVALID),
    ONGOING: (FENCED, True, FENCED, True),
    COMMITTED: (FENCED, INVALID, FENCED, False),
    ABORTED: (FENCED, False, FENCED, INVALID),
}
AFTER_RESTART: dict[TransactionState, tuple[Cell, Cell, Cell, Cell]] = {
    EMPTY: (FENCED, True, FENCED, INVALID),
    ONGOING: (FENCED, True, FENCED, True),
    COMMITTED: (FENCED, True, FENCED, False),
    ABORTED: (FENCED, False, FENCED, INVALID),
}
BUMPING: dict[TransactionState, tuple[Cell, Cell, Cell, Cell]] = {
    EMPTY: (FENCED, True, FENCED, INVALID),
    ONGOING: (FENCED, True, FENCED, True),
    COMMITTED: (INVALID, True, False, INVALID),
    ABORTED: (False, True, FENCED, INVALID),
}
ENDS = [
    (state, commit, is_repeat, bump, is_recovered, table[state][2 * commit + (not is_repeat)])
    for table, bump, is_recovered in (
        (EXPLICIT, False, False),
        (AFTER_RESTART, False, True),
        (BUMPING, True, False),
        (BUMPING, True, True),
    )
    for state in TransactionState
    for commit in (False, True)
    for is_repeat in (True, False)
]


@each(("state", "commit", "is_repeat", "bump", "is_recovered", "cell"), ENDS)
def test_an_end_is_answered_as_the_table_says(
    state: TransactionState,
    commit: bool,
    is_repeat: bool,
    bump: bool,
    is_recovered: bool,
    cell: Cell,
) -> None:
    named = ref(4 if is_repeat else 5)

    def asked() -> bool:
        return must_end(
            standing(), state, named, commit=commit, bump=bump, is_recovered=is_recovered
        )

    if isinstance(cell, bool):
        assert asked() is cell
    else:
        with pytest.raises(cell):
            asked()


@pytest.mark.parametrize("table", [EXPLICIT_ENDS, ENDS_AFTER_RESTART, BUMPING_ENDS, INITS])
def test_the_tables_know_every_state(table: dict[TransactionState, object]) -> None:
    assert set(table) == set(TransactionState)


@each("epoch", [0, 3, 6, 7])
@each("bump", [False, True])
@each("state", list(TransactionState))
def test_any_other_epoch_is_fenced(state: TransactionState, bump: bool, epoch: int) -> None:
    with pytest.raises(ProducerFenced):
        must_end(standing(), state, ref(epoch), commit=True, bump=bump)


@each("bump", [False, True])
@each("state", list(TransactionState))
def test_another_producer_does_not_end_it(state: TransactionState, bump: bool) -> None:
    with pytest.raises(InvalidProducerIdMapping):
        must_end(standing(), state, ref(producer_id=8), commit=True, bump=bump)
    with pytest.raises(InvalidProducerIdMapping):
        must_end(None, state, ref(), commit=True, bump=bump)


@pytest.mark.parametrize("commit", [False, True])
def test_the_older_way_of_ending_keeps_the_epoch(commit: bool) -> None:
    marker_epoch, after = end_transaction(
        standing(5, previous_epoch=4), 9, commit=commit, bump=False, new_producer_id=None
    )
    assert marker_epoch == 5
    assert after == TransactionalIdState(7, 5, COMMITTED if commit else ABORTED, 60_000, 9, 7, 4)


@pytest.mark.parametrize("commit", [False, True])
def test_the_newer_way_of_ending_takes_the_next_epoch(commit: bool) -> None:
    marker_epoch, after = end_transaction(
        standing(5), 9, commit=commit, bump=True, new_producer_id=None
    )
    assert marker_epoch == 6
    assert after == TransactionalIdState(7, 6, COMMITTED if commit else ABORTED, 60_000, 9, 7, 5)
    assert not must_end(after, after.state, ref(5), commit=commit, bump=True), "a repeat"


def test_the_last_epoch_is_for_markers_alone() -> None:
    marker_epoch, after = end_transaction(
        standing(LAST_GIVEN), 9, commit=True, bump=True, new_producer_id=8
    )
    assert marker_epoch == LAST_EPOCH
    assert (after.producer_id, after.epoch) == (8, 0)


@pytest.mark.parametrize("commit", [False, True])
def test_an_end_that_took_a_new_id_can_be_repeated_by_the_old_one(commit: bool) -> None:
    _, after = end_transaction(standing(LAST_GIVEN), 9, commit=commit, bump=True, new_producer_id=8)
    assert not must_end(after, after.state, ref(LAST_GIVEN), commit=commit, bump=True)
    for wrong in (ref(LAST_GIVEN - 1), ref(LAST_GIVEN, producer_id=6)):
        with pytest.raises(InvalidProducerIdMapping):
            must_end(after, after.state, wrong, commit=commit, bump=True)
    with pytest.raises(ProducerFenced):  # the new one has begun its next transaction
        must_end(after, ONGOING, ref(LAST_GIVEN), commit=commit, bump=True)
    with pytest.raises(InvalidProducerIdMapping):  # the older way knows no such thing
        must_end(after, after.state, ref(LAST_GIVEN), commit=commit, bump=False)


def test_an_abort_of_the_brokers_own_fences_the_producer() -> None:
    marker_epoch, after = fence_producer(standing(5, previous_epoch=4), 9)
    assert marker_epoch == 6
    assert after == TransactionalIdState(7, 6, ABORTED, 60_000, 9, 7, NO_EPOCH)
    with pytest.raises(ProducerFenced):
        check_current(after, ref(5))
    with pytest.raises(ProducerFenced):
        must_end(after, after.state, ref(5), commit=True, bump=True)
    with pytest.raises(ProducerFenced):
        must_begin(after, after.state, 7, 5, ID)


def test_a_commit_behind_a_producers_own_abort_does_not_fence_it() -> None:
    after = end_transaction(standing(5), 9, commit=False, bump=True, new_producer_id=None).id_state
    with pytest.raises(InvalidTransactionState):
        must_end(after, after.state, ref(5), commit=True, bump=True)
    assert must_end(after, after.state, ref(5), commit=False, bump=True) is False


def test_every_producer_can_be_fenced_once_more() -> None:
    marker_epoch, after = fence_producer(standing(LAST_GIVEN), 9)
    assert marker_epoch == after.epoch == LAST_EPOCH
    assert after.is_exhausted, "whoever begins next takes another id"


# --- beginning -----------------------------------------------------------------------------

#: By state: a producer that names nobody, the current one, the one before, any other. True: it
#: takes the next epoch; False: it has it, and is told so again.
BEGINS: dict[TransactionState, tuple[Cell, Cell, Cell, Cell]] = {
    EMPTY: (True, True, False, FENCED),
    ONGOING: (True, True, FENCED, FENCED),
    COMMITTED: (True, True, False, FENCED),
    ABORTED: (True, True, False, FENCED),
}
NAMED = ((NO_PRODUCER, NO_EPOCH), (7, 5), (7, 4), (8, 5))


@each(
    ("state", "named", "cell"),
    [
        (state, named, cell)
        for state, row in BEGINS.items()
        for named, cell in zip(NAMED, row, strict=True)
    ],
)
def test_a_beginning_is_answered_as_the_table_says(
    state: TransactionState, named: tuple[int, int], cell: Cell
) -> None:
    now = standing(5, previous_epoch=4)
    if isinstance(cell, bool):
        assert must_begin(now, state, *named, ID) is cell
    else:
        with pytest.raises(cell):
            must_begin(now, state, *named, ID)


@pytest.mark.parametrize("named", [(7, 3), (7, 6), (7, NO_EPOCH), (6, 4)])
def test_a_beginning_that_names_an_epoch_of_the_past_or_the_future_is_fenced(
    named: tuple[int, int],
) -> None:
    with pytest.raises(ProducerFenced):
        must_begin(standing(5, previous_epoch=4), EMPTY, *named, ID)


def test_who_begins_unnamed_leaves_nothing_to_repeat() -> None:
    after = begin_producer(
        standing(5, previous_epoch=4), 1_000, 9, is_repeatable=False, new_producer_id=None
    )
    assert after == TransactionalIdState(7, 6, EMPTY, 1_000, 9, 7, NO_EPOCH)
    with pytest.raises(ProducerFenced):
        must_begin(after, EMPTY, 7, 5, ID)


def test_who_names_its_epoch_may_ask_again() -> None:
    after = begin_producer(
        standing(5, previous_epoch=4), 1_000, 9, is_repeatable=True, new_producer_id=None
    )
    assert (after.producer_id, after.epoch, after.previous_epoch) == (7, 6, 5)
    assert not must_begin(after, EMPTY, 7, 5, ID)


def test_the_first_has_epoch_0() -> None:
    assert new_id_state(7, 1_000, 9) == TransactionalIdState(7, 0, EMPTY, 1_000, 9)


@pytest.mark.parametrize("epoch", [LAST_GIVEN, LAST_EPOCH])
def test_behind_the_last_epoch_comes_a_new_id_that_may_be_asked_for_again(epoch: int) -> None:
    assert is_exhausted(epoch)
    after = begin_producer(standing(epoch), 1_000, 9, is_repeatable=True, new_producer_id=8)
    assert after == TransactionalIdState(8, 0, EMPTY, 1_000, 9, 7, epoch)
    assert not must_begin(after, EMPTY, 7, epoch, ID)
    with pytest.raises(ProducerFenced):
        must_begin(after, EMPTY, 6, epoch, ID)


def test_the_epoch_before_the_last_is_given_to_clients() -> None:
    assert not is_exhausted(LAST_GIVEN - 1)
    after = begin_producer(
        standing(LAST_GIVEN - 1), 1_000, 9, is_repeatable=False, new_producer_id=None
    )
    assert (after.producer_id, after.epoch) == (7, LAST_GIVEN)


# --- going on ------------------------------------------------------------------------------


def test_only_the_current_producer_takes_part() -> None:
    now = standing(5)
    assert check_current(now, ref()) is now
    for epoch in (4, 6, NO_EPOCH):
        with pytest.raises(ProducerFenced):
            check_current(now, ref(epoch))
    with pytest.raises(InvalidProducerIdMapping):
        check_current(now, ref(producer_id=8))
    with pytest.raises(InvalidProducerIdMapping):
        check_current(None, ref())
