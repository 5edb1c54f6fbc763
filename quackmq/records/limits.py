"""Bounds of record batches, each with its reason. Sizes are bytes unless the name says
otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import KIB

# --- batches -------------------------------------------------------------------------------

#: A large batch is decoded section by section; the event loop serves other work in between. A
#: section of this many records takes about 2 ms. A record above this many bytes is its own section.
DECODED_SECTION_RECORDS: Final = 1_024
DECODED_SECTION_BYTES: Final = 64 * KIB
#: Headers over all records of a batch: a header of two bytes takes 60 bytes and more in memory.
HEADERS_PER_BATCH: Final = 1_000_000
