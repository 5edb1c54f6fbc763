"""Bounds of the ZeroMQ protocol, each with its reason. Sizes are in bytes unless the name says
otherwise.
"""

from __future__ import annotations

from typing import Final

from quackmq.limits import BATCH_BYTES, KIB, MIB

# --- all ZeroMQ sockets --------------------------------------------------------------------

#: Open connections; an idle one costs about 3 KiB.
ZMQ_CONNECTIONS: Final = 10_000
#: Connections that the operating system queues before we accept them.
ZMQ_BACKLOG: Final = 1_024
#: Deadline for the greeting and READY: a peer sends them without waiting for anything.
ZMQ_HANDSHAKE_MS: Final = 10_000
#: A ZMTP command; READY with an identity and some metadata fits many times.
ZMQ_COMMAND_BYTES: Final = 4 * KIB
#: The part of a PING that is sent back; ZMTP's own limit.
ZMQ_PING_BYTES: Final = 16
#: Frames before the empty one that begins a request: one for each proxy on the way, and one more.
ZMQ_ENVELOPE_FRAMES: Final = 16
#: One frame of the envelope; ZeroMQ's own limit of a routing id.
ZMQ_ENVELOPE_FRAME_BYTES: Final = 255
#: A request's frame: the largest batch, and the words before its content.
ZMQ_REQUEST_BYTES: Final = BATCH_BYTES + KIB
#: Unfinished requests of one connection. A REQ socket has one; beyond it we stop reading.
ZMQ_REQUESTS_IN_FLIGHT: Final = 128
#: Unfinished requests of all connections: each is a task of about 4 KiB.
ZMQ_REQUESTS: Final = 20_000
#: The one buffer into which all connections receive; unread bytes are copied out of it.
ZMQ_SCRATCH_BYTES: Final = 64 * KIB
#: A request up to this size needs no reserved memory.
ZMQ_UNRESERVED_BYTES: Final = 16 * KIB
#: Memory of all larger requests, from their first byte to their reply; those beyond it wait.
ZMQ_RECEIVE_BYTES: Final = 256 * MIB
#: Deadline for a request to arrive completely.
ZMQ_REQUEST_WAIT_MS: Final = 60_000
#: While other connections wait for memory, a large request that would miss that deadline at its
#: pace is dropped. It gets this time first, because any network may be slow for a moment.
ZMQ_PACE_MS: Final = 2_000
#: Interval between sweeps, which disconnect peers that are silent or slow for too long.
ZMQ_SWEEP_MS: Final = 1_000
#: How long a GET waits for a message: less than the 5 s that clients wait for a reply.
ZMQ_GET_WAIT_MS: Final = 4_000
#: Replies up to this size are copied into one buffer; larger ones are sent in two pieces.
ZMQ_JOINED_BYTES: Final = 16 * KIB
#: Unsent bytes of one peer; above it nothing more is read from it or sent to it.
ZMQ_WRITE_BUFFER_BYTES: Final = 256 * KIB
#: Unsent bytes of all peers above that bound; beyond it large replies wait.
ZMQ_SEND_BYTES: Final = 256 * MIB
#: A peer that reads none of its replies for this long is disconnected.
ZMQ_SEND_WAIT_MS: Final = 30_000
#: How long a closing server waits for its last replies to become durable and to be read.
ZMQ_DRAIN_MS: Final = 5_000
#: How long a peer may take to close the connection after the last reply.
ZMQ_LINGER_MS: Final = 1_000

# --- the reliable proxy: XSUB, XPUB and its REP ----------------------------------------------

#: Frames of a publisher's message: its topic and its body.
PROXY_FRAMES: Final = 2
#: A publisher's message, both frames: the largest batch, and a topic's name.
PROXY_MESSAGE_BYTES: Final = BATCH_BYTES + KIB
#: A subscription: the longest name of a topic or client, and the word before it.
PROXY_PREFIX_BYTES: Final = KIB
#: Messages of one PUB socket that are not published yet, and their bytes; beyond it nothing more is
#: read from it. Messages that are read together are published together, and a batch is about 1 MiB.
PROXY_PUBLISHER_MESSAGES: Final = 4_096
PROXY_PUBLISHER_BYTES: Final = MIB
#: Records that are read for subscribers at a time and encoded together; other tasks run between.
PROXY_PAGE_RECORDS: Final = 2_000
PROXY_PAGE_BYTES: Final = 256 * KIB
#: Partitions that are followed for subscribers: each is a task of about 4 KiB.
PROXY_FEEDS: Final = 20_000
#: Subscriptions of one SUB socket.
PROXY_SUBSCRIPTIONS: Final = 1_000
#: Unsent bytes of one SUB socket, beyond which it misses messages: some seconds at 10 Mbit/s. All
#: slow sockets together have at most ZMQ_SEND_BYTES. They share the bytes.
PROXY_UNSENT_BYTES: Final = 8 * MIB
#: Interval after which a topic that cannot be read is tried again.
PROXY_RETRY_MS: Final = 1_000
#: Clients of the proxy, counted once for each topic with a `hello`: each is a task.
PROXY_CLIENTS: Final = 10_000
#: Entries that the proxy leases to a client at a time; a missed one takes one exchange.
PROXY_TAKEN: Final = 100
#: Acknowledgements of a client and topic that arrive before their entries are leased; one takes
#: about 200 bytes. XPUB runs ahead of leases by at most the number of leased entries.
PROXY_EARLY: Final = 10_000
#: Deadline for the acknowledgement of a message, after the client has received its last bytes.
PROXY_ANSWER_MS: Final = 3_000
#: The lowest rate in bytes per second at which a message may be sent to a client; a slower one is
#: aborted and repeated later. Otherwise slow clients would block large messages of others. At this
#: rate 16 MiB take 9 minutes.
PROXY_SLOWEST_BYTES: Final = 32 * KIB
#: Addresses of `hello` requests that are tried at a time, one descriptor each, and those from one
#: host. A healthy address replies within a millisecond.
PROXY_HELLOS: Final = 1_000
PROXY_HELLOS_OF_HOST: Final = 100
#: Large messages that are sent to clients at a time: each holds its bytes until the client replied.
PROXY_LARGE_EXCHANGES: Final = 64
#: The reply of a client's REP socket: three words and an id.
PROXY_ANSWER_BYTES: Final = 4 * KIB
#: How long a connection to a client is kept after its last message.
PROXY_IDLE_MS: Final = 30_000
#: After a failure nothing is tried for this time, doubled after each further failure, up to:
PROXY_BACKOFF_MS: Final = 100
PROXY_LONGEST_BACKOFF_MS: Final = 30_000
