"""Produce: batches in, their offsets out, and nothing in between that looks at a record.

A request is given to the broker as it comes, without waiting for the ones before, so that all that
a client has in flight becomes durable together; its answer is written when the last of its batches
is. `acks` 1 and all mean the same here, durable; with 0 there is no answer, and since the client
could not hear of an error otherwise, the connection is closed on one, as Kafka does. The request's
timeout is not looked at: every wait inside the broker has a bound of its own.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from functools import partial
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode

from quackmq.doors.kafka.api import Api, Call, Reply, find_topic
from quackmq.doors.kafka.errors import code_of
from quackmq.errors import BrokerClosing, QuackError
from quackmq.record import Batch
from quackmq.topic import Appended, Topic
from quackmq.wire.kafka.produce import (
    API_KEY,
    FIRST_WITH_BATCHES,
    FLEXIBLE_FROM,
    PartitionAnswer,
    ProduceRequest,
    TopicAnswer,
    read_request,
    write_response,
)

log = logging.getLogger(__name__)

_ACKS: Final = (-1, 0, 1)
_NO_ANSWER: Final = 0


class Refusal(NamedTuple):
    """Why a batch, or all of a request, is not taken."""

    code: ErrorCode
    message: str


_NO_TRANSACTIONS: Final = Refusal(
    ErrorCode.invalid_txn_state, "this broker does not take part in transactions"
)


def submit(call: Call, request: ProduceRequest, reply: Reply) -> None:
    """Give every batch to the broker; the reply is made when the last of them is durable."""
    answer = _Answer(call.version, request.acks, reply)
    refusal = _refusal(call.version, request)
    for wanted in request.topics:
        partitions = answer.begin_topic(wanted.topic)
        topic = find_topic(call.broker, wanted.topic)
        for partition, records in wanted.partitions:
            appended = refusal or _publish(call, topic, partition, records)
            if isinstance(appended, Refusal):
                partitions.append(_refused(partition, appended))
            else:
                answer.expect(appended, partitions, partition)
    answer.all_submitted()


PRODUCE_API: Final = Api(API_KEY, 0, 13, FLEXIBLE_FROM, read_request, submit=submit)


class _Answer:
    """What the batches of one request came to, each at its place, and how many are missing."""

    __slots__ = ("_acks", "_missing", "_reply", "_topics", "_version")

    def __init__(self, version: int, acks: int, reply: Reply) -> None:
        self._version = version
        self._acks = acks
        self._reply = reply
        self._topics: list[tuple[str | uuid.UUID | None, list[PartitionAnswer]]] = []
        # One for the submitting itself, so that nothing is sent before that is over.
        self._missing = 1

    def begin_topic(self, topic: str | uuid.UUID | None) -> list[PartitionAnswer]:
        partitions: list[PartitionAnswer] = []
        self._topics.append((topic, partitions))
        return partitions

    def expect(
        self, future: asyncio.Future[Appended], partitions: list[PartitionAnswer], partition: int
    ) -> None:
        """Put the outcome where the partition's answer goes, when it is there."""
        place = len(partitions)
        partitions.append(PartitionAnswer(partition, ErrorCode.unknown_server_error))
        self._missing += 1
        future.add_done_callback(partial(self._settle, partitions, place))

    def all_submitted(self) -> None:
        self._one_less()

    def _settle(
        self, partitions: list[PartitionAnswer], place: int, future: asyncio.Future[Appended]
    ) -> None:
        partition = partitions[place].partition
        error = BrokerClosing("cancelled") if future.cancelled() else future.exception()
        if error is not None:
            if not isinstance(error, QuackError):
                log.error("a publish failed", exc_info=error)
            partitions[place] = _refused(partition, Refusal(code_of(error), str(error)))
        else:
            appended = future.result()
            partitions[place] = PartitionAnswer(
                partition, 0, appended.base_offset, appended.first_offset
            )
        self._one_less()

    def _one_less(self) -> None:
        self._missing -= 1
        if self._missing:
            return
        if self._acks != _NO_ANSWER:
            answers = [TopicAnswer(topic, partitions) for topic, partitions in self._topics]
            self._reply.send([write_response(self._version, answers)])
            return
        refused = [answer for _, answers in self._topics for answer in answers if answer.error]
        if refused:
            self._reply.disconnect(f"a batch sent with acks=0 was refused: {refused[0].message}")
        else:
            self._reply.skip()


def _refusal(version: int, request: ProduceRequest) -> Refusal | None:
    """Why nothing of a request can be taken."""
    if version < FIRST_WITH_BATCHES:
        return Refusal(
            ErrorCode.unsupported_for_message_format,
            "message formats v0 and v1 are not taken: use a client of Kafka 0.11 or later",
        )
    if request.acks not in _ACKS:
        return Refusal(ErrorCode.invalid_required_acks, f"acks is -1, 0 or 1, not {request.acks}")
    if request.transactional_id is not None:
        return _NO_TRANSACTIONS
    return None


def _publish(
    call: Call, topic: Topic | ErrorCode, partition: int, records: memoryview | None
) -> asyncio.Future[Appended] | Refusal:
    if isinstance(topic, ErrorCode):
        return Refusal(topic, "there is no such topic")
    if not records:
        return Refusal(ErrorCode.invalid_record, "there is no batch")
    try:
        batch = Batch.parse(records)
        if len(batch.view) != len(records):
            return Refusal(ErrorCode.invalid_record, "more than one batch for one partition")
        if batch.is_control:
            return Refusal(ErrorCode.invalid_record, "control batches are the broker's own")
        if batch.is_transactional:
            return _NO_TRANSACTIONS
        return asyncio.ensure_future(call.broker.publish(call.caller, topic, partition, batch))
    except QuackError as error:
        return Refusal(code_of(error), str(error))


def _refused(partition: int, refusal: Refusal) -> PartitionAnswer:
    return PartitionAnswer(partition, refusal.code, message=refusal.message)
