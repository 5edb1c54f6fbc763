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

from collections.abc import Awaitable, Callable, Sequence
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
from quackmq.model.topic import PartitionKey
from quackmq.protocols.kafka import limits
from quackmq.protocols.kafka.api import (
    Call,
    change_together,
    find_partitions,
    group_by_topic,
    iterate_yielding,
    schema_api,
)
from quackmq.protocols.kafka.codec.writer import Fields
from quackmq.protocols.kafka.handlers.group_offsets import (
    CommitOrError,
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
    """Add partitions to one transaction (up to version 3) or to several (from version 4 on). Return
    an error code for each partition.
    """
    if call.version < _ADD_WITH_SEVERAL:
        ref = ProducerRef(
            request.v3_and_below_transactional_id,
            request.v3_and_below_producer_id,
            request.v3_and_below_producer_epoch,
        )
        topics = request.v3_and_below_topics
        return {
            "results_by_topic_v3_and_below": await _add_to_transaction(
                call, ref, topics, verify_only=False
            )
        }
    return {
        "error_code": ErrorCode.none,
        "results_by_transaction": [
            {
                "transactional_id": transaction.transactional_id,
                "topic_results": await _add_to_transaction(
                    call, _producer_ref(transaction), transaction.topics, transaction.verify_only
                ),
            }
            async for transaction in iterate_yielding(request.transactions, every=100)
        ],
    }


ADD_PARTITIONS_TO_TXN_API: Final = schema_api(ADD_PARTITIONS_TO_TXN, 0, 5, 3, add_partitions_to_txn)


async def _add_to_transaction(
    call: Call, ref: ProducerRef, topics: Sequence[Any], verify_only: bool
) -> list[Fields]:
    """Add all partitions or none: if a topic is unknown, no partition is added."""
    keys_by_topic = [find_partitions(call.broker, topic.name, topic.partitions) for topic in topics]
    add: Callable[[list[PartitionKey]], Awaitable[list[ErrorCode]]]
    if any(isinstance(key, ErrorCode) for keys in keys_by_topic for key in keys):
        add = _refuse_partitions
    else:
        add = partial(_verify_partitions if verify_only else _add_partitions, call, ref)
    codes_by_topic = await change_together(keys_by_topic, add)
    return [
        {
            "name": topic.name,
            "results_by_partition": [
                {"partition_index": partition, "partition_error_code": code}
                for partition, code in zip(topic.partitions, codes, strict=True)
            ],
        }
        for topic, codes in zip(topics, codes_by_topic, strict=True)
    ]


async def _refuse_partitions(keys: Sequence[PartitionKey]) -> list[ErrorCode]:
    """Return the error code of partitions that are not added because of other partitions."""
    return [ErrorCode.operation_not_attempted] * len(keys)


async def _add_partitions(
    call: Call, ref: ProducerRef, keys: Sequence[PartitionKey]
) -> list[ErrorCode]:
    """Add partitions to a transaction; return an error code for each. The broker adds all
    partitions or none.
    """
    try:
        outcomes = await call.broker.transactions.add_partitions(call.caller, ref, keys)
    except QuackError as error:
        return [transaction_code_of(error, call.version >= _WITH_PRODUCER_FENCED)] * len(keys)
    # One refused partition refuses all: the others were not attempted.
    code_of_others = ErrorCode.operation_not_attempted if any(outcomes) else ErrorCode.none
    return [code_of_others if outcome is None else group_code_of(outcome) for outcome in outcomes]


async def _verify_partitions(
    call: Call, ref: ProducerRef, keys: Sequence[PartitionKey]
) -> list[ErrorCode]:
    """Check that partitions are in an open transaction; in Kafka, brokers send this to each
    other."""
    try:
        description = call.broker.transactions.describe(call.caller, ref.transactional_id)
    except UnknownTransactionalId:
        return [ErrorCode.invalid_producer_id_mapping] * len(keys)
    except QuackError as error:
        return [transaction_code_of(error, knows_fenced=True)] * len(keys)
    if description.producer_id != ref.producer_id:
        return [ErrorCode.invalid_producer_id_mapping] * len(keys)
    if description.epoch != ref.epoch:
        return [ErrorCode.producer_fenced] * len(keys)
    partitions = frozenset(description.partitions)
    code_outside = ErrorCode.transaction_abortable
    return [ErrorCode.none if key in partitions else code_outside for key in keys]


# --- offsets -----------------------------------------------------------------------------------


async def add_offsets_to_txn(call: Call, request: Any) -> Fields:
    """Announce that the transaction will commit offsets of a group."""
    try:
        await call.broker.transactions.add_offsets(
            call.caller, _producer_ref(request), request.group_id
        )
    except QuackError as error:
        return {"error_code": transaction_code_of(error, call.version >= _WITH_PRODUCER_FENCED)}
    return {"error_code": ErrorCode.none}


ADD_OFFSETS_TO_TXN_API: Final = schema_api(ADD_OFFSETS_TO_TXN, 0, 4, 3, add_offsets_to_txn)


async def txn_offset_commit(call: Call, request: Any) -> Fields:
    """Store offsets of a group that take effect when the transaction commits. Return an error code
    for each partition.
    """
    commits_by_topic = [_commits_of_topic(call, topic) for topic in request.topics]
    commit = partial(_commit_offsets, call, request)
    return await commit_partitions(request.topics, commits_by_topic, commit)


TXN_OFFSET_COMMIT_API: Final = schema_api(TXN_OFFSET_COMMIT, 0, 5, 3, txn_offset_commit)


def _commits_of_topic(call: Call, topic: Any) -> list[CommitOrError]:
    """Return the commit of each partition of one topic, or the error code that refuses it."""
    indexes = [partition.partition_index for partition in topic.partitions]
    keys = find_partitions(call.broker, topic.name, indexes)
    return [
        key if isinstance(key, ErrorCode) else _commit_of_partition(key, partition)
        for key, partition in zip(keys, topic.partitions, strict=True)
    ]


def _commit_of_partition(key: PartitionKey, partition: Any) -> CommitOrError:
    """Return the commit for a partition, or the error code that refuses it. A negative offset
    removes a committed offset; that is not possible in a transaction (see `group_offsets`).
    """
    if partition.committed_offset < 0:
        return ErrorCode.invalid_request
    metadata = partition.committed_metadata or ""
    return Commit(key, partition.committed_offset, metadata, committed_leader_epoch(partition))


async def _commit_offsets(call: Call, request: Any, commits: Sequence[Commit]) -> list[ErrorCode]:
    """Pass the offsets to the transaction; return an error code for each. An error of the whole
    request is repeated for each offset, because the response has no field for it.
    """
    if not commits:
        return []
    member = _NO_MEMBER
    if call.version >= _COMMIT_WITH_MEMBER:
        member = MemberRef(request.member_id, request.generation_id, request.group_instance_id)
    try:
        outcomes = await call.broker.transactions.commit_offsets(
            call.caller,
            _producer_ref(request),
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
    """Commit or abort a transaction. Return the producer's id, and its epoch for the next
    transaction.
    """
    try:
        producer_id, epoch = await call.broker.transactions.end(
            call.caller,
            _producer_ref(request),
            request.committed,
            bump_epoch=call.version >= _END_WITH_NEW_EPOCH,
        )
    except QuackError as error:
        return {"error_code": transaction_code_of(error, call.version >= _WITH_PRODUCER_FENCED)}
    return {"error_code": ErrorCode.none, "producer_id": producer_id, "producer_epoch": epoch}


END_TXN_API: Final = schema_api(END_TXN, 0, 5, 3, end_txn)


# --- listing and describing --------------------------------------------------------------------


async def list_transactions(call: Call, request: Any) -> Fields:
    """Return all transactional ids that pass every filter of the request; an empty filter passes
    all of them. Also return the requested states that Kafka does not have.
    """
    requested_states = frozenset(request.state_filters)
    unknown = sorted(requested_states - _STATES)
    producer_ids = frozenset(request.producer_id_filters)
    longer_than_ms = getattr(request, "duration_filter", _NO_TIME)
    pattern = getattr(request, "transactional_id_pattern", None)
    try:
        matching_ids = (
            await call.broker.transactions.matching(call.caller, pattern) if pattern else None
        )
        # A negative duration means no filter.
        transactions = call.broker.transactions.all(
            call.caller, longer_than_ms=longer_than_ms if longer_than_ms >= 0 else None
        )
    except QuackError as error:
        return {"error_code": group_code_of(error), "transaction_states": []}
    return {
        "error_code": ErrorCode.none,
        "unknown_state_filters": unknown,
        "transaction_states": [
            {
                "transactional_id": transaction.transactional_id,
                "producer_id": transaction.producer_id,
                "transaction_state": transaction.state.value,
            }
            async for transaction in iterate_yielding(transactions, every=1000)
            if not requested_states or transaction.state.value in requested_states
            if not producer_ids or transaction.producer_id in producer_ids
            if matching_ids is None or transaction.transactional_id in matching_ids
        ],
    }


LIST_TRANSACTIONS_API: Final = schema_api(LIST_TRANSACTIONS, 0, 2, 0, list_transactions)


async def describe_transactions(call: Call, request: Any) -> Fields:
    """Describe each requested transactional id. All of them together return at most
    `limits.KAFKA_TRANSACTIONS_ANSWER` partitions; ids after that get LimitReached.
    """
    remaining_partitions = limits.KAFKA_TRANSACTIONS_ANSWER
    states: list[Fields] = []
    async for transactional_id in iterate_yielding(request.transactional_ids, every=100):
        try:
            description = call.broker.transactions.describe(call.caller, transactional_id)
            # An id that does not fit uses up the room too: every later id then gets the error.
            remaining_partitions -= len(description.partitions)
            if remaining_partitions < 0:
                raise LimitReached("too many partitions for one response: request fewer ids")
            states.append(_transaction_fields(call, description))
        except QuackError as error:
            states.append(_error_fields(transactional_id, group_code_of(error)))
    return {"transaction_states": states}


DESCRIBE_TRANSACTIONS_API: Final = schema_api(DESCRIBE_TRANSACTIONS, 0, 0, 0, describe_transactions)


def _transaction_fields(call: Call, description: TransactionDescription) -> Fields:
    """Return the fields of one described transactional id. Partitions of deleted topics are
    omitted.
    """
    return {
        "error_code": ErrorCode.none,
        "transactional_id": description.transactional_id,
        "transaction_state": description.state.value,
        "transaction_timeout": description.timeout_ms,
        "transaction_start_time": _NO_TIME
        if description.started_ms is None
        else description.started_ms,
        "producer_id": description.producer_id,
        "producer_epoch": description.epoch,
        "topics": [
            {"topic": topic.name, "partitions": partitions}
            for topic, partitions in group_by_topic(call.broker, description.partitions)
        ],
    }


def _error_fields(transactional_id: str, code: ErrorCode) -> Fields:
    """Return the fields of a transactional id that is not described: the error, and empty values
    for the rest.
    """
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


def _producer_ref(request: Any) -> ProducerRef:
    return ProducerRef(request.transactional_id, request.producer_id, request.producer_epoch)
