"""Bounds of the HTTP protocol, each with its reason. Sizes are bytes unless the name says
otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import KIB, MIB

# --- the archive ---------------------------------------------------------------------------

#: A file of the archive is read for whoever asks for its bytes by pieces of this size.
ARCHIVE_CHUNK_BYTES: Final = 1 * MIB

# --- the broker ----------------------------------------------------------------------------

#: Clients of the proxy that health tells of when they cannot be reached.
PUSH_TOLD: Final = 100

# --- the HTTP door -------------------------------------------------------------------------

#: Connections at once, each with one request under way at the most; an idle one costs 4 KiB.
HTTP_CONNECTIONS: Final = 10_000
#: Connections that the system holds for us before we have taken them.
HTTP_BACKLOG: Final = 1_024
#: A request's line and headers; browsers and proxies send up to 16 KiB.
HTTP_HEAD_BYTES: Final = 32 * KIB
#: Heads that are known again, and how large each may be: some 3 KiB of memory each with what was
#: made of it, at the most. A client's own are few, and differ in the length that they tell.
HTTP_KNOWN_HEADS: Final = 1_024
HTTP_KNOWN_HEAD_BYTES: Final = 1 * KIB
#: A complaint about a body gets a hint if it is no longer than this: it may quote what was sent,
#: and comparing names takes time that grows with them.
HTTP_EXPLAINED_CHARS: Final = 1_000
#: Parameters of one query: no endpoint has more than ten.
HTTP_QUERY_PARAMETERS: Final = 100
#: A request's body, unless its route says otherwise: the largest batch fits, not as base64.
HTTP_BODY_BYTES: Final = 16 * MIB
#: The body of one message as text in JSON, which may escape every byte of it, and of base64.
HTTP_QUEUE_BODY_BYTES: Final = 32 * MIB
#: A connection keeps so much of a body that has begun without asking anybody.
HTTP_UNRESERVED_BYTES: Final = 64 * KIB
#: All larger bodies at once, on their way or at work, over all connections; one more is refused.
HTTP_RECEIVE_BYTES: Final = 512 * MIB
#: Requests of one connection that wait for those before them; beyond it we stop reading.
HTTP_REQUESTS_AHEAD: Final = 16
#: Parsed at one go, before it is looked how many wait: a read of 256 KiB may hold 9,000 requests.
HTTP_PARSED_BYTES: Final = 8 * KIB
#: A request that has begun must have come whole after this time: the largest, at 1 MB/s.
HTTP_REQUEST_WAIT_MS: Final = 30_000
#: A connection on which nothing is asked is closed after this time; proxies keep theirs for 60 s.
HTTP_IDLE_MS: Final = 75_000
#: A peer that takes nothing of its answer for so long is disconnected.
HTTP_SEND_WAIT_MS: Final = 30_000
#: Written and not yet taken by the peer; above it nothing more is begun for that connection.
HTTP_WRITE_BUFFER_BYTES: Final = 256 * KIB
#: The same over all connections; above it requests are refused until slow peers have caught up.
HTTP_SEND_BYTES: Final = 256 * MIB
#: A door that closes waits so long for its last answers: half of it for them to be durable, the
#: rest for them to be taken.
HTTP_DRAIN_MS: Final = 4_000
#: A peer whose request was refused before it was whole has so long to hang up itself.
HTTP_LINGER_MS: Final = 1_000
#: Messages in one request to publish, or to stage: each becomes a handful of Python objects.
HTTP_MESSAGES: Final = 10_000
#: Headers of one message, as JSON.
HTTP_MESSAGE_HEADERS: Final = 1_000
#: A key in the query, which has to fit the request's line.
HTTP_KEY_BYTES: Final = 4 * KIB
#: Messages of a page, as bytes; the first is given whole. Asking again costs little.
HTTP_PAGE_BYTES: Final = 4 * MIB
#: The longest wait for a message that may be asked for: proxies give up after 60 s, many earlier.
HTTP_WAIT_MS: Final = 30_000
#: Streams of events at once: each holds a connection for as long as its reader likes.
HTTP_EVENT_STREAMS: Final = 1_000
#: Partitions of one stream of events: each event's id tells where to go on in all of them.
HTTP_EVENT_PARTITIONS: Final = 100
#: A stream of events that has nothing to say says so, so that both sides and every proxy between
#: them know that it is alive; half of the 30 s after which the impatient ones cut.
HTTP_HEARTBEAT_MS: Final = 15_000
#: Messages that a stream of events takes from a partition at a time; a reader that is slower than
#: its topic costs twice as much: what it is being sent, and what is read behind that.
HTTP_EVENTS_BYTES: Final = 256 * KIB
HTTP_EVENTS_RECORDS: Final = 500
#: Record batches in one answer, beyond the first: few requests for much data, and no more memory
#: for one that is taken slowly than a fetch of Kafka's has.
HTTP_BATCHES_BYTES: Final = 8 * MIB
#: What is looked through for holes in one request: a batch of one marker takes 78 bytes, so that
#: an answer may tell of 13,000.
HTTP_HOLES_BYTES: Final = 1 * MIB
#: Append times that one such answer tells, in a header of some 10 bytes each; there are fewer
#: batches in an answer that would have to tell more.
HTTP_APPEND_TIMES: Final = 1_000

# --- the line door -------------------------------------------------------------------------

#: Topics of a connection that are named where connections are listed; it may have a thousand.
CONNECTION_TOPICS_TOLD: Final = 20
