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
from typing import Final, NamedTuple

from quackmq.errors import DamagedStore
from quackmq.model.stored_json import decode_stored, decode_stored_object
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
    id_state = decode_stored_object(value, TransactionalIdState, "a transactional id")
    if id_state.state is TransactionState.ONGOING:
        raise DamagedStore("a transactional id in the store has the state of an open transaction")
    return id_state


def encode_offsets(offsets: Mapping[PartitionKey, PendingOffset]) -> bytes:
    by_topic: dict[str, dict[int, PendingOffset]] = {}
    for key, offset in offsets.items():
        by_topic.setdefault(str(key.topic_id), {})[key.partition] = offset
    return json.dumps(by_topic, ensure_ascii=False, separators=(",", ":")).encode()


def decode_offsets(value: bytes) -> dict[PartitionKey, PendingOffset]:
    """Decode the value of `encode_offsets`. Raise DamagedStore for any other value."""
    by_topic = decode_stored(
        value, dict[uuid.UUID, dict[int, PendingOffset]], "the offsets of a transaction"
    )
    return {
        PartitionKey(topic_id, partition): pending
        for topic_id, pending_by_partition in by_topic.items()
        for partition, pending in pending_by_partition.items()
    }
