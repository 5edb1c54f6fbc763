"""Bounds of the Kafka protocol, each with its reason. Sizes are in bytes unless the name says
otherwise.
"""

from __future__ import annotations

from typing import Final

from quackmq.limits import KIB, MIB

# --- the Kafka listener --------------------------------------------------------------------

#: Open connections; an idle one costs about 2 KiB.
KAFKA_CONNECTIONS: Final = 10_000
#: Connections that the operating system queues before we accept them.
KAFKA_BACKLOG: Final = 1_024
#: The largest Produce request: several of the largest batches fit.
KAFKA_PRODUCE_BYTES: Final = 64 * MIB
#: The largest request of any other kind: 10,000 topics by name fit. Decoding blocks the loop that
#: all connections share.
KAFKA_REQUEST_BYTES: Final = 4 * MIB
#: Array elements in one request, over all its arrays: each becomes a Python object.
KAFKA_REQUEST_ELEMENTS: Final = 50_000
#: A string of the protocol: the maximum of its signed 16-bit length.
KAFKA_STRING_BYTES: Final = 32_767
#: Unanswered requests of one connection; beyond it we stop reading from that connection.
KAFKA_REQUESTS_IN_FLIGHT: Final = 128
#: Batches that all connections together publish in one turn of the event loop: about 5 ms of work.
#: The rest of their requests waits, so that the loop serves everything else in between.
KAFKA_BATCHES_AT_ONCE: Final = 64
#: A connection that publishes no more than this in a turn is not counted: counting a single message
#: would cost more than it protects from.
KAFKA_FEW_BATCHES: Final = 8
#: The one buffer into which all connections receive; a request that arrives whole is decoded there.
KAFKA_SCRATCH_BYTES: Final = 256 * KIB
#: The part of a request that a connection may hold without reserving memory.
KAFKA_UNRESERVED_BYTES: Final = 64 * KIB
#: Memory of all larger incomplete requests of all connections; connections beyond it wait.
KAFKA_RECEIVE_BYTES: Final = 512 * MIB
#: The memory of a large request is at most this multiple of the bytes that have arrived.
KAFKA_RECEIVE_GROWTH: Final = 8
#: Receive buffers kept for the next large request.
KAFKA_POOLED_BYTES: Final = 8 * MIB
#: The largest request buffer that is reused after its batch is released: nearly all producers send
#: requests of at most 1 MiB.
KAFKA_LENT_BYTES: Final = 2 * MIB
#: Number of idle buffers kept for reuse: those that one flush cycle releases.
KAFKA_IDLE_LENT: Final = 16
#: Topics for which the start of a Produce or Fetch response is cached.
KAFKA_ANSWER_HEADS: Final = 1_024
#: Deadline for a request to arrive completely.
KAFKA_REQUEST_WAIT_MS: Final = 120_000
#: While other connections wait for memory, a large request that would miss that deadline at its
#: pace is dropped. It gets this time first, because any network may be slow for a moment.
KAFKA_PACE_MS: Final = 2_000
#: One Fetch response, beyond its first batch. Another request costs little; memory for slow readers
#: costs much.
KAFKA_FETCH_BYTES: Final = 8 * MIB
#: One Fetch response while unsent responses of slow readers fill KAFKA_SEND_BYTES.
KAFKA_SCARCE_FETCH_BYTES: Final = 64 * KIB
KAFKA_SEND_BYTES: Final = 256 * MIB
#: Unsent bytes of one connection; above it no further request of that connection starts.
KAFKA_WRITE_BUFFER_BYTES: Final = 256 * KIB
#: A peer that reads nothing of its responses for this long is disconnected. Some clients read only
#: when their program polls for records, so this equals Kafka's idle timeout of connections.
KAFKA_SEND_WAIT_MS: Final = 600_000
#: Responses up to this total size are copied into one buffer; larger ones are sent in pieces.
KAFKA_JOINED_BYTES: Final = 16 * KIB
#: Members described, or offsets returned, in one response: the largest group fits. Further groups
#: get an error each, because a small request could ask for a large group many times.
KAFKA_GROUPS_ANSWER_BYTES: Final = 64 * MIB
#: Configs in one response: those of 2,500 topics. Encoding blocks the loop that all connections
#: share, for 4 µs per config with all its details.
KAFKA_CONFIGS_ANSWER: Final = 50_000
#: Partitions of transactions, or producers of partitions, in one response: those of five of the
#: largest. The rest gets an error each, because a small request could ask for much many times.
KAFKA_TRANSACTIONS_ANSWER: Final = 50_000
#: Topics or partitions that Metadata describes before other tasks run: about 5 ms of work.
METADATA_SLICE: Final = 250
#: Forms of Metadata (a version, with or without operations) in which encoded topics are cached,
#: about 100 bytes per topic and form. A cluster's clients rarely use more.
METADATA_FORMS: Final = 4
#: How long a closing server waits for its last responses to become durable and to be read.
KAFKA_DRAIN_MS: Final = 5_000
#: How long a peer may take to close the connection after the last response.
KAFKA_LINGER_MS: Final = 1_000
