"""The PostgreSQL store when connections break, owners change, and rows are large or damaged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import asyncpg
import pytest

from quackmq.errors import DamagedData, OutcomeUnknown, StoreFenced, StoreUnavailable
from quackmq.model import limits as model_limits
from quackmq.stores import limits
from quackmq.stores.postgres import medium
from quackmq.stores.postgres.connection import Address
from quackmq.stores.postgres.options import PostgresOptions
from quackmq.stores.postgres.owner_session import OwnerSession
from quackmq.stores.postgres.removal import Remover
from quackmq.stores.postgres.statements import append_rows, from_text, to_text
from quackmq.stores.postgres.store import PostgresStore
from tests.kit.postgres import PostgresServer
from tests.kit.support import START_MS, batch_of
from tests.kit.waiting import soon, until
from tests.stores.calls import append, append_values, cursor, new_partition, read_all, read_one

#: The tail holds nothing, so that everything is read from the database.
SMALL = PostgresOptions(tail_bytes=1, chunk_bytes=256)

StoreOpener = Callable[[], Awaitable[PostgresStore]]


@pytest.fixture
async def open_store(store_database: str) -> AsyncIterator[StoreOpener]:
    opened: list[PostgresStore] = []

    async def open_one() -> PostgresStore:
        opened.append(await PostgresStore.open(store_database, SMALL))
        return opened[-1]

    yield open_one
    for store in opened:
        await store.close()


@pytest.fixture
async def store(open_store: StoreOpener) -> PostgresStore:
    return await open_store()


class FailingAppend:
    """Lets one write of a cycle fail: before or after the server has committed it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(medium, "append_rows", self)
        self.before: Callable[[], None] | None = None
        self.after: Callable[[], None] | None = None
        self.calls = 0

    async def __call__(self, *arguments: Any) -> None:
        self.calls += 1
        if self.before is not None:
            before, self.before = self.before, None
            before()
        await append_rows(*arguments)
        if self.after is not None:
            after, self.after = self.after, None
            after()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> FailingAppend:
    return FailingAppend(monkeypatch)


def break_connection() -> None:
    raise ConnectionResetError("the connection broke")


# --- connections that break ------------------------------------------------------------------


async def test_a_cycle_whose_answer_was_lost_is_found_and_not_written_again(
    store: PostgresStore, failing: FailingAppend
) -> None:
    key = await new_partition(store)
    failing.after = break_connection
    assert (await append_values(store, key, b"first")).base_offset == 0
    assert (await append_values(store, key, b"second")).base_offset == 1
    assert await read_all(store, key) == [(0, b"first"), (1, b"second")]


async def test_a_cycle_that_did_not_arrive_is_written_again(
    store: PostgresStore, failing: FailingAppend
) -> None:
    key = await new_partition(store)
    failing.before = break_connection
    assert (await append_values(store, key, b"first")).base_offset == 0
    assert await read_all(store, key) == [(0, b"first")]


@pytest.mark.parametrize("stop", [PostgresServer.stop_immediately, PostgresServer.kill])
async def test_nothing_acknowledged_is_lost_or_stored_twice_when_the_server_crashes(
    postgres: PostgresServer,
    store: PostgresStore,
    stop: Callable[[PostgresServer], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The server may be slow to start on a busy machine.
    monkeypatch.setattr(limits, "UNREACHABLE_S", 60)
    key = await new_partition(store)
    offsets: dict[bytes, int] = {}

    async def publish(name: int) -> None:
        for number in range(20):
            value = b"%d-%d" % (name, number)
            offsets[value] = (await append_values(store, key, value)).base_offset

    publishers = [asyncio.create_task(publish(name)) for name in range(8)]
    await until(lambda: len(offsets) > 40)
    await asyncio.to_thread(stop, postgres)
    await asyncio.to_thread(postgres.start)
    await soon(asyncio.gather(*publishers))
    stored = await read_all(store, key)
    assert {value: offset for offset, value in stored} == offsets
    assert len(stored) == 8 * 20


async def test_a_database_that_cannot_be_reached_refuses_writes_and_memory_is_read(
    postgres: PostgresServer, store_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "UNREACHABLE_S", 0)
    store = await PostgresStore.open(store_database)
    key = await new_partition(store)
    await append_values(store, key, b"first")
    postgres.stop_immediately()
    try:
        # The first write finds the connection closed, perhaps in the middle of it.
        with pytest.raises((StoreUnavailable, OutcomeUnknown)):
            await append_values(store, key, b"second")
        with pytest.raises(StoreUnavailable):
            await append_values(store, key, b"third")
        assert await read_all(store, key) == [(0, b"first")]
    finally:
        postgres.start()
    await until(lambda: store.failure is None)
    while True:
        try:
            await append_values(store, key, b"fourth")
            break
        except StoreUnavailable:
            await asyncio.sleep(0)
    assert await read_all(store, key) == [(0, b"first"), (1, b"fourth")]
    await store.close()


async def test_a_cycle_that_turns_out_to_be_stored_makes_the_broker_open_the_store_again(
    postgres: PostgresServer,
    store: PostgresStore,
    open_store: StoreOpener,
    failing: FailingAppend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = await new_partition(store)
    monkeypatch.setattr(limits, "UNREACHABLE_S", 0)

    def stop_server() -> None:
        postgres.stop_immediately()
        break_connection()

    failing.after = stop_server
    with pytest.raises(OutcomeUnknown):
        await append_values(store, key, b"first")
    postgres.start()
    assert "open the store again" in str(await soon(store.lost()))
    with pytest.raises(StoreFenced):
        await append_values(store, key, b"second")
    await store.close()
    assert await read_all(await open_store(), key) == [(0, b"first")]


async def test_a_cycle_that_turns_out_not_to_be_stored_is_forgotten(
    postgres: PostgresServer,
    store: PostgresStore,
    failing: FailingAppend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = await new_partition(store)
    monkeypatch.setattr(limits, "UNREACHABLE_S", 0)

    def stop_server() -> None:
        postgres.stop_immediately()
        break_connection()

    failing.before = stop_server
    with pytest.raises(OutcomeUnknown):
        await append_values(store, key, b"first")
    postgres.start()
    await until(lambda: store.failure is None)
    assert (await append_values(store, key, b"second")).base_offset == 0
    assert await read_all(store, key) == [(0, b"second")]


async def test_a_server_that_refuses_a_cycle_leaves_the_store_writable(
    store: PostgresStore, failing: FailingAppend
) -> None:
    key = await new_partition(store)

    def fill_disk() -> None:
        raise asyncpg.DiskFullError("could not extend file: No space left on device")

    failing.before, failing.calls = fill_disk, 0
    with pytest.raises(StoreUnavailable, match="free some space there"):
        await append_values(store, key, b"first")
    assert (await append_values(store, key, b"second")).base_offset == 0
    assert failing.calls == 2


async def test_a_database_that_does_not_answer_is_given_up(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await new_partition(store)
    is_stalled = True

    async def stall(*arguments: Any) -> None:
        nonlocal is_stalled
        if is_stalled:
            is_stalled = False
            await asyncio.Event().wait()
        await append_rows(*arguments)

    monkeypatch.setattr(medium, "append_rows", stall)
    monkeypatch.setattr(limits, "COMMIT_S", 0.01)
    appending = asyncio.create_task(append_values(store, key, b"first"))
    await until(lambda: not is_stalled)
    monkeypatch.setattr(limits, "COMMIT_S", 60)
    assert (await soon(appending)).base_offset == 0


# --- owners that change ----------------------------------------------------------------------


async def test_a_frozen_broker_that_resumes_commits_nothing(
    postgres: PostgresServer,
    store: PostgresStore,
    open_store: StoreOpener,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = await new_partition(store)
    await append_values(store, key, b"first")
    # A frozen broker sends no heartbeat, and does not learn either that it was replaced.
    monkeypatch.setattr(limits, "HEARTBEAT_S", 3600)
    await until(lambda: heartbeat_is_old(postgres))
    successor = await soon(open_store())
    assert await read_all(successor, key) == [(0, b"first")]
    with pytest.raises(StoreFenced):
        await append_values(store, key, b"never")
    assert isinstance(store.failure, StoreFenced)
    assert (await append_values(successor, key, b"second")).base_offset == 1
    assert await read_all(successor, key) == [(0, b"first"), (1, b"second")]
    before, after = await store.offsets(key), await successor.offsets(key)
    assert before.epoch < after.epoch


async def test_an_idle_broker_learns_by_its_heartbeat_that_it_was_replaced(
    postgres: PostgresServer, store: PostgresStore
) -> None:
    postgres.execute(
        "update quackmq.owner set epoch = epoch + 1, owner_id = gen_random_uuid()", "stores"
    )
    assert isinstance(await soon(store.lost()), StoreFenced)


async def test_a_waiting_broker_takes_over_from_one_that_ends(
    store: PostgresStore, open_store: StoreOpener
) -> None:
    key = await new_partition(store)
    waiting = asyncio.ensure_future(open_store())
    await append_values(store, key, b"first")
    assert not waiting.done()
    await store.close()
    successor = await soon(waiting)
    assert await read_all(successor, key) == [(0, b"first")]


async def test_a_database_that_has_gone_back_in_time_gives_no_offset_and_no_epoch_again(
    postgres: PostgresServer, store: PostgresStore, open_store: StoreOpener
) -> None:
    key = await new_partition(store)
    await append_values(store, key, b"kept")
    await append_values(store, key, b"lost")
    go_back(postgres)
    end_all_sessions(postgres)
    with pytest.raises(StoreFenced, match="gone back in time"):
        await append_values(store, key, b"never")
    assert "gone back in time" in str(await soon(store.lost()))
    before = await store.offsets(key)
    await store.close()
    reopened = await open_store()
    after = await reopened.offsets(key)
    assert (after.first, after.next) == (0, 1 + limits.UNSYNCED_OFFSETS)
    assert after.epoch > before.epoch
    appended = await append_values(reopened, key, b"new")
    assert appended.base_offset == after.next
    assert await read_all(reopened, key) == [(0, b"kept"), (after.next, b"new")]


async def test_a_standby_notices_that_the_database_has_gone_back_in_time(
    postgres: PostgresServer, store_database: str, store: PostgresStore, open_store: StoreOpener
) -> None:
    empty, key = await new_partition(store, "empty"), await new_partition(store)
    await append_values(store, key, b"kept")
    await append_values(store, key, b"lost")
    standby = OwnerSession(Address.parse(store_database))
    waiting = asyncio.create_task(standby.become_owner("standby:9092"))
    await until(lambda: standby.standby is not None and standby.standby.owner is not None)
    go_back(postgres)
    epoch = (await store.offsets(key)).epoch
    await store.close()
    await soon(waiting)
    assert standby.epoch > epoch + 1
    await standby.close()
    reopened = await open_store()
    assert (await reopened.offsets(key)).next == 1 + limits.UNSYNCED_OFFSETS
    assert (await reopened.offsets(empty)).next == limits.UNSYNCED_OFFSETS


async def test_a_standby_waits_for_a_database_that_restarts(
    postgres: PostgresServer,
    store_database: str,
    open_store: StoreOpener,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "quackmq.store")
    for name in ("HEARTBEAT_S", "STANDBY_RECONNECT_S", "OWNER_FIRST_S"):
        monkeypatch.setattr(limits, name, 0.01)
    store = await open_store()
    assert store.outage is None
    standby = OwnerSession(Address.parse(store_database))
    waiting = asyncio.create_task(standby.become_owner("standby:9092"))
    await until(lambda: "is active on" in caplog.text)
    postgres.stop_immediately()
    try:
        await until(lambda: waiting.done() or "this broker is not active" in caplog.text)
        await until(lambda: store.outage is not None and "be reached" in str(store.outage))
        await store.close()
        assert not waiting.done()
    finally:
        postgres.start()
    await soon(waiting)
    await standby.close()
    assert "took over from another broker: it has died" in caplog.text
    messages = ("this broker is not active", "can be reached again; waiting", "no heartbeat")
    assert [caplog.text.count(message) for message in messages] == [1, 1, 1]


async def test_the_end_of_an_outage_is_noticed_by_a_heartbeat(
    postgres: PostgresServer,
    open_store: StoreOpener,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "quackmq.store")
    monkeypatch.setattr(limits, "HEARTBEAT_S", 0.01)
    store = await open_store()
    postgres.stop_immediately()
    try:
        await until(lambda: store.outage is not None)
    finally:
        postgres.start()
    await until(lambda: store.outage is None)
    assert caplog.text.count("the heartbeat is back") == 1


# --- rows ------------------------------------------------------------------------------------


async def test_large_batches_are_copied(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "COPY_FROM_BYTES", 100)
    key = await new_partition(store)
    values = [bytes([number]) * 5_000 for number in range(20)]
    await asyncio.gather(*(append_values(store, key, value) for value in values))
    assert [value for _, value in await read_all(store, key)] == values
    assert (await store.offsets(key)).size > 100_000


async def test_a_damaged_row_is_never_returned_and_those_around_it_are(
    postgres: PostgresServer, store: PostgresStore
) -> None:
    key = await new_partition(store)
    for number in range(3):
        await append_values(store, key, b"%d" % number)
    postgres.execute(
        "update quackmq.batches set data = set_byte(data, 65, 0) where base_offset = 1", "stores"
    )
    part = await read_one(store, key, 1)
    assert isinstance(part.error, DamagedData)
    assert part.error.next_offset == 2
    before = await read_one(store, key, 0)
    assert before.error is None and before.size > 0
    after = await read_one(store, key, 2)
    assert after.error is None and after.size > 0


async def test_trimmed_rows_are_removed_in_steps(
    postgres: PostgresServer, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REMOVED_ROWS", 2)
    key = await new_partition(store)
    for number in range(8):
        await append_values(store, key, b"%d" % number)
    size = (await store.offsets(key)).size
    await store.trim(key, 6)
    assert (await store.offsets(key)).size == size // 4
    await until(lambda: stored_offsets(postgres) == "6 7")
    assert await read_all(store, key) == [(6, b"6"), (7, b"7")]


async def test_the_rows_of_a_deleted_topic_are_removed_by_the_next_owner_at_the_latest(
    postgres: PostgresServer,
    store: PostgresStore,
    open_store: StoreOpener,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = await new_partition(store)
    await append_values(store, key, b"first")
    with monkeypatch.context() as without_removal:
        without_removal.setattr(Remover, "add", lambda *_: None)
        await store.delete_topic(key.topic_id)
    assert stored_offsets(postgres) == "0"
    await store.close()
    await open_store()
    await until(lambda: postgres.execute("select * from quackmq.partitions", "stores") == "")
    assert stored_offsets(postgres) == ""


async def test_a_broker_that_was_replaced_removes_nothing(
    postgres: PostgresServer, store: PostgresStore
) -> None:
    key = await new_partition(store)
    await append_values(store, key, b"first")
    await append_values(store, key, b"second")
    postgres.execute(
        "update quackmq.partitions set first_offset = 1;"
        "update quackmq.owner set owner_id = gen_random_uuid()",
        "stores",
    )
    store.medium.remover.add(key)
    await until(lambda: store.medium.remover.is_idle)
    assert stored_offsets(postgres) == "0 1"


async def test_the_rows_of_forgotten_producers_are_removed(
    postgres: PostgresServer, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_limits, "PRODUCERS_PER_PARTITION", 2)
    key = await new_partition(store)
    for producer_id in range(5):
        numbered = batch_of(b"x", producer_id=producer_id, producer_epoch=0, base_sequence=0)
        await append(store, key, numbered)
    assert set(await store.producers(key)) == {3, 4}
    await until(lambda: stored_producers(postgres) == "3 4")
    # One that comes back is stored again.
    again = batch_of(b"y", producer_id=0, producer_epoch=1, base_sequence=0)
    await append(store, key, again)
    await until(lambda: stored_producers(postgres) == "0 4")


async def test_a_read_returns_so_many_rows_and_the_next_one_continues(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "READ_ROWS", 3)
    key = await new_partition(store)
    for number in range(7):
        await append_values(store, key, b"%d" % number)
    assert len((await read_one(store, key, 0)).chunks) == 3
    assert [value for _, value in await read_all(store, key)] == [b"%d" % n for n in range(7)]


async def test_many_reads_share_a_few_sessions(
    postgres: PostgresServer, store: PostgresStore
) -> None:
    key = await new_partition(store)
    await append_values(store, key, b"first")
    await append_values(store, key, b"second")
    parts = await asyncio.gather(*(read_one(store, key, 0) for _ in range(50)))
    assert all(part.size > 0 for part in parts)
    count = postgres.execute(
        "select count(*) from pg_stat_activity where application_name like 'quackmq %'"
    )
    # Beside the one for writing and the one for the heartbeat.
    assert int(count) <= limits.READ_SESSIONS + 2


async def test_any_text_can_name_a_cursor_or_a_state(
    store: PostgresStore, open_store: StoreOpener
) -> None:
    key = await new_partition(store)
    name = "zero \0, backslash \\, both \\0 and \0\\"
    position = cursor(name, key, 5)._replace(metadata=name, leader_epoch=3)
    await store.set_cursors([position])
    await store.put_state(name, b"value", 0)
    await store.close()
    reopened = await open_store()
    assert await reopened.cursors() == {position.key: position}
    assert (await reopened.states(""))[name].value == b"value"


@pytest.mark.parametrize("text", ["", "\0", "\\", "\\0", "\0\\", "\\\\0", "a\0b\\c", "\\\0"])
def test_texts_are_stored_without_the_character_0(text: str) -> None:
    assert "\0" not in to_text(text)
    assert from_text(to_text(text)) == text


async def test_a_time_is_found_although_a_later_one_was_trimmed_before_it(
    store: PostgresStore,
) -> None:
    key = await new_partition(store)
    for timestamp_ms in (START_MS + 900, START_MS + 100, START_MS + 200, START_MS + 300):
        await append(store, key, batch_of(b"x", timestamp_ms=timestamp_ms))
    assert (await store.offset_for_time(key, START_MS + 150) or (None,))[0] == 0
    await store.trim(key, 1)
    assert await store.offset_for_time(key, START_MS + 150) == (2, START_MS + 200)
    assert await store.offset_for_time(key, START_MS + 400) is None


async def test_people_see_topics_and_subscriptions(
    postgres: PostgresServer, store: PostgresStore
) -> None:
    key = await new_partition(store)
    await append_values(store, key, b"a", b"b", b"c")
    await store.set_cursors([cursor("reader", key, 1)])
    shown = postgres.execute("select name, records from quackmq.topics", "stores")
    assert shown == "news|3"
    shown = postgres.execute(
        "select name, topic, partition, next_offset, lag from quackmq.subscriptions", "stores"
    )
    assert shown == "reader|news|0|1|2"


def go_back(postgres: PostgresServer) -> None:
    """Make the database as it was before its last cycle, which has appended one record."""
    postgres.execute(
        """
        update quackmq.last_cycle set cycle = cycle - 1;
        update quackmq.partitions set next_offset = next_offset - 1;
        delete from quackmq.batches where base_offset = (select next_offset from quackmq.partitions)
        """,
        "stores",
    )


def end_all_sessions(postgres: PostgresServer) -> None:
    postgres.execute(
        "select pg_terminate_backend(pid, 60000) from pg_stat_activity "
        "where datname = current_database() and pid <> pg_backend_pid()",
        "stores",
    )


def heartbeat_is_old(postgres: PostgresServer) -> bool:
    """Make the heartbeat old; return whether it has stayed so."""
    postgres.execute(
        "update quackmq.heartbeat set beaten_at = beaten_at - interval '1 hour'", "stores"
    )
    age = postgres.execute(
        "select clock_timestamp() - beaten_at > interval '2 hours' from quackmq.heartbeat", "stores"
    )
    return age == "t"


def stored_producers(postgres: PostgresServer) -> str:
    return postgres.execute(
        "select string_agg(producer_id::text, ' ' order by producer_id) from quackmq.producers",
        "stores",
    )


def stored_offsets(postgres: PostgresServer) -> str:
    return postgres.execute(
        "select coalesce(string_agg(base_offset::text, ' ' order by base_offset), '') "
        "from quackmq.batches",
        "stores",
    )
