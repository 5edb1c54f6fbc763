"""The ids of events: where a reader goes on that has seen this one. Pure.

In a stream of one partition an event's id is the message's own. In a stream of all partitions it
tells the next offset in each of them, counted from partition 0:

     0         1                  17
     +---------+------------------+--------------------+-----+
     | version | topic id         | next offset of     |  …  |   base64 for URLs, without padding
     | u8, 2   | 16 bytes         | partition 0, u64   |     |
     +---------+------------------+--------------------+-----+

Partitions that the topic has got since are wanted from their beginning.
"""

from __future__ import annotations

import base64
import binascii
import struct
import uuid
from collections.abc import Sequence
from typing import Final

from quackmq.broker import parse_message_id
from quackmq.errors import InvalidMessageId
from quackmq.model.topic import Topic
from quackmq.protocols.http import limits

_HEAD: Final = struct.Struct(">B16s")
_OFFSET_BYTES: Final = 8
_VERSION: Final = 2
_MESSAGE_ID_CHARS: Final = 39
#: Of the longest token.
_CHARS: Final = (_HEAD.size + _OFFSET_BYTES * limits.HTTP_EVENT_PARTITIONS + 2) * 4 // 3


def place_token(topic_id: uuid.UUID, offsets: Sequence[int]) -> str:
    packed = _HEAD.pack(_VERSION, topic_id.bytes) + struct.pack(f">{len(offsets)}Q", *offsets)
    return base64.urlsafe_b64encode(packed).rstrip(b"=").decode("ascii")


def next_offsets(token: str, topic: Topic, partition: int | None) -> dict[int, int]:
    """Where to go on behind an event, by partition; InvalidMessageId for what is no event's id of
    this topic, or of a stream of other partitions."""
    topic_id, offsets = _parse(token)
    if topic_id != topic.id:
        raise InvalidMessageId(
            f"the event {token[:100]} is of another topic, or of one of this name that was deleted"
        )
    # A topic that had one partition has told of messages alone.
    wanted = 0 if partition is None else partition
    if wanted not in offsets or max(offsets) >= topic.partitions:
        raise InvalidMessageId(f"the event {token[:100]} is of a stream of other partitions")
    if partition is not None:
        return {partition: offsets[partition]}
    return {each: offsets.get(each, 0) for each in range(topic.partitions)}


def _parse(token: str) -> tuple[uuid.UUID, dict[int, int]]:
    if _is_message(token):
        topic_id, place = parse_message_id(token)
        return topic_id, {place.partition: place.offset + 1}
    try:
        if len(token) > _CHARS:
            raise ValueError("too long")
        packed = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        version, topic_bytes = _HEAD.unpack_from(packed)
        count, rest = divmod(len(packed) - _HEAD.size, _OFFSET_BYTES)
        offsets = struct.unpack_from(f">{count}Q", packed, _HEAD.size)
        if version != _VERSION or rest or not offsets or max(offsets) >= 2**63:
            raise ValueError("makes no sense")
    except (ValueError, binascii.Error, struct.error):
        raise InvalidMessageId(
            f"{token[:100]!r} is no event's id: give back an id as it came with an event"
        ) from None
    return uuid.UUID(bytes=topic_bytes), dict(enumerate(offsets))


def _is_message(token: str) -> bool:
    """The two kinds differ in length: no number of partitions makes one as long as the other."""
    return len(token) == _MESSAGE_ID_CHARS
