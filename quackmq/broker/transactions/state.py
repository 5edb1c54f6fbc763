"""The stored form of a transactional id. Pure.

    "transaction/ID": {"producer_id": 7, "epoch": 3, "state": "CompleteCommit", "timeout_ms": 60000,
    "updated_ms": 1700000000000, "previous_producer_id": 7, "previous_epoch": 2}

    "transaction-offsets/LENGTH/ID/GROUP":
        {"TOPIC ID": {"PARTITION": [offset, metadata, leader epoch]}}

The second entry exists while an open transaction has offsets of a group to commit. LENGTH is the
length of the id in characters, because both names may contain any character. Older directories have
no leader epoch; that means that there was none. Whether and where a transaction is open is not
stored here: the log has that information.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from quackmq.errors import DamagedStore
from quackmq.model.topic import NO_LEADER_EPOCH, PartitionKey
from quackmq.model.transactional_id import TransactionalIdState, TransactionState

#: Prefix of the state keys of transactional ids.
STATE_PREFIX: Final = "transaction/"
#: Prefix of the state keys of offsets that wait for the end of a transaction.
OFFSETS_PREFIX: Final = "transaction-offsets/"


class PendingOffset(NamedTuple):
    """An offset that is committed if its transaction commits."""

    offset: int
    metadata: str
    leader_epoch: int = NO_LEADER_EPOCH


def state_key(transactional_id: str) -> str:
    return STATE_PREFIX + transactional_id


def transactional_id_in(key: str) -> str:
    return key.removeprefix(STATE_PREFIX)


def offsets_key(transactional_id: str, group: str) -> str:
    return f"{OFFSETS_PREFIX}{len(transactional_id)}/{transactional_id}/{group}"


def parse_offsets_key(key: str) -> tuple[str, str]:
    """Return the transactional id and the group. Raise DamagedStore if `offsets_key` did not make
    `key`."""
    length, slash, names = key.removeprefix(OFFSETS_PREFIX).partition("/")
    end = int(length) if length.isdecimal() else len(names)
    if not slash or names[end : end + 1] != "/":
        raise DamagedStore(f"the store has offsets of a transaction under {key[:200]!r}")
    return names[:end], names[end + 1 :]


def encode_id_state(id_state: TransactionalIdState) -> bytes:
    return json.dumps(id_state._asdict()).encode()


def decode_id_state(value: bytes) -> TransactionalIdState:
    """Decode the value of `encode_id_state`. Raise DamagedStore for any other value."""
    match _from_json(value):
        case {
            "producer_id": int(producer_id),
            "epoch": int(epoch),
            "state": "Empty" | "CompleteCommit" | "CompleteAbort" as state,
            "timeout_ms": int(timeout_ms),
            "updated_ms": int(updated_ms),
            "previous_producer_id": int(previous_producer_id),
            "previous_epoch": int(previous_epoch),
        }:
            return TransactionalIdState(
                producer_id,
                epoch,
                TransactionState(state),
                timeout_ms,
                updated_ms,
                previous_producer_id,
                previous_epoch,
            )
    raise DamagedStore(f"cannot decode a transactional id in the store: {value[:200]!r}")


def encode_offsets(offsets: Mapping[PartitionKey, PendingOffset]) -> bytes:
    by_topic: dict[str, dict[int, PendingOffset]] = {}
    for key, offset in offsets.items():
        by_topic.setdefault(str(key.topic_id), {})[key.partition] = offset
    return json.dumps(by_topic, ensure_ascii=False, separators=(",", ":")).encode()


def decode_offsets(value: bytes) -> dict[PartitionKey, PendingOffset]:
    """Decode the value of `encode_offsets`. Raise DamagedStore for any other value."""
    by_topic = _from_json(value)
    try:
        return {
            PartitionKey(uuid.UUID(topic_id), int(partition)): _pending_offset(*pending)
            for topic_id, of_topic in by_topic.items()
            for partition, pending in of_topic.items()
        }
    except (AttributeError, TypeError, ValueError):
        raise DamagedStore(
            f"offsets of a transaction in the store make no sense: {value[:200]!r}"
        ) from None


def _pending_offset(
    offset: object, metadata: object, leader_epoch: object = NO_LEADER_EPOCH
) -> PendingOffset:
    match offset, metadata, leader_epoch:
        case int(), str(), int():
            return PendingOffset(offset, metadata, leader_epoch)
    raise TypeError("a pending offset is a number, a text and a leader epoch")


def _from_json(value: bytes) -> Any:
    try:
        return json.loads(value)
    except ValueError as error:
        raise DamagedStore(f"a transaction in the store is not JSON: {error}") from None
