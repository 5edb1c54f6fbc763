"""Sessions of the tests' own PostgreSQL server, all closed at the end of a test."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from quackmq.stores.postgres.connection import Address, Session, open_session

#: Opens a session of the test's database, for a run of a broker.
Opener = Callable[[uuid.UUID], Awaitable[Session]]


@pytest.fixture
def address(database: str) -> Address:
    return Address.parse(database)


@pytest.fixture
async def open_for(address: Address) -> AsyncIterator[Opener]:
    opened: list[Session] = []

    async def open_one(owner_id: uuid.UUID) -> Session:
        opened.append(await open_session(address, owner_id))
        return opened[-1]

    yield open_one
    for session in opened:
        session.terminate()


@pytest.fixture
async def session(open_for: Opener) -> Session:
    return await open_for(uuid.uuid4())
