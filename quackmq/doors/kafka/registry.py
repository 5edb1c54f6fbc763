"""The APIs of this door. What stands here is what ApiVersions advertises, and it works.

Clients infer much from it. Produce is advertised from version 0, which carries a message format
that is refused, because librdkafka up to 2.11 compresses with gzip, snappy and lz4 only for brokers
that have version 0 (Kafka 4 does the same for the same reason). The other ranges begin where those
of Kafka 4 do (KIP-896). No API of transactions is here, so no client believes in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quackmq.doors.kafka.api import Api
from quackmq.doors.kafka.cluster import METADATA_API, api_versions_api
from quackmq.doors.kafka.coordinators import FIND_COORDINATOR_API
from quackmq.doors.kafka.fetch import FETCH_API
from quackmq.doors.kafka.offsets import LIST_OFFSETS_API
from quackmq.doors.kafka.produce import PRODUCE_API
from quackmq.doors.kafka.producers import INIT_PRODUCER_ID_API
from quackmq.doors.kafka.topics import CREATE_TOPICS_API, DELETE_TOPICS_API

_NEGOTIATED: Final = (
    PRODUCE_API,
    FETCH_API,
    LIST_OFFSETS_API,
    METADATA_API,
    FIND_COORDINATOR_API,
    CREATE_TOPICS_API,
    DELETE_TOPICS_API,
    INIT_PRODUCER_ID_API,
)

API_VERSIONS_API: Final = api_versions_api(_NEGOTIATED)

APIS: Final[Mapping[int, Api]] = {api.key: api for api in (*_NEGOTIATED, API_VERSIONS_API)}
