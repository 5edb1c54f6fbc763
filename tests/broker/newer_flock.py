"""A member of the newer group protocol that does as it is told, on a broker."""

from __future__ import annotations

from typing import Any

from quackmq.broker import Broker, Heartbeat, HeartbeatResponse, MemberRef
from quackmq.model.topic import PartitionKey
from tests.broker.flock import GROUP, commit
from tests.broker.support import CALLER, TOPIC, key_of

REBALANCE_MS = 60_000


class NewerMember:
    def __init__(
        self,
        broker: Broker,
        member_id: str,
        *topics: str,
        group: str = GROUP,
        instance_id: str | None = None,
        pattern: str | None = None,
    ) -> None:
        self.broker = broker
        self.id = member_id
        self.group = group
        self.instance_id = instance_id
        self.topics = frozenset(topics or (() if pattern else (TOPIC,)))
        self.pattern = pattern
        self.epoch = 0
        self.says_all = False
        self.reads: frozenset[PartitionKey] = frozenset()

    @property
    def ref(self) -> MemberRef:
        return MemberRef(self.id, self.epoch, self.instance_id)

    async def beat(self, **said: Any) -> HeartbeatResponse:
        """Says what it reads; everything else when it joins, or has lost its connection."""
        if self.epoch == 0 or self.says_all:
            said = {
                "rebalance_timeout_ms": REBALANCE_MS,
                "topics": self.topics,
                "pattern": self.pattern,
                **said,
            }
        beat = Heartbeat(
            self.id,
            said.pop("epoch", self.epoch),
            "duck",
            "127.0.0.1",
            instance_id=self.instance_id,
            owned=self.reads,
            **said,
        )
        answer = await self.broker.groups.consumer_heartbeat(CALLER, self.group, beat)
        self.epoch, self.says_all = max(0, answer.epoch), False
        if answer.assignment is not None:
            self.reads = answer.assignment
        return answer

    async def leave(self, epoch: int = -1) -> None:
        self.reads = frozenset()
        await self.beat(epoch=epoch)
        self.epoch = 0

    async def commit(self, offset: int, partition: int = 0) -> None:
        key = key_of(self.broker.topic(TOPIC), partition)
        await commit(self.broker, {key: offset}, group=self.group, member=self.ref)


async def settle(*members: NewerMember) -> None:
    for _ in range(4):
        for member in members:
            await member.beat()
