"""Bounds of the stores, each with its reason. Sizes are bytes unless the name says otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import KIB, MIB, PENDING_BYTES

# --- names and the catalog -----------------------------------------------------------------

#: The catalog is in memory and in every checkpoint.
TOPICS: Final = 50_000
#: Over all topics; a partition costs about 1 KiB of memory, and its topic as much.
PARTITIONS: Final = 100_000
#: Policies that topics with the same values share in memory. A use has a few kinds of topics; a
#: topic of a further kind has a copy of its own, of 144 bytes.
SHARED_POLICIES: Final = 256
#: Number of keys kept by compare-and-set.
STATE_KEYS: Final = 1_000_000
#: Number of cursors over all names, topics and partitions.
CURSORS: Final = 1_000_000

# --- producers -----------------------------------------------------------------------------

#: A producer silent for this long is forgotten (Kafka: one day; ours also survives a weekend).
PRODUCER_EXPIRY_MS: Final = 7 * 24 * 3600 * 1000

# --- the local store -----------------------------------------------------------------------

#: A journal slot; four of them are a ring. A slot is reused only after a checkpoint covers it.
JOURNAL_SLOT_BYTES: Final = 64 * MIB
JOURNAL_SLOTS: Final = 4
#: Frames start on sector boundaries, so that writing one never rewrites another's bytes.
JOURNAL_ALIGNMENT: Final = 512
#: If a partition's share of a cycle is larger, its segment is synced and the journal only refers to
#: it: above this size the second write costs more than the second sync saves.
JOURNAL_INLINE_BYTES: Final = 128 * KIB
#: Bytes contained in one frame, over all partitions; the frame refers to the rest.
JOURNAL_FRAME_INLINE_BYTES: Final = 8 * MIB
#: Batches in one frame, unless a single call has more. The loop commits a frame in one step, and
#: this many small batches of as many partitions take 2 to 4 ms.
FRAME_BATCHES: Final = 128
#: A frame above JOURNAL_FRAME_INLINE_BYTES with more partitions than this accepts no further
#: batches: each partition's file would be created and synced while all publishers wait.
REFERENCED_SHARES: Final = 64
#: A slot grows by this much at a time, with zeros after the frame. A sync that must also make a new
#: length durable takes half as long again; so only one in about two thousand does.
JOURNAL_GROWTH_BYTES: Final = 1 * MIB
#: The loop itself writes frames up to this size: copying one to the page cache takes less time than
#: handing it to a thread.
JOURNAL_LOOP_BYTES: Final = 64 * KIB
#: The largest frame that recovery accepts.
JOURNAL_FRAME_BYTES: Final = 32 * MIB
#: Appended bytes after which a checkpoint is made: this bounds how much recovery has to read.
CHECKPOINT_BYTES: Final = 256 * MIB
#: Partitions captured for a checkpoint before the loop serves other work: about 2 ms.
CAPTURED_LOGS: Final = 150
#: With sync = os, checkpoints are this many times rarer: recovery reads more, fewer syncs are made.
RARER_CHECKPOINTS: Final = 16
#: A run of bytes below this size is written to a pack, which all partitions share. Creating and
#: syncing a file takes as long as writing a hundred such runs to one file.
PACKED_BYTES: Final = 64 * KIB
#: A pack is closed above this size: packs are removed or rewritten as a whole.
PACK_BYTES: Final = 64 * MIB
#: Small runs are copied together and written to a pack in blocks of this size.
PACK_WRITE_BYTES: Final = 1 * MIB
#: If a path has more extents than this, the next one is written together with all before it. An
#: extent takes 24 bytes of memory, and a separate read.
PATH_EXTENTS: Final = 16
#: Paths whose extents are joined in one write-back: reading 17 extents takes some 100 µs.
PACK_JOINS: Final = 1_000
#: A path with more than this in packs moves to a file of its own...
MOVED_BYTES: Final = 128 * KIB
#: ...at checkpoints, this many paths each time: a new file takes two syncs, some milliseconds...
MOVED_PATHS: Final = 256
#: ...and this many at once, since a write-back waits meanwhile.
MOVED_AT_ONCE: Final = 8
#: Unused bytes in packs above which packs are rewritten, if they are also more than half of all
#: bytes. So packs take at most twice the space of their content plus this.
PACK_WASTE_BYTES: Final = 64 * MIB
#: Bytes that one checkpoint rewrites for this purpose; at least one pack.
REWRITTEN_BYTES: Final = 16 * MIB
#: Directories searched at once for files that a crash left.
SWEPT_AT_ONCE: Final = 64
#: Logs whose chunks are written back at once: the loop then spends 5 to 10 µs per log.
WRITE_BACK_LOGS: Final = 500
#: A chunk, one partition's share of a flush cycle, accepts no second batch beyond this size: a
#: region is read as a whole, so its chunks must not be large.
CHUNK_BYTES: Final = 1 * MIB
#: Open files of segments; above it the least recently used one is closed.
OPEN_SEGMENT_FILES: Final = 512
#: Up to this many segments, a log adds up sizes when asked. Above, it keeps sums and maxima, which
#: take about a hundred bytes per log.
FEW_SEGMENTS: Final = 16
#: Decoded indexes of closed segments held in memory.
CACHED_INDEXES: Final = 64
#: Indexes of aborted transactions held in memory: enough for half a million of them.
CACHED_ABORTED_BYTES: Final = 16 * MIB
#: Files of trimmed segments and deleted topics are removed after a checkpoint, which is made for
#: this purpose at most this often.
GARBAGE_INTERVAL_MS: Final = 1_000
#: Changes of the catalog (topics, cursors, states, trims) that are not durable yet, in memory;
#: above it callers wait. One call may have this many bytes of them, because they share one frame.
CHANGE_BYTES: Final = 8 * MIB
#: Memory of a waiting batch beside its own bytes: its chunk, its future and answer, and its entry
#: in the frame. Measured; without it, 4 MiB of small batches took 70 MiB of memory.
PENDING_BATCH_OVERHEAD: Final = 1_400
#: The same for the state of its producer until it is durable.
PENDING_PRODUCER_OVERHEAD: Final = 400
#: Memory of a waiting catalog change beside its bytes in the frame.
PENDING_CHANGE_OVERHEAD: Final = 864
#: Memory for recent batches, over all partitions. Older batches are read from the page cache. With
#: this, a busy broker stays below 200 MiB in total.
TAIL_BYTES: Final = 48 * MIB
#: All memory of recent batches and of those that wait for the disk: the tail with chunks that it
#: cannot drop yet, the running cycle, and the next one. Above it publishers wait.
HELD_BYTES: Final = 128 * MIB
#: Chunks that are only in journal and tail, or how far the tail exceeds its bound because of them.
#: Half of it starts a write-back; at this size the next cycle waits for the write-back.
WRITE_BACK_BYTES: Final = HELD_BYTES - TAIL_BYTES - 2 * PENDING_BYTES
#: In the weak sync modes a power cut may lose at most this many offsets of a partition: a sync is
#: forced before more are unsynced. Recovery skips as many, so that no offset is assigned twice.
UNSYNCED_OFFSETS: Final = 16_000_000

# --- the PostgreSQL store -------------------------------------------------------------------

#: How long opening a connection may take. A server that is there answers within milliseconds.
CONNECT_S: Final = 5.0
#: How often a standby tries to get the lock. A takeover after a crash is to take less than 3 s.
TAKEOVER_POLL_S: Final = 0.25
#: Between two tries of a standby to reach a database that it has lost. A try is cheap, but a server
#: that starts is not to be kept busy by them.
STANDBY_RECONNECT_S: Final = 1.0
#: How long a standby that has reached the database again leaves the lock to the broker that was
#: active before: several of that one's heartbeats, each of which tries to reach the database too.
OWNER_FIRST_S: Final = 3.0
#: An owner whose heartbeat is older is taken for dead. Longer than any commit or pause of a healthy
#: broker should be; clients wait at least this long when a broker is frozen or cut off.
HEARTBEAT_EXPIRY_S: Final = 10.0
#: How often the owner updates its heartbeat: several times before it expires.
HEARTBEAT_S: Final = 1.0
#: How long a commit or a read may take. If the database does not answer for longer, its connection
#: is given up: a network can swallow packets without an error.
COMMIT_S: Final = 15.0
#: How long publishers wait for a database that cannot be reached, before they get an error. Mostly
#: a restart of the server takes less; and clients wait longer.
UNREACHABLE_S: Final = 15.0
#: Between two tries to reach the database.
RECONNECT_S: Final = 0.1
#: Connections for reads of batches that are no longer in memory; further reads wait.
READ_SESSIONS: Final = 4
#: Rows that one read returns. Small rows are many, and a reader asks again.
READ_ROWS: Final = 1_000
#: Above this size the batches of a cycle are written by COPY, which takes one more round trip but
#: less time per byte.
COPY_FROM_BYTES: Final = 256 * KIB
#: Rows removed in one transaction after a trim, so that it takes some milliseconds.
REMOVED_ROWS: Final = 500
#: Bytes that describe batches, changes and trims in one cycle: four times what one call may have.
CYCLE_ENTRY_BYTES: Final = 32 * MIB
#: The columns beside the bytes of one batch, its producer included.
CYCLE_BATCH_ENTRY_BYTES: Final = 512
#: The columns of a change or a trim beside its encoded bytes.
CYCLE_CHANGE_ENTRY_BYTES: Final = 64
#: How long a new owner waits for the end of the sessions and transactions of the one before it.
END_SESSION_S: Final = 10.0

# --- reading -------------------------------------------------------------------------------

#: Readers waiting at once, over all protocols.
WAITING_READERS: Final = 50_000
#: Waiting readers that one turn of the event loop wakes. At 20 to 40 µs each they delay other work
#: for about half a millisecond; with fewer, the turns themselves would cost more.
READERS_WOKEN_AT_ONCE: Final = 16
