"""Bounds of the archive, each with its reason. Sizes are bytes unless the name says otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import BATCH_BYTES, KIB, MIB

# --- the archive ---------------------------------------------------------------------------

#: Rows of a row group, and about its size as Arrow columns. To read one record of the archive, a
#: row group is read and decoded, which then takes about 20 ms. A larger record has its own group.
ARCHIVE_ROW_GROUP_ROWS: Final = 65_536
ARCHIVE_ROW_GROUP_BYTES: Final = 16 * MIB
#: Row groups of a file; then it is full. Row groups of large records may compress to almost
#: nothing, and the footer that lists them is read as a whole.
ARCHIVE_ROW_GROUPS: Final = 1_000
#: Batches that are decoded together, which costs less than one by one, and the most that they may
#: inflate to together; larger ones are decoded alone.
ARCHIVE_GROUP_BATCHES: Final = 64
ARCHIVE_GROUP_BYTES: Final = 16 * MIB
#: Batches of this size and more are always decoded alone: compressed ones, and others.
ARCHIVE_SINGLE_COMPRESSED_BYTES: Final = 8 * KIB
ARCHIVE_SINGLE_BYTES: Final = 64 * KIB
#: A file made from the log ends at this size: it is in memory until it is durable, and merging
#: makes larger files.
ARCHIVE_NEW_FILE_BYTES: Final = 64 * MIB
#: It also ends when this many bytes of its range cannot be decoded and are held for quarantine.
ARCHIVE_QUARANTINE_BYTES: Final = 32 * MIB
#: It also ends when this much of the log was read for it: other partitions wait meanwhile.
ARCHIVE_RUN_BYTES: Final = 512 * MIB
#: How much of a log the archiver reads at once, on the loop: a fraction of a millisecond.
ARCHIVER_READ_BYTES: Final = 256 * KIB
#: If a read returns more pieces than this, for instance of single messages, an eighth of that is
#: read: the loop's time then depends on the number of pieces.
ARCHIVER_READ_CHUNKS: Final = 128
#: A buffer of the archiver is full at this size; a batch that begins below it is still added whole.
ARCHIVE_FILL_BYTES: Final = 4 * MIB
ARCHIVE_BUFFER_BYTES: Final = ARCHIVE_FILL_BYTES + BATCH_BYTES
#: Buffers in total: one is filled while the other is turned into rows.
ARCHIVE_BUFFERS: Final = 2
#: How often partitions that have changed, or whose time has come, are checked for records to
#: archive, and how many at a time: a check takes about 20 µs.
ARCHIVE_CHECK_MS: Final = 500
ARCHIVE_CHECKS: Final = 1_024
#: This many others are checked as well, in rotation, whatever is known of them: 10,000 partitions
#: in 20 minutes, at almost no cost.
ARCHIVE_ROTATION_CHECKS: Final = 4
#: How many are checked at once, before the loop serves other work.
ARCHIVE_CHECKS_PER_STEP: Final = 128
#: After an error, archiving is retried after this time, doubled each time up to the maximum.
ARCHIVE_RETRY_MS: Final = 1_000
ARCHIVE_RETRY_MAX_MS: Final = 60_000
#: Partitions whose archiving fails that are listed in the state; the others are counted.
ARCHIVE_FAILURES: Final = 100
#: Niceness of the process that makes files: it gets a thirtieth of a processor that the broker also
#: wants, and all of an idle one. Records that wait for it wait in the log.
ARCHIVE_WORKER_NICENESS: Final = 15
#: While there are publishers, archiving pauses between two pieces, for this share of the time that
#: the last piece took, up to a maximum: enough for publishers to notice it less, and not so much
#: that the archive never catches up.
ARCHIVE_PAUSE_SHARE: Final = 0.3
ARCHIVE_PAUSE_MS: Final = 100
#: That process ends after this time without work: it takes about 100 MB.
ARCHIVE_WORKER_IDLE_MS: Final = 60_000
#: How long it may take to start, and to respond: each piece of a file takes it about a second.
ARCHIVE_WORKER_MS: Final = 120_000
#: Batches of a partition that are kept unchanged because they cannot be decoded; each is a file.
ARCHIVE_QUARANTINED: Final = 10_000
#: How much of the reason for a quarantine is recorded, in characters.
ARCHIVE_REASON_CHARS: Final = 200
#: A larger manifest is invalid: the most files and quarantined batches fit.
ARCHIVE_MANIFEST_BYTES: Final = 16 * MIB
#: The part of a file after its row groups: about 3 KiB for each of them.
ARCHIVE_TAIL_BYTES: Final = 16 * MIB
#: Decoded row groups that are cached for readers; a larger one is cached alone.
ARCHIVE_CACHE_BYTES: Final = 64 * MIB
#: How much is turned into batches at once for a sequential reader, and the most batches: about
#: 15 ms of work, while a quarter of it takes 7 ms...
ARCHIVE_PREFETCH_BYTES: Final = 8 * MIB
ARCHIVE_PREFETCH_BATCHES: Final = 64
#: ...and how much of it is stored for readers.
ARCHIVE_PREFETCHED_BYTES: Final = 32 * MIB
#: The cached tails (see ARCHIVE_TAIL_BYTES) of files that were read lately; about 20 KiB each.
ARCHIVE_CACHED_TAIL_BYTES: Final = 16 * MIB
#: Archived partitions from which one read returns data. Opening one takes about 2 ms, however
#: little it has. The others are empty in the result, and are returned by the next reads.
ARCHIVE_PARTITIONS_AT_ONCE: Final = 16
#: How much one step in a side thread reads from the archive: about 10 ms, then other work runs.
ARCHIVE_READ_BYTES: Final = 4 * MIB
#: Manifests that readers and plans hold, whose files are kept meanwhile. A plan has one for each
#: partition; each takes a few hundred bytes.
ARCHIVE_PINS: Final = 100_000
#: A merge makes a file with this many times the records of each input. A larger factor leaves more
#: small files, a smaller one rewrites more often.
MERGE_GROWTH: Final = 4
#: Files merged at once: each has a footer to be read.
MERGE_FILES: Final = 256
#: The share of the time in which a merge works; otherwise it pauses: nobody waits for it.
MERGE_DUTY: Final = 0.5
#: A merged file is written to disk in pieces of this size; a row group makes several.
MERGE_WRITE_BYTES: Final = 1 * MIB
#: It is synced each time after this much: a larger sync delays those of the journal.
MERGE_SYNC_BYTES: Final = 4 * MIB
#: The first file of a partition's archive is rewritten when more than this share of it is trimmed.
MERGE_EDGE_SHARE: Final = 0.5
