"""How librdkafka is set up: the address, what both directions share, and what each adds.

A program may add settings of librdkafka's own, for a cluster that wants to know who it talks to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from quackmq import limits as shared_limits
from quackmq.client import limits
from quackmq.client.kafka.connection_errors import Trouble

Settings = dict[str, Any]

#: Of producers only: librdkafka would warn about it in a consumer.
_PARTITIONER: Final = "partitioner"


@dataclass(frozen=True, slots=True)
class KafkaConfig:
    """Where the broker is, and how clients of it are set up."""

    address: str
    client_name: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    #: Noted by all clients of librdkafka that are set up by this, unless the program has a callback
    #: of its own.
    trouble: Trouble = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "trouble", Trouble(self.address))

    @property
    def has_own_partitioner(self) -> bool:
        """Whether the program has chosen a partitioner of librdkafka's itself."""
        return _PARTITIONER in self.extra

    @property
    def is_encrypted(self) -> bool:
        """Whether the program has chosen TLS."""
        return str(self.extra.get("security.protocol", "")).lower().endswith("ssl")

    def shared(self) -> Settings:
        return {
            "bootstrap.servers": self.address,
            "client.id": self.client_name or "quackmq",
            # A broker that was away is tried again soon, and remembered: otherwise librdkafka may
            # wait for ever for one that it has forgotten (its issue 5511).
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 250,
            "metadata.recovery.strategy": "none",
            "socket.nagle.disable": True,
            "socket.connection.setup.timeout.ms": shared_limits.CLIENT_CONNECT_MS,
            "allow.auto.create.topics": True,
            "log_level": 2,
            "error_cb": self.trouble.note,
            **{name: value for name, value in self.extra.items() if name != _PARTITIONER},
        }

    def producer(self, timeout_ms: int) -> Settings:
        return self.shared() | {
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": 0,
            "message.timeout.ms": timeout_ms,
            "retries": limits.CLIENT_SENDS,
            "retry.backoff.ms": 50,
            "retry.backoff.max.ms": 250,
            "message.max.bytes": shared_limits.BATCH_BYTES,
            "queue.buffering.max.kbytes": limits.CLIENT_SENDING_BYTES // shared_limits.KIB,
            # librdkafka's own default is CRC32; everybody else's is the Java client's way.
            _PARTITIONER: self.extra.get(_PARTITIONER, "murmur2_random"),
            # A topic that is not there is reported in the time of a call.
            "topic.metadata.propagation.max.ms": min(timeout_ms, shared_limits.CLIENT_TIMEOUT_MS)
            // 2,
        }

    def numbering(self, transactional_id: str, timeout_ms: int) -> Settings:
        life_ms = min(timeout_ms, limits.CLIENT_TRANSACTION_MS)
        return self.producer(life_ms) | {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": limits.CLIENT_TRANSACTION_MS,
        }

    def consumer(self, group: str, session_ms: int, busy_ms: int) -> Settings:
        return self.shared() | {
            "group.id": group,
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": session_ms,
            "heartbeat.interval.ms": min(limits.CLIENT_HEARTBEAT_MS, session_ms // 3),
            "max.poll.interval.ms": max(busy_ms, session_ms),
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            "queued.max.messages.kbytes": limits.CLIENT_AHEAD_BYTES // shared_limits.KIB,
            "fetch.wait.max.ms": limits.CLIENT_FETCH_WAIT_MS,
            # When what waits is taken, more is asked for at once, not after a second.
            "fetch.queue.backoff.ms": limits.CLIENT_LOOK_MS,
            "fetch.error.backoff.ms": 100,
            "allow.auto.create.topics": False,
        }
