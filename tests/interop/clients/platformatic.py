"""@platformatic/kafka, a client for Node.js.

Node.js has zstd from 22.15 on; an older one gets it from javascript/codecs.mjs. The client reads in
groups only, and logs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from tests.interop.clients import interface
from tests.interop.clients.driven import GROUPS, DrivenClient, Reader, Settings
from tests.interop.clients.interface import TOPIC, AtTime, Committed, Group, GroupMember, Start
from tests.interop.driver import Client as Driven
from tests.interop.languages import javascript
from tests.interop.programs import Client as Program

CONFIGS_OF_A_TOPIC: Final = 2
SET: Final = 0
DELETE: Final = 1
#: Where a config comes from: it is a dynamic one of the topic.
SET_IN_TOPIC: Final = 1
EARLIEST: Final = -2
LATEST: Final = -1
#: Unless it is told otherwise, it says that it is producer 0 with epoch 0, whoever that is.
NEW_PRODUCER: Final[Settings] = {
    "idempotent": True,
    "producerId": {"bigint": -1},
    "producerEpoch": -1,
}


class Platformatic(DrivenClient):
    client_id: ClassVar = "platformatic"
    commits_notes: ClassVar = False
    confuses_aborts: ClassVar = True
    member_program: ClassVar = Program(*javascript("platformatic-program.mjs"))
    producer_program: ClassVar = member_program

    def publisher_settings(self, compression: str | None, acks: str, idempotent: bool) -> Settings:
        settings: dict[str, Any] = {"acks": -1 if acks == "all" else int(acks)}
        if compression is not None:
            settings["compression"] = compression
        return {**settings, **NEW_PRODUCER} if idempotent else settings

    def reader_settings(self, committed: bool) -> Settings:
        return {"isolationLevel": int(committed), "groupId": next(GROUPS)}

    def writer_settings(self, name: str, timeout_ms: int) -> Settings:
        return {"transactionalId": name, "timeout": timeout_ms, **NEW_PRODUCER}

    def find_offset(self, address: str, topic: str, what: Start) -> int | None:
        wanted = what.ms if isinstance(what, AtTime) else EARLIEST if what == "start" else LATEST
        partitions = [{"partitionIndex": 0, "timestamp": {"bigint": wanted}}]
        admin = self.driven_admin(address)
        asked = {"topics": [{"name": topic, "partitions": partitions}]}
        (found,) = admin.method("listOffsets", asked)[0]["partitions"]
        return None if found["offset"] < 0 else int(found["offset"])

    def member(self, address: str, group: str, instance: str | None = None) -> Member:
        settings = {"groupId": group, "heartbeatInterval": 200}
        if instance is not None:
            settings["groupInstanceId"] = instance
        consumer = self.open("consumer", address, settings)
        consumer.call("subscribe", topics=[TOPIC])
        return Member(self, consumer, address, TOPIC)

    def admin(self, address: str) -> Admin:
        return Admin(self, self.driven_admin(address))


class Member(Reader, interface.Member):
    def commit(self, offset: int, note: str = "") -> None:
        place = {"topic": self._topic, "partition": 0, "leaderEpoch": 0}
        self._consumer.method("commit", {"offsets": [{**place, "offset": {"bigint": offset}}]})


class Admin(interface.Admin):
    def __init__(self, client: Platformatic, admin: Driven) -> None:
        self._client = client
        self._admin = admin

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        configs: Mapping[str, str] | None = None,
        replicas: int = 1,
    ) -> None:
        wanted = {"topics": [name], "partitions": partitions, "replicas": replicas}
        entries = [{"name": config, "value": value} for config, value in (configs or {}).items()]
        self._call("createTopics", {**wanted, "configs": entries})

    def delete_topic(self, name: str) -> None:
        self._call("deleteTopics", {"topics": [name]})

    def topics(self) -> set[str]:
        return set(self._call("listTopics"))

    def partitions(self, topic: str) -> int:
        described = self._call("metadata", {"topics": [topic]})["topics"][topic]
        return len(described["partitions"])

    def add_partitions(self, topic: str, total: int) -> None:
        self._call("createPartitions", {"topics": [{"name": topic, "count": total}]})

    def configs(self, topic: str) -> dict[str, str]:
        (described,) = self._call("describeConfigs", {"resources": [topic_resource(topic)]})
        return {
            one["name"]: one["value"]
            for one in described["configs"]
            if one["configSource"] == SET_IN_TOPIC
        }

    def set_config(self, topic: str, name: str, value: str | None) -> None:
        change = {"name": name, "value": value, "configOperation": DELETE if value is None else SET}
        wanted = {**topic_resource(topic), "configs": [change]}
        self._call("incrementalAlterConfigs", {"resources": [wanted]})

    def replace_configs(self, topic: str, configs: Mapping[str, str]) -> None:
        entries = [{"name": name, "value": value} for name, value in configs.items()]
        self._call("alterConfigs", {"resources": [{**topic_resource(topic), "configs": entries}]})

    def delete_records(self, topic: str, before: int) -> int:
        partitions = [{"partition": 0, "offset": {"bigint": before}}]
        asked = {"topics": [{"name": topic, "partitions": partitions}]}
        (deleted,) = self._call("deleteRecords", asked)
        (partition,) = deleted["partitions"]
        return int(partition["lowWatermark"])

    def groups(self) -> list[str]:
        return list(self._call("listGroups"))

    def group(self, name: str) -> Group:
        described = self._call("describeGroups", {"groups": [name]})[name]
        members = [
            GroupMember(
                one["clientId"],
                [
                    (topic, number)
                    for topic, assigned in (one["assignments"] or {}).items()
                    for number in assigned["partitions"]
                ],
            )
            for one in described["members"].values()
        ]
        return Group(described["state"].capitalize(), members)

    def committed(self, group: str) -> dict[tuple[str, int], Committed]:
        (told,) = self._call("listConsumerGroupOffsets", {"groups": [group]})
        return {
            (topic["name"], part["partitionIndex"]): Committed(part["committedOffset"])
            for topic in told["topics"]
            for part in topic["partitions"]
        }

    def move(self, group: str, topic: str, offset: int) -> None:
        partitions = [{"partition": 0, "offset": {"bigint": offset}}]
        moved = {"name": topic, "partitionOffsets": partitions}
        self._call("alterConsumerGroupOffsets", {"groupId": group, "topics": [moved]})

    def forget(self, group: str, topic: str) -> None:
        named = {"name": topic, "partitionIndexes": [0]}
        self._call("deleteConsumerGroupOffsets", {"groupId": group, "topics": [named]})

    def delete_group(self, name: str) -> None:
        self._call("deleteGroups", {"groups": [name]})

    def _call(self, name: str, *given: Any) -> Any:
        with self._client.refused():
            return self._admin.method(name, *given)


def topic_resource(topic: str) -> dict[str, Any]:
    return {"resourceType": CONFIGS_OF_A_TOPIC, "resourceName": topic}
