"""What is advertised works: every version of every API is asked for and answered."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from kio.index import load_request_schema
from kio.schema.errors import ErrorCode

from quackmq.protocols.kafka.api import Api
from quackmq.protocols.kafka.registry import APIS
from tests.kit.tables import each
from tests.protocols.kafka.admin import ADMIN_REQUESTS
from tests.protocols.kafka.client import (
    API_VERSIONS,
    CREATE_TOPICS,
    DELETE_TOPICS,
    FETCH,
    FIND_COORDINATOR,
    INIT_PRODUCER_ID,
    LIST_OFFSETS,
    METADATA,
    PRODUCE,
    Client,
    fetch_fields,
    news,
    produce_fields,
    served,
)
from tests.protocols.kafka.membership import GROUP_REQUESTS
from tests.protocols.kafka.transacting import TRANSACTION_REQUESTS

#: The oldest versions of Produce carry message formats that have no schema any more.
WITHOUT_SCHEMA = {(PRODUCE, 0), (PRODUCE, 1), (PRODUCE, 2)}

VERSIONS = [
    (api.key, version)
    for api in APIS.values()
    for version in range(api.first_version, api.last_version + 1)
    if (api.key, version) not in WITHOUT_SCHEMA
]


def request_of(api_key: int, version: int) -> dict[str, Any]:
    """A sound request of any API, for a topic that is not there."""
    by_id: dict[str, Any] = {"by": "topic_id", "topic": None} if version >= 13 else {}
    requests: dict[int, dict[str, Any]] = {
        PRODUCE: produce_fields(news(), **by_id),
        FETCH: fetch_fields(**by_id),
        LIST_OFFSETS: {
            "replica_id": -1,
            "isolation_level": 0,
            "timeout": 0,
            "topics": [{"name": "none", "partitions": [{"partition_index": 0, "timestamp": -1}]}],
        },
        METADATA: {
            "topics": [],
            "include_topic_authorized_operations": False,
            "include_cluster_authorized_operations": False,
        },
        FIND_COORDINATOR: {"key": "group", "key_type": 0, "coordinator_keys": ["group"]},
        API_VERSIONS: {"client_software_name": "tester", "client_software_version": "1.0"},
        CREATE_TOPICS: {
            "topics": [
                {
                    "name": "new",
                    "num_partitions": 1,
                    "replication_factor": 1,
                    "assignments": [],
                    "configs": [],
                }
            ],
            "timeout": 0,
        },
        DELETE_TOPICS: {
            "topic_names": ["none"],
            "topics": [{"name": "none", "topic_id": None}],
            "timeout": 0,
        },
        INIT_PRODUCER_ID: {"transactional_id": None, "transaction_timeout": 0},
        **GROUP_REQUESTS,
        **ADMIN_REQUESTS,
        **TRANSACTION_REQUESTS,
    }
    return requests[api_key]


@each("api_key", APIS)
async def test_every_advertised_version_is_answered(api_key: int) -> None:
    async with served() as running:
        client = await running.client()
        for key, version in VERSIONS:
            if key == api_key:
                answer = await client.ask(key, version, **request_of(key, version))
                assert int(answer.__version__) == version


@each("api", APIS.values())
def test_flexible_versions_are_those_of_the_schemas(api: Api) -> None:
    for version in range(api.first_version, api.last_version + 1):
        if (api.key, version) not in WITHOUT_SCHEMA:
            flexible = load_request_schema(api.key, version).__flexible__
            assert flexible == (version >= api.flexible_from)


@pytest.mark.parametrize("version", range(5))
async def test_api_versions_tells_what_is_here(version: int) -> None:
    async with served() as running:
        client = await running.client()
        answer = await client.ask(API_VERSIONS, version, **request_of(API_VERSIONS, version))
    assert answer.error_code == ErrorCode.none
    told = {key.api_key: (key.min_version, key.max_version) for key in answer.api_keys}
    assert told == {key: (api.first_version, api.last_version) for key, api in APIS.items()}
    assert told[PRODUCE][0] == 0, "or librdkafka does not compress"


async def test_a_version_of_api_versions_from_the_future_is_told_which_to_use() -> None:
    async with served() as running:
        client = await running.client()
        client.writer.write(struct.pack(">ihhih", 15, API_VERSIONS, 99, 7, -1) + b"\0junk")
        payload = await client.receive_frame()
        assert payload == struct.pack(">ihihhh", 7, 35, 1, API_VERSIONS, 0, 4)
        answer = await client.ask(API_VERSIONS, 4, **request_of(API_VERSIONS, 4))
        assert answer.error_code == ErrorCode.none


@pytest.mark.parametrize("name", ["", "-name", "na me", "name."])
async def test_a_client_whose_name_is_none_is_told_so(name: str) -> None:
    async with served() as running:
        client = await running.client()
        answer = await client.ask(
            API_VERSIONS, 3, client_software_name=name, client_software_version="1.0"
        )
        assert (answer.error_code, answer.api_keys) == (ErrorCode.invalid_request, ())


@each(
    ("api_key", "version"), [(METADATA, 14), (METADATA, -1), (FETCH, 3), (27, 1), (-1, 0), (999, 0)]
)
async def test_an_unknown_api_or_version_is_disconnected(api_key: int, version: int) -> None:
    async with served() as running:
        client: Client = await running.client()
        other = await running.client()
        client.writer.write(struct.pack(">ihhih", 30, api_key, version, 1, -1) + bytes(20))
        assert await client.is_disconnected()
        assert (await other.ask(METADATA, 1, topics=None)).topics == ()
