"""How the broker shares partitions among members: each has one reader, and shares are even."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quackmq.groups.consumer.assignors import ASSIGNORS, DEFAULT_ASSIGNOR, Pool, by_range, uniform
from quackmq.model.topic import PartitionKey
from tests.kit import effort

NEWS, WEATHER = uuid.UUID(int=1), uuid.UUID(int=2)


def keys(topic_id: uuid.UUID, *partitions: int) -> list[PartitionKey]:
    return [PartitionKey(topic_id, partition) for partition in partitions]


def sizes(shares: Mapping[str, list[PartitionKey]]) -> dict[str, int]:
    return {member: len(share) for member, share in shares.items()}


def moved(before: Mapping[str, list[PartitionKey]], after: Mapping[str, list[PartitionKey]]) -> int:
    """Partitions that somebody had and another has now."""
    now = {key: member for member, share in after.items() for key in share}
    return sum(now[key] != member for member, share in before.items() for key in share)


# --- uniform --------------------------------------------------------------------------------------


def test_uniform_is_what_members_get_that_want_nothing_else() -> None:
    assert ASSIGNORS[DEFAULT_ASSIGNOR] is uniform


def test_shares_differ_by_one_at_the_most() -> None:
    shares = uniform([Pool(["a", "b", "c"], {NEWS: 5, WEATHER: 3})], {})
    assert sizes(shares) == {"a": 3, "b": 3, "c": 2}


def test_only_as_much_moves_as_a_newcomer_gets() -> None:
    before = uniform([Pool(["a", "b", "c"], {NEWS: 12})], {})
    after = uniform([Pool(["a", "b", "c", "d"], {NEWS: 12})], before)
    assert sizes(after) == dict.fromkeys("abcd", 3)
    assert moved(before, after) == 3


def test_only_what_one_leaves_behind_moves() -> None:
    before = uniform([Pool(["a", "b", "c", "d"], {NEWS: 12})], {})
    after = uniform([Pool(["a", "c", "d"], {NEWS: 12})], before)
    assert sizes(after) == dict.fromkeys("acd", 4)
    assert moved(before, after) == 3


def test_nothing_moves_when_nothing_changes() -> None:
    pools = [Pool(["a", "b"], {NEWS: 5}), Pool(["a"], {WEATHER: 2})]
    before = uniform(pools, {})
    assert moved(before, uniform(pools, before)) == 0


def test_members_without_partitions_are_more_than_there_are_partitions() -> None:
    shares = uniform([Pool(["a", "b", "c"], {NEWS: 1})], {})
    assert sorted(sizes(shares).values()) == [0, 0, 1]


def test_who_alone_reads_a_topic_gets_less_of_the_others() -> None:
    shares = uniform([Pool(["a", "b"], {NEWS: 4}), Pool(["a"], {WEATHER: 4})], {})
    assert sizes(shares) == {"a": 4, "b": 4}
    assert set(shares["b"]) == set(keys(NEWS, 0, 1, 2, 3))


def test_a_topic_that_was_made_anew_is_another_one() -> None:
    before = uniform([Pool(["a", "b"], {NEWS: 2})], {})
    after = uniform([Pool(["a", "b"], {WEATHER: 2})], before)
    assert sizes(after) == {"a": 1, "b": 1}


# --- range ----------------------------------------------------------------------------------------


def test_a_range_is_a_run_of_each_topic() -> None:
    shares = by_range([Pool(["a", "b", "c"], {NEWS: 5, WEATHER: 3})], {})
    assert shares == {
        "a": keys(NEWS, 0, 1) + keys(WEATHER, 0),
        "b": keys(NEWS, 2, 3) + keys(WEATHER, 1),
        "c": keys(NEWS, 4) + keys(WEATHER, 2),
    }


def test_the_same_partitions_of_topics_of_one_size_have_one_reader() -> None:
    shares = by_range([Pool(["a", "b"], {NEWS: 3}), Pool(["a", "b"], {WEATHER: 3})], {})
    for share in shares.values():
        assert {key.partition for key in share if key.topic_id == NEWS} == {
            key.partition for key in share if key.topic_id == WEATHER
        }


# --- both -----------------------------------------------------------------------------------------

MEMBERS = st.lists(st.sampled_from("abcdef"), min_size=1, unique=True)
POOLS = st.lists(st.tuples(MEMBERS, st.lists(st.integers(0, 7), min_size=1, max_size=3)))


def pools_of(drawn: list[tuple[list[str], list[int]]]) -> list[Pool]:
    numbers = iter(range(1, 100))
    return [
        Pool(members, {uuid.UUID(int=next(numbers)): partitions for partitions in counts})
        for members, counts in drawn
    ]


@pytest.mark.parametrize("name", ASSIGNORS)
@settings(max_examples=effort.of(100), deadline=None)
@given(drawn=POOLS, drawn_before=POOLS)
def test_every_partition_has_one_reader_who_reads_that_topic(
    name: str,
    drawn: list[tuple[list[str], list[int]]],
    drawn_before: list[tuple[list[str], list[int]]],
) -> None:
    pools = pools_of(drawn)
    before = ASSIGNORS[name](pools_of(drawn_before), {})
    shares = ASSIGNORS[name](pools, before)
    given_out = Counter(key for share in shares.values() for key in share)
    assert given_out == Counter(
        PartitionKey(topic_id, partition)
        for pool in pools
        for topic_id, partitions in pool.topics.items()
        for partition in range(partitions)
    )
    readers = {topic_id: pool.members for pool in pools for topic_id in pool.topics}
    assert all(member in readers[key.topic_id] for member, share in shares.items() for key in share)


@settings(max_examples=effort.of(100), deadline=None)
@given(members=MEMBERS, counts=st.lists(st.integers(0, 7), min_size=1), drawn_before=POOLS)
def test_where_all_read_the_same_shares_are_even_whatever_they_were_before(
    members: list[str], counts: list[int], drawn_before: list[tuple[list[str], list[int]]]
) -> None:
    before = by_range(pools_of(drawn_before), {})
    (pool,) = pools_of([(members, counts)])
    shares = sizes(uniform([pool], before))
    assert shares.keys() == set(members)
    assert max(shares.values()) - min(shares.values()) <= 1


@settings(max_examples=effort.of(100), deadline=None)
@given(drawn=POOLS)
def test_no_single_move_makes_shares_more_even(drawn: list[tuple[list[str], list[int]]]) -> None:
    pools = pools_of(drawn)
    shares = uniform(pools, {})
    loads = Counter(sizes(shares))
    readers = {topic_id: pool.members for pool in pools for topic_id in pool.topics}
    for member, share in shares.items():
        for key in share:
            assert loads[member] - min(loads[each] for each in readers[key.topic_id]) <= 1
