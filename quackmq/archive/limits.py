"""Bounds of the archive, each with its reason. Sizes are bytes unless the name says otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import BATCH_BYTES, KIB, MIB

# --- the archive ---------------------------------------------------------------------------

#: Rows of a row group, and about how much they take as Arrow columns: who wants one record of the
#: archive reads and decodes a row group, which takes some 20 ms then. A larger record is alone.
ARCHIVE_ROW_GROUP_ROWS: Final = 65_536
ARCHIVE_ROW_GROUP_BYTES: Final = 16 * MIB
#: Row groups of a file, which then is full: those of large records may compress to nothing, and the
#: footer that lists them is read as a whole.
ARCHIVE_ROW_GROUPS: Final = 1_000
#: Batches that are opened together, which costs less than one by one, and what they may inflate to
#: together; those that inflate to more are opened alone.
ARCHIVE_GROUP_BATCHES: Final = 64
ARCHIVE_GROUP_BYTES: Final = 16 * MIB
#: Batches from this size on are opened alone anyway: compressed ones, and others.
ARCHIVE_ALONE_COMPRESSED_BYTES: Final = 8 * KIB
ARCHIVE_ALONE_BYTES: Final = 64 * KIB
#: A file that is made of the log ends at this size: it is held in memory until it is durable, and
#: merging makes larger ones of it.
ARCHIVE_NEW_FILE_BYTES: Final = 64 * MIB
#: It also ends when so much of its range cannot be opened, and is held to be kept aside.
ARCHIVE_ASIDE_BYTES: Final = 32 * MIB
#: And when so much of the log was read for it: others wait for their turn.
ARCHIVE_TURN_BYTES: Final = 512 * MIB
#: What the archiver reads of a log at one go, on the loop, which takes it a fraction of a
#: millisecond.
ARCHIVER_READ_BYTES: Final = 256 * KIB
#: Where a read gives more pieces than this, of single messages for instance, an eighth of that is
#: read: the loop's time goes by the pieces then.
ARCHIVER_READ_CHUNKS: Final = 128
#: A buffer of the archiver is full at this; a batch that begins below it is in it as a whole.
ARCHIVE_FILL_BYTES: Final = 4 * MIB
ARCHIVE_BUFFER_BYTES: Final = ARCHIVE_FILL_BYTES + BATCH_BYTES
#: Buffers in all: one is filled while the other is turned into rows.
ARCHIVE_BUFFERS: Final = 2
#: How often partitions that have changed, or whose time has come, are looked at for what is due,
#: and how many at a time: a look takes some 20 µs.
ARCHIVE_LOOK_MS: Final = 500
ARCHIVE_LOOKS: Final = 1_024
#: So many others are looked at as well, in turns, whatever is known of them: 10,000 partitions in
#: 20 minutes, which costs next to nothing.
ARCHIVE_ROUND_LOOKS: Final = 4
#: Of these, so many at one go: the loop has others to serve.
ARCHIVE_LOOKS_AT_ONCE: Final = 128
#: After an error archiving is tried again after so long, twice as long each time, up to that.
ARCHIVE_RETRY_MS: Final = 1_000
ARCHIVE_RETRY_MAX_MS: Final = 60_000
#: Partitions whose archiving fails that are named in the state; the others are counted.
ARCHIVE_FAILURES: Final = 100
#: How much others go before the process that makes files: it gets a thirtieth of a processor that
#: the broker wants too, and all of one that nobody wants. What waits for it waits in the log.
ARCHIVE_WORKER_NICENESS: Final = 15
#: While somebody publishes, archiving pauses between two pieces, for such a part of the time that
#: the last one took, but no longer than that: enough for the publisher to notice it less, and not
#: so much that the archive stays behind for good.
ARCHIVE_PAUSES: Final = 0.3
ARCHIVE_PAUSE_MS: Final = 100
#: That process ends when it had nothing to do for so long: it takes some 100 MB.
ARCHIVE_WORKER_IDLE_MS: Final = 60_000
#: It is given so long to start, and to answer: files are made of pieces that take it a second.
ARCHIVE_WORKER_MS: Final = 120_000
#: Batches of a partition that are kept as they came because nobody can open them; each is a file.
ARCHIVE_QUARANTINED: Final = 10_000
#: What is noted of why a batch was quarantined, in characters.
ARCHIVE_REASON_CHARS: Final = 200
#: A manifest that is larger is none: the most files and quarantined batches fit.
ARCHIVE_MANIFEST_BYTES: Final = 16 * MIB
#: What stands behind the row groups of a file: some 3 KiB for each of them.
ARCHIVE_TAIL_BYTES: Final = 16 * MIB
#: Row groups that readers hold decoded; one that is larger is held alone.
ARCHIVE_CACHE_BYTES: Final = 64 * MIB
#: What is made of them at one go for a reader who reads on, in so many batches at the most: some
#: 15 ms of work, where a quarter of it takes 7...
ARCHIVE_AHEAD_BYTES: Final = 8 * MIB
ARCHIVE_AHEAD_BATCHES: Final = 64
#: ...and what of that may wait for its readers.
ARCHIVE_WAITING_BYTES: Final = 32 * MIB
#: What stands behind the row groups of the files that readers have used lately; some 20 KiB each.
ARCHIVE_CACHED_TAIL_BYTES: Final = 16 * MIB
#: Archived partitions of which one read gives something. To open one takes about 2 ms, however
#: little it has. The others are empty in the answer, and come with the next reads.
ARCHIVE_PARTITIONS_AT_ONCE: Final = 16
#: What one step in a side thread gives a reader of the archive: some 10 ms, then others' turn.
ARCHIVE_READ_BYTES: Final = 4 * MIB
#: Manifests that readers and plans hold on to, whose files stay meanwhile: a plan has one for each
#: partition, and a few hundred bytes each.
ARCHIVE_PINS: Final = 100_000
#: A merge makes a file of so many times the records of each that goes in: more would leave more
#: small files, fewer would write more often.
MERGE_GROWTH: Final = 4
#: Files that become one at once: each has a footer to be read.
MERGE_FILES: Final = 256
#: A merge works for this share of the time, and rests for the other: nobody waits for it.
MERGE_DUTY: Final = 0.5
#: A merged file is written to disk by pieces of this size; a row group makes several.
MERGE_WRITE_BYTES: Final = 1 * MIB
#: It is synced as often as so much was written: a sync of more holds up those of the journal.
MERGE_SYNC_BYTES: Final = 4 * MIB
#: The edge of a partition's archive is rewritten when more than this share of it is gone.
MERGE_EDGE_SHARE: Final = 0.5
