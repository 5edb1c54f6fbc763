"""Bounds of the disk, each with its reason. Sizes are bytes unless the name says otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import KIB, MIB

# --- the local store -----------------------------------------------------------------------

#: A write by the event loop takes about ten µs. A write that takes this long was delayed by the
#: system, which has too many unwritten pages...
LOOP_WRITE_MS: Final = 10
#: ...and then the loop leaves writing to a thread for this long, in modes that answer before the
#: bytes are on disk.
LOOP_WRITE_PAUSE_MS: Final = 5_000
#: The loop itself may wait for a sync if syncs take no longer than this and only one publisher
#: waits for it...
LOOP_SYNC_MS: Final = 1
#: ...and after a longer sync, the loop waits for none for this many times as long.
LOOP_SYNC_PAUSE: Final = 100
#: Reads of at least this size that are in the page cache are not copied: for smaller ones, copying
#: costs less.
VIEWED_BYTES: Final = 256 * KIB
#: The longest such read. The range of a file that is mapped for it is up to twice as long, so that
#: the next read finds it mapped.
WINDOW_BYTES: Final = 4 * MIB
#: Ranges mapped at once: pages that are read there count as the process's memory.
WINDOWS: Final = 16
#: A file that is written as a whole is synced after each of these. In one trial, a sync of the
#: journal behind 64 MiB took 40 to 60 ms at the 99th percentile; behind pieces of this size, 20 ms.
SYNCED_WRITE_BYTES: Final = 1 * MIB

# --- the archive ---------------------------------------------------------------------------

#: Niceness of the thread that writes the archive, so that publishing and delivery come first. Not
#: higher: a thread that holds the interpreter's lock and does not get to run delays all others.
ARCHIVE_NICENESS: Final = 5
