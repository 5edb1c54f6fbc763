"""Formatting of command output: tables, counts, timestamps, progress. Parsing of counts.

Data from peers is never printed raw: text is quoted, with control characters escaped, and other
bytes are printed in hexadecimal.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

from quackmq.cli import limits
from quackmq.records.batch import NO_TIMESTAMP

#: Interval between two progress messages.
PROGRESS_EVERY_S: Final = 5.0
_LONGEST_CHARACTER_BYTES: Final = 4


def table(rows: list[Sequence[str]], *, right_aligned: Collection[int] = ()) -> Iterator[str]:
    """Yield the rows with aligned columns. `right_aligned` are the indexes of the columns that are
    aligned to the right; the others are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if index in right_aligned else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def pluralize(number: int, thing: str, plural: str = "s") -> str:
    return f"{number} {thing}{'' if number == 1 else plural}"


def parse_count(text: str) -> int:
    """Parse a whole number from 0 on, as an argparse type."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 on, got {text!r}")
    return int(text)


def join_words(words: Sequence[str]) -> str:
    """Join words as in a sentence: "a, b and c"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def progress_on_stderr(unit: str = "bytes") -> Callable[[int, int], None]:
    """Return a function that prints (done, total) to stderr, at most once per interval."""
    last_printed_s = time.monotonic()

    def print_progress(done: int, total: int) -> None:
        nonlocal last_printed_s
        if time.monotonic() - last_printed_s >= PROGRESS_EVERY_S:
            last_printed_s = time.monotonic()
            share = f" ({done * 100 // total} %)" if total else ""
            print(f"{done} of {total} {unit}{share}", file=sys.stderr, flush=True)

    return print_progress


def format_bytes(data: bytes | None) -> str:
    """Return UTF-8 text in quotes and other data in hexadecimal; long data is cut off."""
    if data is None:
        return "null"
    part = data[: limits.SHOWN_BYTES]
    ellipsis = f"… ({len(data)} bytes)" if len(data) > len(part) else ""
    try:
        return repr(part.decode()) + ellipsis
    except UnicodeDecodeError as error:
        is_cut_within_character = len(part) - error.start < _LONGEST_CHARACTER_BYTES
        if ellipsis and is_cut_within_character:
            return repr(part[: error.start].decode()) + ellipsis
    return f"0x{part.hex()}{ellipsis}"


def format_time(timestamp_ms: int) -> str:
    """Return a timestamp as ISO 8601 in UTC, or as a number if the calendar does not reach it."""
    if timestamp_ms == NO_TIMESTAMP:
        return "no time"
    try:
        moment = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{timestamp_ms} ms"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
