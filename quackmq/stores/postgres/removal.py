"""Removes the rows of trimmed batches, deleted topics and forgotten producers, in the background.

A trim or a deletion itself changes one row. Removing thousands of rows in the same transaction
would keep publishers waiting, so they are removed in small steps.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

from quackmq.errors import StorageError
from quackmq.model.producer_state import Producer
from quackmq.model.topic import PartitionKey
from quackmq.stores import limits
from quackmq.stores.postgres.owner_session import OwnerSession
from quackmq.stores.postgres.ownership import FENCE
from quackmq.stores.postgres.reads import Reader
from quackmq.stores.postgres.statements import remembered_json

_logger: Final = logging.getLogger("quackmq.store")

#: Removes some rows of a partition, if $1 and $2 are the owner: a broker that was replaced could
#: know of a trim that a restored database does not have.
_REMOVE: Final = f"""
with {FENCE},
due as (
    select first_offset, is_deleted from quackmq.partitions
    where topic_id = $3 and partition = $4 and exists (select from mine)
),
removed as (
    delete from quackmq.batches as batch using due
    where batch.topic_id = $3 and batch.partition = $4 and batch.base_offset in (
        select base_offset from quackmq.batches
        where topic_id = $3 and partition = $4
            and (due.is_deleted or next_offset <= due.first_offset)
        order by base_offset limit $5
    )
    returning batch.next_offset
)
select (select count(*) from mine) as is_owner, (select count(*) from removed) as removed
"""
_FORGET: Final = f"""
with {FENCE},
forgotten as (
    delete from quackmq.partitions
    where topic_id = $3 and partition = $4 and is_deleted and exists (select from mine)
),
aborted as (
    delete from quackmq.aborted_transactions as aborted using quackmq.partitions as partition
    where aborted.topic_id = $3 and aborted.partition = $4
        and partition.topic_id = $3 and partition.partition = $4
        and aborted.last_offset < partition.first_offset and exists (select from mine)
)
update quackmq.partitions set removed_before = first_offset
where topic_id = $3 and partition = $4 and not is_deleted and exists (select from mine)
"""
#: A producer that has come back has other batches than the one that was forgotten.
_FORGET_PRODUCERS: Final = f"""
with {FENCE}
delete from quackmq.producers as producer
using unnest($5::bigint[], $6::jsonb[]) as forgotten (producer_id, batches)
where producer.topic_id = $3 and producer.partition = $4
    and producer.producer_id = forgotten.producer_id and producer.batches = forgotten.batches
    and exists (select from mine)
"""
_DUE: Final = """
select topic_id, partition from quackmq.partitions
where is_deleted or removed_before < first_offset
"""


class Remover:
    """Removes rows, one partition after the other. Call `add` for each that has some."""

    def __init__(self, owner: OwnerSession, reader: Reader) -> None:
        self._owner = owner
        self._reader = reader
        self._due: dict[PartitionKey, None] = {}
        self._forgotten: dict[PartitionKey, list[Producer]] = {}
        self._task: asyncio.Task[None] | None = None

    async def add_unfinished(self) -> None:
        """Add the partitions that the last owner has left. Raises StorageError."""
        for topic_id, partition in await self._reader.fetch(_DUE):
            self.add(PartitionKey(topic_id, partition))

    def add(self, key: PartitionKey) -> None:
        """Remove the rows of a partition soon, as far as they are trimmed or deleted."""
        self._due[key] = None
        self._start()

    def add_producers(self, key: PartitionKey, forgotten: Iterable[Producer]) -> None:
        """Remove the rows of producers that a partition has forgotten soon."""
        self._forgotten.setdefault(key, []).extend(forgotten)
        self._start()

    def _start(self) -> None:
        if self.is_idle:
            self._task = asyncio.get_running_loop().create_task(
                self._remove_all(), name="quackmq-removal"
            )

    @property
    def is_idle(self) -> bool:
        """Whether no rows are being removed."""
        return self._task is None or self._task.done()

    async def close(self) -> None:
        """End the removal; the next owner continues it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _remove_all(self) -> None:
        """Remove all rows that are due. If the database cannot be reached, the next trim or the
        next owner tries again."""
        try:
            while self._due or self._forgotten:
                for key in tuple(self._due):
                    await self._remove(key)
                    del self._due[key]
                for key in tuple(self._forgotten):
                    await self._remove_producers(key, self._forgotten[key])
        except StorageError as error:
            _logger.warning("rows that are no longer needed were not removed: %s", error)

    async def _remove(self, key: PartitionKey) -> None:
        """Remove the rows of one partition in steps, unless another broker is the owner. Raises
        StorageError."""
        owner = self._owner
        while True:
            # The epoch may be renewed between two steps.
            fence = (owner.owner_id, owner.epoch)
            rows = await self._reader.fetch(_REMOVE, *fence, *key, limits.REMOVED_ROWS)
            if not rows[0]["is_owner"]:
                if owner.epoch == fence[1]:
                    return
            elif rows[0]["removed"] < limits.REMOVED_ROWS:
                break
        await self._reader.fetch(_FORGET, *fence, *key)

    async def _remove_producers(self, key: PartitionKey, forgotten: list[Producer]) -> None:
        """Remove the rows of producers. Raises StorageError."""
        ids = [producer.producer_id for producer in forgotten]
        batches = [remembered_json(producer) for producer in forgotten]
        fence = (self._owner.owner_id, self._owner.epoch)
        await self._reader.fetch(_FORGET_PRODUCERS, *fence, *key, ids, batches)
        # More may have been added meanwhile.
        del forgotten[: len(ids)]
        if not forgotten:
            del self._forgotten[key]
