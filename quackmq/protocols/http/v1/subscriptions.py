"""Subscriptions: durable, by name, one message at a time, exactly once.

`get` names the last received message and returns the next one. Without that name, or with an older
one, it returns the same message again. A consumer that stores the last id together with its own
result handles each message exactly once, even after a crash.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from quackmq import limits
from quackmq.broker import Subscription
from quackmq.errors import (
    IllegalTopicName,
    InvalidMessageId,
    LimitReached,
    NameInOtherMode,
    OffsetOutOfRange,
    StoreReadOnly,
    UnknownSubscription,
    UnknownTopic,
)
from quackmq.protocols.http.types import Request, Response
from quackmq.protocols.http.v1.messages import StoredMessage, stored
from quackmq.protocols.http.v1.operations import (
    JSON,
    LIMIT,
    NOTHING,
    TOPIC,
    Answer,
    Body,
    Operation,
    StartField,
    Text,
    WaitField,
    answered,
    json_body,
    start_of,
    start_shown,
)

_TAG: Final = "subscriptions"
_ONE: Final = "/v1/subscriptions/{name}/topics/{topic}"

MessageId = Annotated[str, Meta(description="The id of a message, as it came with it.")]


# --- shapes ---------------------------------------------------------------------------------------


class NewSubscription(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a new subscription begins. With `receipts` each step of its cursors is told to the
    topic `quackmq.receipts`, in the same change; this is also taken for one that is there, pushed
    or not, whose receipts stay as they are if nothing is said."""

    start: StartField = "end"
    receipts: bool | None = None


class Asking(Struct, frozen=True, forbid_unknown_fields=True):
    """`last_id` is the id of the last message that was received and is done with; without it, or
    with any other, the outstanding message comes again."""

    last_id: MessageId | None = None
    wait_ms: WaitField = 0


class Done(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything of this message's partition up to and including it is done with."""

    id: MessageId


class Move(Struct, frozen=True, forbid_unknown_fields=True):
    """Where to go on."""

    to: StartField


class PushedShape(Struct, frozen=True):
    """How a pushed subscription is served: every entry, or what is live; how long an entry is lent
    before it is sent again; how many may be lent at once; how many of the newest come first."""

    reading: Literal["every", "live"]
    lease_ms: int
    outstanding: int
    window: int


class SubscriptionShape(Struct, frozen=True, rename={"offsets": "next_offsets"}):
    """A name's interest in a topic. `next_offsets` are those that it wants next, by partition;
    `receipts` says whether it leaves any. `pushed` is there for one that a door pushes: everything
    before its `next_offsets` is acknowledged, and perhaps more."""

    name: str
    topic: str
    start: StartField
    created_ms: int
    offsets: list[int]
    receipts: bool
    pushed: PushedShape | UnsetType = UNSET


class SubscriptionSummary(Struct, frozen=True):
    """A name's interest in a topic, and whether it leaves receipts."""

    name: str
    topic: str
    start: StartField
    created_ms: int
    receipts: bool
    pushed: PushedShape | UnsetType = UNSET


class SubscriptionPage(Struct, frozen=True):
    """Subscriptions by name and topic. `next` goes into `after` to ask for more; null where there
    are no more."""

    subscriptions: list[SubscriptionSummary]
    next: str | None


class Lag(Struct, frozen=True):
    """How many messages are still to come, the outstanding one included, and how many the
    subscription has lost since it began: the topic let go of them, or they cannot be read. Of one
    that is pushed also how many are outstanding, were acknowledged, and were skipped as too old."""

    lag: int
    lost: int
    outstanding: int | UnsetType = UNSET
    acked: int | UnsetType = UNSET
    skipped: int | UnsetType = UNSET


# --- parameters and bodies ------------------------------------------------------------------------

NAME: Final = Text(
    name="name",
    where="path",
    required=True,
    about="A subscription's name: one printable word.",
    most=limits.NAME_BYTES,
)
ONLY_NAME: Final = Text(
    name="name", about="Only subscriptions of this name.", most=limits.NAME_BYTES
)
ONLY_TOPIC: Final = Text(
    name="topic", about="Only subscriptions to this topic.", most=limits.TOPIC_NAME_CHARS
)
#: Neither a name nor a topic contains a space.
AFTER: Final = Text(
    name="after", about="It is the `next` of the page before.", pattern="[^ ]+ [^ ]+"
)

NEW: Final = Body("Where it begins.", {JSON: NewSubscription}, required=False)
ASKING: Final = Body("What was received last.", {JSON: Asking}, required=False)
DONE: Final = Body("What is done with.", {JSON: Done})
MOVE: Final = Body("Where to go on.", {JSON: Move})

_new: Final = msgspec.json.Decoder(NewSubscription)
_asking: Final = msgspec.json.Decoder(Asking)
_done: Final = msgspec.json.Decoder(Done)
_move: Final = msgspec.json.Decoder(Move)


# --- handlers -------------------------------------------------------------------------------------


async def list_subscriptions(request: Request) -> Response:
    after, limit = _after(AFTER.given(request)), LIMIT.of(request)
    found = await request.broker.subscriptions(
        request.caller,
        name=ONLY_NAME.given(request),
        topic_name=ONLY_TOPIC.given(request),
        after=after,
        limit=limit + 1,
    )
    page = [
        SubscriptionSummary(
            each.name,
            each.topic_name,
            start_shown(each.start),
            each.created_ms,
            each.receipts,
            _pushed(each),
        )
        for each in found[:limit]
    ]
    more = f"{page[-1].name} {page[-1].topic}" if len(found) > limit else None
    return answered(200, SubscriptionPage(page, more))


async def subscribe(request: Request) -> Response:
    new = json_body(request, NEW, _new)
    name, topic = NAME.of(request), TOPIC.of(request)
    is_new = await request.broker.subscribe(
        request.caller, name, topic, start_of(new.start), new.receipts
    )
    return answered(201 if is_new else 200, await _described(request))


async def describe(request: Request) -> Response:
    return answered(200, await _described(request))


async def unsubscribe(request: Request) -> Response:
    await request.broker.unsubscribe(request.caller, NAME.of(request), TOPIC.of(request))
    return NOTHING


async def get(request: Request) -> Response:
    asking = json_body(request, ASKING, _asking)
    message = await request.broker.get(
        request.caller, NAME.of(request), TOPIC.of(request), asking.last_id, asking.wait_ms
    )
    return NOTHING if message is None else answered(200, stored(message))


async def acknowledge(request: Request) -> Response:
    done = json_body(request, DONE, _done)
    await request.broker.commit(request.caller, NAME.of(request), TOPIC.of(request), done.id)
    return NOTHING


async def seek(request: Request) -> Response:
    move = json_body(request, MOVE, _move)
    to = start_of(move.to)
    await request.broker.seek(request.caller, NAME.of(request), TOPIC.of(request), to)
    return NOTHING


async def lag(request: Request) -> Response:
    name, topic = NAME.of(request), TOPIC.of(request)
    (found,) = await request.broker.subscriptions(request.caller, name=name, topic_name=topic) or (
        None,
    )
    if found is None or found.mode != "pushed":
        return answered(200, Lag(*await request.broker.standing(request.caller, name, topic)))
    pushed = await request.broker.pushing.progress(request.caller, name, topic)
    counts = pushed.counts
    shown = Lag(pushed.lag, counts.lost, pushed.outstanding, counts.acked, counts.skipped)
    return answered(200, shown)


# --- helpers --------------------------------------------------------------------------------------


def _after(text: str | None) -> tuple[str, str]:
    name, _, topic = (text or "").partition(" ")
    return name, topic


async def _described(request: Request) -> SubscriptionShape:
    name, topic = NAME.of(request), TOPIC.of(request)
    found = await request.broker.subscriptions(request.caller, name=name, topic_name=topic)
    if not found:
        raise UnknownSubscription(f"{name[:100]!r} has not subscribed to topic {topic}")
    (each,) = found
    return SubscriptionShape(
        each.name,
        each.topic_name,
        start_shown(each.start),
        each.created_ms,
        list(each.cursors),
        each.receipts,
        _pushed(each),
    )


def _pushed(subscription: Subscription) -> PushedShape | UnsetType:
    terms = subscription.terms
    if terms is None:
        return UNSET
    return PushedShape(terms.reading, terms.lease_ms, terms.outstanding, terms.window)


# --- operations -----------------------------------------------------------------------------------

_BY_NAME: Final = (NAME, TOPIC)
_UNKNOWN: Final = (UnknownTopic, UnknownSubscription)

OPERATIONS: Final = (
    Operation(
        name="listSubscriptions",
        tag=_TAG,
        method="GET",
        path="/v1/subscriptions",
        handler=list_subscriptions,
        about="List subscriptions: all, those of a name, those to a topic.",
        parameters=(ONLY_NAME, ONLY_TOPIC, AFTER, LIMIT),
        answers={200: Answer("A page of subscriptions.", SubscriptionPage)},
        errors=(UnknownTopic,),
    ),
    Operation(
        name="subscribe",
        tag=_TAG,
        method="PUT",
        path=_ONE,
        handler=subscribe,
        about="Subscribe a name to a topic, until it is unsubscribed. What it has not read is kept "
        "for it, as long as the topic's policy says. The topic may come to life by it; a "
        "subscription that is there stays as it is.",
        parameters=_BY_NAME,
        body=NEW,
        answers={
            201: Answer("It is there now.", SubscriptionShape),
            200: Answer("It was there, and is as it was.", SubscriptionShape),
        },
        errors=(
            IllegalTopicName,
            UnknownTopic,
            OffsetOutOfRange,
            NameInOtherMode,
            LimitReached,
            StoreReadOnly,
        ),
    ),
    Operation(
        name="describeSubscription",
        tag=_TAG,
        method="GET",
        path=_ONE,
        handler=describe,
        about="Describe a subscription.",
        parameters=_BY_NAME,
        answers={200: Answer("The subscription.", SubscriptionShape)},
        errors=_UNKNOWN,
    ),
    Operation(
        name="unsubscribe",
        tag=_TAG,
        method="DELETE",
        path=_ONE,
        handler=unsubscribe,
        about="End a subscription. With its last one an ephemeral topic goes.",
        parameters=_BY_NAME,
        answers={204: Answer("It is gone.")},
        errors=(*_UNKNOWN, StoreReadOnly),
    ),
    Operation(
        name="getMessage",
        tag=_TAG,
        method="POST",
        path=f"{_ONE}/get",
        handler=get,
        about="Get the next message, naming the last one that was received. Until a message is "
        "named, it comes again.",
        parameters=_BY_NAME,
        body=ASKING,
        answers={
            200: Answer("The message.", StoredMessage),
            204: Answer("There is none, also after having waited."),
        },
        errors=(*_UNKNOWN, InvalidMessageId, NameInOtherMode, StoreReadOnly),
        waits=True,
    ),
    Operation(
        name="acknowledge",
        tag=_TAG,
        method="POST",
        path=f"{_ONE}/ack",
        handler=acknowledge,
        about="Be done with everything of a message's partition up to and including it.",
        parameters=_BY_NAME,
        body=DONE,
        answers={204: Answer("It is behind, and stays so.")},
        errors=(*_UNKNOWN, InvalidMessageId, NameInOtherMode, StoreReadOnly),
    ),
    Operation(
        name="seek",
        tag=_TAG,
        method="POST",
        path=f"{_ONE}/seek",
        handler=seek,
        about="Go on from somewhere else, further on or back.",
        parameters=_BY_NAME,
        body=MOVE,
        answers={204: Answer("It goes on from there.")},
        errors=(*_UNKNOWN, OffsetOutOfRange, NameInOtherMode, StoreReadOnly),
    ),
    Operation(
        name="lag",
        tag=_TAG,
        method="GET",
        path=f"{_ONE}/lag",
        handler=lag,
        about="How far a subscription is behind, and how much it has lost.",
        parameters=_BY_NAME,
        answers={200: Answer("The lag.", Lag)},
        errors=_UNKNOWN,
    ),
)
