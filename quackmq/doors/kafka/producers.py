"""InitProducerId: a number of its own for every producer that wants its repeats dropped.

A producer id given once is never given again, so each request gets a new one with epoch 0, also
one that asks for a new epoch of its old id: it starts afresh. Transactional producers are refused.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from quackmq.doors.kafka.api import Call, schema_api
from quackmq.doors.kafka.errors import code_of
from quackmq.errors import QuackError
from quackmq.wire.kafka.writer import Fields

INIT_PRODUCER_ID: Final = 22


async def init_producer_id(call: Call, request: Any) -> Fields:
    if request.transactional_id is not None:
        # Of all codes that would do, the one on which every client gives up at once.
        code = ErrorCode.transactional_id_authorization_failed
        return {"error_code": code, "producer_epoch": -1}
    try:
        producer_id = await call.broker.new_producer_id(call.caller)
    except QuackError as error:
        return {"error_code": code_of(error), "producer_epoch": -1}
    return {"error_code": ErrorCode.none, "producer_id": producer_id, "producer_epoch": 0}


INIT_PRODUCER_ID_API: Final = schema_api(INIT_PRODUCER_ID, 0, 5, 2, init_producer_id)
