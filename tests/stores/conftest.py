"""The stores that the contract suite runs over.

To add one: write its opener and name it in STORES; in DURABLE too if it survives a restart.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from quackmq.archive.tiered_store import TieredStore
from quackmq.disk.real import RealDisk
from quackmq.stores.contract import Store
from quackmq.stores.local import LocalOptions, LocalStore
from quackmq.stores.memory import MemoryStore
from tests.archive.archiving import ArchivingStore
from tests.kit.support import Clock
from tests.stores.reopening import ReopeningStore

#: Opens a store over a directory, or a database; a durable one finds there what the last one left.
Opener = Callable[[Any, Clock], Awaitable[Store]]


async def open_memory(directory: Path, clock: Clock) -> Store:
    return MemoryStore(now_ms=clock)


def reopened(opener: Opener) -> Opener:
    """The same store, opened anew after each change."""

    async def open_reopening(directory: Path, clock: Clock) -> Store:
        return ReopeningStore(await opener(directory, clock), lambda: opener(directory, clock))

    return open_reopening


#: Everything so small that segments roll, slots wrap and the tail is too short all the time.
SMALL = LocalOptions(
    segment_bytes=512,
    region_bytes=128,
    chunk_bytes=256,
    journal_slot_bytes=512 * 1024,
    journal_slots=3,
    journal_inline_bytes=150,
    checkpoint_bytes=1024,
    tail_bytes=1,
    open_files=2,
)


def local(options: LocalOptions) -> Opener:
    async def open_local(directory: Path, clock: Clock) -> Store:
        directory.mkdir(exist_ok=True)
        return await LocalStore.open_on(RealDisk(directory), options=options, now_ms=clock)

    return open_local


def tiered(options: LocalOptions, kind: type[TieredStore] = TieredStore) -> Opener:
    """With an archive, to which nothing goes unless its kind sees to it."""

    async def open_tiered(directory: Path, clock: Clock) -> Store:
        directory.mkdir(exist_ok=True)
        log = await LocalStore.open_on(RealDisk(directory), options=options, now_ms=clock)
        return await kind.open(log, log.disk, clock)

    return open_tiered


async def open_postgres(url: str, clock: Clock) -> Store:
    """Everything is read from the database, since the tail is too short."""
    from quackmq.stores.postgres.options import PostgresOptions
    from quackmq.stores.postgres.store import PostgresStore

    return await PostgresStore.open(url, PostgresOptions(tail_bytes=1, chunk_bytes=256), clock)


#: The store in a database.
POSTGRES: Final = "postgres"
DURABLE: dict[str, Opener] = {
    "local": local(LocalOptions()),
    "local small": local(SMALL),
    "local interval": local(LocalOptions(sync="interval", sync_interval_ms=1)),
    "local os": local(LocalOptions(sync="os")),
    "tiered": tiered(LocalOptions()),
    "archiving": tiered(SMALL, ArchivingStore),
    POSTGRES: open_postgres,
}
STORES: dict[str, Opener] = {"memory": open_memory, **DURABLE}
VARIANTS: dict[str, Opener] = STORES | {
    f"{name} reopened": reopened(DURABLE[name]) for name in ("local", "local small")
}
#: These go another way than the others in little, or take the longest. `make check` leaves them to
#: `make test`. What a store finds when it is opened again is tried by the tests with `restarting`.
_LEFT_TO_MAKE_TEST: Final = {
    *("local interval", "local os", "tiered"),
    *("local reopened", "local small reopened"),
}


def _tried(names: Iterable[str]) -> list[Any]:
    """The stores to try, as parameters of a fixture."""
    return [pytest.param(name, marks=_marks(name)) for name in names]


def _marks(name: str) -> list[pytest.MarkDecorator]:
    if name == POSTGRES:
        return [pytest.mark.needs("postgres"), pytest.mark.processes]
    return [pytest.mark.sweep] if name in _LEFT_TO_MAKE_TEST else []


#: For tests of the very batches that were appended, and of what is known of transactions beside
#: them. An archive makes other batches of the same records, and keeps only what was committed.
_ARCHIVING: Final = "archiving"
keeps_batches: Final = pytest.mark.parametrize(
    "store", _tried(name for name in VARIANTS if name != _ARCHIVING), indirect=True
)
keeps_batches_restarting: Final = pytest.mark.parametrize(
    "restarting", _tried(name for name in DURABLE if name != _ARCHIVING), indirect=True
)


class Restarting:
    """A durable store and the means to open it again, for tests of exactly that."""

    def __init__(self, opener: Opener, place: Any, clock: Clock) -> None:
        self._opener = opener
        self._place = place
        self._clock = clock
        self._store: Store | None = None

    async def open(self) -> Store:
        assert self._store is None
        self._store = await self._opener(self._place, self._clock)
        return self._store

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()
            self._store = None

    async def reopen(self) -> Store:
        await self.close()
        return await self.open()


def _place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Where a store is opened: the URL of a database, or a directory."""
    if request.param == POSTGRES:
        return request.getfixturevalue("store_database")
    return tmp_path / "data"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest_asyncio.fixture(params=_tried(VARIANTS))
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Clock
) -> AsyncIterator[Store]:
    """Every kind of store in turn, open and empty."""
    opened = await VARIANTS[request.param](_place(request, tmp_path), clock)
    yield opened
    await opened.close()


@pytest_asyncio.fixture(params=_tried(DURABLE))
async def restarting(
    request: pytest.FixtureRequest, tmp_path: Path, clock: Clock
) -> AsyncIterator[Restarting]:
    """Every kind of store that survives a restart, to be opened by the test."""
    restarting = Restarting(DURABLE[request.param], _place(request, tmp_path), clock)
    yield restarting
    await restarting.close()
