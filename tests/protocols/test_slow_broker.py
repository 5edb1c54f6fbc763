"""A broker whose loop stands still for longer than any session, lease or time-out, while the word
that would keep it alive lies in the socket: nobody is given up for that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from kio.schema.errors import ErrorCode

from quackmq import limits
from quackmq.broker import Counts, Terms
from quackmq.model.topic import Append, AppendResult, Cursor, State, StatePut
from quackmq.protocols.line import limits as line_limits
from quackmq.stores.memory import MemoryStore
from tests.broker.newer_flock import NewerMember
from tests.broker.pushed_peer import peer_of, pushed
from tests.broker.support import CALLER, TOPIC, open_broker, publish
from tests.kit.slow_loop import block, on_a_slow_loop
from tests.kit.support import batch_of
from tests.kit.waiting import until
from tests.protocols.http import peers as http
from tests.protocols.kafka.client import PRODUCE, produce_fields, served
from tests.protocols.kafka.membership import CONSUMER_GROUP_HEARTBEAT, OFFSET_COMMIT, Member
from tests.protocols.kafka.transacting import END_TXN, Transactor
from tests.protocols.line import peers as line

#: Longer than every time that a client is given here.
AN_HOUR_S = 3_600


@on_a_slow_loop
async def test_a_classic_member_lives_whose_heartbeat_lies_in_the_socket() -> None:
    async with served() as running:
        member = Member(await running.client())
        await member.settle()
        for _ in range(3):
            member.send_beat()
            block(AN_HOUR_S)
            assert (await member.client.receive()).error_code == ErrorCode.none


@on_a_slow_loop
async def test_a_member_of_the_newer_protocol_lives_whose_heartbeat_lies_in_the_socket() -> None:
    async with served() as running:
        client = await running.client()
        fields = {
            "group_id": "group",
            "member_id": "ann",
            "member_epoch": 0,
            "rebalance_timeout": 60_000,
            "topic_partitions": [],
            "subscribed_topic_names": ["news"],
        }
        answer = await client.ask(CONSUMER_GROUP_HEARTBEAT, 1, **fields)
        assert answer.error_code == ErrorCode.none
        for _ in range(3):
            again = {"member_epoch": answer.member_epoch, "rebalance_timeout": -1}
            client.send(
                CONSUMER_GROUP_HEARTBEAT,
                1,
                group_id="group",
                member_id="ann",
                topic_partitions=[],
                **again,
            )
            block(AN_HOUR_S)
            answer = await client.receive()
            assert answer.error_code == ErrorCode.none


@on_a_slow_loop
async def test_members_and_transactions_live_that_speak_soon_after_a_pause() -> None:
    async with served() as running:
        await running.broker.create_topic(CALLER, "news")
        member = Member(await running.client())
        await member.settle()
        newer = NewerMember(running.broker, "ann", "news", group="newer")
        await newer.beat()
        duck = Transactor(await running.client())
        assert await duck.init() == ErrorCode.none
        assert await duck.send(b"a") == ErrorCode.none
        block(AN_HOUR_S)
        await asyncio.sleep(limits.LOOP_LATE_MS / 1000)
        assert await member.beat() == ErrorCode.none
        await newer.beat()
        assert await duck.end(commit=True) == ErrorCode.none


@on_a_slow_loop
async def test_a_member_that_is_silent_after_a_pause_is_gone_in_the_end() -> None:
    async with served() as running:
        member = Member(await running.client(), session_timeout=6_000)
        await member.settle()
        for _ in range(6_000 // limits.LOOP_LATE_MS + 20):
            block(1)
            await asyncio.sleep(limits.LOOP_BEAT_MS / 1000 / 2)
        assert await member.beat() == ErrorCode.unknown_member_id


@on_a_slow_loop
async def test_a_transaction_is_committed_whose_end_lies_in_the_socket() -> None:
    async with served() as running:
        await running.broker.create_topic(CALLER, "news")
        duck = Transactor(await running.client())
        assert await duck.init() == ErrorCode.none
        assert await duck.send(b"a") == ErrorCode.none
        fields = {**duck.named(), "committed": True}
        duck.client.send(END_TXN, duck.end_version, **fields)
        block(AN_HOUR_S)
        assert (await duck.client.receive()).error_code == ErrorCode.none


@on_a_slow_loop
async def test_a_subscriber_of_lines_lives_whose_answer_lies_in_the_socket() -> None:
    async with line.served() as running:
        await running.topic("news")
        peer = await running.subscriber("sam", "news")
        for number in range(3):
            await running.put("news", b"entry %d" % number)
            assert f"entry {number}" in await peer.hears()
            peer.say("successful")
            block(AN_HOUR_S)
            await asyncio.sleep(line_limits.LINE_SWEEP_MS / 1000)  # it is looked at meanwhile


@on_a_slow_loop
async def test_a_lease_does_not_run_out_while_the_loop_stands_still() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker, Terms(lease_ms=limits.LEASE_MS))
        async with peer_of(broker) as peer:
            await publish(broker, b"a")
            found = await peer.wait(1)
            block(AN_HOUR_S)
            await asyncio.sleep(limits.LOOP_LATE_MS / 1000)
            assert await peer.take() == [], "it is not lent again"
            peer.ack(found)
            assert peer.channel.counts() == Counts(acked=1)


@on_a_slow_loop
async def test_an_idle_connection_is_kept_whose_request_lies_in_the_socket() -> None:
    async with http.served() as running:
        peer = await running.peer()
        assert (await peer.get("/v1/health")).status == 200
        for _ in range(3):
            peer.send(http.request("GET", "/v1/health"))
            block(AN_HOUR_S)
            assert (await peer.receive()).status == 200


@on_a_slow_loop
async def test_a_request_that_comes_in_two_halves_around_a_pause_is_answered() -> None:
    async with http.served() as running:
        peer = await running.peer()
        whole = http.request("GET", "/v1/health")
        for _ in range(3):
            peer.send(whole[:20])
            await asyncio.sleep(0.02)
            block(AN_HOUR_S)
            await asyncio.sleep(0.02)
            peer.send(whole[20:])
            assert (await peer.receive()).status == 200


# --- a slow disk ----------------------------------------------------------------------------------


class StuckDisk(MemoryStore):
    """Writes nothing for as long as it is told so, as a disk that has other things to do."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stuck = False
        self.writes = 0
        self.released = asyncio.Event()

    @property
    def pending_bytes(self) -> int:
        return limits.PENDING_BYTES + 1 if self.is_stuck else 0

    async def room(self) -> None:
        if self.is_stuck:
            await self.released.wait()

    def append(
        self,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> Awaitable[list[AppendResult]]:
        appended = super().append(appends, cursors, states)
        return self._later(appended) if self.is_stuck else appended

    async def put_state(self, key: str, value: bytes | None, expected_version: int) -> State:
        if self.is_stuck:
            self.writes += 1
            await self.released.wait()
        return await super().put_state(key, value, expected_version)

    async def set_cursors(self, cursors: Sequence[Cursor]) -> None:
        if self.is_stuck:
            self.writes += 1
            await self.released.wait()
        await super().set_cursors(cursors)

    async def _later(self, appended: Awaitable[list[AppendResult]]) -> list[AppendResult]:
        self.writes += 1
        await self.released.wait()
        return await appended

    def release(self) -> None:
        self.is_stuck = False
        self.released.set()


async def time_passes(seconds: float) -> None:
    """In steps that the clock counts: the loop is not late, only the disk is."""
    for _ in range(round(seconds * 1000 / limits.LOOP_LATE_MS)):
        block(limits.LOOP_LATE_MS / 1000)
        await asyncio.sleep(limits.LOOP_BEAT_MS / 1000 / 10)


@on_a_slow_loop
async def test_a_member_lives_whose_heartbeats_wait_behind_a_commit_for_the_disk() -> None:
    disk = StuckDisk()
    async with served(store=disk) as running:
        await running.broker.create_topic(CALLER, "news")
        member = Member(await running.client(), session_timeout=6_000)
        await member.settle()
        disk.is_stuck = True
        member.client.send(OFFSET_COMMIT, 7, **committing(member))
        await until(lambda: disk.writes == 1)
        for _ in range(4):
            member.send_beat()
            await time_passes(3)
        disk.release()
        (topic,) = (await member.client.receive()).topics
        assert topic.partitions[0].error_code == ErrorCode.none
        for _ in range(4):
            assert (await member.client.receive()).error_code == ErrorCode.none


def committing(member: Member) -> dict[str, object]:
    partition = {"partition_index": 0, "committed_offset": 0, "committed_metadata": ""}
    return {
        "group_id": member.group,
        "generation_id_or_member_epoch": member.generation,
        "member_id": member.id,
        "topics": [{"name": "news", "partitions": [partition]}],
    }


@on_a_slow_loop
async def test_heartbeats_are_answered_while_there_is_no_room_for_what_is_published() -> None:
    disk = StuckDisk()
    async with served(store=disk) as running:
        await running.broker.create_topic(CALLER, "news")
        member = Member(await running.client())
        await member.settle()
        disk.is_stuck = True
        publisher = await running.client()
        publisher.send(PRODUCE, 9, **produce_fields(bytes(batch_of(b"a").view)))
        assert await member.beat() == ErrorCode.none
        assert disk.writes == 0, "what is published waits for room"
        disk.release()
        await publisher.receive()


@on_a_slow_loop
async def test_a_newer_member_lives_whose_answer_waits_for_the_disk() -> None:
    disk = StuckDisk()
    async with served(store=disk) as running:
        client = await running.client()
        disk.is_stuck = True
        fields: dict[str, Any] = {"group_id": "group", "member_id": "ann", "topic_partitions": []}
        joining = {"rebalance_timeout": 60_000, "subscribed_topic_names": ["news"]}
        client.send(CONSUMER_GROUP_HEARTBEAT, 1, **fields, **joining, member_epoch=0)
        await until(lambda: disk.writes == 1)
        await time_passes(limits.CONSUMER_SESSION_MS / 1000 + 5)
        disk.release()
        epoch = (await client.receive()).member_epoch
        fields |= {"rebalance_timeout": -1, "member_epoch": epoch}
        assert (await client.ask(CONSUMER_GROUP_HEARTBEAT, 1, **fields)).error_code == 0


@on_a_slow_loop
async def test_a_classic_member_lives_whose_generation_waits_for_the_disk() -> None:
    disk = StuckDisk()
    async with served(store=disk) as running:
        member = Member(await running.client(), session_timeout=6_000)
        await member.ask_to_join()
        disk.is_stuck = True
        member.send_join()
        await until(lambda: disk.writes == 1)
        await time_passes(15)
        disk.release()
        assert (await member.receive_joined()).error_code == ErrorCode.none
        assert (await member.sync({member.id: b"all"})).error_code == ErrorCode.none
