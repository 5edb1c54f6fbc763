"""Digests of rows: the same for the same rows in any order and any pieces, else another one."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quackmq.records.columns import HEADERS_TYPE
from quackmq.spark.sink import digest
from quackmq.spark.sink.digest import Digest, compute_digest, merge_digests
from quackmq.spark.sink.encode import Rows
from tests.kit.tables import each

Header = tuple[str, bytes | None]
Row = tuple[bytes | None, bytes | None, list[Header] | None]

FIELDS = st.one_of(st.none(), st.binary(max_size=40), st.binary(min_size=500, max_size=530))
HEADERS = st.one_of(
    st.none(), st.lists(st.tuples(st.text(max_size=3), st.none() | st.binary(max_size=9)))
)
ROWS = st.lists(st.tuples(FIELDS, FIELDS, HEADERS), min_size=1, max_size=30)


def digested(rows: list[Row], topic: str = "news", *, offset: int = 0) -> Digest:
    """With some rows before them in their arrays that do not count."""
    padded = [(b"not", b"counted", None)] * offset + rows
    key, value = (pa.array([row[at] for row in padded], pa.binary()) for at in (0, 1))
    headers = pa.array([row[2] for row in padded], HEADERS_TYPE)
    parts = [each.slice(offset) for each in (key, value, headers)]
    absent = headers.slice(offset).null_count == len(rows)
    numbers = np.zeros(len(rows), np.int64)
    return compute_digest(
        topic, Rows(numbers, 17, parts[0], parts[1], None if absent else parts[2])
    )


@given(ROWS, st.integers(0, 5), st.randoms(use_true_random=False))
def test_order_and_pieces_make_no_difference(rows: list[Row], cut: int, chance: object) -> None:
    whole = digested(rows)
    shuffled = random.Random(17).sample(rows, len(rows))
    assert digested(shuffled, offset=cut) == whole
    assert merge_digests(digested([row], offset=1) for row in shuffled) == whole
    assert merge_digests([whole]) == whole and merge_digests([]) == Digest()


@given(ROWS, ROWS)
def test_other_rows_have_another_digest(some: list[Row], others: list[Row]) -> None:
    def seen(rows: list[Row]) -> list[str]:
        return sorted(repr((key, value, headers or [])) for key, value, headers in rows)

    assert (digested(some).text() == digested(others).text()) == (seen(some) == seen(others))


@each(
    "other",
    [
        [(b"k", b"v", None), (b"k", b"v", None), (b"k", b"v", None)],
        [(b"k", b"v", None)],
        [(b"k", b"v", None), (b"k", b"w", None)],
        [(b"k", b"v", None), (b"v", b"k", None)],
        [(b"kv", b"", None), (b"k", b"v", None)],
        [(b"k", None, None), (b"k", b"v", None)],
        [(None, b"v", None), (b"k", b"v", None)],
        [(b"k", b"v", [("h", b"")]), (b"k", b"v", None)],
        [(b"k", b"v\0", None), (b"k", b"v", None)],
    ],
)
def test_each_field_and_the_number_of_rows_count(other: list[Row]) -> None:
    rows: list[Row] = [(b"k", b"v", None), (b"k", b"v", None)]
    assert digested(rows).text() != digested(other).text()
    assert digested(rows, "other topic").text() != digested(rows).text()


def test_null_and_empty_differ_in_every_field() -> None:
    fields: list[Row] = [
        (None, b"", None),
        (b"", None, None),
        (None, None, None),
        (b"", b"", None),
        (b"", b"", [("", None)]),
        (b"", b"", [("", b"")]),
    ]
    assert len({digested([row]).text() for row in fields}) == len(fields)


def test_every_byte_of_short_and_long_fields_counts() -> None:
    for size in (1, 7, 8, 9, 16, 511, 512, 513, 2_000):
        value = bytes(range(256)) * 8
        words = {digested([(None, value[:size], None)]).text()}
        places = {*range(size)[:16], *range(size)[-16:], *range(0, size, 17)}
        for at in places:
            changed = bytearray(value[:size])
            changed[at] ^= 0x80
            words.add(digested([(None, bytes(changed), None)]).text())
        assert len(words) == len(places) + 1


@pytest.mark.sweep
def test_very_many_rows_that_differ_by_a_number_have_no_hash_in_common(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen at the two halves apart, so that a hash of half the bits would be found: of so many, ten
    pairs would have one in common."""
    count = 300_000
    value = pa.array(np.char.add("order ", np.arange(count).astype(str))).cast(pa.binary())
    halves: list[tuple[np.ndarray, np.ndarray]] = []

    def kept(lanes: digest._Lanes) -> tuple[int, int]:
        halves.append((lanes._first.copy(), lanes._second.copy()))
        return 0, 0

    monkeypatch.setattr(digest._Lanes, "sums", kept)
    compute_digest("news", Rows(np.zeros(count, np.int64), 17, None, value, None))
    for half in zip(*halves, strict=True):
        assert len(np.unique(np.concatenate(half))) == count


def test_the_word_of_a_digest_is_the_one_that_brokers_have_stored() -> None:
    """A change of the hash needs another version in its word."""
    rows: list[Row] = [
        (b"key", b"value", None),
        (None, b"x" * 600, [("a", b"b"), ("c", None)]),
    ]
    assert digested(rows).text() == "rows-1:2:da0449a0eddc5cb47659c25e33433e21"
