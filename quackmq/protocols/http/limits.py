"""Bounds of the HTTP protocol, each with its reason. Sizes are in bytes unless the name says
otherwise.
"""

from __future__ import annotations

from typing import Final

from quackmq.limits import KIB, MIB

# --- the archive ---------------------------------------------------------------------------

#: Size of the chunks in which an archive file is read and sent to a client.
ARCHIVE_CHUNK_BYTES: Final = 1 * MIB

# --- the broker ----------------------------------------------------------------------------

#: Unreachable proxy clients that a health response lists.
UNREACHED_CLIENTS_LISTED: Final = 100

# --- the HTTP listener ---------------------------------------------------------------------

#: Open connections, each with at most one request in progress; an idle connection costs 4 KiB.
HTTP_CONNECTIONS: Final = 10_000
#: Connections that the operating system queues before we accept them.
HTTP_BACKLOG: Final = 1_024
#: A request's line and headers; browsers and proxies send up to 16 KiB.
HTTP_HEAD_BYTES: Final = 32 * KIB
#: Cached request heads, and the largest head that is cached. With its parsed form a head takes at
#: most about 3 KiB. A client has few heads, which differ only in the declared length.
HTTP_CACHED_HEADS: Final = 1_024
HTTP_CACHED_HEAD_BYTES: Final = 1 * KIB
#: A longer error message about a body gets no hint. The message may quote the body, and the time to
#: compare names grows with their length.
HTTP_HINTED_CHARS: Final = 1_000
#: The error message about a larger body does not quote the wrong value: to find the value, the body
#: is decoded a second time.
HTTP_QUOTED_BODY_BYTES: Final = 64 * KIB
#: Parameters of one query: no endpoint has more than ten.
HTTP_QUERY_PARAMETERS: Final = 100
#: A request's body, unless its route says otherwise: the largest batch fits, but not as base64.
HTTP_BODY_BYTES: Final = 16 * MIB
#: The body of one message as JSON text, which may escape every byte, or as base64.
HTTP_QUEUE_BODY_BYTES: Final = 32 * MIB
#: The part of a body that a connection may hold without reserving memory.
HTTP_UNRESERVED_BYTES: Final = 64 * KIB
#: Memory of all larger bodies of all connections, arriving or in progress; beyond it a body is
#: refused.
HTTP_RECEIVE_BYTES: Final = 512 * MIB
#: Pipelined requests of one connection that wait; beyond it we stop reading.
HTTP_REQUESTS_AHEAD: Final = 16
#: Bytes parsed before the waiting requests are counted again: a read of 256 KiB may hold 9,000
#: requests.
HTTP_PARSED_BYTES: Final = 8 * KIB
#: Deadline for a request to arrive completely: enough for the largest one at 1 MB/s.
HTTP_REQUEST_WAIT_MS: Final = 30_000
#: An idle connection is closed after this time; proxies keep theirs for 60 s.
HTTP_IDLE_MS: Final = 75_000
#: A peer that reads nothing of its response for this long is disconnected.
HTTP_SEND_WAIT_MS: Final = 30_000
#: Unsent bytes of one connection; above it no further request of that connection begins.
HTTP_WRITE_BUFFER_BYTES: Final = 256 * KIB
#: Unsent bytes of all connections; above it requests are refused until slow peers have caught up.
HTTP_SEND_BYTES: Final = 256 * MIB
#: How long a closing server waits for its last responses: half of it for them to become durable,
#: half for the peers to read them.
HTTP_DRAIN_MS: Final = 4_000
#: How long a peer may take to close after its request was refused before it was complete.
HTTP_LINGER_MS: Final = 1_000
#: Messages in one request to publish or to stage: each becomes several Python objects.
HTTP_MESSAGES: Final = 10_000
#: Headers of one message, as JSON.
HTTP_MESSAGE_HEADERS: Final = 1_000
#: A key in the query, which must fit into the request line.
HTTP_KEY_BYTES: Final = 4 * KIB
#: Message bytes in one page; the first message is always whole. Another request costs little.
HTTP_PAGE_BYTES: Final = 4 * MIB
#: The longest wait for a message that a client may request: proxies give up after 60 s, many
#: earlier.
HTTP_WAIT_MS: Final = 30_000
#: Event streams at the same time: each holds a connection for as long as its reader wants.
HTTP_EVENT_STREAMS: Final = 1_000
#: Partitions of one event stream: the id of each event holds a position in each of them.
HTTP_EVENT_PARTITIONS: Final = 100
#: Interval of heartbeats on a silent event stream. They show the peers and every proxy between them
#: that the stream is alive. Half of the 30 s after which impatient proxies disconnect.
HTTP_HEARTBEAT_MS: Final = 15_000
#: Messages that an event stream reads from a partition at a time. A slow reader costs the memory of
#: these messages until they are sent: the next ones are read only then.
HTTP_EVENTS_BYTES: Final = 256 * KIB
HTTP_EVENTS_RECORDS: Final = 500
#: Record batches in one response, beyond the first: few requests for much data. A slow reader costs
#: no more memory than a Kafka fetch.
HTTP_BATCHES_BYTES: Final = 8 * MIB
#: Bytes of the log that one request scans for holes. A batch of one marker takes 78 bytes, so a
#: response may list 13,000 holes.
HTTP_HOLES_BYTES: Final = 1 * MIB
#: Append times in one response, in a header of about 10 bytes each. A response that would need more
#: has fewer batches.
HTTP_APPEND_TIMES: Final = 1_000

# --- the line listener ---------------------------------------------------------------------

#: Topics of a line connection that the list of connections names; a connection may have a thousand.
CONNECTION_TOPICS_LISTED: Final = 20
