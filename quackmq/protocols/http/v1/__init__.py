"""The HTTP API under /v1. Its own OpenAPI document is served at /v1/openapi.json.

Open `operations` first: it defines what an operation is and the parameters that operations share.
`messages` defines how a message is written in JSON. `topics`, `publishing`, `reading`, `batches`,
`events`, `subscriptions`, `stages`, `archive` and `health` each hold handlers and their
`OPERATIONS`. `openapi` and `docs_page` describe all of them.
"""

from __future__ import annotations

from typing import Final

from quackmq.protocols.http.router import Route
from quackmq.protocols.http.v1 import (
    archive,
    batches,
    docs_page,
    events,
    health,
    publishing,
    reading,
    stages,
    subscriptions,
    topics,
)
from quackmq.protocols.http.v1.operations import Operation, make_routes

_API_OPERATIONS: Final = (
    *topics.OPERATIONS,
    *publishing.OPERATIONS,
    *reading.OPERATIONS,
    *batches.OPERATIONS,
    *events.OPERATIONS,
    *subscriptions.OPERATIONS,
    *stages.OPERATIONS,
    *archive.OPERATIONS,
    *health.OPERATIONS,
)
OPERATIONS: Final[tuple[Operation, ...]] = (
    *_API_OPERATIONS,
    *docs_page.document_operations(_API_OPERATIONS),
)
#: Every route below /v1.
ROUTES: Final[tuple[Route, ...]] = make_routes(OPERATIONS)
