"""OffsetForLeaderEpoch, and the leader epochs that requests name (KIP-320).

A client says which leader epoch it knows of. One that is over means that it has not heard of a
restart in which the end of a log may have been cut: it asks for metadata, then here where the old
epoch ended, and goes on. It always may: what was readable is never cut
(`quackmq.broker.log.epoch_lookup`). For the same reason a fetch never has to tell a follower where
it went another way.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from quackmq.broker import Broker, Caller
from quackmq.errors import FencedLeaderEpoch, QuackError, UnknownLeaderEpoch
from quackmq.model.topic import Offsets, PartitionKey
from quackmq.protocols.kafka.api import Call, schema_api, unhurried
from quackmq.protocols.kafka.codec.fetch import NO_EPOCH
from quackmq.protocols.kafka.codec.writer import Fields
from quackmq.protocols.kafka.errors import code_of

OFFSET_FOR_LEADER_EPOCH: Final = 23


async def offsets_in_epoch(
    broker: Broker, caller: Caller, key: PartitionKey, leader_epoch: int
) -> Offsets:
    """A partition's offsets, if the epoch that a client knows of is the present one.
    FencedLeaderEpoch for an older one, UnknownLeaderEpoch for a newer one."""
    offsets = await broker.offsets(caller, key)
    if leader_epoch == NO_EPOCH or leader_epoch == offsets.epoch:
        return offsets
    error = FencedLeaderEpoch if leader_epoch < offsets.epoch else UnknownLeaderEpoch
    raise error(f"leader epoch {leader_epoch} was named, {offsets.epoch} is the present one")


async def offset_for_leader_epoch(call: Call, request: Any) -> Fields:
    return {
        "topics": [
            {
                "topic": topic.topic,
                "partitions": [
                    await _partition(call, topic.topic, wanted)
                    async for wanted in unhurried(topic.partitions, every=10)
                ],
            }
            for topic in request.topics
        ]
    }


OFFSET_FOR_LEADER_EPOCH_API: Final = schema_api(
    OFFSET_FOR_LEADER_EPOCH, 2, 4, 4, offset_for_leader_epoch
)


async def _partition(call: Call, name: str, wanted: Any) -> Fields:
    try:
        key = PartitionKey(call.broker.topic(name).id, wanted.partition)
        await offsets_in_epoch(call.broker, call.caller, key, wanted.current_leader_epoch)
        end = await call.broker.epoch_end(call.caller, key, wanted.leader_epoch)
    except QuackError as error:
        return {"partition": wanted.partition, "error_code": code_of(error)}
    found = {} if end is None else {"leader_epoch": end.epoch, "end_offset": end.offset}
    return {"partition": wanted.partition, "error_code": ErrorCode.none, **found}
