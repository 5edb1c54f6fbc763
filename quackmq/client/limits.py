"""Bounds of the clients, each with its reason. Sizes are bytes unless the name says otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import MIB

# --- the Python client ---------------------------------------------------------------------

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
#: A client that is closed has so long for its last commits, whatever its timeout.
CLIENT_CLOSE_MS: Final = 30_000
#: Processes on one machine that use one directory.
CLIENT_PROCESSES: Final = 1_000
#: Threads of an asynchronous client in which calls wait; more calls wait for a thread.
CLIENT_THREADS: Final = 32

# --- the queue's libraries -----------------------------------------------------------------

#: How long a call takes at the most, unless told otherwise, as the description of the queue has it.
QUEUE_TIMEOUT_MS: Final = 5_000
#: Between two tries to reach a broker that is away: it takes longer to come back.
QUEUE_PAUSE_MS: Final = 50
#: An answer: a message of BATCH_BYTES of which JSON escapes every byte, or the names of all topics.
QUEUE_ANSWER_BYTES: Final = 128 * MIB

# --- the reliable proxy: XSUB, XPUB and its REP ----------------------------------------------

#: What a reliable subscriber has in hand, got and not done or to be got: messages, and their bytes.
#: What comes beyond that is not kept, and comes again.
CLIENT_PROXY_MESSAGES: Final = 10_000
CLIENT_PROXY_BYTES: Final = 64 * MIB
