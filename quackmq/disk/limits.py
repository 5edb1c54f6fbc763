"""Bounds of the disk, each with its reason. Sizes are bytes unless the name says otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import KIB, MIB

# --- the local store -----------------------------------------------------------------------

#: A write of that by the loop takes some ten µs. One that takes so long was held up by the system,
#: which has more unwritten pages than it likes...
LOOP_WRITE_MS: Final = 10
#: ...and for so long the loop then leaves writing to a thread, where the mode allows to answer
#: before the disk has anything.
LOOP_WRITE_PAUSE_MS: Final = 5_000
#: A sync that is over sooner than this may be waited for by the loop, where one publisher alone
#: waits for it too...
LOOP_SYNC_MS: Final = 1
#: ...and behind one that took longer, none is for so many times as long.
LOOP_SYNC_PAUSE: Final = 100
#: Reads of so many bytes and more that the system holds in memory are not copied out of there:
#: below that the copy costs less.
VIEWED_BYTES: Final = 256 * KIB
#: The longest such read; the piece of a file that is mapped for it is up to twice as long, so that
#: the next one finds it.
WINDOW_BYTES: Final = 4 * MIB
#: Pieces mapped at once: what is looked at in them counts as the process's memory.
WINDOWS: Final = 16
#: A file that is written as a whole is synced after each of these: a sync of the journal behind
#: 64 MiB took 40 to 60 ms at the 99th percentile in one trial, behind pieces of this size 20.
SYNCED_WRITE_BYTES: Final = 1 * MIB

# --- the archive ---------------------------------------------------------------------------

#: How far the thread that writes the archive steps back behind those that publish and deliver. Not
#: further: what holds the interpreter's lock and is not let run holds up everybody.
ARCHIVE_NICENESS: Final = 5
