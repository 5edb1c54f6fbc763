"""Subscribers that are behind, and a disk that fails when they want to be read to."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
from collections.abc import Callable, Sequence

import pytest

from quackmq import limits
from quackmq.broker import Reading
from quackmq.broker import limits as broker_limits
from quackmq.errors import DamagedData, StorageError
from quackmq.model.policy import Policy
from quackmq.model.topic import OffsetTime, PartitionKey, Read, Slice, TimeKind
from quackmq.protocols.line import limits as line_limits
from quackmq.protocols.line.settings import LineSettings
from quackmq.protocols.line.subscriber import Subscriber
from quackmq.stores.memory import MemoryStore
from tests.kit.waiting import soon, until
from tests.protocols.kafka.client import on_both_loops
from tests.protocols.line.peers import Served, on_pipes, served

ERRORS: dict[str, Callable[[], Exception]] = {
    "the device": lambda: OSError(errno.EIO, "Input/output error"),
    "the store": lambda: StorageError("the archive's directory is not there"),
    "damage without an end": lambda: DamagedData("a wrong checksum", None),
}


class FailingStore(MemoryStore):
    """Who does not wait for new entries cannot read, so many times."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.failures_left = 0
        self.failures = 0

    async def read(
        self, reads: Sequence[Read], *, max_bytes: int, min_bytes: int = 1, wait_ms: int = 0
    ) -> list[Slice]:
        if not wait_ms and self._fails():
            error = self.error
            if isinstance(error, OSError):
                raise error
            return [Slice(read.key, (), 0, 0, 0, error) for read in reads]
        return await super().read(reads, max_bytes=max_bytes, min_bytes=min_bytes, wait_ms=wait_ms)

    async def offset_for_time(
        self, key: PartitionKey, time_ms: int, kind: TimeKind = "timestamp"
    ) -> OffsetTime | None:
        if self._fails():
            assert self.error is not None
            raise self.error
        return await super().offset_for_time(key, time_ms, kind)

    def _fails(self) -> bool:
        if not self.failures_left:
            return False
        self.failures_left -= 1
        self.failures += 1
        return True


async def is_behind(running: Served) -> None:
    """There is a subscription, and entries that have come while nobody was served."""
    daisy = await running.subscriber("daisy", "1")
    assert await daisy.ask("terminate") == "terminate"
    await until(lambda: running.listener.ended_connections())
    await running.put("1", b"a", b"b")


@on_both_loops
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("reading", ["every", "live", "newest"])
async def test_a_subscriber_goes_on_by_itself_when_the_disk_is_well_again(
    reading: Reading, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is published meanwhile that would wake it."""
    monkeypatch.setattr(broker_limits, "CHANNEL_RETRY_MS", 10)
    store = FailingStore()
    settings = LineSettings(reading=reading)
    async with served(settings, store=store) as running:
        await running.topic("1", Policy(live_for_ms=3_600_000))
        await is_behind(running)
        store.error, store.failures_left = ERRORS[error](), 3
        daisy = await running.subscriber("daisy", "1")
        assert await daisy.receives(2) == ["topic 1 [a]", "topic 1 [b]"]
        assert store.failures == 3


@on_both_loops
async def test_what_stays_damaged_is_told_once_and_keeps_no_other_topic_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(broker_limits, "CHANNEL_RETRY_MS", 1)
    caplog.set_level(logging.WARNING)
    store = FailingStore()
    async with served(LineSettings(reading="every"), store=store) as running:
        await is_behind(running)
        store.error, store.failures_left = DamagedData("a wrong checksum", None), 10**9
        daisy = await running.subscriber("daisy", "1", "2")
        await until(lambda: store.failures >= 5)
        await running.put("2", b"well")
        assert await daisy.receives(1) == ["topic 2 [well]"]
        assert caplog.text.count("sub daisy, topic 1: a wrong checksum") == 1


@on_both_loops
async def test_who_hangs_up_meanwhile_is_served_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_limits, "CHANNEL_RETRY_MS", 1)
    store = FailingStore()
    async with served(LineSettings(reading="every"), store=store) as running:
        await is_behind(running)
        store.error, store.failures_left = StorageError("not now"), 10**9
        daisy = await running.subscriber("daisy", "1")
        await until(lambda: store.failures >= 2)
        assert await daisy.ask("terminate") == "terminate"
        await until(lambda: len(running.listener.ended_connections()) == 2)
        store.failures_left = 0
        daisy = await running.subscriber("daisy", "1")
        assert await daisy.receives(2) == ["topic 1 [a]", "topic 1 [b]"]
        await soon(daisy.close())


class SlowReads(MemoryStore):
    """Who does not wait for new entries can read when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.released = asyncio.Event()

    async def read(
        self, reads: Sequence[Read], *, max_bytes: int, min_bytes: int = 1, wait_ms: int = 0
    ) -> list[Slice]:
        if not wait_ms:
            self.reads += 1
            await self.released.wait()
        return await super().read(reads, max_bytes=max_bytes, min_bytes=min_bytes, wait_ms=wait_ms)


@on_both_loops
async def test_an_entry_that_was_read_for_a_peer_that_takes_nothing_comes_first_when_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is given back at once, and does not wait for its lease behind newer entries."""
    monkeypatch.setattr(line_limits, "LINE_WRITE_BUFFER_BYTES", 1_000)
    monkeypatch.setattr(line_limits, "LINE_REFUSALS", 10_000)
    store = SlowReads()
    settings = LineSettings(reading="every", answer_ms=limits.LINE_LONGEST_ANSWER_MS)
    async with served(settings, store=store) as running:
        store.released.set()
        await is_behind(running)
        store.released.clear()
        reads = store.reads
        to_broker, from_broker = os.pipe(), os.pipe()
        fcntl.fcntl(from_broker[1], fcntl.F_SETPIPE_SZ, 4_096)
        await running.listener.attach(to_broker[0], from_broker[1], "to a late one")
        os.write(to_broker[1], b"sub daisy connect\nend\nsub daisy topic 1\nend\n")
        await until(lambda: store.reads > reads)
        os.write(to_broker[1], b"quack\n" * 2_000)
        (connection,) = (each for each in running.listener.connections if not each.is_over)
        await until(lambda: not connection.can_receive_entry())
        store.released.set()
        subscriber = connection._handler
        assert isinstance(subscriber, Subscriber) and subscriber._waiting is not None
        await soon(asyncio.wait([subscriber._waiting]))
        late = running.keep(await on_pipes(from_broker[0], to_broker[1]))
        for entry in ("topic 1 [a]", "topic 1 [b]"):
            while (line := await late.hears()) in ("accept", "reject"):
                continue
            assert line == entry
            late.say("successful")
