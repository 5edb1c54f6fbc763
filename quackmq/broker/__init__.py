"""The broker: everything that protocols see, over one store.

Every call names its caller, and a change is durable when its call returns. Open `broker` first: it
builds the parts in order. `lifecycle` has their waits and their closing, `housekeeping` the
periodic work, `topics` creates and deletes topics, `topic_defaults` has the policies that new ones
get, and each subpackage is one service. `timekeeping` saves the clock across restarts,
`topic_queue` is a topic as the line protocol uses it, `queue_registrations` has the queue's
producers and consumers, `connections` the connected clients, and `listener_notes` the state of
listeners that survives a crash.
"""

from quackmq.broker.archive.plans import PartitionArchive, Plan
from quackmq.broker.archive.service import Archives, ArchiveState, TopicArchive
from quackmq.broker.broker import Broker
from quackmq.broker.connections import Connected
from quackmq.broker.groups.service import Commit, Groups
from quackmq.broker.groups.state import GroupSettings
from quackmq.broker.log.page import Page
from quackmq.broker.publish.messages import BegunPut, Messages, Put
from quackmq.broker.push.service import Channel, LeasedEntry, PushProgress, PushService
from quackmq.broker.push.unacknowledged import (
    UnacknowledgedPage,
    UnacknowledgedSubscription,
)
from quackmq.broker.queue_registrations import Registrations
from quackmq.broker.settings import BrokerSettings, Caller
from quackmq.broker.staging.series import CommittedTurn, Turn
from quackmq.broker.staging.service import Staging
from quackmq.broker.staging.stage import CommittedStage, PartSummary, StageDescription
from quackmq.broker.staging.stage_log import StagedBatch
from quackmq.broker.topic_defaults import TopicDefault, TopicDefaults
from quackmq.broker.topic_queue import QueueEntry, TopicQueue
from quackmq.broker.transactions.entry import ProducerEpoch, TransactionDescription
from quackmq.broker.transactions.service import Transactions
from quackmq.clock import ClockStatus
from quackmq.groups import (
    ConsumerGroupDescription,
    ConsumerMemberDescription,
    GroupDescription,
    GroupKind,
    GroupState,
    Heartbeat,
    HeartbeatResponse,
    JoinedMember,
    JoinRequest,
    JoinResponse,
    LeaveRequest,
    MemberDescription,
    MemberRef,
    SyncRequest,
    SyncResponse,
)
from quackmq.model.leases import Counts
from quackmq.model.producer_state import Producer
from quackmq.model.subscription import (
    Losses,
    Message,
    Offset,
    Reading,
    RecordPosition,
    Start,
    Subscription,
    SubscriptionLag,
    Terms,
    Time,
    message_id,
    parse_message_id,
    parse_position,
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
    "LeasedEntry",
    "GroupDescription",
    "GroupKind",
    "GroupSettings",
    "GroupState",
    "Groups",
    "Heartbeat",
    "HeartbeatResponse",
    "JoinRequest",
    "JoinResponse",
    "JoinedMember",
    "LeaveRequest",
    "Losses",
    "MemberDescription",
    "MemberRef",
    "Message",
    "Messages",
    "Offset",
    "Page",
    "PartitionArchive",
    "RecordPosition",
    "Plan",
    "Producer",
    "ProducerEpoch",
    "ProducerRef",
    "PushProgress",
    "PushService",
    "Put",
    "Reading",
    "QueueEntry",
    "PartSummary",
    "Registrations",
    "StageDescription",
    "StagedBatch",
    "Staging",
    "SubscriptionLag",
    "Start",
    "Subscription",
    "SyncRequest",
    "SyncResponse",
    "Terms",
    "Time",
    "TopicArchive",
    "TopicDefault",
    "TopicDefaults",
    "TopicQueue",
    "TransactionDescription",
    "TransactionState",
    "Transactions",
    "Turn",
    "UnacknowledgedPage",
    "UnacknowledgedSubscription",
    "message_id",
    "parse_message_id",
    "parse_position",
]
