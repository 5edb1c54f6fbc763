"""What the store keeps of a pushed subscription, as small state. Pure.

    pushed/<topic id>/<name>               that it is there, and its terms: JSON
    leases/<topic id>/<partition>/<name>   how far it has come in a partition: `Leases.encode`

The first comes last and goes first: without it, the others mean nothing. A partition of which
nothing is kept yet, because it was added later, is wanted from its beginning.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from typing import Any, Final, NamedTuple

from quackmq.errors import DamagedStore, InvalidRequest
from quackmq.model.subscription import Start, Terms, decode_start, encode_start
from quackmq.model.topic import PartitionKey

#: Keys of pushed subscriptions begin so, and those of their leases.
PUSHED_PREFIX: Final = "pushed/"
LEASES_PREFIX: Final = "leases/"


class StoredPushSubscription(NamedTuple):
    terms: Terms
    start: Start
    created_ms: int
    #: Whether it leaves receipts.
    receipts: bool = False


def pushed_key(topic_id: uuid.UUID, name: str) -> str:
    return f"{PUSHED_PREFIX}{topic_id}/{name}"


def leases_key(key: PartitionKey, name: str) -> str:
    return f"{LEASES_PREFIX}{key.topic_id}/{key.partition}/{name}"


def parse_pushed_key(key: str) -> tuple[uuid.UUID, str]:
    topic_id, _, name = key.removeprefix(PUSHED_PREFIX).partition("/")
    try:
        return uuid.UUID(topic_id), name
    except ValueError:
        raise _no_key(key) from None


def parse_leases_key(key: str) -> tuple[PartitionKey, str]:
    topic_id, _, rest = key.removeprefix(LEASES_PREFIX).partition("/")
    partition, _, name = rest.partition("/")
    try:
        return PartitionKey(uuid.UUID(topic_id), int(partition)), name
    except ValueError:
        raise _no_key(key) from None


def encode_pushed(kept: StoredPushSubscription) -> bytes:
    fields = {
        "terms": dataclasses.asdict(kept.terms),
        "start": encode_start(kept.start),
        "created_ms": kept.created_ms,
    }
    if kept.receipts:
        fields["receipts"] = True
    return json.dumps(fields).encode()


def decode_pushed(value: bytes) -> StoredPushSubscription:
    """DamagedStore for what `encode_pushed` did not make."""
    try:
        fields = json.loads(value)
    except ValueError as error:
        raise DamagedStore(f"a subscription in the store is not JSON: {error}") from None
    match fields:
        case {"terms": dict(terms), "start": start, "created_ms": int(created_ms)}:
            receipts = fields.get("receipts", False)
            if type(receipts) is bool:
                return StoredPushSubscription(
                    _terms_of(terms), decode_start(start), created_ms, receipts
                )
    raise _no_sense(fields)


def _terms_of(fields: dict[str, Any]) -> Terms:
    match fields:
        case {
            "reading": "every" | "live" as reading,
            "lease_ms": int(lease_ms),
            "outstanding": int(outstanding),
            "window": int(window),
        }:
            try:
                return Terms(reading, lease_ms, outstanding, window)
            except InvalidRequest as error:
                raise DamagedStore(f"cannot decode a subscription in the store: {error}") from None
    raise _no_sense(fields)


def _no_sense(fields: object) -> DamagedStore:
    return DamagedStore(f"cannot decode a subscription in the store: {str(fields)[:200]}")


def _no_key(key: str) -> DamagedStore:
    return DamagedStore(f"the store holds a subscription under {key!r}")
