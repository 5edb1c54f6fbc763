"""Bounds of the line protocol, each with its reason. Sizes are in bytes unless the name says
otherwise.
"""

from __future__ import annotations

from typing import Final

from quackmq.limits import KIB, MIB

# --- connections, messages and deadlines ---------------------------------------------------

#: The words before an entry, or a whole message without one: an id and a topic fit well.
LINE_HEAD_BYTES: Final = 1 * KIB
#: The reason behind `reject`: a sentence with two names in it. With the word it is shorter than
#: LINE_HEAD_BYTES, so that every client that uses our `Lines` accepts it.
LINE_REASON_BYTES: Final = 800
#: Bytes of an overlong line that are skipped to answer it: enough for a mistake, not for an endless
#: line.
LINE_LEFT_OUT_BYTES: Final = 1 * MIB
#: Invalid messages in a row. A person makes fewer mistakes; a peer of another protocol makes more.
LINE_REFUSALS: Final = 100
#: Topics of one connection; each has a subscription, or a publisher's pending entry.
LINE_TOPICS: Final = 1_000
#: Open connections; an idle one costs about 10 KiB, a malicious one a line and a buffer.
LINE_CONNECTIONS: Final = 4_000
#: Connections that the operating system queues before we accept them.
LINE_BACKLOG: Final = 1_024
#: The one buffer into which all connections receive; unread bytes are copied out of it.
LINE_SCRATCH_BYTES: Final = 16 * KIB
#: Messages of one connection that are handled in one turn of the loop; then others run.
LINE_MESSAGES_AT_ONCE: Final = 64
#: Encoded entries that are kept for further subscribers. Subscribers at the same position need one;
#: those that are behind encode their own.
LINE_KEPT_LINES: Final = 256
#: Deadline for the next message of a peer during the handshake: a person may type it.
LINE_HANDSHAKE_MS: Final = 60_000
#: Deadline for a line to be complete: terminals and programs send whole lines.
LINE_WAIT_MS: Final = 10_000
#: The lease of an entry exceeds the subscriber's answer deadline by this time. So the server
#: detects a silent subscriber first, and ends the lease at once.
LINE_LEASE_MARGIN_MS: Final = 10_000
#: Wait before a subscriber's answer is saved again after the disk has failed. The broker itself
#: saves answers again after a second.
LINE_SAVE_RETRY_MS: Final = 1_000
#: Unsent bytes of one peer; above it nothing more is read from it or sent to it. There is no budget
#: over all peers as in the other protocols, because few bytes can be unsent: a publisher gets one
#: short line per message, and a subscriber gets its next entry after it has answered the last one.
#: So a peer has at most this buffer and one line: LINE_HEAD_BYTES and twice the entry's size. For
#: LINE_CONNECTIONS peers that is 285 MiB with the default entry size, and 754 MiB with the
#: largest.
LINE_WRITE_BUFFER_BYTES: Final = 64 * KIB
#: A peer that reads none of its answers for this long is disconnected.
LINE_SEND_WAIT_MS: Final = 10_000
#: Interval between sweeps, which disconnect peers that are silent or slow for too long.
LINE_SWEEP_MS: Final = 500
#: How long a closing server waits for entries to become durable and for pending answers.
LINE_DRAIN_MS: Final = 3_000
#: How long a peer may take to close the connection after the last message.
LINE_LINGER_MS: Final = 1_000
#: Records of ended connections that are kept, to show how they ended.
LINE_ENDED: Final = 1_000
