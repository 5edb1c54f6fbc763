"""Where a query is, as Spark's checkpoint has it."""

from __future__ import annotations

import json

import pytest

from quackmq.errors import InvalidRequest
from quackmq.spark.source.offsets import Position, TopicPosition, decode, encode, find_batch_start


def position(at: int, *, initial: bool = False) -> Position:
    topics = {"geese": TopicPosition("g", {10: 1, 9: at}), "ducks": TopicPosition("d", {0: at})}
    return Position("pond", "flock", topics, initial)


def test_a_position_is_the_same_text_whatever_the_order_it_was_made_in() -> None:
    one = position(5)
    other = Position("pond", "flock", dict(reversed(list(one.topics.items()))))
    assert json.dumps(encode(one)) == json.dumps(encode(other))
    text = json.dumps(encode(one))
    assert json.dumps(json.loads(text), sort_keys=False) == text
    assert text.index('"9"') < text.index('"10"')


@pytest.mark.parametrize("initial", [True, False])
def test_a_position_comes_back_as_it_was(initial: bool) -> None:
    one = position(5, initial=initial)
    assert decode(json.loads(json.dumps(encode(one)))) == one
    moved = one.moved(position(7).topics, "pond")
    assert decode(json.loads(json.dumps(encode(moved)))) == moved


def test_the_first_batch_begins_where_it_was_first_planned_also_if_latest_has_moved() -> None:
    begun = position(5, initial=True)
    end = begun.moved(position(9).topics, "pond")
    again = position(8, initial=True)
    assert find_batch_start(again, end).topics == begun.topics
    later = end.moved(position(12).topics, "pond")
    assert later.begin is None
    assert find_batch_start(end, later).topics == end.topics


@pytest.mark.parametrize(
    "value", [{}, {"index": 3}, {"cluster": "c", "group": "g", "topics": 3}, 7]
)
def test_the_checkpoint_of_another_source_is_told_from_ours(value: object) -> None:
    with pytest.raises(InvalidRequest, match="no position of a QuackMQ stream"):
        decode(value)
