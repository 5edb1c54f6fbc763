"""The broker: all that a door sees. See `quackmq.broker.core`."""

from quackmq.broker.archive import Archives, ArchiveState, TopicArchive
from quackmq.broker.archive_plans import PartitionArchive, Plan
from quackmq.broker.connected import Connected
from quackmq.broker.core import Broker
from quackmq.broker.group_state import GroupSettings
from quackmq.broker.groups import Commit, Groups
from quackmq.broker.messages import BegunPut, Messages, Put
from quackmq.broker.pages import Page
from quackmq.broker.pushing import Channel, Delivery, PushedStanding, Pushing
from quackmq.broker.registrations import Registrations
from quackmq.broker.settings import BrokerSettings, Caller
from quackmq.broker.stage import CommittedStage, Receipt, StageDescription
from quackmq.broker.stage_log import StagedBatch
from quackmq.broker.stage_series import CommittedTurn, Turn
from quackmq.broker.staging import Staging
from quackmq.broker.topic_queue import QueueEntry, TopicQueue
from quackmq.broker.transaction_known import ProducerEpoch, TransactionDescription
from quackmq.broker.transactions import Transactions
from quackmq.clock import ClockStatus
from quackmq.groups import (
    ConsumerGroupDescription,
    ConsumerMemberDescription,
    GroupDescription,
    GroupKind,
    GroupState,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    Joined,
    JoinedMember,
    Leaving,
    MemberDescription,
    MemberRef,
    Sync,
    Synced,
)
from quackmq.model.leases import Counts
from quackmq.model.producer_state import Producer
from quackmq.model.subscription import (
    Losses,
    Message,
    Offset,
    Place,
    Reading,
    Standing,
    Start,
    Subscription,
    Terms,
    Time,
    message_id,
    parse_message_id,
)
from quackmq.model.transactional_id import ProducerRef, TransactionState

__all__ = [
    "ArchiveState",
    "Archives",
    "BegunPut",
    "Broker",
    "BrokerSettings",
    "Caller",
    "Channel",
    "ClockStatus",
    "Commit",
    "CommittedStage",
    "CommittedTurn",
    "Connected",
    "ConsumerGroupDescription",
    "ConsumerMemberDescription",
    "Counts",
    "Delivery",
    "GroupDescription",
    "GroupKind",
    "GroupSettings",
    "GroupState",
    "Groups",
    "Heartbeat",
    "HeartbeatAnswer",
    "Join",
    "Joined",
    "JoinedMember",
    "Leaving",
    "Losses",
    "MemberDescription",
    "MemberRef",
    "Message",
    "Messages",
    "Offset",
    "Page",
    "PartitionArchive",
    "Place",
    "Plan",
    "Producer",
    "ProducerEpoch",
    "ProducerRef",
    "PushedStanding",
    "Pushing",
    "Put",
    "Reading",
    "QueueEntry",
    "Receipt",
    "Registrations",
    "StageDescription",
    "StagedBatch",
    "Staging",
    "Standing",
    "Start",
    "Subscription",
    "Sync",
    "Synced",
    "Terms",
    "Time",
    "TopicArchive",
    "TopicQueue",
    "TransactionDescription",
    "TransactionState",
    "Transactions",
    "Turn",
    "message_id",
    "parse_message_id",
]
