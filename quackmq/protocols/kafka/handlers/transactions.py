"""The APIs of transactions: their partitions and offsets, their end, and their listing.

This module only translates; `broker.transactions` implements transactions. There are two ways to
use them. Older clients announce each partition and group (AddPartitionsToTxn, AddOffsetsToTxn)
before they write. Newer clients, which see the feature `transaction.version` at 2, just write and
commit offsets, and get a new epoch with each end (KIP-890). The request's version decides.

The error codes follow Kafka's for each API and version. A fenced producer gets PRODUCER_FENCED in
versions that know it, and INVALID_PRODUCER_EPOCH before. TxnOffsetCommit returns the latter in all
versions, as Produce does. A client that knows TRANSACTION_ABORTABLE gets it where aborting the
transaction and starting a new one helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from kio.schema.errors import ErrorCode

from quackmq.broker import Commit, MemberRef, ProducerRef, TransactionDescription, TransactionState
from quackmq.errors import (
    InvalidTransactionState,
    LimitReached,
    ProducerFenced,
    QuackError,
    StaleMemberEpoch,
    UnknownTransactionalId,
)
from quackmq.model.topic import PartitionKey, Topic
from quackmq.protocols.kafka import limits
from quackmq.protocols.kafka.api import Call, by_topic, find_topic, schema_api, unhurried
from quackmq.protocols.kafka.codec.writer import Fields
from quackmq.protocols.kafka.handlers.group_offsets import (
    Wish,
    commit_partitions,
    committed_leader_epoch,
    outcome_code,
)
from quackmq.protocols.kafka.handlers.groups import group_code_of

ADD_PARTITIONS_TO_TXN: Final = 24
ADD_OFFSETS_TO_TXN: Final = 25
END_TXN: Final = 26
TXN_OFFSET_COMMIT: Final = 28
DESCRIBE_TRANSACTIONS: Final = 65
LIST_TRANSACTIONS: Final = 66

#: The first versions with these fields, errors or rules.
_WITH_PRODUCER_FENCED: Final = 2
_ADD_WITH_SEVERAL: Final = 4
_COMMIT_WITH_MEMBER: Final = 3
_COMMIT_WITH_ABORTABLE: Final = 4
_COMMIT_WITHOUT_ADDING: Final = 5
_END_WITH_NEW_EPOCH: Final = 5

_NO_MEMBER: Final = MemberRef("", -1)
#: Further states of Kafka that a client may filter by; no transaction is ever in them here.
_OTHER_STATES: Final = frozenset({"PrepareCommit", "PrepareAbort", "PrepareEpochFence", "Dead"})
_STATES: Final = frozenset(state.value for state in TransactionState) | _OTHER_STATES
#: The start time of a transaction that has not begun.
_NO_TIME: Final = -1


def transaction_code_of(error: QuackError, knows_fenced: bool) -> ErrorCode:
    """Return the code of an error in an API of the transaction coordinator. If the broker cannot
    continue, clients find the coordinator again, as for groups.
    """
    if isinstance(error, ProducerFenced) and knows_fenced:
        return ErrorCode.producer_fenced
    return group_code_of(error)


# --- AddPartitionsToTxn ------------------------------------------------------------------------


async def add_partitions_to_txn(call: Call, request: Any) -> Fields:
    if call.version < _ADD_WITH_SEVERAL:
        ref = ProducerRef(
            request.v3_and_below_transactional_id,
            request.v3_and_below_producer_id,
            request.v3_and_below_producer_epoch,
        )
        topics = request.v3_and_below_topics
        return {"results_by_topic_v3_and_below": await _add(call, ref, topics, verify_only=False)}
    return {
        "error_code": ErrorCode.none,
        "results_by_transaction": [
            {
                "transactional_id": each.transactional_id,
                "topic_results": await _add(call, _ref(each), each.topics, each.verify_only),
            }
            async for each in unhurried(request.transactions, every=100)
        ],
    }


ADD_PARTITIONS_TO_TXN_API: Final = schema_api(ADD_PARTITIONS_TO_TXN, 0, 5, 3, add_partitions_to_txn)


async def _add(
    call: Call, ref: ProducerRef, topics: Sequence[Any], verify_only: bool
) -> list[Fields]:
    """Add all partitions or none: if a topic is unknown, no partition is added."""
    found = [find_topic(call.broker, topic.name) for topic in topics]
    keys = [
        PartitionKey(known.id, partition)
        for topic, known in zip(topics, found, strict=True)
        if isinstance(known, Topic)
        for partition in topic.partitions
    ]
    if all(isinstance(known, Topic) for known in found):
        codes = iter(await (_verified if verify_only else _added)(call, ref, keys))
    else:
        codes = iter([ErrorCode.operation_not_attempted] * len(keys))
    return [
        {
            "name": topic.name,
            "results_by_partition": [
                {
                    "partition_index": partition,
                    "partition_error_code": next(codes) if isinstance(known, Topic) else known,
                }
                for partition in topic.partitions
            ],
        }
        for topic, known in zip(topics, found, strict=True)
    ]


async def _added(call: Call, ref: ProducerRef, keys: Sequence[PartitionKey]) -> list[ErrorCode]:
    try:
        outcomes = await call.broker.transactions.add_partitions(call.caller, ref, keys)
    except QuackError as error:
        return [transaction_code_of(error, call.version >= _WITH_PRODUCER_FENCED)] * len(keys)
    others = ErrorCode.operation_not_attempted if any(outcomes) else ErrorCode.none
    return [others if outcome is None else group_code_of(outcome) for outcome in outcomes]


async def _verified(call: Call, ref: ProducerRef, keys: Sequence[PartitionKey]) -> list[ErrorCode]:
    """Check that partitions are in an open transaction; in Kafka, brokers send this to each
    other."""
    try:
        known = call.broker.transactions.describe(call.caller, ref.transactional_id)
    except UnknownTransactionalId:
        return [ErrorCode.invalid_producer_id_mapping] * len(keys)
    except QuackError as error:
        return [transaction_code_of(error, True)] * len(keys)
    if known.producer_id != ref.producer_id:
        return [ErrorCode.invalid_producer_id_mapping] * len(keys)
    if known.epoch != ref.epoch:
        return [ErrorCode.producer_fenced] * len(keys)
    partitions = frozenset(known.partitions)
    outside = ErrorCode.transaction_abortable
    return [ErrorCode.none if key in partitions else outside for key in keys]


# --- offsets -----------------------------------------------------------------------------------


async def add_offsets_to_txn(call: Call, request: Any) -> Fields:
    try:
        await call.broker.transactions.add_offsets(call.caller, _ref(request), request.group_id)
    except QuackError as error:
        return {"error_code": transaction_code_of(error, call.version >= _WITH_PRODUCER_FENCED)}
    return {"error_code": ErrorCode.none}


ADD_OFFSETS_TO_TXN_API: Final = schema_api(ADD_OFFSETS_TO_TXN, 0, 4, 3, add_offsets_to_txn)


async def txn_offset_commit(call: Call, request: Any) -> Fields:
    found = [(topic, find_topic(call.broker, topic.name)) for topic in request.topics]
    topics = [
        (topic, [_wish(known, partition) for partition in topic.partitions])
        for topic, known in found
    ]
    return await commit_partitions(topics, partial(_commit, call, request))


TXN_OFFSET_COMMIT_API: Final = schema_api(TXN_OFFSET_COMMIT, 0, 5, 3, txn_offset_commit)


def _wish(topic: Topic | ErrorCode, partition: Any) -> Wish:
    """Return the commit for a partition, or the error code that refuses it. A negative offset
    removes a committed offset; that is not possible in a transaction (see `group_offsets`).
    """
    if isinstance(topic, ErrorCode):
        return topic
    if partition.committed_offset < 0:
        return ErrorCode.invalid_request
    key = PartitionKey(topic.id, partition.partition_index)
    metadata = partition.committed_metadata or ""
    return Commit(key, partition.committed_offset, metadata, committed_leader_epoch(partition))


async def _commit(call: Call, request: Any, commits: Sequence[Commit]) -> list[ErrorCode]:
    member = _NO_MEMBER
    if call.version >= _COMMIT_WITH_MEMBER:
        member = MemberRef(request.member_id, request.generation_id, request.group_instance_id)
    try:
        outcomes = await call.broker.transactions.commit_offsets(
            call.caller,
            _ref(request),
            request.group_id,
            member,
            commits,
            implicit=call.version >= _COMMIT_WITHOUT_ADDING,
        )
    except InvalidTransactionState as error:
        knows_abortable = call.version >= _COMMIT_WITH_ABORTABLE
        code = ErrorCode.transaction_abortable if knows_abortable else group_code_of(error)
        return [code] * len(commits)
    except StaleMemberEpoch:
        # These versions know only generations, not member epochs.
        return [ErrorCode.illegal_generation] * len(commits)
    except QuackError as error:
        return [group_code_of(error)] * len(commits)
    return [outcome_code(outcome) for outcome in outcomes]


# --- EndTxn ------------------------------------------------------------------------------------


async def end_txn(call: Call, request: Any) -> Fields:
    try:
        producer_id, epoch = await call.broker.transactions.end(
            call.caller,
            _ref(request),
            request.committed,
            bump_epoch=call.version >= _END_WITH_NEW_EPOCH,
        )
    except QuackError as error:
        return {"error_code": transaction_code_of(error, call.version >= _WITH_PRODUCER_FENCED)}
    return {"error_code": ErrorCode.none, "producer_id": producer_id, "producer_epoch": epoch}


END_TXN_API: Final = schema_api(END_TXN, 0, 5, 3, end_txn)


# --- listing and describing --------------------------------------------------------------------


async def list_transactions(call: Call, request: Any) -> Fields:
    asked = frozenset(request.state_filters)
    unknown = sorted(asked - _STATES)
    producer_ids = frozenset(request.producer_id_filters)
    longer_than_ms = getattr(request, "duration_filter", _NO_TIME)
    pattern = getattr(request, "transactional_id_pattern", None)
    try:
        fitting = await call.broker.transactions.matching(call.caller, pattern) if pattern else None
        every = call.broker.transactions.all(
            call.caller, longer_than_ms=longer_than_ms if longer_than_ms >= 0 else None
        )
    except QuackError as error:
        return {"error_code": group_code_of(error), "transaction_states": []}
    return {
        "error_code": ErrorCode.none,
        "unknown_state_filters": unknown,
        "transaction_states": [
            {
                "transactional_id": each.transactional_id,
                "producer_id": each.producer_id,
                "transaction_state": each.state.value,
            }
            async for each in unhurried(every, every=1000)
            if not asked or each.state.value in asked
            if not producer_ids or each.producer_id in producer_ids
            if fitting is None or each.transactional_id in fitting
        ],
    }


LIST_TRANSACTIONS_API: Final = schema_api(LIST_TRANSACTIONS, 0, 2, 0, list_transactions)


async def describe_transactions(call: Call, request: Any) -> Fields:
    left = limits.KAFKA_TRANSACTIONS_ANSWER
    states: list[Fields] = []
    async for transactional_id in unhurried(request.transactional_ids, every=100):
        try:
            known = call.broker.transactions.describe(call.caller, transactional_id)
            left -= len(known.partitions)
            if left < 0:
                raise LimitReached("too many partitions for one answer: ask for fewer ids")
            states.append(_described(call, known))
        except QuackError as error:
            states.append(_not_described(transactional_id, group_code_of(error)))
    return {"transaction_states": states}


DESCRIBE_TRANSACTIONS_API: Final = schema_api(DESCRIBE_TRANSACTIONS, 0, 0, 0, describe_transactions)


def _described(call: Call, known: TransactionDescription) -> Fields:
    return {
        "error_code": ErrorCode.none,
        "transactional_id": known.transactional_id,
        "transaction_state": known.state.value,
        "transaction_timeout": known.timeout_ms,
        "transaction_start_time": _NO_TIME if known.started_ms is None else known.started_ms,
        "producer_id": known.producer_id,
        "producer_epoch": known.epoch,
        "topics": [
            {"topic": topic.name, "partitions": partitions}
            for topic, partitions in by_topic(call.broker, known.partitions)
        ],
    }


def _not_described(transactional_id: str, code: ErrorCode) -> Fields:
    return {
        "error_code": code,
        "transactional_id": transactional_id,
        "transaction_state": "",
        "transaction_timeout": 0,
        "transaction_start_time": 0,
        "producer_id": 0,
        "producer_epoch": 0,
        "topics": [],
    }


def _ref(request: Any) -> ProducerRef:
    return ProducerRef(request.transactional_id, request.producer_id, request.producer_epoch)
