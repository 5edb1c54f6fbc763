"""How a PostgreSQL store is opened."""

from __future__ import annotations

from dataclasses import dataclass

from quackmq.stores import limits


@dataclass(frozen=True, slots=True)
class PostgresOptions:
    """Settings with defaults that fit a broker. Tests make them small."""

    #: The memory for recent batches.
    tail_bytes: int = limits.TAIL_BYTES
    #: A row of batches accepts no second batch beyond this size.
    chunk_bytes: int = limits.CHUNK_BYTES
    #: Where clients reach this broker; other brokers tell it to them.
    broker: str = ""
