"""The schema is created once, migrated forward from every version, and readable by people."""

from __future__ import annotations

import uuid

import pytest

from quackmq.errors import NewerFormat, UnusableDatabase
from quackmq.stores.postgres import schema
from quackmq.stores.postgres.connection import Address, Session, open_session
from quackmq.stores.postgres.schema import migrate, migrations, read_version
from tests.kit.postgres import PostgresServer

NEWEST = len(migrations())
TOPIC = uuid.UUID(int=7)


def test_migrations_are_numbered_without_a_gap() -> None:
    assert [int(each.name[:4]) for each in migrations()] == list(range(1, NEWEST + 1))


async def test_an_empty_database_has_version_0(session: Session, address: Address) -> None:
    assert await read_version(session, address) == 0


async def test_the_schema_is_created_once(session: Session, address: Address) -> None:
    await migrate(session, address)
    assert await read_version(session, address) == NEWEST
    cluster_id = await session.fetchval("select cluster_id from quackmq.store")
    await migrate(session, address)
    assert await session.fetchval("select cluster_id from quackmq.store") == cluster_id
    assert await session.fetchval("select count(*) from quackmq.schema_version") == NEWEST


@pytest.mark.parametrize("version", range(1, NEWEST))
async def test_data_of_an_older_version_is_there_after_the_migration(
    session: Session, address: Address, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    with monkeypatch.context() as older_program:
        older = migrations()[:version]
        older_program.setattr(schema, "migrations", lambda: older)
        await migrate(session, address)
    await add_topic(session)
    await migrate(session, address)
    assert await read_version(session, address) == NEWEST
    row = await session.fetchrow("select * from quackmq.topics")
    assert (row["name"], row["records"], row["bytes"]) == ("orders", 30, 3000)


async def test_a_migration_that_fails_changes_nothing(
    session: Session, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrate(session, address)
    broken = schema.Migration(NEWEST + 1, "broken", "create table quackmq.half (); select 1 / 0")
    monkeypatch.setattr(schema, "migrations", lambda: (*migrations(), broken))
    with pytest.raises(Exception, match="division by zero"):
        await migrate(session, address)
    assert await read_version(session, address) == NEWEST
    assert await session.fetchval("select to_regclass('quackmq.half')") is None


async def test_a_newer_schema_is_refused(session: Session, address: Address) -> None:
    await migrate(session, address)
    await session.execute("insert into quackmq.schema_version values (1000, 'from the future')")
    with pytest.raises(NewerFormat, match="version 1000, made by a newer QuackMQ"):
        await migrate(session, address)


@pytest.mark.parametrize("table", ["public.orders", "quackmq.orders"])
async def test_a_database_with_tables_of_another_application_is_refused(
    session: Session, address: Address, table: str
) -> None:
    await session.execute(f"create schema quackmq; create table {table} (number integer)")
    with pytest.raises(UnusableDatabase, match=f"such as {table}: create a database for the"):
        await migrate(session, address)
    assert await session.fetchval("select to_regclass('quackmq.owner')") is None


async def test_tables_that_come_later_do_not_matter(session: Session, address: Address) -> None:
    await migrate(session, address)
    await session.execute("create table public.orders (number integer)")
    await migrate(session, address)


async def test_a_user_without_privileges_is_told_which_one_to_grant(
    postgres: PostgresServer, database: str, address: Address
) -> None:
    postgres.execute("create role anna login")
    try:
        session = await open_session(
            Address.parse(postgres.url(address.database, "anna")), uuid.uuid4()
        )
        with pytest.raises(UnusableDatabase) as raised:
            await migrate(session, address)
        grant = f"GRANT CREATE ON DATABASE {address.database} TO anna"
        assert grant in str(raised.value)
        postgres.execute(grant)
        await migrate(session, address)
        await session.close()
    finally:
        postgres.execute("drop owned by anna; drop role anna", address.database)


async def test_a_schema_of_another_user_is_refused(
    postgres: PostgresServer, session: Session, address: Address
) -> None:
    await migrate(session, address)
    postgres.execute("create role anna login")
    try:
        stranger = await open_session(
            Address.parse(postgres.url(address.database, "anna")), uuid.uuid4()
        )
        with pytest.raises(UnusableDatabase, match="permission denied for schema quackmq"):
            await read_version(stranger, address)
        await stranger.close()
    finally:
        postgres.execute("drop role anna")


async def test_every_table_and_view_has_a_comment(session: Session, address: Address) -> None:
    await migrate(session, address)
    rows = await session.fetch(
        """
        select relname, obj_description(oid) as comment from pg_class
        where relnamespace = 'quackmq'::regnamespace and relkind in ('r', 'v')
        """
    )
    assert {row["relname"] for row in rows if row["comment"] is None} == set()
    assert {"topics", "subscriptions", "batches", "cursors", "producers", "states"} <= {
        row["relname"] for row in rows
    }


async def test_the_view_of_topics_shows_sizes_and_rates(session: Session, address: Address) -> None:
    await migrate(session, address)
    await add_topic(session)
    now_ms = int(await session.fetchval("select extract(epoch from clock_timestamp()) * 1000"))
    for base_offset, age_ms in ((0, 3_600_000), (10, 1_000), (20, 500)):
        await session.execute(
            "insert into quackmq.batches values ($1, 0, $2, $3, 0, $4, 0, 0, 0, $5)",
            *(TOPIC, base_offset, base_offset + 10, now_ms - age_ms, bytes(600)),
        )
    row = await session.fetchrow("select * from quackmq.topics")
    assert (row["name"], row["partitions"]) == ("orders", 2)
    assert (row["records"], row["bytes"]) == (30, 3000)
    # Twenty records of 1,200 bytes in the last minute.
    assert float(row["records_per_second"]) == 0.3
    assert float(row["bytes_per_second"]) == 20.0


async def test_the_view_of_subscriptions_shows_the_lag(session: Session, address: Address) -> None:
    await migrate(session, address)
    await add_topic(session)
    for name, partition, offset in (("late", 0, 5), ("trimmed", 0, 2), ("new", 1, 0)):
        await session.execute(
            "insert into quackmq.cursors values ($1, $2, $3, $4, '', 0, -1)",
            *(name, TOPIC, partition, offset),
        )
    await session.execute("update quackmq.partitions set first_offset = 3")
    rows = await session.fetch("select * from quackmq.subscriptions order by name")
    lags = {row["name"]: (row["topic"], row["partition"], row["lag"]) for row in rows}
    assert lags == {
        "late": ("orders", 0, 25),
        "trimmed": ("orders", 0, 27),
        "new": ("orders", 1, 0),
    }


async def add_topic(session: Session) -> None:
    """Add a topic of two partitions, the first with thirty records."""
    await session.execute(
        "insert into quackmq.topic_settings values ($1, 'orders', 2, '{}', 0)", TOPIC
    )
    await session.execute(
        "insert into quackmq.partitions values ($1, 0, 0, 30, 1000, 4000, 0, 0, -1, 0)", TOPIC
    )
