"""Bounds of the Spark integration, each with its reason. Sizes are bytes unless the name says
otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import KIB, MIB

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
