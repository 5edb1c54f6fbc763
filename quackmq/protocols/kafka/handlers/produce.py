"""Produce: append batches and return their offsets, without decoding a record.

Each request goes to the broker on arrival, without waiting for earlier ones. So all batches that a
client has in flight become durable together. The response is sent when the last batch of the
request is durable. `acks` 1 and all mean the same here: durable. With `acks` 0 there is no
response; on an error the connection is closed, as in Kafka, because the client cannot see the error
otherwise. The request's timeout is ignored: every wait inside the broker has its own bound.

The coordinator must admit a transactional batch first (`broker.transactions.admit`). Newer clients
do not add the partition before (KIP-890). The error code of a refused batch depends on the
request's version.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from functools import partial
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode

from quackmq.errors import (
    BrokerClosing,
    ConcurrentTransactions,
    InvalidTransactionState,
    QuackError,
)
from quackmq.model.topic import AppendResult, Topic
from quackmq.protocols.kafka.api import Api, Call, PublishedInPortions, ResponseSlot, find_topic
from quackmq.protocols.kafka.codec.produce import (
    API_KEY,
    FIRST_WITH_BATCHES,
    FLEXIBLE_FROM,
    PartitionResponse,
    ProduceRequest,
    TopicResponse,
    read_request,
    write_one,
    write_response,
)
from quackmq.protocols.kafka.errors import code_of
from quackmq.records.batch import CONTROL_FLAG, TRANSACTIONAL_FLAG, Batch

log = logging.getLogger(__name__)

_ACKS: Final = (-1, 0, 1)
_ACKS_NONE: Final = 0
#: The error code that holds a batch's place in the response until its outcome is known.
_UNFINISHED: Final = ErrorCode.unknown_server_error
_SPECIAL: Final = TRANSACTIONAL_FLAG | CONTROL_FLAG

#: The first versions with these errors or rules.
_WITH_ABORTABLE: Final = 11
_WITHOUT_ADDING: Final = 12


class Refusal(NamedTuple):
    """The error code and message for a refused batch or request."""

    code: ErrorCode
    message: str


def submit(
    call: Call, request: ProduceRequest, response_slot: ResponseSlot, owned: bool
) -> PublishedInPortions | None:
    """Publish every batch; send the response when the last of them is durable. If the request's
    bytes are `owned` and it has one batch, the batch is passed on without a copy. A request with
    several batches is returned and publishes them in portions.
    """
    refusal = _refusal(call.version, request)
    topics = request.topics
    is_one = len(topics) == 1 and len(topics[0].partitions) == 1
    if is_one and refusal is None and request.acks != _ACKS_NONE:
        _submit_one(call, request, response_slot, owned)
        return None
    return _ManyBatches(call, request, refusal, response_slot, owned)


def _submit_one(
    call: Call, request: ProduceRequest, response_slot: ResponseSlot, owned: bool
) -> None:
    """Publish the only batch of a request, the most frequent case. Without this function, the
    benchmark `guard` counts 11 % more bytecodes for such a request, and 18 % more calls into C."""
    name_or_id, ((partition, records),) = request.topics[0]
    topic = find_topic(call.broker, name_or_id)
    appended = _publish(call, topic, partition, records, request.transactional_id, owned)
    response = _SingleResponse(call.version, name_or_id, partition, response_slot)
    if isinstance(appended, Refusal):
        response.refuse(appended)
    else:
        appended.add_done_callback(response.finish)


PRODUCE_API: Final = Api(API_KEY, 0, 13, FLEXIBLE_FROM, read_request, submit=submit)


class _SingleResponse:
    """Sends the response for the only batch of a request."""

    __slots__ = ("_partition", "_response_slot", "_topic", "_version")

    def __init__(
        self,
        version: int,
        topic: str | uuid.UUID | None,
        partition: int,
        response_slot: ResponseSlot,
    ) -> None:
        self._version = version
        self._topic = topic
        self._partition = partition
        self._response_slot = response_slot

    def finish(self, future: asyncio.Future[AppendResult]) -> None:
        """Send the response when the batch is durable or refused; its future calls this."""
        outcome = _publish_outcome(future, self._version)
        if isinstance(outcome, Refusal):
            self.refuse(outcome)
            return
        base_offset, _, _, first_offset, *_ = outcome
        self._response_slot.send(
            (write_one(self._version, self._topic, self._partition, base_offset, first_offset),)
        )

    def refuse(self, refusal: Refusal) -> None:
        response = TopicResponse(self._topic, [_refused_partition(self._partition, refusal)])
        self._response_slot.send((write_response(self._version, [response]),))


class _BatchOfMany(NamedTuple):
    """A batch of a request with several batches."""

    topic: str | uuid.UUID | None
    partition: int
    records: memoryview | None
    #: The list that gets the batch's response.
    responses: list[PartitionResponse]


class _ManyBatches:
    """Publishes the batches of one request in portions, so that the loop can serve other work in
    between."""

    def __init__(
        self,
        call: Call,
        request: ProduceRequest,
        refusal: Refusal | None,
        response_slot: ResponseSlot,
        owned: bool,
    ) -> None:
        self._call = call
        self._transactional_id = request.transactional_id
        self._refusal = refusal
        self._collector = _ResponseCollector(call.version, request.acks, response_slot)
        self._remaining_batches: deque[_BatchOfMany] = deque()
        for topic, partitions in request.topics:
            responses = self._collector.begin_topic(topic)
            self._remaining_batches.extend(
                _BatchOfMany(topic, *records, responses) for records in partitions
            )
        #: Whether the records are views of bytes that are valid only until `submit` returns.
        self._borrows = not owned
        self.is_finished = False

    def publish(self, most_batches: int) -> int:
        """Publish the next batches, at most `most_batches`; see `PublishedInPortions`."""
        count = min(len(self._remaining_batches), most_batches)
        for _ in range(count):
            self._publish_one(self._remaining_batches.popleft())
        if not self._remaining_batches:
            self.is_finished = True
            # Count the request itself, for which the collector waits too.
            self._collector.count_finished()
        elif self._borrows:
            # The request's bytes are valid only during the first call, so later portions need
            # copies.
            self._remaining_batches = deque(map(_with_own_bytes, self._remaining_batches))
            self._borrows = False
        return count

    def _publish_one(self, batch: _BatchOfMany) -> None:
        """Publish one batch. Store its refusal now, or its outcome when the batch is durable."""
        name_or_id, partition, records, responses = batch
        call = self._call
        appended = self._refusal or _publish(
            call,
            find_topic(call.broker, name_or_id),
            partition,
            records,
            self._transactional_id,
            # The batches share one buffer, so no batch can be handed over with it.
            owned=False,
        )
        if isinstance(appended, Refusal):
            responses.append(_refused_partition(partition, appended))
        else:
            self._collector.add_pending(appended, responses, partition)


def _with_own_bytes(batch: _BatchOfMany) -> _BatchOfMany:
    """Return the batch with a copy of its records."""
    records = batch.records
    return batch if records is None else batch._replace(records=memoryview(bytes(records)))


class _ResponseCollector:
    """Collects the results of a request's batches in order, and counts the missing ones."""

    __slots__ = ("_acks", "_missing", "_response_slot", "_topics", "_version")

    def __init__(self, version: int, acks: int, response_slot: ResponseSlot) -> None:
        self._version = version
        self._acks = acks
        self._response_slot = response_slot
        self._topics: list[TopicResponse] = []
        # Starts at 1 for the request itself: no response is sent before all batches are submitted.
        self._missing = 1

    def begin_topic(self, topic: str | uuid.UUID | None) -> list[PartitionResponse]:
        """Add a topic to the response; return the list for its partitions."""
        partitions: list[PartitionResponse] = []
        self._topics.append(TopicResponse(topic, partitions))
        return partitions

    def add_pending(
        self,
        future: asyncio.Future[AppendResult],
        partitions: list[PartitionResponse],
        partition: int,
    ) -> None:
        """Store the outcome at the partition's index in the response when it is known."""
        index = len(partitions)
        partitions.append(PartitionResponse(partition, _UNFINISHED))
        self._missing += 1
        future.add_done_callback(partial(self._store_outcome, partitions, index))

    def _store_outcome(
        self, partitions: list[PartitionResponse], index: int, future: asyncio.Future[AppendResult]
    ) -> None:
        """Put the outcome in the batch's place in the response; the batch's future calls this."""
        partition = partitions[index].partition
        outcome = _publish_outcome(future, self._version)
        if isinstance(outcome, Refusal):
            partitions[index] = _refused_partition(partition, outcome)
        else:
            partitions[index] = PartitionResponse(
                partition, 0, outcome.base_offset, outcome.first_offset
            )
        self.count_finished()

    def count_finished(self) -> None:
        """Count a finished batch, or that all are submitted; the last call sends the response."""
        self._missing -= 1
        if self._missing:
            return
        if self._acks != _ACKS_NONE:
            self._response_slot.send([write_response(self._version, self._topics)])
            return
        refused = [
            partition for topic in self._topics for partition in topic.partitions if partition.error
        ]
        if refused:
            self._response_slot.disconnect(
                f"a batch sent with acks=0 was refused: {refused[0].message}"
            )
        else:
            self._response_slot.skip()


def _publish_outcome(future: asyncio.Future[AppendResult], version: int) -> AppendResult | Refusal:
    """Return the result of a publish, or the refusal if it failed."""
    error = BrokerClosing("cancelled") if future.cancelled() else future.exception()
    if error is None:
        return future.result()
    if not isinstance(error, QuackError):
        log.error("a publish failed", exc_info=error)
    return Refusal(_produce_code_of(error, version), str(error))


def _refusal(version: int, request: ProduceRequest) -> Refusal | None:
    """Return the refusal of a whole request, or None."""
    if version < FIRST_WITH_BATCHES:
        return Refusal(
            ErrorCode.unsupported_for_message_format,
            "message formats v0 and v1 are not supported: use a client of Kafka 0.11 or later",
        )
    if request.acks not in _ACKS:
        return Refusal(ErrorCode.invalid_required_acks, f"acks is -1, 0 or 1, not {request.acks}")
    return None


def _publish(
    call: Call,
    topic: Topic | ErrorCode,
    partition: int,
    records: memoryview | None,
    transactional_id: str | None,
    owned: bool,
) -> asyncio.Future[AppendResult] | Refusal:
    """Check one batch and pass it to the broker. Return the future of its append, or the
    refusal.
    """
    if isinstance(topic, ErrorCode):
        return Refusal(topic, "there is no such topic")
    if not records:
        return Refusal(ErrorCode.invalid_record, "the request has no batch for the partition")
    try:
        batch = Batch.parse(records)
        # `parse` reads the first batch only.
        if len(batch.view) != len(records):
            return Refusal(ErrorCode.invalid_record, "more than one batch for one partition")
        if batch.attributes & _SPECIAL:
            transactional_refusal = _transactional_refusal(
                call, topic, partition, batch, transactional_id
            )
            if transactional_refusal is not None:
                return transactional_refusal
        return call.broker.publish(call.caller, topic, partition, batch, owned=owned)
    except QuackError as error:
        return Refusal(_produce_code_of(error, call.version), str(error))


def _transactional_refusal(
    call: Call, topic: Topic, partition: int, batch: Batch, transactional_id: str | None
) -> Refusal | None:
    """Return the refusal of a transactional batch, or None."""
    if batch.is_control:
        return Refusal(ErrorCode.invalid_record, "clients must not send control batches")
    # Kafka returns this code for a missing id too.
    if transactional_id is None:
        return Refusal(
            ErrorCode.transactional_id_authorization_failed,
            "a transactional batch needs a transactional id",
        )
    try:
        call.broker.transactions.admit(
            call.caller,
            batch,
            topic,
            partition,
            transactional_id,
            implicit=call.version >= _WITHOUT_ADDING,
        )
    except InvalidTransactionState as error:
        knows_abortable = call.version >= _WITH_ABORTABLE
        code = ErrorCode.transaction_abortable if knows_abortable else code_of(error)
        return Refusal(code, str(error))
    return None


def _produce_code_of(error: BaseException, version: int) -> ErrorCode:
    """Return the code of an error in a Produce response of this version."""
    if isinstance(error, ConcurrentTransactions) and version < _WITHOUT_ADDING:
        # Clients of these versions send the batch again after this code. They do not expect
        # CONCURRENT_TRANSACTIONS in a Produce response.
        return ErrorCode.not_enough_replicas
    return code_of(error)


def _refused_partition(partition: int, refusal: Refusal) -> PartitionResponse:
    return PartitionResponse(partition, refusal.code, message=refusal.message)
