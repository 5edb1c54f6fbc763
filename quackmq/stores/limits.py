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

#: A producer silent for so long is forgotten (Kafka: one day; ours also outlives a weekend).
PRODUCER_EXPIRY_MS: Final = 7 * 24 * 3600 * 1000

# --- the local store -----------------------------------------------------------------------

#: A journal slot; four of them are a ring. A slot is reused only after a checkpoint covers it.
JOURNAL_SLOT_BYTES: Final = 64 * MIB
JOURNAL_SLOTS: Final = 4
#: Frames start on sector boundaries, so that writing one never rewrites another's bytes.
JOURNAL_ALIGNMENT: Final = 512
#: A partition's share of a cycle above this is synced in its segment and only named in the
#: journal: beyond it the second write costs more than the second sync saves.
JOURNAL_INLINE_BYTES: Final = 128 * KIB
#: Bytes carried inline by one frame, over all partitions; what is more goes by reference.
JOURNAL_FRAME_INLINE_BYTES: Final = 8 * MIB
#: Batches that one frame takes, unless a single call brings more. The loop commits a frame in one
#: step, and this many small batches of as many partitions take some 10 ms of it.
FRAME_BATCHES: Final = 1_000
#: A frame with more than that, of more partitions than this, takes no further batches: it would
#: refer to them, and each partition's file would be made and synced while all publishers wait.
REFERENCED_SHARES: Final = 64
#: A slot grows by so much at a time, zeros behind the frame: a sync that must also make a new
#: length durable takes half as long again, and so only one in some two thousand does.
JOURNAL_GROWTH_BYTES: Final = 1 * MIB
#: A frame up to this size is written on the loop: copying it to the system's memory takes less time
#: than handing it to a thread.
JOURNAL_LOOP_BYTES: Final = 64 * KIB
#: The largest frame that recovery believes in.
JOURNAL_FRAME_BYTES: Final = 32 * MIB
#: Appended bytes after which a checkpoint is made: it bounds what recovery has to read.
CHECKPOINT_BYTES: Final = 256 * MIB
#: Partitions whose state a checkpoint takes before others have their turn: some 5 ms of the loop.
CAPTURED_LOGS: Final = 500
#: With sync = os so many times as much: recovery reads more, and less is synced meanwhile.
RARER_CHECKPOINTS: Final = 16
#: A run of bytes below this size is written to a pack, which all partitions share. Creating and
#: syncing a file takes as long as writing a hundred such runs to one file.
PACKED_BYTES: Final = 64 * KIB
#: A pack is closed beyond this size: what is removed or written again has this grain.
PACK_BYTES: Final = 64 * MIB
#: Small runs are copied together and written to a pack by so much at a time.
PACK_WRITE_BYTES: Final = 1 * MIB
#: Extents of a path beyond which the next one is written together with those before it. An extent
#: takes 24 bytes of memory, and a read of its own when it is read.
PATH_EXTENTS: Final = 16
#: Paths whose extents are joined in one write-back: reading 17 extents takes some 100 µs.
PACK_JOINS: Final = 1_000
#: A path with more than this in packs moves to a file of its own...
MOVED_BYTES: Final = 128 * KIB
#: ...at checkpoints, so many paths each time: a new file takes two syncs, some milliseconds...
MOVED_PATHS: Final = 256
#: ...and so many at one go, since a write-back waits meanwhile.
MOVED_AT_ONCE: Final = 8
#: Bytes in packs that nothing names, beyond which packs are written again; also, more than half of
#: all bytes must be such. So packs take twice the room of what they hold, and this, at the most.
PACK_WASTE_BYTES: Final = 64 * MIB
#: Bytes that one checkpoint writes again for this purpose, or those of one pack.
REWRITTEN_BYTES: Final = 16 * MIB
#: Directories that are looked through at one go for files that a crash left.
SWEPT_AT_ONCE: Final = 64
#: Logs whose chunks are written back at one go: the loop notes what was written, some 2 µs a log.
WRITE_BACK_LOGS: Final = 2_000
#: A chunk, one partition's share of a flush cycle, takes no batch beyond this size but its first: a
#: region is read as a whole, so its chunks must not be large.
CHUNK_BYTES: Final = 1 * MIB
#: Open files of segments; beyond it the one longest unused is closed.
OPEN_SEGMENT_FILES: Final = 512
#: With fewer segments than these a log adds up what it is asked for. Beyond, it keeps sums and
#: maxima, which take some hundred bytes for each log.
FEW_SEGMENTS: Final = 16
#: Decoded indexes of closed segments held in memory.
CACHED_INDEXES: Final = 64
#: Indexes of aborted transactions held in memory; each of half a million fits.
CACHED_ABORTED_BYTES: Final = 16 * MIB
#: Files of trimmed segments and deleted topics are removed behind a checkpoint, made for that
#: purpose at most so often.
GARBAGE_INTERVAL_MS: Final = 1_000
#: Changes of the catalog (topics, cursors, states, trims) that are not durable yet, in memory;
#: callers wait above it. One call may bring as many bytes of them, because they share one frame.
CHANGE_BYTES: Final = 8 * MIB
#: What a batch takes of it beside its own bytes: its chunk, its future and answer, and its entry in
#: the frame. Measured; without it, 4 MiB of small batches took 70 MiB of memory.
PENDING_BATCH_OVERHEAD: Final = 1_400
#: The same for what is remembered of its producer until it is durable.
PENDING_PRODUCER_OVERHEAD: Final = 400
#: What a change of the catalog takes beside its bytes in the frame.
PENDING_CHANGE_OVERHEAD: Final = 864
#: Memory for recent batches, over all partitions. Who reads what has left it finds it in the page
#: cache; with all else a busy broker then stays below 200 MiB.
TAIL_BYTES: Final = 48 * MIB
#: All memory of recent batches and of those that wait for the disk: the tail with what it cannot
#: let go of yet, a cycle on its way, and what is gathered meanwhile. Beyond it publishers wait.
HELD_BYTES: Final = 128 * MIB
#: Chunks that only journal and tail hold, or what the tail has beyond its bound because of them.
#: Half of it starts their write-back; at this size the next cycle waits for it.
WRITE_BACK_BYTES: Final = HELD_BYTES - TAIL_BYTES - 2 * PENDING_BYTES
#: In the weak sync modes a power cut may lose this many offsets of a partition at the most: a
#: sync is forced before more are un-synced, and recovery skips so many, so none is given twice.
UNSYNCED_OFFSETS: Final = 16_000_000

# --- reading -------------------------------------------------------------------------------

#: Readers waiting at once, over all doors.
WAITING_READERS: Final = 50_000
#: Waiting readers that one turn of the event loop wakes. At 20 to 40 µs each they hold up others
#: for about half a millisecond; fewer would spend more of the time on turns of the loop.
READERS_WOKEN_AT_ONCE: Final = 16
