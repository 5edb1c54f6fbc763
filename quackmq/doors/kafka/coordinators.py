"""FindCoordinator: who looks after a group. It is this node, the only one.

librdkafka takes a broker without this API for one too old for lz4, and would send what it should
compress uncompressed.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from quackmq.doors.kafka.api import Call, schema_api
from quackmq.wire.kafka.writer import Fields

FIND_COORDINATOR: Final = 10


async def find_coordinator(call: Call, request: Any) -> Fields:
    here = {
        "error_code": ErrorCode.none,
        "error_message": None,
        "node_id": call.node.id,
        "host": call.node.host,
        "port": call.node.port,
    }
    keys = getattr(request, "coordinator_keys", ())
    # One key and one answer up to version 3, then a list of both.
    return {**here, "coordinators": [{**here, "key": key} for key in keys]}


FIND_COORDINATOR_API: Final = schema_api(FIND_COORDINATOR, 0, 6, 3, find_coordinator)
