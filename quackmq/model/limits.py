"""Bounds of the model, each with its reason. Sizes are bytes unless the name says otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import MIB

# --- producers -----------------------------------------------------------------------------

#: Kafka's clients keep five requests in flight, so a repeat is among the last five batches.
REMEMBERED_BATCHES: Final = 5
#: Producer states kept a partition; beyond it the one longest silent goes.
PRODUCERS_PER_PARTITION: Final = 10_000
#: So many of them may be silent for longer than the producers that are made of idempotency keys,
#: and yet stay while those go: looking further would cost every append too much.
SILENT_PRODUCERS: Final = 1_000
#: Expired producers that one append forgets at the most: it takes some 2 µs each, on the loop.
FORGOTTEN_PRODUCERS: Final = 1_000
#: Open transactions a partition: their producers are never forgotten, so they must leave room for
#: others among PRODUCERS_PER_PARTITION.
OPEN_TRANSACTIONS: Final = 5_000

# --- the archive ---------------------------------------------------------------------------

#: What goes from a log to the archive, unless a topic's policy says otherwise: what is so old, or
#: when there is so much of it. Much at a time makes files that are worth reading; what waits longer
#: is not read by those who look at the archive alone.
ARCHIVE_AFTER_MS: Final = 3_600_000
ARCHIVE_READY_BYTES: Final = 1024 * MIB

# --- the broker ----------------------------------------------------------------------------

#: Entries of a partition that a subscription may have been lent and not acknowledged; one costs
#: about 250 bytes of memory, and all of them together must fit into a value of small state.
LEASES: Final = 10_000
#: Stretches that a live subscription has left behind for newer ones, of a partition; kept likewise.
LEASE_GAPS: Final = 1_000
#: So many of the newest entries are served in order to a live subscription that is behind; newer
#: ones wait for these at the most.
LIVE_WINDOW: Final = 100
