"""A cache of topics in the encoded form of Metadata responses.

Clients request all topics every few minutes, and most topics never change. Encoding 50,000 topics
blocks the loop for a second; joining cached bytes takes milliseconds.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from quackmq.errors import QuackError
from quackmq.model.topic import PartitionKey, Topic
from quackmq.protocols.kafka import limits
from quackmq.protocols.kafka.api import Call, in_chunks, iterate_yielding
from quackmq.protocols.kafka.codec.writer import EncodedArray, Fields, Write, element_writer
from quackmq.protocols.kafka.errors import code_of

METADATA: Final = 3

#: Kafka's numbers of operations on a topic, as bits: read, write, create, delete, alter, describe,
#: describe and alter its configs.
_TOPIC_OPERATIONS: Final = sum(1 << number for number in (3, 4, 5, 6, 7, 8, 10, 11))
#: The value for operations that the client did not ask for.
NOT_REQUESTED: Final = -(2**31)


class _CachedTopic(NamedTuple):
    #: The topic value that was encoded. After a change there is another value with the same id.
    topic: Topic
    encoded: bytes


class _FormCache:
    """The cache for one version of the response, with or without the allowed operations."""

    def __init__(self, version: int, operations: int) -> None:
        self.operations = operations
        self.write_topic: Write = element_writer(METADATA, version, "topics")
        self.write_partition: Write = element_writer(METADATA, version, "topics", "partitions")
        self.cached: dict[Any, _CachedTopic] = {}
        #: The last response that had all topics, and the topics that it had.
        self.all_encoded: EncodedArray | None = None
        self.every_topic: list[Topic] = []

    def forget_deleted(self, topics: int) -> None:
        """Clear the cache when most of its topics are deleted."""
        if len(self.cached) > 2 * topics + limits.METADATA_SLICE:
            self.cached.clear()


class EncodedTopics:
    """Encode topics and cache the result, one cache per server. Call it only from the event
    loop."""

    def __init__(self) -> None:
        self._forms: OrderedDict[tuple[int, bool], _FormCache] = OrderedDict()

    async def every_topic(self, call: Call, with_operations: bool) -> EncodedArray:
        """Return all topics, encoded for the version of the request. Encode only those that have
        changed since the last call."""
        form = self._find_form(call.version, with_operations)
        topics = list(call.broker.topics().values())
        if form.all_encoded is not None and form.every_topic == topics:
            return form.all_encoded
        pieces: list[bytes] = []
        for chunk in in_chunks(topics, limits.METADATA_SLICE):
            for topic in chunk:
                cached = form.cached.get(topic.id)
                if cached is not None and cached.topic is topic:
                    pieces.append(cached.encoded)
                    continue
                encoded = await self._encode_topic(call, form, topic)
                # A topic may be deleted while the others are encoded.
                if not isinstance(encoded, ErrorCode):
                    pieces.append(encoded)
            await asyncio.sleep(0)
        form.all_encoded = EncodedArray(len(pieces), b"".join(pieces))
        form.every_topic = topics
        return form.all_encoded

    async def topic(self, call: Call, topic: Topic, with_operations: bool) -> bytes:
        """Return one topic, encoded for the version of the request; an encoded error if it
        cannot be described."""
        form = self._find_form(call.version, with_operations)
        cached = form.cached.get(topic.id)
        if cached is not None and cached.topic is topic:
            return cached.encoded
        encoded = await self._encode_topic(call, form, topic)
        if isinstance(encoded, ErrorCode):
            return self.error(call, encoded, topic.name, topic.id, with_operations)
        return encoded

    def error(
        self, call: Call, code: ErrorCode, name: str | None, topic_id: Any, with_operations: bool
    ) -> bytes:
        """Encode an error instead of a topic that cannot be described."""
        form = self._find_form(call.version, with_operations)
        return _encode_fields(form, code, name, topic_id, EncodedArray(0, b""))

    def _find_form(self, version: int, with_operations: bool) -> _FormCache:
        """Return the cache for this version of the response. Make it if there is none, and drop
        the least recently used one if there are too many."""
        form = self._forms.get((version, with_operations))
        if form is None:
            operations = _TOPIC_OPERATIONS if with_operations else NOT_REQUESTED
            form = self._forms[version, with_operations] = _FormCache(version, operations)
            if len(self._forms) > limits.METADATA_FORMS:
                self._forms.popitem(last=False)
        self._forms.move_to_end((version, with_operations))
        return form

    async def _encode_topic(self, call: Call, form: _FormCache, topic: Topic) -> bytes | ErrorCode:
        """Encode a topic and cache the result; return an error code on failure. The leader epoch
        stays the same while the store is open, so the result is valid until the topic changes.
        """
        partitions = bytearray()
        only_node = [call.node.id]
        try:
            async for partition in iterate_yielding(range(topic.partitions), limits.METADATA_SLICE):
                key = PartitionKey(topic.id, partition)
                form.write_partition(
                    partitions,
                    {
                        "error_code": ErrorCode.none,
                        "partition_index": partition,
                        "leader_id": call.node.id,
                        "leader_epoch": (await call.broker.offsets(call.caller, key)).epoch,
                        "replica_nodes": only_node,
                        "isr_nodes": only_node,
                        "offline_replicas": [],
                    },
                )
        except QuackError as error:
            return code_of(error)
        array = EncodedArray(topic.partitions, bytes(partitions))
        encoded = _encode_fields(form, ErrorCode.none, topic.name, topic.id, array)
        form.forget_deleted(len(call.broker.topics()))
        form.cached[topic.id] = _CachedTopic(topic, encoded)
        return encoded


def _encode_fields(
    form: _FormCache, code: ErrorCode, name: str | None, topic_id: Any, partitions: EncodedArray
) -> bytes:
    """Encode the fields of one topic."""
    fields: Fields = {
        "error_code": code,
        "name": name,
        "topic_id": topic_id,
        "is_internal": False,
        "partitions": partitions,
        "topic_authorized_operations": form.operations,
    }
    out = bytearray()
    form.write_topic(out, fields)
    return bytes(out)
