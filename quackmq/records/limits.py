"""Bounds of record batches, each with its reason. Sizes are bytes unless the name says
otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import KIB

# --- batches -------------------------------------------------------------------------------

#: A large batch is decoded section by section, and the loop serves others in between. A section of
#: so many records takes some 2 ms; one record above so many bytes is a section of its own.
DECODED_SECTION_RECORDS: Final = 1_024
DECODED_SECTION_BYTES: Final = 64 * KIB
#: Headers over all records of a batch: two bytes make one, which takes 60 and more in memory.
HEADERS_PER_BATCH: Final = 1_000_000
