"""aiokafka, a client for asyncio. All its parts run in one event loop, in a thread of its own."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError

from tests.interop.clients import interface
from tests.interop.clients.interface import (
    TOPIC,
    AtTime,
    Committed,
    Group,
    GroupMember,
    Message,
    Refused,
    Start,
    kafka_name,
    refusing,
)
from tests.interop.clients.wire import assigned_partitions
from tests.interop.programs import Client as Program
from tests.interop.running import DEADLINE_SECONDS

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, Any]], Any]


def name_of(raised: KafkaError) -> str:
    code: int | None = getattr(raised, "errno", None)
    return type(raised).__name__ if code is None or code < 0 else kafka_name(code)


class Aiokafka(interface.Client):
    null_headers: ClassVar = False
    member_program: ClassVar = Program(
        sys.executable, "-m", "tests.interop.python.aiokafka_program"
    )
    producer_program: ClassVar = member_program

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._alive.callback(self._end_loop)

    def publisher(
        self,
        address: str,
        *,
        compression: str | None = None,
        acks: Literal["0", "1", "all"] = "all",
        idempotent: bool = False,
    ) -> Publisher:
        settings: dict[str, Any] = {"enable_idempotence": idempotent}
        settings["acks"] = acks if acks == "all" else int(acks)
        if compression is not None:
            settings["compression_type"] = None if compression == "none" else compression
            settings["linger_ms"] = 20
        made = lambda: AIOKafkaProducer(bootstrap_servers=address, **settings)  # noqa: E731
        return Publisher(self._run, self._started(made))

    def reader(
        self,
        address: str,
        start: Start = "start",
        topic: str = TOPIC,
        partitions: Sequence[int] = (0,),
        *,
        committed: bool = False,
    ) -> Reader:
        consumer = self._started(
            lambda: AIOKafkaConsumer(
                bootstrap_servers=address,
                isolation_level="read_committed" if committed else "read_uncommitted",
                auto_offset_reset="none",
                fetch_max_wait_ms=50,
            )
        )
        places = [TopicPartition(topic, number) for number in partitions]

        async def begin() -> None:
            consumer.assign(places)
            for place in places:
                await seek(consumer, place, start)

        self._run(begin())
        return Reader(self._run, consumer, topic)

    def writer(self, address: str, name: str, timeout_ms: int) -> Writer:
        producer = self._started(
            lambda: AIOKafkaProducer(
                bootstrap_servers=address, transactional_id=name, transaction_timeout_ms=timeout_ms
            )
        )
        return Writer(self._run, producer)

    def member(self, address: str, group: str, instance: str | None = None) -> Member:
        consumer = self._started(
            lambda: AIOKafkaConsumer(
                TOPIC,
                bootstrap_servers=address,
                client_id=self.client_id,
                group_id=group,
                group_instance_id=instance,
                heartbeat_interval_ms=200,
                auto_offset_reset="earliest",
                enable_auto_commit=False,
                fetch_max_wait_ms=50,
            )
        )
        return Member(self._run, consumer, TOPIC)

    def admin(self, address: str) -> Admin:
        async def start() -> AIOKafkaAdminClient:
            client = AIOKafkaAdminClient(bootstrap_servers=address)
            await client.start()
            return client

        client = self._run(start())
        self._alive.callback(lambda: self._run(client.close()))
        return Admin(self._run, client)

    def _started(self, make: Callable[[], T]) -> T:
        """Start a producer or consumer, which is stopped with this client."""

        async def start() -> Any:
            client: Any = make()
            await client.start()
            return client

        client: Any = self._run(start())
        self._alive.callback(lambda: self._run(client.stop()))
        started: T = client
        return started

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        bounded = asyncio.wait_for(coroutine, DEADLINE_SECONDS)
        with refusing(KafkaError, name_of):
            return asyncio.run_coroutine_threadsafe(bounded, self._loop).result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_SECONDS)
        self._loop.close()


async def seek(consumer: AIOKafkaConsumer, place: TopicPartition, start: Start) -> None:
    if isinstance(start, AtTime):
        found = await consumer.offsets_for_times({place: start.ms})
        consumer.seek(place, found[place].offset)
    elif start == "start":
        await consumer.seek_to_beginning(place)
    elif start == "end":
        await consumer.seek_to_end(place)
    else:
        consumer.seek(place, start)


class Publisher(interface.Publisher):
    def __init__(self, run: Run, producer: AIOKafkaProducer) -> None:
        self._run = run
        self._producer = producer

    def send(self, topic: str, *messages: Message) -> list[int]:
        offsets: list[int] = self._run(self._send(topic, messages))
        return offsets

    async def _send(self, topic: str, messages: Sequence[Message]) -> list[int | None]:
        sent = [
            await self._producer.send(
                topic,
                message.value,
                message.key,
                headers=list(message.headers),
                partition=message.partition,
                timestamp_ms=message.timestamp,
            )
            for message in messages
        ]
        # Without acknowledgements there is nothing to be told.
        places = [await one for one in sent]
        return [None if place is None else place.offset for place in places]

    def close(self) -> None:
        self._run(self._producer.stop())


class Writer(Publisher, interface.Writer):
    def begin(self) -> None:
        self._run(self._producer.begin_transaction())

    def send_offset(self, group: str, topic: str, offset: int) -> None:
        offsets = {TopicPartition(topic, 0): offset}
        self._run(self._producer.send_offsets_to_transaction(offsets, group))

    def commit(self) -> None:
        self._run(self._producer.commit_transaction())

    def abort(self) -> None:
        self._run(self._producer.abort_transaction())


class Reader(interface.Reader):
    def __init__(self, run: Run, consumer: AIOKafkaConsumer, topic: str) -> None:
        self._run = run
        self._consumer = consumer
        self._place = TopicPartition(topic, 0)

    def take(self, count: int) -> list[Message]:
        async def take() -> list[Any]:
            return [await self._consumer.getone() for _ in range(count)]

        return [
            Message(
                one.value,
                one.key,
                tuple(one.headers),
                one.timestamp,
                one.partition,
                one.offset,
            )
            for one in self._run(take())
        ]

    def bounds(self) -> tuple[int, int]:
        first = self._run(self._consumer.beginning_offsets([self._place]))[self._place]
        return first, self._run(self._consumer.end_offsets([self._place]))[self._place]

    def offset_at(self, time_ms: int) -> int | None:
        found = self._run(self._consumer.offsets_for_times({self._place: time_ms}))[self._place]
        return None if found is None else found.offset

    def close(self) -> None:
        self._run(self._consumer.stop())


class Member(Reader, interface.Member):
    def commit(self, offset: int, note: str = "") -> None:
        self._run(self._consumer.commit({self._place: (offset, note)}))


class Admin(interface.Admin):
    def __init__(self, run: Run, client: AIOKafkaAdminClient) -> None:
        self._run = run
        self._client = client

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        configs: Mapping[str, str] | None = None,
        replicas: int = 1,
    ) -> None:
        wanted = NewTopic(name, partitions, replicas, topic_configs=dict(configs or {}))
        answer = self._run(self._client.create_topics([wanted]))
        ((_, code, *_),) = answer.topic_errors
        check(code)

    def delete_topic(self, name: str) -> None:
        answer = self._run(self._client.delete_topics([name]))
        ((_, code, *_),) = answer.topic_error_codes
        check(code)

    def topics(self) -> set[str]:
        return set(self._run(self._client.list_topics()))

    def partitions(self, topic: str) -> int:
        (described,) = self._run(self._client.describe_topics([topic]))
        return len(described["partitions"])

    def add_partitions(self, topic: str, total: int) -> None:
        answer = self._run(self._client.create_partitions({topic: NewPartitions(total)}))
        ((_, code, *_),) = answer.topic_errors
        check(code)

    def configs(self, topic: str) -> dict[str, str]:
        asked = ConfigResource(ConfigResourceType.TOPIC, topic)
        (answer,) = self._run(self._client.describe_configs([asked]))
        ((code, *_, entries),) = answer.resources
        check(code)
        return {name: value for name, value, _, source, *_ in entries if source == SET_IN_TOPIC}

    def replace_configs(self, topic: str, configs: Mapping[str, str]) -> None:
        wanted = ConfigResource(ConfigResourceType.TOPIC, topic, dict(configs))
        (answer,) = self._run(self._client.alter_configs([wanted]))
        ((code, *_),) = answer.resources
        check(code)

    def delete_records(self, topic: str, before: int) -> int:
        place = TopicPartition(topic, 0)
        wanted = {place: RecordsToDelete(before_offset=before)}
        low: int = self._run(self._client.delete_records(wanted))[place]
        return low

    def groups(self) -> list[str]:
        listed = self._run(self._client.list_consumer_groups())
        return [name for name, protocol_type in listed if protocol_type == "consumer"]

    def group(self, name: str) -> Group:
        (answer,) = self._run(self._client.describe_consumer_groups([name]))
        ((code, _, state, _, _, members, *_),) = answer.groups
        check(code)
        return Group(
            state,
            [
                GroupMember(client_id, assigned_partitions(assignment))
                for _, client_id, _, _, assignment, *_ in members
            ],
        )

    def committed(self, group: str) -> dict[tuple[str, int], Committed]:
        told = self._run(self._client.list_consumer_group_offsets(group))
        return {tuple(place): Committed(at.offset, at.metadata) for place, at in told.items()}


#: Where a config comes from: it is a dynamic one of the topic.
SET_IN_TOPIC = 1


def check(code: int) -> None:
    """Raise the error that an answer tells, if it tells one."""
    if code:
        raise Refused(kafka_name(code), "in an answer")
