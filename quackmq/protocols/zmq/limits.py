"""Bounds of the ZeroMQ protocol, each with its reason. Sizes are bytes unless the name says
otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import BATCH_BYTES, KIB, MIB

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

# --- the reliable proxy: XSUB, XPUB and its REP ----------------------------------------------

#: Frames of a publisher's message: its topic and its body.
PROXY_FRAMES: Final = 2
#: A publisher's message, both frames: the largest batch, and a topic's name.
PROXY_MESSAGE_BYTES: Final = BATCH_BYTES + KIB
#: A subscription: the longest topic's or client's name, and what stands before it.
PROXY_PREFIX_BYTES: Final = KIB
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
