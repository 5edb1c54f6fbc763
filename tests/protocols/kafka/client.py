"""A Kafka client made of kio alone, for tests of the listener; and a broker with a listener to go
with it.

kio writes the requests and reads the answers, so that what the listener reads and writes is held
against something that nobody here wrote.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import io
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import uvloop
from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from quackmq.broker import Broker, BrokerSettings, Caller
from quackmq.protocols.kafka.codec.writer import write_entity
from quackmq.protocols.kafka.server import KafkaServer
from quackmq.stores.contract import Store
from quackmq.stores.memory import MemoryStore
from tests.kit.support import batch_of, listening
from tests.kit.waiting import soon

T = TypeVar("T")

DEADLINE_SECONDS = 20
TESTER = Caller("tester")
NOW = timedelta(0)

PRODUCE, FETCH, LIST_OFFSETS, METADATA = 0, 1, 2, 3
FIND_COORDINATOR, API_VERSIONS, CREATE_TOPICS, DELETE_TOPICS, INIT_PRODUCER_ID = 10, 18, 19, 20, 22


class Client:
    """One connection. `ask` sends and awaits the answer; `send` and `receive` are its halves."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._sent: list[tuple[int, int, int]] = []
        self._correlation_id = 100

    async def ask(self, api_key: int, version: int, **fields: Any) -> Any:
        self.send(api_key, version, **fields)
        return await self.receive()

    def send(self, api_key: int, version: int, **fields: Any) -> None:
        self.expect(api_key, version)
        self.writer.write(self.frame(api_key, version, **fields))

    def expect(self, api_key: int, version: int) -> None:
        """The next `frame` is of this API: `receive` gets an answer to it."""
        self._sent.append((api_key, version, self._correlation_id + 1))

    def send_unanswered(self, api_key: int, version: int, **fields: Any) -> None:
        self.writer.write(self.frame(api_key, version, **fields))

    def frame(self, api_key: int, version: int, **fields: Any) -> bytes:
        """A request from plain fields; structures are dicts in lists, durations milliseconds."""
        self._correlation_id += 1
        schema: Any = load_request_schema(api_key, version)
        header = schema.__header_schema__(
            request_api_key=api_key,
            request_api_version=version,
            correlation_id=self._correlation_id,
            client_id="tester",
        )
        out = io.BytesIO()
        entity_writer(type(header))(out, header)
        out.write(write_entity(schema, fields))
        return struct.pack(">i", len(out.getvalue())) + out.getvalue()

    async def receive(self) -> Any:
        api_key, version, correlation_id = self._sent.pop(0)
        payload = await self.receive_frame()
        schema = load_response_schema(api_key, version)
        header, size = entity_reader(schema.__header_schema__)(payload, 0)
        assert header.correlation_id == correlation_id
        entity, body_size = entity_reader(schema)(payload, size)
        assert size + body_size == len(payload)
        return entity

    async def receive_frame(self) -> bytes:
        size = await soon(self.reader.readexactly(4))
        return await soon(self.reader.readexactly(int.from_bytes(size, "big")))

    async def is_disconnected(self) -> bool:
        """True when the listener closes the connection without saying anything more."""
        try:
            return await soon(self.reader.read(1)) == b""
        except ConnectionError:
            return True

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            return


class Served:
    """A broker with a listener, on a store in memory unless another is given."""

    def __init__(self, broker: Broker, listener: KafkaServer, address: tuple[str, int]) -> None:
        self.broker = broker
        self.listener = listener
        self.address = address
        self._clients: list[Client] = []

    async def client(self) -> Client:
        client = Client(*await asyncio.open_connection(*self.address))
        self._clients.append(client)
        return client

    async def close_clients(self) -> None:
        for client in self._clients:
            await client.close()


@asynccontextmanager
async def served(
    broker_type: type[Broker] = Broker,
    settings: BrokerSettings | None = None,
    advertise: tuple[str, int] | None = None,
    store: Store | None = None,
) -> AsyncIterator[Served]:
    store = store or MemoryStore()
    broker = broker_type(store, settings or BrokerSettings())
    await broker.open()
    listener = KafkaServer(broker, "127.0.0.1", 0, advertise=advertise)
    running = Served(broker, listener, await listening(listener))
    try:
        yield running
    finally:
        await running.close_clients()
        await soon(listener.close())
        await broker.close()
        await store.close()


def on_both_loops(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test that runs on the event loop that the server uses, and on asyncio's own.

    `make check` leaves the second to `make test`.
    """

    @pytest.mark.parametrize(
        "loop_factory",
        [
            pytest.param(asyncio.new_event_loop, id="asyncio", marks=pytest.mark.sweep),
            pytest.param(uvloop.new_event_loop, id="uvloop"),
        ],
    )
    @functools.wraps(test)
    def run(loop_factory: Callable[[], asyncio.AbstractEventLoop], **fixtures: Any) -> None:
        async def whole() -> None:
            await test(**fixtures)

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(whole())

    signature = inspect.signature(test)
    loop = inspect.Parameter("loop_factory", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), loop])
    test_on_both: Callable[..., None] = run
    return test_on_both


# --- requests that many tests send -----------------------------------------------------------


def produce_fields(
    *batches: bytes | None,
    topic: Any = "news",
    partition: int = 0,
    acks: int = -1,
    by: str = "name",
) -> dict[str, Any]:
    return {
        "acks": acks,
        "timeout": 1000,
        "topic_data": [
            {
                by: topic,
                "partition_data": [
                    {"index": partition + place, "records": batch}
                    for place, batch in enumerate(batches)
                ],
            }
        ],
    }


def fetch_fields(
    offset: int = 0,
    *,
    topic: Any = "news",
    by: str = "topic",
    partition: int = 0,
    wait_ms: int = 0,
    min_bytes: int = 1,
    max_bytes: int = 2**30,
    partition_bytes: int = 2**30,
    **more: Any,
) -> dict[str, Any]:
    wish = {
        "partition": partition,
        "fetch_offset": offset,
        "partition_max_bytes": partition_bytes,
    }
    return {
        "replica_id": -1,
        "max_wait": wait_ms,
        "min_bytes": min_bytes,
        "max_bytes": max_bytes,
        "isolation_level": 0,
        "topics": [{by: topic, "partitions": [wish]}],
        "forgotten_topics_data": [],
        **more,
    }


def news(*values: bytes, **more: Any) -> bytes:
    """A batch of records, as bytes."""
    return bytes(batch_of(*(values or (b"quack",)), **more).view)


def only_partition(answer: Any) -> Any:
    """The only partition's part of an answer to Produce or Fetch or ListOffsets."""
    (topic,) = answer.responses if hasattr(answer, "responses") else answer.topics
    partitions = getattr(topic, "partition_responses", None) or topic.partitions
    (partition,) = partitions
    return partition
