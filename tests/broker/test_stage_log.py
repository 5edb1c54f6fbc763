"""What stages and transactional ids are kept as: every value comes back, and damage is named."""

from __future__ import annotations

import json
import uuid

import pytest

from quackmq.broker.staging.stage import CommittedStage, decode_committed, encode_committed
from quackmq.broker.staging.stage_log import (
    Header,
    StagedBatch,
    decode_header,
    encode_header,
    extend_digest,
    make_header,
    topic_name,
    with_transaction,
    without_producer,
)
from quackmq.broker.transactions.state import (
    PendingOffset,
    decode_id_state,
    decode_offsets,
    encode_id_state,
    encode_offsets,
    offsets_key,
    parse_offsets_key,
    state_key,
    transactional_id_in,
)
from quackmq.errors import DamagedStore
from quackmq.model.topic import PartitionKey, check_topic_name
from quackmq.model.transactional_id import TransactionalIdState, TransactionState
from quackmq.records import codec
from quackmq.records.batch import Batch, Record
from tests.kit.support import START_MS, batch_of
from tests.kit.tables import each

KEY = PartitionKey(uuid.UUID(int=7), 3)


def test_a_header_comes_back_as_it_was() -> None:
    staged = [StagedBatch(KEY, batch_of(b"a", b"b")), StagedBatch(KEY, batch_of(b"c"))]
    header = make_header("ein Schlüssel/1", 'part "2"', 4, staged)
    batch = encode_header(header, START_MS)
    assert decode_header(Batch.parse(batch.view)) == header
    assert batch.record_count == 1
    assert batch.max_timestamp == START_MS
    assert header.records == 3
    assert header.size == sum(each.batch.size for each in staged)


@each(
    "value",
    [
        b"",
        b"[]",
        b"{}",
        b"no json",
        b'{"key": "k", "part": "p", "number": 0, "batches": [[1, 2]]}',
        b'{"key": "k", "part": "p", "number": 0, "batches": [["x", 0, 1, 1, 1]]}',
        b'{"key": "k", "part": "p", "batches": []}',
    ],
)
def test_a_header_that_makes_no_sense_is_damage(value: bytes) -> None:
    batch = Batch.peek(codec.encode([Record(0, START_MS, None, value)]))
    with pytest.raises(DamagedStore):
        decode_header(batch)


def test_a_digest_tells_batches_their_order_and_their_places_apart() -> None:
    def digest(*staged: StagedBatch) -> str:
        return extend_digest("", make_header("k", "p", 0, staged).entries)

    a, b = StagedBatch(KEY, batch_of(b"a")), StagedBatch(KEY, batch_of(b"b"))
    elsewhere = a._replace(key=KEY._replace(partition=0))
    assert len({digest(a), digest(b), digest(a, b), digest(b, a), digest(elsewhere)}) == 5
    assert digest(a) == digest(StagedBatch(KEY, batch_of(b"a")))
    one, two = Header("k", "p", 0, ()), make_header("k", "p", 1, [a])
    assert extend_digest(extend_digest("", one.entries), two.entries) != extend_digest(
        "", two.entries
    )


@pytest.mark.parametrize("key", ["a", "a/b", "ü" * 100, " ", "."])
def test_every_key_has_a_topics_name(key: str) -> None:
    check_topic_name(topic_name(key))
    assert topic_name(key) != topic_name(key + "x")


def test_a_batch_is_the_same_but_for_its_producer() -> None:
    batch = batch_of(b"a", b"b", producer_id=5, producer_epoch=2, base_sequence=70)
    inside = Batch.parse(with_transaction(batch, 9, 3, 11).view)
    assert inside.is_transactional
    assert (inside.producer_id, inside.producer_epoch, inside.base_sequence) == (9, 3, 11)
    assert codec.decode(inside) == codec.decode(batch)
    nobodys = Batch.parse(without_producer(batch).view)
    assert (nobodys.producer_id, nobodys.producer_epoch, nobodys.base_sequence) == (-1, -1, -1)
    assert codec.decode(nobodys) == codec.decode(batch)
    assert without_producer(nobodys) is nobodys


def test_a_committed_stage_comes_back_as_it_was() -> None:
    committed = CommittedStage("Inhalt ü", 7, START_MS)
    assert decode_committed(encode_committed(committed)) == committed


@pytest.mark.parametrize("value", [b"", b"[]", b"{}", b'{"contents": 1}', b"\xff"])
def test_a_record_that_makes_no_sense_is_damage(value: bytes) -> None:
    for decode in (decode_committed, decode_id_state):
        with pytest.raises(DamagedStore):
            decode(value)


def test_a_standing_comes_back_as_it_was() -> None:
    for state in TransactionState:
        standing = TransactionalIdState(1, 2, state, 3, 4, 5, 6)
        if state is TransactionState.ONGOING:
            with pytest.raises(DamagedStore):  # never kept
                decode_id_state(encode_id_state(standing))
        else:
            assert decode_id_state(encode_id_state(standing)) == standing
    assert transactional_id_in(state_key("a/b")) == "a/b"


def test_pending_offsets_come_back_as_they_were() -> None:
    offsets = {
        KEY: PendingOffset(2**62, "noted ü", 7),
        KEY._replace(partition=0): PendingOffset(0, ""),
        PartitionKey(uuid.UUID(int=8), 0): PendingOffset(1, '"'),
    }
    assert decode_offsets(encode_offsets(offsets)) == offsets


def test_a_pending_offset_of_an_older_directory_has_no_leader_epoch() -> None:
    value = json.dumps({str(KEY.topic_id): {str(KEY.partition): [5, "note"]}}).encode()
    assert decode_offsets(value) == {KEY: PendingOffset(5, "note", -1)}


@pytest.mark.parametrize(
    "value", [b"x", b"[]", b'{"x": {}}x', b'{"x": {"0": [1, ""]}}', b'{"%s": {"0": [1]}}']
)
def test_pending_offsets_that_make_no_sense_are_damage(value: bytes) -> None:
    with pytest.raises(DamagedStore):
        decode_offsets(value)


@pytest.mark.parametrize("wrong", [[1, 2], ["1", ""], 7, [1, "", "3"], [1, "", 3, 4]])
def test_a_pending_offset_that_makes_no_sense_is_damage(wrong: object) -> None:
    value = json.dumps({str(uuid.UUID(int=7)): {"0": wrong}}).encode()
    with pytest.raises(DamagedStore):
        decode_offsets(value)


@pytest.mark.parametrize("names", [("a", "b"), ("a/b", "c/d"), ("3/x", "/"), ("ü", "")])
def test_a_key_of_offsets_names_id_and_group(names: tuple[str, str]) -> None:
    assert parse_offsets_key(offsets_key(*names)) == names


@pytest.mark.parametrize("key", ["transaction-offsets/", "transaction-offsets/9/a/b", "x/1/ab"])
def test_a_key_of_offsets_that_makes_no_sense_is_damage(key: str) -> None:
    with pytest.raises(DamagedStore):
        parse_offsets_key(key)
