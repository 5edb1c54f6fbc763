"""FindCoordinator: who looks after a group or a transactional id. It is this node, the only one."""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from quackmq.protocols.kafka.api import Call, schema_api
from quackmq.protocols.kafka.codec.writer import Fields

FIND_COORDINATOR: Final = 10

#: What a key names.
_GROUP: Final = 0
_TRANSACTION: Final = 1

_FIRST_WITH_SEVERAL: Final = 4


async def find_coordinator(call: Call, request: Any) -> Fields:
    coordinator = _coordinator(call, getattr(request, "key_type", _GROUP))
    if call.version < _FIRST_WITH_SEVERAL:
        return coordinator
    return {"coordinators": [{**coordinator, "key": key} for key in request.coordinator_keys]}


FIND_COORDINATOR_API: Final = schema_api(FIND_COORDINATOR, 0, 6, 3, find_coordinator)


def _coordinator(call: Call, key_type: int) -> Fields:
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
        "error_message": f"nothing of the kind {key_type} is known here",
        "node_id": -1,
        "host": "",
        "port": -1,
    }
