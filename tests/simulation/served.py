"""The frame of worlds in which real servers serve clients on a simulated network.

A life opens the store, the broker and its servers, and lets clients work. It ends by a crash
anywhere, or by draining and closing while everybody is busy.
"""

from __future__ import annotations

import asyncio
import random
from abc import abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from quackmq.broker import Broker, BrokerSettings
from quackmq.errors import StorageError, WriteFailed
from quackmq.stores.local import LocalStore
from tests.simulation.disk import Faults, SimulatedDisk
from tests.simulation.listeners import Listeners
from tests.simulation.loop import VirtualLoop
from tests.simulation.model import Violation
from tests.simulation.network import NetworkLoop, Weather, make_weather
from tests.simulation.protocol_clients import ProtocolClient, Publisher
from tests.simulation.strangers import misbehave
from tests.simulation.world import World

ListenersT = TypeVar("ListenersT", bound=Listeners)


class DiskFailed(Exception):
    """A request was refused because the disk has failed."""


class ServedWorld(World, Generic[ListenersT]):
    #: How many steps the clients take in one life.
    steps: ClassVar[tuple[int, ...]] = (5, 15, 40)

    def _make_loop(self, source: random.Random) -> VirtualLoop:
        return NetworkLoop(self._clock, source, make_weather(self._source), self.counts)

    def _faults(self) -> Faults:
        return self._mostly_a_crash(other=0.3, operations=600)

    # --- implemented by a world -----------------------------------------------------------------

    @property
    @abstractmethod
    def clients(self) -> Sequence[ProtocolClient[Any]]:
        """The clients that work for a number of steps."""

    @abstractmethod
    def _make_servers(self, broker: Broker) -> ListenersT: ...

    @abstractmethod
    def _broker_restarted(self, disk: SimulatedDisk) -> None:
        """Tell the clients what a new life of the broker, on this disk, means to them."""

    @abstractmethod
    async def _register(self, servers: ListenersT, loop: NetworkLoop) -> None:
        """Create topics and subscriptions. Every life begins with this, before any entry is
        published: a crash may have prevented it before."""

    @abstractmethod
    def _background(
        self, servers: ListenersT, loop: NetworkLoop
    ) -> dict[str, Coroutine[Any, Any, None]]:
        """Return what runs beside the clients until the servers close, by name. It is cancelled
        before that."""

    def _until_closed(
        self, servers: ListenersT, loop: NetworkLoop
    ) -> dict[str, Coroutine[Any, Any, None]]:
        """Return what runs on undisturbed connections until the servers have closed, by name."""
        return {}

    @abstractmethod
    async def _finish(self, servers: ListenersT, loop: NetworkLoop) -> None:
        """Nothing fails any more: everybody publishes what is pending, and reads everything."""

    # --- one life -------------------------------------------------------------------------------

    async def _life(self, disk: SimulatedDisk, *, last: bool) -> bool:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, NetworkLoop)
        if last:
            loop.weather = Weather()
        for client in self.clients:
            client.forget_connection()
        self._broker_restarted(disk)
        clock = self._clock.of_process()
        self._setter.crashed()
        try:
            store = await LocalStore.open_on(disk, options=self._options, now_ms=clock)
        except StorageError as error:
            if not disk.failed:
                raise Violation(f"a sound directory does not open: {error!r}") from error
            return True
        broker = Broker(store, BrokerSettings(), clock)
        servers = self._make_servers(broker)
        has_failed = False
        try:
            await broker.open()
            await servers.start()
            await self._register(servers, loop)
            await (self._finish(servers, loop) if last else self._work(servers, loop))
        except* (WriteFailed, DiskFailed) as errors:
            if not disk.failed:
                raise Violation("the store stopped for no reason") from errors
            has_failed = True
        if has_failed:
            return True
        try:
            await store.close()
        except StorageError as error:
            if not disk.failed:
                raise Violation(f"a sound store does not close: {error!r}") from error
        return disk.failed

    async def _work(self, servers: ListenersT, loop: NetworkLoop) -> None:
        """Let everybody work. End when all clients are done, or close while they are busy."""
        steps = self._source.choice(self.steps)
        async with asyncio.TaskGroup() as group:
            working = [
                group.create_task(client.run(servers, loop, steps), name=client.name)
                for client in self.clients
            ]
            for number in range(self._source.choice((0, 2, 6))):
                group.create_task(misbehave(servers, loop), name=f"stranger {number}")
            background = [
                group.create_task(work, name=name)
                for name, work in self._background(servers, loop).items()
            ]
            with loop.calm():
                for name, work in self._until_closed(servers, loop).items():
                    group.create_task(work, name=name)
            if self._source.random() < 0.5:
                await asyncio.sleep(self._source.random() * 3)
                self.counts["closed while clients were busy"] += 1
            else:
                await asyncio.wait(working)
            for task in background:
                task.cancel()
            await self._close(servers)

    async def _close(self, servers: ListenersT) -> None:
        await servers.close()
        self.counts["listeners closed"] += 1
        await servers.broker.close()


async def run_until_idle(publisher: Publisher[Any], servers: Listeners, loop: NetworkLoop) -> None:
    """Publish until nothing is pending whose answer was lost."""
    steps = publisher.steps
    while publisher.steps < steps + 2 or publisher.is_waiting:
        await publisher.run(servers, loop, 1)
