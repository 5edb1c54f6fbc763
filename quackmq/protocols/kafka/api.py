"""What an API is to the door, and what its handler gets to work with.

Most APIs are a coroutine from kio's request entity to plain fields (`schema_api`). Produce and
Fetch, whose bytes are read and written by hand, fill in an `Api` themselves.
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
    """This broker as a peer is told of it: the one node of its cluster."""

    id: int
    host: str
    port: int


class Peer(Protocol):
    """Who sent a request, as far as that changes from moment to moment."""

    @property
    def may_wait(self) -> bool:
        """Not when the door closes: then the answer is wanted at once."""

    @property
    def answer_bytes(self) -> int:
        """An answer should not be much larger now."""

    @property
    def described(self) -> TopicDescriptions:
        """What Metadata says of topics, kept for all connections."""

    @property
    def last_answer(self) -> LastAnswer:
        """The door's last answer to a fetch that others may send, too."""


class TopicDescriptions(Protocol):
    """Topics as Metadata describes them, encoded in the version of the call."""

    async def every_topic(self, call: Call, with_operations: bool) -> EncodedArray: ...

    async def topic(self, call: Call, topic: Topic, with_operations: bool) -> bytes: ...

    def error(
        self, call: Call, code: ErrorCode, name: str | None, topic_id: Any, with_operations: bool
    ) -> bytes:
        """Describe the error in the place of a topic that cannot be described."""


class LastAnswer:
    """The body of one answer that many peers get, and what it was made of. The same read gives the
    same slice, so `part` is compared by identity."""

    __slots__ = ("body", "made_of", "part")

    def __init__(self) -> None:
        self.part: Slice | None = None
        self.made_of: tuple[object, ...] = ()
        self.body: list[Buffer] = []


class Watch(Protocol):
    """A wait that can be ended."""

    def cancel(self) -> None: ...


class Call(NamedTuple):
    """One request's surroundings."""

    broker: Broker
    caller: Caller
    node: Node
    version: int
    peer: Peer


class Reply(Protocol):
    """The place of one answer among its connection's. Just one of these is called, once."""

    def send(self, body: Sequence[Buffer]) -> None:
        """The body as buffers, which must not change from now on."""

    def skip(self) -> None:
        """There is no answer to this request."""

    def handle(self, request: Any) -> None:
        """Leave a request that has been waiting, as far as it is still open, to the API's
        `handle`."""

    def disconnect(self, reason: str) -> None: ...


class Api(NamedTuple):
    """An API with the versions that are advertised.

    `read` turns a body into a request and keeps nothing of the bytes but what `submit` may use
    before it returns, or for good if it is told that they are its own. Then either `handle` answers
    the request, begun when all earlier answers of the connection have been sent; or `submit` begins
    at once and answers through the reply.

    `at_once` is asked before `handle`, if all earlier answers have been sent. It returns the body
    of the answer; or a wait, which ends with a call of the reply; or None: `handle` answers then.
    """

    key: int
    first_version: int
    last_version: int
    #: From this version on, the request's header and lengths are of the flexible kind.
    flexible_from: int
    read: Callable[[int, memoryview], Any]
    handle: Callable[[Call, Any], Coroutine[Any, Any, Sequence[Buffer]]] | None = None
    submit: Callable[[Call, Any, Reply, bool], None] | None = None
    #: Whether `handle` may wait for something to happen: then it is woken when the door closes.
    waits: bool = False
    flexible_response: bool = True
    #: Called with a request that cannot begin yet, when it comes.
    arrived: Callable[[Call, Any], None] | None = None
    at_once: Callable[[Call, Any, Reply], list[Buffer] | Watch | None] | None = None


def schema_api(
    key: int,
    first_version: int,
    last_version: int,
    flexible_from: int,
    answer: Callable[[Call, Any], Awaitable[Fields]],
    *,
    waits: bool = False,
    flexible_response: bool = True,
    arrived: Callable[[Call, Any], None] | None = None,
) -> Api:
    """An API by kio's schemas: `answer` gives the fields of the response, whatever the version."""

    def read(version: int, body: memoryview) -> Any:
        return read_request(key, version, body)

    async def handle(call: Call, request: Any) -> Sequence[Buffer]:
        return [write_response(key, call.version, await answer(call, request))]

    return Api(
        key,
        first_version,
        last_version,
        flexible_from,
        read,
        handle,
        waits=waits,
        flexible_response=flexible_response,
        arrived=arrived,
    )


async def unhurried(items: Iterable[T], every: int) -> AsyncIterator[T]:
    """Let others run after every so many items: lists of clients can be long."""
    for number, item in enumerate(items, start=1):
        yield item
        if number % every == 0:
            await asyncio.sleep(0)


def portions(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items in their order, so many at a time."""
    left = iter(items)
    while some := list(islice(left, size)):
        yield some


async def together(changes: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Many changes, some at once, so that they become durable together; between them it is the
    others' turn."""
    results: list[T] = []
    for some in portions(changes, limits.CHANGES_AT_ONCE):
        results += await asyncio.gather(*some)
    return results


def by_topic(broker: Broker, keys: Iterable[PartitionKey]) -> list[tuple[Topic, list[int]]]:
    """Partitions by the topics that they are of; those of topics that are gone are left out."""
    found = ((find_topic(broker, each), some) for each, some in by_topic_id(keys).items())
    return [(topic, some) for topic, some in found if isinstance(topic, Topic)]


def by_topic_id(keys: Iterable[PartitionKey]) -> dict[uuid.UUID, list[int]]:
    """Partitions by the ids of their topics, those of each sorted."""
    partitions: dict[uuid.UUID, list[int]] = {}
    for topic_id, partition in keys:
        partitions.setdefault(topic_id, []).append(partition)
    return {topic_id: sorted(some) for topic_id, some in partitions.items()}


def find_topic(broker: Broker, wanted: str | uuid.UUID | None) -> Topic | ErrorCode:
    """A topic by the name or, in versions that have them, the id that a request gives."""
    try:
        if isinstance(wanted, str):
            return broker.topic(wanted)
        if wanted is not None:
            return broker.topic_by_id(wanted)
    except UnknownTopic as error:
        if isinstance(wanted, str):
            return code_of(error)
    return ErrorCode.unknown_topic_id
