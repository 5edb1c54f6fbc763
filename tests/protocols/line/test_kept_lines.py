"""Entries as lines: encoded once for all subscribers that are in step, and so many kept."""

from __future__ import annotations

import pytest

from quackmq.broker import LeasedEntry
from quackmq.errors import RecordTooLarge
from quackmq.protocols.line import limits as line_limits
from quackmq.protocols.line.subscriber import EncodedLines
from quackmq.records.batch import Record


def delivery(offset: int, value: bytes = b"quack") -> LeasedEntry:
    return LeasedEntry(0, offset, 1, f"id-{offset}", Record(offset, 0, None, value))


def test_an_entry_is_encoded_once_and_forgotten_when_there_are_enough_newer_ones() -> None:
    lines = EncodedLines(entry_bytes=100)
    first = lines.encode_once("1", delivery(0))
    assert first[1] == b"topic 1 [quack]\n"
    assert lines.encode_once("1", delivery(0)) is first
    for offset in range(1, line_limits.LINE_KEPT_LINES):
        lines.encode_once("1", delivery(offset))
    assert lines.encode_once("1", delivery(0)) is first, "there was room for it"
    lines.encode_once("1", delivery(line_limits.LINE_KEPT_LINES))
    assert lines.encode_once("1", delivery(0)) is not first, "it was the oldest"
    for offset in range(10 * line_limits.LINE_KEPT_LINES):
        lines.encode_once("1", delivery(offset))
    assert len(lines._lines) == line_limits.LINE_KEPT_LINES


def test_an_entry_that_is_too_long_is_not_kept() -> None:
    lines = EncodedLines(entry_bytes=3)
    for _ in range(2):
        with pytest.raises(RecordTooLarge):
            lines.encode_once("1", delivery(0))
    assert not lines._lines
