"""Bounds of the broker, each with its reason. Sizes are bytes unless the name says otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import ARCHIVE_FILES, KIB, MIB

# --- batches -------------------------------------------------------------------------------

#: A batch with at most this many records and inflated bytes is decoded in one step: a larger one
#: would delay other requests, and is decoded in sections.
DECODED_AT_ONCE_RECORDS: Final = 1_024
DECODED_AT_ONCE_BYTES: Final = 256 * KIB

# --- producers -----------------------------------------------------------------------------

#: Bytes of keys that are hashed in one step. murmur2 in Python takes 80 ns a byte, so other
#: requests wait 1.3 ms. It must be a multiple of four, the size of the hash's words.
HASHED_KEY_BYTES: Final = 16 * KIB

# --- the local store -----------------------------------------------------------------------

#: Marks (append time, offset) that a partition keeps to know which entries are live; beyond this,
#: marks are merged.
LIVE_MARKS: Final = 4_096

# --- the archive ---------------------------------------------------------------------------

#: Interval at which the broker looks for new files of the archive that are worth merging.
MERGE_INTERVAL_MS: Final = 10_000
#: Plans at once: each keeps files of the archive from being removed.
ARCHIVE_PLANS: Final = 1_000
#: Files listed in one answer. Partitions are listed as a whole: all files of one partition fit.
ARCHIVE_PAGE_FILES: Final = ARCHIVE_FILES
#: Problems that health lists of each kind: files that cannot be merged, partitions with errors.
ARCHIVE_PROBLEMS_SHOWN: Final = 10

# --- reading -------------------------------------------------------------------------------

#: Bytes that are read to find a subscription's next message; a larger batch is read as a whole. The
#: archive makes batches as large as the read, and the following messages come from the same batch.
HEAD_BYTES: Final = 16 * KIB

# --- the broker ----------------------------------------------------------------------------

#: Interval of the cleaner, which applies retention, δ and the expiry of producers.
CLEAN_INTERVAL_MS: Final = 250
#: The longest wait of a publisher for room in a full topic with when_full = wait.
FULL_TOPIC_WAIT_MS: Final = 5_000
#: Publishers that wait for room at once.
WAITING_PUBLISHERS: Final = 10_000
#: Bytes of the publishers that wait for room; their batches are in memory meanwhile.
WAITING_PUBLISH_BYTES: Final = 64 * MIB
#: Decoded batches, and sections of large ones, that are cached for readers of single messages.
DECODED_BATCHES: Final = 512
#: Bytes of the cached decoded batches. The batch that was decoded last is kept, however large.
DECODED_CACHE_BYTES: Final = 64 * MIB
#: Large batches whose sections are known. A section takes some 150 bytes, so the thousand sections
#: of a batch with the most records take 150 KiB.
OUTLINED_BATCHES: Final = 64
#: Inflated bytes of large compressed batches in the cache. The last one is kept, however large.
INFLATED_CACHE_BYTES: Final = 64 * MIB
#: Bytes that are kept decoded when the sections of a large batch are found, from the first reader's
#: position on: most batches fit as a whole and are decoded once.
DECODED_AHEAD_BYTES: Final = 8 * MIB
#: Bytes that the cleaner reads of a partition at a time, to find the batches beyond keep_bytes.
CLEAN_READ_BYTES: Final = 16 * MIB
#: A file of the archive is cut at most once in this time: each cut writes the partition's manifest
#: again, and thousands of partitions share one disk thread.
ARCHIVE_CUT_MS: Final = 5_000
#: Topics with cleaning errors that health names; a full disk affects all topics.
SHOWN_FAILURES: Final = 20
#: Holds on retention that health shows, and that a topic's description shows: names are enough, and
#: one stopped subscription may hold every partition of a topic.
SHOWN_HELD_BACK: Final = 20
#: A cursor that holds retention back is logged after this time without a commit. Consumers that are
#: only slow have committed by then.
HELD_BACK_MS: Final = 3_600_000
#: Lines that one cleaning logs about holds on retention: a thousand at once would block the event
#: loop for 20 ms or more. The rest follows with the next cleanings, four per second.
HELD_BACK_LINES: Final = 20
#: Interval at which the leases of subscriptions are checked; leases last days.
HOLD_LEASE_INTERVAL_MS: Final = 60_000
#: Inflated bytes of a compressed batch for a topic with `entry_bytes`, whose values are checked on
#: the event loop: that takes up to 20 ms. Producers send larger batches rarely, and can split them.
CHECKED_BATCH_BYTES: Final = 4 * MIB
#: Producer ids that are allocated from the store at a time; a crash loses the rest of the block.
PRODUCER_ID_BLOCK: Final = 1_000
#: Subscriptions over all topics, push subscriptions included.
SUBSCRIPTIONS: Final = 100_000
#: Default retention of the topic with receipts of subscriptions: longer than anybody waits to ask
#: for the outcome of a delivery.
RECEIPTS_KEEP_MS: Final = 30 * 24 * 3_600_000
#: Append times in one receipt; a commit may cover thousands of batches at once.
RECEIPT_TIMES: Final = 64
#: Assumed size of a receipt where the bytes of one write are bounded; most are slightly smaller.
RECEIPT_BYTES: Final = 512
#: Receipts in one batch: about 2 MiB with the longest names and all append times. The event loop
#: runs other tasks after each batch.
RECEIPTS_PER_BATCH: Final = 1_000
#: Acknowledged ranges that are not written yet, per subscription and partition. Beyond this, for
#: example if the disk accepts no writes, done offsets between the ranges count as acknowledged,
#: too. There may be more ranges if leased entries separate them.
PENDING_RECEIPT_RANGES: Final = 4_096
#: Push subscriptions of a partition that are sorted by their durable low-water marks before other
#: tasks run. It takes about 2 ms.
HOLDS_SORTED: Final = 256
#: Push subscriptions that one page of those which have not acknowledged an entry examines. It takes
#: about 5 ms.
UNACKNOWLEDGED_EXAMINED: Final = 1_000
#: Subscription names that the search for a page's first ones examines before other tasks run. It
#: takes about 2 ms.
UNACKNOWLEDGED_SEARCHED: Final = 10_000
#: Characters of the reason why a subscriber is not reached. It may quote what a peer has sent.
UNREACHED_REASON_CHARS: Final = 200
#: Channels over all push subscriptions: each is a connected peer.
CHANNELS: Final = 50_000
#: Wait before a channel repeats a failed read: a disk error may be temporary, and permanent damage
#: costs one read per wait.
CHANNEL_RETRY_MS: Final = 1_000
#: Entries that one `take` of a channel leases at most.
TAKEN_ENTRIES: Final = 1_000
#: Shortest interval between two writes of the push subscriptions' progress, for all of them
#: together: after a crash, entries acknowledged since the last write are delivered again.
PUSHED_FLUSH_MS: Final = 50
#: If many subscriptions have changed, the write of their progress waits longer: the first value for
#: each of them, which takes about 50 µs of the event loop, but never more than the second value.
PUSHED_FLUSH_EACH_MS: Final = 1
PUSHED_LONGEST_FLUSH_MS: Final = 500
#: Wait before a failed write of the push subscriptions' progress is repeated.
PUSHED_RETRY_MS: Final = 1_000
#: Bytes of the push subscriptions' progress in one append; one subscription may take
#: STATE_VALUE_BYTES.
PUSHED_FLUSH_BYTES: Final = 1 * MIB
#: Bytes read at a time from a topic with push subscriptions.
LIVE_TAIL_READ_BYTES: Final = 256 * KIB
#: Bytes of the newest batches that are in memory for push subscriptions: over all topics, and at
#: least for each topic. A subscription that is not further behind needs no read.
LIVE_TAIL_BYTES: Final = 64 * MIB
LIVE_TAIL_TOPIC_BYTES: Final = 64 * KIB
#: Newest batches of one partition that are in memory for push subscriptions.
LIVE_TAIL_BATCHES: Final = 10_000
#: Wait before the live tail of a topic repeats a failed read.
LIVE_TAIL_RETRY_MS: Final = 1_000
#: Bytes read for push subscriptions that are behind, and not yet leased, over all of them. The last
#: read is kept, however large.
CATCH_UP_BYTES: Final = 32 * MIB
#: Messages in one page of a partition, and bytes of their keys, values and headers: each message
#: becomes several Python objects, and a page is in memory until its reader has taken it.
PAGE_RECORDS: Final = 10_000
PAGE_BYTES: Final = 8 * MIB
#: Bytes that are first read for each message of a page; if that is too little, more is read.
PAGE_RECORD_BYTES: Final = 1 * KIB
#: Numbered puts whose positions are in memory, so that a repeat is answered with the same message
#: ids; each takes about 500 bytes.
REMEMBERED_PUTS: Final = 10_000
#: A publisher's sequence numbers are forgotten after this time without a put. It is longer than the
#: 7 days of other groups: after a seasonal pause, a repeated put must still be recognised.
PUBLISHER_EXPIRY_MS: Final = 90 * 24 * 3_600_000
#: Publishers that number their puts. Each is a group, and a program that uses a new name at each
#: start must not use up GROUPS.
PUBLISHERS: Final = 50_000
#: Producers registered with the topics of a queue. Beyond this, the least recently used one must
#: register again: programs that register at each start never unregister.
REGISTERED_PRODUCERS: Final = 100_000

# --- consumer groups -----------------------------------------------------------------------

#: Stored members of one classic group, with their metadata and assignments, so that they are still
#: members after a restart: some 300 members of usual clients. The members of a larger group are not
#: stored, and join again. With STATIC_MEMBER_BYTES it fits into STATE_VALUE_BYTES.
STORED_MEMBERS_BYTES: Final = 112 * KIB
#: Stored members of all classic groups: every checkpoint of the store contains them.
STORED_MEMBERS_TOTAL_BYTES: Final = 32 * MIB
#: The shortest heartbeat interval that may be set: each heartbeat takes about 0.1 ms.
CONSUMER_HEARTBEAT_MIN_MS: Final = 50
#: Memory for a compiled regular expression, and for its states while it is matched.
PATTERN_BYTES: Final = 256 * KIB
#: Processor time for matching one regular expression with all topic names: 50,000 take 0.5 s.
PATTERN_CPU_MS: Final = 2_000
#: Requests that wait for their regular expressions; one expression is matched at a time.
PATTERN_WAITERS: Final = 100
#: Known groups, most of them without members: each takes about 2 KiB until it expires.
GROUPS: Final = 100_000
#: Metadata and assignments of the members of all groups, which are in memory.
GROUPS_BYTES: Final = 256 * MIB
#: Members that wait for the end of a rebalance, over all groups.
GROUP_WAITERS: Final = 50_000
#: Interval at which groups are checked for expiry; nothing waits for it.
GROUP_EXPIRY_INTERVAL_MS: Final = 60_000
#: Groups that one step of the expiry check covers, before other tasks run.
CLEANED_GROUPS: Final = 1_000
#: Offsets of one commit that are stored in one append; this is well within a journal frame.
COMMIT_BYTES: Final = 4 * MIB
#: A client that uses a name by last id holds the name for this time after a call, while it
#: processes a message.
MODE_LEASE_MS: Final = 30_000

# --- transactions --------------------------------------------------------------------------

#: The longest timeout of a transaction: readers of committed records wait for its end with
#: everything that was published after its beginning. The same as in Kafka.
TRANSACTION_MAX_MS: Final = 15 * 60_000
#: Wait before the abort of a timed-out transaction is repeated, for example if the disk is full.
TRANSACTION_ABORT_AGAIN_MS: Final = 10_000
#: Known transactional ids: each takes about 1 KiB until it expires.
TRANSACTIONAL_IDS: Final = 100_000
#: Partitions of one transaction: each gets a marker, and all markers are in one journal frame.
TRANSACTION_PARTITIONS: Final = 10_000
#: Groups whose offsets one transaction commits; each is a small state that the end removes.
TRANSACTION_GROUPS: Final = 16
#: A transactional id is forgotten after this time without use. The same as in Kafka.
TRANSACTIONAL_ID_EXPIRY_MS: Final = 7 * 24 * 3_600_000
#: Interval at which transactional ids are checked for expiry; nothing waits for it.
TRANSACTIONAL_ID_EXPIRY_INTERVAL_MS: Final = 60_000

# --- staging -------------------------------------------------------------------------------

#: Stages at once; each is a hidden topic, and most writers have one or two.
STAGES: Final = 1_000
#: Bytes of all stages: they are on disk besides the log until they are committed, aborted or
#: expired.
STAGED_BYTES: Final = 16 * 1024 * MIB
#: Batches of all stages: each takes about 250 bytes of memory.
STAGED_BATCHES: Final = 200_000
#: Bytes that a commit of a stage copies at a time: they are in memory twice.
STAGE_COPY_BYTES: Final = 4 * MIB
#: Commits of stages that copy at the same time; further commits wait.
STAGE_COMMITS_AT_ONCE: Final = 4
#: A stage without new batches for this time is aborted.
STAGE_EXPIRY_MS: Final = 24 * 3_600_000
#: How long a committed key is remembered, so that a repeated commit is recognised.
STAGE_REMEMBERED_MS: Final = 7 * 24 * 3_600_000
#: Committed keys that are remembered; beyond this, no new stage begins.
COMMITTED_STAGES: Final = 200_000
#: Series of stages, one per streaming query: each is one small state, and some 300 bytes of memory.
STAGE_SERIES: Final = 10_000
#: How long the last turn of a series is remembered: a stopped stream may repeat it when it returns.
STAGE_SERIES_REMEMBERED_MS: Final = 365 * 24 * 3_600_000
#: Stages of one series at once: a writer that died leaves one, and these must not pile up.
STAGES_PER_SERIES: Final = 4
#: Interval at which stages are checked for expiry; nothing waits for it.
STAGE_EXPIRY_INTERVAL_MS: Final = 60_000
