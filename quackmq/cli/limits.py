"""Bounds of the command line, each with its reason. Sizes are bytes unless the name says
otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import KIB, MIB

# --- the local store -----------------------------------------------------------------------

#: Number of open files that the broker requests where the system reports a higher limit than it
#: grants, as macOS does. Connections and open segments use one each.
OPEN_FILES: Final = 10_240
#: The largest allowed sync interval. For a longer one, use sync = os.
LONGEST_SYNC_INTERVAL_MS: Final = 60_000

# --- the broker ----------------------------------------------------------------------------

#: A stopping broker that has made no progress for this time exits without closing. Service managers
#: kill after 10 s or later, and recovery at the next start loses nothing.
DRAIN_MS: Final = 9_000
#: The garbage collector scans new objects when there are this many, and scans the survivors of more
#: than this many scans once more: at most 4,000 objects, 1 to 2 ms of the event loop.
YOUNG_VALUES: Final = 1_000
YOUNG_LOOKS: Final = 2
#: The shortest time between two full collections if the loop is idle, and the longest if it never
#: is. Scanning 50,000 topics takes 0.2 s, and an hour leaves some megabytes of dead cycles.
FULL_COLLECTION_MS: Final = 3_600_000
LATEST_FULL_COLLECTION_MS: Final = 24 * FULL_COLLECTION_MS
#: The loop is idle if it used less than this share of the CPU during this time.
QUIET_MS: Final = 10_000
QUIET_PERCENT: Final = 5

# --- consumer groups -----------------------------------------------------------------------

#: The largest allowed delay. Clients give up on a broker that does not answer for longer.
LONGEST_GROUP_INITIAL_DELAY_MS: Final = 60_000

# --- tools ---------------------------------------------------------------------------------

#: `quackmq log dump` prints this much of a key, value or header, and then its full length.
SHOWN_BYTES: Final = 200
#: Message ids that a chaos client remembers to recognise duplicates; about 100 bytes each.
CHAOS_REMEMBERED: Final = 1_000_000
#: The largest number of publishers, subscribers and topics of an experiment. Each peer is a process
#: with four file descriptors.
EXPERIMENT_PEERS: Final = 200
#: The largest number of entries per publisher of an experiment. A subscriber keeps one byte for
#: each.
EXPERIMENT_ENTRIES: Final = 10_000_000
#: How long the peers of an experiment may take to connect or to exit. A busy machine starts
#: processes slowly.
EXPERIMENT_WAIT_MS: Final = 60_000
#: How long subscribers may take to catch up after the last publish, in addition to δ.
EXPERIMENT_SETTLE_MS: Final = 60_000
#: The longest time that a user's program in an experiment may be given to connect or to exit. The
#: broker itself ends a connection whose next message takes longer.
EXPERIMENT_LONGEST_COMMAND_MS: Final = 60_000
#: How long such a program may take to exit after the user has interrupted the experiment: the user
#: waits for it.
EXPERIMENT_INTERRUPTED_MS: Final = 1_000
#: Rows of an archive file that an experiment holds in memory to compare them with its accounts: at
#: most 40 MiB of the largest entries.
EXPERIMENT_ARCHIVE_ROWS: Final = 10_000
#: Differences between archive and accounts that are named; more are counted. A lost file can cause
#: millions.
EXPERIMENT_ARCHIVE_PROBLEMS: Final = 10
#: Read size of tools that copy a file or compute its checksum.
COPIED_BYTES: Final = MIB
#: Records and approximate bytes per transaction of `quackmq archive import`: enough to make a
#: commit cheap per record, and few enough to send again.
IMPORT_RECORDS: Final = 10_000
IMPORT_BYTES: Final = 8 * MIB
#: Batch size of an import.
IMPORT_BATCH_BYTES: Final = 512 * KIB
#: Request timeout of an import.
IMPORT_WAIT_MS: Final = 30_000

# --- pipelines -----------------------------------------------------------------------------

#: Rows of a report that are printed as a table. `--json` prints all.
PIPELINE_SHOWN_ROWS: Final = 50
