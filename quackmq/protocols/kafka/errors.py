"""Map every broker error to a Kafka error code.

Clients act on the code: they retry retriable errors and report others to their user. So an error
that a retry cannot fix must not become a retriable one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kio.schema.errors import ErrorCode

from quackmq import errors

CODES: Final[Mapping[type[errors.QuackError], ErrorCode]] = {
    errors.QuackError: ErrorCode.unknown_server_error,
    errors.InvalidRequest: ErrorCode.invalid_request,
    errors.ClientClosed: ErrorCode.invalid_request,
    errors.IllegalTopicName: ErrorCode.invalid_topic_exception,
    errors.InvalidPolicy: ErrorCode.invalid_config,
    errors.InvalidMessageId: ErrorCode.invalid_request,
    errors.InvalidGroup: ErrorCode.invalid_group_id,
    errors.InvalidSessionTimeout: ErrorCode.invalid_session_timeout,
    errors.InvalidPattern: ErrorCode.invalid_regular_expression,
    errors.UnsupportedAssignor: ErrorCode.unsupported_assignor,
    errors.InvalidTransactionTimeout: ErrorCode.invalid_transaction_timeout,
    errors.MetadataTooLarge: ErrorCode.offset_metadata_too_large,
    errors.InvalidSetting: ErrorCode.invalid_config,
    errors.ProtocolError: ErrorCode.invalid_request,
    errors.CorruptBatch: ErrorCode.corrupt_message,
    errors.UnsupportedBatch: ErrorCode.unsupported_for_message_format,
    errors.RecordTooLarge: ErrorCode.message_too_large,
    errors.NotFound: ErrorCode.unknown_topic_or_partition,
    errors.UnknownTopic: ErrorCode.unknown_topic_or_partition,
    errors.UnknownPartition: ErrorCode.unknown_topic_or_partition,
    errors.UnknownSubscription: ErrorCode.group_id_not_found,
    errors.UnknownGroup: ErrorCode.group_id_not_found,
    errors.UnknownMember: ErrorCode.unknown_member_id,
    errors.UnknownTransactionalId: ErrorCode.transactional_id_not_found,
    errors.UnknownProducerId: ErrorCode.resource_not_found,
    errors.UnknownConsumerId: ErrorCode.resource_not_found,
    errors.UnknownStage: ErrorCode.resource_not_found,
    errors.UnknownPlan: ErrorCode.resource_not_found,
    errors.UnknownFile: ErrorCode.resource_not_found,
    errors.UnknownTopicDefault: ErrorCode.resource_not_found,
    errors.Conflict: ErrorCode.invalid_request,
    errors.TopicExists: ErrorCode.topic_already_exists,
    errors.NotRegistered: ErrorCode.invalid_request,
    errors.AlreadyRegistered: ErrorCode.duplicate_resource,
    errors.AlreadySubscribed: ErrorCode.duplicate_resource,
    errors.StateChanged: ErrorCode.invalid_update_version,
    errors.NameInOtherMode: ErrorCode.inconsistent_group_protocol,
    errors.OutOfOrderSequence: ErrorCode.out_of_order_sequence_number,
    errors.RepeatForgotten: ErrorCode.duplicate_sequence_number,
    errors.UnknownProducer: ErrorCode.unknown_producer_id,
    errors.ProducerFenced: ErrorCode.invalid_producer_epoch,
    errors.InvalidTransactionState: ErrorCode.invalid_txn_state,
    errors.InvalidProducerIdMapping: ErrorCode.invalid_producer_id_mapping,
    errors.ConcurrentTransactions: ErrorCode.concurrent_transactions,
    errors.StageConflict: ErrorCode.invalid_update_version,
    errors.StageCommitted: ErrorCode.invalid_update_version,
    errors.TurnOutdated: ErrorCode.invalid_update_version,
    errors.OtherGroupProtocol: ErrorCode.inconsistent_group_protocol,
    errors.MemberIdRequired: ErrorCode.member_id_required,
    errors.MemberFenced: ErrorCode.fenced_instance_id,
    errors.IllegalGeneration: ErrorCode.illegal_generation,
    errors.FencedMemberEpoch: ErrorCode.fenced_member_epoch,
    errors.StaleMemberEpoch: ErrorCode.stale_member_epoch,
    errors.InstanceInUse: ErrorCode.unreleased_instance_id,
    errors.RebalanceInProgress: ErrorCode.rebalance_in_progress,
    errors.GroupNotEmpty: ErrorCode.non_empty_group,
    errors.GroupReadsTopic: ErrorCode.group_subscribed_to_topic,
    errors.FencedLeaderEpoch: ErrorCode.fenced_leader_epoch,
    errors.UnknownLeaderEpoch: ErrorCode.unknown_leader_epoch,
    errors.OffsetOutOfRange: ErrorCode.offset_out_of_range,
    errors.EntriesLost: ErrorCode.offset_out_of_range,
    # A policy refuses the request: report it to the user instead of retrying.
    errors.Refused: ErrorCode.policy_violation,
    errors.TopicFull: ErrorCode.policy_violation,
    errors.NoSubscriber: ErrorCode.policy_violation,
    errors.LimitReached: ErrorCode.policy_violation,
    # Members must send their complete state after a restart. Clients do that for a coordinator that
    # they had to look up. After `coordinator_load_in_progress`, librdkafka only repeats its last
    # request.
    errors.GroupLoading: ErrorCode.not_coordinator,
    errors.Unreachable: ErrorCode.policy_violation,
    errors.NotAllowed: ErrorCode.topic_authorization_failed,
    errors.QuackTimeout: ErrorCode.request_timed_out,
    # Only clients raise this error: no broker was found.
    errors.NoBroker: ErrorCode.request_timed_out,
    # The code of a Kafka broker that shuts down: find the leader again, then retry.
    errors.BrokerClosing: ErrorCode.not_leader_or_follower,
    errors.InternalError: ErrorCode.unknown_server_error,
    errors.StorageError: ErrorCode.kafka_storage_error,
    errors.WriteFailed: ErrorCode.kafka_storage_error,
    errors.StoreReadOnly: ErrorCode.kafka_storage_error,
    errors.StoreUnavailable: ErrorCode.kafka_storage_error,
    # Producers take this for a batch that may have been appended: they repeat it with the same
    # sequence number. After `kafka_storage_error` they assume that it was not.
    errors.OutcomeUnknown: ErrorCode.request_timed_out,
    # As after `BrokerClosing`: another broker leads now.
    errors.StoreFenced: ErrorCode.not_leader_or_follower,
    # Not retriable for a consumer, which must skip it: another read returns the same bytes.
    errors.DamagedData: ErrorCode.corrupt_message,
    errors.DamagedStore: ErrorCode.kafka_storage_error,
    errors.StoreLocked: ErrorCode.kafka_storage_error,
    errors.NewerFormat: ErrorCode.kafka_storage_error,
    errors.UnusableDatabase: ErrorCode.kafka_storage_error,
    errors.UnusableDirectory: ErrorCode.kafka_storage_error,
}


def code_of(error: BaseException) -> ErrorCode:
    """Return the code of an error; `unknown_server_error` if it is not a broker error."""
    return next(
        (CODES[kind] for kind in type(error).__mro__ if kind in CODES),
        ErrorCode.unknown_server_error,
    )
