"""Sessions of a PostgreSQL server: opened, checked, and with errors that say what to do.

A session of ours keeps its server process until it ends, commits durably, and sees a database that
can be written to. `open_session` refuses a server that does not allow this. Sessions of one run of
a broker have the same application name, by which another broker can end them (`ownership`).

Not promised: that a session lives on. Every call can find it closed.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

import asyncpg

from quackmq.errors import StorageError, StoreUnavailable, UnusableDatabase
from quackmq.stores import limits

#: An asyncpg connection. The package has no types.
Session = Any

#: The oldest supported major version: older ones get no corrections from their makers any more.
OLDEST_SERVER: Final = 14
_SCHEMES: Final = ("postgresql", "postgres")
#: Rounds in which the servers of two sessions are compared. One is enough for an idle pool.
_POOL_PROBES: Final = 3
#: The errors by which the driver reports that a call has failed. TimeoutError is an OSError.
DRIVER_ERRORS: Final = (
    *(asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError),
    OSError,
)
#: Says that a server has closed a session, or will: the outcome of a running commit is unknown.
_SESSION_ENDS: Final = ("08", "57P")


@dataclass(frozen=True, slots=True)
class Address:
    """The URL of a database. Its text has no password."""

    url: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Return the address of a URL. Raises UnusableDatabase for a text that is not the URL of a
        PostgreSQL database."""
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise UnusableDatabase(f"{_EXPECTED_URL}: {error}") from error
        if parts.scheme not in _SCHEMES:
            raise UnusableDatabase(_EXPECTED_URL)
        address = cls(url)
        if not address.database:
            raise UnusableDatabase(f"{_EXPECTED_URL}: the address {address} lacks /DATABASE")
        return address

    @property
    def database(self) -> str:
        """The name of the database: the path, or a parameter as libpq has it."""
        parts = urlsplit(self.url)
        parameters = dict(parse_qsl(parts.query))
        named = parameters.get("dbname") or parameters.get("database") or ""
        return unquote(parts.path.lstrip("/")) or named

    def __str__(self) -> str:
        parts = urlsplit(self.url)
        return f"{parts.netloc.rpartition('@')[2]}{parts.path}"

    def __repr__(self) -> str:
        return f"Address({self})"


_EXPECTED_URL: Final = "the address of a database must be postgresql://USER@HOST:PORT/DATABASE"


def session_name(owner_id: uuid.UUID) -> str:
    """Return the application name of all sessions of one run of a broker."""
    return f"quackmq {owner_id}"


async def open_session(address: Address, owner_id: uuid.UUID) -> Session:
    """Open a session, and check that it can keep data durably. The caller closes it. Raises
    StoreUnavailable if the server cannot be reached, UnusableDatabase if it must not be used."""
    with translated_errors(address):
        session = await asyncpg.connect(
            address.url,
            timeout=limits.CONNECT_S,
            server_settings={"application_name": session_name(owner_id)},
        )
    try:
        with translated_errors(address):
            await _check_server(session, address)
    except BaseException:
        session.terminate()
        raise
    return session


async def check_is_direct(address: Address, first: Session, second: Session) -> None:
    """Check that two sessions have two server processes, and keep them. A proxy that pools
    transactions lends a process for one transaction. Raises UnusableDatabase, StoreUnavailable."""
    with translated_errors(address):
        process = await first.fetchval("select pg_backend_pid()")
        for _ in range(_POOL_PROBES):
            async with second.transaction():
                # A proxy would lend the process that the first session has just given back...
                second_process = await second.fetchval("select pg_backend_pid()")
                if second_process == process:
                    raise UnusableDatabase(_pooled(address))
                # ...or, while the second session has it, another one to the first.
                if await first.fetchval("select pg_backend_pid()") != process:
                    raise UnusableDatabase(_pooled(address))


@contextmanager
def translated_errors(address: Address) -> Iterator[None]:
    """Raise an error of the driver as a StorageError that says what to do."""
    try:
        yield
    except DRIVER_ERRORS as error:
        raise translate_error(error, address) from error


def translate_error(error: BaseException, address: Address) -> StorageError:
    """Return the StorageError for an error of the driver."""
    text = str(error).partition("\n")[0] or type(error).__name__
    match error:
        case asyncpg.InvalidCatalogNameError():
            return UnusableDatabase(
                f"there is no database {address.database} at {address}: create it with "
                f"createdb {address.database}"
            )
        case asyncpg.InvalidAuthorizationSpecificationError():
            return UnusableDatabase(
                f"{address} refuses the login ({text}): check user and password in the address, "
                "and pg_hba.conf of the server"
            )
        case asyncpg.InsufficientPrivilegeError():
            return UnusableDatabase(
                f"the user lacks a privilege in {address} ({text}): make it the owner of the "
                "database with ALTER DATABASE … OWNER TO …"
            )
        case asyncpg.DiskFullError():
            return StoreUnavailable(
                f"the disk of {address} is full ({text}): free some space there; the broker then "
                "continues by itself"
            )
        case (
            asyncpg.InvalidSQLStatementNameError()
            | asyncpg.DuplicatePreparedStatementError()
            | asyncpg.ProtocolViolationError()
        ):
            # The next statement went to another server process, which does not know the session.
            return UnusableDatabase(_pooled(address))
        case asyncpg.PostgresConnectionError() if "pooling mode" in text:
            # PgBouncer's words for a transaction, with pool_mode = statement.
            return UnusableDatabase(_pooled(address))
        case asyncpg.ClientConfigurationError():
            return UnusableDatabase(f"{_EXPECTED_URL}: {text}")
        case TimeoutError():
            return StoreUnavailable(f"{address} does not answer: check the server and the network")
        case ConnectionError() | socket.gaierror():
            return _unreachable(address, error.errno)
        case OSError() if error.errno is None:
            # Each address of the host has failed.
            return _unreachable(address, None)
        case _:
            return StoreUnavailable(f"{address} cannot be used: {text}")


def _unreachable(address: Address, error_number: int | None) -> StoreUnavailable:
    """Return the error for a server to which no connection can be opened, or whose connection has
    broken. The number of a failed name look-up is negative."""
    reason = ""
    if error_number is not None:
        is_unknown_host = error_number < 0
        reason = " (unknown host)" if is_unknown_host else f" ({os.strerror(error_number).lower()})"
    return StoreUnavailable(
        f"{address} cannot be reached{reason}: is PostgreSQL running there? Check host and port"
    )


def ends_session(error: BaseException) -> bool:
    """Return whether an error leaves it open if a statement or commit has still taken place. Any
    other error of the server means that it has not."""
    if isinstance(error, asyncpg.PostgresError):
        return str(error.sqlstate or "08").startswith(_SESSION_ENDS)
    return isinstance(error, DRIVER_ERRORS)


def check_settings(settings: Mapping[str, Any], address: Address) -> None:
    """Check the role and the settings of a server. Raises UnusableDatabase."""
    if settings["is_replica"]:
        raise UnusableDatabase(f"{address} is a replica: give the address of the primary server")
    encoding = settings["server_encoding"]
    if encoding != "UTF8":
        raise UnusableDatabase(
            f"{address} has the encoding {encoding}: create a database with "
            "createdb --encoding=UTF8 --template=template0"
        )
    if settings["fsync"] == "off":
        raise UnusableDatabase(
            f"{address} runs with fsync = off and can lose acknowledged messages: set fsync = on "
            "in postgresql.conf"
        )
    if settings["synchronous_commit"] == "off":
        raise UnusableDatabase(
            f"{address} has synchronous_commit = off for this user and can lose acknowledged "
            "messages: set it to on in postgresql.conf, or with ALTER ROLE or ALTER DATABASE"
        )


async def _check_server(session: Session, address: Address) -> None:
    """Check version and settings of the server, and pin those of the session. Raises
    UnusableDatabase."""
    version = session.get_server_version()
    if version.major < OLDEST_SERVER:
        raise UnusableDatabase(
            f"{address} is PostgreSQL {version.major}: use version {OLDEST_SERVER} or later"
        )
    settings = await session.fetchrow(
        """
        select
            pg_is_in_recovery() as is_replica,
            current_setting('server_encoding') as server_encoding,
            current_setting('fsync') as fsync,
            current_setting('synchronous_commit') as synchronous_commit
        """
    )
    check_settings(settings, address)
    # Later changes of the defaults must not weaken a session that was checked. Compiling a query
    # (jit) takes longer than any of ours does.
    await session.execute(
        f"set synchronous_commit = {settings['synchronous_commit']};"
        "set default_transaction_isolation = 'read committed';"
        "set jit = off"
    )


def _pooled(address: Address) -> str:
    return (
        f"{address} is a proxy that pools transactions, such as PgBouncer; the lock of the active "
        "broker needs a session of its own: give the address of the server itself, or of a proxy "
        "with pool_mode = session"
    )
