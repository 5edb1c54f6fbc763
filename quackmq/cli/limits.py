"""Bounds of the command line, each with its reason. Sizes are bytes unless the name says
otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import KIB, MIB

# --- the local store -----------------------------------------------------------------------

#: Descriptors that the broker asks for where the system grants fewer than it says (macOS does, and
#: grants so many): connections and segments that are open at once.
OPEN_FILES: Final = 10_240
#: The longest interval that may be set; who wants it longer means sync = os.
LONGEST_SYNC_INTERVAL_MS: Final = 60_000

# --- the broker ----------------------------------------------------------------------------

#: A broker told to stop leaves without having closed after this time: service managers kill after
#: 10 s or later, and a recovery at the next start is no loss.
DRAIN_MS: Final = 9_000
#: Values that make the garbage collector look at them, and such looks (more than this number) that
#: make it look at what they left once more: at most 20,000 values, 4 to 10 ms of the event loop.
YOUNG_VALUES: Final = 5_000
YOUNG_LOOKS: Final = 2
#: Everything is looked at so often at the most, in a quiet moment, and so often if there is none:
#: a look at 50,000 topics takes 0.2 s, and an hour leaves some megabytes of dead circles.
FULL_COLLECTION_MS: Final = 3_600_000
LATEST_FULL_COLLECTION_MS: Final = 24 * FULL_COLLECTION_MS
#: A moment is quiet if the loop used less than this share of so long.
QUIET_MS: Final = 10_000
QUIET_PERCENT: Final = 5

# --- consumer groups -----------------------------------------------------------------------

#: The longest that may be set: clients take a broker that is silent for longer to be gone.
LONGEST_GROUP_INITIAL_DELAY_MS: Final = 60_000

# --- tools ---------------------------------------------------------------------------------

#: Of a key, a value or a header that `quackmq log dump` shows; how long it really is, is said.
SHOWN_BYTES: Final = 200
#: Ids of messages that a chaos client knows again; some 100 bytes each.
CHAOS_REMEMBERED: Final = 1_000_000
#: Publishers, subscribers and topics of an experiment: each peer is a process and four descriptors.
EXPERIMENT_PEERS: Final = 200
#: Entries of one publisher of an experiment: a subscriber keeps a byte for each.
EXPERIMENT_ENTRIES: Final = 10_000_000
#: How long peers of an experiment have to connect, or to end: a busy machine starts slowly.
EXPERIMENT_WAIT_MS: Final = 60_000
#: When all was published: how long subscribers have to catch up, beside what δ leaves them.
EXPERIMENT_SETTLE_MS: Final = 60_000
#: What tools read of a file at one go, to copy it or to make a checksum of it.
COPIED_BYTES: Final = MIB
#: Records of a transaction of `quackmq archive import`, and about how much they hold: enough that
#: its end costs little, and little enough to be sent again.
IMPORT_RECORDS: Final = 10_000
IMPORT_BYTES: Final = 8 * MIB
#: A batch of an import is full at this size.
IMPORT_BATCH_BYTES: Final = 512 * KIB
#: No request of an import waits longer than this for its answer.
IMPORT_WAIT_MS: Final = 30_000

# --- pipelines -----------------------------------------------------------------------------

#: Rows of a report that a terminal shows; all are in its JSON.
PIPELINE_SHOWN_ROWS: Final = 50
