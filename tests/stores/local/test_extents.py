"""Extents as values: what they cover, what replaces what, which are worth joining."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quackmq.stores.local.files import extents
from quackmq.stores.local.files.extents import Extent, Piece

_writes = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=12)


@given(_writes)
def test_the_last_write_counts_wherever_extents_overlap(writes: list[tuple[int, int]]) -> None:
    """Against bytes that are simply written over each other, in a pack that only grows."""
    rows, pack, content = b"", bytearray(), bytearray(100)
    live = 0
    for number, (position, length) in enumerate(writes):
        data = bytes([number + 1]) * length
        content[position : position + length] = data
        rows, replaced = extents.lay_over(rows, Extent(position, length, 1, len(pack)))
        pack += data
        live += length - sum(extent.length for extent in replaced)
    got = bytearray()
    for piece in extents.pieces(rows, 0, 100):
        assert piece.length
        if piece.pack is None:
            assert piece.position == len(got)
            got += bytes(piece.length)
        else:
            got += pack[piece.position : piece.position + piece.length]
    assert got == content
    held = extents.decode(rows)
    assert held == sorted(held)
    assert all(one.end <= other.position for one, other in zip(held, held[1:], strict=False))
    assert live == extents.bytes_in(rows)


@given(_writes)
def test_what_was_replaced_is_named_with_the_place_where_it_lay(
    writes: list[tuple[int, int]],
) -> None:
    rows, used = b"", 0
    dead: set[int] = set()
    for position, length in writes:
        rows, replaced = extents.lay_over(rows, Extent(position, length, 7, used))
        used += length
        for extent in replaced:
            gone = set(range(extent.pack_position, extent.pack_position + extent.length))
            assert not gone & dead
            dead |= gone
    alive = {
        at
        for extent in extents.decode(rows)
        for at in range(extent.pack_position, extent.pack_position + extent.length)
    }
    assert alive | dead == set(range(used))
    assert not alive & dead


def test_bytes_lie_in_the_own_file_before_between_and_behind_extents() -> None:
    rows = extents.encode([Extent(10, 5, 3, 100), Extent(20, 5, 4, 7)])
    assert extents.pieces(rows, 5, 25) == [
        Piece(None, 5, 5),
        Piece(3, 100, 5),
        Piece(None, 15, 5),
        Piece(4, 7, 5),
        Piece(None, 25, 5),
    ]
    assert extents.pieces(rows, 12, 2) == [Piece(3, 102, 2)]


def test_rows_keep_every_field() -> None:
    some = [Extent(0, 1, 2, 3), Extent(2**40, 2**31, 2**31, 2**50)]
    assert extents.decode(extents.encode(some)) == some
    assert extents.count(extents.encode(some)) == 2


# --- joining ---------------------------------------------------------------------------------


def lengths(*some: int) -> bytes:
    found, position = [], 0
    for length in some:
        found.append(Extent(position, length, 1, position))
        position += length
    return extents.encode(found)


@pytest.mark.parametrize(
    ("before", "new", "joined"),
    [
        ((1, 1, 1), 1, (1, 1, 1)),
        ((9, 1, 1), 1, (1, 1)),
        ((6, 1, 1), 1, (6, 1, 1)),
        ((100, 2), 1, (2,)),
        ((3,), 1, ()),
        ((), 1, ()),
    ],
)
def test_extents_join_a_new_one_that_is_at_least_half_as_large(
    before: tuple[int, ...], new: int, joined: tuple[int, ...]
) -> None:
    found = extents.worth_joining(lengths(*before), sum(before), new, 1_000)
    assert tuple(extent.length for extent in found) == joined


def test_no_more_is_joined_than_a_bound_allows() -> None:
    found = extents.worth_joining(lengths(4, 4, 4), 12, 4, 12)
    assert [extent.length for extent in found] == [4, 4]


def test_what_lies_behind_a_gap_is_not_joined() -> None:
    rows = extents.encode([Extent(0, 4, 1, 0), Extent(5, 4, 1, 4)])
    assert [extent.position for extent in extents.worth_joining(rows, 9, 4, 100)] == [5]
    assert extents.worth_joining(rows, 10, 4, 100) == []


@given(st.integers(1, 400), st.integers(1, 8))
def test_a_byte_is_written_again_few_times_however_many_extents_come(count: int, most: int) -> None:
    rows, written, position = b"", 0, 0
    for _ in range(count):
        length, start = 1, position
        if extents.count(rows) > most:
            for extent in reversed(extents.worth_joining(rows, position, 1, 10_000)):
                length, start = length + extent.length, extent.position
        rows, _ = extents.lay_over(rows, Extent(start, length, 1, written))
        written += length
        position += 1
        assert extents.count(rows) <= most + 10
    assert written <= position * 10
