"""The rules of idempotent producers, one by one and against a model that remembers everything."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quackmq.errors import (
    InvalidRequest,
    InvalidTransactionState,
    OutOfOrderSequence,
    ProducerFenced,
    QuackError,
    RepeatForgotten,
    UnknownProducer,
)
from quackmq.model import limits as model_limits
from quackmq.model.log_transactions import Marker, marker_batch
from quackmq.model.producer_state import (
    FIRST_KEY_ID,
    NO_TRANSACTION,
    SEQUENCES,
    Producer,
    RememberedBatch,
    advance,
    expired_producers,
    has_producer,
    is_repeat,
    replay,
    sequence_after,
)
from quackmq.records.batch import TRANSACTIONAL_FLAG, Batch
from tests.kit.support import batch_of

PRODUCER_ID = 7
#: One batch that every test may shape as it likes: `advance` sees the header only.
TEMPLATE = batch_of(b"value", producer_id=PRODUCER_ID, producer_epoch=0, base_sequence=0)


def batch(sequence: int, count: int = 1, epoch: int = 0) -> Batch:
    return TEMPLATE._replace(
        base_sequence=sequence,
        producer_epoch=epoch,
        last_offset_delta=count - 1,
        record_count=count,
    )


def appended(
    state: Producer | None, a_batch: Batch, base_offset: int = 0, append_time_ms: int = 0
) -> Producer:
    outcome = advance(state, a_batch, base_offset, append_time_ms)
    assert isinstance(outcome, Producer)
    return outcome


def at(last_sequence: int, epoch: int = 0) -> Producer:
    """A producer whose one remembered batch ends at a number."""
    return Producer(PRODUCER_ID, epoch, (RememberedBatch(0, last_sequence, 0, 1, 0),), 0)


def after(batches: Sequence[Batch]) -> Producer:
    state: Producer | None = None
    offset = 0
    for one in batches:
        state = appended(state, one, offset, 1000 + offset)
        offset += one.last_offset_delta + 1
    assert state is not None
    return state


def test_a_new_producer_begins_at_zero() -> None:
    state = appended(None, batch(0, count=3), base_offset=40, append_time_ms=99)
    assert state == Producer(PRODUCER_ID, 0, (RememberedBatch(0, 2, 40, 43, 99),), 99)


def test_a_new_producer_may_begin_in_any_epoch() -> None:
    assert appended(None, batch(0, epoch=12)).epoch == 12


def test_an_unknown_producer_cannot_go_on_in_the_middle() -> None:
    with pytest.raises(UnknownProducer):
        advance(None, batch(5), 0, 0)


def test_the_next_batch_begins_where_the_last_one_ended() -> None:
    state = after([batch(0, count=3), batch(3, count=2)])
    assert [(b.first_sequence, b.last_sequence) for b in state.batches] == [(0, 2), (3, 4)]
    assert [(b.base_offset, b.next_offset) for b in state.batches] == [(0, 3), (3, 5)]
    assert state.last_append_ms == 1003


def test_a_gap_is_refused() -> None:
    with pytest.raises(OutOfOrderSequence):
        advance(after([batch(0, count=3)]), batch(4), 3, 0)


def test_every_remembered_batch_is_answered_like_the_first_time() -> None:
    batches = [batch(2 * n, count=2) for n in range(model_limits.REMEMBERED_BATCHES)]
    state = after(batches)
    for n, one in enumerate(batches):
        answer = advance(state, one, 99, 9999)
        assert answer == RememberedBatch(2 * n, 2 * n + 1, 2 * n, 2 * n + 2, 1000 + 2 * n)


def test_no_more_batches_are_remembered_than_the_bound_says() -> None:
    state = after([batch(n) for n in range(model_limits.REMEMBERED_BATCHES + 3)])
    assert [b.first_sequence for b in state.batches] == [3, 4, 5, 6, 7]


def test_a_repeat_older_than_that_is_told_so() -> None:
    state = after([batch(n) for n in range(model_limits.REMEMBERED_BATCHES + 1)])
    with pytest.raises(RepeatForgotten):
        advance(state, batch(0), 6, 0)


def test_a_repeat_cut_differently_is_out_of_order() -> None:
    state = after([batch(3 * n, count=3) for n in range(model_limits.REMEMBERED_BATCHES + 1)])
    for first, count in [(3, 2), (4, 2), (3, 6), (0, 4), (15, 4)]:
        with pytest.raises(OutOfOrderSequence):
            advance(state, batch(first, count), 18, 0)


def test_nothing_is_called_forgotten_that_was_never_sent() -> None:
    state = after([batch(0), batch(1)])
    with pytest.raises(OutOfOrderSequence):
        advance(state, batch(SEQUENCES - 1), 2, 0)


def test_after_the_greatest_number_comes_zero() -> None:
    state = appended(at(SEQUENCES - 1), batch(0), 1)
    assert state.batches[-1].first_sequence == 0


@pytest.mark.parametrize(
    ("sequence", "records", "after"),
    [(0, 5, 5), (2**31 - 2, 1, 2**31 - 1), (2**31 - 1, 1, 0), (2**31 - 3, 10, 7)],
)
def test_after_the_greatest_number_comes_0(sequence: int, records: int, after: int) -> None:
    assert sequence_after(sequence, records) == after


def test_numbers_wrap_within_a_batch() -> None:
    state = appended(at(SEQUENCES - 3), batch(SEQUENCES - 2, count=5), 1)
    assert (state.batches[-1].first_sequence, state.batches[-1].last_sequence) == (SEQUENCES - 2, 2)
    assert appended(state, batch(3), 6).batches[-1].first_sequence == 3
    assert advance(state, batch(SEQUENCES - 2, count=5), 6, 0) == state.batches[-1]


def test_a_repeat_from_before_the_wrap_is_forgotten_and_not_a_gap() -> None:
    state = at(SEQUENCES - 1)
    for n in range(model_limits.REMEMBERED_BATCHES):
        state = appended(state, batch(n), n)
    with pytest.raises(RepeatForgotten):
        advance(state, batch(SEQUENCES - 1), 9, 0)


def test_an_older_epoch_is_fenced() -> None:
    state = after([batch(0, epoch=3)])
    for sequence in (0, 1):
        with pytest.raises(ProducerFenced):
            advance(state, batch(sequence, epoch=2), 1, 0)


def test_a_newer_epoch_begins_anew_at_zero() -> None:
    state = appended(after([batch(0), batch(1)]), batch(0, epoch=1), 2, 5)
    assert state == Producer(PRODUCER_ID, 1, (RememberedBatch(0, 0, 2, 3, 5),), 5)


def test_a_newer_epoch_cannot_go_on_in_the_middle() -> None:
    with pytest.raises(OutOfOrderSequence):
        advance(after([batch(0)]), batch(1, epoch=1), 1, 0)


@pytest.mark.parametrize(("sequence", "epoch"), [(-1, 0), (0, -1)])
def test_a_producer_without_number_or_epoch_is_refused(sequence: int, epoch: int) -> None:
    for state in (None, after([batch(0)])):
        with pytest.raises(InvalidRequest):
            advance(state, batch(sequence, epoch=epoch), 1, 0)


# --- transactions ----------------------------------------------------------------------------


def part(sequence: int, count: int = 1, epoch: int = 0) -> Batch:
    """A batch of a transaction."""
    return batch(sequence, count, epoch)._replace(attributes=TRANSACTIONAL_FLAG)


def marker(epoch: int = 0) -> Batch:
    return Batch.parse(marker_batch(PRODUCER_ID, epoch, Marker.COMMIT, 0))


def test_the_first_transactional_batch_opens_a_transaction_at_its_offset() -> None:
    state = appended(appended(None, part(0), 40), part(1), 41)
    assert state.transaction_offset == 40
    assert appended(None, batch(0), 40).transaction_offset == NO_TRANSACTION


def test_a_marker_ends_the_transaction_and_keeps_what_is_remembered_of_its_epoch() -> None:
    before = after([part(0), part(1)])
    state = appended(before, marker(), 2, 2000)
    assert state == before._replace(transaction_offset=NO_TRANSACTION, last_append_ms=2000)
    assert advance(state, part(1), 3, 0) == before.batches[1]
    assert appended(state, part(2), 3).transaction_offset == 3


def test_a_marker_of_a_newer_epoch_forgets_the_older_ones_batches() -> None:
    state = appended(after([part(0), part(1)]), marker(epoch=4), 2, 77)
    assert state == Producer(PRODUCER_ID, 4, (), 77)
    for late in (part(1), batch(2), marker(epoch=3)):
        with pytest.raises(ProducerFenced):
            advance(state, late, 3, 0)
    with pytest.raises(OutOfOrderSequence):
        advance(state, part(2, epoch=4), 3, 0)
    assert appended(state, part(0, epoch=4), 3).transaction_offset == 3


def test_a_marker_makes_a_producer_known_that_was_not() -> None:
    state = appended(None, marker(epoch=2), 0, 5)
    assert state == Producer(PRODUCER_ID, 2, (), 5)
    assert not is_repeat(state, marker(epoch=2))


def test_an_open_transaction_takes_batches_of_its_kind_and_epoch_only() -> None:
    state = after([part(0)])
    for wrong in (batch(1), part(0, epoch=1), batch(0, epoch=1)):
        with pytest.raises(InvalidTransactionState):
            advance(state, wrong, 1, 0)
    assert advance(state, part(0), 1, 0) == state.batches[0]
    assert advance(state, batch(0), 1, 0) == state.batches[0]


def test_plain_and_transactional_batches_follow_each_other_between_transactions() -> None:
    state = appended(after([batch(0), part(1)]), marker(), 2)
    assert appended(state, batch(2), 3).transaction_offset == NO_TRANSACTION


@pytest.mark.parametrize(("producer_id", "epoch"), [(-1, 0), (7, -1)])
def test_a_marker_without_producer_or_epoch_is_refused(producer_id: int, epoch: int) -> None:
    with pytest.raises(InvalidRequest):
        advance(None, marker()._replace(producer_id=producer_id, producer_epoch=epoch), 0, 0)


def test_a_batch_of_a_transaction_has_a_producer() -> None:
    assert has_producer(batch(0))
    assert not has_producer(batch(0)._replace(producer_id=-1))
    for nobodys in (part(0), marker()):
        with pytest.raises(InvalidRequest):
            has_producer(nobodys._replace(producer_id=-1))


# --- forgetting ------------------------------------------------------------------------------


def silent_since(times_ms: Sequence[int]) -> dict[int, Producer]:
    return {n: Producer(n, 0, (RememberedBatch(0, 0, 0, 1, t),), t) for n, t in enumerate(times_ms)}


def test_a_producer_that_was_silent_too_long_is_forgotten() -> None:
    states = silent_since([0, 1, 2])
    assert expired_producers(states, -1) == []
    assert expired_producers(states, 1) == [0, 1]
    assert expired_producers({}, 0) == []


def test_beyond_the_bound_the_longest_silent_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_limits, "PRODUCERS_PER_PARTITION", 3)
    assert expired_producers(silent_since([10, 20, 30]), 0) == []
    assert expired_producers(silent_since([10, 20, 30, 40, 50]), 0) == [0, 1]


def test_beyond_the_bound_those_made_of_keys_are_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_limits, "PRODUCERS_PER_PARTITION", 3)
    key = FIRST_KEY_ID + 1
    states = silent_since([10, 20]) | {
        each: Producer(each, 0, (), 30, NO_TRANSACTION) for each in (key, key + 1)
    }
    assert expired_producers(states, 0) == [key]
    assert expired_producers(states | {2: states[0], 3: states[0]}, 0) == [key, key + 1, 0]
    assert expired_producers(states, 15) == [key, 0]
    monkeypatch.setattr(model_limits, "SILENT_PRODUCERS", 2)
    assert expired_producers(states, 0) == [0], "looking for keys costs no more than it may"


def test_a_producer_with_an_open_transaction_is_never_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = silent_since([0, 1, 2])
    states[0] = states[0]._replace(transaction_offset=5)
    assert expired_producers(states, 1) == [1]
    monkeypatch.setattr(model_limits, "PRODUCERS_PER_PARTITION", 2)
    assert expired_producers(states, 0) == [1]


# --- against a model -------------------------------------------------------------------------


class Model:
    """A log that remembers every number ever given, of one producer."""

    def __init__(self) -> None:
        self.epoch = -1
        self.batches: list[tuple[int, int, int]] = []  # first number, count, offset
        self.next_offset = 0

    def expect(self, one: Batch) -> int | type[QuackError]:
        """The offset of a batch new or repeated, or the error that it must meet."""
        numbers = (one.base_sequence, one.last_offset_delta + 1)
        if one.producer_epoch < self.epoch:
            return ProducerFenced
        if one.producer_epoch > self.epoch:
            if one.base_sequence != 0:
                return UnknownProducer if self.epoch < 0 else OutOfOrderSequence
            self.epoch, self.batches = one.producer_epoch, []
            return self._append(numbers)
        for first, count, offset in self.batches[-model_limits.REMEMBERED_BATCHES :]:
            if (first, count) == numbers:
                return offset
        last_first, last_count, _ = self.batches[-1]
        if one.base_sequence == last_first + last_count:
            return self._append(numbers)
        remembered = self.batches[-model_limits.REMEMBERED_BATCHES :]
        forgotten = len(self.batches) >= model_limits.REMEMBERED_BATCHES
        if forgotten and sum(numbers) <= remembered[0][0]:
            return RepeatForgotten
        return OutOfOrderSequence

    def _append(self, numbers: tuple[int, int]) -> int:
        offset = self.next_offset
        self.batches.append((*numbers, offset))
        self.next_offset += numbers[1]
        return offset


requests = st.lists(
    st.one_of(
        st.just("next"),
        st.builds(batch, st.integers(0, 12), st.integers(1, 3), st.integers(0, 2)),
    ),
    max_size=40,
)


@given(requests)
def test_whatever_is_sent_the_log_holds_each_number_once_and_in_order(
    sent: list[Batch | str],
) -> None:
    model, state = Model(), None
    for request in sent:
        one = next_batch(state) if isinstance(request, str) else request
        held = model.next_offset
        expected = model.expect(one)
        if not isinstance(expected, int):
            with pytest.raises(expected):
                advance(state, one, held, held)
            continue
        outcome = advance(state, one, held, held)
        if isinstance(outcome, RememberedBatch):
            assert expected < held and outcome.base_offset == expected
        else:
            assert expected == held
            retold = replay(state, PRODUCER_ID, outcome.epoch, outcome.batches[-1])
            assert retold == outcome
            state = outcome


def next_batch(state: Producer | None) -> Batch:
    if state is None:
        return batch(0)
    return batch(state.batches[-1].last_sequence + 1, epoch=state.epoch)
