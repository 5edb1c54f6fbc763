"""Subscribing by committing: two notes beside an offset make and end a subscription (conventions).

Who speaks plain Kafka subscribes so, and is then seen by every listener.
"""

from __future__ import annotations

import asyncio
import json

import pytest

from quackmq import limits
from quackmq.broker import Broker, Commit, MemberRef
from quackmq.broker import limits as broker_limits
from quackmq.errors import (
    InvalidRequest,
    LimitReached,
    NameInOtherMode,
    QuackError,
    UnknownTopic,
)
from quackmq.model.offset_notes import (
    RECEIPTS_TOPIC,
    SUBSCRIBED,
    SUBSCRIBED_WITH_RECEIPTS,
    UNSUBSCRIBED,
)
from quackmq.model.policy import Policy
from quackmq.model.subscription import Offset, Start, Time, subscribed_note
from tests.broker.flock import NOBODY, Member, Pond, commit
from tests.broker.support import (
    CALLER,
    NAME,
    TOPIC,
    contents_of,
    get_all,
    key_of,
    open_broker,
    publish,
    publish_each,
    values_in,
    values_of,
)
from tests.kit.support import Clock


async def note(
    broker: Broker,
    metadata: str,
    *offsets: int,
    name: str = NAME,
    member: MemberRef = NOBODY,
) -> list[QuackError | None]:
    """A commit of the first partitions of the topic, all with the same note."""
    topic = broker.topic(TOPIC)
    commits = [
        Commit(key_of(topic, partition), offset, metadata)
        for partition, offset in enumerate(offsets)
    ]
    return await broker.groups.commit(CALLER, name, member, commits)


async def names_of(broker: Broker) -> list[str]:
    return [each.name for each in await broker.subscriptions(CALLER, topic_name=TOPIC)]


async def notes_of(broker: Broker, name: str = NAME) -> dict[int, tuple[int | None, str]]:
    found = await broker.groups.committed(CALLER, name)
    return {key.partition: (each.offset, each.metadata) for key, each in found.items()}


async def test_a_note_makes_a_subscription_that_goes_on_from_the_offsets(pond: Pond) -> None:
    async with pond.open(default_partitions=2) as broker:
        await broker.create_topic(CALLER, TOPIC)
        for partition in (0, 1):
            await publish(broker, b"a", b"b", partition=partition)
        assert await note(broker, SUBSCRIBED, 1, 2) == [None, None]
        assert await notes_of(broker) == {0: (1, SUBSCRIBED), 1: (2, SUBSCRIBED)}
    async with pond.open(default_partitions=2) as broker:
        assert await names_of(broker) == [NAME]
        assert await broker.lag(CALLER, NAME, TOPIC) == 1
        await publish(broker, b"c", partition=1)
        assert sorted(contents_of(await get_all(broker))) == [b"b", b"c"]


async def test_such_a_subscription_holds_what_it_has_not_read() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_until_consumed=True))
        await note(broker, SUBSCRIBED, 0)
        await publish_each(broker, b"a", b"b")
        await broker.clean()
        assert await values_in(broker) == [b"a", b"b"]
        await commit(broker, {key_of(broker.topic(TOPIC)): 1}, group=NAME)
        await broker.clean()
        assert await values_in(broker) == [b"b"]


async def test_such_a_subscription_outlives_the_offsets_of_other_groups() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC)
        await note(broker, SUBSCRIBED, 0)
        clock.advance(10 * limits.GROUP_EXPIRY_MS)
        await broker.clean()
        assert await names_of(broker) == [NAME]
        assert await notes_of(broker) == {0: (0, SUBSCRIBED)}


async def test_a_note_ends_a_subscription_and_its_offsets_are_gone(pond: Pond) -> None:
    async with pond.open(default_partitions=2) as broker:
        await broker.create_topic(CALLER, TOPIC)
        await note(broker, SUBSCRIBED, 0, 0)
        assert await note(broker, UNSUBSCRIBED, 0, 0) == [None, None]
        assert await names_of(broker) == []
        assert await notes_of(broker) == {}
    async with pond.open(default_partitions=2) as broker:
        assert await names_of(broker) == []


async def test_members_keep_their_offsets_and_the_note_when_their_subscription_ends() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        member = Member(broker, NAME)
        await member.enter()
        assert await note(broker, SUBSCRIBED, 0, member=member.ref) == [None]
        assert await names_of(broker) == [NAME]
        assert await note(broker, UNSUBSCRIBED, 0, member=member.ref) == [None]
        assert await names_of(broker) == []
        assert await notes_of(broker) == {0: (0, UNSUBSCRIBED)}


async def test_who_subscribes_again_does_not_go_on_from_where_it_unsubscribed() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        member = Member(broker, NAME)
        await member.enter()
        await note(broker, SUBSCRIBED, 0, member=member.ref)
        await note(broker, UNSUBSCRIBED, 0, member=member.ref)
        await publish_each(broker, b"missed")
        await member.leave()
        await broker.subscribe(CALLER, NAME, TOPIC)
        await publish_each(broker, b"wanted")
        assert values_of(await get_all(broker)) == [b"wanted"]


async def test_what_another_listener_made_is_ended_by_a_note_and_the_reverse() -> None:
    async with open_broker() as broker:
        await broker.subscribe(CALLER, NAME, TOPIC)
        await note(broker, UNSUBSCRIBED, 0)
        assert await names_of(broker) == []
        await note(broker, SUBSCRIBED, 0)
        await broker.unsubscribe(CALLER, NAME, TOPIC)
        assert await names_of(broker) == []
        assert await notes_of(broker) == {}


async def test_a_note_that_is_repeated_changes_nothing_but_the_offset() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await publish_each(broker, b"a", b"b")
        for offset in (0, 1):
            assert await note(broker, SUBSCRIBED, offset) == [None]
        assert await names_of(broker) == [NAME]
        assert await broker.lag(CALLER, NAME, TOPIC) == 1
        for _ in range(2):
            assert await note(broker, UNSUBSCRIBED, 0) == [None]
        assert await names_of(broker) == []
        assert await notes_of(broker) == {0: (0, UNSUBSCRIBED)}, "of a group as any other"


async def test_of_partitions_without_a_commit_what_comes_is_wanted() -> None:
    async with open_broker(default_partitions=2) as broker:
        await broker.create_topic(CALLER, TOPIC)
        await publish(broker, b"before", partition=1)
        await note(broker, SUBSCRIBED, 0)
        await publish(broker, b"after", partition=1)
        assert values_of(await get_all(broker)) == [b"after"]


async def test_an_ephemeral_topic_goes_with_the_last_note() -> None:
    """R4."""
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(ephemeral=True))
        await note(broker, SUBSCRIBED, 0)
        assert await note(broker, UNSUBSCRIBED, 0) == [None]
        assert TOPIC not in broker.topics()


@pytest.mark.parametrize("name", ["two words", "publisher:quill"])
async def test_a_group_whose_name_no_subscription_can_have_is_refused_whole(name: str) -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        (outcome,) = await note(broker, SUBSCRIBED, 0, name=name)
        assert isinstance(outcome, InvalidRequest)
        assert await notes_of(broker, name) == {}
        assert await note(broker, "a note of its own", 0, name=name) == [None]


async def test_where_there_are_too_many_subscriptions_the_commit_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_limits, "SUBSCRIPTIONS", 1)
    async with open_broker() as broker:
        await broker.subscribe(CALLER, "first", TOPIC)
        (outcome,) = await note(broker, SUBSCRIBED, 0)
        assert isinstance(outcome, LimitReached)
        assert await names_of(broker) == ["first"]


async def test_a_name_in_use_by_last_id_is_not_unsubscribed_by_a_note() -> None:
    async with open_broker() as broker:
        await broker.subscribe(CALLER, NAME, TOPIC)
        await broker.get(CALLER, NAME, TOPIC, None)
        with pytest.raises(NameInOtherMode):
            await note(broker, UNSUBSCRIBED, 0)
        assert await names_of(broker) == [NAME]


async def test_notes_of_many_at_once_make_one_subscription_each(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        names = [f"duck-{number % 4}" for number in range(12)]
        outcomes = await asyncio.gather(*(note(broker, SUBSCRIBED, 0, name=name) for name in names))
        assert outcomes == [[None]] * 12
        assert sorted(await names_of(broker)) == sorted(set(names))


async def test_a_topic_that_goes_meanwhile_does_not_come_back_by_a_note(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        committing = asyncio.create_task(note(broker, SUBSCRIBED, 0))
        await asyncio.sleep(0)
        await broker.delete_topic(CALLER, TOPIC)
        (outcome,) = await committing
        assert outcome is None or isinstance(outcome, UnknownTopic)
        assert TOPIC not in broker.topics()
        assert await broker.subscriptions(CALLER) == []


async def test_what_members_have_committed_is_noted_as_ended_by_another_listener(
    pond: Pond,
) -> None:
    """They keep their offsets, but a client that looks at its note has unsubscribed."""
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2)
        await publish_each(broker, b"a", b"b")
        member = Member(broker, NAME)
        await member.enter()
        await note(broker, SUBSCRIBED, 1, 0, member=member.ref)
        await broker.unsubscribe(CALLER, NAME, TOPIC)
        assert await names_of(broker) == []
        assert await notes_of(broker) == {0: (1, UNSUBSCRIBED), 1: (0, UNSUBSCRIBED)}


async def test_a_note_makes_a_subscription_that_leaves_receipts_and_leaves_one_as_it_is(
    pond: Pond,
) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await publish(broker, b"a", b"b", b"c")
        # As confluent-kafka sends it, with the end of a string in C.
        assert await note(broker, SUBSCRIBED_WITH_RECEIPTS + "\0", 1) == [None]
        assert await note(broker, SUBSCRIBED, 1) == [None]
        assert await note(broker, SUBSCRIBED + "\0" + ":receipts", 1, name="other") == [None]
        assert await note(broker, SUBSCRIBED_WITH_RECEIPTS, 1, name="other") == [None]
        found = {each.name: each for each in await broker.subscriptions(CALLER)}
        assert {name: each.receipts for name, each in found.items()} == {NAME: True, "other": False}
        told = [json.loads(value) for value in await values_in(broker, RECEIPTS_TOPIC)]
        assert [(each["kind"], each["next_offset"]) for each in told] == [("begun", 1)]


@pytest.mark.parametrize("start", ["beginning", "end", Offset(1), Time(1_700_000_000_000)])
@pytest.mark.parametrize("receipts", [False, True])
async def test_a_note_says_where_the_subscription_begins(
    pond: Pond, start: Start, receipts: bool
) -> None:
    """The offsets beside it count; what it says is listed."""
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await publish(broker, b"a", b"b", b"c")
        assert await note(broker, subscribed_note(start, receipts=receipts) + "\0", 2) == [None]
        (found,) = await broker.subscriptions(CALLER)
        assert (found.start, found.receipts) == (start, receipts)
