"""Joined checksums equal those of the joined data."""

from __future__ import annotations

from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from quackmq.records.crc_join import join_checksums


@given(st.binary(max_size=300), st.binary(max_size=3000))
def test_two_checksums_join_into_that_of_the_whole(first: bytes, second: bytes) -> None:
    assert join_checksums(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)


def test_long_pieces_join_too() -> None:
    first, second = b"news" * 10, bytes(range(256)) * 70_001
    assert join_checksums(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)


def test_a_checksum_that_did_not_begin_at_zero_joins_too() -> None:
    first, second = b"one", b"two"
    started = crc32c(first, 0x1234)
    assert join_checksums(started, crc32c(second), len(second)) == crc32c(second, started)
