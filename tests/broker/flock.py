"""What tests of groups need: members that do as clients do, stores that outlive brokers, and time
that passes when nothing else happens."""

from __future__ import annotations

import asyncio
import functools
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from quackmq.broker import (
    Broker,
    Commit,
    JoinRequest,
    JoinResponse,
    LeaveRequest,
    MemberRef,
    SyncRequest,
    SyncResponse,
)
from quackmq.errors import MemberIdRequired, QuackError
from quackmq.model.topic import PartitionKey, State
from quackmq.stores.contract import Store
from quackmq.stores.local import LocalStore
from quackmq.stores.memory import MemoryStore
from tests.broker.support import CALLER, TOPIC, key_of, open_broker
from tests.kit.support import Clock
from tests.simulation.loop import Clock as VirtualClock
from tests.simulation.loop import VirtualLoop, run

GROUP = "flock"
#: Who commits without being a member.
NOBODY = MemberRef("", -1)
SESSION_MS = 10_000

StoreKind = Literal["memory", "local"]
T = TypeVar("T")


class Pond:
    """A store that can be left and come back to, as by a restart."""

    def __init__(self, kind: StoreKind, directory: Path, clock: Clock) -> None:
        self.clock = clock
        self._kind = kind
        self._directory = directory
        self._memory = MemoryStore(clock)

    @asynccontextmanager
    async def open(self, **settings: Any) -> AsyncIterator[Broker]:
        async with self.open_store() as store, open_broker(store, self.clock, **settings) as broker:
            yield broker

    @asynccontextmanager
    async def open_store(self) -> AsyncIterator[Store]:
        """The store alone, to be looked into or spoilt."""
        if self._kind == "memory":
            yield self._memory
            return
        store = await LocalStore.open(self._directory, now_ms=self.clock)
        try:
            yield store
        finally:
            await store.close()


class SlowStates(MemoryStore):
    """States are kept when told so."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.error: Exception | None = None

    async def put_state(self, key: str, value: bytes | None, expected_version: int) -> State:
        self.begun.set()
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        return await super().put_state(key, value, expected_version)


class StatesOneByOne(MemoryStore):
    """States are kept one after the other: each write waits for its own permission."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = 0
        self._permissions = asyncio.Semaphore(0)

    def allow(self, writes: int = 1) -> None:
        for _ in range(writes):
            self._permissions.release()

    async def put_state(self, key: str, value: bytes | None, expected_version: int) -> State:
        self.begun += 1
        await self._permissions.acquire()
        return await super().put_state(key, value, expected_version)


def in_virtual_time(
    test: Callable[[], Coroutine[Any, Any, None]],
) -> Callable[[], None]:
    """A test whose loop waits for nothing: time jumps to the next timer. For stores in memory."""

    @functools.wraps(test)
    def in_loop() -> None:
        loop = VirtualLoop(VirtualClock(), random.Random(0))
        try:
            run(loop, test())
        finally:
            loop.kill()
        assert not loop.unhandled

    return in_loop


class Member:
    """A client in a group. It assigns everybody its own member id when it leads."""

    def __init__(
        self,
        broker: Broker,
        group: str = GROUP,
        *,
        instance_id: str | None = None,
        topics: tuple[str, ...] = (TOPIC,),
        protocol_type: str = "consumer",
        session_timeout_ms: int = SESSION_MS,
    ) -> None:
        self.broker = broker
        self.group = group
        self.member_id = ""
        self.generation = -1
        self.instance_id = instance_id
        self._protocol_type = protocol_type
        self._protocols = (("range", subscription(*topics)),)
        self._session_timeout_ms = session_timeout_ms

    @property
    def ref(self) -> MemberRef:
        return MemberRef(self.member_id, self.generation, self.instance_id)

    async def join(self) -> JoinResponse:
        """Joins, and once more with the id that it was given."""
        while True:
            try:
                joined = await self.broker.groups.join(CALLER, self.group, self.request())
            except MemberIdRequired as error:
                self.member_id = error.member_id
                continue
            self.member_id, self.generation = joined.member_id, joined.generation
            return joined

    def request(self) -> JoinRequest:
        """What it says of itself."""
        return JoinRequest(
            member_id=self.member_id,
            instance_id=self.instance_id,
            client_id="duck",
            client_host="127.0.0.1",
            protocol_type=self._protocol_type,
            protocols=self._protocols,
            session_timeout_ms=self._session_timeout_ms,
            rebalance_timeout_ms=self._session_timeout_ms,
        )

    async def sync(self, assignments: Mapping[str, bytes] | None = None) -> SyncResponse:
        sync = SyncRequest(self.ref, self._protocol_type, "range", assignments or {})
        return await self.broker.groups.sync(CALLER, self.group, sync)

    async def enter(self) -> JoinResponse:
        """Joins and is told its share."""
        joined = await self.join()
        shares = {each.member_id: each.member_id.encode() for each in joined.members}
        synced = await self.sync(shares)
        assert synced.assignment == self.member_id.encode()
        return joined

    def heartbeat(self) -> None:
        self.broker.groups.heartbeat(CALLER, self.group, self.ref)

    async def leave(self) -> None:
        leaving = [LeaveRequest(self.member_id, self.instance_id)]
        assert await self.broker.groups.leave(CALLER, self.group, leaving) == [None]

    async def commit(self, offset: int, partition: int = 0, topic: str = TOPIC) -> None:
        key = key_of(self.broker.topic(topic), partition)
        await commit(self.broker, {key: offset}, group=self.group, member=self.ref)


async def enter_together(*members: Member) -> list[JoinResponse]:
    """All of one generation."""
    return list(await asyncio.gather(*(member.enter() for member in members)))


async def commit(
    broker: Broker,
    offsets: Mapping[PartitionKey, int],
    *,
    group: str = GROUP,
    member: MemberRef = NOBODY,
) -> None:
    """Commits that must succeed."""
    commits = [Commit(key, offset) for key, offset in offsets.items()]
    outcomes = await broker.groups.commit(CALLER, group, member, commits)
    assert outcomes == [None] * len(commits)


async def committed(broker: Broker, group: str = GROUP) -> dict[tuple[str, int], int | None]:
    """What is committed, by the topic's name and the partition."""
    found = await broker.groups.committed(CALLER, group)
    return {
        (broker.topic_by_id(key.topic_id).name, key.partition): cursor.offset
        for key, cursor in found.items()
    }


async def outcome_of(call: Awaitable[T]) -> T | QuackError:
    try:
        return await call
    except QuackError as error:
        return error


def subscription(*topics: str) -> bytes:
    """What a consumer says of itself: version, topics, no data of its own."""
    names = b"".join(struct.pack(">h", len(name)) + name.encode() for name in topics)
    return struct.pack(">hi", 0, len(topics)) + names + struct.pack(">i", -1)
