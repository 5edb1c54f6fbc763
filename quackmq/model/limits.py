"""Bounds of the model, each with its reason. Sizes are bytes unless the name says otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import MIB

# --- producers -----------------------------------------------------------------------------

#: Kafka's clients keep five requests in flight, so a repeat is among the last five batches.
REMEMBERED_BATCHES: Final = 5
#: Producer states kept per partition. Above it, the producer that was silent longest is forgotten.
PRODUCERS_PER_PARTITION: Final = 10_000
#: How many of the producers silent longest one append examines to find those made of idempotency
#: keys, which are forgotten first. Examining more would cost every append too much.
SILENT_PRODUCERS: Final = 1_000
#: Most expired producers that one append forgets: each takes about 2 µs on the event loop.
FORGOTTEN_PRODUCERS: Final = 1_000
#: Open transactions per partition. Their producers are never forgotten, so they must leave room for
#: other producers within PRODUCERS_PER_PARTITION.
OPEN_TRANSACTIONS: Final = 5_000

# --- the archive ---------------------------------------------------------------------------

#: Default policy: records move from the log to the archive at this age, or when this many bytes are
#: ready. Large amounts make Parquet files that are worth reading. A longer wait hides recent
#: records from programs that read only the archive.
ARCHIVE_AFTER_MS: Final = 3_600_000
ARCHIVE_READY_BYTES: Final = 1024 * MIB
#: Default policy: entries that are no longer live are archived within this time. A topic that is
#: published to all the time then gets a small file each `live_for_ms` plus this time. Merging looks
#: for small files as often.
ARCHIVE_AFTER_LIVE_MS: Final = 10_000

# --- the broker ----------------------------------------------------------------------------

#: Unacknowledged entries that a subscription may have per partition. Each takes about 250 bytes of
#: memory, and all of them together must fit into one value of small state.
LEASES: Final = 10_000
#: Ranges per partition that a `newest` subscription postponed in favour of newer entries. They are
#: stored in the same value.
LEASE_GAPS: Final = 1_000
#: How many of the newest entries a `newest` subscription that is behind receives in order. Entries
#: appended later wait for no more than these.
LIVE_WINDOW: Final = 100

# --- agendas -------------------------------------------------------------------------------

#: Times that were replaced or dropped and may still lie in an agenda's heap, beyond twice those
#: that count: sorting them out then costs little for each change.
AGENDA_SPARE: Final = 1_000
