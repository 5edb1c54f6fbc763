"""Cases of OffsetCommit, OffsetFetch and OffsetDelete."""

from __future__ import annotations

from typing import Any

from tests.likeness.asking import Broker, case, commit_fields, retried

OFFSET_COMMIT, OFFSET_FETCH, OFFSET_DELETE = 8, 9, 47


async def fetched(
    broker: Broker, group: str, topic: str | None, *, version: int = 9, partition: int = 0
) -> Any:
    """What a group has committed of a partition of a topic, or of all topics."""
    topics = None if topic is None else [{"name": topic, "partition_indexes": [partition]}]
    fields = {"group_id": group, "topics": topics}
    return await broker.told(OFFSET_FETCH, version, **fields, groups=[fields])


@case
async def a_leader_epoch_that_was_committed_is_given_back(broker: Broker) -> Any:
    """Also one that no leader of this broker ever had: it is the client's note."""
    topic, group = await broker.topic(), broker.named("readers")
    told = []
    for offset, epoch in [(1, 0), (2, 7), (3, 2**31 - 1), (4, -1), (5, -2), (6, -7)]:
        told.append(await broker.commit(group, topic, offset, epoch=epoch))
        for version in (4, 5, 8, 9):
            told.append(await fetched(broker, group, topic, version=version))
    told.append(await fetched(broker, group, None))
    return told


@case
async def a_commit_of_a_version_without_leader_epochs(broker: Broker) -> Any:
    """It takes back the epoch of the commit before."""
    topic, group = await broker.topic(), broker.named("readers")
    told = [await broker.commit(group, topic, 1, epoch=3)]
    fields = commit_fields(group, topic, 2)
    told.append(await broker.told(OFFSET_COMMIT, 5, **fields, retention_time=-1))
    told.append(await fetched(broker, group, topic))
    return told


@case
async def a_group_without_a_name(broker: Broker) -> Any:
    """Clients that have no group commit to the one without a name, and nothing else can use it."""
    topic = await broker.topic()
    told: list[Any] = [await broker.commit("", topic, 4, epoch=2, metadata="note")]
    told.append(await fetched(broker, "", topic))
    for version in (2, 5, 7, 8):
        fields = commit_fields("", topic, version)
        told.append(await broker.told(OFFSET_COMMIT, version, **fields, retention_time=-1))
    told.append(await fetched(broker, "", topic, version=1))
    told.append(await fetched(broker, "", topic, version=7))
    # With a member or a generation.
    told.append(await broker.commit("", topic, 9, member_id="me"))
    told.append(await broker.commit("", topic, 9, generation_id_or_member_epoch=1))
    told.append(await broker.commit("", topic, 9, generation_id_or_member_epoch=1, member_id="me"))
    delete = {"name": topic, "partitions": [{"partition_index": 0}]}
    told.append(await broker.told(OFFSET_DELETE, 0, group_id="", topics=[delete]))
    told.append(await fetched(broker, "", topic))
    described = {"groups": [""], "include_authorized_operations": False}
    told.append(await broker.told(15, 6, **described))
    told.append(await broker.told(42, 2, groups_names=[""]))
    told.append(await broker.told(42, 2, groups_names=[""]))
    told.append(await broker.told(15, 6, **described))
    told.append(await fetched(broker, "", topic))
    return told


@case
async def commits_of_those_who_are_no_members(broker: Broker) -> Any:
    topic = await broker.topic()
    told = []
    for place, (generation, member_id, instance_id) in enumerate(
        [(-1, "", None), (-1, "me", None), (0, "", None), (1, "me", None), (-1, "", "inst")]
        + [(5, "", None), (-2, "", None), (-1, "me", "inst")]
    ):
        for version in (7, 8, 9):
            told.append(
                await broker.told(
                    OFFSET_COMMIT,
                    version,
                    **commit_fields(
                        broker.named(f"group{place}"),
                        topic,
                        1,
                        generation_id_or_member_epoch=generation,
                        member_id=member_id,
                        group_instance_id=instance_id,
                    ),
                )
            )
    return told


@case
async def commits_to_what_is_not_there(broker: Broker) -> Any:
    topic, group = await broker.topic(), broker.named("readers")
    told: list[Any] = [await broker.commit(group, broker.named("none"), 1)]
    for partition in (1, -1):
        fields = commit_fields(group, topic, 1)
        fields["topics"][0]["partitions"][0]["partition_index"] = partition
        told.append(await broker.told(OFFSET_COMMIT, 9, **fields))
    told.append(await broker.commit(group, topic, 1, metadata="x" * 4097))
    told.append(await broker.commit(group, topic, 1, metadata="x" * 4096))
    told.append(await broker.commit(group, topic, 1, metadata=None))
    told.append(await fetched(broker, group, topic))
    told.append(await fetched(broker, group, broker.named("none")))
    told.append(await fetched(broker, group, topic, partition=7))
    told.append(
        await broker.told(OFFSET_COMMIT, 9, **{**commit_fields(group, topic, 1), "topics": []})
    )
    unknown = {**commit_fields(group, topic, 1)}
    told.append(await broker.told(OFFSET_COMMIT, 10, **unknown))
    return told


@case
async def offsets_of_a_group_that_is_not_there(broker: Broker) -> Any:
    topic = await broker.topic()
    told = []
    for version in (1, 2, 5, 7, 8, 9):
        told.append(await fetched(broker, broker.named("none"), topic, version=version))
        if version > 1:
            told.append(await fetched(broker, broker.named("none"), None, version=version))
    return told


@case
async def offset_fetches_of_members(broker: Broker) -> Any:
    topic, group = await broker.topic(), broker.named("readers")
    await broker.commit(group, topic, 3)
    told = []
    for member_id, epoch in [(None, -1), ("", -1), ("me", -1), ("me", 0), ("me", 5), ("", 0)]:
        wanted = {
            "group_id": group,
            "member_id": member_id,
            "member_epoch": epoch,
            "topics": [{"name": topic, "partition_indexes": [0]}],
        }
        told.append(await broker.told(OFFSET_FETCH, 9, groups=[wanted]))
    return told


@case
async def offsets_deleted(broker: Broker) -> Any:
    topic, group = await broker.topic(), broker.named("readers")
    await broker.commit(group, topic, 3)
    told = []
    for group_id, name, partition in [
        (broker.named("none"), topic, 0),
        (broker.named("none"), broker.named("none"), 0),
        (group, broker.named("none"), 0),
        (group, topic, 7),
        (group, topic, -1),
        ("", topic, 0),
        (group, topic, 0),
        (group, topic, 0),
    ]:
        topics = [{"name": name, "partitions": [{"partition_index": partition}]}]
        told.append(await broker.told(OFFSET_DELETE, 0, group_id=group_id, topics=topics))
    told.append(await broker.told(OFFSET_DELETE, 0, group_id=group, topics=[]))
    told.append(await broker.told(OFFSET_DELETE, 0, group_id=broker.named("none"), topics=[]))
    told.append(await fetched(broker, group, topic))
    return told


@case
async def a_transaction_commits_offsets_with_leader_epochs(broker: Broker) -> Any:
    """Each way of transactions; also over what was committed without one."""
    topic = await broker.topic()
    told: list[Any] = []
    for way, version in (("old", 3), ("new", 5)):
        group, name = broker.named(f"readers-{way}"), broker.named(f"tx-{way}")
        await broker.commit(group, topic, 1, epoch=9)
        begun = await broker.ask(
            22, 5 if way == "new" else 4, transactional_id=name, transaction_timeout=60_000
        )
        ref = {
            "transactional_id": name,
            "producer_id": begun.producer_id,
            "producer_epoch": begun.producer_epoch,
        }
        if way == "old":
            told.append((await broker.ask(25, 3, **ref, group_id=group)).error_code)
        for offset, epoch in [(5, 4), (6, -1), (7, 12)]:
            fields = commit_fields(group, topic, offset, epoch=epoch)
            told.append(await broker.told(28, version, **ref, generation_id=-1, **fields))
        told.append(await fetched(broker, group, topic))
        told.append(
            (await broker.ask(26, 5 if way == "new" else 3, **ref, committed=True)).error_code
        )

        async def look(group: str = group) -> Any:
            wanted = {"group_id": group, "topics": [{"name": topic, "partition_indexes": [0]}]}
            return await broker.ask(OFFSET_FETCH, 9, groups=[wanted], require_stable=True)

        answer = await retried(look, lambda told: told.groups[0].topics[0].partitions[0].error_code)
        told.append(answer)
    return told
