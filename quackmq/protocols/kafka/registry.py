"""The table of APIs. ApiVersions advertises exactly these APIs and versions.

Clients infer much from the advertised versions. Produce is advertised from version 0, although the
message format of that version is refused. librdkafka up to 2.11 uses gzip, snappy and lz4 only with
brokers that advertise version 0; Kafka 4 does the same for this reason. The other ranges begin
where those of Kafka 4 do (KIP-896).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quackmq.protocols.kafka.api import Api
from quackmq.protocols.kafka.handlers.cluster import (
    DESCRIBE_CLUSTER_API,
    FIND_COORDINATOR_API,
    METADATA_API,
    api_versions_api,
)
from quackmq.protocols.kafka.handlers.config_apis import (
    ALTER_CONFIGS_API,
    DESCRIBE_CONFIGS_API,
    INCREMENTAL_ALTER_CONFIGS_API,
)
from quackmq.protocols.kafka.handlers.consumer_groups import (
    CONSUMER_GROUP_DESCRIBE_API,
    CONSUMER_GROUP_HEARTBEAT_API,
)
from quackmq.protocols.kafka.handlers.fetch import FETCH_API
from quackmq.protocols.kafka.handlers.group_offsets import (
    OFFSET_COMMIT_API,
    OFFSET_DELETE_API,
    OFFSET_FETCH_API,
)
from quackmq.protocols.kafka.handlers.groups import (
    DELETE_GROUPS_API,
    DESCRIBE_GROUPS_API,
    HEARTBEAT_API,
    JOIN_GROUP_API,
    LEAVE_GROUP_API,
    LIST_GROUPS_API,
    SYNC_GROUP_API,
)
from quackmq.protocols.kafka.handlers.list_offsets import (
    LIST_OFFSETS_API,
    OFFSET_FOR_LEADER_EPOCH_API,
)
from quackmq.protocols.kafka.handlers.produce import PRODUCE_API
from quackmq.protocols.kafka.handlers.producers import DESCRIBE_PRODUCERS_API, INIT_PRODUCER_ID_API
from quackmq.protocols.kafka.handlers.topics import (
    CREATE_PARTITIONS_API,
    CREATE_TOPICS_API,
    DELETE_RECORDS_API,
    DELETE_TOPICS_API,
    DESCRIBE_LOG_DIRS_API,
)
from quackmq.protocols.kafka.handlers.transactions import (
    ADD_OFFSETS_TO_TXN_API,
    ADD_PARTITIONS_TO_TXN_API,
    DESCRIBE_TRANSACTIONS_API,
    END_TXN_API,
    LIST_TRANSACTIONS_API,
    TXN_OFFSET_COMMIT_API,
)

_NEGOTIATED: Final = (
    PRODUCE_API,
    FETCH_API,
    LIST_OFFSETS_API,
    METADATA_API,
    OFFSET_COMMIT_API,
    OFFSET_FETCH_API,
    FIND_COORDINATOR_API,
    JOIN_GROUP_API,
    HEARTBEAT_API,
    LEAVE_GROUP_API,
    SYNC_GROUP_API,
    DESCRIBE_GROUPS_API,
    LIST_GROUPS_API,
    CONSUMER_GROUP_HEARTBEAT_API,
    CONSUMER_GROUP_DESCRIBE_API,
    DELETE_GROUPS_API,
    OFFSET_DELETE_API,
    CREATE_TOPICS_API,
    DELETE_TOPICS_API,
    DELETE_RECORDS_API,
    INIT_PRODUCER_ID_API,
    ADD_PARTITIONS_TO_TXN_API,
    ADD_OFFSETS_TO_TXN_API,
    END_TXN_API,
    TXN_OFFSET_COMMIT_API,
    OFFSET_FOR_LEADER_EPOCH_API,
    DESCRIBE_CONFIGS_API,
    ALTER_CONFIGS_API,
    DESCRIBE_LOG_DIRS_API,
    CREATE_PARTITIONS_API,
    INCREMENTAL_ALTER_CONFIGS_API,
    DESCRIBE_CLUSTER_API,
    DESCRIBE_PRODUCERS_API,
    DESCRIBE_TRANSACTIONS_API,
    LIST_TRANSACTIONS_API,
)

API_VERSIONS_API: Final = api_versions_api(_NEGOTIATED)

APIS: Final[Mapping[int, Api]] = {api.key: api for api in (*_NEGOTIATED, API_VERSIONS_API)}
