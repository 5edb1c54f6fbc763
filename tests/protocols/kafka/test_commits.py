"""OffsetCommit, OffsetFetch and OffsetDelete, in every version, and the codes that Kafka gives."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from quackmq import limits
from quackmq.errors import BrokerClosing, QuackError, StoreReadOnly
from quackmq.model.policy import Policy
from quackmq.model.topic import Topic
from quackmq.protocols.kafka import limits as kafka_limits
from tests.kit.tables import each
from tests.protocols.kafka.client import TESTER, Client, Served
from tests.protocols.kafka.membership import (
    OFFSET_COMMIT,
    OFFSET_DELETE,
    OFFSET_FETCH,
    Member,
    member,
    served_at_once,
    versions_of,
)
from tests.protocols.kafka.test_groups import GoneGroups

EVERY_COMMIT_VERSION = each("version", versions_of(OFFSET_COMMIT))
EVERY_FETCH_VERSION = each("version", versions_of(OFFSET_FETCH))
FIRST_WITH_IDS = 10
FIRST_WITH_GROUPS = 8
FIRST_WITH_GROUP_NOT_FOUND = 9
FIRST_COMMIT_WITH_EPOCH = 6
FIRST_FETCH_WITH_EPOCH = 5
EPOCH = 3

#: A partition and its offset, perhaps with metadata.
Place = tuple[int, int] | tuple[int, int, str | None]


async def commit(
    client: Client,
    version: int,
    topic: Topic,
    *places: Place,
    by: Member | None = None,
    group: str = "group",
) -> list[ErrorCode]:
    """Commit for a member, or for nobody; the partitions' codes."""
    answer = await client.ask(
        OFFSET_COMMIT,
        version,
        group_id=group,
        generation_id_or_member_epoch=by.generation if by else -1,
        member_id=by.id if by else "",
        group_instance_id=by.instance_id if by else None,
        retention_time=-1,
        topics=[
            {
                "name": topic.name,
                "topic_id": topic.id,
                "partitions": [
                    {
                        "partition_index": place[0],
                        "committed_offset": place[1],
                        "committed_leader_epoch": EPOCH,
                        "committed_metadata": place[2] if len(place) > 2 else "note",
                    }
                    for place in places
                ],
            }
        ],
    )
    (told,) = answer.topics
    assert (told.topic_id == topic.id) if version >= FIRST_WITH_IDS else (told.name == topic.name)
    assert [part.partition_index for part in told.partitions] == [place[0] for place in places]
    return [part.error_code for part in told.partitions]


def wish(topic: Topic, *partitions: int) -> dict[str, Any]:
    return {"name": topic.name, "topic_id": topic.id, "partition_indexes": list(partitions)}


async def fetch(
    client: Client, version: int, wishes: list[dict[str, Any]] | None, group: str = "group"
) -> Any:
    """One group's part of the answer."""
    groups = [{"group_id": group, "topics": wishes}]
    answer = await client.ask(
        OFFSET_FETCH, version, group_id=group, topics=wishes, groups=groups, require_stable=True
    )
    if version < FIRST_WITH_GROUPS:
        return answer
    (only,) = answer.groups
    assert only.group_id == group
    return only


def offsets(group: Any) -> dict[Any, dict[int, tuple[int, str | None]]]:
    """By the topic's name or id and the partition, the offset and what was noted with it."""
    return {
        getattr(topic, "name", None) or topic.topic_id: {
            part.partition_index: (part.committed_offset, part.metadata)
            for part in topic.partitions
        }
        for topic in group.topics
    }


def key_of(topic: Topic, version: int) -> str | uuid.UUID:
    return topic.id if version >= FIRST_WITH_IDS else topic.name


async def news(running: Served, partitions: int = 3) -> Topic:
    return await running.broker.create_topic(TESTER, "news", partitions=partitions)


NOWHERE = Topic(uuid.uuid4(), "nowhere", 1, Policy(), 0)


# --- to and fro --------------------------------------------------------------------------------


@EVERY_COMMIT_VERSION
async def test_what_is_committed_is_found_by_every_version(version: int) -> None:
    async with served_at_once() as running:
        topic = await news(running)
        client = await running.client()
        codes = await commit(client, version, topic, (0, 7), (2, 2**40, None))
        assert codes == [ErrorCode.none] * 2
        for fetch_version in versions_of(OFFSET_FETCH):
            found = await fetch(client, fetch_version, [wish(topic, 0, 1, 2)])
            assert getattr(found, "error_code", ErrorCode.none) == ErrorCode.none
            assert offsets(found) == {
                key_of(topic, fetch_version): {0: (7, "note"), 1: (-1, ""), 2: (2**40, "")}
            }
            committed_epoch = EPOCH if version >= FIRST_COMMIT_WITH_EPOCH else -1
            epochs = {0: committed_epoch, 1: -1, 2: committed_epoch}
            for part in found.topics[0].partitions:
                assert part.error_code == ErrorCode.none
                if fetch_version >= FIRST_FETCH_WITH_EPOCH:
                    assert part.committed_leader_epoch == epochs[part.partition_index]


@EVERY_COMMIT_VERSION
async def test_a_member_commits_in_its_generation(version: int) -> None:
    async with served_at_once() as running:
        topic = await news(running)
        only = await member(running)
        await only.settle()
        assert await commit(only.client, version, topic, (0, 5), by=only) == [ErrorCode.none]
        found = await fetch(only.client, 9, [wish(topic, 0)])
        assert offsets(found) == {"news": {0: (5, "note")}}


@each("version", [v for v in versions_of(OFFSET_FETCH) if v >= 2])
async def test_all_that_a_group_committed_is_found_without_naming_it(version: int) -> None:
    async with served_at_once() as running:
        topic = await news(running)
        other = await running.broker.create_topic(TESTER, "olds")
        client = await running.client()
        assert offsets(await fetch(client, version, None)) == {}
        await commit(client, 8, topic, (2, 3), (0, 1))
        await commit(client, 8, other, (0, 9))
        assert offsets(await fetch(client, version, None)) == {
            key_of(topic, version): {0: (1, "note"), 2: (3, "note")},
            key_of(other, version): {0: (9, "note")},
        }
        assert offsets(await fetch(client, version, [])) == {}
        await running.broker.delete_topic(TESTER, "olds")
        assert list(offsets(await fetch(client, version, None))) == [key_of(topic, version)]


@pytest.mark.parametrize("version", range(FIRST_WITH_GROUPS, 11))
async def test_several_groups_are_asked_for_at_once(version: int) -> None:
    async with served_at_once() as running:
        topic = await news(running)
        client = await running.client()
        await commit(client, 8, topic, (0, 1), group="one")
        await commit(client, 8, topic, (0, 2), group="two")
        answer = await client.ask(
            OFFSET_FETCH,
            version,
            groups=[
                {"group_id": "one", "topics": [wish(topic, 0)]},
                {"group_id": "none", "topics": [wish(topic, 0)]},
                {"group_id": "", "topics": [wish(topic, 0)]},
                {"group_id": "two", "topics": None},
            ],
        )
        assert [(group.group_id, group.error_code) for group in answer.groups] == [
            ("one", ErrorCode.none),
            ("none", ErrorCode.none),
            ("", ErrorCode.none),
            ("two", ErrorCode.none),
        ]
        key = key_of(topic, version)
        assert [offsets(group) for group in answer.groups] == [
            {key: {0: (1, "note")}},
            {key: {0: (-1, "")}},
            {key: {0: (-1, "")}},
            {key: {0: (2, "note")}},
        ]


async def test_an_explicit_subscription_has_its_offset_as_a_group() -> None:
    async with served_at_once() as running:
        topic = await news(running, partitions=1)
        await running.broker.subscribe(TESTER, "reader", "news")
        client = await running.client()
        assert offsets(await fetch(client, 9, None, "reader")) == {"news": {0: (0, "")}}
        assert await commit(client, 9, topic, (0, 4), group="reader") == [ErrorCode.none]
        assert offsets(await fetch(client, 9, None, "reader")) == {"news": {0: (4, "note")}}


# --- what is refused ---------------------------------------------------------------------------


@EVERY_COMMIT_VERSION
async def test_each_partition_is_committed_or_refused_by_itself(version: int) -> None:
    async with served_at_once() as running:
        topic = await news(running)
        client = await running.client()
        much = "ü" * (limits.CURSOR_METADATA_BYTES // 2)
        places: list[Place] = [(0, 1), (3, 1), (-1, 1), (1, 1, much), (2, 1, much + "!")]
        assert await commit(client, version, topic, *places) == [
            ErrorCode.none,
            ErrorCode.unknown_topic_or_partition,
            ErrorCode.unknown_topic_or_partition,
            ErrorCode.none,
            ErrorCode.offset_metadata_too_large,
        ]
        found = offsets(await fetch(client, 9, None))
        assert found == {"news": {0: (1, "note"), 1: (1, much)}}


@EVERY_COMMIT_VERSION
async def test_a_negative_offset_takes_back_what_was_committed_or_is_the_start(
    version: int,
) -> None:
    async with served_at_once() as running:
        topic = await news(running, partitions=5)
        client = await running.client()
        places = [(partition, 3) for partition in range(3)]
        await commit(client, version, topic, *places)
        codes = await commit(client, version, topic, (0, -1), (1, -1001), (2, -2), (3, -1), (5, -2))
        assert codes == [ErrorCode.none] * 4 + [ErrorCode.unknown_topic_or_partition]
        assert offsets(await fetch(client, 8, None)) == {"news": {2: (0, "note")}}


@EVERY_COMMIT_VERSION
async def test_a_topic_that_is_not_there_is_told_by_name_or_id(version: int) -> None:
    async with served_at_once() as running:
        client = await running.client()
        by_id = version >= FIRST_WITH_IDS
        code = ErrorCode.unknown_topic_id if by_id else ErrorCode.unknown_topic_or_partition
        assert await commit(client, version, NOWHERE, (0, 1), (1, 1)) == [code] * 2


@EVERY_FETCH_VERSION
async def test_a_topic_that_is_not_there_has_no_offsets(version: int) -> None:
    async with served_at_once() as running:
        client = await running.client()
        found = await fetch(client, version, [wish(NOWHERE, 0)])
        (part,) = found.topics[0].partitions
        assert (part.committed_offset, part.metadata) == (-1, "")
        by_id = version >= FIRST_WITH_IDS
        assert part.error_code == (ErrorCode.unknown_topic_id if by_id else ErrorCode.none)


@EVERY_COMMIT_VERSION
async def test_who_may_not_commit_is_told_why(version: int) -> None:
    async with served_at_once() as running:
        topic = await news(running)
        only = await member(running)
        await only.settle()
        client = only.client
        assert await commit(client, version, topic, (0, 1)) == [ErrorCode.unknown_member_id]
        for generation in (only.generation - 1, only.generation + 1):
            stale = Member(client)
            stale.id, stale.generation = only.id, generation
            codes = await commit(client, version, topic, (0, 1), by=stale)
            assert codes == [ErrorCode.illegal_generation]
        nobody = Member(client)
        nobody.id, nobody.generation = "nobody", only.generation
        much = "!" * (limits.CURSOR_METADATA_BYTES + 1)
        codes = await commit(client, version, topic, (0, 1), (1, 1, much), by=nobody)
        assert codes == [ErrorCode.unknown_member_id] * 2
        much_too_long = "x" * (limits.NAME_BYTES + 1)
        assert await commit(client, version, topic, (0, 1), group=much_too_long) == [
            ErrorCode.invalid_group_id
        ]
        assert offsets(await fetch(client, 9, None)) == {}


@EVERY_COMMIT_VERSION
async def test_nobody_commits_between_a_rebalance_and_its_assignment(version: int) -> None:
    async with served_at_once() as running:
        topic = await news(running)
        only = await member(running)
        await only.join()
        codes = await commit(only.client, version, topic, (0, 1), by=only)
        assert codes == [ErrorCode.rebalance_in_progress]


@EVERY_COMMIT_VERSION
async def test_a_generation_of_a_group_that_is_not_there_cannot_commit(version: int) -> None:
    async with served_at_once() as running:
        topic = await news(running)
        stranger = Member(await running.client())
        stranger.id, stranger.generation = "somebody", 3
        codes = await commit(stranger.client, version, topic, (0, 1), by=stranger)
        knows_code = version >= FIRST_WITH_GROUP_NOT_FOUND
        code = ErrorCode.group_id_not_found if knows_code else ErrorCode.illegal_generation
        assert codes == [code]


@pytest.mark.parametrize("version", range(7, 11))
async def test_a_static_member_that_was_replaced_cannot_commit(version: int) -> None:
    async with served_at_once() as running:
        topic = await news(running)
        before, after = [await member(running, instance_id="pond") for _ in range(2)]
        await before.settle()
        await after.join()
        codes = await commit(before.client, version, topic, (0, 1), by=before)
        assert codes == [ErrorCode.fenced_instance_id]
        assert await commit(after.client, version, topic, (0, 1), by=after) == [ErrorCode.none]


@EVERY_FETCH_VERSION
async def test_a_name_that_no_group_can_have_has_no_offsets(version: int) -> None:
    async with served_at_once() as running:
        topic = await news(running)
        client = await running.client()
        name = "x" * (limits.NAME_BYTES + 1)
        found = await fetch(client, version, [wish(topic, 0)], name)
        if version == 1:
            assert found.topics[0].partitions[0].error_code == ErrorCode.invalid_group_id
        else:
            assert (found.error_code, found.topics) == (ErrorCode.invalid_group_id, ())


@pytest.mark.parametrize("version", [7, 8, 10])
async def test_an_answer_has_a_bound_however_often_the_same_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    monkeypatch.setattr(kafka_limits, "KAFKA_GROUPS_ANSWER_BYTES", 100_000)
    async with served_at_once() as running:
        topic = await news(running)
        client = await running.client()
        await commit(client, 8, topic, (0, 1, "!" * 4_000))
        assert (await fetch(client, version, None)).error_code == ErrorCode.none
        found = await fetch(client, version, [wish(topic, *[0] * 100)])
        assert (found.error_code, found.topics) == (ErrorCode.policy_violation, ())
        if version >= FIRST_WITH_GROUPS:
            groups = [{"group_id": "group", "topics": None}] * 100
            answer = await client.ask(OFFSET_FETCH, version, groups=groups)
            codes = [group.error_code for group in answer.groups]
            assert codes == sorted(codes)
            assert set(codes) == {ErrorCode.none, ErrorCode.policy_violation}


# --- OffsetDelete ------------------------------------------------------------------------------


async def delete(client: Client, *topics: tuple[str, int], group: str = "group") -> Any:
    return await client.ask(
        OFFSET_DELETE,
        0,
        group_id=group,
        topics=[
            {"name": name, "partitions": [{"partition_index": partition}]}
            for name, partition in topics
        ],
    )


def deletion_codes(answer: Any) -> list[tuple[str, ErrorCode]]:
    assert answer.error_code == ErrorCode.none
    return [(topic.name, part.error_code) for topic in answer.topics for part in topic.partitions]


async def test_offsets_that_nobody_reads_on_from_can_be_deleted() -> None:
    async with served_at_once() as running:
        topic = await news(running)
        client = await running.client()
        await commit(client, 8, topic, (0, 1), (1, 2))
        answer = await delete(client, ("news", 0), ("nowhere", 0), ("news", 2))
        assert deletion_codes(answer) == [
            ("news", ErrorCode.none),
            ("nowhere", ErrorCode.unknown_topic_or_partition),
            ("news", ErrorCode.none),
        ]
        assert offsets(await fetch(client, 9, None)) == {"news": {1: (2, "note")}}


async def test_offsets_of_a_topic_that_members_read_are_kept() -> None:
    async with served_at_once() as running:
        topic = await news(running)
        await running.broker.create_topic(TESTER, "olds")
        reads_news = b"\0\0" + b"\0\0\0\1" + b"\0\4news" + b"\xff\xff\xff\xff"
        protocols = [{"name": "range", "metadata": reads_news}]
        only = await member(running, protocols=protocols)
        await only.settle()
        await commit(only.client, 8, topic, (0, 1), by=only)
        answer = await delete(only.client, ("news", 0), ("olds", 0))
        assert deletion_codes(answer) == [
            ("news", ErrorCode.group_subscribed_to_topic),
            ("olds", ErrorCode.none),
        ]
        assert offsets(await fetch(only.client, 9, None)) == {"news": {0: (1, "note")}}


@pytest.mark.parametrize(
    ("group", "code"),
    [("none", ErrorCode.group_id_not_found), ("", ErrorCode.invalid_group_id)],
)
async def test_offsets_of_a_group_that_is_not_there_cannot_be_deleted(
    group: str, code: ErrorCode
) -> None:
    async with served_at_once() as running:
        await news(running)
        answer = await delete(await running.client(), ("news", 0), group=group)
        assert (answer.error_code, answer.topics) == (code, ())


async def test_offsets_of_a_group_of_another_kind_are_kept_while_it_has_members() -> None:
    async with served_at_once() as running:
        await news(running)
        worker = await member(running, protocol_type="connect")
        await worker.join()
        answer = await delete(worker.client, ("news", 0))
        assert (answer.error_code, answer.topics) == (ErrorCode.non_empty_group, ())


# --- a broker that cannot go on ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BrokerClosing("…"), ErrorCode.not_coordinator),
        (StoreReadOnly("…"), ErrorCode.coordinator_not_available),
    ],
    ids=["closing", "read-only"],
)
async def test_a_broker_that_cannot_go_on_sends_clients_to_look_for_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, error: QuackError, code: ErrorCode
) -> None:
    async with served_at_once() as running:
        topic = await news(running)
        client = await running.client()
        with monkeypatch.context() as patch:
            patch.setattr(running.broker, "groups", GoneGroups(error))
            for version in versions_of(OFFSET_COMMIT):
                assert await commit(client, version, topic, (0, 1)) == [code]
            for version in versions_of(OFFSET_FETCH):
                found = await fetch(client, version, [wish(topic, 0)])
                if version == 1:
                    assert found.topics[0].partitions[0].error_code == code
                else:
                    assert found.error_code == code
            assert (await delete(client, ("news", 0))).error_code == code
