"""Cases of consumer groups: the classic protocol, the newer one, and looking after both."""

from __future__ import annotations

import struct
from typing import Any

from tests.likeness.asking import Broker, case
from tests.protocols.kafka.membership import Member, join_fields

JOIN_GROUP, HEARTBEAT, LEAVE_GROUP, SYNC_GROUP = 11, 12, 13, 14
DESCRIBE_GROUPS, LIST_GROUPS, DELETE_GROUPS = 15, 16, 42
CONSUMER_GROUP_HEARTBEAT, CONSUMER_GROUP_DESCRIBE = 68, 69

#: A consumer's subscription to no topics, without user data. Kafka reads it: a member whose
#: subscription it cannot read is never answered.
RANGE = {"name": "range", "metadata": struct.pack(">hii", 0, 0, -1)}


async def described(broker: Broker, group: str, version: int = 6) -> Any:
    answer = await broker.ask(
        DESCRIBE_GROUPS, version, groups=[group], include_authorized_operations=False
    )
    (found,) = broker.plain(answer)["groups"]
    found["members"] = len(found["members"])
    return found


async def listed(broker: Broker, name: str = "", version: int = 5, **filters: Any) -> Any:
    """The groups of this case."""
    answer = await broker.ask(
        LIST_GROUPS, version, **{"states_filter": [], "types_filter": [], **filters}
    )
    mine = [each for each in answer.groups if each.group_id.startswith(broker.named(name))]
    mine.sort(key=lambda each: each.group_id)
    return broker.plain([answer.error_code, mine])


async def member(broker: Broker, group: str, **more: Any) -> Member:
    """A member over a connection of its own."""
    apart = await broker.another()
    await apart.ask(18, 0)
    assert apart._client is not None
    return Member(apart._client, group, **{"protocols": [RANGE], **more})


@case
async def groups_that_only_have_offsets(broker: Broker) -> Any:
    topic, group = await broker.topic(), broker.named("readers")
    await broker.commit(group, topic, 1)
    return [
        *[await described(broker, group, version) for version in (0, 4, 5, 6)],
        *[await listed(broker, "readers", version) for version in (0, 3, 4, 5)],
    ]


@case
async def groups_filtered(broker: Broker) -> Any:
    topic = await broker.topic()
    await broker.commit(broker.named("readers"), topic, 1)
    settled = await member(broker, broker.named("settled"))
    await settled.settle()
    wanted: list[dict[str, Any]] = [
        {"states_filter": ["Empty"]},
        {"states_filter": ["empty"]},
        {"states_filter": ["Stable"]},
        {"states_filter": ["Nonsense"]},
        {"types_filter": ["classic"]},
        {"types_filter": ["Classic"]},
        {"types_filter": ["consumer"]},
        {"types_filter": ["nonsense"]},
        {"states_filter": ["Empty"], "types_filter": ["classic"]},
        {"states_filter": ["Stable", "Dead"], "types_filter": ["consumer", "classic"]},
    ]
    return [await listed(broker, **each) for each in wanted]


@case
async def groups_that_lost_their_members(broker: Broker) -> Any:
    """They keep the type of their protocol."""
    group = broker.named("readers")
    one = await member(broker, group)
    await one.settle()
    told = [await described(broker, group), await listed(broker, "readers")]
    told.append(await one.leave())
    told += [await described(broker, group), await listed(broker, "readers")]
    return told


@case
async def groups_that_are_not_there(broker: Broker) -> Any:
    told: list[Any] = []
    # Other cases may have left offsets there.
    await broker.told(DELETE_GROUPS, 2, groups_names=[""])
    for group in (broker.named("none"), ""):
        told += [await described(broker, group, version) for version in (0, 5, 6)]
        told.append(await broker.told(DELETE_GROUPS, 2, groups_names=[group]))
        named = {"group_id": group, "member_id": "me", "generation_id": 1}
        told.append(await broker.told(HEARTBEAT, 4, **named))
        told.append(await broker.told(HEARTBEAT, 4, **{**named, "member_id": ""}))
        told.append(await broker.told(HEARTBEAT, 4, **{**named, "group_instance_id": "inst"}))
        protocol = {"protocol_type": "consumer", "protocol_name": "range"}
        told.append(await broker.told(SYNC_GROUP, 5, **named, **protocol, assignments=[]))
        told.append(await broker.told(SYNC_GROUP, 5, **named, assignments=[]))
        told.append(await broker.told(SYNC_GROUP, 3, **named, assignments=[]))
        leaving = [{"member_id": "me", "group_instance_id": None, "reason": None}]
        told.append(await broker.told(LEAVE_GROUP, 5, group_id=group, members=leaving))
        told.append(await broker.told(LEAVE_GROUP, 5, group_id=group, members=[]))
        told.append(await broker.told(LEAVE_GROUP, 2, group_id=group, member_id="me"))
    return told


@case
async def joins_that_make_no_sense(broker: Broker) -> Any:
    group = broker.named("readers")
    wanted: list[dict[str, Any]] = [
        {"group": ""},
        {"member_id": "nobody"},
        {"session_timeout": 0},
        {"session_timeout": -1},
        {"session_timeout": 2_000_000},
        {"protocols": []},
        {"protocol_type": ""},
        {"group_instance_id": "inst", "member_id": "nobody"},
    ]
    told = []
    for version in (2, 5, 9):
        for each in wanted:
            if version >= 5 or "group_instance_id" not in each:
                fields = join_fields(**{"group": group, **each})
                told.append(await broker.told(JOIN_GROUP, version, **fields))
    return told


@case
async def members_of_other_protocols(broker: Broker) -> Any:
    group = broker.named("readers")
    one = await member(broker, group)
    await one.settle()
    told: list[Any] = []
    for each in (
        {"protocol_type": "connect"},
        {"protocols": [{"name": "other", "metadata": b""}]},
        {"protocol_type": ""},
    ):
        told.append(await broker.told(JOIN_GROUP, 9, **join_fields(group, **each)))
    named = {"group_id": group, "member_id": one.id, "generation_id": one.generation}
    for each in (
        {"protocol_type": "connect", "protocol_name": "range"},
        {"protocol_type": "consumer", "protocol_name": "other"},
    ):
        told.append(await broker.told(SYNC_GROUP, 5, **named, **each, assignments=[]))
    for change in ({"generation_id": 99}, {"member_id": "nobody"}, {"generation_id": -1}):
        told.append(await broker.told(HEARTBEAT, 4, **{**named, **change}))
    told.append(await broker.told(DELETE_GROUPS, 2, groups_names=[group, group]))
    # By the newer protocol.
    told.append(await broker.told(CONSUMER_GROUP_HEARTBEAT, 1, **beat_fields(group)))
    return told


@case
async def a_short_rebalance_timeout_is_kept(broker: Broker) -> Any:
    """A member that does not come back in time is out: another that joins has it all."""
    group, wait_ms = broker.named("readers"), 700
    one = await member(broker, group, rebalance_timeout=wait_ms)
    # On a busy machine it may be late for its own assignment, and is out.
    while (await one.join()).error_code or (await one.sync({one.id: b"yours"})).error_code:
        one = await member(broker, group, rebalance_timeout=wait_ms)
    two = await member(broker, group, rebalance_timeout=wait_ms)
    joined = await two.join()
    return [[joined.error_code, len(joined.members), joined.leader == two.id], await one.beat()]


@case
async def a_rebalance_timeout_of_nothing(broker: Broker) -> Any:
    told = []
    for timeout in (0, -1, -5):
        group = broker.named(f"readers{timeout}")
        one = await member(broker, group, rebalance_timeout=timeout)
        joined = await one.join()
        told.append([joined.error_code, len(joined.members)])
    return told


# --- the newer protocol ------------------------------------------------------------------------


def beat_fields(group: str, **more: Any) -> dict[str, Any]:
    return {
        "group_id": group,
        "member_id": "me",
        "member_epoch": 0,
        "instance_id": None,
        "rack_id": None,
        "rebalance_timeout": 30_000,
        "subscribed_topic_names": ["none"],
        "subscribed_topic_regex": None,
        "server_assignor": None,
        "topic_partitions": [],
        **more,
    }


@case
async def heartbeats_that_make_no_sense(broker: Broker) -> Any:
    wanted: list[dict[str, Any]] = [
        {"group_id": ""},
        {"member_epoch": -3},
        {"member_epoch": -2},
        {"member_epoch": -2, "instance_id": "inst"},
        {"member_epoch": -1},
        {"member_epoch": -1, "instance_id": "inst"},
        {"member_epoch": 1},
        {"member_epoch": 1, "instance_id": "inst"},
        {"member_epoch": -100},
        {"member_id": ""},
        {"member_id": "", "member_epoch": 1},
        {"member_id": " "},
        {"instance_id": ""},
        {"rack_id": ""},
        {"rebalance_timeout": -1},
        {"rebalance_timeout": 0},
        {"rebalance_timeout": -5},
        {"subscribed_topic_names": None},
        {"subscribed_topic_names": []},
        {"subscribed_topic_names": None, "subscribed_topic_regex": ""},
        {"subscribed_topic_names": None, "subscribed_topic_regex": "("},
        {"topic_partitions": None},
        {"topic_partitions": [{"topic_id": None, "partitions": [0]}]},
        {"server_assignor": "none"},
        {"server_assignor": ""},
        {"group_id": " "},
        {"member_epoch": -3, "group_id": ""},
        {"member_epoch": 1, "rebalance_timeout": -1, "subscribed_topic_names": None},
    ]
    told = []
    for version in (0, 1):
        for place, each in enumerate(wanted):
            fields = beat_fields(broker.named(f"g{version}-{place}"), **each)
            answer = await broker.told(CONSUMER_GROUP_HEARTBEAT, version, **fields)
            told.append([version, each, answer])
            if answer["member_id"] and answer["member_id"] != "me":
                answer["member_id"] = "a new one"
    return told


@case
async def heartbeats_of_an_unknown_member(broker: Broker) -> Any:
    """In a group that has another, and in one that is of the classic kind."""
    topic, group = await broker.topic(), broker.named("readers")
    told = [
        await broker.told(
            CONSUMER_GROUP_HEARTBEAT, 1, **beat_fields(group, subscribed_topic_names=[topic])
        )
    ]
    for each in (
        {"member_id": "other", "member_epoch": 1},
        {"member_id": "other", "member_epoch": -1},
        {"member_id": "other", "member_epoch": -2, "instance_id": "inst"},
        {"member_epoch": 99},
        {"member_epoch": -2, "instance_id": "inst"},
    ):
        told.append(await broker.told(CONSUMER_GROUP_HEARTBEAT, 1, **beat_fields(group, **each)))
    offsets_only = broker.named("offsets")
    await broker.commit(offsets_only, topic, 1)
    for epoch in (1, -1, -2):
        told.append(
            await broker.told(
                CONSUMER_GROUP_HEARTBEAT, 1, **beat_fields(offsets_only, member_epoch=epoch)
            )
        )
    told.append(
        await broker.told(CONSUMER_GROUP_HEARTBEAT, 1, **beat_fields(group, member_epoch=-1))
    )
    told.append(
        await broker.told(CONSUMER_GROUP_HEARTBEAT, 1, **beat_fields(group, member_epoch=5))
    )
    told.append(
        await broker.told(CONSUMER_GROUP_HEARTBEAT, 1, **beat_fields(group, member_epoch=-1))
    )
    return told


@case
async def groups_of_the_newer_kind_described(broker: Broker) -> Any:
    topic = await broker.topic()
    classic, newer = broker.named("classic"), broker.named("newer")
    await broker.commit(classic, topic, 1)
    await broker.told(
        CONSUMER_GROUP_HEARTBEAT, 1, **beat_fields(newer, subscribed_topic_names=[topic])
    )
    told: list[Any] = []
    for group in (broker.named("none"), "", classic, newer):
        answer = await broker.told(
            CONSUMER_GROUP_DESCRIBE, 1, group_ids=[group], include_authorized_operations=False
        )
        for found in answer["groups"]:
            for each in found["members"]:
                each.pop("client_host", None)
        told.append(answer)
    told.append(
        await broker.told(
            CONSUMER_GROUP_DESCRIBE, 0, group_ids=[""], include_authorized_operations=False
        )
    )
    told += [await described(broker, newer, version) for version in (0, 5, 6)]
    told.append(await listed(broker))
    told.append(await broker.told(DELETE_GROUPS, 2, groups_names=[newer]))
    named = {"group_id": newer, "member_id": "me", "generation_id": 1}
    told.append(await broker.told(HEARTBEAT, 4, **named))
    told.append(await broker.commit(newer, topic, 1))
    told.append(
        await broker.commit(newer, topic, 1, generation_id_or_member_epoch=9, member_id="me")
    )
    told.append(
        await broker.commit(newer, topic, 1, generation_id_or_member_epoch=9, member_id="x")
    )
    return told


@case
async def members_that_are_not_there_leave(broker: Broker) -> Any:
    group = broker.named("readers")
    one = await member(broker, group, instance_id="one")
    await one.settle()
    told: list[Any] = []
    for member_id, instance_id in [
        ("nobody", None),
        ("", "none"),
        ("nobody", "one"),
        (one.id, "none"),
        ("", None),
    ]:
        leaving = {"member_id": member_id, "group_instance_id": instance_id, "reason": None}
        answer = await broker.ask(LEAVE_GROUP, 5, group_id=group, members=[leaving])
        told.append([answer.error_code, [each.error_code for each in answer.members]])
    leaving = {"member_id": "", "group_instance_id": "one", "reason": None}
    answer = await broker.ask(LEAVE_GROUP, 5, group_id=group, members=[leaving, leaving])
    told.append([answer.error_code, [each.error_code for each in answer.members]])
    told.append(await one.beat())
    told.append(await described(broker, group))
    return told


@case
async def static_members_are_fenced(broker: Broker) -> Any:
    group = broker.named("readers")
    one = await member(broker, group, instance_id="one")
    await one.settle()
    again = await member(broker, group, instance_id="one")
    joined = await again.join()
    told: list[Any] = [[joined.error_code, again.id != one.id, joined.leader == again.id]]
    told.append(await one.beat())
    named = {"group_id": group, "generation_id": one.generation, "group_instance_id": "one"}
    told.append(await broker.told(HEARTBEAT, 4, **named, member_id="nobody"))
    told.append(
        await broker.told(
            HEARTBEAT, 4, **{**named, "group_instance_id": "none"}, member_id=again.id
        )
    )
    topic = await broker.topic()
    for member_id, instance_id in [(one.id, "one"), (again.id, "one"), (again.id, "none")]:
        told.append(
            await broker.commit(
                group,
                topic,
                1,
                generation_id_or_member_epoch=again.generation,
                member_id=member_id,
                group_instance_id=instance_id,
            )
        )
    return told


@case
async def a_group_with_members_described(broker: Broker) -> Any:
    topic, group = await broker.topic(), broker.named("readers")
    one = await member(broker, group)
    await one.settle()
    told: list[Any] = [await described(broker, group), await listed(broker, "readers")]
    told.append(await broker.commit(group, topic, 1))
    told.append(await broker.told(DELETE_GROUPS, 2, groups_names=[group]))
    delete = {"name": topic, "partitions": [{"partition_index": 0}]}
    told.append(await broker.told(47, 0, group_id=group, topics=[delete]))
    answer = await broker.ask(
        DESCRIBE_GROUPS, 6, groups=[group, group, ""], include_authorized_operations=True
    )
    told.append([(each.group_id, each.error_code, each.group_state) for each in answer.groups[:1]])
    return told
