"""Every bound of the system, each with its reason. Sizes are bytes unless the name says otherwise.

A bound that a user may want to move is a setting whose default stands here.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# --- names and the catalog -----------------------------------------------------------------

#: Kafka's own limit; clients check it too.
TOPIC_NAME_CHARS: Final = 249
#: Names of subscriptions, producers and clients travel in every request and cursor.
NAME_BYTES: Final = 255
#: One request can ask for this many partitions at the most; each costs memory for good.
PARTITIONS_PER_TOPIC: Final = 10_000
#: The catalog is in memory and in every checkpoint.
TOPICS: Final = 50_000
#: Over all topics; a partition costs about 1 KiB of memory.
PARTITIONS: Final = 100_000
#: A key of small state holds a name and an id or two, with words between them.
STATE_KEY_BYTES: Final = 1 * KIB
#: A value kept by compare-and-set is small state, not data.
STATE_VALUE_BYTES: Final = 256 * KIB
#: Number of keys kept by compare-and-set.
STATE_KEYS: Final = 1_000_000
#: Number of cursors over all names, topics and partitions.
CURSORS: Final = 1_000_000
#: What a client may store beside a committed offset; Kafka's default.
CURSOR_METADATA_BYTES: Final = 4 * KIB

# --- batches -------------------------------------------------------------------------------

#: The largest batch taken; Kafka's default is 1 MiB, generous producers use up to 8.
BATCH_BYTES: Final = 16 * MIB
#: What one batch may inflate to when a decoder opens it: a batch of 33 kB can claim 1 GiB.
DECODED_BATCH_BYTES: Final = 128 * MIB
#: Offsets that one batch covers; a header that claims more is refused before anything is decoded.
RECORDS_PER_BATCH: Final = 1_000_000
#: Records in a batch that a producer sends. Decoding takes some 2 µs a record, so a batch costs at
#: most half a second of the processor. The smallest record takes 7 bytes: a batch of Kafka's
#: default size, 1 MiB, holds at most 149,796 of them, and so always passes.
PUBLISHED_RECORDS_PER_BATCH: Final = 262_144
#: A large batch is decoded section by section, and the loop serves others in between. A section of
#: so many records takes some 2 ms; one record above so many bytes is a section of its own.
DECODED_SECTION_RECORDS: Final = 1_024
DECODED_SECTION_BYTES: Final = 64 * KIB
#: A batch is decoded in one step if it has at most so many records and, inflated, so many bytes.
DECODED_AT_ONCE_RECORDS: Final = 1_024
DECODED_AT_ONCE_BYTES: Final = 256 * KIB
#: Headers over all records of a batch: two bytes make one, which takes 60 and more in memory.
HEADERS_PER_BATCH: Final = 1_000_000
#: Records parsed at one go, so that the bound on headers is seen in time.
PARSED_BYTES: Final = 4 * MIB
#: What is made of single records or rows aims at this; consumers fetch 1 MiB of a partition.
ENCODED_BATCH_BYTES: Final = MIB
#: Columns made at one go; Arrow's own limit is 2 GiB a column.
ARROW_BYTES: Final = 1024 * MIB

# --- the clock -----------------------------------------------------------------------------

#: Differences between wall clock and broker time that are followed at once: NTP steps a clock by so
#: much, and append times stand still for so long where it is set back.
CLOCK_STEP_MS: Final = 1_000
#: A wall clock that differs by more has jumped, or the broker was off for long: somebody has to say
#: which. A long weekend is no jump, and the shortest expiry of offsets is 7 days.
CLOCK_JUMP_MS: Final = 5 * 24 * 3_600_000
#: Broker time approaches the wall clock by one millisecond in so many: an hour is made up for in
#: ten hours, and no retention time is wrong by more than a tenth.
CLOCK_PACE: Final = 10
#: Times that did not pass, remembered; each is an operator's confirmation.
CLOCK_GAPS: Final = 64
#: How often the store is told the time; a start after a crash knows it no better than that. It is a
#: small fraction of CLOCK_JUMP_MS.
CLOCK_KEEP_MS: Final = 10 * 60_000

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
#: A producer silent for so long is forgotten (Kafka: one day; ours also outlives a weekend).
PRODUCER_EXPIRY_MS: Final = 7 * 24 * 3600 * 1000
#: Open transactions a partition: their producers are never forgotten, so they must leave room for
#: others among PRODUCERS_PER_PARTITION.
OPEN_TRANSACTIONS: Final = 5_000

#: Bytes of keys hashed at one go (murmur2 in Python takes 80 ns a byte): others wait 1.3 ms for it.
#: A multiple of four, the bytes of the hash's words.
HASHED_KEY_BYTES: Final = 16 * KIB

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
#: A segment is closed at this size; retention and damage have this grain.
SEGMENT_BYTES: Final = 256 * MIB
#: One index entry covers at least this many bytes, or this much time.
REGION_BYTES: Final = 64 * KIB
REGION_MS: Final = 1_000
#: A chunk, one partition's share of a flush cycle, takes no batch beyond this size but its first: a
#: region is read as a whole, so its chunks must not be large.
CHUNK_BYTES: Final = 1 * MIB
#: A batch from this size on is not copied if its buffer is handed over: smaller ones lie better
#: together, and a buffer of their own would cost more than the copy.
KEPT_BATCH_BYTES: Final = 128 * KIB
#: Descriptors that the broker asks for where the system grants fewer than it says (macOS does, and
#: grants so many): connections and segments that are open at once.
OPEN_FILES: Final = 10_240
#: Open files of segments; beyond it the one longest unused is closed.
OPEN_SEGMENT_FILES: Final = 512
#: Reads of so many bytes and more that the system holds in memory are not copied out of there:
#: below that the copy costs less.
VIEWED_BYTES: Final = 256 * KIB
#: The longest such read; the piece of a file that is mapped for it is up to twice as long, so that
#: the next one finds it.
WINDOW_BYTES: Final = 4 * MIB
#: Pieces mapped at once: what is looked at in them counts as the process's memory.
WINDOWS: Final = 16
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
#: Memory of batches that are not durable yet; publishers wait above it. A disk that syncs 500 MB/s
#: has work for 60 ms with it, which is several cycles; more would only be more memory.
PENDING_BYTES: Final = 32 * MIB
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
#: Marks (append time, offset) a partition keeps to tell what is live, merged beyond this.
LIVE_MARKS: Final = 4_096
#: With sync = interval: a sync at least so often.
SYNC_INTERVAL_MS: Final = 100
#: The longest interval that may be set; who wants it longer means sync = os.
LONGEST_SYNC_INTERVAL_MS: Final = 60_000
#: In the weak sync modes a power cut may lose this many offsets of a partition at the most: a
#: sync is forced before more are un-synced, and recovery skips so many, so none is given twice.
UNSYNCED_OFFSETS: Final = 16_000_000

#: A file that is written as a whole is synced after each of these: a sync of the journal behind
#: 64 MiB took 40 to 60 ms at the 99th percentile in one trial, behind pieces of this size 20.
SYNCED_WRITE_BYTES: Final = 1 * MIB

# --- the archive ---------------------------------------------------------------------------

#: Rows of a row group, and about how much they take as Arrow columns: who wants one record of the
#: archive reads and decodes a row group, which takes some 20 ms then. A larger record is alone.
ARCHIVE_ROW_GROUP_ROWS: Final = 65_536
ARCHIVE_ROW_GROUP_BYTES: Final = 16 * MIB
#: A file is full at this size: it is made in memory. Spark reads files of 128 MiB in one task.
ARCHIVE_FILE_BYTES: Final = 128 * MIB
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
#: What goes from a log to the archive, unless a topic's policy says otherwise: what is so old, or
#: when there is so much of it. Much at a time makes files that are worth reading; what waits longer
#: is not read by those who look at the archive alone.
ARCHIVE_AFTER_MS: Final = 3_600_000
ARCHIVE_READY_BYTES: Final = 1024 * MIB
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
#: Files of a partition: its manifest is written anew with each of them, at some 350 bytes a file.
ARCHIVE_FILES: Final = 20_000
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
#: How far the thread that writes the archive steps back behind those that publish and deliver. Not
#: further: what holds the interpreter's lock and is not let run holds up everybody.
ARCHIVE_NICENESS: Final = 5
#: Archived partitions of which one read gives something. To open one takes about 2 ms, however
#: little it has. The others are empty in the answer, and come with the next reads.
ARCHIVE_PARTITIONS_AT_ONCE: Final = 16
#: What one step in a side thread gives a reader of the archive: some 10 ms, then others' turn.
ARCHIVE_READ_BYTES: Final = 4 * MIB
#: Manifests that readers and plans hold on to, whose files stay meanwhile: a plan has one for each
#: partition, and a few hundred bytes each.
ARCHIVE_PINS: Final = 100_000
#: Small files are merged until they are about this large; as a file that is full by itself.
MERGE_TARGET_BYTES: Final = ARCHIVE_FILE_BYTES
#: A merge makes a file of so many times the records of each that goes in: more would leave more
#: small files, fewer would write more often.
MERGE_GROWTH: Final = 4
#: Files that become one at once: each has a footer to be read.
MERGE_FILES: Final = 256
#: A merge works for this share of the time, and rests for the other: nobody waits for it.
MERGE_DUTY: Final = 0.5
#: How often files that came since then are looked at for merges that are worth it.
MERGE_INTERVAL_MS: Final = 10_000
#: A merged file is written to disk by pieces of this size; a row group makes several.
MERGE_WRITE_BYTES: Final = 1 * MIB
#: It is synced as often as so much was written: a sync of more holds up those of the journal.
MERGE_SYNC_BYTES: Final = 4 * MIB
#: The largest file that may be offered in the place of others: checksums and counts of it fit.
ARCHIVE_OFFERED_BYTES: Final = 1024 * MIB
#: Plans that keep files of the archive from going, and how long one may, unless it is renewed.
ARCHIVE_PLANS: Final = 1_000
ARCHIVE_PLAN_MS: Final = 24 * 3_600_000
#: Files that are listed in one answer, in partitions as a whole: all of one partition fit.
ARCHIVE_PAGE_FILES: Final = ARCHIVE_FILES
#: Files that may be put in the place of others by one call.
ARCHIVE_REPLACED_FILES: Final = 1_000
#: A file of the archive is read for whoever asks for its bytes by pieces of this size.
ARCHIVE_CHUNK_BYTES: Final = 1 * MIB
#: What health tells of files that cannot be merged and of partitions that have a problem, each.
ARCHIVE_TOLD: Final = 10
#: The edge of a partition's archive is rewritten when more than this share of it is gone.
MERGE_EDGE_SHARE: Final = 0.5

# --- reading -------------------------------------------------------------------------------

#: What is read to find a subscription's next message, where no batch is larger: the archive makes
#: batches as large as what is asked for, and who gets this message will get those behind it.
HEAD_BYTES: Final = 16 * KIB
#: One read's answer, over all partitions asked for.
READ_BYTES: Final = 64 * MIB
#: A read waits this long for new data at the most, whatever it asks for.
READ_WAIT_MS: Final = 60_000
#: Partitions in one read.
READ_PARTITIONS: Final = 10_000
#: Readers waiting at once, over all doors.
WAITING_READERS: Final = 50_000
#: Waiting readers that one turn of the event loop wakes. At 20 to 40 µs each they hold up others
#: for about half a millisecond; fewer would spend more of the time on turns of the loop.
READERS_WOKEN_AT_ONCE: Final = 16

# --- the broker ----------------------------------------------------------------------------

#: How often the event loop shows that it serves everybody: a pause is noticed up to so late.
LOOP_BEAT_MS: Final = 50
#: What a longer pause of the loop counts of the time for which clients are waited for: twice the
#: beat, so that an ordinary delay counts in full.
LOOP_LATE_MS: Final = 2 * LOOP_BEAT_MS
#: A pause from this length on is kept as the longest one, if it is; a busy loop has shorter ones.
LOOP_PAUSE_MS: Final = 20
#: A pause from this length on is in the log, but a line comes at most so often.
LOOP_PAUSE_LOG_MS: Final = 200
LOOP_PAUSE_LOG_INTERVAL_MS: Final = 10_000
#: While the loop is late, its stack is looked at so often, to find out what holds it.
LOOP_SAMPLE_MS: Final = 10
#: A broker told to stop leaves without having closed after this time: service managers kill after
#: 10 s or later, and a recovery at the next start is no loss.
DRAIN_MS: Final = 9_000
#: How often retention, δ and expired producers are looked at.
CLEAN_INTERVAL_MS: Final = 250
#: A publisher to a full topic with when_full = wait waits this long at the most.
FULL_TOPIC_WAIT_MS: Final = 5_000
#: Publishers waiting for room at once.
WAITING_PUBLISHERS: Final = 10_000
#: Bytes of publishers waiting for room, which are held meanwhile.
WAITING_PUBLISH_BYTES: Final = 64 * MIB
#: Decoded batches, and sections of large ones, held for readers of single messages.
DECODED_BATCHES: Final = 512
#: Their bytes. The one that was decoded last is held however large.
DECODED_CACHE_BYTES: Final = 64 * MIB
#: Large batches whose sections are known: a section takes some 150 bytes, so that a thousand of
#: them, those of a batch of the most records, take 150 KiB.
OUTLINED_BATCHES: Final = 64
#: What the compressed ones of them hold inflated. The last one is held however large.
INFLATED_CACHE_BYTES: Final = 64 * MIB
#: When the sections of a large batch are found, so much of them is kept decoded, from where its
#: first reader begins: most batches fit as a whole and are decoded once.
DECODED_AHEAD_BYTES: Final = 8 * MIB
#: Changes that one job of the broker (the cleaner's, say) asks of the store at once: they share
#: its flush cycles.
CHANGES_AT_ONCE: Final = 64
#: What the cleaner reads of a partition at a time to find out which batches are a surplus.
CLEAN_READ_BYTES: Final = 16 * MIB
#: A file of the archive of which more has to go, but not all, is cut so often at the most: each cut
#: writes its partition's manifest anew, and thousands of partitions share one lane of the disk.
ARCHIVE_CUT_MS: Final = 5_000
#: Topics that are named in health as not being cleaned; a full disk concerns all of them.
SHOWN_FAILURES: Final = 20
#: Holds on retention that health shows, and that are shown of a topic: who reads them wants names,
#: and a subscription that has stopped may hold every partition of a topic.
SHOWN_HELD_BACK: Final = 20
#: A cursor that holds retention back and has not moved for so long is named in the log. Consumers
#: that are merely slow have committed meanwhile.
HELD_BACK_MS: Final = 3_600_000
#: Lines that one cleaning writes about them: a thousand at once would hold the loop for 20 ms and
#: more. The others follow with the next cleanings, four of them a second.
HELD_BACK_LINES: Final = 20
#: How often leases of subscriptions are looked at; they are for days.
HOLD_LEASE_INTERVAL_MS: Final = 60_000
#: Producer ids taken from the store at a time; the rest of a block is lost with the process.
PRODUCER_ID_BLOCK: Final = 1_000
#: Subscriptions over all topics, pushed ones included.
SUBSCRIPTIONS: Final = 100_000
#: Receipts of subscriptions are kept for so long, unless their topic is told otherwise: longer than
#: anybody waits with asking what became of a delivery.
RECEIPTS_KEEP_MS: Final = 30 * 24 * 3_600_000
#: Append times that one receipt tells; a commit may take thousands of batches at once.
RECEIPT_TIMES: Final = 64
#: What a receipt is counted as where what is written at once is bounded; most are a bit less.
RECEIPT_BYTES: Final = 512
#: Receipts in one batch: with the longest names and all their times about 2 MiB. The broker's loop
#: goes round once for so many.
RECEIPTS_PER_BATCH: Final = 1_000
#: Stretches that were acknowledged and are not written yet, of a subscription in a partition. Where
#: there are more, as on a disk that takes nothing for a while, what is done and lies between them
#: counts as acknowledged too. What is lent keeps apart what may be more for that reason.
UNTOLD_RANGES: Final = 4_096
#: Ranges of offsets that are named of what a reader has lost before a message; what was let go of
#: is one, and each batch that cannot be read may be another.
LOST_RANGES: Final = 16
#: Entries of a partition that a subscription may have been lent and not acknowledged; one costs
#: about 250 bytes of memory, and all of them together must fit into a value of small state.
LEASES: Final = 10_000
#: Stretches that a live subscription has left behind for newer ones, of a partition; kept likewise.
LEASE_GAPS: Final = 1_000
#: What is lent and not acknowledged is lent again after this time, unless told otherwise: the
#: retransmission of the reliable proxy.
LEASE_MS: Final = 3_000
#: The longest that a lease may be given or extended; who works longer says so again.
LONGEST_LEASE_MS: Final = 12 * 3_600_000
#: So many of the newest entries are served in order to a live subscription that is behind; newer
#: ones wait for these at the most.
LIVE_WINDOW: Final = 100
#: Clients of the proxy that health tells of when they cannot be reached.
PUSH_TOLD: Final = 100
#: Channels by which subscriptions are pushed, over all of them: each is a peer of a door.
CHANNELS: Final = 50_000
#: What could not be read for a channel is tried again after this time: a disk that fails once may
#: be well, and one that stays damaged costs a read so often.
CHANNEL_RETRY_MS: Final = 1_000
#: Entries that one `take` of a channel lends at the most.
TAKEN_ENTRIES: Final = 1_000
#: What has become of pushed entries is written so often at the most, for all subscriptions
#: together: after a crash, what was acknowledged since is delivered again.
PUSHED_FLUSH_MS: Final = 50
#: Where many subscriptions have changed, more rarely: so much later for each of them, which takes
#: about 50 µs of the loop, but never more than the second.
PUSHED_FLUSH_EACH_MS: Final = 1
PUSHED_LONGEST_FLUSH_MS: Final = 500
#: After a write that failed, the next one is tried so much later.
PUSHED_RETRY_MS: Final = 1_000
#: What is written of it in one append; one subscription's share may take STATE_VALUE_BYTES.
PUSHED_FLUSH_BYTES: Final = 1 * MIB
#: What is read at a time of a topic whose subscriptions are pushed.
FEED_READ_BYTES: Final = 256 * KIB
#: The newest batches that are held for pushed subscriptions, over all topics, and of one topic at
#: the least: whoever is not further behind costs no read.
FEED_BYTES: Final = 64 * MIB
FEED_TOPIC_BYTES: Final = 64 * KIB
#: Batches of one partition that are held so.
FEED_BATCHES: Final = 10_000
#: A feed whose read was refused reads again after this time.
FEED_RETRY_MS: Final = 1_000
#: Batches read for subscriptions that are behind and not yet lent, over all of them; the one that
#: was just read is held however large.
AHEAD_BYTES: Final = 32 * MIB
#: Messages in one page of a partition, and their keys, values and headers: each message becomes a
#: handful of Python objects, and a page is held until its reader has taken it.
PAGE_RECORDS: Final = 10_000
PAGE_BYTES: Final = 8 * MIB
#: Read at first for each message that a page may hold; if that is too little, more is read.
PAGE_RECORD_BYTES: Final = 1 * KIB
#: What a publisher may give as a key by which a repeat is known; people use UUIDs, and URLs.
IDEMPOTENCY_KEY_BYTES: Final = 255
#: Numbered puts of which memory holds where they lie, so that a repeat is answered with their ids;
#: each costs about 500 bytes.
REMEMBERED_PUTS: Final = 10_000
#: A publisher's numbers are forgotten when it has put nothing for so long: a season's pause must
#: not make a repeat something new, as the 7 days of other groups' offsets would.
PUBLISHER_EXPIRY_MS: Final = 90 * 24 * 3_600_000
#: Publishers that number their puts. Each is a group, and a program that takes a new name whenever
#: it starts must not use up GROUPS.
PUBLISHERS: Final = 50_000
#: Producers registered with the topics of a queue; beyond it the one longest unused has to register
#: again, since programs that register whenever they start never say that they are done.
REGISTERED_PRODUCERS: Final = 100_000

# --- consumer groups -----------------------------------------------------------------------

#: How long the first members of an empty group wait for others that start with them; it is added
#: again while more come. Kafka waits 3 s, which is long for one that starts alone.
GROUP_INITIAL_DELAY_MS: Final = 250
#: The longest that may be set: clients take a broker that is silent for longer to be gone.
LONGEST_GROUP_INITIAL_DELAY_MS: Final = 60_000
#: Members of a group, with those that only hold an id: its leader is told of all of them at once.
GROUP_MEMBERS: Final = 5_000
#: Metadata of all members of a group; its leader is sent it in one answer.
GROUP_METADATA_BYTES: Final = 32 * MIB
#: Topic names read out of the subscriptions of a group, all members added up, before giving up.
GROUP_SUBSCRIBED_TOPICS: Final = 200_000
#: Ways of assigning partitions that a member may offer; clients know of five.
MEMBER_PROTOCOLS: Final = 64
#: Instance ids and member ids of a group's static members, which are kept as one small state.
STATIC_MEMBER_BYTES: Final = 128 * KIB
#: Ids of a group's members, as far as they are kept in the same state to be known after a restart.
MEMBER_IDS_BYTES: Final = 64 * KIB
#: What the members of a classic group take in that state, with what they say and are assigned, so
#: that they are members again after a restart: some 300 members of usual clients. Those of a larger
#: group are not kept, and join again. With STATIC_MEMBER_BYTES it fits into STATE_VALUE_BYTES.
KEPT_MEMBERS_BYTES: Final = 112 * KIB
#: The same over all groups: every checkpoint of the store contains it.
KEPT_MEMBERS_TOTAL_BYTES: Final = 32 * MIB
#: How often a member that is back after a restart is asked to say everything, before it has to join
#: anew: what it says first may be on its way already.
MEMBER_ASKED: Final = 3
#: What a session may last: Kafka allows 6 s to 30 min; shorter ones cost little in one process.
SESSION_MIN_MS: Final = 1_000
SESSION_MAX_MS: Final = 30 * 60_000
#: A new member waits so long for its first rebalance to end, and then has to ask again; Kafka's.
NEW_MEMBER_WAIT_MS: Final = 5 * 60_000
#: A rebalance waits so long for busy members, whatever they ask for: some ask for ever.
REBALANCE_MAX_MS: Final = 24 * 3_600_000
#: How long a member of the newer protocol (KIP-848) may be silent, and how often it is to be heard,
#: unless a group's configs say otherwise. Kafka's defaults.
CONSUMER_SESSION_MS: Final = 45_000
CONSUMER_HEARTBEAT_MS: Final = 5_000
#: Members that wait for partitions, or are to let go of some, are asked to be heard so often.
RECONCILING_HEARTBEAT_MS: Final = 500
#: The shortest interval that may be set: each heartbeat costs about a tenth of a millisecond.
CONSUMER_HEARTBEAT_MIN_MS: Final = 50
#: Times that partitions are moved between pools of members until their loads are even: each moves
#: at least one nearer, and after a few there is next to nothing left to move.
ASSIGNMENT_PASSES: Final = 10
#: Partitions of a group that are dealt out again in a millisecond at the most, over time: one that
#: has 10,000, and that members keep joining, gets a new target every 100 ms, which takes 30.
ASSIGNED_PER_MS: Final = 100
#: Regular expressions among the subscriptions of one group: each is tried on every topic.
GROUP_PATTERNS: Final = 8
#: A regular expression of a subscription, in characters.
PATTERN_CHARS: Final = 1_000
#: Memory for a regular expression that has been compiled, and for its states while it is tried.
PATTERN_BYTES: Final = 256 * KIB
#: Processor time for trying one on the names of all topics: 50,000 take half a second.
PATTERN_CPU_MS: Final = 2_000
#: They are tried again so often at the most while topics come and go.
PATTERN_REFRESH_MS: Final = 2_000
#: Requests that wait for that; one is tried at a time.
PATTERN_WAITERS: Final = 100
#: Groups that are known, most of them without members: each costs about 2 KiB until it expires.
GROUPS: Final = 100_000
#: What the members of all groups say and are assigned, which is held in memory.
GROUPS_BYTES: Final = 256 * MIB
#: Members waiting for a rebalance to end, over all groups.
GROUP_WAITERS: Final = 50_000
#: A group without members and commits is forgotten after so long, with its offsets; Kafka's.
GROUP_EXPIRY_MS: Final = 7 * 24 * 3_600_000
#: How often groups are looked at for that; nothing waits for it.
GROUP_EXPIRY_INTERVAL_MS: Final = 60_000
#: Groups looked at before others have a turn.
CLEANED_GROUPS: Final = 1_000
#: Offsets of one commit that are made durable at once; well within a frame of the journal.
COMMIT_BYTES: Final = 4 * MIB
#: Who uses a name by last id holds it for so long after a call: a message is worked on meanwhile.
MODE_LEASE_MS: Final = 30_000

# --- transactions --------------------------------------------------------------------------

#: The longest that a transaction may last: what was published behind its beginning waits for it,
#: for readers of committed records. Kafka's.
TRANSACTION_MAX_MS: Final = 15 * 60_000
#: A transaction whose time is up and that cannot be aborted (the disk is full, say) is tried again.
TRANSACTION_ABORT_AGAIN_MS: Final = 10_000
#: Transactional ids that are known: each costs about 1 KiB until it expires.
TRANSACTIONAL_IDS: Final = 100_000
#: Partitions of one transaction: each gets a marker, all of them in one frame of the journal.
TRANSACTION_PARTITIONS: Final = 10_000
#: Groups whose offsets one transaction commits, each a small state that its end removes.
TRANSACTION_GROUPS: Final = 16
#: A transactional id that nothing has happened to for so long is forgotten; Kafka's.
TRANSACTIONAL_ID_EXPIRY_MS: Final = 7 * 24 * 3_600_000
#: How often they are looked at for that; nothing waits for it.
TRANSACTIONAL_ID_EXPIRY_INTERVAL_MS: Final = 60_000

# --- staging -------------------------------------------------------------------------------

#: Stages at once; each is a hidden topic, and most writers have one or two.
STAGES: Final = 1_000
#: Bytes of all stages: they lie on disk beside the log until they are committed, aborted or old.
STAGED_BYTES: Final = 16 * 1024 * MIB
#: Batches of all stages: each costs about 250 bytes of memory.
STAGED_BATCHES: Final = 200_000
#: Writers of one stage: a commit names each of them.
STAGE_PARTS: Final = 10_000
#: Batches and bytes of one call, which is one unit in the log.
STAGE_CALL_BATCHES: Final = 1_000
STAGE_CALL_BYTES: Final = 32 * MIB
#: What a commit copies at a time: it is in memory twice.
STAGE_COPY_BYTES: Final = 4 * MIB
#: Commits that copy at the same time; others wait for their turn.
STAGE_COMMITS_AT_ONCE: Final = 4
#: A stage to which nobody has added for so long is aborted.
STAGE_EXPIRY_MS: Final = 24 * 3_600_000
#: That a key was committed is remembered for so long, so that a repeat is known as one.
STAGE_REMEMBERED_MS: Final = 7 * 24 * 3_600_000
#: Committed keys that are remembered; beyond it nothing more is staged.
COMMITTED_STAGES: Final = 200_000
#: Series of stages, a streaming query each: one small state and some 300 bytes of memory.
STAGE_SERIES: Final = 10_000
#: The last turn of a series is remembered for so long: a stream that was stopped comes back to it.
STAGE_SERIES_REMEMBERED_MS: Final = 365 * 24 * 3_600_000
#: Stages of one series at once: a writer that died leaves one, and what it left must not pile up.
STAGES_PER_SERIES: Final = 4
#: How often stages are looked at for that; nothing waits for it.
STAGE_EXPIRY_INTERVAL_MS: Final = 60_000

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

# --- the Python client ---------------------------------------------------------------------

#: How long a call waits unless told otherwise: long enough for a broker to be started again.
CLIENT_TIMEOUT_MS: Final = 5_000
#: Members of dead processes that a client removes from its group at once: each takes a consumer of
#: librdkafka's, with its threads. Others are missed when their sessions are over.
CLIENT_EVICTIONS: Final = 32
#: A process that shares a name and is gone without a goodbye is missed after so long; a Kafka
#: cluster takes no less than 6 s.
CLIENT_SESSION_MS: Final = 10_000
#: So often each is heard, and told to hand a partition over.
CLIENT_HEARTBEAT_MS: Final = 500
#: A message may be worked on for so long before its partition goes to another process.
CLIENT_BUSY_MS: Final = 5 * 60_000
#: The broker's cursor follows what a client has done so closely.
CLIENT_COMMIT_MS: Final = 200
#: A question to the cluster that can be asked again is, after so long without an answer: one that
#: was just set up may leave the first unanswered.
CLIENT_ASK_MS: Final = 2_000
#: A wait inside librdkafka, which Ctrl-C does not interrupt, takes so long at a time.
CLIENT_POLL_MS: Final = 100
#: A client that connects for the first time gives each address so long before it leaves it to
#: librdkafka; as long as librdkafka itself takes.
CLIENT_CONNECT_MS: Final = 2_000
#: A broker that is not there yet is looked for so often, if the caller gave a timeout.
CLIENT_PROBE_MS: Final = 100
#: Until a new producer has its id, librdkafka looks for one every 500 ms, and whenever it hears
#: which topics there are. So it is asked for them, after this time and then twice that and so on.
CLIENT_HURRY_MS: Final = 5
#: How often it is looked whether an answer has come, where nothing tells.
CLIENT_LOOK_MS: Final = 5
#: Messages that are taken out of librdkafka at a time: enough to share the cost of the call.
CLIENT_BATCH_MESSAGES: Final = 4_000
#: Messages of all sizes that wait in memory for `get` and `listen`, a topic.
CLIENT_AHEAD_BYTES: Final = 16 * MIB
#: A question for messages waits so long at the broker: who seeks has to wait for its end.
CLIENT_FETCH_WAIT_MS: Final = 200
#: Messages on their way to the broker; who puts more waits.
CLIENT_SENDING_BYTES: Final = 64 * MIB
#: Times that a message is sent again: enough for a few cut connections, and a broker that cannot
#: write is heard of before the time of a call is up.
CLIENT_SENDS: Final = 10
#: Different timeouts for which a client keeps a producer each, some threads and a connection.
CLIENT_PRODUCERS: Final = 8
#: That a topic was deleted and made anew is noticed after so long at the latest.
CLIENT_TOPIC_MS: Final = 10_000
#: A numbered put that its client left half done is taken back after so long, if nobody of the same
#: name does it before: readers wait for it meanwhile.
CLIENT_TRANSACTION_MS: Final = 10_000
#: Messages of one numbered put: they are one transaction, held in memory.
CLIENT_NUMBERED_MESSAGES: Final = 100_000
#: The longest that librdkafka is told to try to deliver a message; who waits longer hears then.
CLIENT_LONGEST_MS: Final = 24 * 3_600_000
#: A client that is closed has so long for its last commits, whatever its timeout.
CLIENT_CLOSE_MS: Final = 30_000
#: Processes on one machine that use one directory.
CLIENT_PROCESSES: Final = 1_000
#: Threads of an asynchronous client in which calls wait; more calls wait for a thread.
CLIENT_THREADS: Final = 32

# --- Spark ---------------------------------------------------------------------------------

#: A plan or a task that finds the broker away tries for so long: it is back within seconds when it
#: was restarted, and Spark itself tries a failed task again.
SPARK_RETRY_MS: Final = 30_000
#: Between two tries: a broker takes longer to come back.
SPARK_PAUSE_MS: Final = 100
#: An answer begins to come after so long at the latest: more than the longest wait that is asked
#: for. A commit of a large stage may take longer, and its answer is waited for so often: the
#: largest is copied within that on a slow disk.
SPARK_ANSWER_MS: Final = 120_000
SPARK_COMMIT_WAITS: Final = 15
#: Batches that a task asks for at a time; while it opens them, the next come.
SPARK_FETCH_BYTES: Final = 4 * MIB
#: Compressed batches that are opened together, and what they may come to together; those that come
#: to more are opened one by one.
SPARK_TOGETHER_BYTES: Final = 512 * KIB
SPARK_DECODED_BYTES: Final = 64 * MIB
#: Rows that are handed to Spark at a time: they lie in its memory as a whole.
SPARK_ROWS: Final = 65_536
#: Bytes for one task, as they are kept: some tenths of a second, against some 20 ms that a task
#: costs by itself.
SPARK_SPLIT_BYTES: Final = 16 * MIB
#: A record costs a task about as much as so many bytes of its own.
SPARK_RECORD_BYTES: Final = 32
#: Tasks of one plan: each is some hundred bytes in the driver, and some milliseconds of it.
SPARK_SPLITS: Final = 10_000
#: A stream that is at the end waits so long for more before it tells Spark that there is nothing;
#: who stops it waits as long.
SPARK_IDLE_MS: Final = 500
#: A batch of a stream that waits for more offsets waits no longer than this; as Spark's Kafka
#: source.
SPARK_DELAY_MS: Final = 15 * 60_000
#: What a query has read is told to the broker again after so long, also if that is nothing new.
SPARK_TOLD_MS: Final = 600_000
#: A query that the broker has not heard of for so long holds retention no longer: Spark does not
#: say when a checkpoint was deleted. A week is enough to find a failed query and start it again; it
#: is also how long Kafka remembers a group without members.
SPARK_HOLD_MS: Final = 7 * 24 * 3_600_000
#: A query that stops has so long for its last word to the broker.
SPARK_STOP_MS: Final = 2_000
#: A piece that has moved since it was planned is looked for so often; then batches are asked for.
SPARK_FINDS: Final = 4
#: Files of a plan stay for so long, unless it is renewed; what is gone is read through the broker.
SPARK_PLAN_MS: Final = 3_600_000
#: A table looks whether what lies behind its topic's archive are ends of transactions only, if it
#: is so little in each of so few partitions: a millisecond each, against half a second for a scan.
SPARK_ENDS: Final = 8
SPARK_ENDS_PARTITIONS: Final = 64
#: A compaction's plan lasts so long unless it is renewed, which it is three times in that: so long
#: the files of one that was killed are kept, and what it offered lies there.
COMPACT_PLAN_MS: Final = 60_000
#: Merges of a compaction that are at work at once; each is a thread of the driver that waits.
COMPACT_AT_ONCE: Final = 256
#: Plans of a compaction, one after the other, of which nothing could be carried out because others
#: were faster: somebody else is at it then.
COMPACT_TRIES: Final = 5
#: How much records grow by a merge of a compaction, at the least: whoever asks for it wants few
#: files more than little work.
COMPACT_GROWTH: Final = 2
#: Between two looks at whether a compaction is to stop.
COMPACT_LOOK_MS: Final = 200
#: A task of a sink gathers so much before it makes batches of it, and stages them in one call: the
#: larger, the larger the batches of each partition; it is in memory about four times.
SPARK_CHUNK_BYTES: Final = 8 * MIB
#: Rows without a key that go to one partition before the next has its turn.
SPARK_SPREAD_ROWS: Final = 500

# --- pipelines -----------------------------------------------------------------------------

#: Times that a stream is started whose Python process is not there in time: a machine that is busy
#: beyond that is too busy.
PIPELINE_STARTS: Final = 5
#: A stream that is told to stop has so long for the batch that it is in; it is done again anyway.
PIPELINE_STOP_MS: Final = 60_000
#: One that follows it then has so long for what is there: seconds, on a busy machine minutes; who
#: does not want to wait sends a second signal.
PIPELINE_FOLLOW_MS: Final = 600_000
#: Rows of a report that a terminal shows; all are in its JSON.
PIPELINE_SHOWN_ROWS: Final = 50
#: Windows that a report on a stream has: the last ones, since a stream may run for years.
PIPELINE_KEPT_WINDOWS: Final = 60
#: Processes that a pipeline starts; each takes some 50 MB.
PIPELINE_WORKERS: Final = 100
#: Workers that die are started again so often, all together: then it is no accident.
PIPELINE_RESTARTS: Final = 20
#: A worker that is not wanted any more has so long to end by itself.
PIPELINE_WORKER_END_MS: Final = 10_000
#: Whether the broker of such processes is there is asked so often, and for so long at a time.
PIPELINE_LOOK_MS: Final = 1_000
#: One that is away for longer ends the pipeline: time for a restart, and less than the processes
#: themselves wait for an answer, so that one sentence is said, and not one by each of them.
PIPELINE_AWAY_MS: Final = 20_000
#: Measurements that a process gathers before it reports them: they would be lost with it.
PIPELINE_SAMPLES: Final = 1_000
#: Offsets that a replay publishes at once: each such portion is a transaction of the broker's, and
#: a name that it remembers for a week.
REPLAY_OFFSETS: Final = 1_000_000
#: Runs of offsets and numbers that a task of an audit holds before it joins them, at 56 bytes each.
AUDIT_RUNS: Final = 200_000
#: What an audit takes to the driver of what it found, holes that can be explained included: a hole
#: is left by every transaction, and one costs about 200 bytes there.
AUDIT_FINDINGS: Final = 1_000_000
#: Offsets without a time that an audit looks up as one piece: Spark has their numbers in memory.
AUDIT_STRETCH: Final = 10_000
#: Findings that an audit names one by one, of each kind; the others are counted.
AUDIT_NAMED: Final = 10

# --- all doors -----------------------------------------------------------------------------

#: So many first bytes of a connection tell which protocol it speaks: a greeting of ZMTP needs 10, a
#: method of HTTP and the space behind it mostly fewer.
OPENING_BYTES: Final = 32
#: One line in this time is logged about peers of one kind that came to the wrong door: libzmq
#: connects again ten times a second, for ever.
MISTAKEN_LOG_MS: Final = 60_000

# --- the Kafka door ------------------------------------------------------------------------

#: Connections at once; one that is idle costs about 2 KiB.
KAFKA_CONNECTIONS: Final = 10_000
#: Connections that the system holds for us before we have taken them.
KAFKA_BACKLOG: Final = 1_024
#: The largest Produce request: several of the largest batches fit.
KAFKA_PRODUCE_BYTES: Final = 64 * MIB
#: The largest request of any other kind: 10,000 topics by name fit. Reading one takes time of the
#: loop that all connections share.
KAFKA_REQUEST_BYTES: Final = 4 * MIB
#: Array elements in one request, over all its arrays: each becomes a Python object.
KAFKA_REQUEST_ELEMENTS: Final = 50_000
#: A string of the protocol; what its signed 16-bit length can say.
KAFKA_STRING_BYTES: Final = 32_767
#: Read and not yet answered, a connection; beyond it we stop reading from that connection.
KAFKA_REQUESTS_IN_FLIGHT: Final = 128
#: The one buffer into which all connections receive; a request that comes whole is read there.
KAFKA_SCRATCH_BYTES: Final = 256 * KIB
#: A connection keeps so much of a request that has begun without asking anybody.
KAFKA_UNRESERVED_BYTES: Final = 64 * KIB
#: All larger requests on their way at once, over all connections; those beyond it wait their turn.
KAFKA_RECEIVE_BYTES: Final = 512 * MIB
#: The memory given to a large request is at most so many times what has come of it.
KAFKA_RECEIVE_GROWTH: Final = 8
#: Receive buffers kept for the next large request.
KAFKA_POOLED_BYTES: Final = 8 * MIB
#: The largest memory for a request that is used again after its batch has been let go of: nearly
#: all producers send requests of 1 MiB at the most.
KAFKA_LENT_BYTES: Final = 2 * MIB
#: Number of those that wait for the next request: what one flush cycle lets go of.
KAFKA_IDLE_LENT: Final = 16
#: Topics for which the beginning of a Produce answer is kept ready.
KAFKA_ANSWER_HEADS: Final = 1_024
#: A request that has begun must have come whole after this time.
KAFKA_REQUEST_WAIT_MS: Final = 120_000
#: While others wait for memory, a large request that comes too slowly to be whole in that time is
#: given up, after so long at the earliest: any network can be slow for a moment.
KAFKA_PACE_MS: Final = 2_000
#: One fetch's answer (beyond its first batch); asking again costs little, memory for slow
#: readers much.
KAFKA_FETCH_BYTES: Final = 8 * MIB
#: The same while answers that slow readers have not taken fill KAFKA_SEND_BYTES.
KAFKA_SCARCE_FETCH_BYTES: Final = 64 * KIB
KAFKA_SEND_BYTES: Final = 256 * MIB
#: Written and not yet taken by the peer; above it nothing more is begun for that connection.
KAFKA_WRITE_BUFFER_BYTES: Final = 256 * KIB
#: Answers up to this size together are copied into one buffer; larger ones are sent in pieces.
KAFKA_JOINED_BYTES: Final = 16 * KIB
#: Members described, or offsets given, by one answer: the largest group fits. Beyond it, groups are
#: refused by name: a small request could ask for the same large thing many times.
KAFKA_GROUPS_ANSWER_BYTES: Final = 64 * MIB
#: Configs in one answer: those of 2,500 topics. To write it takes time of the loop that all
#: connections share, 4 µs each with everything that can be said of it.
KAFKA_CONFIGS_ANSWER: Final = 50_000
#: Partitions of transactions, or producers of partitions, in one answer: those of five of the
#: largest. Beyond it, the rest is refused by name: a small request could ask for much many times.
KAFKA_TRANSACTIONS_ANSWER: Final = 50_000
#: Topics or partitions that Metadata describes before others have their turn: some 5 ms of work.
METADATA_SLICE: Final = 250
#: Forms of Metadata (a version, with or without operations) in which topics are kept encoded, about
#: 100 bytes a topic each. A cluster's clients rarely use more.
METADATA_FORMS: Final = 4
#: A door that closes waits so long for its last answers to be durable and taken.
KAFKA_DRAIN_MS: Final = 5_000
#: After the last answer the peer has so long to hang up itself.
KAFKA_LINGER_MS: Final = 1_000

# --- the HTTP door -------------------------------------------------------------------------

#: Connections at once, each with one request under way at the most; an idle one costs 4 KiB.
HTTP_CONNECTIONS: Final = 10_000
#: Connections that the system holds for us before we have taken them.
HTTP_BACKLOG: Final = 1_024
#: A request's line and headers; browsers and proxies send up to 16 KiB.
HTTP_HEAD_BYTES: Final = 32 * KIB
#: Heads that are known again, and how large each may be: some 3 KiB of memory each with what was
#: made of it, at the most. A client's own are few, and differ in the length that they tell.
HTTP_KNOWN_HEADS: Final = 1_024
HTTP_KNOWN_HEAD_BYTES: Final = 1 * KIB
#: A complaint about a body gets a hint if it is no longer than this: it may quote what was sent,
#: and comparing names takes time that grows with them.
HTTP_EXPLAINED_CHARS: Final = 1_000
#: Parameters of one query: no endpoint has more than ten.
HTTP_QUERY_PARAMETERS: Final = 100
#: A request's body, unless its route says otherwise: the largest batch fits, not as base64.
HTTP_BODY_BYTES: Final = 16 * MIB
#: The body of one message as text in JSON, which may escape every byte of it, and of base64.
HTTP_QUEUE_BODY_BYTES: Final = 32 * MIB
#: A connection keeps so much of a body that has begun without asking anybody.
HTTP_UNRESERVED_BYTES: Final = 64 * KIB
#: All larger bodies at once, on their way or at work, over all connections; one more is refused.
HTTP_RECEIVE_BYTES: Final = 512 * MIB
#: Requests of one connection that wait for those before them; beyond it we stop reading.
HTTP_REQUESTS_AHEAD: Final = 16
#: Parsed at one go, before it is looked how many wait: a read of 256 KiB may hold 9,000 requests.
HTTP_PARSED_BYTES: Final = 8 * KIB
#: A request that has begun must have come whole after this time: the largest, at 1 MB/s.
HTTP_REQUEST_WAIT_MS: Final = 30_000
#: A connection on which nothing is asked is closed after this time; proxies keep theirs for 60 s.
HTTP_IDLE_MS: Final = 75_000
#: A peer that takes nothing of its answer for so long is disconnected.
HTTP_SEND_WAIT_MS: Final = 30_000
#: Written and not yet taken by the peer; above it nothing more is begun for that connection.
HTTP_WRITE_BUFFER_BYTES: Final = 256 * KIB
#: The same over all connections; above it requests are refused until slow peers have caught up.
HTTP_SEND_BYTES: Final = 256 * MIB
#: A door that closes waits so long for its last answers: half of it for them to be durable, the
#: rest for them to be taken.
HTTP_DRAIN_MS: Final = 4_000
#: A peer whose request was refused before it was whole has so long to hang up itself.
HTTP_LINGER_MS: Final = 1_000
#: Messages in one request to publish, or to stage: each becomes a handful of Python objects.
HTTP_MESSAGES: Final = 10_000
#: Headers of one message, as JSON.
HTTP_MESSAGE_HEADERS: Final = 1_000
#: A key in the query, which has to fit the request's line.
HTTP_KEY_BYTES: Final = 4 * KIB
#: Items in a page of a list: a page is made at one go, by the loop that all connections share.
HTTP_PAGE_ITEMS: Final = 1_000
#: Messages of a page, as bytes; the first is given whole. Asking again costs little.
HTTP_PAGE_BYTES: Final = 4 * MIB
#: The longest wait for a message that may be asked for: proxies give up after 60 s, many earlier.
HTTP_WAIT_MS: Final = 30_000
#: Streams of events at once: each holds a connection for as long as its reader likes.
HTTP_EVENT_STREAMS: Final = 1_000
#: Partitions of one stream of events: each event's id tells where to go on in all of them.
HTTP_EVENT_PARTITIONS: Final = 100
#: A stream of events that has nothing to say says so, so that both sides and every proxy between
#: them know that it is alive; half of the 30 s after which the impatient ones cut.
HTTP_HEARTBEAT_MS: Final = 15_000
#: Messages that a stream of events takes from a partition at a time; a reader that is slower than
#: its topic costs twice as much: what it is being sent, and what is read behind that.
HTTP_EVENTS_BYTES: Final = 256 * KIB
HTTP_EVENTS_RECORDS: Final = 500
#: Record batches in one answer, beyond the first: few requests for much data, and no more memory
#: for one that is taken slowly than a fetch of Kafka's has.
HTTP_BATCHES_BYTES: Final = 8 * MIB
#: What is looked through for holes in one request: a batch of one marker takes 78 bytes, so that
#: an answer may tell of 13,000.
HTTP_HOLES_BYTES: Final = 1 * MIB
#: Append times that one such answer tells, in a header of some 10 bytes each; there are fewer
#: batches in an answer that would have to tell more.
HTTP_APPEND_TIMES: Final = 1_000
#: Topics and partitions whose offsets one answer tells: a microsecond or two of the loop each.
HTTP_OFFSETS_TOPICS: Final = 1_000
HTTP_OFFSETS_PARTITIONS: Final = 10_000

# --- the queue's libraries -----------------------------------------------------------------

#: How long a call takes at the most, unless told otherwise, as the description of the queue has it.
QUEUE_TIMEOUT_MS: Final = 5_000
#: Between two tries to reach a broker that is away: it takes longer to come back.
QUEUE_PAUSE_MS: Final = 50
#: An answer: a message of BATCH_BYTES of which JSON escapes every byte, or the names of all topics.
QUEUE_ANSWER_BYTES: Final = 128 * MIB

# --- the ZeroMQ door -----------------------------------------------------------------------

#: Connections at once; one that is idle costs about 3 KiB.
ZMQ_CONNECTIONS: Final = 10_000
#: Connections that the system holds for us before we have taken them.
ZMQ_BACKLOG: Final = 1_024
#: Greetings and READY must have been said by then: they are sent without waiting for anything.
ZMQ_HANDSHAKE_MS: Final = 10_000
#: A command of ZMTP; READY with an identity and some notes of an application fits many times.
ZMQ_COMMAND_BYTES: Final = 4 * KIB
#: What of a PING has to be sent back; ZMTP's own limit.
ZMQ_PING_BYTES: Final = 16
#: Frames before the empty one that begins a request: one for each proxy on its way, and one more.
ZMQ_ENVELOPE_FRAMES: Final = 16
#: One such frame; ZeroMQ's own limit of a routing id.
ZMQ_ENVELOPE_FRAME_BYTES: Final = 255
#: A request's frame: the largest batch, and the words before its content.
ZMQ_REQUEST_BYTES: Final = BATCH_BYTES + KIB
#: Read and not yet answered, a connection. A REQ socket has one; beyond it we stop reading.
ZMQ_REQUESTS_IN_FLIGHT: Final = 128
#: The same over all connections: each is a task, of some 4 KiB.
ZMQ_REQUESTS: Final = 20_000
#: The one buffer into which all connections receive; what has not been read of it, they keep.
ZMQ_SCRATCH_BYTES: Final = 64 * KIB
#: A request up to this size needs no memory set aside.
ZMQ_UNRESERVED_BYTES: Final = 16 * KIB
#: All larger requests at once, from their first byte to their answer; those beyond it wait.
ZMQ_RECEIVE_BYTES: Final = 256 * MIB
#: A request that has begun must have come whole after this time.
ZMQ_REQUEST_WAIT_MS: Final = 60_000
#: While others wait for memory, a large request that comes too slowly to be whole in that time is
#: given up, after so long at the earliest: any network can be slow for a moment.
ZMQ_PACE_MS: Final = 2_000
#: How often peers are looked at for having been silent or slow for too long.
ZMQ_SWEEP_MS: Final = 1_000
#: A GET waits so long for a message: less than the 5 s that clients wait for their answer.
ZMQ_GET_WAIT_MS: Final = 4_000
#: Answers up to this size are copied into one buffer; larger ones are sent in two pieces.
ZMQ_JOINED_BYTES: Final = 16 * KIB
#: Written and not yet taken by the peer; above it nothing more is read from or sent to it.
ZMQ_WRITE_BUFFER_BYTES: Final = 256 * KIB
#: The same over all peers that are above it; then answers that are as large wait.
ZMQ_SEND_BYTES: Final = 256 * MIB
#: A peer that does not take its answers for so long is disconnected.
ZMQ_SEND_WAIT_MS: Final = 30_000
#: A door that closes waits so long for its last answers to be durable and taken.
ZMQ_DRAIN_MS: Final = 5_000
#: After the last answer the peer has so long to hang up itself.
ZMQ_LINGER_MS: Final = 1_000

# --- the line door -------------------------------------------------------------------------

#: QUACKSIZE, unless told otherwise: an entry is news, not a file; each subscriber may hold one.
LINE_ENTRY_BYTES: Final = 4 * KIB
#: The words before an entry, or a whole message without one: an id and a topic fit well.
LINE_HEAD_BYTES: Final = 1 * KIB
#: Of a line too long, what is read past to answer it: a slip, not a peer that never ends one.
LINE_LEFT_OUT_BYTES: Final = 1 * MIB
#: Bad messages in a row. A person's slips are fewer; a peer of another protocol has more.
LINE_REFUSALS: Final = 100
#: Topics of one connection; each is a subscription's, or a publisher's entry that waits.
LINE_TOPICS: Final = 1_000
#: The most that QUACKSIZE may be set to: half a line of it lies here for each peer that is slow.
LINE_LONGEST_ENTRY_BYTES: Final = 64 * KIB
#: Connections at once; an idle one costs about 10 KiB, one that means harm a line and a buffer.
LINE_CONNECTIONS: Final = 4_000
#: Connections that the system holds for us before we have taken them.
LINE_BACKLOG: Final = 1_024
#: The one buffer into which all connections receive; what has not been read of it, they keep.
LINE_SCRATCH_BYTES: Final = 16 * KIB
#: Messages of one connection that are looked at in one turn of the loop: then others have theirs.
LINE_MESSAGES_AT_ONCE: Final = 64
#: Lines of entries that are kept for the other subscribers to whom they will be sent as well; in
#: step with each other they need one, and those who are behind make their own.
LINE_KEPT_LINES: Final = 256
#: A peer that has not said what it wants has so long for its next message: a person may type it.
LINE_HANDSHAKE_MS: Final = 60_000
#: A line that has begun must be whole after this time: terminals and programs send lines whole.
LINE_WAIT_MS: Final = 10_000
#: A subscriber that does not answer an entry for so long is dead, unless told otherwise: time to
#: type the answer.
LINE_ANSWER_MS: Final = 30_000
#: The longest that a subscriber may be given.
LINE_LONGEST_ANSWER_MS: Final = 3_600_000
#: An entry is lent for so much longer than its subscriber has for the answer, so that who is silent
#: is found out by the door, which gives it back at once.
LINE_LEASE_MARGIN_MS: Final = 10_000
#: Written and not yet taken by the peer; above it nothing more is read from or sent to it.
LINE_WRITE_BUFFER_BYTES: Final = 64 * KIB
#: A peer that does not take its answers for so long is disconnected.
LINE_SEND_WAIT_MS: Final = 10_000
#: How often peers are looked at for having been silent or slow for too long.
LINE_SWEEP_MS: Final = 500
#: A door that closes waits so long for entries to be durable and for answers to those that are out.
LINE_DRAIN_MS: Final = 3_000
#: After the last word the peer has so long to hang up itself.
LINE_LINGER_MS: Final = 1_000
#: Topics of a connection that are named where connections are listed; it may have a thousand.
CONNECTION_TOPICS_TOLD: Final = 20
#: Ended connections whose records are kept, for whoever wants to know how they ended.
LINE_ENDED: Final = 1_000

# --- the reliable proxy: XSUB, XPUB and its REP ----------------------------------------------

#: Frames of a publisher's message: its topic and its body.
PROXY_FRAMES: Final = 2
#: A publisher's message, both frames: the largest batch, and a topic's name.
PROXY_MESSAGE_BYTES: Final = BATCH_BYTES + KIB
#: A subscription: the longest topic's or client's name, and what stands before it.
PROXY_PREFIX_BYTES: Final = KIB
#: Ids that one request acknowledges: at 40 bytes each they fit into a request many times.
PROXY_IDS: Final = 1_000
#: What a PUB socket has sent and is not published yet: messages, and their bytes; then nothing more
#: is read from it. What is read together is published together, and a batch is about 1 MiB.
PROXY_PUBLISHER_MESSAGES: Final = 4_096
PROXY_PUBLISHER_BYTES: Final = MIB
#: What is read for subscribers at once, and made into frames together; others have a turn between.
PROXY_PAGE_RECORDS: Final = 2_000
PROXY_PAGE_BYTES: Final = 256 * KIB
#: Partitions that are followed for subscribers: a task each, of some 4 KiB.
PROXY_FEEDS: Final = 20_000
#: Subscriptions of one SUB socket.
PROXY_SUBSCRIPTIONS: Final = 1_000
#: What a SUB socket has not taken, beyond which it misses messages: some seconds at 10 Mbit/s, and
#: of all sockets that are so slow together no more than ZMQ_SEND_BYTES. They share the bytes.
PROXY_UNSENT_BYTES: Final = 8 * MIB
#: Following a topic that cannot be read is tried again after this time.
PROXY_RETRY_MS: Final = 1_000
#: What goes wrong again and again is in the log so often.
PROXY_TELL_MS: Final = 10_000
#: Clients of the proxy, each counted once for each topic that it has said hello to: a task each.
PROXY_CLIENTS: Final = 10_000
#: Entries that the proxy lends to a client at once; each takes an exchange if it was missed.
PROXY_TAKEN: Final = 100
#: Acknowledgements that have come before their entries were lent, of a client and topic; one takes
#: about 200 bytes. XPUB runs ahead of leases by as many entries as a subscription may have lent.
PROXY_EARLY: Final = 10_000
#: A client's address is given so long to be looked up and to answer a connection, less than the 5 s
#: that clients wait for an answer to `hello`; and a message to be acknowledged, from when its last
#: bytes have left.
PROXY_CONNECT_MS: Final = 4_000
PROXY_ANSWER_MS: Final = 3_000
#: Bytes a second at which a message leaves for a client at the least, or it is begun anew later:
#: who takes fewer, however steadily, would keep others from sending large ones. At this pace 16 MiB
#: take 9 minutes.
PROXY_SLOWEST_BYTES: Final = 32 * KIB
#: Addresses that are tried at once because somebody has said `hello` with them, a descriptor each;
#: and of those that one host has named. An address that is well answers within a millisecond.
PROXY_HELLOS: Final = 1_000
PROXY_HELLOS_OF_HOST: Final = 100
#: Large messages on their way to clients at once: each takes its bytes, until it is answered.
PROXY_LARGE_EXCHANGES: Final = 64
#: What a client's REP socket may answer: three words and an id.
PROXY_ANSWER_BYTES: Final = 4 * KIB
#: A connection to a client is kept for so long after its last message.
PROXY_IDLE_MS: Final = 30_000
#: Where nobody answers, nothing is tried for this time, twice as long after each failure, up to:
PROXY_BACKOFF_MS: Final = 100
PROXY_LONGEST_BACKOFF_MS: Final = 30_000
#: What a reliable subscriber has in hand, got and not done or to be got: messages, and their bytes.
#: What comes beyond that is not kept, and comes again.
CLIENT_PROXY_MESSAGES: Final = 10_000
CLIENT_PROXY_BYTES: Final = 64 * MIB
