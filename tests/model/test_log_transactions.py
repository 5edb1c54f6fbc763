"""What is open, aborted and stable, one by one and by the definition; markers, byte by byte."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import pytest
from aiokafka.record.control_record import ABORT_MARKER, COMMIT_MARKER, ControlRecord
from aiokafka.record.default_records import DefaultRecordBatch
from hypothesis import given
from hypothesis import strategies as st

from quackmq.errors import CorruptBatch, LimitReached, UnsupportedBatch
from quackmq.model import limits as model_limits
from quackmq.model.log_transactions import (
    ABORTED_BYTES,
    AbortedTransaction,
    Marker,
    OpenTransactions,
    PartitionTransactions,
    TransactionBoundary,
    check_room,
    damaged_aborted,
    find_aborted,
    marker_batch,
    read_boundary,
    read_marker,
    trim_aborted,
)
from quackmq.model.topic import PartitionKey
from quackmq.records.batch import HEADER_BYTES, Batch, Record
from quackmq.records.codec import encode
from tests.kit.batches import resealed
from tests.kit.support import START_MS, batch_of
from tests.model.transaction_model import LogModel, Taken

NEWS, SPORT = (PartitionKey(uuid.UUID(int=1), partition) for partition in (0, 1))


def begin(producer_id: int, offset: int) -> TransactionBoundary:
    return TransactionBoundary(producer_id, 0, offset, START_MS, None)


def end(producer_id: int, offset: int, marker: Marker) -> TransactionBoundary:
    return TransactionBoundary(producer_id, 0, offset, START_MS, marker)


class Log:
    """What a store keeps of a partition's transactions."""

    def __init__(self) -> None:
        self.transactions = PartitionTransactions()
        self.entries = bytearray()

    def apply(self, step: TransactionBoundary) -> None:
        self.entries += self.transactions.apply(step)

    @property
    def open(self) -> dict[int, int]:
        return self.transactions.open

    def stable(self, next_offset: int) -> int:
        return self.transactions.stable(next_offset)

    def aborted_in(self, first: int, last: int) -> list[AbortedTransaction]:
        found, _ = find_aborted(self.entries, first, last)
        return sorted(found, key=lambda aborted: aborted.first_offset)

    @property
    def aborted(self) -> list[AbortedTransaction]:
        return self.aborted_in(0, 2**62)


def after(*steps: TransactionBoundary) -> Log:
    log = Log()
    for step in steps:
        log.apply(step)
    return log


# --- what is open, and what is stable --------------------------------------------------------


def test_a_log_without_transactions_is_stable_to_its_end() -> None:
    assert after().stable(17) == 17


def test_a_log_is_stable_up_to_the_first_transaction_that_is_open() -> None:
    steps = [begin(1, 10), begin(2, 11), end(1, 14, Marker.ABORT), end(2, 17, Marker.COMMIT)]
    stable = [after(*steps[:count]).stable(18) for count in range(len(steps) + 1)]
    assert stable == [18, 10, 10, 11, 18]


def test_a_transaction_begins_with_the_first_batch_of_its_producer() -> None:
    log = Log()
    log.apply(begin(1, 10))
    log.apply(begin(1, 13))
    assert log.stable(14) == 10
    log.apply(end(1, 14, Marker.ABORT))
    assert log.aborted_in(10, 10) == [AbortedTransaction(1, 10, 14)]


def test_one_producers_transactions_follow_each_other() -> None:
    steps = (begin(1, 0), end(1, 5, Marker.ABORT), begin(1, 6), end(1, 9, Marker.ABORT))
    assert after(*steps).aborted == [AbortedTransaction(1, 0, 5), AbortedTransaction(1, 6, 9)]
    assert after(*steps[:3]).open == {1: 6}


def test_a_marker_where_nothing_is_open_ends_nothing() -> None:
    transactions = after(begin(1, 0), end(2, 1, Marker.ABORT))
    assert (transactions.open, transactions.aborted) == ({1: 0}, [])


# --- what was aborted ------------------------------------------------------------------------


def test_an_aborted_transaction_touches_every_offset_from_its_first_to_its_marker() -> None:
    transactions = after(begin(1, 10), end(1, 14, Marker.ABORT))
    for first, last in ((10, 10), (14, 14), (0, 10), (12, 13), (14, 99), (0, 99)):
        assert transactions.aborted_in(first, last) == [AbortedTransaction(1, 10, 14)]
    for first, last in ((0, 9), (15, 99)):
        assert transactions.aborted_in(first, last) == []


def test_a_committed_one_is_not_among_the_aborted() -> None:
    assert after(begin(1, 0), end(1, 1, Marker.COMMIT)).aborted_in(0, 9) == []


def test_one_that_began_early_and_ended_late_is_found_behind_those_in_between() -> None:
    transactions = after(
        begin(1, 0),
        begin(2, 1),
        end(2, 2, Marker.ABORT),
        begin(2, 3),
        end(2, 4, Marker.ABORT),
        end(1, 5, Marker.ABORT),
    )
    assert transactions.aborted_in(0, 1) == [
        AbortedTransaction(1, 0, 5),
        AbortedTransaction(2, 1, 2),
    ]
    assert transactions.aborted_in(3, 3) == [
        AbortedTransaction(1, 0, 5),
        AbortedTransaction(2, 3, 4),
    ]


def test_what_was_trimmed_is_forgotten_and_what_is_left_in_part_is_not() -> None:
    transactions = after(
        begin(1, 0), end(1, 4, Marker.ABORT), begin(1, 5), end(1, 9, Marker.ABORT), begin(2, 10)
    )
    trim_aborted(transactions.entries, 4)
    assert len(transactions.aborted) == 2
    trim_aborted(transactions.entries, 7)
    assert transactions.aborted == [AbortedTransaction(1, 5, 9)]
    assert transactions.aborted_in(7, 7) == [AbortedTransaction(1, 5, 9)]
    assert transactions.open == {2: 10}


def test_one_that_began_before_the_first_offset_is_still_open() -> None:
    transactions = after(begin(1, 0), begin(2, 5))
    trim_aborted(transactions.entries, 5)
    transactions.apply(end(1, 6, Marker.ABORT))
    assert transactions.aborted_in(5, 5) == [AbortedTransaction(1, 0, 6)]


def test_a_search_knows_when_nothing_more_can_be_found() -> None:
    log = after(
        *(begin(1, 0), begin(2, 1), end(2, 2, Marker.ABORT)),  # 1 is still open: stable at 0
        *(begin(2, 3), end(1, 4, Marker.ABORT)),  # 2 is open again: stable at 3
    )
    found, is_last = find_aborted(log.entries[:ABORTED_BYTES], 0, 2)
    assert (found, is_last) == ([AbortedTransaction(2, 1, 2)], False)
    found, is_last = find_aborted(log.entries, 0, 2)
    assert (found, is_last) == ([AbortedTransaction(2, 1, 2), AbortedTransaction(1, 0, 4)], True)
    assert find_aborted(log.entries, 0, 3)[1] is False
    assert find_aborted(b"", 0, 3) == ([], False)


def test_an_entry_that_is_not_as_it_was_written_is_found() -> None:
    log = after(begin(1, 0), end(1, 4, Marker.ABORT), begin(1, 5), end(1, 9, Marker.ABORT))
    assert list(damaged_aborted(log.entries)) == []
    for position in range(len(log.entries)):
        flipped = bytearray(log.entries)
        flipped[position] ^= 4
        assert list(damaged_aborted(flipped)) == [position // ABORTED_BYTES]


# --- bounds ----------------------------------------------------------------------------------


def test_a_partition_has_room_for_so_many_open_ones_and_no_more() -> None:
    check_room(NEWS, model_limits.OPEN_TRANSACTIONS - 1)
    with pytest.raises(LimitReached, match="open transactions"):
        check_room(NEWS, model_limits.OPEN_TRANSACTIONS)


# --- over all partitions ---------------------------------------------------------------------


def test_what_is_open_is_found_by_producer_and_for_all() -> None:
    open_ = OpenTransactions()
    open_.apply(NEWS, begin(1, 10))
    open_.apply(SPORT, begin(1, 20))
    open_.apply(SPORT, begin(2, 21))
    assert open_.find(None) == {NEWS: {1: 10}, SPORT: {1: 20, 2: 21}}
    assert open_.find(1) == {NEWS: {1: 10}, SPORT: {1: 20}}
    assert open_.find(3) == {}
    assert (open_.count(SPORT), open_.count(NEWS)) == (2, 1)


def test_what_has_ended_or_is_gone_is_open_no_more() -> None:
    open_ = OpenTransactions()
    for key in (NEWS, SPORT):
        open_.apply(key, begin(1, 10))
        open_.apply(key, begin(2, 11))
    open_.apply(NEWS, end(1, 12, Marker.COMMIT))
    open_.apply(NEWS, end(1, 13, Marker.COMMIT))
    assert open_.find(1) == {SPORT: {1: 10}}
    open_.forget(SPORT)
    open_.forget(SPORT)
    assert open_.find(None) == {NEWS: {2: 11}}
    assert open_.find(1) == {}


# --- against the definition ------------------------------------------------------------------

PRODUCERS = 3


@st.composite
def logs(draw: st.DrawFn) -> list[Taken]:
    """Any log that the rules of producers allow: plain batches of nobody, transactional ones,
    and markers."""
    taken: list[Taken] = []
    offset = 0
    for _ in range(draw(st.integers(0, 40))):
        producer_id = draw(st.integers(-1, PRODUCERS - 1))
        marker = draw(st.sampled_from([None, None, *Marker])) if producer_id >= 0 else None
        count = draw(st.integers(1, 3)) if marker is None else 1
        transactional = producer_id >= 0 and marker is None
        taken.append(Taken(offset, offset + count, producer_id, transactional, marker))
        offset += count
    return taken


def log_of(taken: Sequence[Taken]) -> Log:
    log = Log()
    for each in taken:
        if each.marker is not None:
            log.apply(end(each.producer_id, each.base_offset, each.marker))
        elif each.transactional and each.producer_id not in log.open:
            log.apply(begin(each.producer_id, each.base_offset))
    return log


@given(logs(), st.data())
def test_a_log_says_of_its_transactions_what_their_definition_says(
    taken: list[Taken], data: st.DataObject
) -> None:
    model = LogModel(taken)
    log = log_of(taken)
    assert log.open == model.open
    assert list(log.open.values()) == sorted(model.open.values())
    assert log.stable(model.next_offset) == model.stable
    again = PartitionTransactions({key: log.open[key] for key in sorted(log.open)})
    assert list(again.open.items()) == list(log.open.items())
    model.first_offset = data.draw(st.integers(0, model.next_offset))
    trim_aborted(log.entries, model.first_offset)
    assert log.aborted == model.aborted
    for first in range(model.first_offset, model.next_offset):
        for last in range(first, min(first + 5, model.next_offset)):
            assert tuple(log.aborted_in(first, last)) == model.aborted_in(first, last)


# --- markers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("marker", "theirs"), [(0, ABORT_MARKER), (1, COMMIT_MARKER)])
def test_a_marker_is_what_clients_take_for_one(marker: int, theirs: ControlRecord) -> None:
    data = marker_batch(1234, 5, Marker(marker), START_MS)
    batch = Batch.parse(data)
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == (1234, 5, -1)
    assert batch.is_control and batch.is_transactional
    assert (batch.record_count, batch.max_timestamp) == (1, START_MS)
    opened = DefaultRecordBatch(bytearray(data))
    assert opened.is_control_batch
    (record,) = opened
    assert ControlRecord.parse(record.key) == theirs
    assert record.value == bytes(6)
    assert read_marker(batch) is Marker(marker)


def test_a_marker_is_what_the_codec_would_write() -> None:
    record = Record(0, START_MS, b"\0\0\0\1", bytes(6))
    encoded = encode([record], producer_id=9, producer_epoch=3, transactional=True, control=True)
    assert marker_batch(9, 3, Marker.COMMIT, START_MS) == encoded


def test_the_step_of_a_marker_says_how_it_ends_and_that_of_a_batch_that_it_begins() -> None:
    marker = Batch.parse(marker_batch(7, 2, Marker.ABORT, START_MS))
    assert read_boundary(marker, 30, 99) == TransactionBoundary(7, 2, 30, 99, Marker.ABORT)
    batch = batch_of(b"", producer_id=7, producer_epoch=2, base_sequence=0, transactional=True)
    assert read_boundary(batch, 30, 99) == TransactionBoundary(7, 2, 30, 99, None)


def test_a_batch_that_is_no_marker_is_not_read_as_one() -> None:
    with pytest.raises(UnsupportedBatch):
        read_marker(batch_of(b"value"))


@pytest.mark.parametrize("kind", [2, 5, -1])
def test_a_control_record_of_another_kind_ends_no_transaction(kind: int) -> None:
    data = bytearray(marker_batch(7, 2, Marker.ABORT, START_MS))
    data[HEADER_BYTES + 7 : HEADER_BYTES + 9] = kind.to_bytes(2, signed=True)
    with pytest.raises(UnsupportedBatch):
        read_marker(Batch.parse(resealed(data)))


@given(st.binary(max_size=40))
def test_whatever_a_control_batch_holds_it_is_a_marker_or_refused(content: bytes) -> None:
    data = marker_batch(7, 2, Marker.ABORT, START_MS)[:HEADER_BYTES] + content
    with pytest.raises((CorruptBatch, UnsupportedBatch)):
        read_marker(Batch.parse(resealed(data)))
