"""Records of connections: one for each connected peer, and how ended connections have ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from quackmq.protocols.line.codec.messages import Role


@dataclass(frozen=True, slots=True)
class ConnectionRecord:
    """A publisher or a subscriber, once the broker has accepted its id.

    `channel` names its way to the broker: an address, a Unix socket or a pair of pipes. The counts:

    - `entries`: published, or delivered and acknowledged;
    - `retries`: how often a publisher was answered `retry`;
    - `skipped`: entries of the subscriber's topics that were too old for it since it subscribed;
    - `left_out`: entries that do not fit into a line.
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
    """How a connection has ended."""

    TERMINATED = "terminated"
    CLOSED = "the broker is closing"
    GONE = "disconnected without terminate"
    DEAD = "silent for too long"
    REPLACED = "connected again elsewhere"
    EXPELLED = "did not keep to the protocol"
    MISTAKEN = "speaks another protocol"
    FAILED = "the broker failed; its log says why"


#: The ends of a connection whose peer is dead.
DEATHS: Final = (End.DEAD, End.GONE)


@dataclass(frozen=True, slots=True)
class EndedConnection:
    """A connection that has ended, with its last record."""

    record: ConnectionRecord
    end: End
