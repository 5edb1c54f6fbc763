"""Bounds that several packages share, each with its reason. Sizes are bytes by default.

Every package has a `limits` module of its own for the rest; `quackmq limits` lists all of them. A
bound that a user may want to change is a setting whose default is here.
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
#: A key of small state holds a name and an id or two, with words between them.
STATE_KEY_BYTES: Final = 1 * KIB
#: A value kept by compare-and-set is small state, not data.
STATE_VALUE_BYTES: Final = 256 * KIB
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

# --- the local store -----------------------------------------------------------------------

#: A segment is closed at this size; retention and damage have this grain.
SEGMENT_BYTES: Final = 256 * MIB
#: One index entry covers at least this many bytes, or this much time.
REGION_BYTES: Final = 64 * KIB
REGION_MS: Final = 1_000
#: A batch from this size on is not copied if its buffer is handed over: smaller ones lie better
#: together, and a buffer of their own would cost more than the copy.
KEPT_BATCH_BYTES: Final = 128 * KIB
#: Memory of batches that are not durable yet; publishers wait above it. A disk that syncs 500 MB/s
#: has work for 60 ms with it, which is several cycles; more would only be more memory.
PENDING_BYTES: Final = 32 * MIB
#: With sync = interval: a sync at least so often.
SYNC_INTERVAL_MS: Final = 100

# --- the archive ---------------------------------------------------------------------------

#: A file is full at this size: it is made in memory. Spark reads files of 128 MiB in one task.
ARCHIVE_FILE_BYTES: Final = 128 * MIB
#: Files of a partition: its manifest is written anew with each of them, at some 350 bytes a file.
ARCHIVE_FILES: Final = 20_000
#: Small files are merged until they are about this large; as a file that is full by itself.
MERGE_TARGET_BYTES: Final = ARCHIVE_FILE_BYTES
#: The largest file that may be offered in the place of others: checksums and counts of it fit.
ARCHIVE_OFFERED_BYTES: Final = 1024 * MIB
#: Plans that keep files of the archive from going, and how long one may, unless it is renewed.
ARCHIVE_PLAN_MS: Final = 24 * 3_600_000
#: Files that may be put in the place of others by one call.
ARCHIVE_REPLACED_FILES: Final = 1_000

# --- reading -------------------------------------------------------------------------------

#: One read's answer, over all partitions asked for.
READ_BYTES: Final = 64 * MIB
#: A read waits this long for new data at the most, whatever it asks for.
READ_WAIT_MS: Final = 60_000
#: Partitions in one read.
READ_PARTITIONS: Final = 10_000

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
#: Changes that one job of the broker (the cleaner's, say) asks of the store at once: they share
#: its flush cycles.
CHANGES_AT_ONCE: Final = 64
#: Ranges of offsets that are named of what a reader has lost before a message; what was let go of
#: is one, and each batch that cannot be read may be another.
LOST_RANGES: Final = 16
#: What is lent and not acknowledged is lent again after this time, unless told otherwise: the
#: retransmission of the reliable proxy.
LEASE_MS: Final = 3_000
#: The longest that a lease may be given or extended; who works longer says so again.
LONGEST_LEASE_MS: Final = 12 * 3_600_000
#: What a publisher may give as a key by which a repeat is known; people use UUIDs, and URLs.
IDEMPOTENCY_KEY_BYTES: Final = 255

# --- consumer groups -----------------------------------------------------------------------

#: How long the first members of an empty group wait for others that start with them; it is added
#: again while more come. Kafka waits 3 s, which is long for one that starts alone.
GROUP_INITIAL_DELAY_MS: Final = 250
#: Members of a group, with those that only hold an id: its leader is told of all of them at once.
GROUP_MEMBERS: Final = 5_000
#: What a session may last: Kafka allows 6 s to 30 min; shorter ones cost little in one process.
SESSION_MIN_MS: Final = 1_000
SESSION_MAX_MS: Final = 30 * 60_000
#: How long a member of the newer protocol (KIP-848) may be silent, and how often it is to be heard,
#: unless a group's configs say otherwise. Kafka's defaults.
CONSUMER_SESSION_MS: Final = 45_000
CONSUMER_HEARTBEAT_MS: Final = 5_000
#: A regular expression of a subscription, in characters.
PATTERN_CHARS: Final = 1_000
#: A group without members and commits is forgotten after so long, with its offsets; Kafka's.
GROUP_EXPIRY_MS: Final = 7 * 24 * 3_600_000

# --- staging -------------------------------------------------------------------------------

#: Writers of one stage: a commit names each of them.
STAGE_PARTS: Final = 10_000
#: Batches and bytes of one call, which is one unit in the log.
STAGE_CALL_BATCHES: Final = 1_000
STAGE_CALL_BYTES: Final = 32 * MIB

# --- the Python client ---------------------------------------------------------------------

#: How long a call waits unless told otherwise: long enough for a broker to be started again.
CLIENT_TIMEOUT_MS: Final = 5_000
#: A client that connects for the first time gives each address so long before it leaves it to
#: librdkafka; as long as librdkafka itself takes.
CLIENT_CONNECT_MS: Final = 2_000
#: Messages of one numbered put: they are one transaction, held in memory.
CLIENT_NUMBERED_MESSAGES: Final = 100_000
#: The longest that librdkafka is told to try to deliver a message; who waits longer hears then.
CLIENT_LONGEST_MS: Final = 24 * 3_600_000

# --- the HTTP door -------------------------------------------------------------------------

#: Items in a page of a list: a page is made at one go, by the loop that all connections share.
HTTP_PAGE_ITEMS: Final = 1_000
#: Topics and partitions whose offsets one answer tells: a microsecond or two of the loop each.
HTTP_OFFSETS_TOPICS: Final = 1_000
HTTP_OFFSETS_PARTITIONS: Final = 10_000

# --- the line door -------------------------------------------------------------------------

#: QUACKSIZE, unless told otherwise: an entry is news, not a file; each subscriber may hold one.
LINE_ENTRY_BYTES: Final = 4 * KIB
#: The most that QUACKSIZE may be set to: half a line of it lies here for each peer that is slow.
LINE_LONGEST_ENTRY_BYTES: Final = 64 * KIB
#: A subscriber that does not answer an entry for so long is dead, unless told otherwise: time to
#: type the answer.
LINE_ANSWER_MS: Final = 30_000
#: The longest that a subscriber may be given.
LINE_LONGEST_ANSWER_MS: Final = 3_600_000

# --- the reliable proxy: XSUB, XPUB and its REP ----------------------------------------------

#: Ids that one request acknowledges: at 40 bytes each they fit into a request many times.
PROXY_IDS: Final = 1_000
#: A client's address is given so long to be looked up and to answer a connection, less than the 5 s
#: that clients wait for an answer to `hello`; and a message to be acknowledged, from when its last
#: bytes have left.
PROXY_CONNECT_MS: Final = 4_000
