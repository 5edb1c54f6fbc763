"""confluent-kafka, that is librdkafka."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Final, Literal

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from tests.interop.clients import interface
from tests.interop.clients.interface import (
    TOPIC,
    AtTime,
    Committed,
    Group,
    GroupMember,
    Headers,
    Message,
    Start,
    gather,
    kafka_name,
    refusing,
)
from tests.interop.programs import Client as Program
from tests.interop.running import DEADLINE_SECONDS


def silent(error: KafkaError) -> None:
    """Do not print that a client was fenced or a broker is away: the caller gets the error."""


ENDS: Final = {"start": OFFSET_BEGINNING, "end": OFFSET_END}
QUIET: Final[Mapping[str, Any]] = {"log_level": 0, "error_cb": silent}


def name_of(raised: KafkaException) -> str:
    error: KafkaError = raised.args[0]
    if error.code() == KafkaError._AUTO_OFFSET_RESET:
        # The broker's error, for a reader that is not to go on elsewhere.
        return "OFFSET_OUT_OF_RANGE"
    if error.code() == KafkaError._FATAL and "Static consumer fenced" in error.str():
        return "FENCED_INSTANCE_ID"
    return kafka_name(error.code()) if error.code() >= 0 else error.name()


class Confluent(interface.Client):
    member_program: ClassVar = Program(
        sys.executable, "-m", "tests.interop.python.confluent_program"
    )
    producer_program: ClassVar = member_program

    def publisher(
        self,
        address: str,
        *,
        compression: str | None = None,
        acks: Literal["0", "1", "all"] = "all",
        idempotent: bool = False,
    ) -> Publisher:
        settings: dict[str, Any] = {"acks": acks, "enable.idempotence": idempotent, "linger.ms": 0}
        if compression is not None:
            settings |= {"compression.type": compression, "linger.ms": 50}
        return Publisher(Producer({"bootstrap.servers": address, **QUIET, **settings}))

    def reader(
        self,
        address: str,
        start: Start = "start",
        topic: str = TOPIC,
        partitions: Sequence[int] = (0,),
        *,
        committed: bool = False,
    ) -> Reader:
        consumer = Consumer(
            {
                "bootstrap.servers": address,
                "group.id": "nobody",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "check.crcs": True,
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "fetch.wait.max.ms": 50,
                **QUIET,
            }
        )
        self._alive.callback(consumer.close)
        consumer.assign([beginning(consumer, topic, number, start) for number in partitions])
        return Reader(consumer, topic)

    def writer(self, address: str, name: str, timeout_ms: int) -> Writer:
        writer = Writer(address, name, timeout_ms)
        self._alive.callback(writer.close)
        return writer

    def member(self, address: str, group: str, instance: str | None = None) -> Member:
        static = {} if instance is None else {"group.instance.id": instance}
        consumer = Consumer(
            {
                "bootstrap.servers": address,
                "group.id": group,
                **static,
                "client.id": self.client_id,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "heartbeat.interval.ms": 100,
                **QUIET,
            }
        )
        member = Member(consumer, TOPIC)
        self._alive.callback(member.close)
        consumer.subscribe([TOPIC])
        return member

    def admin(self, address: str) -> Admin:
        return Admin(AdminClient({"bootstrap.servers": address, **QUIET}))


def beginning(consumer: Consumer, topic: str, partition: int, start: Start) -> TopicPartition:
    if isinstance(start, AtTime):
        wanted = TopicPartition(topic, partition, start.ms)
        (found,) = consumer.offsets_for_times([wanted], DEADLINE_SECONDS)
        return found
    offset = ENDS[start] if isinstance(start, str) else start
    return TopicPartition(topic, partition, offset)


class Publisher(interface.Publisher):
    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    def send(self, topic: str, *messages: Message) -> list[int]:
        offsets: list[int] = []
        failed: list[KafkaError] = []

        def delivered(error: KafkaError | None, message: Any) -> None:
            if error is None:
                offsets.append(message.offset())
            else:
                failed.append(error)

        with refusing(KafkaException, name_of):
            for message in messages:
                places: Any = {"partition": message.partition, "timestamp": message.timestamp}
                self._producer.produce(
                    topic,
                    message.value,
                    message.key,
                    headers=list(message.headers),
                    on_delivery=delivered,
                    **{name: value for name, value in places.items() if value is not None},
                )
            self._wait_for_answers()
            if failed:
                raise KafkaException(failed[0])
        return offsets

    def _wait_for_answers(self) -> None:
        """Do what `flush` is for, without its fault.

        If `flush` has a fatal error to raise, it goes on calling callbacks. They fail because of it
        and at times lose it, which is a SystemError. `poll` raises at once, if it does not wait for
        longer than this.
        """
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(self._producer):
            assert time.monotonic() < deadline, f"{len(self._producer)} records were not answered"
            self._producer.poll(0.1)

    def close(self) -> None:
        self._producer.purge()


class Writer(Publisher, interface.Writer):
    def __init__(self, address: str, name: str, timeout_ms: int) -> None:
        self._address = address
        transaction = {"transactional.id": name, "transaction.timeout.ms": timeout_ms}
        settings = {"bootstrap.servers": address, "linger.ms": 0, **QUIET, **transaction}
        super().__init__(Producer(settings))
        self._do(self._producer.init_transactions, DEADLINE_SECONDS)

    def begin(self) -> None:
        self._do(self._producer.begin_transaction)

    def send_offset(self, group: str, topic: str, offset: int) -> None:
        consumer = Consumer({"bootstrap.servers": self._address, "group.id": group, **QUIET})
        self._do(
            self._producer.send_offsets_to_transaction,
            [TopicPartition(topic, 0, offset)],
            consumer.consumer_group_metadata(),
            DEADLINE_SECONDS,
        )
        consumer.close()

    def commit(self) -> None:
        self._do(self._producer.commit_transaction, DEADLINE_SECONDS)

    def abort(self) -> None:
        self._do(self._producer.abort_transaction, DEADLINE_SECONDS)

    @staticmethod
    def _do(call: Callable[..., object], *given: Any) -> None:
        with refusing(KafkaException, name_of):
            call(*given)


class Reader(interface.Reader):
    def __init__(self, consumer: Consumer, topic: str) -> None:
        self._consumer = consumer
        self._topic = topic

    def take(self, count: int) -> list[Message]:
        with refusing(KafkaException, name_of):
            return gather(count, self._consume)

    def _consume(self, most: int) -> list[Message]:
        came = self._consumer.consume(most, 0.1)
        for error in [message.error() for message in came]:
            if error is not None:
                raise KafkaException(error)
        return [
            Message(
                one.value(),
                one.key(),
                headers_of(one),
                one.timestamp()[1],
                one.partition(),
                one.offset(),
            )
            for one in came
        ]

    def bounds(self) -> tuple[int, int]:
        place = TopicPartition(self._topic, 0)
        return self._consumer.get_watermark_offsets(place, DEADLINE_SECONDS)

    def offset_at(self, time_ms: int) -> int | None:
        found = beginning(self._consumer, self._topic, 0, AtTime(time_ms)).offset
        return None if found == OFFSET_END else found

    def close(self) -> None:
        self._consumer.close()


def headers_of(message: Any) -> Headers:
    return tuple(message.headers() or ())


class Member(Reader, interface.Member):
    def commit(self, offset: int, note: str = "") -> None:
        place = TopicPartition(self._topic, 0, offset, note)
        self._consumer.commit(offsets=[place], asynchronous=False)


class Admin(interface.Admin):
    def __init__(self, client: AdminClient) -> None:
        self._client = client

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        configs: Mapping[str, str] | None = None,
        replicas: int = 1,
    ) -> None:
        wanted = NewTopic(name, partitions, replicas, config=dict(configs or {}))
        wait(self._client.create_topics([wanted]))

    def delete_topic(self, name: str) -> None:
        wait(self._client.delete_topics([name]))

    def topics(self) -> set[str]:
        return set(self._client.list_topics(timeout=DEADLINE_SECONDS).topics)

    def partitions(self, topic: str) -> int:
        return len(self._client.list_topics(topic, DEADLINE_SECONDS).topics[topic].partitions)

    def add_partitions(self, topic: str, total: int) -> None:
        wait(self._client.create_partitions([NewPartitions(topic, total)]))

    def configs(self, topic: str) -> dict[str, str]:
        told = wait(self._client.describe_configs([ConfigResource(ResourceType.TOPIC, topic)]))
        return {name: entry.value for name, entry in told.items() if not entry.is_default}

    def set_config(self, topic: str, name: str, value: str | None) -> None:
        change = AlterConfigOpType.DELETE if value is None else AlterConfigOpType.SET
        entry = ConfigEntry(name, value, incremental_operation=change)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        wait(self._client.incremental_alter_configs([resource]))

    def delete_records(self, topic: str, before: int) -> int:
        deleted = wait(self._client.delete_records([TopicPartition(topic, 0, before)]))
        low: int = deleted.low_watermark
        return low

    def groups(self) -> list[str]:
        listed = result(self._client.list_consumer_groups())
        return [group.group_id for group in listed.valid]

    def group(self, name: str) -> Group:
        described = wait(self._client.describe_consumer_groups([name]))
        members = [
            GroupMember(
                one.client_id,
                [(at.topic, at.partition) for at in one.assignment.topic_partitions],
            )
            for one in described.members
        ]
        return Group(described.state.name.capitalize(), members)

    def committed(self, group: str) -> dict[tuple[str, int], Committed]:
        asked = self._client.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])
        return {
            (at.topic, at.partition): Committed(at.offset, at.metadata or "")
            for at in wait(asked).topic_partitions
        }

    def move(self, group: str, topic: str, offset: int) -> None:
        moved = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, offset)])
        wait(self._client.alter_consumer_group_offsets([moved]))

    def delete_group(self, name: str) -> None:
        wait(self._client.delete_consumer_groups([name]))


def wait(asked: Mapping[Any, Future[Any]]) -> Any:
    """Return the answer to a question about one thing."""
    (answer,) = asked.values()
    return result(answer)


def result(answer: Future[Any]) -> Any:
    with refusing(KafkaException, name_of):
        return answer.result(DEADLINE_SECONDS)
