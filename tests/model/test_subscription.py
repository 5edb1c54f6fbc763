"""Subscriptions as values: when cursors move, whose turn it is, what ids say."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quackmq import limits
from quackmq.errors import DamagedStore, InvalidMessageId, InvalidRequest
from quackmq.model.subscription import (
    Losses,
    Offset,
    OffsetRange,
    Progress,
    RecordPosition,
    Start,
    StoredSubscription,
    Time,
    acknowledge,
    add_partitions,
    advance_past,
    can_acknowledge,
    check_name,
    decode_subscription,
    encode_subscription,
    mark_sent,
    message_id,
    move_cursors,
    parse_position,
    parse_state_key,
    partitions_in_order,
    state_key,
)
from tests.kit.tables import each

TOPIC_ID = uuid.UUID("12345678-1234-5678-1234-567812345678")
PLACES = st.builds(RecordPosition, st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1))


# --- losses -------------------------------------------------------------------------------------


def test_losses_that_touch_are_one_range() -> None:
    losses = Losses()
    for first in (3, 4, 5):
        losses.add(first, first + 1)
    losses.add(9, 9)
    losses.add(11, 13)
    assert losses.ranges() == (OffsetRange(3, 6), OffsetRange(11, 13))
    assert losses.count == 5


def test_ranges_of_losses_are_bounded_and_their_count_is_not() -> None:
    losses = Losses()
    for number in range(limits.LOST_RANGES + 3):
        losses.add(2 * number, 2 * number + 1)
    assert len(losses.ranges()) == limits.LOST_RANGES
    assert losses.count == limits.LOST_RANGES + 3


# --- cursors ------------------------------------------------------------------------------------


def test_naming_the_outstanding_message_moves_its_cursor_and_the_turn() -> None:
    progress = mark_sent(Progress((5, 8)), RecordPosition(0, 5))
    assert can_acknowledge(progress, RecordPosition(0, 5))
    assert acknowledge(progress, RecordPosition(0, 5)) == Progress((6, 8), next_partition=1)


@pytest.mark.parametrize(
    "place",
    [RecordPosition(0, 4), RecordPosition(0, 6), RecordPosition(1, 8), RecordPosition(2, 0)],
)
def test_naming_anything_else_moves_nothing(place: RecordPosition) -> None:
    assert not can_acknowledge(mark_sent(Progress((5, 8)), RecordPosition(0, 5)), place)


def test_nothing_can_be_named_before_something_was_sent() -> None:
    assert not can_acknowledge(Progress((5,)), RecordPosition(0, 5))


def test_after_a_restart_the_head_of_any_partition_can_be_named() -> None:
    progress = Progress((5, 8), knows_outstanding=False)
    assert can_acknowledge(progress, RecordPosition(0, 5))
    assert can_acknowledge(progress, RecordPosition(1, 8))
    assert can_acknowledge(progress, RecordPosition(1, 20)), "it is the head if all between is gone"
    assert not can_acknowledge(progress, RecordPosition(1, 7))
    assert not can_acknowledge(progress, RecordPosition(2, 0))
    assert not can_acknowledge(mark_sent(progress, RecordPosition(0, 5)), RecordPosition(1, 8))


def test_a_message_behind_a_gap_takes_the_cursor_over_the_gap() -> None:
    progress = mark_sent(Progress((5,)), RecordPosition(0, 20))
    assert acknowledge(progress, RecordPosition(0, 20)).cursors == (21,)


def test_a_commit_moves_forward_only() -> None:
    assert advance_past(Progress((5, 8)), RecordPosition(1, 20)).cursors == (5, 21)
    assert advance_past(Progress((5, 8)), RecordPosition(1, 7)) == Progress((5, 8))


def test_a_commit_far_behind_the_cursor_moves_nothing() -> None:
    progress = Progress((5, 8), RecordPosition(0, 5))
    assert advance_past(progress, RecordPosition(0, 2)) == progress


def test_a_commit_past_the_outstanding_message_settles_it() -> None:
    progress = mark_sent(Progress((5, 8)), RecordPosition(0, 5))
    assert advance_past(progress, RecordPosition(0, 5)).outstanding is None
    assert advance_past(progress, RecordPosition(1, 9)).outstanding == RecordPosition(0, 5)


def test_a_commit_before_the_outstanding_message_does_not_settle_it() -> None:
    """What lies between may be gone: then a head is outstanding that does not lie at the cursor."""
    progress = mark_sent(Progress((5, 8)), RecordPosition(0, 7))
    assert advance_past(progress, RecordPosition(0, 5)) == progress._replace(cursors=(6, 8))
    assert advance_past(progress, RecordPosition(0, 6)) == progress._replace(cursors=(7, 8))
    assert advance_past(progress, RecordPosition(0, 7)) == Progress((8, 8), next_partition=1)


def test_after_a_move_nothing_that_was_sent_before_counts() -> None:
    progress = move_cursors(mark_sent(Progress((5, 8)), RecordPosition(0, 5)), (0, 0))
    assert progress.cursors == (0, 0)
    assert not can_acknowledge(progress, RecordPosition(0, 0))
    assert not can_acknowledge(progress, RecordPosition(0, 5))


def test_new_partitions_are_wanted_from_their_beginning() -> None:
    assert add_partitions(Progress((5,), next_partition=0), 3) == Progress((5, 0, 0))
    assert add_partitions(Progress((5, 6)), 1) == Progress((5, 6))


def test_partitions_take_turns_but_the_outstanding_one_comes_first() -> None:
    progress = Progress((0, 0, 0), next_partition=1)
    assert partitions_in_order(progress) == [1, 2, 0]
    assert partitions_in_order(mark_sent(progress, RecordPosition(2, 0))) == [2, 0, 1]
    assert (
        acknowledge(mark_sent(progress, RecordPosition(2, 0)), RecordPosition(2, 0)).next_partition
        == 0
    )


# --- ids ----------------------------------------------------------------------------------------


@given(PLACES)
def test_an_id_comes_back_as_the_place_it_was_made_of(place: RecordPosition) -> None:
    token = message_id(TOPIC_ID, place)
    assert token.isascii() and not any(char in token for char in " /+=%&?")
    assert parse_position(token, TOPIC_ID) == place


@given(PLACES)
def test_an_id_of_another_topic_is_refused(place: RecordPosition) -> None:
    with pytest.raises(InvalidMessageId, match="another topic"):
        parse_position(message_id(uuid.uuid4(), place), TOPIC_ID)


@given(st.text() | st.text("AQEjRWeJ-_", min_size=39, max_size=39))
def test_nonsense_is_no_id(token: str) -> None:
    with pytest.raises(InvalidMessageId):
        parse_position(token, TOPIC_ID)


def test_a_second_spelling_of_an_id_is_none() -> None:
    token = message_id(TOPIC_ID, RecordPosition(0, 0))
    twin = token[:-1] + chr(ord(token[-1]) + 1)  # the last bits, which stand for nothing
    assert len({token, twin}) == 2
    with pytest.raises(InvalidMessageId):
        parse_position(twin, TOPIC_ID)


def test_an_id_with_a_negative_offset_is_none() -> None:
    with pytest.raises(InvalidMessageId):
        parse_position(message_id(TOPIC_ID, RecordPosition(0, -1)), TOPIC_ID)


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "duck-7", "ä/ö", "x" * limits.NAME_BYTES])
def test_a_name_is_a_printable_word(name: str) -> None:
    check_name(name)


@each(
    "name", ["", "two words", "tab\t", "nul\0", "line\n", "\u00a0", "\u2028", "\ud800", "ä" * 128]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        check_name(name)


# --- as kept in the store -----------------------------------------------------------------------


@pytest.mark.parametrize("start", ["beginning", "end", Offset(7), Time(1_700_000_000_000)])
def test_what_is_kept_comes_back(start: Start) -> None:
    kept = StoredSubscription("last_id", start, 42)
    assert decode_subscription(encode_subscription(kept)) == kept


def test_a_key_names_topic_and_subscriber_also_with_slashes() -> None:
    assert parse_state_key(state_key(TOPIC_ID, "a/b")) == (TOPIC_ID, "a/b")


@each(
    "value",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"mode": "psychic", "start": "end", "created_ms": 0}',
        b'{"mode": "last_id", "start": "middle", "created_ms": 0}',
        b'{"mode": "last_id", "start": {"offset": "x"}, "created_ms": 0}',
        b'{"mode": "last_id", "start": "end"}',
    ],
)
def test_what_was_never_kept_is_damage(value: bytes) -> None:
    with pytest.raises(DamagedStore):
        decode_subscription(value)


def test_a_key_that_was_never_given_is_damage() -> None:
    with pytest.raises(DamagedStore):
        parse_state_key("subscription/nobody/x")
