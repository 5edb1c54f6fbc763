"""The catalog by itself: its changes as bytes, its snapshots, and what it refuses to apply.

What it refuses of requests is part of the store contract and tested there, over every store.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quackmq import limits
from quackmq.errors import (
    DamagedStore,
    IllegalTopicName,
    InvalidRequest,
    LimitReached,
    StateChanged,
)
from quackmq.model.partitioning import Partitioner
from quackmq.model.policy import Policy, WhenFull
from quackmq.model.topic import (
    Cursor,
    CursorKey,
    PartitionKey,
    State,
    StatePut,
    Topic,
    check_topic_name,
)
from quackmq.stores import limits as stores_limits
from quackmq.stores.catalog import (
    Catalog,
    Change,
    CursorSet,
    StateSet,
    TopicDeleted,
    TopicPut,
    decode_change,
    encode_change,
)
from tests.kit.tables import each

NEWS = Topic(uuid.UUID(int=1), "news", 3, Policy(), 17)
SPORT = Topic(uuid.UUID(int=2), "sport", 1, Policy(live_entries=5), 18)

counts = st.integers(0, 2**63 - 1)
texts = st.text(max_size=20)
policies = st.builds(
    Policy,
    live_for_ms=st.none() | st.integers(1, 2**53),
    live_entries=st.none() | st.integers(1, 2**53),
    when_full=st.sampled_from(WhenFull),
    keep_for_ms=st.none() | st.integers(1, 2**53),
    keep_until_consumed=st.booleans(),
    ephemeral=st.booleans(),
)
topics = st.builds(Topic, st.uuids(), texts, st.integers(1, 100), policies, counts)
cursors = st.builds(
    Cursor,
    st.builds(CursorKey, texts, st.uuids(), st.integers(0, 99)),
    st.none() | counts,
    texts,
    counts,
    st.integers(-(2**31), 2**31 - 1),
)
changes = st.one_of(
    st.builds(TopicPut, topics),
    st.builds(TopicDeleted, st.uuids()),
    st.builds(CursorSet, cursors),
    st.builds(StateSet, texts, st.builds(State, st.none() | st.binary(max_size=50), counts)),
)


def catalog_of(*made: Change) -> Catalog:
    catalog = Catalog()
    catalog.apply_all(made)
    return catalog


def cursor(name: str, topic: Topic, partition: int, offset: int | None = 5) -> Cursor:
    return Cursor(CursorKey(name, topic.id, partition), offset, "note", 99)


# --- bytes -----------------------------------------------------------------------------------


@given(changes)
def test_a_change_comes_back_from_its_bytes(change: Change) -> None:
    assert decode_change(encode_change(change)) == change


def test_a_change_is_compact_json() -> None:
    topic = replace(NEWS, policy=Policy(live_for_ms=5, when_full=WhenFull.WAIT, ephemeral=True))
    assert encode_change(TopicPut(topic)) == (
        b'["topic","00000000000000000000000000000001","news",3,'
        b'{"live_for_ms":5,"when_full":"wait","ephemeral":true,"partitioner":"murmur2"},17]'
    )
    assert encode_change(StateSet("key", State(b"\xff", 2))) == b'["state","key","/w==",2]'


@pytest.mark.parametrize(
    ("partitions", "partitioner"), [(1, Partitioner.MURMUR2), (3, Partitioner.LEGACY)]
)
def test_a_topic_written_before_there_were_partitioners_keeps_the_rule_of_that_time(
    partitions: int, partitioner: Partitioner
) -> None:
    row = ["topic", NEWS.id.hex, "news", partitions, {"keep_bytes": 5}, 17]
    catalog = Catalog.from_snapshot([row])
    assert catalog.topics["news"].policy == Policy(keep_bytes=5, partitioner=partitioner)
    assert Catalog.from_snapshot(catalog.snapshot()) == catalog, "and it is written down then"


@pytest.mark.parametrize(
    ("stored", "after_live_ms"),
    [
        ({"archive_after_ms": None, "archive_bytes": None}, None),
        ({"archive_after_ms": None}, Policy().archive_after_live_ms),
        ({"archive_bytes": None}, Policy().archive_after_live_ms),
    ],
)
def test_a_topic_that_an_earlier_version_never_archived_is_still_never_archived(
    stored: dict[str, Any], after_live_ms: int | None
) -> None:
    row = ["topic", NEWS.id.hex, "news", 1, {**stored, "live_for_ms": 5}, 17]
    catalog = Catalog.from_snapshot([row])
    policy = catalog.topics["news"].policy
    assert policy == Policy(**stored, live_for_ms=5, archive_after_live_ms=after_live_ms)
    assert policy.archives_entries is (after_live_ms is not None)
    assert Catalog.from_snapshot(catalog.snapshot()) == catalog


def test_a_new_topic_keeps_its_default_bound_after_live() -> None:
    policy = Policy(live_for_ms=5, archive_after_ms=None, archive_bytes=None)
    change = TopicPut(replace(NEWS, policy=policy))
    assert decode_change(encode_change(change)) == change
    assert policy.archives_entries


NONSENSE: list[Any] = [
    None,
    [],
    ["unknown"],
    ["topic", "no id", "news", 1, {}, 0],
    ["topic", NEWS.id.hex, "news", 1, {"unknown": 1}, 0],
    ["topic", NEWS.id.hex, "news", 1, {"live_for_ms": "5"}, 0],
    ["topic", NEWS.id.hex, "news", 1, {"live_for_ms": True}, 0],
    ["topic", NEWS.id.hex, "news", 1, {"ephemeral": 1}, 0],
    ["topic", NEWS.id.hex, "news", 1, {"when_full": "explode"}, 0],
    ["topic", NEWS.id.hex, "news", 1, {"when_full": []}, 0],
    ["topic", NEWS.id.hex, "news", 1, {"partitioner": "md5"}, 0],
    ["topic", NEWS.id.hex, "news", 1, {"partitioner": None}, 0],
    ["topic-deleted", 5],
    ["cursor", "name", NEWS.id.hex, 0, 5, "note"],
    ["cursor", "name", NEWS.id.hex, 0, "5", "note", 0],
    ["cursor", "name", NEWS.id.hex, 0, 5, "note", 0, "3"],
    ["cursor", "name", NEWS.id.hex, 0, 5, "note", 0, 3, 4],
    ["state", "key", "not base64!", 1],
    ["state", "key", "/w==", 1.5],
]


@each("row", NONSENSE)
def test_nonsense_is_damage(row: Any) -> None:
    with pytest.raises(DamagedStore):
        decode_change(orjson.dumps(row))
    with pytest.raises(DamagedStore):
        Catalog.from_snapshot([row])


def test_a_cursor_of_an_older_directory_has_no_leader_epoch() -> None:
    row = ["cursor", "reader", NEWS.id.hex, 2, 5, "note", 99]
    assert decode_change(orjson.dumps(row)) == CursorSet(cursor("reader", NEWS, 2))
    assert cursor("reader", NEWS, 2).leader_epoch == -1
    assert orjson.loads(encode_change(CursorSet(cursor("reader", NEWS, 2)))) == row


@given(st.binary(max_size=60))
def test_any_bytes_are_a_change_or_damage(data: bytes) -> None:
    with pytest.raises(DamagedStore):
        decode_change(data)


@pytest.mark.parametrize("snapshot", [None, {}, "text", 5], ids=str)
def test_a_snapshot_that_is_no_list_is_damage(snapshot: object) -> None:
    with pytest.raises(DamagedStore):
        Catalog.from_snapshot(snapshot)


# --- snapshots -------------------------------------------------------------------------------


def test_a_catalog_comes_back_from_its_snapshot_as_json() -> None:
    catalog = catalog_of(
        TopicPut(NEWS),
        TopicPut(SPORT),
        CursorSet(cursor("reader", NEWS, 2)),
        CursorSet(cursor("reader", SPORT, 0)),
        StateSet("key", State(b"\x00value", 4)),
    )
    again = Catalog.from_snapshot(orjson.loads(orjson.dumps(catalog.snapshot())))
    assert again == catalog
    assert again.topics == {"news": NEWS, "sport": SPORT}
    assert again.cursors("reader") == catalog.cursors("reader")
    assert again.state("key") == State(b"\x00value", 4)


def test_what_is_gone_is_not_in_the_snapshot() -> None:
    catalog = catalog_of(
        TopicPut(NEWS),
        TopicPut(SPORT),
        CursorSet(cursor("reader", NEWS, 0)),
        CursorSet(cursor("reader", SPORT, 0)),
        CursorSet(cursor("reader", SPORT, 0, offset=None)),
        StateSet("key", State(b"value", 1)),
        StateSet("key", State(None, 0)),
        TopicDeleted(NEWS.id),
    )
    assert catalog == catalog_of(TopicPut(SPORT))
    assert catalog.snapshot() == catalog_of(TopicPut(SPORT)).snapshot()


def test_an_empty_catalog_has_an_empty_snapshot() -> None:
    assert Catalog().snapshot() == []
    assert Catalog.from_snapshot([]) == Catalog()


# --- applying --------------------------------------------------------------------------------


@each(
    "change",
    [
        TopicPut(replace(NEWS, id=SPORT.id)),
        TopicPut(replace(NEWS, name="renamed")),
        TopicDeleted(SPORT.id),
        CursorSet(cursor("reader", SPORT, 0)),
        CursorSet(cursor("reader", NEWS, 3)),
        CursorSet(cursor("reader", NEWS, -1)),
    ],
)
def test_a_change_made_for_another_catalog_is_damage_and_changes_nothing(change: Change) -> None:
    catalog = catalog_of(TopicPut(NEWS))
    with pytest.raises(DamagedStore):
        catalog.apply(change)
    assert catalog == catalog_of(TopicPut(NEWS))


def test_asking_for_a_change_changes_nothing() -> None:
    catalog = catalog_of(TopicPut(NEWS), StateSet("key", State(b"value", 1)))
    before = catalog_of(TopicPut(NEWS), StateSet("key", State(b"value", 1)))
    catalog.new_topic("sport", 1, Policy(), SPORT.id, 18)
    catalog.altered_topic(NEWS.id, 7, Policy(ephemeral=True))
    catalog.deleted_topic(NEWS.id)
    catalog.cursor_changes([cursor("reader", NEWS, 0)])
    catalog.state_changes([StatePut("key", None, 1)])
    assert catalog == before


def test_a_deletion_takes_its_partitions_out_of_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_limits, "PARTITIONS", 4)
    catalog = catalog_of(TopicPut(NEWS))
    with pytest.raises(LimitReached):
        catalog.new_topic("sport", 2, Policy(), SPORT.id, 18)
    catalog.apply(catalog.deleted_topic(NEWS.id))
    catalog.apply(catalog.new_topic("sport", 4, Policy(), SPORT.id, 18))
    assert catalog.topic_of(PartitionKey(SPORT.id, 3)).name == "sport"


def test_a_topic_that_grows_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_limits, "PARTITIONS", 6)
    catalog = catalog_of(TopicPut(NEWS))
    for partitions in (4, 5, 6):
        catalog.apply(catalog.altered_topic(NEWS.id, partitions, None))
    with pytest.raises(LimitReached):
        catalog.altered_topic(NEWS.id, 7, None)


def test_cursors_are_found_by_name_and_topic_and_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stores_limits, "CURSORS", 2)
    catalog = catalog_of(TopicPut(NEWS))
    first, second = cursor("reader", NEWS, 0), cursor("reader", NEWS, 1)
    catalog.apply_all(catalog.cursor_changes([first, second, first]))
    catalog.apply_all(catalog.cursor_changes([first, second]))
    with pytest.raises(LimitReached):
        catalog.cursor_changes([cursor("other", NEWS, 0)])
    catalog.apply_all(catalog.cursor_changes([cursor("reader", NEWS, 0, offset=None)]))
    catalog.apply_all(catalog.cursor_changes([cursor("other", NEWS, 0)]))
    assert set(catalog.cursors("reader")) == {second.key}
    assert set(catalog.cursors(topic_id=NEWS.id)) == {second.key, cursor("other", NEWS, 0).key}


def test_text_that_utf8_cannot_hold_is_refused() -> None:
    catalog = catalog_of(TopicPut(NEWS))
    with pytest.raises(InvalidRequest):
        catalog.cursor_changes([cursor("half a pair \ud800", NEWS, 0)])
    with pytest.raises(InvalidRequest):
        catalog.state_changes([StatePut("half a pair \ud800", b"", 0)])


def test_states_are_put_together_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = catalog_of(StateSet("old", State(b"value", 4)))
    both = [StatePut("old", b"newer", 4), StatePut("new", b"first", 0)]
    assert catalog.state_changes(both) == [
        StateSet("old", State(b"newer", 5)),
        StateSet("new", State(b"first", 1)),
    ]
    assert catalog.state_changes([StatePut("old", None, 4)]) == [StateSet("old", State(None, 0))]
    with pytest.raises(StateChanged):
        catalog.state_changes([*both, StatePut("other", b"", 1)])
    with pytest.raises(InvalidRequest, match="twice"):
        catalog.state_changes([*both, StatePut("new", b"second", 0)])
    monkeypatch.setattr(stores_limits, "STATE_KEYS", 2)
    assert len(catalog.state_changes(both)) == 2
    with pytest.raises(LimitReached):
        catalog.state_changes([*both, StatePut("other", b"", 0)])


# --- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "A-b_c.9", "...", "x" * limits.TOPIC_NAME_CHARS])
def test_a_legal_topic_name_passes(name: str) -> None:
    check_topic_name(name)


@each(
    "name", ["", ".", "..", "a b", "a/b", "ä", "a\n", "\x00", "x" * (limits.TOPIC_NAME_CHARS + 1)]
)
def test_an_illegal_topic_name_is_refused(name: str) -> None:
    with pytest.raises(IllegalTopicName):
        check_topic_name(name)
