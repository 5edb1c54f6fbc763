"""Cases of several steps: transactions that are read, and groups of the newer kind that share."""

from __future__ import annotations

import uuid
from typing import Any

from kio.schema.errors import ErrorCode

from tests.likeness.asking import Broker, case, commit_fields, retried, until
from tests.likeness.fetching import fetch_fields, listed
from tests.likeness.grouping import CONSUMER_GROUP_HEARTBEAT, beat_fields, described, member
from tests.likeness.transacting import NEW_WAY, added, begun, ended, ref_of
from tests.protocols.kafka.client import FETCH, PRODUCE, news, produce_fields
from tests.protocols.kafka.membership import Member

COMMITTED = 1


async def wrote(
    broker: Broker, ref: dict[str, Any], topic: str, sequence: int, version: int, **more: Any
) -> Any:
    """Produce one record in a transaction."""
    batch = news(
        b"x",
        producer_id=ref["producer_id"],
        producer_epoch=ref["producer_epoch"],
        base_sequence=sequence,
        transactional=True,
    )
    fields = {
        **produce_fields(batch, topic=topic),
        "transactional_id": ref["transactional_id"],
        **more,
    }

    async def ask() -> Any:
        return await broker.ask(PRODUCE, version, **fields)

    def code_of(answer: Any) -> ErrorCode:
        code: ErrorCode = answer.responses[0].partition_responses[0].error_code
        return code if code == ErrorCode.concurrent_transactions else ErrorCode.none

    answer = await retried(ask, code_of)
    part = answer.responses[0].partition_responses[0]
    return broker.plain([part.error_code, part.base_offset])


async def read(broker: Broker, topic: str, isolation: int, offset: int = 0) -> Any:
    fields = {**fetch_fields(topic, offset), "isolation_level": isolation}
    answer = await broker.ask(FETCH, 12, **fields)
    (part,) = answer.responses[0].partitions
    aborted = part.aborted_transactions
    return broker.plain(
        [
            part.error_code,
            part.high_watermark,
            part.last_stable_offset,
            None if aborted is None else [each.first_offset for each in aborted],
            bool(part.records),
        ]
    )


@case
async def a_transaction_seen_by_readers(broker: Broker) -> Any:
    """While it is open, aborted, and when the next one is committed; in the older way."""
    topic, name = await broker.topic(), broker.named("tx")
    ref = ref_of(name, await begun(broker, name))
    told: list[Any] = []

    async def look() -> None:
        for isolation in (0, COMMITTED):
            told.append(await read(broker, topic, isolation))
            for timestamp in (-1, -2, 0):
                told.append(await listed(broker, topic, timestamp, isolation_level=isolation))

    async def is_settled() -> bool:
        """Kafka writes the markers after it has answered."""
        fields = {**fetch_fields(topic), "isolation_level": COMMITTED}
        (part,) = (await broker.ask(FETCH, 12, **fields)).responses[0].partitions
        return bool(part.last_stable_offset == part.high_watermark)

    told.append(["not added", await wrote(broker, ref, topic, 0, 9)])
    told.append(await added(broker, ref, topic))
    told.append(await wrote(broker, ref, topic, 0, 9))
    await broker.put(topic, b"other", timestamp_ms=1000)
    await look()
    told.append(await ended(broker, ref, False))
    await until(is_settled)
    await look()
    told.append(await added(broker, ref, topic))
    told.append(await wrote(broker, ref, topic, 1, 9))
    told.append(await read(broker, topic, COMMITTED, 3))
    told.append(await ended(broker, ref, True))
    await until(is_settled)
    await look()
    told.append(["not added again", await wrote(broker, ref, topic, 2, 9)])
    return told


@case
async def transactional_records_that_are_not_let_in(broker: Broker) -> Any:
    topic, name = await broker.topic(), broker.named("tx")
    told: list[Any] = []
    for version in (9, 11, 12):
        ref = ref_of(name, await begun(broker, name, 5 if version == 12 else 4))
        if version < 12:
            told.append(await added(broker, ref, topic))
        told.append(["fine", await wrote(broker, ref, topic, 0, version)])
        told.append(["on", await wrote(broker, ref, topic, 1, version)])
        told.append(["again", await wrote(broker, ref, topic, 1, version)])
        fenced = {**ref, "producer_epoch": ref["producer_epoch"] - 1}
        told.append(["an older epoch", await wrote(broker, fenced, topic, 0, version)])
        ahead = {**ref, "producer_epoch": ref["producer_epoch"] + 1}
        told.append(["a newer epoch", await wrote(broker, ahead, topic, 0, version)])
        told.append(["no id", await wrote(broker, ref, topic, 2, version, transactional_id=None)])
        told.append(["a gap", await wrote(broker, ref, topic, 7, version)])
        told.append(await ended(broker, ref, True, NEW_WAY if version == 12 else 3))
    return told


@case
async def a_newer_way_transaction(broker: Broker) -> Any:
    """Nothing is added; each end gives a new epoch."""
    topic, name, group = await broker.topic(), broker.named("tx"), broker.named("readers")
    begin = await begun(broker, name, 5)
    ref = ref_of(name, begin)
    told: list[Any] = []
    for commit in (True, False, True):
        told.append(await wrote(broker, ref, topic, 0, 12))
        fields = commit_fields(group, topic, 3, epoch=1)
        told.append(await broker.told(28, 5, **ref, generation_id=-1, **fields))
        told.append(await ended(broker, ref, commit, NEW_WAY))
        ref["producer_epoch"] += 1
    told.append(["nothing open", await ended(broker, ref, False, NEW_WAY)])
    ref["producer_epoch"] += 1
    told.append(["nothing open", await ended(broker, ref, True, NEW_WAY)])
    return told


@case
async def pending_offsets(broker: Broker) -> Any:
    topic, name, group = await broker.topic(), broker.named("tx"), broker.named("readers")
    await broker.commit(group, topic, 1)
    ref = ref_of(name, await begun(broker, name))
    told: list[Any] = [await broker.told(25, 3, **ref, group_id=group)]
    fields = commit_fields(group, topic, 5)
    told.append(await broker.told(28, 3, **ref, generation_id=-1, **fields))
    wish = {"name": topic, "partition_indexes": [0]}
    for stable in (False, True):
        for topics in ([wish], None):
            wanted = {"group_id": group, "topics": topics}
            told.append(await broker.told(9, 9, groups=[wanted], require_stable=stable))
    told.append(await broker.commit(group, topic, 9))
    told.append(await broker.told(42, 2, groups_names=[broker.named("none")]))
    delete = {"name": topic, "partitions": [{"partition_index": 0}]}
    told.append(await broker.told(47, 0, group_id=group, topics=[delete]))
    told.append(await ended(broker, ref, False))
    return told


@case
async def members_of_the_newer_kind_share(broker: Broker) -> Any:
    topic, group = await broker.topic(partitions=4), broker.named("readers")
    told: list[Any] = []

    async def beat(member_id: str, epoch: int, owned: int | None = None, **more: Any) -> Any:
        fields = beat_fields(
            group, member_id=member_id, member_epoch=epoch, subscribed_topic_names=[topic]
        )
        if epoch > 0:
            fields["subscribed_topic_names"] = None
            fields["rebalance_timeout"] = -1
            fields["topic_partitions"] = None
        if owned is not None:
            topic_id: uuid.UUID = await broker.topic_id(topic)
            share = {"topic_id": topic_id, "partitions": list(range(owned))}
            fields["topic_partitions"] = [share] if owned else []
        answer = await broker.ask(CONSUMER_GROUP_HEARTBEAT, 1, **{**fields, **more})
        count = None
        if answer.assignment is not None:
            count = sum(len(each.partitions) for each in answer.assignment.topic_partitions)
        told.append([member_id, epoch, answer.error_code, answer.member_epoch, count])
        return answer

    first = await beat("ann", 0)
    await beat("ann", first.member_epoch, 4)
    await beat("ann", first.member_epoch)
    await beat("ann", 0)
    await beat("ann", 99)
    await beat("ann", first.member_epoch, server_assignor="none")
    await beat("ann", first.member_epoch, subscribed_topic_names=[])
    await beat("ann", -1)
    await beat("ann", 1)
    await beat("ann", -1)
    # Static ones.
    await beat("ben", 0, instance_id="b")
    await beat("cid", 0, instance_id="b")
    await beat("cid", 1, instance_id="b")
    await beat("ben", -2, instance_id="b")
    await beat("ben", 1, instance_id="b")
    await beat("cid", 0, instance_id="b")
    await beat("ben", -1, instance_id="b")
    await beat("cid", -1, instance_id="none")
    await beat("cid", -1)
    await beat("cid", -1, instance_id="b")
    return told


@case
async def a_classic_group_rebalances(broker: Broker) -> Any:
    topic, group = await broker.topic(), broker.named("readers")
    one = await member(broker, group)
    await one.settle()
    told: list[Any] = []

    async def committed(who: Member, generation: int | None = None) -> None:
        code = await broker.commit(
            group,
            topic,
            3,
            member_id=who.id,
            generation_id_or_member_epoch=who.generation if generation is None else generation,
        )
        told.append([code, (await described(broker, group))["group_state"]])

    await committed(one)
    await committed(one, one.generation + 1)
    two = await member(broker, group)
    told.append((await two.ask_to_join()).error_code)
    two.send_join()

    async def is_preparing() -> bool:
        return bool((await described(broker, group))["group_state"] == "PreparingRebalance")

    await until(is_preparing)
    told.append(["in a rebalance", await one.beat()])
    await committed(one)
    joined = await one.ask_to_join()
    told.append(
        [joined.error_code, joined.generation_id, len(joined.members), joined.leader == one.id]
    )
    follower = await two.receive_joined()
    told.append([follower.error_code, len(follower.members), follower.protocol_name])
    told.append(["joined", await one.beat(), await two.beat()])
    await committed(one)
    await committed(one, one.generation - 1)
    two.send_sync()
    synced = await one.sync({one.id: b"a", two.id: b"b"})
    told.append([synced.error_code, synced.assignment])
    answer = await two.client.receive()
    told.append([answer.error_code, answer.assignment])
    told.append(["synced again", (await two.sync()).error_code, (await one.sync({})).error_code])
    told.append([await one.beat(), await two.beat()])
    await committed(two)
    # A follower that joins again as it was is told what it was; a leader rebalances.
    again = await two.ask_to_join()
    told.append([again.error_code, again.generation_id, again.leader == one.id])
    told.append(await two.leave())
    told.append(await two.leave())
    told.append(["left", await one.beat(), await two.beat()])
    return told
