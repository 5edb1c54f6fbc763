"""kafkajs, a client for Node.js.

It has gzip of its own; other codecs are plug-ins (javascript/codecs.mjs). It reads in groups only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from tests.interop.clients import interface
from tests.interop.clients.driven import GROUPS, DrivenClient, Reader, Settings, data
from tests.interop.clients.interface import (
    TOPIC,
    AtTime,
    Committed,
    Group,
    GroupMember,
    Refused,
    Start,
)
from tests.interop.clients.wire import assigned_partitions
from tests.interop.driver import Client as Driven
from tests.interop.languages import javascript
from tests.interop.programs import Client as Program

CONFIGS_OF_A_TOPIC: Final = 2


class Kafkajs(DrivenClient):
    client_id: ClassVar = "kafkajs"
    null_headers: ClassVar = False
    repeated_headers: ClassVar = False
    refusal_logs: ClassVar = (
        "Topic creation errors",
        "Response AlterConfigs",
        "Response CreatePartitions",
        "Response DeleteGroups",
        "Response DeleteRecords",
    )
    member_program: ClassVar = Program(*javascript("kafkajs-program.mjs"))
    producer_program: ClassVar = member_program

    def publisher_settings(self, compression: str | None, acks: str, idempotent: bool) -> Settings:
        return {
            "compression": compression or "none",
            "acks": -1 if acks == "all" else int(acks),
            "idempotent": idempotent,
        }

    def reader_settings(self, committed: bool) -> Settings:
        return {"readUncommitted": not committed, "groupId": next(GROUPS)}

    def writer_settings(self, name: str, timeout_ms: int) -> Settings:
        return {
            "transactionalId": name,
            "transactionTimeout": timeout_ms,
            "idempotent": True,
            "maxInFlightRequests": 1,
        }

    def find_offset(self, address: str, topic: str, what: Start) -> int | None:
        admin = self.driven_admin(address)
        (offsets,) = admin.method("fetchTopicOffsets", topic)
        if not isinstance(what, AtTime):
            return int(offsets["low" if what == "start" else "high"])
        (found,) = admin.method("fetchTopicOffsetsByTimestamp", topic, what.ms)
        # Behind the last time, it tells the end.
        return None if found["offset"] == offsets["high"] else int(found["offset"])

    def member(self, address: str, group: str, instance: str | None = None) -> Member:
        assert instance is None, "it has no setting for this"
        consumer = self.open("consumer", address, {"groupId": group})
        consumer.call("subscribe", topics=[TOPIC])
        return Member(self, consumer, address, TOPIC)

    def admin(self, address: str) -> Admin:
        return Admin(self, self.driven_admin(address))


class Member(Reader, interface.Member):
    def commit(self, offset: int, note: str = "") -> None:
        place = {"topic": self._topic, "partition": 0, "offset": str(offset)}
        self._consumer.method("commitOffsets", [{**place, "metadata": note}])


class Admin(interface.Admin):
    def __init__(self, client: Kafkajs, admin: Driven) -> None:
        self._client = client
        self._admin = admin

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        configs: Mapping[str, str] | None = None,
        replicas: int = 1,
    ) -> None:
        wanted = {"topic": name, "numPartitions": partitions, "replicationFactor": replicas}
        wanted["configEntries"] = [
            {"name": config, "value": value} for config, value in (configs or {}).items()
        ]
        if self._call("createTopics", {"topics": [wanted]}) is False:
            # It does not take this for an error.
            raise Refused("TOPIC_ALREADY_EXISTS", name)

    def delete_topic(self, name: str) -> None:
        self._call("deleteTopics", {"topics": [name]})

    def topics(self) -> set[str]:
        return set(self._call("listTopics"))

    def partitions(self, topic: str) -> int:
        (described,) = self._call("fetchTopicMetadata", {"topics": [topic]})["topics"]
        return len(described["partitions"])

    def add_partitions(self, topic: str, total: int) -> None:
        wanted = {"topic": topic, "count": total}
        self._call("createPartitions", {"topicPartitions": [wanted]})

    def configs(self, topic: str) -> dict[str, str]:
        asked = {"includeSynonyms": True, "resources": [topic_resource(topic)]}
        (described,) = self._call("describeConfigs", asked)["resources"]
        return {
            entry["configName"]: entry["configValue"]
            for entry in described["configEntries"]
            if not entry["isDefault"]
        }

    def replace_configs(self, topic: str, configs: Mapping[str, str]) -> None:
        entries = [{"name": name, "value": value} for name, value in configs.items()]
        wanted = {**topic_resource(topic), "configEntries": entries}
        self._call("alterConfigs", {"validateOnly": False, "resources": [wanted]})

    def delete_records(self, topic: str, before: int) -> int:
        # It knows no topic but those that it was asked about.
        self._call("fetchTopicOffsets", topic)
        partitions = [{"partition": 0, "offset": str(before)}]
        self._call("deleteTopicRecords", {"topic": topic, "partitions": partitions})
        (offsets,) = self._call("fetchTopicOffsets", topic)
        return int(offsets["low"])

    def groups(self) -> list[str]:
        listed = self._call("listGroups")["groups"]
        return [group["groupId"] for group in listed if group["protocolType"] == "consumer"]

    def group(self, name: str) -> Group:
        (described,) = self._call("describeGroups", [name])["groups"]
        members = [
            GroupMember(one["clientId"], assigned_partitions(data(one["memberAssignment"]) or b""))
            for one in described["members"]
        ]
        return Group(described["state"], members)

    def committed(self, group: str) -> dict[tuple[str, int], Committed]:
        told = self._call("fetchOffsets", {"groupId": group, "topics": [TOPIC]})
        return {
            (topic["topic"], at["partition"]): Committed(int(at["offset"]), at["metadata"] or "")
            for topic in told
            for at in topic["partitions"]
        }

    def move(self, group: str, topic: str, offset: int) -> None:
        """Join the group and leave it again, which takes the client five seconds."""
        partitions = [{"partition": 0, "offset": str(offset)}]
        self._call("setOffsets", {"groupId": group, "topic": topic, "partitions": partitions})

    def delete_group(self, name: str) -> None:
        self._call("deleteGroups", [name])

    def _call(self, name: str, *given: Any) -> Any:
        with self._client.refused():
            return self._admin.method(name, *given)


def topic_resource(topic: str) -> dict[str, Any]:
    return {"type": CONFIGS_OF_A_TOPIC, "name": topic}
