"""Bounds of the Spark integration, each with its reason. Sizes are bytes unless the name says
otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import KIB, MIB

# --- Spark ---------------------------------------------------------------------------------

#: How long a plan or task tries to reach an unavailable broker. A restarted broker is back within
#: seconds, and Spark itself repeats a failed task.
SPARK_RETRY_MS: Final = 30_000
#: Pause between two attempts; a broker takes longer to restart.
SPARK_PAUSE_MS: Final = 100
#: Timeout of a response, longer than the longest requested wait. A commit of a large stage may take
#: longer; it is requested this many times in all, enough for the largest stage on a slow disk.
SPARK_RESPONSE_MS: Final = 120_000
SPARK_COMMIT_WAITS: Final = 15
#: Size of one fetch of a task; the next one is fetched while it is decoded.
SPARK_FETCH_BYTES: Final = 4 * MIB
#: Compressed batches that are decoded together, and their total decoded size; larger ones are
#: decoded one by one.
SPARK_GROUP_BYTES: Final = 512 * KIB
SPARK_DECODED_BYTES: Final = 64 * MIB
#: Rows passed to Spark at a time; they are in its memory as a whole.
SPARK_ROWS: Final = 65_536
#: Stored bytes per task: some tenths of a second of work, compared with about 20 ms overhead of a
#: task.
SPARK_SPLIT_BYTES: Final = 16 * MIB
#: The cost of a record for a task, expressed in bytes.
SPARK_RECORD_BYTES: Final = 32
#: Tasks of one plan: each takes some hundred bytes and some milliseconds in the driver.
SPARK_SPLITS: Final = 10_000
#: How long a stream at the end waits for more records before it reports that there are none.
#: Stopping it takes as long.
SPARK_IDLE_MS: Final = 500
#: The default of maxTriggerDelay, as in Spark's Kafka source.
SPARK_DELAY_MS: Final = 15 * 60_000
#: The progress of a query is reported to the broker at this interval, even if it has not changed.
SPARK_REPORT_MS: Final = 600_000
#: After this time without a report, a query no longer holds retention: Spark does not tell when a
#: checkpoint was deleted. A week is enough to notice a failed query and restart it. Kafka also
#: remembers a group without members for a week.
SPARK_HOLD_MS: Final = 7 * 24 * 3_600_000
#: How long a stopping query may take for its last report to the broker.
SPARK_STOP_MS: Final = 2_000
#: How often a task looks up the files of a range that was merged or archived meanwhile; after that
#: it fetches batches from the broker.
SPARK_LOOKUPS: Final = 4
#: Lease of a plan's files unless renewed. Ranges whose files were deleted are read from the broker.
SPARK_PLAN_MS: Final = 3_600_000
#: A table checks whether the unarchived end of a topic consists only of transaction markers if it
#: is this short, in at most this many partitions. That takes a millisecond each, a scan half a
#: second.
SPARK_TAIL_OFFSETS: Final = 8
SPARK_TAIL_PARTITIONS: Final = 64
#: Lease of a compaction's plan; it is renewed three times in this period. After a kill, the files
#: of the plan and offered replacements are kept for this long.
COMPACT_PLAN_MS: Final = 60_000
#: Concurrent merges of a compaction; each is a waiting thread of the driver.
COMPACT_CONCURRENT_MERGES: Final = 256
#: Consecutive plans of a compaction that failed because others were faster. Then another compaction
#: is running.
COMPACT_ATTEMPTS: Final = 5
#: The smallest size ratio of a merge of a compaction: its users want few files more than little
#: work.
COMPACT_GROWTH: Final = 2
#: Interval between two checks whether a compaction should stop.
COMPACT_STOP_CHECK_MS: Final = 200
#: A sink task collects this much before it encodes and stages it in one call. More makes larger
#: batches, but takes about four times as much memory.
SPARK_CHUNK_BYTES: Final = 8 * MIB
#: Consecutive rows without a key that go to the same partition.
SPARK_SPREAD_ROWS: Final = 500

# --- pipelines -----------------------------------------------------------------------------

#: How long a pipeline waits at its start until a broker listens at the address: enough for a broker
#: that starts at the same time, and short for a user who has forgotten to start one.
PIPELINE_BROKER_MS: Final = 3_000
#: Attempts to start a stream whose Python process does not start in time.
PIPELINE_START_ATTEMPTS: Final = 5
#: How long a stopping stream may take for its current batch; the batch is repeated anyway.
PIPELINE_STOP_MS: Final = 60_000
#: How long a stopping pipeline may take to process the existing records: seconds, or minutes on a
#: busy machine. A second signal ends it at once.
PIPELINE_DRAIN_MS: Final = 600_000
#: Windows in the report of a stream: only the last ones, because a stream may run for years.
PIPELINE_REPORTED_WINDOWS: Final = 60
#: Processes that a pipeline may start; each takes about 50 MB.
PIPELINE_WORKERS: Final = 100
#: Restarts of dead workers, in total; more deaths are not an accident.
PIPELINE_RESTARTS: Final = 20
#: How long a stopping worker may take to exit.
PIPELINE_WORKER_END_MS: Final = 10_000
#: Interval and timeout of the check that the workers' broker is reachable.
PIPELINE_CHECK_MS: Final = 1_000
#: A broker that is away for longer ends the pipeline. This is enough for a restart, and shorter
#: than the workers' own timeouts, so that one message is printed, not one per worker.
PIPELINE_AWAY_MS: Final = 20_000
#: Measurements that a process collects before it reports them; they would be lost with it.
PIPELINE_SAMPLES: Final = 1_000
#: Offsets that a replay publishes at once: each portion is a transaction, and a name that the
#: broker remembers for a week.
REPLAY_OFFSETS: Final = 1_000_000
#: Runs of offsets and numbers that an audit task holds before it joins them; 56 bytes each.
AUDIT_RUNS: Final = 200_000
#: Findings that an audit collects in the driver, including explained holes: every transaction
#: leaves a hole, and each costs about 200 bytes.
AUDIT_FINDINGS: Final = 1_000_000
#: Offsets without a timestamp that an audit looks up together; Spark has their numbers in memory.
AUDIT_LOOKUP_OFFSETS: Final = 10_000
#: Times that an audit asks the broker about the holes of a partition, if retention or the archive
#: changes it meanwhile: one change is likely, and a second one within milliseconds is not.
AUDIT_EXPLANATIONS: Final = 5
#: Findings of each kind that an audit prints; further ones are only counted.
AUDIT_PRINTED: Final = 10
