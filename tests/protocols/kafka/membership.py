"""A member of a consumer group over one connection, speaking the versions that a test wants."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kio.schema.errors import ErrorCode

from quackmq.broker import BrokerSettings
from quackmq.protocols.kafka.registry import APIS
from tests.protocols.kafka.client import Client, Served, served

OFFSET_COMMIT, OFFSET_FETCH, OFFSET_DELETE = 8, 9, 47
JOIN_GROUP, HEARTBEAT, LEAVE_GROUP, SYNC_GROUP = 11, 12, 13, 14
DESCRIBE_GROUPS, LIST_GROUPS, DELETE_GROUPS = 15, 16, 42
CONSUMER_GROUP_HEARTBEAT, CONSUMER_GROUP_DESCRIBE = 68, 69

NEWEST = 99
FIRST_WITH_ID_FIRST = 4
FIRST_WITH_INSTANCES = 5


def versions_of(api_key: int) -> range:
    api = APIS[api_key]
    return range(api.first_version, api.last_version + 1)


def nearest(api_key: int, version: int) -> int:
    """The version of an API that comes nearest to one that another API has."""
    versions = versions_of(api_key)
    return max(versions[0], min(version, versions[-1]))


def join_fields(group: str = "group", **more: Any) -> dict[str, Any]:
    return {
        "group_id": group,
        "session_timeout": 30_000,
        "rebalance_timeout": 30_000,
        "member_id": "",
        "group_instance_id": None,
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b"what I read"}],
        **more,
    }


class Member:
    """What a client remembers of its membership. Answers are kio's."""

    def __init__(
        self,
        client: Client,
        group: str = "group",
        version: int = NEWEST,
        instance_id: str | None = None,
        **joining: Any,
    ) -> None:
        self.client = client
        self.group = group
        self.version = version
        self.instance_id = instance_id
        self.id = ""
        self.generation = -1
        self.protocol: str | None = None
        self._joining = joining

    async def join(self) -> Any:
        """Join, with the id that is given for it if it takes one; the answer that counts."""
        answer = await self.ask_to_join()
        if answer.error_code == ErrorCode.member_id_required:
            answer = await self.ask_to_join()
        return answer

    async def ask_to_join(self) -> Any:
        self.send_join()
        return await self.receive_joined()

    def send_join(self) -> None:
        fields = join_fields(
            self.group, member_id=self.id, group_instance_id=self.instance_id, **self._joining
        )
        self.client.send(JOIN_GROUP, nearest(JOIN_GROUP, self.version), **fields)

    async def receive_joined(self) -> Any:
        answer = await self.client.receive()
        if answer.member_id:
            self.id = answer.member_id
        if answer.error_code == ErrorCode.none:
            self.generation = answer.generation_id
            self.protocol = answer.protocol_name
        return answer

    async def sync(self, assignments: dict[str, bytes] | None = None) -> Any:
        self.send_sync(assignments)
        return await self.client.receive()

    def send_sync(self, assignments: dict[str, bytes] | None = None) -> None:
        entries = [
            {"member_id": member_id, "assignment": assignment}
            for member_id, assignment in (assignments or {}).items()
        ]
        version = nearest(SYNC_GROUP, self.version)
        fields = {"protocol_type": "consumer", "protocol_name": self.protocol}
        self.client.send(SYNC_GROUP, version, **self._named(), assignments=entries, **fields)

    async def beat(self) -> ErrorCode:
        self.send_beat()
        code: ErrorCode = (await self.client.receive()).error_code
        return code

    def send_beat(self) -> None:
        self.client.send(HEARTBEAT, nearest(HEARTBEAT, self.version), **self._named())

    async def leave(self) -> ErrorCode:
        member = {"member_id": self.id, "group_instance_id": self.instance_id, "reason": None}
        answer = await self.client.ask(
            LEAVE_GROUP,
            nearest(LEAVE_GROUP, self.version),
            group_id=self.group,
            member_id=self.id,
            members=[member],
        )
        codes = [part.error_code for part in getattr(answer, "members", ())]
        code: ErrorCode = codes[0] if codes else answer.error_code
        return code

    async def settle(self, assignments: dict[str, bytes] | None = None) -> None:
        """Join and sync as the only member, or as its leader for all."""
        joined = await self.join()
        assert joined.error_code == ErrorCode.none
        assert (await self.sync(assignments or {self.id: b"yours"})).error_code == ErrorCode.none

    def _named(self) -> dict[str, Any]:
        return {
            "group_id": self.group,
            "generation_id": self.generation,
            "member_id": self.id,
            "group_instance_id": self.instance_id,
        }


@asynccontextmanager
async def served_at_once() -> AsyncIterator[Served]:
    """A listener whose groups do not wait for more members when the first comes."""
    async with served(settings=BrokerSettings(group_initial_delay_ms=0)) as running:
        yield running


async def member(running: Served, *arguments: Any, **more: Any) -> Member:
    """A member with a connection of its own."""
    return Member(await running.client(), *arguments, **more)


#: A sound request of each API of groups, for a group that is not there.
GROUP_REQUESTS: dict[int, dict[str, Any]] = {
    OFFSET_COMMIT: {
        "group_id": "none",
        "generation_id_or_member_epoch": 1,
        "member_id": "nobody",
        "retention_time": -1,
        "topics": [
            {
                "name": "none",
                "topic_id": None,
                "partitions": [
                    {"partition_index": 0, "committed_offset": 0, "committed_metadata": "note"}
                ],
            }
        ],
    },
    OFFSET_FETCH: {
        "group_id": "none",
        "topics": [{"name": "none", "partition_indexes": [0]}],
        "groups": [
            {
                "group_id": "none",
                "topics": [{"name": "none", "topic_id": None, "partition_indexes": [0]}],
            }
        ],
    },
    OFFSET_DELETE: {
        "group_id": "none",
        "topics": [{"name": "none", "partitions": [{"partition_index": 0}]}],
    },
    # With an id that nobody has, so that it does not wait.
    JOIN_GROUP: join_fields("none", member_id="nobody"),
    HEARTBEAT: {"group_id": "none", "generation_id": 1, "member_id": "nobody"},
    LEAVE_GROUP: {
        "group_id": "none",
        "member_id": "nobody",
        "members": [{"member_id": "nobody", "group_instance_id": None}],
    },
    SYNC_GROUP: {
        "group_id": "none",
        "generation_id": 1,
        "member_id": "nobody",
        "protocol_type": "consumer",
        "protocol_name": "range",
        "assignments": [{"member_id": "nobody", "assignment": b"yours"}],
    },
    DESCRIBE_GROUPS: {"groups": ["none"], "include_authorized_operations": False},
    LIST_GROUPS: {"states_filter": ["Stable"], "types_filter": ["classic"]},
    DELETE_GROUPS: {"groups_names": ["none"]},
    CONSUMER_GROUP_HEARTBEAT: {
        "group_id": "none",
        "member_id": "nobody",
        "member_epoch": 1,
        "instance_id": "one",
        "rack_id": "left",
        "rebalance_timeout": 30_000,
        "subscribed_topic_names": ["none"],
        "subscribed_topic_regex": "none.*",
        "server_assignor": "uniform",
        "topic_partitions": [{"topic_id": uuid.UUID(int=1), "partitions": [0, 1]}],
    },
    CONSUMER_GROUP_DESCRIBE: {"group_ids": ["none"], "include_authorized_operations": True},
}
