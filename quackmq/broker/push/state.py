"""The stored state of a push subscription, and its encoding. Pure.

    pushed/<topic id>/<name>               the subscription with its terms: JSON
    leases/<topic id>/<partition>/<name>   its progress in a partition: `Leases.encode`

The first state is written last and removed first: without it, the others mean nothing. A partition
that was added later may have no stored progress; it is read from its beginning.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from typing import Any, Final, NamedTuple

from quackmq.errors import DamagedStore, InvalidRequest
from quackmq.model.subscription import Start, Terms, decode_start, encode_start
from quackmq.model.topic import PartitionKey

#: The prefixes of the keys of push subscriptions, and of their progress.
PUSHED_PREFIX: Final = "pushed/"
LEASES_PREFIX: Final = "leases/"


class StoredPushSubscription(NamedTuple):
    """A push subscription as the store has it."""

    terms: Terms
    start: Start
    created_ms: int
    #: Whether the subscription leaves receipts.
    receipts: bool = False


def pushed_key(topic_id: uuid.UUID, name: str) -> str:
    return f"{PUSHED_PREFIX}{topic_id}/{name}"


def leases_key(key: PartitionKey, name: str) -> str:
    return f"{LEASES_PREFIX}{key.topic_id}/{key.partition}/{name}"


def parse_pushed_key(key: str) -> tuple[uuid.UUID, str]:
    """Return the topic id and the name in a key of `pushed_key`. Raise DamagedStore for any other
    key."""
    topic_id, _, name = key.removeprefix(PUSHED_PREFIX).partition("/")
    try:
        return uuid.UUID(topic_id), name
    except ValueError:
        raise _bad_key(key) from None


def parse_leases_key(key: str) -> tuple[PartitionKey, str]:
    """Return the partition and the name in a key of `leases_key`. Raise DamagedStore for any other
    key."""
    topic_id, _, rest = key.removeprefix(LEASES_PREFIX).partition("/")
    partition, _, name = rest.partition("/")
    try:
        return PartitionKey(uuid.UUID(topic_id), int(partition)), name
    except ValueError:
        raise _bad_key(key) from None


def encode_pushed(stored: StoredPushSubscription) -> bytes:
    """Encode a subscription for the store, as JSON."""
    fields = {
        "terms": dataclasses.asdict(stored.terms),
        "start": encode_start(stored.start),
        "created_ms": stored.created_ms,
    }
    if stored.receipts:
        fields["receipts"] = True
    return json.dumps(fields).encode()


def decode_pushed(value: bytes) -> StoredPushSubscription:
    """Decode a stored subscription. Raise DamagedStore for bytes that `encode_pushed` did not
    write."""
    try:
        fields = json.loads(value)
    except ValueError as error:
        raise DamagedStore(f"a subscription in the store is not JSON: {error}") from None
    match fields:
        case {"terms": dict(terms), "start": start, "created_ms": int(created_ms)}:
            receipts = fields.get("receipts", False)
            if type(receipts) is bool:
                return StoredPushSubscription(
                    _decode_terms(terms), decode_start(start), created_ms, receipts
                )
    raise _undecodable(fields)


def _decode_terms(fields: dict[str, Any]) -> Terms:
    """Decode the terms of a stored subscription. Raise DamagedStore if they are not valid."""
    match fields:
        case {
            "reading": "every" | "live" | "newest" as reading,
            "lease_ms": int(lease_ms),
            "outstanding": int(outstanding),
            "window": int(window),
        }:
            try:
                return Terms(reading, lease_ms, outstanding, window)
            except InvalidRequest as error:
                raise DamagedStore(f"cannot decode a subscription in the store: {error}") from None
    raise _undecodable(fields)


def _undecodable(fields: object) -> DamagedStore:
    return DamagedStore(f"cannot decode a subscription in the store: {str(fields)[:200]}")


def _bad_key(key: str) -> DamagedStore:
    return DamagedStore(f"the store holds a subscription under an invalid key: {key!r}")
