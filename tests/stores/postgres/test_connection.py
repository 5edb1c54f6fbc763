"""A session keeps data durably, or is refused with a sentence that says what to do."""

from __future__ import annotations

import socket
import uuid

import asyncpg
import pytest

from quackmq.errors import StorageError, StoreUnavailable, UnusableDatabase
from quackmq.stores.postgres import connection
from quackmq.stores.postgres.connection import (
    Address,
    check_is_direct,
    check_settings,
    ends_session,
    open_session,
    translate_error,
)
from tests.kit.postgres import PostgresServer
from tests.kit.postgres_pooler import pooled
from tests.kit.waiting import soon
from tests.stores.postgres.conftest import Opener


async def refused(url: str) -> StorageError:
    """Return the error with which a session is refused."""
    with pytest.raises(StorageError) as raised:
        (await open_session(Address.parse(url), uuid.uuid4())).terminate()
    return raised.value


def test_the_text_of_an_address_has_no_password() -> None:
    address = Address.parse("postgresql://anna:secret@db.example:6000/orders?sslmode=require")
    assert str(address) == "db.example:6000/orders"
    assert "secret" not in repr(address)
    assert address.database == "orders"


@pytest.mark.parametrize("url", ["mysql://host/orders", "orders", "postgresql://[::1/orders"])
def test_another_address_is_refused(url: str) -> None:
    with pytest.raises(UnusableDatabase, match="must be postgresql://USER@HOST:PORT/DATABASE"):
        Address.parse(url)


async def test_a_missing_database_is_named_with_the_command_that_creates_it(
    postgres: PostgresServer,
) -> None:
    error = await refused(postgres.url("nowhere"))
    assert isinstance(error, UnusableDatabase)
    assert "there is no database nowhere" in str(error)
    assert "createdb nowhere" in str(error)


async def test_a_user_that_the_server_does_not_know_is_refused(postgres: PostgresServer) -> None:
    error = await refused(postgres.url(user="nobody_here"))
    assert isinstance(error, UnusableDatabase)
    assert "check user and password" in str(error)


@pytest.mark.parametrize("url", ["postgresql://x@host:6000", "postgresql://x@host/?sslmode=off"])
def test_an_address_without_a_database_is_refused(url: str) -> None:
    with pytest.raises(UnusableDatabase, match="lacks /DATABASE"):
        Address.parse(url)
    assert Address.parse("postgresql://x@host?dbname=orders").database == "orders"


async def test_a_server_that_cannot_be_reached_is_unavailable() -> None:
    error = await refused("postgresql://x@127.0.0.1:1/orders")
    assert isinstance(error, StoreUnavailable)
    assert str(error) == (
        "127.0.0.1:1/orders cannot be reached (connection refused): is PostgreSQL running there? "
        "Check host and port"
    )


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (socket.gaierror(-2, "Name or service not known"), "cannot be reached (unknown host): is"),
        (OSError("Multiple exceptions: [Errno 111] …, [Errno 111] …"), "cannot be reached: is"),
        (TimeoutError(), "does not answer"),
    ],
)
def test_a_failed_connection_is_described_without_numbers(error: OSError, text: str) -> None:
    translated = translate_error(error, Address.parse("postgresql://x@host/orders"))
    assert isinstance(translated, StoreUnavailable)
    assert str(translated).startswith(f"host/orders {text}")


async def test_an_old_server_is_refused(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "OLDEST_SERVER", 1000)
    assert "use version 1000 or later" in str(await refused(database))


def test_a_database_of_another_encoding_is_refused() -> None:
    settings = {"is_replica": False, "server_encoding": "LATIN1"}
    with pytest.raises(UnusableDatabase, match="encoding LATIN1"):
        check_settings(settings, Address.parse("postgresql://x@host/orders"))


async def test_a_user_whose_commits_are_not_synchronous_is_refused_by_name(
    postgres: PostgresServer, database: str
) -> None:
    name = Address.parse(database).database
    postgres.execute(f"alter database {name} set synchronous_commit = off")
    error = await refused(database)
    assert isinstance(error, UnusableDatabase)
    assert "synchronous_commit = off" in str(error)


async def test_a_server_without_syncs_is_refused_by_name(
    postgres: PostgresServer, database: str
) -> None:
    set_and_reload(postgres, "alter system set fsync = off")
    try:
        error = await refused(database)
    finally:
        set_and_reload(postgres, "alter system reset fsync")
    assert isinstance(error, UnusableDatabase)
    assert "fsync = off" in str(error)


async def test_a_replica_is_refused(postgres: PostgresServer) -> None:
    # A server that waits for more of its log is what a replica is.
    (postgres.data / "standby.signal").touch()
    postgres.restart()
    try:
        error = await refused(postgres.url())
    finally:
        (postgres.data / "standby.signal").unlink()
        postgres.restart()
    assert "is a replica" in str(error)


async def test_later_changes_of_the_server_do_not_weaken_a_session(
    postgres: PostgresServer, database: str, open_for: Opener
) -> None:
    session = await open_for(uuid.uuid4())
    set_and_reload(postgres, "alter system set synchronous_commit = off")
    try:
        assert await session.fetchval("show synchronous_commit") == "on"
    finally:
        set_and_reload(postgres, "alter system reset synchronous_commit")


async def test_sessions_of_the_server_itself_are_accepted(
    address: Address, open_for: Opener
) -> None:
    await check_is_direct(address, await open_for(uuid.uuid4()), await open_for(uuid.uuid4()))


@pytest.mark.parametrize(("pool_size", "other_clients"), [(1, 0), (2, 0), (20, 0), (20, 3)])
async def test_a_proxy_that_pools_transactions_is_refused(
    postgres: PostgresServer, database: str, pool_size: int, other_clients: int
) -> None:
    async with pooled(postgres.port, pool_size) as port:
        address = Address.parse(database.replace(str(postgres.port), str(port)))
        others = [await asyncpg.connect(address.url) for _ in range(other_clients)]
        first = await open_session(address, uuid.uuid4())
        second = await open_session(address, uuid.uuid4())
        with pytest.raises(UnusableDatabase, match="pools transactions, such as PgBouncer"):
            await soon(check_is_direct(address, first, second))
        for session in [*others, first, second]:
            session.terminate()


def test_a_proxy_that_pools_statements_is_refused() -> None:
    error = asyncpg.ConnectionDoesNotExistError(
        "connection was closed in the middle of operation: transaction blocks not allowed in "
        "statement pooling mode"
    )
    translated = translate_error(error, Address.parse("postgresql://x@host/orders"))
    assert isinstance(translated, UnusableDatabase)


async def test_a_full_disk_is_an_error_that_passes() -> None:
    error = asyncpg.DiskFullError('could not extend file "base/1": No space left on device')
    translated = translate_error(error, Address.parse("postgresql://x@host/orders"))
    assert isinstance(translated, StoreUnavailable)
    assert "the disk of host/orders is full" in str(translated)
    assert "free some space" in str(translated)


async def test_an_error_of_the_server_ends_no_session_unless_it_says_so() -> None:
    assert not ends_session(asyncpg.DiskFullError("full"))
    assert not ends_session(asyncpg.UniqueViolationError("twice"))
    assert ends_session(asyncpg.AdminShutdownError("terminating connection"))
    assert ends_session(asyncpg.ConnectionDoesNotExistError("closed in the middle"))
    assert ends_session(asyncpg.InterfaceError("connection is closed"))
    assert ends_session(ConnectionResetError())
    assert ends_session(TimeoutError())


def set_and_reload(postgres: PostgresServer, sql: str) -> None:
    """Change a setting of the server to off, or reset it to on; wait until new sessions see it."""
    postgres.execute(sql)
    postgres.execute("select pg_reload_conf()")
    name = "synchronous_commit" if "synchronous_commit" in sql else "fsync"
    postgres.wait_for_setting(name, "off" if sql.endswith("off") else "on")
