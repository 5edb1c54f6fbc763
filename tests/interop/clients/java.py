"""kafka-clients, Kafka's own client for Java."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from tests.interop.clients import interface
from tests.interop.clients.driven import DrivenClient, Reader, Settings
from tests.interop.clients.interface import TOPIC, AtTime, Committed, Group, GroupMember, Start
from tests.interop.driver import Client as Driven
from tests.interop.languages import java
from tests.interop.programs import Client as Program

#: Kafka's names for what the client raises.
NAMES: Final[Mapping[str, str]] = {
    "FencedInstanceIdException": "FENCED_INSTANCE_ID",
    "GroupIdNotFoundException": "GROUP_ID_NOT_FOUND",
    "GroupNotEmptyException": "NON_EMPTY_GROUP",
    "GroupSubscribedToTopicException": "GROUP_SUBSCRIBED_TO_TOPIC",
    "InvalidConfigurationException": "INVALID_CONFIG",
    "InvalidPartitionsException": "INVALID_PARTITIONS",
    "InvalidReplicationFactorException": "INVALID_REPLICATION_FACTOR",
    "InvalidTopicException": "INVALID_TOPIC_EXCEPTION",
    "OffsetOutOfRangeException": "OFFSET_OUT_OF_RANGE",
    "TopicExistsException": "TOPIC_ALREADY_EXISTS",
    "UnknownMemberIdException": "UNKNOWN_MEMBER_ID",
    "UnknownTopicOrPartitionException": "UNKNOWN_TOPIC_OR_PARTITION",
}
#: The classic protocol, in which the members assign, and the assignor that it begins with.
CLASSIC_GROUP: Final[Settings] = {
    "group.protocol": "classic",
    "heartbeat.interval.ms": 200,
    "partition.assignment.strategy": "org.apache.kafka.clients.consumer.RangeAssignor",
}


class Java(DrivenClient):
    refusal_logs: ClassVar = ("OFFSET_OUT_OF_RANGE", "UnknownTopicOrPartitionException")
    member_program: ClassVar = Program(*java("Program"))
    producer_program: ClassVar = member_program

    def kafka_name(self, name: str) -> str:
        return NAMES.get(name, name)

    def publisher_settings(self, compression: str | None, acks: str, idempotent: bool) -> Settings:
        settings: dict[str, Any] = {"acks": acks, "enable.idempotence": idempotent}
        if compression is not None:
            settings |= {"compression.type": compression, "linger.ms": 50}
        return settings

    def reader_settings(self, committed: bool) -> Settings:
        return {
            "auto.offset.reset": "none",
            "isolation.level": "read_committed" if committed else "read_uncommitted",
            "fetch.max.wait.ms": 50,
        }

    def writer_settings(self, name: str, timeout_ms: int) -> Settings:
        return {"transactional.id": name, "transaction.timeout.ms": timeout_ms}

    def find_offset(self, address: str, topic: str, what: Start) -> int | None:
        wanted = what.ms if isinstance(what, AtTime) else what
        admin = self.driven_admin(address)
        ((offset, _),) = admin.call("list_offsets", partitions=[[topic, 0, wanted]])
        return None if offset < 0 else int(offset)

    def member(self, address: str, group: str, instance: str | None = None) -> Member:
        settings: dict[str, Any] = {
            "client.id": self.client_id,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
        if instance is not None:
            settings["group.instance.id"] = instance
        consumer = self.open("consumer", address, {**CLASSIC_GROUP, **settings})
        consumer.call("subscribe", topics=[TOPIC])
        return Member(self, consumer, address, TOPIC)

    def admin(self, address: str) -> Admin:
        return Admin(self, self.driven_admin(address))


class Member(Reader, interface.Member):
    def commit(self, offset: int, note: str = "") -> None:
        self._consumer.call("commit", offsets=[[self._topic, 0, offset, note]])


class Admin(interface.Admin):
    def __init__(self, client: Java, admin: Driven) -> None:
        self._client = client
        self._admin = admin

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        configs: Mapping[str, str] | None = None,
        replicas: int = 1,
    ) -> None:
        wanted = {"name": name, "partitions": partitions, "replicas": replicas}
        self._call("create_topics", topics=[{**wanted, "configs": dict(configs or {})}])

    def delete_topic(self, name: str) -> None:
        self._call("delete_topics", topics=[name])

    def topics(self) -> set[str]:
        return set(self._call("list_topics"))

    def partitions(self, topic: str) -> int:
        return len(self._call("describe_topics", topics=[topic])[topic]["partitions"])

    def add_partitions(self, topic: str, total: int) -> None:
        self._call("create_partitions", topic=topic, total=total)

    def configs(self, topic: str) -> dict[str, str]:
        described = self._call("describe_configs", kind="TOPIC", name=topic)
        return {
            name: config["value"]
            for name, config in described.items()
            if config["source"] == "DYNAMIC_TOPIC_CONFIG"
        }

    def set_config(self, topic: str, name: str, value: str | None) -> None:
        change = [name, "DELETE"] if value is None else [name, "SET", value]
        self._call("alter_configs", kind="TOPIC", name=topic, changes=[change])

    def delete_records(self, topic: str, before: int) -> int:
        (low,) = self._call("delete_records", partitions=[[topic, 0, before]])
        return int(low)

    def groups(self) -> list[str]:
        listed = self._call("list_groups")
        return [name for name, group in listed.items() if group["protocol"] == "consumer"]

    def group(self, name: str) -> Group:
        described = self._call("describe_groups", groups=[name])[name]
        members = [
            GroupMember(one["client"], [(topic, number) for topic, number in one["partitions"]])
            for one in described["members"]
        ]
        return Group(described["state"], members)

    def committed(self, group: str) -> dict[tuple[str, int], Committed]:
        told = self._call("group_offsets", group=group)
        return {
            (topic, partition): Committed(offset, note) for topic, partition, offset, note in told
        }

    def move(self, group: str, topic: str, offset: int) -> None:
        self._call("alter_group_offsets", group=group, offsets=[[topic, 0, offset]])

    def forget(self, group: str, topic: str) -> None:
        self._call("delete_group_offsets", group=group, partitions=[[topic, 0]])

    def delete_group(self, name: str) -> None:
        self._call("delete_groups", groups=[name])

    def _call(self, what: str, **arguments: Any) -> Any:
        with self._client.refused():
            return self._admin.call(what, **arguments)
