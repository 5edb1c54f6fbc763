"""What commands print, as text: tables, numbers of things, moments, progress.

What peers have sent never reaches the terminal as it is: text is quoted, with everything escaped
that a terminal might obey, and other bytes are shown as hexadecimal digits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from typing import Final

from quackmq.cli import limits
from quackmq.records.batch import NO_TIMESTAMP

#: Whoever waits longer than this is told how far it has got.
PROGRESS_EVERY_S: Final = 5.0
_LONGEST_CHARACTER_BYTES: Final = 4


def table(rows: list[Sequence[str]], numbers: Collection[int]) -> Iterator[str]:
    """The columns of `numbers` to the right, words to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def counted(number: int, thing: str, plural: str = "s") -> str:
    return f"{number} {thing}{'' if number == 1 else plural}"


def listed(words: Sequence[str]) -> str:
    """Words as a sentence has them: a, b and c."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def progress_on_stderr(unit: str = "bytes") -> Callable[[int, int], None]:
    """Tells how much of a total is done, now and then."""
    told = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told >= PROGRESS_EVERY_S:
            told = time.monotonic()
            share = f" ({done * 100 // total} %)" if total else ""
            print(f"{done} of {total} {unit}{share}", file=sys.stderr, flush=True)

    return tell


def shown(data: bytes | None) -> str:
    """Text in quotes where it is any, else hexadecimal digits; the beginning of what is long."""
    if data is None:
        return "null"
    part = data[: limits.SHOWN_BYTES]
    rest = f"… ({len(data)} bytes)" if len(data) > len(part) else ""
    try:
        return repr(part.decode()) + rest
    except UnicodeDecodeError as error:
        if rest and len(part) - error.start < _LONGEST_CHARACTER_BYTES:  # cut within a character
            return repr(part[: error.start].decode()) + rest
    return f"0x{part.hex()}{rest}"


def moment(timestamp_ms: int) -> str:
    if timestamp_ms == NO_TIMESTAMP:
        return "no time"
    try:
        found = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{timestamp_ms} ms"
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")
