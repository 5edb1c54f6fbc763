"""Kafka clients with more to promise: a transactional publisher, and the members of a group.

The publisher writes numbers to its topic and, in the same transaction, how far it is. If it loses a
connection, it does not know whether its commit took effect. It initializes its transactional id
again and reads its progress. So readers of committed records get the numbers in order, each once.

The members of the group take turns at one partition. Each reads from the committed offset on and
commits what it has read. A member that was replaced must not commit any more. So the committed
offset never goes back, and nobody reads a number that lies before an acknowledged commit.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kio.schema.errors import ErrorCode

from tests.protocols.kafka.client import FETCH, Client, fetch_fields, only_partition
from tests.protocols.kafka.membership import OFFSET_COMMIT, OFFSET_FETCH, Member
from tests.protocols.kafka.transacting import Transactor
from tests.simulation.model import Violation
from tests.simulation.network import NetworkLoop
from tests.simulation.protocol_clients import (
    ProtocolClient,
    Publisher,
    fetch_without_session,
    records_of,
)

_ASSIGNED = b"yours"


class TransactionalPublisher(Publisher[Client]):
    """Its progress is an offset that a group has committed."""

    server = "kafka"

    def __init__(self, name: str, topic: str) -> None:
        super().__init__(name, topic)
        self._transactor: Transactor | None = None
        #: What `acknowledged` becomes if a commit whose answer was lost has taken effect.
        self._uncertain: int | None = None

    @property
    def is_waiting(self) -> bool:
        return self._uncertain is not None

    def forget_connection(self) -> None:
        super().forget_connection()
        self._transactor = None

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Client:
        return Client(reader, writer)

    async def _step(self, peer: Client, loop: NetworkLoop) -> None:
        if self._transactor is None:
            await self._begin(peer, loop)
            return
        code = await self._transact(self._transactor, loop)
        if code != ErrorCode.none:
            loop.counts[f"transactions that failed: {code.name}"] += 1
            self._transactor = None

    async def _begin(self, peer: Client, loop: NetworkLoop) -> None:
        """Fence what an earlier connection has begun, and read how far it came."""
        transactor = Transactor(peer, self.name, new_way=loop.source.random() < 0.5)
        code = await transactor.init()
        if code != ErrorCode.none:
            loop.counts[f"transactional ids not initialized: {code.name}"] += 1
            return
        progress = await committed_offset(peer, self.name, self.topic)
        if progress is None:
            return
        if progress not in (self.acknowledged, self._uncertain):
            raise Violation(
                f"{self.name} has progress {progress}, not {self.acknowledged} or {self._uncertain}"
            )
        if self._uncertain is not None:
            loop.counts["commits whose answer was lost"] += 1
        self.acknowledged, self._uncertain = progress, None
        self._transactor = transactor

    async def _transact(self, transactor: Transactor, loop: NetworkLoop) -> ErrorCode:
        """Publish some numbers and the progress in one transaction; commit or abort it."""
        source = loop.source
        if not transactor.is_new_way:
            codes = await transactor.add(0, topic=self.topic)
            codes.append(await transactor.add_offsets(self.name))
            if any(code != ErrorCode.none for code in codes):
                return next(code for code in codes if code != ErrorCode.none)
        end = self.acknowledged
        for _ in range(source.randint(1, 3)):
            count = source.randint(1, 3)
            values = [b"%d" % number for number in range(end, end + count)]
            code = await transactor.send(*values, topic=self.topic)
            if code != ErrorCode.none:
                return code
            end += count
        code = await transactor.commit_offset(end, group=self.name, topic=self.topic)
        if code != ErrorCode.none:
            return code
        if source.random() < 0.2:
            loop.counts["transactions aborted"] += 1
            return await transactor.end(commit=False)
        self._uncertain = end
        code = await transactor.end(commit=True)
        if code == ErrorCode.none:
            self.acknowledged, self._uncertain = end, None
            loop.counts["transactions committed"] += 1
        return code


@dataclass
class Turns:
    """What all members of a group know together: the offset of the last acknowledged commit."""

    group: str
    committed: int = 0


class GroupMember(ProtocolClient[Client]):
    """A member of a classic group that reads one partition when it is its turn."""

    server = "kafka"

    def __init__(self, name: str, topic: str, turns: Turns) -> None:
        super().__init__(name, topic)
        self._turns = turns
        self._member: Member | None = None
        self._is_assigned = False

    def forget_connection(self) -> None:
        super().forget_connection()
        self._member = None
        self._is_assigned = False

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Client:
        return Client(reader, writer)

    async def _step(self, peer: Client, loop: NetworkLoop) -> None:
        if self._member is None:
            self._member = Member(
                peer, self._turns.group, session_timeout=6_000, rebalance_timeout=6_000
            )
            await self._join(self._member, loop)
        elif await self._member.beat() != ErrorCode.none:
            await self._join(self._member, loop)
        elif self._is_assigned:
            await self._read_some(peer, self._member, loop)
        elif loop.source.random() < 0.1:
            await self._member.leave()
            self._member = None

    async def _join(self, member: Member, loop: NetworkLoop) -> None:
        """Join; as the leader, choose whose turn it is."""
        self._is_assigned = False
        joined = await member.join()
        if joined.error_code == ErrorCode.unknown_member_id:
            member.id = ""
        if joined.error_code != ErrorCode.none:
            loop.counts[f"joins that failed: {joined.error_code.name}"] += 1
            return
        assignments = None
        if joined.leader == member.id:
            chosen = loop.source.choice([each.member_id for each in joined.members])
            assignments = {chosen: _ASSIGNED}
        synced = await member.sync(assignments)
        if synced.error_code == ErrorCode.none:
            loop.counts["members that joined"] += 1
            self._is_assigned = synced.assignment == _ASSIGNED

    async def _read_some(self, peer: Client, member: Member, loop: NetworkLoop) -> None:
        """Read from the committed offset on, and commit."""
        known = self._turns.committed
        offset = await committed_offset(peer, self._turns.group, self.topic)
        if offset is None:
            return
        if offset < known:
            raise Violation(f"{self.name} found offset {offset} after {known} was committed")
        fields = fetch_without_session(fetch_fields(offset, topic=self.topic, wait_ms=100))
        part = only_partition(await peer.ask(FETCH, 11, **fields))
        if part.error_code != ErrorCode.none:
            return
        end = offset
        for at, value in records_of(part):
            if at == end and at < offset + 3:
                if int(value) != at:
                    raise Violation(f"{self.name} read {value!r} at offset {at}")
                end += 1
        if end == offset:
            return
        if loop.source.random() < 0.05:  # longer than its session: it may be replaced
            await asyncio.sleep(8)
        code = await self._commit(peer, member, end)
        if code == ErrorCode.none:
            if end < self._turns.committed:
                raise Violation(f"{self.name} committed {end} after {self._turns.committed}")
            self._turns.committed = end
            loop.counts["group commits"] += 1
        else:
            loop.counts[f"group commits refused: {code.name}"] += 1

    async def _commit(self, peer: Client, member: Member, offset: int) -> ErrorCode:
        partition = {
            "partition_index": 0,
            "committed_offset": offset,
            "committed_metadata": "",
            "committed_leader_epoch": -1,
        }
        answer = await peer.ask(
            OFFSET_COMMIT,
            8,
            group_id=member.group,
            generation_id_or_member_epoch=member.generation,
            member_id=member.id,
            group_instance_id=None,
            topics=[{"name": self.topic, "partitions": [partition]}],
        )
        code: ErrorCode = only_partition(answer).error_code
        return code


async def committed_offset(peer: Client, group: str, topic: str) -> int | None:
    """Return the committed offset of partition 0, 0 if there is none, or None if the broker does
    not say, because a transaction that may change it is open."""
    answer = await peer.ask(
        OFFSET_FETCH,
        7,
        group_id=group,
        topics=[{"name": topic, "partition_indexes": [0]}],
        require_stable=True,
    )
    if answer.error_code != ErrorCode.none:
        return None
    part = only_partition(answer)
    if part.error_code != ErrorCode.none:
        return None
    return max(0, int(part.committed_offset))
