"""Bounds of the broker, each with its reason. Sizes are bytes unless the name says otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import ARCHIVE_FILES, KIB, MIB

# --- batches -------------------------------------------------------------------------------

#: A batch is decoded in one step if it has at most so many records and, inflated, so many bytes.
DECODED_AT_ONCE_RECORDS: Final = 1_024
DECODED_AT_ONCE_BYTES: Final = 256 * KIB

# --- producers -----------------------------------------------------------------------------

#: Bytes of keys hashed at one go (murmur2 in Python takes 80 ns a byte): others wait 1.3 ms for it.
#: A multiple of four, the bytes of the hash's words.
HASHED_KEY_BYTES: Final = 16 * KIB

# --- the local store -----------------------------------------------------------------------

#: Marks (append time, offset) a partition keeps to tell what is live, merged beyond this.
LIVE_MARKS: Final = 4_096

# --- the archive ---------------------------------------------------------------------------

#: How often files that came since then are looked at for merges that are worth it.
MERGE_INTERVAL_MS: Final = 10_000
#: Plans that keep files of the archive from going, and how long one may, unless it is renewed.
ARCHIVE_PLANS: Final = 1_000
#: Files that are listed in one answer, in partitions as a whole: all of one partition fit.
ARCHIVE_PAGE_FILES: Final = ARCHIVE_FILES
#: What health tells of files that cannot be merged and of partitions that have a problem, each.
ARCHIVE_TOLD: Final = 10

# --- reading -------------------------------------------------------------------------------

#: What is read to find a subscription's next message, where no batch is larger: the archive makes
#: batches as large as what is asked for, and who gets this message will get those behind it.
HEAD_BYTES: Final = 16 * KIB

# --- the broker ----------------------------------------------------------------------------

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

#: What the members of a classic group take in that state, with what they say and are assigned, so
#: that they are members again after a restart: some 300 members of usual clients. Those of a larger
#: group are not kept, and join again. With STATIC_MEMBER_BYTES it fits into STATE_VALUE_BYTES.
KEPT_MEMBERS_BYTES: Final = 112 * KIB
#: The same over all groups: every checkpoint of the store contains it.
KEPT_MEMBERS_TOTAL_BYTES: Final = 32 * MIB
#: The shortest interval that may be set: each heartbeat costs about a tenth of a millisecond.
CONSUMER_HEARTBEAT_MIN_MS: Final = 50
#: Memory for a regular expression that has been compiled, and for its states while it is tried.
PATTERN_BYTES: Final = 256 * KIB
#: Processor time for trying one on the names of all topics: 50,000 take half a second.
PATTERN_CPU_MS: Final = 2_000
#: Requests that wait for that; one is tried at a time.
PATTERN_WAITERS: Final = 100
#: Groups that are known, most of them without members: each costs about 2 KiB until it expires.
GROUPS: Final = 100_000
#: What the members of all groups say and are assigned, which is held in memory.
GROUPS_BYTES: Final = 256 * MIB
#: Members waiting for a rebalance to end, over all groups.
GROUP_WAITERS: Final = 50_000
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
