"""Produce: batches in, their offsets out, and nothing in between that looks at a record.

A request is given to the broker as it comes, without waiting for the ones before, so that all that
a client has in flight becomes durable together; its answer is written when the last of its batches
is. `acks` 1 and all mean the same here, durable; with 0 there is no answer, and since the client
could not hear of an error otherwise, the connection is closed on one, as Kafka does. The request's
timeout is not looked at: every wait inside the broker has a bound of its own.

A batch of a transaction is let in by the coordinator first (`broker.transactions.admit`); newer
clients do not tell it of the partition before (KIP-890). Where it is not let in, it is said in the
words that the request's version has for it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from functools import partial
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode

from quackmq.errors import (
    BrokerClosing,
    ConcurrentTransactions,
    InvalidTransactionState,
    QuackError,
)
from quackmq.model.topic import Appended, Topic
from quackmq.protocols.kafka.api import Api, Call, Reply, find_topic
from quackmq.protocols.kafka.codec.produce import (
    API_KEY,
    FIRST_WITH_BATCHES,
    FLEXIBLE_FROM,
    PartitionAnswer,
    ProduceRequest,
    TopicAnswer,
    read_request,
    write_one,
    write_response,
)
from quackmq.protocols.kafka.errors import code_of
from quackmq.records.batch import CONTROL_FLAG, TRANSACTIONAL_FLAG, Batch

log = logging.getLogger(__name__)

_ACKS: Final = (-1, 0, 1)
_NO_ANSWER: Final = 0
_UNSETTLED: Final = ErrorCode.unknown_server_error
_SPECIAL: Final = TRANSACTIONAL_FLAG | CONTROL_FLAG

#: From these versions on a client knows of something.
_WITH_ABORTABLE: Final = 11
_WITHOUT_ADDING: Final = 12


class Refusal(NamedTuple):
    """Why a batch, or all of a request, is not taken."""

    code: ErrorCode
    message: str


def submit(call: Call, request: ProduceRequest, reply: Reply, owned: bool) -> None:
    """Give every batch to the broker; the reply is made when the last of them is durable. A batch
    that is all of a request whose bytes are `owned` is handed over, and not copied again."""
    refusal = _refusal(call.version, request)
    topics = request.topics
    is_one = len(topics) == 1 and len(topics[0].partitions) == 1
    if is_one and refusal is None and request.acks != _NO_ANSWER:
        _submit_one(call, request, reply, owned)
        return
    answer = _Answer(call.version, request.acks, reply)
    owned = owned and is_one
    for wanted in request.topics:
        partitions = answer.begin_topic(wanted.topic)
        topic = find_topic(call.broker, wanted.topic)
        for partition, records in wanted.partitions:
            appended = refusal or _publish(
                call, topic, partition, records, request.transactional_id, owned
            )
            if isinstance(appended, Refusal):
                partitions.append(_refused(partition, appended))
            else:
                answer.expect(appended, partitions, partition)
    answer.one_less()


def _submit_one(call: Call, request: ProduceRequest, reply: Reply, owned: bool) -> None:
    """The same for one batch, as nearly all requests have it."""
    wanted, ((partition, records),) = request.topics[0]
    topic = find_topic(call.broker, wanted)
    appended = _publish(call, topic, partition, records, request.transactional_id, owned)
    answer = _OneAnswer(call.version, wanted, partition, reply)
    if isinstance(appended, Refusal):
        answer.refuse(appended)
    else:
        appended.add_done_callback(answer.settle)


PRODUCE_API: Final = Api(API_KEY, 0, 13, FLEXIBLE_FROM, read_request, submit=submit)


class _OneAnswer:
    """What becomes of the only batch of a request."""

    __slots__ = ("_partition", "_reply", "_topic", "_version")

    def __init__(
        self, version: int, topic: str | uuid.UUID | None, partition: int, reply: Reply
    ) -> None:
        self._version = version
        self._topic = topic
        self._partition = partition
        self._reply = reply

    def settle(self, future: asyncio.Future[Appended]) -> None:
        outcome = _outcome(future, self._version)
        if isinstance(outcome, Refusal):
            self.refuse(outcome)
            return
        base_offset, _, _, first_offset, *_ = outcome
        self._reply.send(
            (write_one(self._version, self._topic, self._partition, base_offset, first_offset),)
        )

    def refuse(self, refusal: Refusal) -> None:
        answer = TopicAnswer(self._topic, [_refused(self._partition, refusal)])
        self._reply.send((write_response(self._version, [answer]),))


class _Answer:
    """What the batches of one request came to, each at its place, and how many are missing."""

    __slots__ = ("_acks", "_missing", "_reply", "_topics", "_version")

    def __init__(self, version: int, acks: int, reply: Reply) -> None:
        self._version = version
        self._acks = acks
        self._reply = reply
        self._topics: list[TopicAnswer] = []
        # One for the submitting itself, so that nothing is sent before that is over.
        self._missing = 1

    def begin_topic(self, topic: str | uuid.UUID | None) -> list[PartitionAnswer]:
        partitions: list[PartitionAnswer] = []
        self._topics.append(TopicAnswer(topic, partitions))
        return partitions

    def expect(
        self, future: asyncio.Future[Appended], partitions: list[PartitionAnswer], partition: int
    ) -> None:
        """Put the outcome where the partition's answer goes, when it is there."""
        place = len(partitions)
        partitions.append(PartitionAnswer(partition, _UNSETTLED))
        self._missing += 1
        future.add_done_callback(partial(self._settle, partitions, place))

    def _settle(
        self, partitions: list[PartitionAnswer], place: int, future: asyncio.Future[Appended]
    ) -> None:
        partition = partitions[place].partition
        outcome = _outcome(future, self._version)
        if isinstance(outcome, Refusal):
            partitions[place] = _refused(partition, outcome)
        else:
            partitions[place] = PartitionAnswer(
                partition, 0, outcome.base_offset, outcome.first_offset
            )
        self.one_less()

    def one_less(self) -> None:
        """A batch is settled, or all are submitted; the last one sends the answer."""
        self._missing -= 1
        if self._missing:
            return
        if self._acks != _NO_ANSWER:
            self._reply.send([write_response(self._version, self._topics)])
            return
        refused = [each for topic in self._topics for each in topic.partitions if each.error]
        if refused:
            self._reply.disconnect(f"a batch sent with acks=0 was refused: {refused[0].message}")
        else:
            self._reply.skip()


def _outcome(future: asyncio.Future[Appended], version: int) -> Appended | Refusal:
    """Where a batch lies, or why it does not."""
    error = BrokerClosing("cancelled") if future.cancelled() else future.exception()
    if error is None:
        return future.result()
    if not isinstance(error, QuackError):
        log.error("a publish failed", exc_info=error)
    return Refusal(_code_of(error, version), str(error))


def _refusal(version: int, request: ProduceRequest) -> Refusal | None:
    """Why nothing of a request can be taken."""
    if version < FIRST_WITH_BATCHES:
        return Refusal(
            ErrorCode.unsupported_for_message_format,
            "message formats v0 and v1 are not taken: use a client of Kafka 0.11 or later",
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
) -> asyncio.Future[Appended] | Refusal:
    if isinstance(topic, ErrorCode):
        return Refusal(topic, "there is no such topic")
    if not records:
        return Refusal(ErrorCode.invalid_record, "there is no batch")
    try:
        batch = Batch.parse(records)
        if len(batch.view) != len(records):
            return Refusal(ErrorCode.invalid_record, "more than one batch for one partition")
        if batch.attributes & _SPECIAL:
            objection = _objection(call, topic, partition, batch, transactional_id)
            if objection is not None:
                return objection
        appended = call.broker.publish(call.caller, topic, partition, batch, owned=owned)
        if isinstance(appended, asyncio.Future):
            return appended
        return asyncio.ensure_future(appended)
    except QuackError as error:
        return Refusal(_code_of(error, call.version), str(error))


def _objection(
    call: Call, topic: Topic, partition: int, batch: Batch, transactional_id: str | None
) -> Refusal | None:
    """Why a batch of a transaction is not let in."""
    if batch.is_control:
        return Refusal(ErrorCode.invalid_record, "control batches are the broker's own")
    if transactional_id is None:
        return Refusal(
            ErrorCode.transactional_id_authorization_failed,
            "a transactional batch comes with a transactional id",
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


def _code_of(error: BaseException, version: int) -> ErrorCode:
    if isinstance(error, ConcurrentTransactions) and version < _WITHOUT_ADDING:
        # What such clients take for a reason to send the batch again, and nothing more.
        return ErrorCode.not_enough_replicas
    return code_of(error)


def _refused(partition: int, refusal: Refusal) -> PartitionAnswer:
    return PartitionAnswer(partition, refusal.code, message=refusal.message)
