"""Requests that are sent to this broker and to Apache Kafka alike; their answers as plain values.

A case sends requests through `Broker` and returns what it was told. Its names begin with the name
of the case, which is left out of the result, so that one long-lived broker serves all cases. Texts
for people, times, generated ids and sizes of answers are left out too: they differ by right.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from tests.protocols.kafka.client import (
    CREATE_TOPICS,
    DEADLINE_SECONDS,
    FIND_COORDINATOR,
    INIT_PRODUCER_ID,
    LIST_OFFSETS,
    PRODUCE,
    Client,
    news,
    produce_fields,
)

#: Fields that no client acts on, or that differ from run to run.
_LEFT_OUT: Final = frozenset(
    {"error_message", "throttle_time", "heartbeat_interval", "client_host", "node_endpoints"}
)
GROUP, TRANSACTION = 0, 1
#: A broker that has just started, or a topic that has just been made, answers so for a moment.
_NOT_YET: Final = frozenset(
    {
        ErrorCode.coordinator_not_available,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.not_coordinator,
        ErrorCode.not_leader_or_follower,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.leader_not_available,
        ErrorCode.concurrent_transactions,
        ErrorCode.unstable_offset_commit,
    }
)

Connect = Callable[[], Awaitable[Client]]


Run = Callable[["Broker"], Awaitable[Any]]


class Case(NamedTuple):
    name: str
    run: Run


#: All cases by name, filled by the modules that define them.
CASES: Final[dict[str, Case]] = {}


def case(run: Run) -> Run:
    """Add a case. Its name is that of the function, with hyphens."""
    name = run.__name__.replace("_", "-")
    assert name not in CASES, "a case has one name"
    CASES[name] = Case(name, run)
    return run


class Broker:
    """A broker under comparison. For one case, on one event loop."""

    def __init__(self, connect: Connect, case_name: str) -> None:
        self._connect = connect
        self._prefix = case_name + "."
        self._client: Client | None = None

    async def ask(self, api_key: int, version: int, **fields: Any) -> Any:
        """The answer as kio reads it; ConnectionError if the broker hangs up instead."""
        if self._client is None:
            self._client = await self._connect()
        try:
            return await self._client.ask(api_key, version, **{"timeout": 10_000, **fields})
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            self._client = None
            raise ConnectionError("the broker hung up") from error

    async def told(self, api_key: int, version: int, **fields: Any) -> Any:
        """The answer as plain values, or "disconnected"."""
        try:
            return self.plain(await self.ask(api_key, version, **fields))
        except ConnectionError:
            return "disconnected"

    def named(self, name: str) -> str:
        return self._prefix + name

    async def another(self) -> Broker:
        """The same broker through another connection."""
        return Broker(self._connect, self._prefix[:-1])

    # --- what cases begin with --------------------------------------------------------------

    async def topic(self, name: str = "news", partitions: int = 1) -> str:
        """A new topic whose partitions can be written to; its full name."""
        full = self.named(name)
        answer = await self.ask(CREATE_TOPICS, 7, topics=[topic_fields(full, partitions)])
        assert answer.topics[0].error_code == ErrorCode.none, answer
        wish = [{"partition_index": each, "timestamp": -1} for each in range(partitions)]
        fields = {"replica_id": -1, "isolation_level": 0, "timeout": 1000}

        async def is_there() -> bool:
            answer = await self.ask(
                LIST_OFFSETS, 7, topics=[{"name": full, "partitions": wish}], **fields
            )
            (topic,) = answer.topics
            return all(part.error_code == ErrorCode.none for part in topic.partitions)

        await until(is_there)
        return full

    async def topic_id(self, full: str) -> uuid.UUID:
        answer = await self.ask(
            3,
            12,
            topics=[{"topic_id": None, "name": full}],
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=False,
        )
        found: uuid.UUID = answer.topics[0].topic_id
        return found

    async def put(self, full: str, *values: bytes, partition: int = 0, **batch: Any) -> ErrorCode:
        fields = produce_fields(news(*values, **batch), topic=full, partition=partition)
        answer = await self.ask(PRODUCE, 9, transactional_id=None, **fields)
        code: ErrorCode = answer.responses[0].partition_responses[0].error_code
        return code

    async def coordinators(self) -> None:
        """Wait until groups and transactions can be used, which Kafka makes topics for first."""

        async def are_there() -> bool:
            for kind in (GROUP, TRANSACTION):
                keys = [self.named("any")]
                answer = await self.ask(FIND_COORDINATOR, 4, key_type=kind, coordinator_keys=keys)
                if answer.coordinators[0].error_code != ErrorCode.none:
                    return False
            begun = await self.ask(
                INIT_PRODUCER_ID, 4, transactional_id=self.named("any"), transaction_timeout=1000
            )
            committed = await self.commit(self.named("any"), "none", 0)
            return begun.error_code == ErrorCode.none and committed not in _LOADING

        await until(are_there)

    async def commit(self, group: str, topic: str, offset: int, **more: Any) -> ErrorCode:
        """Commit an offset of partition 0 as no member."""
        answer = await self.ask(8, 9, **commit_fields(group, topic, offset, **more))
        code: ErrorCode = answer.topics[0].partitions[0].error_code
        return code

    # --- answers ----------------------------------------------------------------------------

    def plain(self, value: Any) -> Any:
        """An answer as JSON can hold it, without what differs by right."""
        if isinstance(value, ErrorCode):
            return value.name
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            return {
                name: self.plain(each) for name, each in fields.items() if name not in _LEFT_OUT
            }
        if isinstance(value, str):
            return value.replace(self._prefix, "")
        if isinstance(value, uuid.UUID):
            return "an id"
        if isinstance(value, timedelta):
            return value // timedelta(milliseconds=1)
        if isinstance(value, datetime):
            return value.timestamp() > 0
        if isinstance(value, bytes):
            return value.decode("latin-1")
        if isinstance(value, Mapping):
            return {str(name): self.plain(each) for name, each in value.items()}
        if isinstance(value, enum.Enum):
            return self.plain(value.value)
        if isinstance(value, Sequence):
            return [self.plain(each) for each in value]
        return value


_LOADING: Final = frozenset({ErrorCode.not_coordinator, ErrorCode.coordinator_load_in_progress})


def topic_fields(name: str, partitions: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "num_partitions": partitions,
        "replication_factor": 1,
        "assignments": [],
        "configs": [],
        **more,
    }


def commit_fields(
    group: str, topic: str, offset: int, *, epoch: int = -1, metadata: str | None = "", **more: Any
) -> dict[str, Any]:
    partition = {
        "partition_index": 0,
        "committed_offset": offset,
        "committed_leader_epoch": epoch,
        "committed_metadata": metadata,
    }
    return {
        "group_id": group,
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "group_instance_id": None,
        "topics": [{"name": topic, "topic_id": None, "partitions": [partition]}],
        **more,
    }


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(3 * DEADLINE_SECONDS):
        while not await condition():
            await asyncio.sleep(0.02)


async def retried(ask: Callable[[], Awaitable[Any]], code_of: Callable[[Any], ErrorCode]) -> Any:
    """Ask again while a broker says that it is not ready yet: one end of a transaction at Kafka is
    carried out after it was answered."""
    async with asyncio.timeout(3 * DEADLINE_SECONDS):
        while code_of(answer := await ask()) in _NOT_YET:
            await asyncio.sleep(0.02)
    return answer
