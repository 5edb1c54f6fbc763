"""ConsumerGroupHeartbeat and ConsumerGroupDescribe in every version, what other APIs make of such a
group, and the codes that Kafka gives."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from quackmq import limits
from quackmq.errors import BrokerClosing, LimitReached, StoreReadOnly
from quackmq.model.topic import Topic
from tests.protocols.kafka.client import API_VERSIONS, TESTER, Client, Served, served
from tests.protocols.kafka.membership import (
    CONSUMER_GROUP_DESCRIBE,
    CONSUMER_GROUP_HEARTBEAT,
    DELETE_GROUPS,
    DESCRIBE_GROUPS,
    LEAVE_GROUP,
    LIST_GROUPS,
    OFFSET_COMMIT,
    OFFSET_FETCH,
    Member,
    member,
    served_at_once,
    versions_of,
)
from tests.protocols.kafka.test_groups import GoneGroups

EVERY_VERSION = pytest.mark.parametrize("version", versions_of(CONSUMER_GROUP_HEARTBEAT))
NEWEST = versions_of(CONSUMER_GROUP_HEARTBEAT)[-1]
REBALANCE_MS = 30_000

#: Partitions by the topic's id.
Share = dict[uuid.UUID, list[int]]


class Newer:
    """What a client of the newer protocol remembers. Answers are kio's."""

    def __init__(
        self,
        client: Client,
        member_id: str = "me",
        version: int = NEWEST,
        topics: tuple[str, ...] = ("news",),
        **said: Any,
    ) -> None:
        self.client = client
        self.id = member_id
        self.version = version
        self.epoch = 0
        self.share: Share = {}
        self._joining = {"subscribed_topic_names": list(topics), **said}

    async def beat(self, **said: Any) -> Any:
        if self.epoch == 0:
            said = {"rebalance_timeout": REBALANCE_MS, **self._joining, **said}
        fields = {
            "group_id": "group",
            "member_id": self.id,
            "member_epoch": self.epoch,
            "rebalance_timeout": -1,
            "topic_partitions": [
                {"topic_id": topic_id, "partitions": partitions}
                for topic_id, partitions in self.share.items()
            ],
            **said,
        }
        answer = await self.client.ask(CONSUMER_GROUP_HEARTBEAT, self.version, **fields)
        if answer.error_code == ErrorCode.none:
            self.id, self.epoch = answer.member_id, answer.member_epoch
            if answer.assignment is not None:
                self.share = share_of(answer.assignment)
        return answer

    async def code(self, **said: Any) -> ErrorCode:
        code: ErrorCode = (await self.beat(**said)).error_code
        return code


def share_of(assignment: Any) -> Share:
    return {
        topic.topic_id: list(topic.partitions)
        for topic in assignment.topic_partitions
        if topic.partitions
    }


async def settle(*members: Newer) -> None:
    for _ in range(4):
        for each in members:
            assert await each.code() == ErrorCode.none


async def make_topic(running: Served, partitions: int = 2, name: str = "news") -> Topic:
    return await running.broker.create_topic(TESTER, name, partitions=partitions)


# --- members ------------------------------------------------------------------------------------


@EVERY_VERSION
async def test_members_share_partitions_by_heartbeats_alone(version: int) -> None:
    async with served() as running:
        topic = await make_topic(running)
        ann = Newer(await running.client(), "ann", version)
        answer = await ann.beat()
        assert (answer.error_code, answer.error_message) == (ErrorCode.none, None)
        assert (answer.member_id, answer.member_epoch) == ("ann", 1)
        assert answer.heartbeat_interval.total_seconds() * 1000 == limits.CONSUMER_HEARTBEAT_MS
        assert ann.share == {topic.id: [0, 1]}
        assert (await ann.beat(topic_partitions=None)).assignment is None
        ben = Newer(await running.client(), "ben", version)
        answer = await ben.beat()
        assert share_of(answer.assignment) == {}
        await settle(ann, ben)
        assert (ann.share, ben.share) == ({topic.id: [0]}, {topic.id: [1]})
        answer = await ann.beat(member_epoch=-1)
        assert (answer.error_code, answer.member_epoch) == (ErrorCode.none, -1)
        await settle(ben)
        assert ben.share == {topic.id: [0, 1]}


async def test_a_member_without_an_id_is_given_one_in_the_version_that_has_it_so() -> None:
    async with served() as running:
        client = await running.client()
        old, new = Newer(client, "", 0), Newer(client, "", 1)
        assert (await old.beat()).member_id
        assert await new.code() == ErrorCode.invalid_request


async def test_a_static_member_leaves_for_a_while_and_is_not_doubled() -> None:
    async with served() as running:
        topic = await make_topic(running)
        client = await running.client()
        first = Newer(client, "first", instance_id="one")
        await first.beat()
        second = Newer(client, "second", instance_id="one")
        assert await second.code() == ErrorCode.unreleased_instance_id
        answer = await first.beat(member_epoch=-2, instance_id="one")
        assert (answer.error_code, answer.member_epoch) == (ErrorCode.none, -2)
        await second.beat()
        assert (second.share, second.epoch) == ({topic.id: [0, 1]}, 1)
        late = Newer(client, "first")
        late.epoch = 1
        assert await late.code(instance_id="one") == ErrorCode.fenced_instance_id


async def test_who_is_behind_or_unknown_is_told_so() -> None:
    async with served() as running:
        await make_topic(running)
        client = await running.client()
        one = Newer(client)
        assert await one.code(member_epoch=1) == ErrorCode.group_id_not_found
        await one.beat()
        assert await one.code(member_epoch=7) == ErrorCode.fenced_member_epoch
        assert await one.code(member_id="nobody") == ErrorCode.unknown_member_id
        assert await one.code(server_assignor="astrology") == ErrorCode.unsupported_assignor
        assert await one.code(member_epoch=-3) == ErrorCode.invalid_request
        assert await one.code(group_id="") == ErrorCode.invalid_request
        assert await one.code() == ErrorCode.none


async def test_a_pattern_subscribes_to_topics_from_version_1_on() -> None:
    async with served() as running:
        news = await make_topic(running, 1)
        letter = await make_topic(running, 1, "newsletter")
        await make_topic(running, 1, "weather")
        client = await running.client()
        one = Newer(client, topics=(), subscribed_topic_regex="news.*")
        await one.beat()
        assert one.share == {news.id: [0], letter.id: [0]}
        other = Newer(client, "other", topics=(), subscribed_topic_regex="(?=news)")
        answer = await other.beat()
        assert answer.error_code == ErrorCode.invalid_regular_expression
        assert "(?=news)" in answer.error_message


async def test_one_protocol_is_refused_while_members_speak_the_other() -> None:
    async with served_at_once() as running:
        await make_topic(running)
        classic = await member(running)
        await classic.settle()
        newer = Newer(await running.client())
        answer = await newer.beat()
        assert answer.error_code == ErrorCode.group_id_not_found
        assert "classic" in answer.error_message
        assert await classic.leave() == ErrorCode.none
        assert await newer.code() == ErrorCode.none
        joined = await (await member(running)).join()
        assert joined.error_code == ErrorCode.inconsistent_group_protocol
        assert await newer.code(member_epoch=-1) == ErrorCode.none
        await (await member(running)).settle()


class FullGroups:
    async def consumer_heartbeat(self, *_: Any) -> Any:
        raise LimitReached("too many")


@pytest.mark.parametrize(
    ("groups", "code"),
    [
        (FullGroups(), ErrorCode.group_max_size_reached),
        (GoneGroups(BrokerClosing("closing")), ErrorCode.not_coordinator),
        (GoneGroups(StoreReadOnly("full")), ErrorCode.coordinator_not_available),
    ],
)
async def test_a_broker_that_cannot_go_on_says_what_clients_act_on(
    groups: Any, code: ErrorCode
) -> None:
    async with served() as running:
        kept, running.broker.groups = running.broker.groups, groups
        try:
            assert await Newer(await running.client()).code() == code
        finally:
            running.broker.groups = kept


# --- offsets ------------------------------------------------------------------------------------


async def commit(one: Newer, topic: Topic, version: int, epoch: int | None = None) -> ErrorCode:
    partition = {"partition_index": 0, "committed_offset": 5, "committed_metadata": None}
    answer = await one.client.ask(
        OFFSET_COMMIT,
        version,
        group_id="group",
        generation_id_or_member_epoch=one.epoch if epoch is None else epoch,
        member_id=one.id,
        topics=[{"name": topic.name, "topic_id": topic.id, "partitions": [partition]}],
    )
    code: ErrorCode = answer.topics[0].partitions[0].error_code
    return code


async def fetch(one: Newer, topic: Topic, version: int, member_id: str | None, epoch: int) -> Any:
    wanted = {"name": topic.name, "topic_id": topic.id, "partition_indexes": [0]}
    group = {"group_id": "group", "member_id": member_id, "member_epoch": epoch, "topics": [wanted]}
    answer = await one.client.ask(OFFSET_FETCH, version, groups=[group], require_stable=True)
    return answer.groups[0]


@pytest.mark.parametrize("version", [9, 10])
async def test_offsets_are_committed_and_fetched_in_the_members_epoch(version: int) -> None:
    async with served() as running:
        topic = await make_topic(running)
        one = Newer(await running.client())
        await one.beat()
        assert await commit(one, topic, version) == ErrorCode.none
        assert await commit(one, topic, version, one.epoch + 1) == ErrorCode.stale_member_epoch
        found = await fetch(one, topic, version, one.id, one.epoch)
        assert found.error_code == ErrorCode.none
        assert found.topics[0].partitions[0].committed_offset == 5
        for member_id, epoch, code in [
            (one.id, 0, ErrorCode.stale_member_epoch),
            ("nobody", one.epoch, ErrorCode.unknown_member_id),
        ]:
            found = await fetch(one, topic, version, member_id, epoch)
            assert (found.error_code, found.topics) == (code, ())
        found = await fetch(one, topic, version, None, -1)
        assert found.topics[0].partitions[0].committed_offset == 5, "anybody may look"
        one.id = "nobody"
        assert await commit(one, topic, version) == ErrorCode.unknown_member_id


# --- looking after groups -----------------------------------------------------------------------


@EVERY_VERSION
async def test_a_group_is_described_with_its_members_and_their_targets(version: int) -> None:
    async with served() as running:
        topic = await make_topic(running)
        client = await running.client()
        ann = Newer(client, "ann", rack_id="left", server_assignor="range")
        ben = Newer(client, "ben", instance_id="two")
        await ann.beat()
        await ben.beat()
        answer = await client.ask(
            CONSUMER_GROUP_DESCRIBE,
            version,
            group_ids=["group", "group", "none", ""],
            include_authorized_operations=True,
        )
        group, none, nameless = answer.groups
        assert (none.error_code, none.group_state) == (ErrorCode.group_id_not_found, "")
        assert nameless.error_code == ErrorCode.invalid_group_id
        assert (group.error_code, group.group_id) == (ErrorCode.none, "group")
        assert (group.group_state, group.assignor_name) == ("Reconciling", "range")
        assert (group.group_epoch, group.assignment_epoch) == (2, 2)
        assert group.authorized_operations > 0
        one, two = group.members
        assert (one.member_id, one.rack_id, one.member_epoch) == ("ann", "left", 1)
        assert (one.client_id, one.client_host) == ("tester", "/127.0.0.1")
        assert one.subscribed_topic_names == ("news",)
        assert one.subscribed_topic_regex == ""
        assert share_of(one.assignment) == {topic.id: [0, 1]}
        assert share_of(one.target_assignment) == {topic.id: [0]}
        assert one.assignment.topic_partitions[0].topic_name == "news"
        assert (two.instance_id, share_of(two.assignment)) == ("two", {})
        if version >= 1:
            assert one.member_type == 1
        plain = await client.ask(
            CONSUMER_GROUP_DESCRIBE,
            version,
            group_ids=["group"],
            include_authorized_operations=False,
        )
        assert plain.groups[0].authorized_operations < 0


async def test_each_describing_api_knows_the_groups_of_its_kind_alone() -> None:
    async with served_at_once() as running:
        await make_topic(running)
        classic: Member = await member(running, "classic")
        await classic.settle()
        newer = Newer(await running.client())
        await newer.beat()
        client = newer.client
        answer = await client.ask(
            CONSUMER_GROUP_DESCRIBE, 1, group_ids=["classic"], include_authorized_operations=False
        )
        assert answer.groups[0].error_code == ErrorCode.group_id_not_found
        for version, code in ((5, ErrorCode.none), (6, ErrorCode.group_id_not_found)):
            answer = await client.ask(
                DESCRIBE_GROUPS, version, groups=["group"], include_authorized_operations=False
            )
            assert (answer.groups[0].error_code, answer.groups[0].group_state) == (code, "Dead")


async def test_groups_are_listed_with_their_kinds_and_states() -> None:
    async with served_at_once() as running:
        await make_topic(running)
        await (await member(running, "classic")).settle()
        newer = Newer(await running.client())
        await newer.beat()

        async def listed(*types: str, states: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
            answer = await newer.client.ask(
                LIST_GROUPS, 5, states_filter=list(states), types_filter=list(types)
            )
            return {
                each.group_id: (each.group_type, each.group_state, each.protocol_type)
                for each in answer.groups
            }

        both = {
            "classic": ("classic", "Stable", "consumer"),
            "group": ("consumer", "Stable", "consumer"),
        }
        assert await listed() == both
        assert (await listed("Consumer")).keys() == {"group"}
        assert (await listed("classic")).keys() == {"classic"}
        await Newer(newer.client, "other").beat()
        assert (await listed(states=("Reconciling",))).keys() == {"group"}
        await newer.beat(member_epoch=-1)
        assert (await listed(states=("Assigning",))).keys() == {"group"}


async def test_a_group_is_deleted_when_its_members_are_gone_or_removed() -> None:
    async with served() as running:
        await make_topic(running)
        one = Newer(await running.client(), instance_id="one")
        await one.beat()
        (result,) = (await one.client.ask(DELETE_GROUPS, 2, groups_names=["group"])).results
        assert result.error_code == ErrorCode.non_empty_group
        leaving = {"member_id": "", "group_instance_id": "one", "reason": None}
        answer = await one.client.ask(LEAVE_GROUP, 5, group_id="group", members=[leaving])
        assert answer.members[0].error_code == ErrorCode.none
        assert await one.code() == ErrorCode.unknown_member_id
        (result,) = (await one.client.ask(DELETE_GROUPS, 2, groups_names=["group"])).results
        assert result.error_code == ErrorCode.none


async def test_clients_are_told_that_there_is_the_newer_protocol() -> None:
    async with served() as running:
        client = await running.client()
        answer = await client.ask(
            API_VERSIONS, 4, client_software_name="tester", client_software_version="1"
        )
        finalized = {each.name: each.max_version_level for each in answer.finalized_features}
        assert finalized["group.version"] == 1
