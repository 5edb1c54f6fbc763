"""A broker with its Kafka listener, in a thread of the test: clients from outside speak to it, and
the test can look inside."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

from quackmq.broker import Broker, BrokerSettings, Caller
from quackmq.model.topic import PartitionKey, Read, Slice
from quackmq.protocols.kafka.server import KafkaServer
from quackmq.records.batch import Batch
from quackmq.records.codec import decode
from quackmq.stores.memory import MemoryStore
from tests.kit.support import batches_of, listening

T = TypeVar("T")

DEADLINE_SECONDS = 60
EVERYTHING = 2**30
TESTER = Caller("tester")


class WatchedBroker(Broker):
    """A broker that counts the reads that are under way."""

    reads = 0

    async def read(self, *arguments: Any, **bounds: Any) -> list[Slice]:
        self.reads += 1
        try:
            return await super().read(*arguments, **bounds)
        finally:
            self.reads -= 1


class RunningBroker:
    """Use as a context manager; `address` is for clients, `call` and `batches` are for the test."""

    def __init__(
        self, settings: BrokerSettings | None = None, advertise: str | None = None
    ) -> None:
        self._settings = settings or BrokerSettings()
        self._advertise: tuple[str, int] | None = None
        if advertise is not None:
            host, advertised_port = advertise.split(":")
            self._advertise = (host, int(advertised_port))
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run)
        self._stop: asyncio.Event | None = None
        self.address = ""
        self.broker: WatchedBroker

    def __enter__(self) -> RunningBroker:
        self._thread.start()
        self._loop = self._started.result(DEADLINE_SECONDS)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(DEADLINE_SECONDS)
        assert not self._thread.is_alive(), "the broker did not close"

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run something in the broker's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(DEADLINE_SECONDS)

    def batches(self, topic: str, partition: int = 0) -> list[Batch]:
        """What the store holds of a partition; each batch is one that our own codec can open."""
        key = PartitionKey(self.broker.topic(topic).id, partition)
        read = Read(key, 0, EVERYTHING)
        (part,) = self.call(self.broker.read(TESTER, [read], max_bytes=EVERYTHING))
        assert part.error is None
        batches = batches_of(part.chunks)
        for batch in batches:
            decode(batch)
        return batches

    def values(self, topic: str, partition: int = 0) -> list[bytes | None]:
        """The records' values, as our own codec reads them."""
        batches = self.batches(topic, partition)
        return [record.value for batch in batches for record in decode(batch)]

    def wait_for_reads(self, count: int) -> None:
        """Until so many reads are under way."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self.broker.reads != count:
            assert time.monotonic() < deadline, f"there are {self.broker.reads} reads"
            time.sleep(0.005)

    def _run(self) -> None:
        try:
            uvloop.run(self._serve())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        store = MemoryStore()
        self.broker = WatchedBroker(store, self._settings)
        await self.broker.open()
        listener = KafkaServer(self.broker, "127.0.0.1", 0, advertise=self._advertise)
        host, port = await listening(listener)
        self.address = f"{host}:{port}"
        self._started.set_result(asyncio.get_running_loop())
        await self._stop.wait()
        await listener.close()
        await self.broker.close()
        await store.close()
