"""The writing session of the owner: it has the lock, and is opened again when it breaks.

A second session updates the heartbeat, also while a long commit is running. It opens the first one
again if that has ended while there was nothing to write, so that the owner keeps its lock.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Final

from quackmq.errors import StorageError, StoreFenced, StoreUnavailable
from quackmq.stores import limits
from quackmq.stores.postgres.connection import (
    Address,
    Session,
    check_is_direct,
    ends_session,
    open_session,
    translated_errors,
)
from quackmq.stores.postgres.ownership import (
    Cycle,
    Standby,
    beat,
    end_sessions,
    fenced_error,
    read_owner,
    release,
    renew_epoch,
    skip_lost_offsets,
    take_ownership,
    try_lock,
)
from quackmq.stores.postgres.schema import migrate, read_version

_logger: Final = logging.getLogger("quackmq.store")


class OwnerSession:
    """The writing session. Hold `lock` during a transaction, so that there is one at a time."""

    def __init__(self, address: Address) -> None:
        self.address = address
        #: A new id for each run of a broker.
        self.owner_id = uuid.uuid4()
        #: The epoch of the fence, and the one that this run began with.
        self.epoch = 0
        self.run_epoch = 0
        #: The last cycle that is known to be committed.
        self.last_cycle = Cycle(0, 0)
        #: The cycle of which it is not known whether it is committed, if there is one.
        self.in_doubt: Cycle | None = None
        #: Why the last heartbeat failed; None if it did not. A heartbeat is a write.
        self.outage: StoreUnavailable | None = None
        #: Waits for the lock, until this broker is the owner.
        self.standby: Standby | None = None
        #: For one transaction, or one recovery, at a time.
        self.lock = asyncio.Lock()
        #: Call with the error if another broker becomes the owner.
        self.on_fenced: Callable[[StoreFenced], None] = _ignore
        self._session: Session | None = None
        self._heart: Session | None = None
        self._process = 0
        self._beating: asyncio.Task[None] | None = None

    async def become_owner(self, broker: str) -> Session:
        """Wait for the lock, create or migrate the schema, and become the owner; return the
        session. `broker` is the address of this broker. While it waits for the lock, the database
        may be away for any time. Raises StorageError."""
        try:
            session = await self._open()
            self._heart = await open_session(self.address, self.owner_id)
            await check_is_direct(self.address, session, self._heart)
            await read_version(session, self.address)
            self.standby = standby = Standby(session, self.address)
            while not await self._try_to_take_over(standby, broker):
                standby.session = await self._reconnect()
        except BaseException:
            self._terminate()
            raise
        self._beating = asyncio.get_running_loop().create_task(
            self._keep_beating(), name="quackmq-heartbeat"
        )
        return standby.session

    async def _try_to_take_over(self, standby: Standby, broker: str) -> bool:
        """Wait for the lock and become the owner; return False, after a warning, if the session has
        ended before. Raises StorageError."""
        try:
            await self._take_over(standby, broker)
        except StoreUnavailable as error:
            if error.__cause__ is None or not ends_session(error.__cause__):
                raise
            _logger.warning(
                "%s; this broker is not active, and tries to reach the database every %g s",
                *(error, limits.STANDBY_RECONNECT_S),
            )
            return False
        return True

    async def _take_over(self, standby: Standby, broker: str) -> None:
        """Wait for the lock, create or migrate the schema, and become the owner."""
        await standby.wait_for_lock()
        session = standby.session
        await migrate(session, self.address)
        await standby.skip_lost_offsets()
        takeover = await standby.describe_takeover()
        self.epoch = self.run_epoch = await take_ownership(
            session, self.address, self.owner_id, broker
        )
        owner = await read_owner(session, self.address)
        if owner is None:
            raise fenced_error(self.address)
        self.last_cycle = owner.last_cycle
        if takeover:
            _logger.info("took over from %s", takeover)

    async def _reconnect(self) -> Session:
        """Open the session of a standby again, as soon as the database can be reached; return it.
        Then leave the lock to the broker that was active before, for some seconds."""
        while True:
            self.abandon()
            await asyncio.sleep(limits.STANDBY_RECONNECT_S)
            try:
                async with asyncio.timeout(limits.HEARTBEAT_EXPIRY_S):
                    session = await self._open()
                break
            except (StoreUnavailable, TimeoutError):
                continue
        _logger.info("%s can be reached again; waiting to take over", self.address)
        await asyncio.sleep(limits.OWNER_FIRST_S)
        return session

    def settle(self, is_committed: bool) -> None:
        """Note what became of the cycle in doubt."""
        if is_committed and self.in_doubt is not None:
            self.last_cycle = self.in_doubt
        self.in_doubt = None

    @property
    def session(self) -> Session | None:
        """The session; None if it has ended, and `recover` must be called."""
        session = self._session
        return None if session is None or session.is_closed() else session

    def abandon(self) -> None:
        """Give up a session that does not answer, or whose last transaction is in doubt."""
        if self._session is not None:
            self._session.terminate()
            self._session = None

    async def recover(self) -> bool:
        """Open the session again and increment the epoch: then no earlier transaction of this owner
        can commit any more. Return whether the cycle in doubt was committed. The caller holds
        `lock`. Raises StoreUnavailable if that has to be tried again, StoreFenced."""
        self.abandon()
        process = self._process
        session = await self._open()
        try:
            # The server may not have noticed yet that the connection has broken.
            await end_sessions(session, self.address, self.owner_id, process)
            is_locked = await try_lock(session, self.address)
            owner = await read_owner(session, self.address)
            if owner is None:
                raise gone_back(self.address)
            if owner.epoch >= self.epoch and owner.owner_id != self.owner_id:
                raise fenced_error(self.address)
            if not is_locked:
                raise StoreUnavailable(f"another broker is taking over {self.address}")
            if owner.epoch < self.epoch:
                raise await self._give_up_lost_data(session)
            self.epoch = await renew_epoch(session, self.address, self.owner_id)
            # Only now: an earlier transaction could have been committed in between.
            owner = await read_owner(session, self.address)
            if owner is None or owner.last_cycle not in (self.last_cycle, self.in_doubt):
                raise await self._give_up_lost_data(session)
        except BaseException:
            self.abandon()
            raise
        _logger.info("the connection to %s is restored", self.address)
        return owner.last_cycle == self.in_doubt

    async def close(self) -> None:
        """Hand over to a standby, and end the sessions. Another broker's ownership is left
        alone."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait([self._beating])
        session = self.session
        try:
            if session is not None:
                async with asyncio.timeout(limits.CONNECT_S):
                    await release(session, self.address, self.owner_id)
        except (StorageError, TimeoutError) as error:
            # The server releases the lock when the session ends.
            _logger.warning("%s was not handed over in order: %s", self.address, error)
        finally:
            self._terminate()

    async def _open(self) -> Session:
        session = self._session = await open_session(self.address, self.owner_id)
        with translated_errors(self.address):
            # A proxy may report a process of its own when a session begins.
            self._process = await session.fetchval("select pg_backend_pid()")
        return session

    async def _give_up_lost_data(self, session: Session) -> StoreFenced:
        """Skip the offsets that a database which has gone back in time does not know; return the
        error for everybody who has seen the lost data."""
        await skip_lost_offsets(session, self.address, self.epoch)
        return gone_back(self.address)

    async def _keep_beating(self) -> None:
        """Update the heartbeat until this broker is fenced."""
        while True:
            try:
                async with asyncio.timeout(limits.HEARTBEAT_EXPIRY_S):
                    await self._beat()
            except StoreFenced as error:
                self.on_fenced(error)
                return
            except (StorageError, TimeoutError) as error:
                self._note_outage(str(error) or f"{self.address} does not answer")
                if self._heart is not None:
                    self._heart.terminate()
            else:
                self._note_heartbeat()
            await asyncio.sleep(limits.HEARTBEAT_S)

    async def _beat(self) -> None:
        """Update the heartbeat once; restore the writing session if it has ended unnoticed."""
        if self._heart is None or self._heart.is_closed():
            self._heart = await open_session(self.address, self.owner_id)
        await beat(self._heart, self.address, self.owner_id)
        if self.session is None and not self.lock.locked():
            async with self.lock:
                await self.recover()

    def _note_outage(self, reason: str) -> None:
        """Note that a heartbeat has failed; log the first one of an outage."""
        if self.outage is None:
            _logger.warning("no heartbeat: %s", reason)
        self.outage = StoreUnavailable(reason)

    def _note_heartbeat(self) -> None:
        """Note that the heartbeat was updated; log the end of an outage."""
        if self.outage is not None:
            _logger.info("the heartbeat is back: %s can be reached again", self.address)
        self.outage = None

    def _terminate(self) -> None:
        for session in (self._session, self._heart):
            if session is not None:
                session.terminate()
        self._session = self._heart = None


def gone_back(address: Address) -> StoreFenced:
    """Return the error for a database whose last committed cycle is missing."""
    return StoreFenced(
        f"{address} has gone back in time: acknowledged data is missing, as after a failover to a "
        "replica that was behind, or a restored backup; the broker must open it again"
    )


def _ignore(_: StoreFenced) -> None:
    """Do nothing: nobody waits for this error yet."""
