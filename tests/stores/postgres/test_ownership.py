"""One broker at a time owns a database, and one that was replaced can never commit again."""

from __future__ import annotations

import asyncio
import uuid

import asyncpg
import pytest

from quackmq.errors import StorageError, StoreFenced
from quackmq.stores import limits
from quackmq.stores.postgres.connection import Address, Session
from quackmq.stores.postgres.ownership import (
    Cycle,
    Owner,
    Standby,
    beat,
    end_sessions,
    read_owner,
    release,
    renew_epoch,
    take_ownership,
    try_lock,
)
from quackmq.stores.postgres.schema import migrate
from quackmq.stores.postgres.statements import AppendedRows, append_rows
from tests.kit.postgres import PostgresServer
from tests.stores.postgres.conftest import Opener

FIRST, SECOND = uuid.UUID(int=1), uuid.UUID(int=2)


@pytest.fixture
async def owner_session(open_for: Opener, address: Address) -> Session:
    """The session of a broker that is the owner, with epoch 1."""
    session = await open_for(FIRST)
    assert await try_lock(session, address)
    await migrate(session, address)
    assert await take_ownership(session, address, FIRST, "first:9092") == 1
    return session


async def commit(session: Session, address: Address, number: int, epoch: int = 1) -> None:
    """Commit a cycle of the first owner, without batches."""
    no_rows = AppendedRows([], [], [], [])
    await append_rows(session, address, FIRST, epoch, Cycle(1, number), no_rows)


async def current_owner(session: Session, address: Address) -> Owner:
    owner = await read_owner(session, address)
    assert owner is not None
    return owner


async def make_heartbeat_old(session: Session) -> None:
    await session.execute(
        "update quackmq.heartbeat set beaten_at = beaten_at - make_interval(secs => $1)",
        limits.HEARTBEAT_EXPIRY_S + 1,
    )


async def test_a_database_without_schema_has_no_owner(session: Session, address: Address) -> None:
    assert await read_owner(session, address) is None
    await migrate(session, address)
    assert await read_owner(session, address) is None


async def test_the_owner_is_in_the_database(owner_session: Session, address: Address) -> None:
    owner = await current_owner(owner_session, address)
    assert (owner.owner_id, owner.epoch, owner.address) == (FIRST, 1, "first:9092")
    assert not owner.is_released
    assert 0 <= owner.heartbeat_age_s < limits.HEARTBEAT_EXPIRY_S
    await commit(owner_session, address, 5)
    assert (await current_owner(owner_session, address)).last_cycle == Cycle(1, 5)


async def test_a_heartbeat_makes_the_owner_young_again(
    owner_session: Session, address: Address
) -> None:
    await make_heartbeat_old(owner_session)
    await beat(owner_session, address, FIRST)
    owner = await current_owner(owner_session, address)
    assert owner.heartbeat_age_s < limits.HEARTBEAT_EXPIRY_S


async def test_only_one_session_has_the_lock(
    owner_session: Session, open_for: Opener, address: Address
) -> None:
    assert not await try_lock(await open_for(SECOND), address)


async def test_a_standby_waits_outside_of_a_transaction(
    owner_session: Session, open_for: Opener, address: Address
) -> None:
    session = await open_for(SECOND)
    waiting = asyncio.create_task(Standby(session, address).wait_for_lock())
    process = session.get_server_pid()
    for _ in range(20):
        assert not waiting.done()
        await beat(owner_session, address, FIRST)
        is_idle = await owner_session.fetchval(
            "select state in ('idle', 'active') from pg_stat_activity where pid = $1", process
        )
        assert is_idle
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_a_standby_takes_over_at_once_when_the_owner_hands_over(
    owner_session: Session, open_for: Opener, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the notification this would take an hour.
    monkeypatch.setattr(limits, "TAKEOVER_POLL_S", 3600)
    session = await open_for(SECOND)
    standby = Standby(session, address)
    waiting = asyncio.create_task(standby.wait_for_lock())
    await listening(owner_session)
    await release(owner_session, address, FIRST)
    await waiting
    assert (await current_owner(session, address)).is_released
    assert await standby.describe_takeover() == "first:9092: it has stopped"
    assert await take_ownership(session, address, SECOND, "second:9092") == 2
    owner = await current_owner(session, address)
    assert (owner.owner_id, owner.is_released) == (SECOND, False)


async def test_a_standby_takes_over_when_the_owners_session_ends(
    owner_session: Session, open_for: Opener, address: Address
) -> None:
    session = await open_for(SECOND)
    waiting = asyncio.create_task(Standby(session, address).wait_for_lock())
    owner_session.terminate()
    await waiting
    assert await take_ownership(session, address, SECOND, "second:9092") == 2


async def test_a_frozen_owner_is_ended_and_cannot_commit_when_it_resumes(
    owner_session: Session, open_for: Opener, address: Address
) -> None:
    await commit(owner_session, address, 1)
    # It is frozen in the middle of a transaction.
    frozen = owner_session.transaction()
    await frozen.start()
    await commit(owner_session, address, 2)
    session = await open_for(SECOND)
    await make_heartbeat_old(session)
    standby = Standby(session, address)
    await standby.wait_for_lock()
    assert standby.owner is not None and standby.owner.owner_id == FIRST
    assert await standby.describe_takeover() == "first:9092: it had sent no heartbeat for 10 s"
    assert await take_ownership(session, address, SECOND, "second:9092") == 2
    # It resumes: neither its transaction nor a new one is committed, nor is it the owner.
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        await frozen.commit()
    resumed = await open_for(FIRST)
    with pytest.raises(StoreFenced):
        await commit(resumed, address, 2)
    with pytest.raises(StoreFenced):
        await beat(resumed, address, FIRST)
    with pytest.raises(StoreFenced):
        await renew_epoch(resumed, address, FIRST)
    assert (await current_owner(session, address)).last_cycle == Cycle(1, 1)


async def test_a_living_owner_keeps_its_sessions(
    owner_session: Session, open_for: Opener, address: Address
) -> None:
    session = await open_for(SECOND)
    waiting = asyncio.create_task(Standby(session, address).wait_for_lock())
    await listening(owner_session)
    await beat(owner_session, address, FIRST)
    await commit(owner_session, address, 1)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert not owner_session.is_closed()


async def test_a_new_owner_waits_for_the_transaction_of_the_one_before(
    owner_session: Session, open_for: Opener, address: Address
) -> None:
    """Also if that one's sessions could not be ended: here they have another name."""
    session, third = await open_for(SECOND), await open_for(uuid.uuid4())
    async with third.transaction():
        await commit(third, address, 7)
        taking = asyncio.create_task(take_ownership(session, address, SECOND, "second:9092"))
        await blocked(third, session)
    assert await taking == 2
    assert (await current_owner(session, address)).last_cycle == Cycle(1, 7)


async def test_an_owner_that_renews_its_epoch_waits_for_its_transaction_in_doubt(
    owner_session: Session, open_for: Opener, address: Address
) -> None:
    other = await open_for(FIRST)
    async with other.transaction():
        await commit(other, address, 7)
        renewing = asyncio.create_task(renew_epoch(owner_session, address, FIRST))
        await blocked(other, owner_session)
    assert await renewing == 2
    assert (await current_owner(owner_session, address)).last_cycle == Cycle(1, 7)


async def test_a_new_owner_does_not_wait_for_ever(
    owner_session: Session, open_for: Opener, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "END_SESSION_S", 0.05)
    session, third = await open_for(SECOND), await open_for(uuid.uuid4())
    async with third.transaction():
        await commit(third, address, 7)
        with pytest.raises(StorageError, match="lock timeout"):
            await take_ownership(session, address, SECOND, "second:9092")
    assert (await current_owner(session, address)).owner_id == FIRST


async def test_after_its_epoch_was_renewed_an_owners_old_transaction_cannot_commit(
    owner_session: Session, open_for: Opener, address: Address
) -> None:
    """A connection broke while a transaction was on its way, and it may arrive late."""
    late = await open_for(FIRST)
    assert await renew_epoch(owner_session, address, FIRST) == 2
    with pytest.raises(StoreFenced):
        await commit(late, address, 1, epoch=1)
    await commit(owner_session, address, 1, epoch=2)
    assert (await current_owner(owner_session, address)).last_cycle == Cycle(1, 1)


async def test_an_epoch_that_is_given_again_belongs_to_one_owner(
    owner_session: Session, address: Address
) -> None:
    """An older state of the database was restored, and another broker took the same epoch."""
    await owner_session.execute("update quackmq.owner set owner_id = $1", SECOND)
    with pytest.raises(StoreFenced):
        await commit(owner_session, address, 1)


async def test_an_owner_that_has_seen_a_higher_epoch_does_not_go_back(
    owner_session: Session, address: Address
) -> None:
    assert await take_ownership(owner_session, address, SECOND, "second:9092", 9) == 9
    assert await take_ownership(owner_session, address, FIRST, "first:9092", 5) == 10


async def test_only_the_sessions_of_one_broker_are_ended(
    owner_session: Session, open_for: Opener, address: Address
) -> None:
    mine, other = await open_for(FIRST), await open_for(SECOND)
    assert await end_sessions(owner_session, address, FIRST) == 1
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError)):
        await mine.fetchval("select 1")
    assert await other.fetchval("select 1") == 1


async def test_a_restart_of_the_database_leaves_the_owner(
    postgres: PostgresServer, owner_session: Session, open_for: Opener, address: Address
) -> None:
    await commit(owner_session, address, 3)
    postgres.stop_immediately()
    postgres.start()
    session = await open_for(FIRST)
    assert await try_lock(session, address)
    assert await renew_epoch(session, address, FIRST) == 2
    assert (await current_owner(session, address)).last_cycle == Cycle(1, 3)


async def listening(session: Session) -> None:
    """Wait until another session has tried to get the lock, and listens for a hand-over."""
    async with asyncio.timeout(60):
        while not await session.fetchval(
            "select exists (select from pg_stat_activity where pid <> pg_backend_pid() "
            "and datname = current_database() and state = 'idle' "
            "and query like '%heartbeat_age_s%')"
        ):
            await asyncio.sleep(0)


async def blocked(session: Session, waiting: Session) -> None:
    """Wait until a session waits for a lock."""
    async with asyncio.timeout(20):
        while not await session.fetchval(
            "select cardinality(pg_blocking_pids($1)) > 0", waiting.get_server_pid()
        ):
            await asyncio.sleep(0)
