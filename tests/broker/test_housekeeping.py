"""Work that nobody asked for, at ordinary sizes: a thousand topics, ten thousand producer ids. None
of it holds the event loop for more than 20 ms of the processor, and what is bounded for that reason
is done in the end."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from quackmq.archive import limits as archive_limits
from quackmq.archive.archiving.archiver import Archiver
from quackmq.archive.tiered_store import TieredStore
from quackmq.broker import Broker, BrokerSettings, Commit, MemberRef
from quackmq.broker import limits as broker_limits
from quackmq.model import limits as model_limits
from quackmq.model.policy import Policy
from quackmq.records import codec
from quackmq.records.batch import Batch, Record
from quackmq.stores import limits as stores_limits
from quackmq.stores.local import LocalOptions, LocalStore
from quackmq.stores.memory import MemoryStore
from tests.broker.support import CALLER, NAME, NEVER_MS, TOPIC, key_of, open_broker, publish
from tests.kit import effort
from tests.kit.loop_cpu import measured_callbacks
from tests.kit.support import Clock
from tests.kit.waiting import until

TOPICS = effort.of(1_000)
PRODUCERS = effort.of(10_000)
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
#: What is promised is 20 ms; the processor of a busy machine takes twice as long for the same work.
MOST_MS = 40
POLICY = Policy(live_for_ms=600_000, live_entries=20, keep_for_ms=2 * DAY_MS, keep_bytes=10**7)
#: Every topic is looked at for what is due; to make files takes the disk long, so few have any.
ARCHIVED = 50
NOT_ARCHIVED = dataclasses.replace(
    POLICY, archive_after_ms=None, archive_bytes=None, archive_after_live_ms=None
)


@asynccontextmanager
async def opened(directory: Path, clock: Clock) -> AsyncIterator[Broker]:
    log = await LocalStore.open(directory, LocalOptions(sync="os"), now_ms=clock)
    store = await TieredStore.open(log, log.disk)
    settings = BrokerSettings(clean_interval_ms=NEVER_MS)
    broker = Broker(store, settings, clock, archive=store)
    await broker.open()
    try:
        yield broker
    finally:
        await broker.close()
        await store.close()


def batch_of_producer(producer_id: int, sequence: int, clock: Clock) -> Batch:
    record = Record(0, clock(), None, b"quack", ())
    data = codec.encode([record], producer_id=producer_id, producer_epoch=0, base_sequence=sequence)
    return Batch.parse(bytearray(data))


async def fill(broker: Broker, clock: Clock) -> None:
    """Each topic with a group, a pushed subscription, a registered producer, a transactional id and
    entries of ten producers."""

    async def fill_topic(number: int) -> None:
        policy = POLICY if number < ARCHIVED else NOT_ARCHIVED
        topic = await broker.create_topic(CALLER, f"t{number}", policy=policy)
        commit = Commit(key_of(topic), 1)
        await broker.groups.commit(CALLER, f"g{number}", MemberRef("", -1), [commit])
        await broker.pushing.subscribe(CALLER, f"p{number}", topic.name, start="beginning")
        await broker.registrations.register_producer(CALLER, topic.name)
        await broker.transactions.init(CALLER, f"tx{number}", 60_000)
        for producer_id in range(number, PRODUCERS, TOPICS):
            batch = batch_of_producer(1_000_000 + producer_id, 0, clock)
            await broker.publish(CALLER, topic, 0, batch)

    for start in range(0, TOPICS, 100):
        await asyncio.gather(*map(fill_topic, range(start, min(start + 100, TOPICS))))


async def clean(broker: Broker, times: int = 3) -> None:
    for _ in range(times):
        await broker.clean()


class ArchiverPasses:
    """Counts how often the archiver has checked all partitions and archived those that are due."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._count = 0
        archive_due = Archiver.archive_due

        async def count_pass(archiver: Archiver) -> bool:
            was_due = await archive_due(archiver)
            self._count += 1
            return was_due

        monkeypatch.setattr(Archiver, "archive_due", count_pass)
        # Several passes a second, so that the test is fast.
        monkeypatch.setattr(archive_limits, "ARCHIVE_CHECK_MS", 50)

    async def wait(self) -> None:
        """Wait for a whole pass that begins after now: the second one that ends."""
        awaited_count = self._count + 2
        await until(lambda: self._count >= awaited_count)


@pytest.mark.sweep
async def test_no_housekeeping_holds_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Thousands of files are synced, which takes the disk a minute and the loop nothing.
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(os, "fdatasync", lambda file: None)
    passes = ArchiverPasses(monkeypatch)
    clock = Clock()
    async with opened(tmp_path, clock) as broker:
        await fill(broker, clock)
        # In turn: nothing is due; what is live and goes to the archive; what is kept; what expires.
        for passed_ms in (0, 2 * HOUR_MS, 3 * DAY_MS, 30 * DAY_MS, 100 * DAY_MS):
            clock.advance(passed_ms)
            with measured_callbacks() as times:
                await clean(broker)
                await passes.wait()
            times.check(MOST_MS)
        assert broker.groups.all(CALLER) == []
        with measured_callbacks() as times:
            await broker.close()
            await broker._store.close()
        times.check(MOST_MS)
    with measured_callbacks() as times:
        log = await LocalStore.open(tmp_path, now_ms=clock)
        await log.close()
    times.check(MOST_MS)


async def test_expired_producers_are_forgotten_in_the_end_but_not_all_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_limits, "FORGOTTEN_PRODUCERS", 3)
    clock = Clock()
    store = MemoryStore(clock)
    async with open_broker(store, clock) as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        for producer_id in range(10):
            await broker.publish(CALLER, topic, 0, batch_of_producer(producer_id, 0, clock))
        clock.advance(stores_limits.PRODUCER_EXPIRY_MS + DAY_MS)
        left = []
        for number in range(5):
            await broker.publish(CALLER, topic, 0, batch_of_producer(100 + number, 0, clock))
            known = await store.producers(key_of(topic))
            left.append(len([producer_id for producer_id in known if producer_id < 100]))
        assert left == [7, 4, 1, 0, 0]


async def test_very_many_holds_are_named_in_the_log_some_at_a_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_limits, "HELD_BACK_LINES", 3)
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        policy = Policy(keep_for_ms=HOUR_MS, keep_until_consumed=True)
        await broker.create_topic(CALLER, TOPIC, partitions=8, policy=policy)
        await broker.subscribe(CALLER, NAME, TOPIC)
        for partition in range(8):
            await publish(broker, b"a", partition=partition)
        clock.advance(broker_limits.HELD_BACK_MS + 2 * HOUR_MS)
        named = []
        for _ in range(5):
            await clean(broker, 1)
            named.append(caplog.text.count("are past their retention"))
        assert named == [3, 6, 8, 8, 8]
