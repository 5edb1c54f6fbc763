"""A PostgreSQL database as the medium of a store: a cycle is one transaction.

If the connection breaks during a commit, the outcome is unknown. The medium then opens the session
again, with a new epoch, and looks whether the cycle is there: if not, it commits the cycle again.
Callers wait meanwhile, for at most `limits.UNREACHABLE_S`.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from typing import Final

from quackmq.errors import OutcomeUnknown, StorageError, StoreFenced, StoreUnavailable
from quackmq.model.topic import AbortedTransaction, OffsetTime, PartitionKey, TimeKind
from quackmq.stores import limits
from quackmq.stores.core.medium import Medium
from quackmq.stores.core.pending import CycleBounds, PendingCommit
from quackmq.stores.postgres.connection import (
    DRIVER_ERRORS,
    Session,
    ends_session,
    translate_error,
)
from quackmq.stores.postgres.log import PostgresLog
from quackmq.stores.postgres.options import PostgresOptions
from quackmq.stores.postgres.owner_session import OwnerSession
from quackmq.stores.postgres.ownership import Cycle
from quackmq.stores.postgres.reads import Reader
from quackmq.stores.postgres.removal import Remover
from quackmq.stores.postgres.statements import (
    AppendedRows,
    append_rows,
    copy_batches,
    rows_of,
    write_changes,
    write_trims,
)

_logger: Final = logging.getLogger("quackmq.store")


class PostgresMedium(Medium[PostgresLog]):
    """The medium of one owner. See the module for threads."""

    can_resolve = True
    bounds = CycleBounds(
        max_entry_bytes=limits.CYCLE_ENTRY_BYTES,
        batch_entry_bytes=limits.CYCLE_BATCH_ENTRY_BYTES,
        change_entry_bytes=limits.CYCLE_CHANGE_ENTRY_BYTES,
        trim_entry_bytes=limits.CYCLE_CHANGE_ENTRY_BYTES,
    )

    def __init__(self, owner: OwnerSession, options: PostgresOptions) -> None:
        self.tail_bytes = options.tail_bytes
        self._options = options
        self._owner = owner
        self._address = owner.address
        self._reader = Reader(owner.address, owner.owner_id)
        self.remover = Remover(owner, self._reader)
        #: The positions to which the trims of the cycle being committed have moved the logs.
        self._first_positions: dict[PostgresLog, int] = {}
        self._is_closing = asyncio.Event()

    @property
    def outage(self) -> StoreUnavailable | None:
        return self._owner.outage

    def new_log(self, key: PartitionKey, epoch: int) -> PostgresLog:
        return PostgresLog(key, epoch, self._options.chunk_bytes)

    # --- cycles -----------------------------------------------------------------------------

    async def commit(self, pending_commit: PendingCommit) -> None:
        owner = self._owner
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + limits.UNREACHABLE_S
        #: Whether a try may have been committed although its connection broke.
        in_doubt = False
        async with owner.lock:
            owner.in_doubt = cycle = self._next_cycle
            while True:
                try:
                    if owner.session is None:
                        is_committed = await owner.recover()
                        in_doubt = False
                        if is_committed:
                            break
                    await self._write(pending_commit, cycle)
                    break
                except _RolledBack:
                    owner.settle(is_committed=False)
                    raise
                except StoreUnavailable as error:
                    in_doubt = in_doubt or isinstance(error, _Broken)
                    if loop.time() > deadline_s:
                        raise self._failure(error, in_doubt) from error
                    await asyncio.sleep(limits.RECONNECT_S)
            owner.settle(is_committed=True)

    async def resolve(self, pending_commit: PendingCommit) -> bool:
        is_logged = False
        while not self._is_closing.is_set():
            try:
                async with self._owner.lock:
                    is_committed = await self._owner.recover()
                    self._owner.settle(is_committed)
                    return is_committed
            except StoreUnavailable as error:
                if not is_logged:
                    _logger.warning("the outcome of the last write is unknown so far: %s", error)
                is_logged = True
                await self._pause()
        raise StorageError("the broker ends before the outcome of its last write is known")

    @property
    def _next_cycle(self) -> Cycle:
        """The number of the cycle that is committed next."""
        owner = self._owner
        run_epoch, number = owner.last_cycle
        return Cycle(owner.run_epoch, number + 1 if run_epoch == owner.run_epoch else 1)

    async def _write(self, pending_commit: PendingCommit, cycle: Cycle) -> None:
        """Write a cycle as one transaction. Raises _RolledBack if the server has refused it,
        _Broken if the session has ended meanwhile, StoreFenced."""
        session = self._owner.session
        try:
            async with asyncio.timeout(limits.COMMIT_S):
                await self._write_in(session, pending_commit, cycle)
        except StoreFenced:
            raise
        except DRIVER_ERRORS as error:
            translated = translate_error(error, self._address)
            if not ends_session(error):
                raise _RolledBack(str(translated)) from error
            self._owner.abandon()
            raise _Broken(str(translated)) from error
        except BaseException:
            self._owner.abandon()
            raise

    async def _write_in(
        self, session: Session, pending_commit: PendingCommit, cycle: Cycle
    ) -> None:
        """Write a cycle in a session: by one statement, if that is enough for its content."""
        rows = rows_of(pending_commit.chunks)
        fence = (self._address, self._owner.owner_id, self._owner.epoch, cycle)
        is_large = pending_commit.append_bytes > limits.COPY_FROM_BYTES
        if not is_large and not pending_commit.changes and not pending_commit.trims:
            await append_rows(session, *fence, rows)
            return
        async with session.transaction():
            if is_large:
                batches, rows = rows.batches, AppendedRows([], *rows[1:])
                await append_rows(session, *fence, rows)
                await copy_batches(session, batches)
            else:
                await append_rows(session, *fence, rows)
            if pending_commit.changes:
                await write_changes(session, pending_commit.changes)
            if pending_commit.trims:
                self._first_positions = await write_trims(session, pending_commit.trims)

    def _failure(self, error: StoreUnavailable, in_doubt: bool) -> StorageError:
        """Return the error for callers that have waited for the database long enough. A cycle that
        may have been committed stays in doubt."""
        if not in_doubt:
            self._owner.settle(is_committed=False)
            return StoreUnavailable(f"{error}; nothing was stored: try again")
        return OutcomeUnknown(f"the connection broke during a commit, and {error}")

    async def _pause(self) -> None:
        """Wait until the next try is due, or the store closes."""
        try:
            async with asyncio.timeout(limits.RECONNECT_S):
                await self._is_closing.wait()
        except TimeoutError:
            return

    def after_commit(self, pending_commit: PendingCommit) -> None:
        for log, _ in pending_commit.chunks:
            if log.forgotten is not None:
                self.remover.add_producers(log.key, log.forgotten)
                log.forgotten = None

    def trim_log(self, log: PostgresLog, first_offset: int) -> None:
        log.trim(first_offset)
        log.first_position = self._first_positions.get(log, log.first_position)
        self.remover.add(log.key)

    def delete_logs(self, topic_id: uuid.UUID, logs: Sequence[PostgresLog]) -> None:
        for log in logs:
            if log.next_position > 0:
                self.remover.add(log.key)

    # --- reading ----------------------------------------------------------------------------

    async def read(
        self, log: PostgresLog, offset: int, max_bytes: int, first_max_bytes: int
    ) -> tuple[memoryview, ...]:
        return await self._reader.read(log, offset, max_bytes, first_max_bytes)

    async def find_aborted(
        self, log: PostgresLog, first: int, last: int
    ) -> tuple[AbortedTransaction, ...]:
        return await self._reader.find_aborted(log, first, last)

    async def offset_for_time(
        self, log: PostgresLog, time_ms: int, kind: TimeKind
    ) -> OffsetTime | None:
        return await self._reader.offset_for_time(log, time_ms, kind)

    async def append_times(self, log: PostgresLog, first: int, next: int) -> Sequence[OffsetTime]:
        return await self._reader.append_times(log, first, next)

    async def least_bytes_between(self, log: PostgresLog, first: int, next: int) -> int:
        return await self._reader.least_bytes_between(log, first, next)

    # --- the end ----------------------------------------------------------------------------

    def begin_closing(self) -> None:
        self._is_closing.set()

    async def close(self) -> None:
        await self.remover.close()
        self._reader.close()
        await self._owner.close()


class _RolledBack(StoreUnavailable):
    """The server has refused a transaction: certainly nothing was changed."""

    code = "store_unavailable"


class _Broken(StoreUnavailable):
    """A session has ended during a transaction, which may have been committed."""

    code = "store_unavailable"
