"""InitProducerId and DescribeProducers.

InitProducerId returns a producer id, by which the broker drops repeated batches. A producer id is
never assigned twice. A request without a transactional id always gets a new producer id with epoch
0, even if it asks for a new epoch of its old id. A request with a transactional id takes over that
id (`broker.transactions`). It may name its previous producer id and epoch, both or neither.

DescribeProducers returns the producers of a partition.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from kio.schema.errors import ErrorCode

from quackmq.broker import Producer, ProducerEpoch
from quackmq.errors import InvalidRequest, LimitReached, QuackError
from quackmq.model.topic import PartitionKey, check_topic_name
from quackmq.protocols.kafka import limits
from quackmq.protocols.kafka.api import Call, iterate_yielding, schema_api
from quackmq.protocols.kafka.codec.writer import Fields
from quackmq.protocols.kafka.errors import code_of
from quackmq.protocols.kafka.handlers.transactions import transaction_code_of

INIT_PRODUCER_ID: Final = 22
DESCRIBE_PRODUCERS: Final = 61

#: The first version in which a client understands PRODUCER_FENCED.
_WITH_PRODUCER_FENCED: Final = 4
#: The value for a producer id or epoch that is not given, and for unknown fields.
_NONE: Final = -1
_MILLISECOND: Final = timedelta(milliseconds=1)


async def init_producer_id(call: Call, request: Any) -> Fields:
    """Return a producer id and its epoch, or the error code. The id in an error response is -1, the
    schema's default.
    """
    try:
        producer_id, epoch = await _init_producer(call, request)
    except QuackError as error:
        code = transaction_code_of(error, call.version >= _WITH_PRODUCER_FENCED)
        return {"error_code": code, "producer_epoch": _NONE}
    return {"error_code": ErrorCode.none, "producer_id": producer_id, "producer_epoch": epoch}


INIT_PRODUCER_ID_API: Final = schema_api(INIT_PRODUCER_ID, 0, 5, 2, init_producer_id)


async def _init_producer(call: Call, request: Any) -> ProducerEpoch:
    """Return a new producer id with epoch 0, or the next epoch of a transactional id. Raise
    InvalidRequest if the request names only one of producer id and epoch, and the errors of
    `broker.transactions.init`.
    """
    # Versions before 3 do not have these two fields.
    producer_id = getattr(request, "producer_id", _NONE)
    epoch = getattr(request, "producer_epoch", _NONE)
    if (producer_id == _NONE) is not (epoch == _NONE):
        raise InvalidRequest("a producer names both its id and its epoch, or neither")
    if request.transactional_id is None:
        return ProducerEpoch(await call.broker.new_producer_id(call.caller), 0)
    return await call.broker.transactions.init(
        call.caller,
        request.transactional_id,
        request.transaction_timeout // _MILLISECOND,
        producer_id,
        epoch,
    )


async def describe_producers(call: Call, request: Any) -> Fields:
    """Return the producers of each requested partition. All partitions together return at most
    `limits.KAFKA_TRANSACTIONS_ANSWER` producers. A partition with more producers than are left gets
    an error.
    """
    remaining_producers = limits.KAFKA_TRANSACTIONS_ANSWER
    topics: list[Fields] = []
    for topic in request.topics:
        partitions: list[Fields] = []
        async for partition in iterate_yielding(topic.partition_indexes, every=10):
            partition_fields = await _describe_partition(
                call, topic.name, partition, remaining_producers
            )
            remaining_producers -= len(partition_fields["active_producers"])
            partitions.append(partition_fields)
        topics.append({"name": topic.name, "partitions": partitions})
    return {"topics": topics}


DESCRIBE_PRODUCERS_API: Final = schema_api(DESCRIBE_PRODUCERS, 0, 0, 0, describe_producers)


async def _describe_partition(call: Call, name: str, partition: int, most_producers: int) -> Fields:
    """Return the fields of a partition with its producers, or with the error if the partition is
    unknown or has more than `most_producers` producers.
    """
    try:
        check_topic_name(name)
        key = PartitionKey(call.broker.topic(name).id, partition)
        producers = await call.broker.producers(call.caller, key)
        if len(producers) > most_producers:
            raise LimitReached("too many producers for one response: request fewer partitions")
    except QuackError as error:
        return {
            "partition_index": partition,
            "error_code": code_of(error),
            "error_message": str(error),
            "active_producers": [],
        }
    return {
        "partition_index": partition,
        "error_code": ErrorCode.none,
        "error_message": None,
        "active_producers": [_producer_fields(producer) for producer in producers.values()],
    }


def _producer_fields(producer: Producer) -> Fields:
    """Return the fields of one producer; -1 stands for a value that does not exist."""
    return {
        "producer_id": producer.producer_id,
        "producer_epoch": producer.epoch,
        "last_sequence": producer.batches[-1].last_sequence if producer.batches else _NONE,
        "last_timestamp": producer.last_append_ms,
        # This broker is the only coordinator, and it counts no epochs of its own.
        "coordinator_epoch": _NONE,
        "current_txn_start_offset": producer.transaction_offset,
    }
