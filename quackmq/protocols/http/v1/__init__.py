"""The API under /v1. What it offers is told by its own document, at /v1/openapi.json.

Read in this order: `operations` (what an operation is), `messages` (how messages are written), then
any of the rest: `topics`, `publishing`, `reading`, `batches`, `holes`, `events`, `subscriptions`,
`stages`, `archive`, `health`, `clock`, `connections`, each with its handlers and its `OPERATIONS`;
`documents`, `openapi` and `page` tell of all of them.
"""

from __future__ import annotations

from typing import Final

from quackmq.protocols.http.router import Route
from quackmq.protocols.http.v1 import (
    archive,
    batches,
    clock,
    connections,
    events,
    health,
    holes,
    publishing,
    reading,
    stages,
    subscriptions,
    topics,
)
from quackmq.protocols.http.v1 import document_routes as documents
from quackmq.protocols.http.v1.operations import Operation, routes_of

_OFFERED: Final = (
    *topics.OPERATIONS,
    *publishing.OPERATIONS,
    *reading.OPERATIONS,
    *batches.OPERATIONS,
    *holes.OPERATIONS,
    *events.OPERATIONS,
    *subscriptions.OPERATIONS,
    *stages.OPERATIONS,
    *archive.OPERATIONS,
    *health.OPERATIONS,
    *clock.OPERATIONS,
    *connections.OPERATIONS,
)
OPERATIONS: Final[tuple[Operation, ...]] = (*_OFFERED, *documents.operations(_OFFERED))
#: Every route below /v1.
ROUTES: Final[tuple[Route, ...]] = routes_of(OPERATIONS)
