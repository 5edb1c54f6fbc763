"""The systems that the comparison starts: ours first, in the order of the table's columns."""

from __future__ import annotations

from typing import Final

from benchmarks.peers.base import Peer
from benchmarks.peers.kafka import Kafka, KafkaThatFlushes
from benchmarks.peers.nats import Nats
from benchmarks.peers.quackmq import QuackMQ
from benchmarks.peers.rabbitmq import RabbitMQ
from benchmarks.peers.redis import Redis

__all__ = ["PEERS", "Peer"]

PEERS: Final[tuple[Peer, ...]] = (
    QuackMQ(),
    Kafka(),
    KafkaThatFlushes(),
    Nats(),
    Redis(),
    RabbitMQ(),
)
