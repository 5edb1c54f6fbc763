"""One active broker per database: its lock, its epoch and its heartbeat.

The active broker, the owner, is protected three times, and only the last one has to hold for
nothing to be lost:

- **Lock.** The owner's writing session holds an advisory lock. PostgreSQL releases it with the
  session, so a standby takes over at once when the owner's process has ended.
- **Heartbeat.** The owner updates a row, by the clock of the database. If that row is old, the
  owner is frozen or cut off: a standby ends the owner's sessions, which releases the lock.
- **Epoch.** Every owner increments the epoch in the row `quackmq.owner`. Each writing transaction
  first locks that row FOR SHARE where it has the writer's epoch (`FENCE`). A broker that was
  replaced finds no such row and can never commit. A transaction that has the row locked delays the
  next epoch until it has ended.

So an owner that does not know whether its transaction was committed increments its own epoch first:
after that the transaction has ended, and `quackmq.last_cycle` says how.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Final, NamedTuple

from quackmq.errors import StoreFenced
from quackmq.stores import limits
from quackmq.stores.postgres.connection import (
    Address,
    Session,
    session_name,
    translated_errors,
)

_logger: Final = logging.getLogger("quackmq.store")

#: The key of the advisory lock, which is one per database: the bytes of "quackmq".
LOCK_KEY: Final = int.from_bytes(b"quackmq")
#: The channel on which an owner that ends tells standbys to take over.
HAND_OVER_CHANNEL: Final = "quackmq_hand_over"

#: A part of each writing transaction's first statement: one row if $1 and $2 are the owner's id and
#: epoch, and that row stays so until the transaction ends; else none.
FENCE: Final = """
    mine as materialized (
        select epoch from quackmq.owner where owner_id = $1 and epoch = $2 for share
    )
"""


class Cycle(NamedTuple):
    """The number of a committed cycle: cycles are counted from 1 in each run of a broker."""

    run_epoch: int
    number: int


class Owner(NamedTuple):
    """The row of the active broker, and the last cycle that a broker has committed."""

    epoch: int
    owner_id: uuid.UUID
    address: str
    is_released: bool
    heartbeat_age_s: float
    last_cycle: Cycle


async def read_owner(session: Session, address: Address) -> Owner | None:
    """Return the owner; None if the database never had one."""
    with translated_errors(address):
        if not await session.fetchval("select to_regclass('quackmq.last_cycle') is not null"):
            return None
        row = await session.fetchrow(
            """
            select epoch, owner_id, address, released_at is not null as is_released,
                extract(epoch from clock_timestamp() - beaten_at)::float8 as heartbeat_age_s,
                run_epoch, cycle
            from quackmq.owner, quackmq.last_cycle,
                (select beaten_at from quackmq.heartbeat) as heartbeat
            """
        )
    if row is None:
        return None
    return Owner(
        epoch=row["epoch"],
        owner_id=row["owner_id"],
        address=row["address"],
        is_released=row["is_released"],
        heartbeat_age_s=row["heartbeat_age_s"],
        last_cycle=Cycle(row["run_epoch"], row["cycle"]),
    )


async def try_lock(session: Session, address: Address) -> bool:
    """Try to get the owner's lock for a session; return whether it has it. Never waits."""
    with translated_errors(address):
        is_locked: bool = await session.fetchval("select pg_try_advisory_lock($1)", LOCK_KEY)
    return is_locked


async def take_ownership(
    session: Session, address: Address, owner_id: uuid.UUID, broker: str, least_epoch: int = 1
) -> int:
    """Make a broker that holds the lock the owner; return its epoch, at least `least_epoch`. Ends
    the sessions of the owner before it, if there are any left. `broker` is its address."""
    previous = await read_owner(session, address)
    if previous is not None:
        await end_sessions(session, address, previous.owner_id)
    with translated_errors(address):
        async with session.transaction():
            await _set_lock_timeout(session)
            epoch: int = await session.fetchval(
                """
                insert into quackmq.owner as owner (epoch, owner_id, address, taken_at)
                values ($3, $1, $2, clock_timestamp())
                on conflict (only_row) do update set
                    epoch = greatest(owner.epoch + 1, excluded.epoch),
                    owner_id = excluded.owner_id,
                    address = excluded.address,
                    taken_at = excluded.taken_at,
                    released_at = null
                returning epoch
                """,
                *(owner_id, broker, least_epoch),
            )
            await session.execute(
                """
                insert into quackmq.heartbeat as heartbeat (epoch, beaten_at)
                values ($1, clock_timestamp())
                on conflict (only_row) do update set
                    epoch = excluded.epoch, beaten_at = excluded.beaten_at
                """,
                epoch,
            )
            await session.execute(
                """
                insert into quackmq.last_cycle (run_epoch, cycle, committed_at)
                values ($1, 0, clock_timestamp())
                on conflict (only_row) do nothing
                """,
                epoch,
            )
    return epoch


async def renew_epoch(session: Session, address: Address, owner_id: uuid.UUID) -> int:
    """Increment the epoch of an owner that holds the lock; return it. All earlier transactions of
    this owner have then ended, or can no longer commit. Raises StoreFenced."""
    with translated_errors(address):
        async with session.transaction():
            await _set_lock_timeout(session)
            epoch: int | None = await session.fetchval(
                "update quackmq.owner set epoch = epoch + 1 where owner_id = $1 returning epoch",
                owner_id,
            )
            if epoch is None:
                raise fenced_error(address)
            await session.execute(
                "update quackmq.heartbeat set epoch = $1, beaten_at = clock_timestamp()", epoch
            )
    return epoch


async def skip_lost_offsets(session: Session, address: Address, least_epoch: int) -> None:
    """Make sure that a database that has gone back in time gives no epoch and no offset a second
    time. The caller holds the lock. Each partition skips as many offsets as a power cut can lose in
    the weak sync modes of the local store."""
    with translated_errors(address):
        async with session.transaction():
            await _set_lock_timeout(session)
            await session.execute(
                "update quackmq.owner set epoch = greatest(epoch, $1) + 1", least_epoch
            )
            await session.execute(
                """
                insert into quackmq.partitions as partition (
                    topic_id, partition, next_offset, next_position, greatest_timestamp_ms,
                    latest_append_ms, last_aborted_offset
                )
                select topic_id, generate_series(0, partitions - 1), $1, 0, -1, 0, -1
                from quackmq.topic_settings
                on conflict (topic_id, partition) do update set
                    next_offset = partition.next_offset + excluded.next_offset
                """,
                limits.UNSYNCED_OFFSETS,
            )
    _logger.error(
        "%s has gone back in time, as after a failover to a replica that was behind, or a restored "
        "backup: acknowledged messages are lost; each partition skips %d offsets",
        *(address, limits.UNSYNCED_OFFSETS),
    )


async def beat(session: Session, address: Address, owner_id: uuid.UUID) -> None:
    """Update the heartbeat of the owner. Raises StoreFenced if another broker is the owner."""
    with translated_errors(address):
        status = await session.execute(
            """
            update quackmq.heartbeat set beaten_at = clock_timestamp()
            where epoch = (select epoch from quackmq.owner where owner_id = $1)
            """,
            owner_id,
        )
        if status == "UPDATE 1":
            return
        is_owner = await session.fetchval(
            "select exists (select from quackmq.owner where owner_id = $1)", owner_id
        )
    if not is_owner:
        raise fenced_error(address)


async def release(session: Session, address: Address, owner_id: uuid.UUID) -> None:
    """Give up ownership in order: release the lock and tell standbys. A standby takes over at
    once. Changes nothing if another broker is the owner already."""
    with translated_errors(address):
        await session.execute(
            "update quackmq.owner set released_at = clock_timestamp() where owner_id = $1",
            owner_id,
        )
        await session.execute(f"select pg_advisory_unlock({LOCK_KEY}); notify {HAND_OVER_CHANNEL}")


async def end_sessions(
    session: Session, address: Address, owner_id: uuid.UUID, process: int | None = None
) -> int:
    """End all other sessions of one run of a broker, or the one of a server process, and wait for
    their end; return how many. Their transactions are rolled back, and their locks released."""
    with translated_errors(address):
        ended: list[bool] = [
            row[0]
            for row in await session.fetch(
                """
                select pg_terminate_backend(pid, $2)
                from pg_stat_activity
                where application_name = $1 and datname = current_database()
                    and pid <> pg_backend_pid() and ($3::int is null or pid = $3)
                """,
                *(session_name(owner_id), int(limits.END_SESSION_S * 1000), process),
            )
        ]
    return len(ended)


class Standby:
    """Waits until this broker can become the owner. One task calls `wait_for_lock`."""

    def __init__(self, session: Session, address: Address) -> None:
        #: Replace it if it has ended, and call `wait_for_lock` again.
        self.session = session
        self._address = address
        self._is_handed_over = asyncio.Event()
        #: The owner as it was last seen.
        self.owner: Owner | None = None
        #: The owner that was logged as active, and the one whose sessions were ended.
        self._logged_id: uuid.UUID | None = None
        self._ended_id: uuid.UUID | None = None

    async def skip_lost_offsets(self) -> None:
        """Call `skip_lost_offsets` if the database has gone back in time since this standby has
        last seen it. Call this with the lock, before a new owner is set."""
        seen, now = self.owner, await read_owner(self.session, self._address)
        if seen is None or now is None:
            return
        if now.epoch < seen.epoch or now.last_cycle < seen.last_cycle:
            await skip_lost_offsets(self.session, self._address, seen.epoch)

    async def describe_takeover(self) -> str:
        """Return from which broker this one takes over, and why; "" if it did not wait for another
        one. Call this with the lock, before a new owner is set."""
        seen, now = self.owner, await read_owner(self.session, self._address)
        if seen is None or now is None or self._logged_id is None:
            return ""
        if seen.owner_id == self._ended_id:
            reason = f"it had sent no heartbeat for {limits.HEARTBEAT_EXPIRY_S:g} s"
        elif now.is_released:
            reason = "it has stopped"
        else:
            reason = "it has died, or has lost its connection to the database"
        return f"{now.address or 'another broker'}: {reason}"

    async def wait_for_lock(self) -> None:
        """Return when this session has the lock: the owner has ended or handed over, or its
        heartbeat was so old that its sessions were ended. Never waits inside a transaction. After
        an error the caller ends the session. Raises StoreUnavailable."""
        with translated_errors(self._address):
            await self.session.add_listener(HAND_OVER_CHANNEL, self._note_hand_over)
            while not await self._try_to_get_lock():
                if not await self._end_dead_owner():
                    await self._wait_for_hand_over()
            await self.session.remove_listener(HAND_OVER_CHANNEL, self._note_hand_over)

    async def _try_to_get_lock(self) -> bool:
        """Try once to get the lock; return whether this session has it. Else note who is the
        owner. Raises TimeoutError if the database does not answer."""
        self._is_handed_over.clear()
        async with asyncio.timeout(limits.COMMIT_S):
            if await try_lock(self.session, self._address):
                return True
            self.owner = owner = await read_owner(self.session, self._address)
        # An owner that has stopped is still there while its successor begins.
        if owner is not None and not owner.is_released and owner.owner_id != self._logged_id:
            self._logged_id = owner.owner_id
            _logger.info(
                "another broker (%s) is active on %s; waiting to take over",
                *(owner.address or "of unknown address", self._address),
            )
        return False

    async def _end_dead_owner(self) -> bool:
        """End the sessions of an owner with an old heartbeat; return whether there were any."""
        owner = self.owner
        if owner is None or owner.heartbeat_age_s <= limits.HEARTBEAT_EXPIRY_S:
            return False
        self._ended_id = owner.owner_id
        return await end_sessions(self.session, self._address, owner.owner_id) > 0

    async def _wait_for_hand_over(self) -> None:
        """Wait until the owner hands over, or the next try is due."""
        try:
            async with asyncio.timeout(limits.TAKEOVER_POLL_S):
                await self._is_handed_over.wait()
        except TimeoutError:
            return

    def _note_hand_over(self, *_: object) -> None:
        self._is_handed_over.set()


async def _set_lock_timeout(session: Session) -> None:
    """Bound how long this transaction waits for a transaction of an earlier owner."""
    await session.execute(f"set local lock_timeout = {int(limits.END_SESSION_S * 1000)}")


def fenced_error(address: Address) -> StoreFenced:
    return StoreFenced(
        f"another broker owns {address} now: use that broker, or start this one anew"
    )
