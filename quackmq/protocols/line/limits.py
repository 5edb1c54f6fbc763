"""Bounds of the line protocol, each with its reason. Sizes are bytes unless the name says
otherwise."""

from __future__ import annotations

from typing import Final

from quackmq.limits import KIB, MIB

# --- the line door -------------------------------------------------------------------------

#: The words before an entry, or a whole message without one: an id and a topic fit well.
LINE_HEAD_BYTES: Final = 1 * KIB
#: Of a line too long, what is read past to answer it: a slip, not a peer that never ends one.
LINE_LEFT_OUT_BYTES: Final = 1 * MIB
#: Bad messages in a row. A person's slips are fewer; a peer of another protocol has more.
LINE_REFUSALS: Final = 100
#: Topics of one connection; each is a subscription's, or a publisher's entry that waits.
LINE_TOPICS: Final = 1_000
#: Connections at once; an idle one costs about 10 KiB, one that means harm a line and a buffer.
LINE_CONNECTIONS: Final = 4_000
#: Connections that the system holds for us before we have taken them.
LINE_BACKLOG: Final = 1_024
#: The one buffer into which all connections receive; what has not been read of it, they keep.
LINE_SCRATCH_BYTES: Final = 16 * KIB
#: Messages of one connection that are looked at in one turn of the loop: then others have theirs.
LINE_MESSAGES_AT_ONCE: Final = 64
#: Lines of entries that are kept for the other subscribers to whom they will be sent as well; in
#: step with each other they need one, and those who are behind make their own.
LINE_KEPT_LINES: Final = 256
#: A peer that has not said what it wants has so long for its next message: a person may type it.
LINE_HANDSHAKE_MS: Final = 60_000
#: A line that has begun must be whole after this time: terminals and programs send lines whole.
LINE_WAIT_MS: Final = 10_000
#: An entry is lent for so much longer than its subscriber has for the answer, so that who is silent
#: is found out by the door, which gives it back at once.
LINE_LEASE_MARGIN_MS: Final = 10_000
#: Written and not yet taken by the peer; above it nothing more is read from or sent to it.
LINE_WRITE_BUFFER_BYTES: Final = 64 * KIB
#: A peer that does not take its answers for so long is disconnected.
LINE_SEND_WAIT_MS: Final = 10_000
#: How often peers are looked at for having been silent or slow for too long.
LINE_SWEEP_MS: Final = 500
#: A door that closes waits so long for entries to be durable and for answers to those that are out.
LINE_DRAIN_MS: Final = 3_000
#: After the last word the peer has so long to hang up itself.
LINE_LINGER_MS: Final = 1_000
#: Ended connections whose records are kept, for whoever wants to know how they ended.
LINE_ENDED: Final = 1_000
