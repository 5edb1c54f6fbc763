"""Stored states: older bytes are decoded, and anything else is damage."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from quackmq.errors import DamagedStore
from quackmq.model.stored_json import decode_stored, decode_stored_object
from tests.kit.tables import each


class Lake(NamedTuple):
    name: str
    ducks: int
    depths: tuple[tuple[int, int], ...] = ()
    owner: str | None = None


def decode(value: bytes) -> Lake:
    return decode_stored_object(value, Lake, "a lake", optional=("owner",))


def test_an_object_is_decoded_into_its_named_tuple() -> None:
    value = '{"name": "Müggelsee", "ducks": 7, "depths": [[1, 2], [3, 4]], "owner": "we"}'.encode()
    assert decode(value) == Lake("Müggelsee", 7, ((1, 2), (3, 4)), "we")


def test_fields_that_an_older_version_did_not_store_get_their_default() -> None:
    assert decode(b'{"name": "a", "ducks": 0, "depths": []}') == Lake("a", 0, (), None)


def test_fields_of_a_newer_version_are_ignored() -> None:
    value = b'{"name": "a", "ducks": 0, "depths": [], "frozen": true}'
    assert decode(value) == Lake("a", 0)


@each(
    "value",
    [
        b"",
        b"no json",
        b"[]",
        b"{}",
        b"null",
        b'{"name": "a", "ducks": 0}',
        b'{"name": "a", "ducks": "0", "depths": []}',
        b'{"name": "a", "ducks": true, "depths": []}',
        b'{"name": "a", "ducks": 0.5, "depths": []}',
        b'{"name": "\xff", "ducks": 0, "depths": []}',
        b'{"name": "a", "ducks": 0, "depths": [[1]]}',
        b'{"name": "a", "ducks": 0, "depths": []} x',
    ],
)
def test_any_other_value_is_damage_that_is_named(value: bytes) -> None:
    with pytest.raises(DamagedStore, match="cannot decode a lake in the store"):
        decode(value)


def test_an_error_shows_only_the_beginning_of_a_long_value() -> None:
    with pytest.raises(DamagedStore) as raised:
        decode_stored(b'"' + b"x" * 10_000 + b'"', int, "a number")
    assert len(str(raised.value)) < 400
