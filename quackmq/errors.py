"""Every error that QuackMQ raises on purpose, in one tree.

    QuackError
    ├── InvalidRequest            the request can never succeed
    │   ├── IllegalTopicName
    │   ├── InvalidPolicy
    │   ├── InvalidMessageId
    │   ├── InvalidGroup          an invalid group name, or invalid data of a member
    │   ├── InvalidSessionTimeout
    │   ├── InvalidPattern        not a pattern of names, or one that takes too long to match
    │   ├── UnsupportedAssignor   an assignor that this broker does not have
    │   ├── InvalidTransactionTimeout
    │   ├── MetadataTooLarge      the metadata of a committed offset
    │   ├── InvalidSetting
    │   ├── ClientClosed          a call of a client after it was closed
    │   ├── ProtocolError         bytes from a peer that violate their protocol
    │   ├── CorruptBatch          bytes that are not a record batch, or whose checksum is wrong
    │   ├── UnsupportedBatch      a valid batch of a kind that this broker does not accept
    │   └── RecordTooLarge
    ├── NotFound
    │   ├── UnknownTopic
    │   ├── UnknownPartition
    │   ├── UnknownTopicDefault   no defaults are set for this pattern of names
    │   ├── UnknownSubscription
    │   ├── UnknownGroup
    │   ├── UnknownMember         of a group: it never joined, or its session expired
    │   ├── UnknownTransactionalId
    │   ├── UnknownProducerId     of a queue: no producer was registered with this id
    │   ├── UnknownConsumerId     the same for a consumer
    │   ├── UnknownStage
    │   ├── UnknownPlan           of the archive: never made, released, or expired
    │   └── UnknownFile           not a file of the archive, or no longer
    ├── Conflict                  the request disagrees with the current state
    │   ├── TopicExists
    │   ├── NotRegistered         a queue's producer uses a topic that is not its own
    │   ├── AlreadyRegistered     a queue's producer, for this topic or another one
    │   ├── AlreadySubscribed     a queue's consumer, to this topic
    │   ├── StateChanged          compare-and-set found another version
    │   ├── NameInOtherMode       a subscription name is in use in another mode
    │   ├── OutOfOrderSequence
    │   ├── RepeatForgotten       a repeated batch whose position is no longer remembered
    │   ├── UnknownProducer
    │   ├── ProducerFenced
    │   ├── InvalidTransactionState   not allowed in the current state of the transaction
    │   ├── InvalidProducerIdMapping  a transactional id that belongs to another producer
    │   ├── ConcurrentTransactions    an earlier request is still running: try again
    │   ├── StageConflict         a key that was committed with, or has, other contents
    │   │   ├── StageCommitted    a turn of a series that was committed: nothing is left to do
    │   │   └── TurnOutdated      a turn before the last committed one of its series
    │   ├── OtherGroupProtocol    no assignment protocol that all members support
    │   ├── MemberIdRequired      join again with the member id in this error
    │   ├── MemberFenced          another instance has replaced this static member
    │   ├── IllegalGeneration     of an earlier rebalance
    │   ├── FencedMemberEpoch     a member that fell behind: release everything, join again
    │   ├── StaleMemberEpoch      a request with an old epoch: use the current one
    │   ├── InstanceInUse         a static member with that instance id exists and has not left
    │   ├── RebalanceInProgress
    │   ├── GroupNotEmpty
    │   ├── GroupReadsTopic       its offsets are in use
    │   ├── FencedLeaderEpoch     older than the current one
    │   └── UnknownLeaderEpoch    newer than the current one
    ├── OffsetOutOfRange
    ├── EntriesLost               deleted before their subscriber read them; the next call continues
    ├── Refused                   a valid request that cannot be done now
    │   ├── TopicFull
    │   ├── NoSubscriber
    │   ├── LimitReached
    │   ├── GroupLoading          a group that is not ready, for instance after a restart: retry
    │   ├── Unreachable           nothing answers at the address that a client gave as its own
    │   └── NotAllowed
    ├── QuackTimeout
    │   └── NoBroker              nothing listens at the address, so nothing was sent
    ├── BrokerClosing
    ├── InternalError             an invariant of this program is violated: a bug, please report it
    └── StorageError
        ├── WriteFailed           a change that the store has not confirmed
        │   ├── StoreReadOnly     a full disk or a failed sync: reads continue, writes do not
        │   ├── StoreUnavailable  the store cannot be reached now; nothing was changed: retry
        │   ├── OutcomeUnknown    it is unknown whether the change was stored
        │   └── StoreFenced       another broker owns the store now: ask that one
        ├── DamagedData           stored bytes with a wrong checksum; never returned
        ├── DamagedStore          damage because of which the directory cannot be opened
        ├── StoreLocked
        ├── NewerFormat
        ├── UnusableDirectory
        └── UnusableDatabase      the message says which setting or privilege to change

A message says what happened and, if the reader can do something about it, what to do.
Each class has a `code`, the same word in every protocol that can show one.
"""

from __future__ import annotations

from typing import ClassVar


class QuackError(Exception):
    code: ClassVar[str] = "error"


class InvalidRequest(QuackError):
    code = "invalid_request"


class IllegalTopicName(InvalidRequest):
    code = "illegal_topic_name"


class InvalidPolicy(InvalidRequest):
    code = "invalid_policy"


class InvalidMessageId(InvalidRequest):
    code = "invalid_message_id"


class InvalidGroup(InvalidRequest):
    code = "invalid_group"


class InvalidSessionTimeout(InvalidRequest):
    code = "invalid_session_timeout"


class InvalidPattern(InvalidRequest):
    code = "invalid_pattern"


class UnsupportedAssignor(InvalidRequest):
    code = "unsupported_assignor"


class InvalidTransactionTimeout(InvalidRequest):
    code = "invalid_transaction_timeout"


class MetadataTooLarge(InvalidRequest):
    code = "metadata_too_large"


class InvalidSetting(InvalidRequest):
    code = "invalid_setting"


class ClientClosed(InvalidRequest):
    code = "client_closed"


class ProtocolError(InvalidRequest):
    code = "protocol_error"


class CorruptBatch(InvalidRequest):
    code = "corrupt_batch"


class UnsupportedBatch(InvalidRequest):
    code = "unsupported_batch"


class RecordTooLarge(InvalidRequest):
    code = "record_too_large"


class NotFound(QuackError):
    code = "not_found"


class UnknownTopic(NotFound):
    code = "unknown_topic"


class UnknownPartition(NotFound):
    code = "unknown_partition"


class UnknownTopicDefault(NotFound):
    code = "unknown_topic_default"


class UnknownSubscription(NotFound):
    code = "unknown_subscription"


class UnknownGroup(NotFound):
    code = "unknown_group"


class UnknownMember(NotFound):
    code = "unknown_member"


class UnknownTransactionalId(NotFound):
    code = "unknown_transactional_id"


class UnknownProducerId(NotFound):
    code = "unknown_producer_id"


class UnknownConsumerId(NotFound):
    code = "unknown_consumer_id"


class UnknownStage(NotFound):
    code = "unknown_stage"


class UnknownPlan(NotFound):
    code = "unknown_plan"


class UnknownFile(NotFound):
    code = "unknown_file"


class Conflict(QuackError):
    code = "conflict"


class TopicExists(Conflict):
    code = "topic_exists"


class NotRegistered(Conflict):
    code = "not_registered"


class AlreadyRegistered(Conflict):
    code = "already_registered"


class AlreadySubscribed(Conflict):
    code = "already_subscribed"


class StateChanged(Conflict):
    code = "state_changed"


class NameInOtherMode(Conflict):
    code = "name_in_other_mode"


class OutOfOrderSequence(Conflict):
    code = "out_of_order_sequence"


class RepeatForgotten(Conflict):
    code = "repeat_forgotten"


class UnknownProducer(Conflict):
    code = "unknown_producer"


class ProducerFenced(Conflict):
    code = "producer_fenced"


class InvalidTransactionState(Conflict):
    code = "invalid_transaction_state"


class InvalidProducerIdMapping(Conflict):
    code = "invalid_producer_id_mapping"


class ConcurrentTransactions(Conflict):
    code = "concurrent_transactions"


class StageConflict(Conflict):
    code = "stage_conflict"


class StageCommitted(StageConflict):
    code = "stage_committed"


class TurnOutdated(StageConflict):
    code = "turn_outdated"


class OtherGroupProtocol(Conflict):
    code = "other_group_protocol"


class MemberIdRequired(Conflict):
    code = "member_id_required"

    def __init__(self, message: str, member_id: str) -> None:
        super().__init__(message)
        self.member_id = member_id


class MemberFenced(Conflict):
    code = "member_fenced"


class IllegalGeneration(Conflict):
    code = "illegal_generation"


class FencedMemberEpoch(Conflict):
    code = "fenced_member_epoch"


class StaleMemberEpoch(Conflict):
    code = "stale_member_epoch"


class InstanceInUse(Conflict):
    code = "instance_in_use"


class RebalanceInProgress(Conflict):
    code = "rebalance_in_progress"


class GroupNotEmpty(Conflict):
    code = "group_not_empty"


class GroupReadsTopic(Conflict):
    code = "group_reads_topic"


class FencedLeaderEpoch(Conflict):
    code = "fenced_leader_epoch"


class UnknownLeaderEpoch(Conflict):
    code = "unknown_leader_epoch"


class OffsetOutOfRange(QuackError):
    code = "offset_out_of_range"


class EntriesLost(QuackError):
    code = "entries_lost"


class Refused(QuackError):
    code = "refused"


class TopicFull(Refused):
    code = "topic_full"


class NoSubscriber(Refused):
    code = "no_subscriber"


class LimitReached(Refused):
    code = "limit_reached"


class GroupLoading(Refused):
    code = "group_loading"


class Unreachable(Refused):
    code = "unreachable"


class NotAllowed(Refused):
    code = "not_allowed"


class QuackTimeout(QuackError):
    code = "timeout"


class NoBroker(QuackTimeout):
    code = "no_broker"


class BrokerClosing(QuackError):
    code = "closing"


class InternalError(QuackError):
    """Raised where continuing would store, acknowledge or deliver something wrong."""

    code = "internal_error"


class StorageError(QuackError):
    code = "storage_error"


class WriteFailed(StorageError):
    code = "write_failed"


class StoreReadOnly(WriteFailed):
    code = "store_read_only"


class StoreUnavailable(WriteFailed):
    code = "store_unavailable"


class OutcomeUnknown(WriteFailed):
    code = "outcome_unknown"


class StoreFenced(WriteFailed):
    code = "store_fenced"


class DamagedData(StorageError):
    """`next_offset` is where reading can continue, if known."""

    code = "damaged_data"

    def __init__(self, message: str, next_offset: int | None = None) -> None:
        super().__init__(message)
        self.next_offset = next_offset


class DamagedStore(StorageError):
    code = "damaged_store"


class StoreLocked(StorageError):
    code = "store_locked"


class NewerFormat(StorageError):
    code = "newer_format"


class UnusableDirectory(StorageError):
    code = "unusable_directory"


class UnusableDatabase(StorageError):
    code = "unusable_database"
