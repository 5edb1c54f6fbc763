"""The schema `quackmq` of a database: created, migrated forward, and checked.

The migrations are the files of `migrations/`, numbered from 1. Each is one transaction, which also
adds its number to `quackmq.schema_version`. Only the broker that holds the lock of `ownership` may
call `migrate`: so no two brokers create the schema at once, and a standby with a newer program
changes nothing under an active broker with an older one.
"""

from __future__ import annotations

import base64
import uuid
from functools import cache
from importlib import resources
from typing import Final, NamedTuple

import asyncpg

from quackmq.errors import NewerFormat, UnusableDatabase
from quackmq.stores.postgres.connection import Address, Session, translated_errors

SCHEMA: Final = "quackmq"


class Migration(NamedTuple):
    """One step of the schema. `name` begins with its number."""

    version: int
    name: str
    sql: str


@cache
def migrations() -> tuple[Migration, ...]:
    """Return all migrations in their order."""
    directory = resources.files("quackmq.stores.postgres") / "migrations"
    found = (file for file in directory.iterdir() if file.name.endswith(".sql"))
    files = sorted(found, key=lambda file: file.name)
    return tuple(
        Migration(version, file.name.removesuffix(".sql"), file.read_text(encoding="utf-8"))
        for version, file in enumerate(files, start=1)
    )


async def read_version(session: Session, address: Address) -> int:
    """Return the version of the schema; 0 if there is none. Raises NewerFormat for a version that
    this program does not know."""
    with translated_errors(address):
        if not await session.fetchval("select to_regclass('quackmq.schema_version') is not null"):
            return 0
        version: int = await session.fetchval("select max(version) from quackmq.schema_version")
    newest = migrations()[-1].version
    if version > newest:
        raise NewerFormat(
            f"the schema in {address} has version {version}, made by a newer QuackMQ; this program "
            f"knows versions up to {newest}: use the newer program"
        )
    return version


async def migrate(session: Session, address: Address) -> None:
    """Create the schema, or bring it to the newest version. The caller holds the owner's lock.
    Raises NewerFormat; UnusableDatabase if the database belongs to another application or the user
    lacks a privilege."""
    version = await read_version(session, address)
    if version == 0:
        await _check_is_unused(session, address)
    with translated_errors(address):
        for migration in migrations()[version:]:
            async with session.transaction():
                if migration.version == 1:
                    await _create_schema(session, address)
                await session.execute(migration.sql)
                await session.execute(
                    "insert into quackmq.schema_version (version, migration) values ($1, $2)",
                    migration.version,
                    migration.name,
                )
        await session.execute(
            "insert into quackmq.store (cluster_id) values ($1) on conflict do nothing",
            base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("="),
        )


async def _create_schema(session: Session, address: Address) -> None:
    """Create the schema, unless an administrator has done so. Raises UnusableDatabase."""
    if await session.fetchval("select to_regnamespace($1) is not null", SCHEMA):
        return
    try:
        await session.execute(f"create schema {SCHEMA}")
    except asyncpg.InsufficientPrivilegeError as error:
        user = session.get_settings().session_authorization
        raise UnusableDatabase(
            f"{user} may not create the schema {SCHEMA} in {address}: run GRANT CREATE ON DATABASE "
            f"{address.database} TO {user}, or CREATE SCHEMA {SCHEMA} AUTHORIZATION {user}, as the "
            "owner of the database"
        ) from error


async def _check_is_unused(session: Session, address: Address) -> None:
    """Check that a database without our schema has no tables of others. Tables of extensions do not
    count. Raises UnusableDatabase."""
    with translated_errors(address):
        table = await session.fetchval(
            """
            select format('%I.%I', namespace.nspname, class.relname)
            from pg_class as class
            join pg_namespace as namespace on namespace.oid = class.relnamespace
            where class.relkind in ('r', 'p', 'f', 'm')
                and namespace.nspname !~ '^pg_'
                and namespace.nspname <> 'information_schema'
                and not exists (
                    select from pg_depend
                    where classid = 'pg_class'::regclass and objid = class.oid and deptype = 'e'
                )
            order by 1
            limit 1
            """
        )
    if table is not None:
        raise UnusableDatabase(
            f"{address} has tables of another application, such as {table}: create a database for "
            "the broker alone, for instance with createdb quackmq"
        )
