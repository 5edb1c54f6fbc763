"""Bounds of the Kafka protocol, each with its reason. Sizes are bytes unless the name says
otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import KIB, MIB

# --- the Kafka door ------------------------------------------------------------------------

#: Connections at once; one that is idle costs about 2 KiB.
KAFKA_CONNECTIONS: Final = 10_000
#: Connections that the system holds for us before we have taken them.
KAFKA_BACKLOG: Final = 1_024
#: The largest Produce request: several of the largest batches fit.
KAFKA_PRODUCE_BYTES: Final = 64 * MIB
#: The largest request of any other kind: 10,000 topics by name fit. Reading one takes time of the
#: loop that all connections share.
KAFKA_REQUEST_BYTES: Final = 4 * MIB
#: Array elements in one request, over all its arrays: each becomes a Python object.
KAFKA_REQUEST_ELEMENTS: Final = 50_000
#: A string of the protocol; what its signed 16-bit length can say.
KAFKA_STRING_BYTES: Final = 32_767
#: Read and not yet answered, a connection; beyond it we stop reading from that connection.
KAFKA_REQUESTS_IN_FLIGHT: Final = 128
#: The one buffer into which all connections receive; a request that comes whole is read there.
KAFKA_SCRATCH_BYTES: Final = 256 * KIB
#: A connection keeps so much of a request that has begun without asking anybody.
KAFKA_UNRESERVED_BYTES: Final = 64 * KIB
#: All larger requests on their way at once, over all connections; those beyond it wait their turn.
KAFKA_RECEIVE_BYTES: Final = 512 * MIB
#: The memory given to a large request is at most so many times what has come of it.
KAFKA_RECEIVE_GROWTH: Final = 8
#: Receive buffers kept for the next large request.
KAFKA_POOLED_BYTES: Final = 8 * MIB
#: The largest memory for a request that is used again after its batch has been let go of: nearly
#: all producers send requests of 1 MiB at the most.
KAFKA_LENT_BYTES: Final = 2 * MIB
#: Number of those that wait for the next request: what one flush cycle lets go of.
KAFKA_IDLE_LENT: Final = 16
#: Topics for which the beginning of a Produce answer is kept ready.
KAFKA_ANSWER_HEADS: Final = 1_024
#: A request that has begun must have come whole after this time.
KAFKA_REQUEST_WAIT_MS: Final = 120_000
#: While others wait for memory, a large request that comes too slowly to be whole in that time is
#: given up, after so long at the earliest: any network can be slow for a moment.
KAFKA_PACE_MS: Final = 2_000
#: One fetch's answer (beyond its first batch); asking again costs little, memory for slow
#: readers much.
KAFKA_FETCH_BYTES: Final = 8 * MIB
#: The same while answers that slow readers have not taken fill KAFKA_SEND_BYTES.
KAFKA_SCARCE_FETCH_BYTES: Final = 64 * KIB
KAFKA_SEND_BYTES: Final = 256 * MIB
#: Written and not yet taken by the peer; above it nothing more is begun for that connection.
KAFKA_WRITE_BUFFER_BYTES: Final = 256 * KIB
#: A peer that takes nothing of its answers for so long is disconnected. Some clients read only when
#: their program asks for records, so this is as long as Kafka lets a connection be idle.
KAFKA_SEND_WAIT_MS: Final = 600_000
#: Answers up to this size together are copied into one buffer; larger ones are sent in pieces.
KAFKA_JOINED_BYTES: Final = 16 * KIB
#: Members described, or offsets given, by one answer: the largest group fits. Beyond it, groups are
#: refused by name: a small request could ask for the same large thing many times.
KAFKA_GROUPS_ANSWER_BYTES: Final = 64 * MIB
#: Configs in one answer: those of 2,500 topics. To write it takes time of the loop that all
#: connections share, 4 µs each with everything that can be said of it.
KAFKA_CONFIGS_ANSWER: Final = 50_000
#: Partitions of transactions, or producers of partitions, in one answer: those of five of the
#: largest. Beyond it, the rest is refused by name: a small request could ask for much many times.
KAFKA_TRANSACTIONS_ANSWER: Final = 50_000
#: Topics or partitions that Metadata describes before others have their turn: some 5 ms of work.
METADATA_SLICE: Final = 250
#: Forms of Metadata (a version, with or without operations) in which topics are kept encoded, about
#: 100 bytes a topic each. A cluster's clients rarely use more.
METADATA_FORMS: Final = 4
#: A door that closes waits so long for its last answers to be durable and taken.
KAFKA_DRAIN_MS: Final = 5_000
#: After the last answer the peer has so long to hang up itself.
KAFKA_LINGER_MS: Final = 1_000
