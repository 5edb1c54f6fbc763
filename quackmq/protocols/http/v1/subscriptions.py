"""Subscriptions: durable, by name, one message at a time, exactly once.

`get` names the last received message and returns the next one. Without that name, or with an older
one, it returns the same message again. A consumer that stores the last id together with its own
result handles each message exactly once, even after a crash.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

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
from quackmq.protocols.http.v1.messages import StoredMessage, to_stored_message
from quackmq.protocols.http.v1.operations import (
    LIMIT,
    NO_CONTENT,
    TOPIC,
    JsonBody,
    Operation,
    ResponseInfo,
    StartField,
    Text,
    WaitField,
    cut_page,
    json_response,
    parse_start,
    render_start,
)

_TAG: Final = "subscriptions"
_ONE_PATH: Final = "/v1/subscriptions/{name}/topics/{topic}"

MessageId = Annotated[str, Meta(description="The id of a message, unchanged.")]


# --- shapes ---------------------------------------------------------------------------------------


class NewSubscription(Struct, frozen=True, forbid_unknown_fields=True):
    """A subscription to be created: where it starts, and whether it leaves receipts. With
    `receipts`, each step of its cursors is recorded in the topic `quackmq.receipts`, in the same
    commit. `receipts` also changes an existing subscription, unless it is null."""

    start: StartField = "end"
    receipts: bool | None = None


class GetRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A request for the next message. `last_id` is the id of the last message that was received and
    processed. Without it, or with any other text, the outstanding message is sent again."""

    last_id: MessageId | None = None
    wait_ms: WaitField = 0


class Acknowledgement(Struct, frozen=True, forbid_unknown_fields=True):
    """The acknowledgement of this message and of all earlier ones in its partition."""

    id: MessageId


class SeekRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The position from which a subscription is to continue."""

    to: StartField


class PushedShape(Struct, frozen=True):
    """How entries are pushed to a subscription: every entry in order, live entries in order, or
    live entries with the newest first; how long an entry is leased before it is sent again; how
    many may be leased at the same time; how many of the newest come first, with `newest`."""

    reading: Literal["every", "live", "newest"]
    lease_ms: int
    outstanding: int
    window: int


class SubscriptionShape(Struct, frozen=True, rename={"offsets": "next_offsets"}):
    """A subscription. `next_offsets` are its cursors, by partition. `receipts` says whether it
    leaves receipts. A push subscription also has `pushed`; all entries before its `next_offsets`
    are acknowledged, and perhaps later ones."""

    name: str
    topic: str
    start: StartField
    created_ms: int
    offsets: list[int]
    receipts: bool
    pushed: PushedShape | UnsetType = UNSET


class SubscriptionSummary(Struct, frozen=True):
    """A subscription without its cursors."""

    name: str
    topic: str
    start: StartField
    created_ms: int
    receipts: bool
    pushed: PushedShape | UnsetType = UNSET


class SubscriptionPage(Struct, frozen=True):
    """Subscriptions, ordered by name and topic. Pass `next` as `after` to get more; it is null at
    the end."""

    subscriptions: list[SubscriptionSummary]
    next: str | None


class Lag(Struct, frozen=True):
    """The number of messages that the subscription has not processed, including the outstanding
    one, and the number that it has lost since it was created: the topic deleted them, or they
    cannot be read. For a push subscription also the numbers of outstanding, acknowledged and
    skipped (too old) entries."""

    lag: int
    lost: int
    outstanding: int | UnsetType = UNSET
    acked: int | UnsetType = UNSET
    skipped: int | UnsetType = UNSET


# --- parameters and bodies ------------------------------------------------------------------------

NAME: Final = Text(
    name="name",
    location="path",
    required=True,
    description="A subscription's name: one printable word.",
    max_chars=limits.NAME_BYTES,
)
ONLY_NAME: Final = Text(
    name="name", description="Only subscriptions of this name.", max_chars=limits.NAME_BYTES
)
ONLY_TOPIC: Final = Text(
    name="topic", description="Only subscriptions to this topic.", max_chars=limits.TOPIC_NAME_CHARS
)
#: Neither a name nor a topic contains a space.
AFTER: Final = Text(
    name="after", description="It is the `next` of the page before.", pattern="[^ ]+ [^ ]+"
)

NEW_SUBSCRIPTION: Final = JsonBody(
    NewSubscription, "The subscription to be created.", required=False
)
GET: Final = JsonBody(GetRequest, "The last received message.", required=False)
ACKNOWLEDGEMENT: Final = JsonBody(Acknowledgement, "The last processed message.")
SEEK: Final = JsonBody(SeekRequest, "The position to continue from.")


# --- handlers -------------------------------------------------------------------------------------


async def list_subscriptions(request: Request) -> Response:
    """Return a page of the subscriptions, sorted by name and topic."""
    after, limit = _parse_after(AFTER.get(request)), LIMIT.require(request)
    subscriptions = await request.broker.subscriptions(
        request.caller,
        name=ONLY_NAME.get(request),
        topic_name=ONLY_TOPIC.get(request),
        after=after,
        # One more than a page shows whether another page follows.
        limit=limit + 1,
    )
    page, last = cut_page(subscriptions, limit)
    summaries = [
        SubscriptionSummary(
            each.name,
            each.topic_name,
            render_start(each.start),
            each.created_ms,
            each.receipts,
            _push_shape(each),
        )
        for each in page
    ]
    next_after = None if last is None else f"{last.name} {last.topic_name}"
    return json_response(200, SubscriptionPage(summaries, next_after))


async def subscribe(request: Request) -> Response:
    """Create a subscription if there is none. Return status 201 if it is new, otherwise 200."""
    body = NEW_SUBSCRIPTION.decode(request)
    name, topic = NAME.require(request), TOPIC.require(request)
    is_new = await request.broker.subscribe(
        request.caller, name, topic, parse_start(body.start), body.receipts
    )
    return json_response(201 if is_new else 200, await _describe(request))


async def describe(request: Request) -> Response:
    return json_response(200, await _describe(request))


async def unsubscribe(request: Request) -> Response:
    await request.broker.unsubscribe(request.caller, NAME.require(request), TOPIC.require(request))
    return NO_CONTENT


async def get(request: Request) -> Response:
    """Return the message after the last received one, and status 204 if there is none in time."""
    body = GET.decode(request)
    message = await request.broker.get(
        request.caller, NAME.require(request), TOPIC.require(request), body.last_id, body.wait_ms
    )
    return NO_CONTENT if message is None else json_response(200, to_stored_message(message))


async def acknowledge(request: Request) -> Response:
    """Acknowledge a message and all messages before it in its partition."""
    body = ACKNOWLEDGEMENT.decode(request)
    await request.broker.commit(
        request.caller, NAME.require(request), TOPIC.require(request), body.id
    )
    return NO_CONTENT


async def seek(request: Request) -> Response:
    body = SEEK.decode(request)
    to = parse_start(body.to)
    await request.broker.seek(request.caller, NAME.require(request), TOPIC.require(request), to)
    return NO_CONTENT


async def lag(request: Request) -> Response:
    """Return the lag and the losses of a subscription. For a push subscription, also count its
    entries by state. Raise UnknownSubscription.
    """
    name, topic = NAME.require(request), TOPIC.require(request)
    subscriptions = await request.broker.subscriptions(request.caller, name=name, topic_name=topic)
    # A name and a topic have at most one subscription. If there is none, `lag_and_losses` raises
    # UnknownSubscription.
    if not subscriptions or subscriptions[0].mode != "pushed":
        return json_response(
            200, Lag(*await request.broker.lag_and_losses(request.caller, name, topic))
        )
    pushed = await request.broker.pushing.progress(request.caller, name, topic)
    counts = pushed.counts
    lag_counts = Lag(pushed.lag, counts.lost, pushed.outstanding, counts.acked, counts.skipped)
    return json_response(200, lag_counts)


# --- helpers --------------------------------------------------------------------------------------


def _parse_after(text: str | None) -> tuple[str, str]:
    name, _, topic = (text or "").partition(" ")
    return name, topic


async def _describe(request: Request) -> SubscriptionShape:
    """Return the subscription that the path names. Raise UnknownSubscription if there is none."""
    name, topic = NAME.require(request), TOPIC.require(request)
    subscriptions = await request.broker.subscriptions(request.caller, name=name, topic_name=topic)
    if not subscriptions:
        raise UnknownSubscription(f"{name[:100]!r} has not subscribed to topic {topic}")
    (subscription,) = subscriptions
    return SubscriptionShape(
        subscription.name,
        subscription.topic_name,
        render_start(subscription.start),
        subscription.created_ms,
        list(subscription.cursors),
        subscription.receipts,
        _push_shape(subscription),
    )


def _push_shape(subscription: Subscription) -> PushedShape | UnsetType:
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
        description="List subscriptions: all of them, those of a name, or those to a topic.",
        parameters=(ONLY_NAME, ONLY_TOPIC, AFTER, LIMIT),
        responses={200: ResponseInfo("A page of subscriptions.", SubscriptionPage)},
        errors=(UnknownTopic,),
    ),
    Operation(
        name="subscribe",
        tag=_TAG,
        method="PUT",
        path=_ONE_PATH,
        handler=subscribe,
        description="Subscribe a name to a topic, until it is unsubscribed. The topic keeps "
        "messages that the subscription has not read, for as long as its policy says. The topic is "
        "created if the broker allows that. An existing subscription does not change, except for "
        "`receipts`.",
        parameters=_BY_NAME,
        body=NEW_SUBSCRIPTION,
        responses={
            201: ResponseInfo("The subscription is created.", SubscriptionShape),
            200: ResponseInfo("The subscription existed already.", SubscriptionShape),
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
        path=_ONE_PATH,
        handler=describe,
        description="Describe a subscription.",
        parameters=_BY_NAME,
        responses={200: ResponseInfo("The subscription.", SubscriptionShape)},
        errors=_UNKNOWN,
    ),
    Operation(
        name="unsubscribe",
        tag=_TAG,
        method="DELETE",
        path=_ONE_PATH,
        handler=unsubscribe,
        description="End a subscription. An ephemeral topic is deleted with its last subscription.",
        parameters=_BY_NAME,
        responses={204: ResponseInfo("The subscription is ended.")},
        errors=(*_UNKNOWN, StoreReadOnly),
    ),
    Operation(
        name="getMessage",
        tag=_TAG,
        method="POST",
        path=f"{_ONE_PATH}/get",
        handler=get,
        description="Get the next message, and name the last one that was received. A message is "
        "sent again until it is named.",
        parameters=_BY_NAME,
        body=GET,
        responses={
            200: ResponseInfo("The message.", StoredMessage),
            204: ResponseInfo("There is no message, even after the wait."),
        },
        errors=(*_UNKNOWN, NameInOtherMode, StoreReadOnly),
        may_wait=True,
    ),
    Operation(
        name="acknowledge",
        tag=_TAG,
        method="POST",
        path=f"{_ONE_PATH}/ack",
        handler=acknowledge,
        description="Acknowledge a message and all earlier ones in its partition.",
        parameters=_BY_NAME,
        body=ACKNOWLEDGEMENT,
        responses={204: ResponseInfo("Acknowledged durably.")},
        errors=(*_UNKNOWN, InvalidMessageId, NameInOtherMode, StoreReadOnly),
    ),
    Operation(
        name="seek",
        tag=_TAG,
        method="POST",
        path=f"{_ONE_PATH}/seek",
        handler=seek,
        description="Move a subscription to another position, forward or back.",
        parameters=_BY_NAME,
        body=SEEK,
        responses={204: ResponseInfo("The subscription continues from there.")},
        errors=(*_UNKNOWN, OffsetOutOfRange, NameInOtherMode, StoreReadOnly),
    ),
    Operation(
        name="lag",
        tag=_TAG,
        method="GET",
        path=f"{_ONE_PATH}/lag",
        handler=lag,
        description="Count the messages that a subscription has not processed, and those it lost.",
        parameters=_BY_NAME,
        responses={200: ResponseInfo("The lag.", Lag)},
        errors=_UNKNOWN,
    ),
)
