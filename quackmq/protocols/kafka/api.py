"""The description of an API, and the context that its handler gets.

For most APIs the handler is a coroutine from kio's request entity to response fields
(`schema_api`). Produce and Fetch have hand-written codecs and fill in an `Api` themselves.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

from kio.schema.errors import ErrorCode

from quackmq import limits
from quackmq.broker import Broker, Caller
from quackmq.errors import UnknownTopic
from quackmq.model.topic import PartitionKey, Slice, Topic
from quackmq.protocols.kafka.codec.reader import read_request
from quackmq.protocols.kafka.codec.writer import EncodedArray, Fields, write_response
from quackmq.protocols.kafka.errors import code_of
from quackmq.records.batch import Buffer

T = TypeVar("T")


class Node(NamedTuple):
    """This broker as clients see it: the only node of its cluster."""

    id: int
    host: str
    port: int


class Peer(Protocol):
    """The changing state of the connection that sent a request."""

    @property
    def may_wait(self) -> bool:
        """Whether a handler may wait; False while the server closes, when it must respond at
        once."""

    @property
    def response_bytes(self) -> int:
        """The size that a response should not exceed by much at the moment."""

    @property
    def encoded_topics(self) -> TopicDescriptions:
        """The encoded topics of Metadata, shared by all connections."""

    @property
    def last_response(self) -> LastResponse:
        """The last Fetch response of this server, which other connections may send too."""


class TopicDescriptions(Protocol):
    """Encode topics for a Metadata response, in the version of the call."""

    async def every_topic(self, call: Call, with_operations: bool) -> EncodedArray: ...

    async def topic(self, call: Call, topic: Topic, with_operations: bool) -> bytes: ...

    def error(
        self, call: Call, code: ErrorCode, name: str | None, topic_id: Any, with_operations: bool
    ) -> bytes:
        """Encode an error instead of a topic that cannot be described."""


class LastResponse:
    """The body of one response that many peers get, and the inputs it was built from. The same read
    returns the same slice, so `slice_` is compared by identity.
    """

    __slots__ = ("body", "inputs", "slice_")

    def __init__(self) -> None:
        self.slice_: Slice | None = None
        self.inputs: tuple[object, ...] = ()
        self.body: list[Buffer] = []


class Watch(Protocol):
    """A wait that can be cancelled."""

    def cancel(self) -> None: ...


class Call(NamedTuple):
    """The context of one request."""

    broker: Broker
    caller: Caller
    node: Node
    version: int
    peer: Peer


class ResponseSlot(Protocol):
    """The slot of one response in its connection's order. Call exactly one method, once."""

    def send(self, body: Sequence[Buffer]) -> None:
        """Send the body; the buffers must not change after this call."""

    def skip(self) -> None:
        """Send no response to this request."""

    def handle(self, request: Any) -> None:
        """Pass the unanswered rest of a waiting request to the API's `handle`."""

    def disconnect(self, reason: str) -> None: ...


class PublishedInPortions(Protocol):
    """A request with so many batches that they are published in several turns of the loop."""

    is_finished: bool

    def publish(self, most_batches: int) -> int:
        """Publish at most this many batches; return their number. The request's bytes need to be
        valid only during the first call."""


class Api(NamedTuple):
    """An API with its advertised versions.

    `read` decodes a body into a request. It may keep views of the bytes only as far as `submit`
    uses them: until `submit` returns, or longer if `submit` is told that it owns the bytes. Then
    one of two functions answers the request. `handle` starts when all earlier responses of the
    connection have been sent. `submit` starts at once and sends the response through its slot. If
    `submit` returns an object, the connection calls its `publish` at once, and again in later turns
    of the loop.

    `try_immediately` is called before `handle`, if all earlier responses have been sent. It returns
    the body of the response; or a wait, which ends with a call of the response slot; or None, and
    then `handle` makes the response.
    """

    key: int
    first_version: int
    last_version: int
    #: The first version with flexible headers and compact lengths.
    flexible_from: int
    read: Callable[[int, memoryview], Any]
    handle: Callable[[Call, Any], Coroutine[Any, Any, Sequence[Buffer]]] | None = None
    submit: Callable[[Call, Any, ResponseSlot, bool], PublishedInPortions | None] | None = None
    #: Whether `handle` may wait for an event; it is then interrupted when the server closes.
    may_wait: bool = False
    has_flexible_response: bool = True
    #: Called when a request arrives that cannot start yet.
    on_arrival: Callable[[Call, Any], None] | None = None
    try_immediately: Callable[[Call, Any, ResponseSlot], list[Buffer] | Watch | None] | None = None


def schema_api(
    key: int,
    first_version: int,
    last_version: int,
    flexible_from: int,
    respond: Callable[[Call, Any], Awaitable[Fields]],
    *,
    may_wait: bool = False,
    has_flexible_response: bool = True,
    on_arrival: Callable[[Call, Any], None] | None = None,
) -> Api:
    """Make an API from kio's schemas; `respond` returns the response's fields for any version."""

    def read(version: int, body: memoryview) -> Any:
        return read_request(key, version, body)

    async def handle(call: Call, request: Any) -> Sequence[Buffer]:
        return [write_response(key, call.version, await respond(call, request))]

    return Api(
        key,
        first_version,
        last_version,
        flexible_from,
        read,
        handle,
        may_wait=may_wait,
        has_flexible_response=has_flexible_response,
        on_arrival=on_arrival,
    )


async def iterate_yielding(items: Iterable[T], every: int) -> AsyncIterator[T]:
    """Yield the items; let other tasks run after every `every` items, because lists may be long."""
    for number, item in enumerate(items, start=1):
        yield item
        if number % every == 0:
            await asyncio.sleep(0)


def in_chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in order, in lists of at most `size`."""
    remaining = iter(items)
    while chunk := list(islice(remaining, size)):
        yield chunk


async def gather_in_chunks(changes: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await many changes, a limited number at a time, and return their results. The changes of
    one chunk become durable together; other tasks run between chunks."""
    results: list[T] = []
    for chunk in in_chunks(changes, limits.CHANGES_AT_ONCE):
        results += await asyncio.gather(*chunk)
    return results


def group_by_topic(broker: Broker, keys: Iterable[PartitionKey]) -> list[tuple[Topic, list[int]]]:
    """Group partitions by topic; omit those of deleted topics."""
    found = [
        (find_topic(broker, topic_id), partitions)
        for topic_id, partitions in group_by_topic_id(keys).items()
    ]
    return [(topic, partitions) for topic, partitions in found if isinstance(topic, Topic)]


def group_by_topic_id(keys: Iterable[PartitionKey]) -> dict[uuid.UUID, list[int]]:
    """Group partitions by topic id; sort the partitions of each topic."""
    partitions_by_id: dict[uuid.UUID, list[int]] = {}
    for topic_id, partition in keys:
        partitions_by_id.setdefault(topic_id, []).append(partition)
    return {topic_id: sorted(partitions) for topic_id, partitions in partitions_by_id.items()}


def find_topic(broker: Broker, name_or_id: str | uuid.UUID | None) -> Topic | ErrorCode:
    """Find a topic by the name or id that a request gives; return an error code if it is
    unknown."""
    try:
        if isinstance(name_or_id, str):
            return broker.topic(name_or_id)
        if name_or_id is not None:
            return broker.topic_by_id(name_or_id)
    except UnknownTopic as error:
        if isinstance(name_or_id, str):
            return code_of(error)
    return ErrorCode.unknown_topic_id


def find_partitions(
    broker: Broker, name_or_id: str | uuid.UUID | None, partitions: Iterable[int]
) -> list[PartitionKey | ErrorCode]:
    """Return the keys of a topic's partitions, without checking that the topic has them. If the
    topic is unknown, return the error code for each partition instead."""
    topic_or_error = find_topic(broker, name_or_id)
    if isinstance(topic_or_error, Topic):
        return [PartitionKey(topic_or_error.id, partition) for partition in partitions]
    return [topic_or_error for _ in partitions]


async def change_together(
    changes_by_topic: Iterable[Sequence[T | ErrorCode]],
    make_changes: Callable[[list[T]], Awaitable[Iterable[ErrorCode]]],
) -> list[list[ErrorCode]]:
    """Make the changes of all partitions in one call of `make_changes`, which returns an error code
    for each. `changes_by_topic` has a list for each topic of a request; an error code in it refuses
    the change of its partition. Return the error codes of all partitions in the same lists."""
    lists = list(changes_by_topic)
    changes = [each for topic in lists for each in topic if not isinstance(each, ErrorCode)]
    codes = iter(await make_changes(changes))
    return [
        [each if isinstance(each, ErrorCode) else next(codes) for each in topic] for topic in lists
    ]
