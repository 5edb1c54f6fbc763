"""Bounds that several packages share, each with its reason. Sizes are bytes by default.

Every package has its own `limits` module for the rest; `quackmq limits` lists all of them. A bound
that a user may want to change is a setting whose default is here.
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
#: The most partitions that one request can ask for; each costs memory permanently.
PARTITIONS_PER_TOPIC: Final = 10_000
#: Patterns with topic defaults: so many in the settings, and so many that are set at run time. The
#: creation of a topic matches all of them, which takes some 0.3 ms.
TOPIC_DEFAULTS: Final = 256
#: A key of small state consists of a name, one or two ids, and words between them.
STATE_KEY_BYTES: Final = 1 * KIB
#: A value kept by compare-and-set is small state, not data.
STATE_VALUE_BYTES: Final = 256 * KIB
#: The metadata of a committed offset; Kafka's default.
CURSOR_METADATA_BYTES: Final = 4 * KIB

# --- batches -------------------------------------------------------------------------------

#: The largest accepted batch; Kafka's default is 1 MiB, generous producers use up to 8.
BATCH_BYTES: Final = 16 * MIB
#: The most that one batch may inflate to when it is decoded: a batch of 33 kB can claim 1 GiB.
DECODED_BATCH_BYTES: Final = 128 * MIB
#: Offsets that one batch covers; a header that claims more is refused before anything is decoded.
RECORDS_PER_BATCH: Final = 1_000_000
#: Records in a batch that a producer sends. Decoding takes about 2 µs per record, so a batch costs
#: at most half a second of the processor. The smallest record takes 7 bytes: a batch of Kafka's
#: default size, 1 MiB, has at most 149,796 of them, and so always passes.
PUBLISHED_RECORDS_PER_BATCH: Final = 262_144
#: Bytes of records parsed at once, so that the bound on headers is checked in time.
PARSED_BYTES: Final = 4 * MIB
#: The target size of batches made from single records or rows; consumers fetch 1 MiB per partition.
ENCODED_BATCH_BYTES: Final = MIB
#: Columns made at once; Arrow's own limit is 2 GiB per column.
ARROW_BYTES: Final = 1024 * MIB

# --- the clock -----------------------------------------------------------------------------

#: Differences between wall clock and broker time that are followed at once: NTP steps a clock by as
#: much. If the clock is set back, append times stand still for as long.
CLOCK_STEP_MS: Final = 1_000
#: A wall clock that differs by more has jumped, or the broker was off for long: an operator has to
#: say which. A long weekend is not a jump, and the shortest expiry of offsets is 7 days.
CLOCK_JUMP_MS: Final = 5 * 24 * 3_600_000
#: Broker time approaches the wall clock by one millisecond in this many: an hour is made up for in
#: ten hours, and no retention time is wrong by more than a tenth.
CLOCK_PACE: Final = 10
#: Remembered times that did not pass; each is an operator's confirmation.
CLOCK_GAPS: Final = 64
#: How often the time is stored; after a crash it is known no better than that. It is a small
#: fraction of CLOCK_JUMP_MS.
CLOCK_KEEP_MS: Final = 10 * 60_000

# --- the local store -----------------------------------------------------------------------

#: A segment is closed at this size; retention deletes whole segments.
SEGMENT_BYTES: Final = 256 * MIB
#: One index entry covers at least this many bytes, or this much time.
REGION_BYTES: Final = 64 * KIB
REGION_MS: Final = 1_000
#: A batch of at least this size is not copied if its buffer is handed over. Smaller ones are better
#: stored together: a separate buffer would cost more than the copy.
KEPT_BATCH_BYTES: Final = 128 * KIB
#: Memory of batches that are not durable yet; above it publishers wait. A disk that syncs 500 MB/s
#: has work for 60 ms, which is several cycles; more would only cost memory.
PENDING_BYTES: Final = 32 * MIB
#: With sync = interval: the longest time between syncs.
SYNC_INTERVAL_MS: Final = 100

# --- the archive ---------------------------------------------------------------------------

#: A file is full at this size: it is built in memory. Spark reads files of 128 MiB in one task.
ARCHIVE_FILE_BYTES: Final = 128 * MIB
#: Files of a partition: its manifest is rewritten with each of them, at about 350 bytes per file.
ARCHIVE_FILES: Final = 20_000
#: Small files are merged until they are about this large, like a file that is full by itself.
MERGE_TARGET_BYTES: Final = ARCHIVE_FILE_BYTES
#: The largest file that may be offered in the place of others: its checksums and counts fit.
ARCHIVE_OFFERED_BYTES: Final = 1024 * MIB
#: How long a plan may keep files of the archive from being removed, unless it is renewed.
ARCHIVE_PLAN_MS: Final = 24 * 3_600_000
#: Files that one call may put in the place of others.
ARCHIVE_REPLACED_FILES: Final = 1_000

# --- reading -------------------------------------------------------------------------------

#: The answer to one read, over all its partitions.
READ_BYTES: Final = 64 * MIB
#: The longest that a read waits for new data.
READ_WAIT_MS: Final = 60_000
#: Partitions in one read.
READ_PARTITIONS: Final = 10_000

# --- the broker ----------------------------------------------------------------------------

#: How often the event loop shows that it is running: a pause is noticed up to this late.
LOOP_BEAT_MS: Final = 50
#: How much of a longer pause counts for timeouts of clients: twice the beat, so that an ordinary
#: delay counts in full.
LOOP_LATE_MS: Final = 2 * LOOP_BEAT_MS
#: A pause of at least this length may become the longest one; a busy loop has shorter ones.
LOOP_PAUSE_MS: Final = 20
#: A pause of at least this length is logged, at most one line per interval.
LOOP_PAUSE_LOG_MS: Final = 200
LOOP_PAUSE_LOG_INTERVAL_MS: Final = 10_000
#: While the loop is late, its stack is sampled this often, to find out what blocks it.
LOOP_SAMPLE_MS: Final = 10
#: Changes that one job of the broker (for instance the cleaner) makes in the store at once: they
#: share flush cycles.
CHANGES_AT_ONCE: Final = 64
#: Ranges of lost offsets that are listed with a message. Deleted entries are one range; each
#: unreadable batch may be another.
LOST_RANGES: Final = 16
#: The default time after which an unacknowledged entry is lent again: the retransmission of the
#: reliable proxy.
LEASE_MS: Final = 3_000
#: The longest lease; a subscriber that works longer extends it again.
LONGEST_LEASE_MS: Final = 12 * 3_600_000
#: An idempotency key of a publisher; users take UUIDs and URLs.
IDEMPOTENCY_KEY_BYTES: Final = 255

# --- consumer groups -----------------------------------------------------------------------

#: How long the first members of an empty group wait for others that start with them; extended while
#: more come. Kafka waits 3 s, which is long for a member that starts alone.
GROUP_INITIAL_DELAY_MS: Final = 250
#: Members of a group, with reserved ids: its leader is told about all of them at once.
GROUP_MEMBERS: Final = 5_000
#: The range of session timeouts: Kafka allows 6 s to 30 min; short ones cost little in one process.
SESSION_MIN_MS: Final = 1_000
SESSION_MAX_MS: Final = 30 * 60_000
#: How long a member of the newer protocol (KIP-848) may be silent, and how often it sends
#: heartbeats, unless a group's configs say otherwise. Kafka's defaults.
CONSUMER_SESSION_MS: Final = 45_000
CONSUMER_HEARTBEAT_MS: Final = 5_000
#: A regular expression of a subscription, in characters.
PATTERN_CHARS: Final = 1_000
#: A group without members and commits is forgotten after this time, with its offsets; as in Kafka.
GROUP_EXPIRY_MS: Final = 7 * 24 * 3_600_000

# --- staging -------------------------------------------------------------------------------

#: Writers of one stage: a commit names each of them.
STAGE_PARTS: Final = 10_000
#: Batches and bytes of one call, which is one unit in the log.
STAGE_CALL_BATCHES: Final = 1_000
STAGE_CALL_BYTES: Final = 32 * MIB

# --- the Python client ---------------------------------------------------------------------

#: The default timeout of a call: long enough for a restart of the broker.
CLIENT_TIMEOUT_MS: Final = 5_000
#: A client that connects for the first time tries each address for this long before it leaves it to
#: librdkafka; as long as librdkafka itself takes.
CLIENT_CONNECT_MS: Final = 2_000
#: Messages of one numbered put: they are one transaction, held in memory.
CLIENT_NUMBERED_MESSAGES: Final = 100_000
#: The longest time for which librdkafka tries to deliver a message; then a waiting caller is told.
CLIENT_LONGEST_MS: Final = 24 * 3_600_000

# --- the HTTP listener ---------------------------------------------------------------------

#: Items in a page of a list: the loop, which all connections share, makes a page at once.
HTTP_PAGE_ITEMS: Final = 1_000
#: Topics and partitions whose offsets one answer contains: one or two microseconds each.
HTTP_OFFSETS_TOPICS: Final = 1_000
HTTP_OFFSETS_PARTITIONS: Final = 10_000

# --- the line listener ---------------------------------------------------------------------

#: The default of QUACKSIZE: an entry is a message, not a file; each subscriber may have one.
LINE_ENTRY_BYTES: Final = 4 * KIB
#: The most that QUACKSIZE may be set to: half a line of it is kept for each slow peer.
LINE_LONGEST_ENTRY_BYTES: Final = 64 * KIB
#: By default, a subscriber that does not answer an entry for this long is dead: time enough to type
#: the answer.
LINE_ANSWER_MS: Final = 30_000
#: The longest such time that may be set.
LINE_LONGEST_ANSWER_MS: Final = 3_600_000

# --- the reliable proxy: XSUB, XPUB and its REP ----------------------------------------------

#: Ids that one request acknowledges: at 40 bytes each they fit into a request many times over.
PROXY_IDS: Final = 1_000
#: How long a client's address may take to be resolved and to answer a connection: less than the 5 s
#: that clients wait for an answer to `hello`.
PROXY_CONNECT_MS: Final = 4_000
