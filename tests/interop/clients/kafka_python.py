"""kafka-python, all of it Python."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

from kafka import (
    KafkaAdminClient,
    KafkaConsumer,
    KafkaProducer,
    OffsetAndMetadata,
    TopicPartition,
    errors,
)
from kafka.admin import ConfigResource, ConfigResourceType

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
    gather,
    kafka_name,
    refusing,
)
from tests.interop.programs import Client as Program
from tests.interop.running import DEADLINE_SECONDS


def name_of(raised: errors.KafkaError) -> str:
    code: int | None = getattr(raised, "errno", None)
    return type(raised).__name__ if code is None else kafka_name(code)


def refused() -> AbstractContextManager[None]:
    return refusing(errors.KafkaError, name_of)


class KafkaPython(interface.Client):
    null_headers: ClassVar = False
    fetches_ahead: ClassVar = False
    member_program: ClassVar = Program(
        sys.executable, "-m", "tests.interop.python.kafka_python_program"
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
        settings: dict[str, Any] = {"enable_idempotence": idempotent}
        settings["acks"] = acks if acks == "all" else int(acks)
        if compression is not None:
            settings["compression_type"] = None if compression == "none" else compression
            settings["linger_ms"] = 20
        producer = KafkaProducer(bootstrap_servers=address, **settings)
        self._alive.callback(producer.close)
        return Publisher(producer)

    def reader(
        self,
        address: str,
        start: Start = "start",
        topic: str = TOPIC,
        partitions: Sequence[int] = (0,),
        *,
        committed: bool = False,
    ) -> Reader:
        consumer = KafkaConsumer(
            bootstrap_servers=address,
            isolation_level="read_committed" if committed else "read_uncommitted",
            auto_offset_reset="none",
            enable_auto_commit=False,
            fetch_max_wait_ms=50,
        )
        self._alive.callback(consumer.close)
        places = [TopicPartition(topic, number) for number in partitions]
        consumer.assign(places)
        for place in places:
            seek(consumer, place, start)
        return Reader(consumer, topic)

    def writer(self, address: str, name: str, timeout_ms: int) -> Writer:
        writer = Writer(
            KafkaProducer(
                bootstrap_servers=address, transactional_id=name, transaction_timeout_ms=timeout_ms
            )
        )
        self._alive.callback(writer.close)
        return writer

    def member(self, address: str, group: str, instance: str | None = None) -> Member:
        consumer = KafkaConsumer(
            bootstrap_servers=address,
            client_id=self.client_id,
            group_id=group,
            group_instance_id=instance,
            heartbeat_interval_ms=200,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            fetch_max_wait_ms=50,
        )
        self._alive.callback(consumer.close)
        consumer.subscribe([TOPIC])
        return Member(consumer, TOPIC)

    def admin(self, address: str) -> Admin:
        client = KafkaAdminClient(bootstrap_servers=address)
        self._alive.callback(client.close)
        return Admin(client)


def seek(consumer: KafkaConsumer, place: TopicPartition, start: Start) -> None:
    """Go there, and wait until the consumer knows the offset."""
    if isinstance(start, AtTime):
        consumer.seek(place, consumer.offsets_for_times({place: start.ms})[place].offset)
    elif start == "start":
        consumer.seek_to_beginning(place)
    elif start == "end":
        consumer.seek_to_end(place)
        consumer.position(place)
    else:
        consumer.seek(place, start)


class Publisher(interface.Publisher):
    def __init__(self, producer: KafkaProducer) -> None:
        self._producer = producer

    def send(self, topic: str, *messages: Message) -> list[int]:
        with refused():
            sent = [
                self._producer.send(
                    topic,
                    message.value,
                    key=message.key,
                    headers=list(message.headers),
                    partition=message.partition,
                    timestamp_ms=message.timestamp,
                )
                for message in messages
            ]
            return [one.get(DEADLINE_SECONDS).offset for one in sent]

    def close(self) -> None:
        self._producer.close()


class Writer(Publisher, interface.Writer):
    def __init__(self, producer: KafkaProducer) -> None:
        super().__init__(producer)
        with refused():
            producer.init_transactions()

    def begin(self) -> None:
        with refused():
            self._producer.begin_transaction()

    def send_offset(self, group: str, topic: str, offset: int) -> None:
        offsets = {TopicPartition(topic, 0): OffsetAndMetadata(offset, "", -1)}
        with refused():
            self._producer.send_offsets_to_transaction(offsets, group)

    def commit(self) -> None:
        with refused():
            self._producer.commit_transaction()

    def abort(self) -> None:
        with refused():
            self._producer.abort_transaction()

    def close(self) -> None:
        self._producer.close(timeout=0)


class Reader(interface.Reader):
    def __init__(self, consumer: KafkaConsumer, topic: str) -> None:
        self._consumer = consumer
        self._place = TopicPartition(topic, 0)

    def take(self, count: int) -> list[Message]:
        with refused():
            return gather(count, self._poll)

    def _poll(self, most: int) -> list[Message]:
        return [
            Message(
                one.value,
                one.key,
                tuple(one.headers),
                one.timestamp,
                one.partition,
                one.offset,
            )
            for came in self._consumer.poll(100, max_records=most).values()
            for one in came
        ]

    def bounds(self) -> tuple[int, int]:
        first = self._consumer.beginning_offsets([self._place])[self._place]
        return first, self._consumer.end_offsets([self._place])[self._place]

    def offset_at(self, time_ms: int) -> int | None:
        found = self._consumer.offsets_for_times({self._place: time_ms})[self._place]
        return None if found is None else found.offset

    def close(self) -> None:
        self._consumer.close()


class Member(Reader, interface.Member):
    def commit(self, offset: int, note: str = "") -> None:
        self._consumer.commit({self._place: OffsetAndMetadata(offset, note, -1)})


class Admin(interface.Admin):
    def __init__(self, client: KafkaAdminClient) -> None:
        self._client = client

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        configs: Mapping[str, str] | None = None,
        replicas: int = 1,
    ) -> None:
        wanted = {
            "num_partitions": partitions,
            "replication_factor": replicas,
            "configs": dict(configs or {}),
        }
        with refused():
            self._client.create_topics({name: wanted}, wait_for_metadata=True)

    def delete_topic(self, name: str) -> None:
        with refused():
            self._client.delete_topics([name])

    def topics(self) -> set[str]:
        return set(self._client.list_topics())

    def partitions(self, topic: str) -> int:
        (described,) = self._client.describe_topics([topic])
        return len(described["partitions"])

    def add_partitions(self, topic: str, total: int) -> None:
        with refused():
            self._client.create_partitions({topic: total})

    def configs(self, topic: str) -> dict[str, str]:
        told = self._client.describe_configs([resource(topic)])["topic"][topic]
        return {name: config["value"] for name, config in told.items()}

    def set_config(self, topic: str, name: str, value: str | None) -> None:
        change = resource(topic, {name: value or ""})
        call = self._client.reset_configs if value is None else self._client.alter_configs
        # Otherwise it asks for all configs first, and refuses other names by itself.
        told = call([change], raise_on_unknown=False)["topic"][topic]
        if told != "OK":
            (code,) = re.findall(r"\[Error (\d+)\]", told)
            raise Refused(kafka_name(int(code)), told)

    def delete_records(self, topic: str, before: int) -> int:
        place = TopicPartition(topic, 0)
        with refused():
            deleted = self._client.delete_records({place: before})
        low: int = deleted[place]["low_watermark"]
        return low

    def groups(self) -> list[str]:
        listed = self._client.list_groups()
        return [group["group_id"] for group in listed if group["protocol_type"] == "consumer"]

    def group(self, name: str) -> Group:
        described = self._client.describe_groups([name])[name]
        members = [
            GroupMember(
                one["client_id"],
                [
                    (at["topic"], partition)
                    for at in one["member_assignment"]["assigned_partitions"]
                    for partition in at["partitions"]
                ],
            )
            for one in described["members"]
        ]
        return Group(described["group_state"], members)

    def committed(self, group: str) -> dict[tuple[str, int], Committed]:
        told = self._client.list_group_offsets(group)[group]
        return {tuple(place): Committed(at.offset, at.metadata) for place, at in told.items()}

    def move(self, group: str, topic: str, offset: int) -> None:
        place = TopicPartition(topic, 0)
        wanted = {place: OffsetAndMetadata(offset, "", -1)}
        check(self._client.alter_group_offsets(group, wanted)[place])

    def forget(self, group: str, topic: str) -> None:
        place = TopicPartition(topic, 0)
        check(self._client.delete_group_offsets(group, [place])[place])

    def delete_group(self, name: str) -> None:
        told = self._client.delete_groups([name])[name]
        check(errors.NoError if told == "OK" else getattr(errors, told))


def check(told: type[errors.KafkaError]) -> None:
    """Raise the error that an answer tells, if it tells one."""
    if told is not errors.NoError:
        raise Refused(kafka_name(told.errno), told.__name__)


def resource(topic: str, configs: Mapping[str, str] | None = None) -> ConfigResource:
    return ConfigResource(ConfigResourceType.TOPIC, topic, dict(configs) if configs else None)
