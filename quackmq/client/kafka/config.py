"""Configuration of librdkafka: the address, shared settings, and those of producers and consumers.

A program may add further settings, for example for a cluster with TLS and passwords.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from quackmq import limits as shared_limits
from quackmq.client import limits
from quackmq.client.kafka.connection_errors import ConnectionErrors

Settings = dict[str, Any]

#: For producers only: librdkafka warns about it in a consumer.
_PARTITIONER: Final = "partitioner"


@dataclass(frozen=True, slots=True)
class KafkaConfig:
    """The address of the broker, and the librdkafka settings of its clients."""

    address: str
    client_name: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    #: Connection errors of all librdkafka clients with this configuration, unless the program sets
    #: its own callback.
    connection_errors: ConnectionErrors = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "connection_errors", ConnectionErrors(self.address))

    @property
    def has_own_partitioner(self) -> bool:
        """Whether the program has configured a librdkafka partitioner itself."""
        return _PARTITIONER in self.extra

    @property
    def is_encrypted(self) -> bool:
        """Whether the program has configured TLS."""
        return str(self.extra.get("security.protocol", "")).lower().endswith("ssl")

    def shared(self) -> Settings:
        """Return the settings that all librdkafka clients share. The program's own settings
        override them."""
        return {
            "bootstrap.servers": self.address,
            "client.id": self.client_name or "quackmq",
            # Reconnect quickly, and never forget a broker: otherwise librdkafka may wait forever
            # for one that it has forgotten (its issue 5511).
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 250,
            "metadata.recovery.strategy": "none",
            "socket.nagle.disable": True,
            "socket.connection.setup.timeout.ms": shared_limits.CLIENT_CONNECT_MS,
            "allow.auto.create.topics": True,
            # Log only critical failures (syslog level 2): calls raise the other errors.
            "log_level": 2,
            "error_cb": self.connection_errors.on_error,
            **{name: value for name, value in self.extra.items() if name != _PARTITIONER},
        }

    def producer(self, timeout_ms: int) -> Settings:
        """Return the settings of a producer whose messages fail after `timeout_ms`."""
        return self.shared() | {
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": 0,
            "message.timeout.ms": timeout_ms,
            "retries": limits.CLIENT_SEND_RETRIES,
            "retry.backoff.ms": 50,
            "retry.backoff.max.ms": 250,
            "message.max.bytes": shared_limits.BATCH_BYTES,
            "queue.buffering.max.kbytes": limits.CLIENT_SENDING_BYTES // shared_limits.KIB,
            # librdkafka's default is CRC32; all other clients use the Java client's partitioner.
            _PARTITIONER: self.extra.get(_PARTITIONER, "murmur2_random"),
            # Report a missing topic within the timeout of the call: after half of it.
            "topic.metadata.propagation.max.ms": min(timeout_ms, shared_limits.CLIENT_TIMEOUT_MS)
            // 2,
        }

    def numbering(self, transactional_id: str, timeout_ms: int) -> Settings:
        """Return the settings of a producer of numbered puts, which are transactions. librdkafka
        requires that a message times out no later than its transaction."""
        life_ms = min(timeout_ms, limits.CLIENT_TRANSACTION_MS)
        return self.producer(life_ms) | {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": limits.CLIENT_TRANSACTION_MS,
        }

    def consumer(self, group: str, session_ms: int, busy_ms: int) -> Settings:
        """Return the settings of a member of a group. `session_ms`: after this time without a
        heartbeat, the group removes the member. `busy_ms`: the longest time between two polls."""
        return self.shared() | {
            "group.id": group,
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": session_ms,
            "heartbeat.interval.ms": min(limits.CLIENT_HEARTBEAT_MS, session_ms // 3),
            # librdkafka requires that this is not shorter than the session.
            "max.poll.interval.ms": max(busy_ms, session_ms),
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            # The reader chooses all offsets itself, and reports an offset that does not exist.
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            "queued.max.messages.kbytes": limits.CLIENT_PREFETCH_BYTES // shared_limits.KIB,
            "fetch.wait.max.ms": limits.CLIENT_FETCH_WAIT_MS,
            # Fetch more as soon as the queue is emptied, not a second later.
            "fetch.queue.backoff.ms": limits.CLIENT_SHORT_POLL_MS,
            "fetch.error.backoff.ms": 100,
            "allow.auto.create.topics": False,
        }
