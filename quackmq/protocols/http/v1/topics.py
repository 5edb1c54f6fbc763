"""Topics: list, create, use, describe, alter, delete.

Policies have their own names here, with numbers, booleans and words as values; null means no bound.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from quackmq import limits
from quackmq.errors import (
    IllegalTopicName,
    InvalidPolicy,
    LimitReached,
    StoreReadOnly,
    TopicExists,
    UnknownTopic,
)
from quackmq.model.policy import POLICY_DOCUMENTATION, Policy, number_bounds
from quackmq.model.topic import PartitionKey, Topic
from quackmq.protocols.http.types import Request, Response
from quackmq.protocols.http.v1.operations import (
    JSON,
    LIMIT,
    NOTHING,
    TOPIC,
    Answer,
    Body,
    Number,
    Operation,
    Text,
    answered,
    json_body,
)

_TAG: Final = "topics"


# --- shapes ---------------------------------------------------------------------------------------


def _policy_fields(*, optional: bool) -> Iterable[Any]:
    """Yield the fields of a policy with their types. A missing optional field changes nothing."""
    for field in dataclasses.fields(Policy):
        kind: Any = type(field.default)
        if not issubclass(kind, bool | StrEnum):  # a number, or None for no bound
            least, most = number_bounds(field.name)
            kind = Annotated[int, Meta(ge=least, le=most)] | None
        kind = Annotated[kind, Meta(description=POLICY_DOCUMENTATION[field.name])]
        yield (field.name, kind | UnsetType, UNSET) if optional else (field.name, kind)


PolicyChanges: Any = msgspec.defstruct(
    "PolicyChanges",
    list(_policy_fields(optional=True)),
    frozen=True,
    forbid_unknown_fields=True,
    module=__name__,
    namespace={"__doc__": "What is to be changed of a topic's policy; null is for no bound."},
)
TopicPolicy: Any = msgspec.defstruct(
    "TopicPolicy",
    list(_policy_fields(optional=False)),
    frozen=True,
    module=__name__,
    namespace={
        "__doc__": "What a topic keeps, for how long, and what it does when it is full; null is "
        "for no bound."
    },
)

Partitions = Annotated[int, Meta(ge=1, le=limits.PARTITIONS_PER_TOPIC)]
TopicName = Annotated[str, Meta(pattern=f"^[A-Za-z0-9._-]{{1,{limits.TOPIC_NAME_CHARS}}}$")]


class NewTopic(Struct, frozen=True, forbid_unknown_fields=True):
    """A topic to be created; what is not said is as the broker's settings have it."""

    name: TopicName
    partitions: Partitions | None = None
    policy: PolicyChanges | None = None


class TopicChanges(Struct, frozen=True, forbid_unknown_fields=True):
    """What is to be changed: more partitions, another policy; the rest of it stays as it is."""

    partitions: Partitions | None = None
    policy: PolicyChanges | None = None


class HeldBackShape(Struct, frozen=True):
    """Entries of a partition that the topic's policy would let go of, but for a subscription or a
    group: from `first_offset` up to, not including, `end_offset`. `name` has been at `offset` since
    `since_ms`; `others` hold some of them, too."""

    partition: int
    first_offset: int
    end_offset: int
    name: str
    offset: int
    since_ms: int
    others: int


class TopicSummary(Struct, frozen=True):
    """A topic, in short. A topic made anew under an old name has another id. `held_back` says what
    retention waits for, of some partitions, as of the last cleaning."""

    name: str
    id: str
    partition_count: int
    created_ms: int
    held_back: list[HeldBackShape]


class TopicPage(Struct, frozen=True):
    """Topics by name. `next` goes into `after` to ask for more; null where there are no more."""

    topics: list[TopicSummary]
    next: str | None


class PartitionOffsets(Struct, frozen=True):
    """Messages lie from `first_offset` up to, not including, `next_offset`; up to `stable_offset`
    no transaction is open, and readers here read as far."""

    partition: int
    first_offset: int
    next_offset: int
    stable_offset: int


class TopicDescription(TopicSummary, frozen=True):
    """A topic with its policy and some of its partitions. `next_partition` goes into
    `from_partition` to ask for more; null where there are no more."""

    policy: TopicPolicy
    partitions: list[PartitionOffsets]
    next_partition: int | None


# --- handlers -------------------------------------------------------------------------------------

AFTER: Final = Text(
    name="after",
    about="Only topics whose names come after this one.",
    most=limits.TOPIC_NAME_CHARS,
)
FROM_PARTITION: Final = Number(
    name="from_partition",
    most=limits.PARTITIONS_PER_TOPIC - 1,
    default=0,
    about="The first partition to describe.",
)
NEW_TOPIC: Final = Body("The topic to be created.", {JSON: NewTopic})
CHANGES: Final = Body("What is to be changed.", {JSON: TopicChanges})

_new_topic: Final = msgspec.json.Decoder(NewTopic)
_changes: Final = msgspec.json.Decoder(TopicChanges)


async def list_topics(request: Request) -> Response:
    after, limit = AFTER.given(request) or "", LIMIT.of(request)
    topics = request.broker.topics()
    names = heapq.nsmallest(limit + 1, (name for name in topics if name > after))
    page = [TopicSummary(*_summary(request, topics[name])) for name in names[:limit]]
    return answered(200, TopicPage(page, names[limit - 1] if len(names) > limit else None))


async def create_topic(request: Request) -> Response:
    new = json_body(request, NEW_TOPIC, _new_topic)
    policy = None
    if new.policy is not None:
        policy = _changed(request.broker.settings.default_policy, new.policy)
    topic = await request.broker.create_topic(
        request.caller, new.name, partitions=new.partitions, policy=policy
    )
    location = ("location", f"/v1/topics/{topic.name}")
    return answered(201, await _description(request, topic), (location,))


async def use_topic(request: Request) -> Response:
    topic = await request.broker.ensure_topic(request.caller, TOPIC.of(request))
    return answered(200, await _description(request, topic))


async def describe_topic(request: Request) -> Response:
    topic = request.broker.topic(TOPIC.of(request))
    begin, limit = FROM_PARTITION.of(request), LIMIT.of(request)
    return answered(200, await _description(request, topic, begin, limit))


async def alter_topic(request: Request) -> Response:
    changes = json_body(request, CHANGES, _changes)

    def changed(policy: Policy) -> Policy:
        return _changed(policy, changes.policy)

    topic = await request.broker.alter_topic(
        request.caller,
        TOPIC.of(request),
        partitions=changes.partitions,
        policy=None if changes.policy is None else changed,
    )
    return answered(200, await _description(request, topic))


async def delete_topic(request: Request) -> Response:
    await request.broker.delete_topic(request.caller, TOPIC.of(request))
    return NOTHING


# --- helpers --------------------------------------------------------------------------------------


def _changed(policy: Policy, changes: Any) -> Policy:
    given = {
        name: value
        for name in changes.__struct_fields__
        if (value := getattr(changes, name)) is not UNSET
    }
    return dataclasses.replace(policy, **given)


async def _description(
    request: Request, topic: Topic, begin: int = 0, limit: int = LIMIT.default or 1
) -> TopicDescription:
    partitions = []
    end = min(begin + limit, topic.partitions)
    for partition in range(begin, end):
        key = PartitionKey(topic.id, partition)
        offsets = await request.broker.offsets(request.caller, key)
        partitions.append(PartitionOffsets(partition, offsets.first, offsets.next, offsets.stable))
    policy = TopicPolicy(*(getattr(topic.policy, name) for name in TopicPolicy.__struct_fields__))
    more = end if end < topic.partitions else None
    return TopicDescription(*_summary(request, topic), policy, partitions, more)


def _summary(request: Request, topic: Topic) -> tuple[str, str, int, int, list[HeldBackShape]]:
    # Skip the first field, the topic's name, which the summary already has.
    held = [HeldBackShape(*each[1:]) for each in request.broker.held_back.all(topic.id)]
    return topic.name, str(topic.id), topic.partitions, topic.created_ms, held


# --- operations -----------------------------------------------------------------------------------

OPERATIONS: Final = (
    Operation(
        name="listTopics",
        tag=_TAG,
        method="GET",
        path="/v1/topics",
        handler=list_topics,
        about="List topics by name, a page at a time.",
        parameters=(AFTER, LIMIT),
        answers={200: Answer("A page of topics.", TopicPage)},
    ),
    Operation(
        name="createTopic",
        tag=_TAG,
        method="POST",
        path="/v1/topics",
        handler=create_topic,
        about="Create a topic.",
        body=NEW_TOPIC,
        answers={201: Answer("It is there, and will be after a crash.", TopicDescription)},
        errors=(IllegalTopicName, InvalidPolicy, TopicExists, LimitReached, StoreReadOnly),
    ),
    Operation(
        name="useTopic",
        tag=_TAG,
        method="PUT",
        path="/v1/topics/{topic}",
        handler=use_topic,
        about="Describe a topic, and create it with the broker's defaults if it is not there, as "
        "its first message would. A broker that creates no topics by their first use refuses that.",
        parameters=(TOPIC,),
        answers={200: Answer("The topic.", TopicDescription)},
        errors=(IllegalTopicName, UnknownTopic, LimitReached, StoreReadOnly),
    ),
    Operation(
        name="describeTopic",
        tag=_TAG,
        method="GET",
        path="/v1/topics/{topic}",
        handler=describe_topic,
        about="Describe a topic: its policy, and its partitions with their offsets.",
        parameters=(TOPIC, FROM_PARTITION, LIMIT),
        answers={200: Answer("The topic.", TopicDescription)},
        errors=(UnknownTopic,),
    ),
    Operation(
        name="alterTopic",
        tag=_TAG,
        method="PATCH",
        path="/v1/topics/{topic}",
        handler=alter_topic,
        about="Change a topic's policy, or give it more partitions.",
        parameters=(TOPIC,),
        body=CHANGES,
        answers={200: Answer("The topic as it is now.", TopicDescription)},
        errors=(UnknownTopic, InvalidPolicy, LimitReached, StoreReadOnly),
    ),
    Operation(
        name="deleteTopic",
        tag=_TAG,
        method="DELETE",
        path="/v1/topics/{topic}",
        handler=delete_topic,
        about="Delete a topic, with all that it holds and all its subscriptions.",
        parameters=(TOPIC,),
        answers={204: Answer("It is gone.")},
        errors=(UnknownTopic, StoreReadOnly),
    ),
)
