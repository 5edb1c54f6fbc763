"""Topics: list, create, use, describe, alter, delete; and the defaults of new topics by pattern.

Policies have their own names here, with numbers, booleans and words as values; null means no bound.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from quackmq import limits
from quackmq.broker import TopicDefault
from quackmq.errors import (
    IllegalTopicName,
    InvalidPattern,
    InvalidPolicy,
    LimitReached,
    StoreReadOnly,
    TopicExists,
    UnknownTopic,
    UnknownTopicDefault,
)
from quackmq.model.policy import POLICY_DOCUMENTATION, Policy, number_bounds
from quackmq.model.topic import PartitionKey, Topic
from quackmq.protocols.http.types import Request, Response
from quackmq.protocols.http.v1.operations import (
    LIMIT,
    NO_CONTENT,
    TOPIC,
    JsonBody,
    Number,
    Operation,
    ResponseInfo,
    Schema,
    Text,
    cut_page,
    json_response,
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
    namespace={"__doc__": "The changes of a topic's policy; null means no bound."},
)
TopicPolicy: Any = msgspec.defstruct(
    "TopicPolicy",
    list(_policy_fields(optional=False)),
    frozen=True,
    module=__name__,
    namespace={
        "__doc__": "What a topic keeps, for how long, and what it does when it is full; null means "
        "no bound."
    },
)

Partitions = Annotated[int, Meta(ge=1, le=limits.PARTITIONS_PER_TOPIC)]
TopicName = Annotated[str, Meta(pattern=f"^[A-Za-z0-9._-]{{1,{limits.TOPIC_NAME_CHARS}}}$")]


class NewTopic(Struct, frozen=True, forbid_unknown_fields=True):
    """A topic to be created. The defaults of its name apply to everything that is missing."""

    name: TopicName
    partitions: Partitions | None = None
    policy: PolicyChanges | None = None


class TopicChanges(Struct, frozen=True, forbid_unknown_fields=True):
    """The changes of a topic: more partitions, or fields of its policy; the rest stays the same."""

    partitions: Partitions | None = None
    policy: PolicyChanges | None = None


class NewTopicDefault(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings that new topics get if their names match a pattern. At least one is set."""

    EXTRA_SCHEMA: ClassVar[Schema] = {"allOf": [{"properties": {"policy": {"minProperties": 1}}}]}

    policy: PolicyChanges


class TopicDefaultShape(Struct, frozen=True):
    """The settings of new topics whose names match `pattern`. `source` is `settings` if they come
    from the settings of the broker, and `stored` if they were set at run time."""

    pattern: str
    policy: PolicyChanges
    source: Literal["settings", "stored"]


class TopicDefaultList(Struct, frozen=True):
    """All patterns with defaults for new topics, in alphabetical order."""

    topic_defaults: list[TopicDefaultShape]


class HeldBackShape(Struct, frozen=True):
    """Entries of a partition that the topic would delete if a subscription or group did not hold
    them: from `first_offset` up to, not including, `end_offset`. The cursor of `name` has been at
    `offset` since `since_ms`. `others` is the number of further holders."""

    partition: int
    first_offset: int
    end_offset: int
    name: str
    offset: int
    since_ms: int
    others: int


class TopicSummary(Struct, frozen=True):
    """A short description of a topic. A topic that is created again under an old name has another
    id. `held_back` lists what retention waited for at its last run, for some partitions."""

    name: str
    id: str
    partition_count: int
    created_ms: int
    held_back: list[HeldBackShape]


class TopicPage(Struct, frozen=True):
    """Topics, ordered by name. Pass `next` as `after` to get more; it is null at the end."""

    topics: list[TopicSummary]
    next: str | None


class PartitionOffsets(Struct, frozen=True):
    """The offsets of a partition's messages: from `first_offset` up to, not including,
    `next_offset`. Readers of this API read up to `stable_offset`, before which no transaction is
    open."""

    partition: int
    first_offset: int
    next_offset: int
    stable_offset: int


class TopicDescription(TopicSummary, frozen=True):
    """A topic with its policy and some of its partitions. Pass `next_partition` as
    `from_partition` to get more; it is null at the end."""

    policy: TopicPolicy
    partitions: list[PartitionOffsets]
    next_partition: int | None


# --- handlers -------------------------------------------------------------------------------------

AFTER: Final = Text(
    name="after",
    description="Only topics whose names come after this one.",
    max_chars=limits.TOPIC_NAME_CHARS,
)
FROM_PARTITION: Final = Number(
    name="from_partition",
    maximum=limits.PARTITIONS_PER_TOPIC - 1,
    default=0,
    description="The first partition to describe.",
)
NEW_TOPIC: Final = JsonBody(NewTopic, "The topic to be created.")
CHANGES: Final = JsonBody(TopicChanges, "The changes.")
NEW_DEFAULT: Final = JsonBody(NewTopicDefault, "The settings.")
PATTERN: Final = Text(
    name="pattern",
    location="path",
    required=True,
    description="A pattern of topic names: `*` stands for any characters, `?` for one character.",
    pattern=f"[A-Za-z0-9._*?-]{{1,{limits.TOPIC_NAME_CHARS}}}",
)


async def list_topics(request: Request) -> Response:
    """Return a page of the topics, sorted by name."""
    after, limit = AFTER.get(request) or "", LIMIT.require(request)
    topics = request.broker.topics()
    # One more than a page shows whether another page follows.
    names = heapq.nsmallest(limit + 1, (name for name in topics if name > after))
    page, last = cut_page(names, limit)
    summaries = [TopicSummary(*_summary_fields(request, topics[name])) for name in page]
    return json_response(200, TopicPage(summaries, last))


async def create_topic(request: Request) -> Response:
    """Create a topic. Its policy is the default for its name, with the changes in the body."""
    body = NEW_TOPIC.decode(request)
    policy = None
    if body.policy is not None:
        default = request.broker.topic_defaults.policy_for(body.name)
        policy = dataclasses.replace(default, **_set_fields(body.policy))
    topic = await request.broker.create_topic(
        request.caller, body.name, partitions=body.partitions, policy=policy
    )
    location = ("location", f"/v1/topics/{topic.name}")
    return json_response(201, await _describe(request, topic), (location,))


async def use_topic(request: Request) -> Response:
    topic = await request.broker.ensure_topic(request.caller, TOPIC.require(request))
    return json_response(200, await _describe(request, topic))


async def describe_topic(request: Request) -> Response:
    topic = request.broker.topic(TOPIC.require(request))
    first_partition, limit = FROM_PARTITION.require(request), LIMIT.require(request)
    return json_response(200, await _describe(request, topic, first_partition, limit))


async def alter_topic(request: Request) -> Response:
    """Change a topic's number of partitions or its policy; return the topic."""
    changes = CHANGES.decode(request)

    # The broker calls this with the present policy. So a concurrent change of other fields is not
    # lost.
    def changed(policy: Policy) -> Policy:
        return dataclasses.replace(policy, **_set_fields(changes.policy))

    topic = await request.broker.alter_topic(
        request.caller,
        TOPIC.require(request),
        partitions=changes.partitions,
        policy=None if changes.policy is None else changed,
    )
    return json_response(200, await _describe(request, topic))


async def delete_topic(request: Request) -> Response:
    await request.broker.delete_topic(request.caller, TOPIC.require(request))
    return NO_CONTENT


async def list_topic_defaults(request: Request) -> Response:
    shapes = [_default_shape(each) for each in request.broker.topic_defaults.all()]
    return json_response(200, TopicDefaultList(shapes))


async def set_topic_default(request: Request) -> Response:
    """Set the defaults of a pattern durably; they replace those that it had."""
    body = NEW_DEFAULT.decode(request)
    default = await request.broker.topic_defaults.put(
        request.caller, PATTERN.require(request), _set_fields(body.policy)
    )
    return json_response(200, _default_shape(default))


async def remove_topic_default(request: Request) -> Response:
    await request.broker.topic_defaults.remove(request.caller, PATTERN.require(request))
    return NO_CONTENT


# --- helpers --------------------------------------------------------------------------------------


def _set_fields(changes: Any) -> dict[str, Any]:
    """Return the fields of a policy that are set in `changes`, which is a PolicyChanges."""
    return {
        name: value
        for name in changes.__struct_fields__
        if (value := getattr(changes, name)) is not UNSET
    }


def _default_shape(default: TopicDefault) -> TopicDefaultShape:
    return TopicDefaultShape(default.pattern, PolicyChanges(**default.settings), default.source)


async def _describe(
    request: Request, topic: Topic, first_partition: int = 0, limit: int = LIMIT.default or 1
) -> TopicDescription:
    """Describe a topic and at most `limit` of its partitions, from `first_partition` on."""
    partitions = []
    end = min(first_partition + limit, topic.partitions)
    for partition in range(first_partition, end):
        key = PartitionKey(topic.id, partition)
        offsets = await request.broker.offsets(request.caller, key)
        partitions.append(PartitionOffsets(partition, offsets.first, offsets.next, offsets.stable))
    policy = TopicPolicy(*(getattr(topic.policy, name) for name in TopicPolicy.__struct_fields__))
    next_partition = end if end < topic.partitions else None
    return TopicDescription(*_summary_fields(request, topic), policy, partitions, next_partition)


def _summary_fields(
    request: Request, topic: Topic
) -> tuple[str, str, int, int, list[HeldBackShape]]:
    """Return the fields that `TopicSummary` and `TopicDescription` share, in their order."""
    # Skip the first field, the topic's name, which the summary already has.
    held_back = [HeldBackShape(*each[1:]) for each in request.broker.held_back.all(topic.id)]
    return topic.name, str(topic.id), topic.partitions, topic.created_ms, held_back


# --- operations -----------------------------------------------------------------------------------

OPERATIONS: Final = (
    Operation(
        name="listTopics",
        tag=_TAG,
        method="GET",
        path="/v1/topics",
        handler=list_topics,
        description="List topics by name, a page at a time.",
        parameters=(AFTER, LIMIT),
        responses={200: ResponseInfo("A page of topics.", TopicPage)},
    ),
    Operation(
        name="createTopic",
        tag=_TAG,
        method="POST",
        path="/v1/topics",
        handler=create_topic,
        description="Create a topic.",
        body=NEW_TOPIC,
        responses={201: ResponseInfo("The topic is created durably.", TopicDescription)},
        errors=(IllegalTopicName, InvalidPolicy, TopicExists, LimitReached, StoreReadOnly),
    ),
    Operation(
        name="useTopic",
        tag=_TAG,
        method="PUT",
        path="/v1/topics/{topic}",
        handler=use_topic,
        description="Describe a topic; create it with the defaults of its name if it does not "
        "exist, as its first message would. A broker that does not create topics on first use "
        "refuses that.",
        parameters=(TOPIC,),
        responses={200: ResponseInfo("The topic.", TopicDescription)},
        errors=(IllegalTopicName, UnknownTopic, LimitReached, StoreReadOnly),
    ),
    Operation(
        name="describeTopic",
        tag=_TAG,
        method="GET",
        path="/v1/topics/{topic}",
        handler=describe_topic,
        description="Describe a topic: its policy, and its partitions with their offsets.",
        parameters=(TOPIC, FROM_PARTITION, LIMIT),
        responses={200: ResponseInfo("The topic.", TopicDescription)},
        errors=(UnknownTopic,),
    ),
    Operation(
        name="alterTopic",
        tag=_TAG,
        method="PATCH",
        path="/v1/topics/{topic}",
        handler=alter_topic,
        description="Change a topic's policy, or give it more partitions.",
        parameters=(TOPIC,),
        body=CHANGES,
        responses={200: ResponseInfo("The topic after the change.", TopicDescription)},
        errors=(UnknownTopic, InvalidPolicy, LimitReached, StoreReadOnly),
    ),
    Operation(
        name="deleteTopic",
        tag=_TAG,
        method="DELETE",
        path="/v1/topics/{topic}",
        handler=delete_topic,
        description="Delete a topic with all its messages and subscriptions.",
        parameters=(TOPIC,),
        responses={204: ResponseInfo("The topic is deleted.")},
        errors=(UnknownTopic, StoreReadOnly),
    ),
    Operation(
        name="listTopicDefaults",
        tag=_TAG,
        method="GET",
        path="/v1/topic-defaults",
        handler=list_topic_defaults,
        description="List the defaults of new topics by name pattern. If several patterns match a "
        "name, each setting comes from the most specific pattern that sets it.",
        responses={200: ResponseInfo("All patterns.", TopicDefaultList)},
    ),
    Operation(
        name="setTopicDefault",
        tag=_TAG,
        method="PUT",
        path="/v1/topic-defaults/{pattern}",
        handler=set_topic_default,
        description="Set the defaults of new topics whose names match a pattern. They replace the "
        "defaults that the pattern had. Topics that exist do not change.",
        parameters=(PATTERN,),
        body=NEW_DEFAULT,
        responses={200: ResponseInfo("The defaults are set durably.", TopicDefaultShape)},
        errors=(InvalidPattern, InvalidPolicy, LimitReached, StoreReadOnly),
    ),
    Operation(
        name="removeTopicDefault",
        tag=_TAG,
        method="DELETE",
        path="/v1/topic-defaults/{pattern}",
        handler=remove_topic_default,
        description="Remove the defaults of a pattern that was set at run time. Topics that exist "
        "do not change.",
        parameters=(PATTERN,),
        responses={204: ResponseInfo("The defaults are removed.")},
        errors=(UnknownTopicDefault, StoreReadOnly),
    ),
)
