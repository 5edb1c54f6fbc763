"""ApiVersions, Metadata, DescribeCluster and FindCoordinator.

They describe the broker's features, its node and its topics. This node coordinates every group and
transactional id. There is no access control yet, so a client that asks for its authorized
operations gets all of them.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from quackmq.errors import QuackError, UnknownTopic
from quackmq.model.topic import Topic, check_topic_name
from quackmq.protocols.kafka.api import Api, Call, iterate_yielding, schema_api
from quackmq.protocols.kafka.codec.writer import EncodedArray, Fields, write_response
from quackmq.protocols.kafka.errors import code_of
from quackmq.protocols.kafka.handlers.encoded_topics import METADATA, NOT_REQUESTED

API_VERSIONS: Final = 18
DESCRIBE_CLUSTER: Final = 60

#: The form of names and versions that KIP-511 defines.
_SOFTWARE_NAME: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
_FIRST_WITH_SOFTWARE_NAME: Final = 3
#: Up to version 3, clients do not understand a feature whose minimum version is 0.
_FIRST_WITH_ZERO_FEATURES: Final = 4
#: In version 0 an empty list of topics means all topics; from version 1 on, null does.
_FIRST_WITH_NULL_FOR_ALL: Final = 1
_FIRST_WITH_NULL_NAME: Final = 12

#: The endpoint types of DescribeCluster.
_BROKERS: Final = 1
_CONTROLLERS: Final = 2
#: Kafka's numbers of operations on the cluster, as bits: create, alter, describe, cluster action,
#: describe and alter its configs, idempotent write.
_CLUSTER_OPERATIONS: Final = sum(1 << number for number in (5, 7, 8, 9, 10, 11, 12))


class Feature(NamedTuple):
    """A feature that the nodes of a Kafka cluster agree on and that clients act on: its supported
    versions, and the finalized version.
    """

    name: str
    least: int
    greatest: int
    finalized: int


#: With transaction version 2 (KIP-890), clients add no partitions, and get a new epoch with each
#: end. With group version 1, the newer protocol (KIP-848) exists beside the classic one.
FEATURES: Final = (Feature("group.version", 0, 1, 1), Feature("transaction.version", 0, 2, 2))
#: Grows with each change of finalized features; clients keep the features with the greatest epoch.
_FEATURES_EPOCH: Final = 1


def api_versions_api(apis: Sequence[Api]) -> Api:
    """Make ApiVersions for these APIs and itself."""

    async def api_versions(call: Call, request: Any) -> Fields:
        """Return the APIs with their versions, and the features. Refuse a client that names its
        software in a form that KIP-511 does not allow.
        """
        if call.version >= _FIRST_WITH_SOFTWARE_NAME and not (
            _SOFTWARE_NAME.fullmatch(request.client_software_name)
            and _SOFTWARE_NAME.fullmatch(request.client_software_version)
        ):
            return {"error_code": ErrorCode.invalid_request, "api_keys": []}
        return {
            "error_code": ErrorCode.none,
            "api_keys": _version_ranges([*apis, own]),
            **_feature_fields(call.version),
        }

    # The response header is never flexible: a client that guessed the version must decode it.
    own = schema_api(API_VERSIONS, 0, 4, 3, api_versions, has_flexible_response=False)
    return own


def unsupported_api_versions(api: Api) -> bytearray:
    """Return the response to an unknown version of ApiVersions, in the oldest form. It names the
    versions that the client may try instead.
    """
    fields = {"error_code": ErrorCode.unsupported_version, "api_keys": _version_ranges([api])}
    return write_response(API_VERSIONS, 0, fields)


def _version_ranges(apis: Sequence[Api]) -> list[Fields]:
    return [
        {"api_key": api.key, "min_version": api.first_version, "max_version": api.last_version}
        for api in sorted(apis, key=lambda api: api.key)
    ]


def _feature_fields(version: int) -> Fields:
    """Return the supported and the finalized features, as a client of this version understands
    them.
    """
    return {
        "supported_features": [
            {"name": feature.name, "min_version": feature.least, "max_version": feature.greatest}
            for feature in FEATURES
            if feature.least > 0 or version >= _FIRST_WITH_ZERO_FEATURES
        ],
        "finalized_features_epoch": _FEATURES_EPOCH,
        "finalized_features": [
            {
                "name": feature.name,
                "max_version_level": feature.finalized,
                "min_version_level": feature.finalized,
            }
            for feature in FEATURES
        ],
    }


async def metadata(call: Call, request: Any) -> Fields:
    """Return this node as the only broker, and the requested topics."""
    node = call.node
    return {
        "brokers": [{"node_id": node.id, "host": node.host, "port": node.port, "rack": None}],
        "cluster_id": call.broker.cluster_id,
        "controller_id": node.id,
        "topics": await _requested_topics(call, request),
        "error_code": ErrorCode.none,
        "cluster_authorized_operations": _cluster_operations(request),
    }


METADATA_API: Final = schema_api(METADATA, 0, 13, 9, metadata)


async def describe_cluster(call: Call, request: Any) -> Fields:
    """Return this node as the only broker. A client that asks for controllers gets an error: there
    are no separate controller nodes.
    """
    node = call.node
    endpoint_type = getattr(request, "endpoint_type", _BROKERS)
    if endpoint_type == _BROKERS:
        return {
            "error_code": ErrorCode.none,
            "cluster_id": call.broker.cluster_id,
            "controller_id": node.id,
            "brokers": [
                {"broker_id": node.id, "host": node.host, "port": node.port, "is_fenced": False}
            ],
            "cluster_authorized_operations": _cluster_operations(request),
        }
    if endpoint_type == _CONTROLLERS:
        code, message = ErrorCode.mismatched_endpoint_type, "this is a broker, not a controller"
    else:
        code, message = ErrorCode.unsupported_endpoint_type, f"no endpoint type {endpoint_type}"
    return {"error_code": code, "error_message": message, "cluster_id": "", "brokers": []}


DESCRIBE_CLUSTER_API: Final = schema_api(DESCRIBE_CLUSTER, 0, 2, 0, describe_cluster)


def _cluster_operations(request: Any) -> int:
    is_requested = getattr(request, "include_cluster_authorized_operations", False)
    return _CLUSTER_OPERATIONS if is_requested else NOT_REQUESTED


async def _requested_topics(call: Call, request: Any) -> EncodedArray:
    """Return the requested topics, or all topics, in encoded form. A topic that cannot be found or
    created is returned with its error code.
    """
    requested = request.topics
    encoded_topics = call.peer.encoded_topics
    with_operations = getattr(request, "include_topic_authorized_operations", False)
    if requested is None or (not requested and call.version < _FIRST_WITH_NULL_FOR_ALL):
        return await encoded_topics.every_topic(call, with_operations)
    # Versions before 4 do not have this field: the first use of a topic may create it.
    may_create = getattr(request, "allow_auto_topic_creation", True)
    # Describe each topic once, however often the request names it.
    distinct_topics = {(getattr(topic, "topic_id", None), topic.name): None for topic in requested}
    encoded = []
    async for topic_id, name in iterate_yielding(distinct_topics, every=100):
        topic = await _find_topic(call, topic_id, name, may_create)
        if isinstance(topic, Topic):
            encoded.append(await encoded_topics.topic(call, topic, with_operations))
            continue
        # Older versions cannot encode a null name.
        if name is None and call.version < _FIRST_WITH_NULL_NAME:
            name = ""
        encoded.append(encoded_topics.error(call, topic, name, topic_id, with_operations))
    return EncodedArray(len(encoded), b"".join(encoded))


async def _find_topic(
    call: Call, topic_id: uuid.UUID | None, name: str | None, may_create: bool
) -> Topic | ErrorCode:
    """Find a topic by its name, or by its id if the request gives no name. With `may_create`, an
    unknown name may create the topic (`Broker.ensure_topic`). Return an error code if there is no
    topic.
    """
    try:
        if name is None:
            return _find_topic_by_id(call, topic_id)
        if may_create:
            return await call.broker.ensure_topic(call.caller, name)
        check_topic_name(name)
        return call.broker.topic(name)
    except QuackError as error:
        is_unknown_id = name is None and isinstance(error, UnknownTopic)
        return ErrorCode.unknown_topic_id if is_unknown_id else code_of(error)


def _find_topic_by_id(call: Call, topic_id: uuid.UUID | None) -> Topic:
    if topic_id is None:
        raise UnknownTopic("neither a name nor an id of a topic")
    return call.broker.topic_by_id(topic_id)


# --- the coordinator of a group or transactional id -----------------------------------------------


FIND_COORDINATOR: Final = 10

#: The types of keys.
_GROUP: Final = 0
_TRANSACTION: Final = 1

_FIRST_WITH_SEVERAL: Final = 4


async def find_coordinator(call: Call, request: Any) -> Fields:
    """Return this node as the coordinator of every requested group or transactional id."""
    coordinator = _coordinator_fields(call, getattr(request, "key_type", _GROUP))
    if call.version < _FIRST_WITH_SEVERAL:
        return coordinator
    return {"coordinators": [{**coordinator, "key": key} for key in request.coordinator_keys]}


FIND_COORDINATOR_API: Final = schema_api(FIND_COORDINATOR, 0, 6, 3, find_coordinator)


def _coordinator_fields(call: Call, key_type: int) -> Fields:
    """Return this node, or an error if the type of the keys is unknown."""
    if key_type in (_GROUP, _TRANSACTION):
        return {
            "error_code": ErrorCode.none,
            "error_message": None,
            "node_id": call.node.id,
            "host": call.node.host,
            "port": call.node.port,
        }
    return {
        "error_code": ErrorCode.invalid_request,
        "error_message": f"unknown key type {key_type}: use 0 (group) or 1 (transaction)",
        "node_id": -1,
        "host": "",
        "port": -1,
    }
