"""Who is connected: a record for each connection, and how those that are over have ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from quackmq.protocols.line.codec import Role


@dataclass(frozen=True, slots=True)
class ConnectionRecord:
    """A publisher or a subscriber, once the broker has accepted its id.

    `channel` is how it reaches the broker: an address, a Unix socket or a pair of pipes. `entries`
    were published, or delivered and acknowledged; `retries` is how often a publisher was told to.
    Of a subscriber's topics, `skipped` entries have been too old for it since it subscribed, and
    `left_out` are longer than its lines may be.
    """

    role: Role
    id: str
    channel: str
    topics: tuple[str, ...] = ()
    entries: int = 0
    retries: int = 0
    skipped: int = 0
    left_out: int = 0

    def __str__(self) -> str:
        topics = ", ".join(self.topics) or "none"
        return f"{self.role} {self.id} on {self.channel}, topics: {topics}"


class End(StrEnum):
    """How a connection came to its end."""

    TERMINATED = "terminated"
    CLOSED = "the broker is closing"
    GONE = "hung up without a word"
    DEAD = "silent for too long"
    REPLACED = "connected again elsewhere"
    EXPELLED = "did not keep to the protocol"
    MISTAKEN = "speaks another protocol"
    FAILED = "the broker failed; its log says why"


@dataclass(frozen=True, slots=True)
class EndedConnection:
    """`record` as it was at the end."""

    record: ConnectionRecord
    end: End
