"""A store in a PostgreSQL database: opened as soon as this broker is the owner."""

from __future__ import annotations

from collections.abc import Callable

from quackmq.clock import Clock, wall_clock_ms
from quackmq.stores import limits
from quackmq.stores.core.committer import Committer
from quackmq.stores.core.store import CoreStore
from quackmq.stores.postgres.connection import Address
from quackmq.stores.postgres.load import load
from quackmq.stores.postgres.medium import PostgresMedium
from quackmq.stores.postgres.options import PostgresOptions
from quackmq.stores.postgres.owner_session import OwnerSession


class PostgresStore(CoreStore):
    """A store over a `PostgresMedium`. Not thread-safe: call from the event loop."""

    kind = "PostgreSQL"

    def __init__(self, committer: Committer, medium: PostgresMedium, cluster_id: str) -> None:
        super().__init__(cluster_id)
        self._committer = committer
        self.medium = medium

    @classmethod
    async def open(
        cls,
        url: str,
        options: PostgresOptions | None = None,
        now_ms: Callable[[], int] = wall_clock_ms,
    ) -> PostgresStore:
        """Wait until no other broker owns the database, become its owner, and load it. Creates or
        migrates the schema. Raises StorageError."""
        options = options or PostgresOptions()
        owner = OwnerSession(Address.parse(url))
        session = await owner.become_owner(options.broker)
        try:
            forget_before_ms = Clock.of(now_ms).expired_before(limits.PRODUCER_EXPIRY_MS)
            loaded = await load(
                session, owner.address, owner.epoch, options.chunk_bytes, forget_before_ms
            )
            cluster_id: str = await session.fetchval("select cluster_id from quackmq.store")
            medium = PostgresMedium(owner, options)
            committer = Committer(medium, loaded, now_ms)
            owner.on_fenced = committer.lose
            await medium.remover.add_unfinished()
        except BaseException:
            await owner.close()
            raise
        return cls(committer, medium, cluster_id)
