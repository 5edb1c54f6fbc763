"""The clients of Python behind the calls of tests/interop/transactional.py."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as AioPartition
from aiokafka.errors import KafkaError as AioError
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka import TopicPartition as ConfluentPartition
from kafka import KafkaConsumer, KafkaProducer, OffsetAndMetadata
from kafka import TopicPartition as PythonPartition
from kafka.errors import KafkaError as PythonError

from tests.interop.running import DEADLINE_SECONDS
from tests.interop.transactional import TOPIC, Client, Reader, Refused, Writer

T = TypeVar("T")


# --- confluent-kafka ---------------------------------------------------------------------------


def silent(error: KafkaError) -> None:
    """That one is fenced, or a broker away, is the point; it is said to who asked as well."""


class Confluent(Client):
    def writer(self, address: str, name: str, timeout_ms: int) -> Writer:
        return ConfluentWriter(address, name, timeout_ms)

    def reader(self, address: str, committed: bool) -> Reader:
        return ConfluentReader(address, committed)


class ConfluentWriter(Writer):
    SETTINGS: Final = {"log_level": 0, "error_cb": silent, "linger.ms": 0}

    def __init__(self, address: str, name: str, timeout_ms: int) -> None:
        self._address = address
        transaction = {"transactional.id": name, "transaction.timeout.ms": timeout_ms}
        self._producer = Producer({"bootstrap.servers": address, **self.SETTINGS, **transaction})
        with self._told():
            self._producer.init_transactions(DEADLINE_SECONDS)

    def begin(self) -> None:
        with self._told():
            self._producer.begin_transaction()

    def send(self, *values: str) -> None:
        failed: list[KafkaError] = []

        def delivered(error: KafkaError | None, message: Any) -> None:
            if error is not None:
                failed.append(error)

        with self._told():
            for value in values:
                self._producer.produce(TOPIC, value, partition=0, on_delivery=delivered)
            self._wait_for_answers()
            if failed:
                raise KafkaException(failed[0])

    def _wait_for_answers(self) -> None:
        """What `flush` is for. But that one goes on calling callbacks when it has a fatal error to
        raise, which they trip over, and at times lose: a SystemError. `poll` raises at once, if it
        is not to wait for longer than this."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(self._producer):
            assert time.monotonic() < deadline, f"{len(self._producer)} records were not answered"
            self._producer.poll(0.1)

    def send_offset(self, group: str, topic: str, offset: int) -> None:
        settings = {"bootstrap.servers": self._address, "group.id": group, "log_level": 0}
        consumer = Consumer(settings)
        with self._told():
            self._producer.send_offsets_to_transaction(
                [ConfluentPartition(topic, 0, offset)],
                consumer.consumer_group_metadata(),
                DEADLINE_SECONDS,
            )
        consumer.close()

    def commit(self) -> None:
        with self._told():
            self._producer.commit_transaction(DEADLINE_SECONDS)

    def abort(self) -> None:
        with self._told():
            self._producer.abort_transaction(DEADLINE_SECONDS)

    def close(self) -> None:
        self._producer.purge()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except KafkaException as error:
            raise Refused(error.args[0].name(), str(error)) from error


class ConfluentReader(Reader):
    def __init__(self, address: str, committed: bool) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": address,
                "group.id": "nobody",
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 50,
                "log_level": 0,
                "error_cb": silent,
            }
        )
        self._consumer.assign([ConfluentPartition(TOPIC, 0, 0)])

    def take(self, count: int) -> list[str]:
        def more() -> list[str]:
            messages = self._consumer.consume(1, 0.1)
            assert [message.error() for message in messages] == [None] * len(messages)
            return [(message.value() or b"").decode() for message in messages]

        return taken(count, more)

    def close(self) -> None:
        self._consumer.close()


# --- kafka-python ------------------------------------------------------------------------------


class KafkaPython(Client):
    def writer(self, address: str, name: str, timeout_ms: int) -> Writer:
        return KafkaPythonWriter(address, name, timeout_ms)

    def reader(self, address: str, committed: bool) -> Reader:
        return KafkaPythonReader(address, committed)


class KafkaPythonWriter(Writer):
    def __init__(self, address: str, name: str, timeout_ms: int) -> None:
        self._producer = KafkaProducer(
            bootstrap_servers=address, transactional_id=name, transaction_timeout_ms=timeout_ms
        )
        self._do(self._producer.init_transactions)

    def begin(self) -> None:
        self._do(self._producer.begin_transaction)

    def send(self, *values: str) -> None:
        sent = [
            self._do(partial(self._producer.send, TOPIC, value.encode(), partition=0))
            for value in values
        ]
        for each in sent:
            self._do(partial(each.get, DEADLINE_SECONDS))

    def send_offset(self, group: str, topic: str, offset: int) -> None:
        offsets = {PythonPartition(topic, 0): OffsetAndMetadata(offset, "", -1)}
        self._do(lambda: self._producer.send_offsets_to_transaction(offsets, group))

    def commit(self) -> None:
        self._do(self._producer.commit_transaction)

    def abort(self) -> None:
        self._do(self._producer.abort_transaction)

    def close(self) -> None:
        self._producer.close(timeout=0)

    @staticmethod
    def _do(call: Callable[[], T]) -> T:
        try:
            return call()
        except PythonError as error:
            raise Refused(type(error).__name__, str(error)) from error


class KafkaPythonReader(Reader):
    def __init__(self, address: str, committed: bool) -> None:
        self._consumer = KafkaConsumer(
            bootstrap_servers=address,
            isolation_level="read_committed" if committed else "read_uncommitted",
            enable_auto_commit=False,
            fetch_max_wait_ms=50,
        )
        self._consumer.assign([PythonPartition(TOPIC, 0)])
        self._consumer.seek(PythonPartition(TOPIC, 0), 0)

    def take(self, count: int) -> list[str]:
        def more() -> list[str]:
            got = self._consumer.poll(100, max_records=1)
            return [message.value.decode() for some in got.values() for message in some]

        return taken(count, more)

    def close(self) -> None:
        self._consumer.close()


# --- aiokafka ----------------------------------------------------------------------------------


class Aiokafka(Client):
    def writer(self, address: str, name: str, timeout_ms: int) -> Writer:
        return AiokafkaWriter(address, name, timeout_ms)

    def reader(self, address: str, committed: bool) -> Reader:
        return AiokafkaReader(address, committed)


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        running = asyncio.run_coroutine_threadsafe(
            asyncio.wait_for(coroutine, DEADLINE_SECONDS), self._loop
        )
        try:
            return running.result()
        except AioError as error:
            raise Refused(type(error).__name__, str(error)) from error

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_SECONDS)
        self._loop.close()


class AiokafkaWriter(Writer):
    def __init__(self, address: str, name: str, timeout_ms: int) -> None:
        self._loop = Loop()
        self._loop.run(self._open(address, name, timeout_ms))

    async def _open(self, address: str, name: str, timeout_ms: int) -> None:
        self._producer = AIOKafkaProducer(
            bootstrap_servers=address, transactional_id=name, transaction_timeout_ms=timeout_ms
        )
        await self._producer.start()

    def begin(self) -> None:
        self._loop.run(self._producer.begin_transaction())

    def send(self, *values: str) -> None:
        self._loop.run(self._send([value.encode() for value in values]))

    async def _send(self, values: list[bytes]) -> None:
        for sent in [await self._producer.send(TOPIC, value, partition=0) for value in values]:
            await sent

    def send_offset(self, group: str, topic: str, offset: int) -> None:
        offsets = {AioPartition(topic, 0): offset}
        self._loop.run(self._producer.send_offsets_to_transaction(offsets, group))

    def commit(self) -> None:
        self._loop.run(self._producer.commit_transaction())

    def abort(self) -> None:
        self._loop.run(self._producer.abort_transaction())

    def close(self) -> None:
        try:
            self._loop.run(self._producer.stop())
        finally:
            self._loop.close()


class AiokafkaReader(Reader):
    def __init__(self, address: str, committed: bool) -> None:
        self._loop = Loop()
        self._loop.run(self._open(address, committed))

    async def _open(self, address: str, committed: bool) -> None:
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=address,
            isolation_level="read_committed" if committed else "read_uncommitted",
            fetch_max_wait_ms=50,
        )
        await self._consumer.start()
        self._consumer.assign([AioPartition(TOPIC, 0)])
        self._consumer.seek(AioPartition(TOPIC, 0), 0)

    def take(self, count: int) -> list[str]:
        return self._loop.run(self._take(count))

    async def _take(self, count: int) -> list[str]:
        return [(await self._consumer.getone()).value.decode() for _ in range(count)]

    def close(self) -> None:
        self._loop.run(self._consumer.stop())
        self._loop.close()


# --- what they share ---------------------------------------------------------------------------


def taken(count: int, more: Callable[[], list[str]]) -> list[str]:
    """So many values of a consumer that gives one at a time, or none yet."""
    values: list[str] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(values) < count:
        assert time.monotonic() < deadline, f"{values} of {count} values came"
        values += more()
    return values
