"""Bounds of the clients, each with its reason. Sizes are bytes unless the name says otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import MIB

# --- the Python client ---------------------------------------------------------------------

#: Members of dead processes that a client removes from its group at once. Each removal needs a
#: librdkafka consumer with its threads. Further ones are removed when their sessions expire.
CLIENT_EVICTIONS: Final = 32
#: A process that dies without leaving its group is removed after this time. Kafka clusters accept
#: no less than 6 s.
CLIENT_SESSION_MS: Final = 10_000
#: Heartbeat interval; also how soon a member learns that it must release a partition.
CLIENT_HEARTBEAT_MS: Final = 500
#: How long a program may process a message before its partition goes to another process.
CLIENT_BUSY_MS: Final = 5 * 60_000
#: Interval between two commits of a client's progress.
CLIENT_COMMIT_MS: Final = 200
#: Repeatable requests to the cluster are sent again after this time without an answer: a cluster
#: that was just set up may leave the first one unanswered.
CLIENT_REQUEST_RETRY_MS: Final = 2_000
#: The longest single wait inside librdkafka, which Ctrl-C does not interrupt.
CLIENT_LONGEST_POLL_MS: Final = 100
#: Interval between two connection attempts to a broker that has not started, if the caller gave a
#: timeout.
CLIENT_PROBE_MS: Final = 100
#: A new producer needs an id. librdkafka requests one every 500 ms, and whenever it receives
#: metadata. So the client requests metadata after this time, then after twice as long, and so on.
CLIENT_PRODUCER_ID_MS: Final = 5
#: Polling interval where no event announces an answer.
CLIENT_SHORT_POLL_MS: Final = 5
#: Messages fetched from librdkafka per call: enough to share the cost of the call.
CLIENT_BATCH_MESSAGES: Final = 4_000
#: Prefetched messages in memory, per topic.
CLIENT_PREFETCH_BYTES: Final = 16 * MIB
#: How long a fetch waits at the broker. A seek has to wait for its end.
CLIENT_FETCH_WAIT_MS: Final = 200
#: Unacknowledged messages of a producer; a put beyond that waits.
CLIENT_SENDING_BYTES: Final = 64 * MIB
#: Retries of a message: enough for a few broken connections, and few enough to learn within the
#: timeout of a call that a broker cannot write.
CLIENT_SEND_RETRIES: Final = 10
#: Producers of a client, one for each different timeout; each has threads and a connection.
CLIENT_PRODUCERS: Final = 8
#: After this time at the latest, a client notices that a topic was deleted and created again.
CLIENT_TOPIC_MS: Final = 10_000
#: Transaction timeout of numbered puts. An abandoned one is aborted after this time, or when a
#: client of the same name starts. Until then, readers wait for it.
CLIENT_TRANSACTION_MS: Final = 10_000
#: The longest time for the last commits of a closing client, whatever its timeout.
CLIENT_CLOSE_MS: Final = 30_000
#: Processes on one machine that share a directory.
CLIENT_PROCESSES: Final = 1_000
#: Threads in which calls of an asynchronous client wait for messages, and as many for its other
#: calls; further calls wait for a thread.
CLIENT_THREADS: Final = 32

# --- the queue's libraries -----------------------------------------------------------------

#: Default timeout of a call, from the specification of the queue.
QUEUE_TIMEOUT_MS: Final = 5_000
#: Pause between two connection attempts; a broker takes longer to restart.
QUEUE_PAUSE_MS: Final = 50
#: The largest answer: a message of BATCH_BYTES in which JSON escapes every byte, or the names of
#: all topics.
QUEUE_ANSWER_BYTES: Final = 128 * MIB

# --- the reliable proxy: XSUB, XPUB and its REP ----------------------------------------------

#: Unfinished messages of a reliable subscriber, by number and by size. Messages beyond that are
#: dropped; the broker sends them again.
CLIENT_PROXY_MESSAGES: Final = 10_000
CLIENT_PROXY_BYTES: Final = 64 * MIB
