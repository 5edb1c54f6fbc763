"""One stage in memory: its parts, their contents, and whether it still accepts calls.

Only `Staging` calls this. Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple
from uuid import UUID

from quackmq import limits
from quackmq.broker.staging.series import Turn
from quackmq.broker.staging.stage_log import Header, digest_of
from quackmq.errors import DamagedStore, LimitReached, StageConflict
from quackmq.model.topic import PartitionKey

#: Prefix of the state keys of committed stages.
STATE_PREFIX: Final = "staging/"


class Receipt(NamedTuple):
    """The contents of a part: the number of its calls and the digest of their batches. A commit
    names its parts by their receipts."""

    part: str
    calls: int
    digest: str


class StageDescription(NamedTuple):
    key: str
    parts: tuple[Receipt, ...]
    batches: int
    size: int
    touched_ms: int
    turn: Turn | None = None


class CommittedStage(NamedTuple):
    """A committed stage. `contents` distinguishes one commit of a key from another. `repeated` is
    true in the answer to a commit that was made before."""

    contents: str
    records: int
    committed_ms: int
    repeated: bool = False


class Call(NamedTuple):
    """One staging call: its header, and the offset of its first batch in the stage's log."""

    header: Header
    offset: int


class Part:
    __slots__ = ("calls", "digest", "lock", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        #: Serialises the calls of one writer.
        self.lock = asyncio.Lock()
        self.calls: list[Call] = []
        self.digest = ""

    def add(self, call: Call) -> None:
        self.calls.append(call)
        self.digest = digest_of(self.digest, call.header.entries)

    def receipt(self) -> Receipt:
        return Receipt(self.name, len(self.calls), self.digest)

    def holds(self, header: Header) -> bool:
        """Return whether a call repeats an earlier one. Raise StageConflict if its number is too
        high, or if the earlier call had other batches."""
        if header.number == len(self.calls):
            return False
        if header.number > len(self.calls):
            raise StageConflict(
                f"call {header.number} of part {self.name} where {len(self.calls)} is next"
            )
        if self.calls[header.number].header.entries != header.entries:
            raise StageConflict(
                f"call {header.number} of part {self.name} was made before, with other batches"
            )
        return True


class Stage:
    __slots__ = (
        "batches",
        "is_ending",
        "is_gone",
        "key",
        "parts",
        "size",
        "topic_id",
        "touched_ms",
        "turn",
    )

    def __init__(self, key: str, topic_id: UUID, now_ms: int, turn: Turn | None = None) -> None:
        self.key = key
        #: The turn of a series that this stage writes; None without a series.
        self.turn = turn
        self.topic_id = topic_id
        self.parts: dict[str, Part] = {}
        #: These two include calls that are still being appended.
        self.batches = 0
        self.size = 0
        self.touched_ms = now_ms
        #: The stage is being committed, or has ended.
        self.is_ending = False
        #: The stage was committed or aborted; it is removed.
        self.is_gone = False

    @property
    def source(self) -> PartitionKey:
        return PartitionKey(self.topic_id, 0)

    def part(self, name: str) -> Part:
        part = self.parts.get(name)
        if part is None:
            if len(self.parts) >= limits.STAGE_PARTS:
                raise LimitReached(f"stage {self.key} has {limits.STAGE_PARTS} parts")
            part = self.parts[name] = Part(name)
        return part

    def check_takes(self) -> None:
        if self.is_ending:
            raise StageConflict(f"stage {self.key} takes nothing more: it ends, or has ended")

    def check_turn(self, turn: Turn | None) -> None:
        if turn != self.turn:
            raise StageConflict(f"stage {self.key} is {_told(self.turn)}, not {_told(turn)}")

    def named(self, receipts: Iterable[Receipt]) -> list[Part]:
        """Return the parts that receipts name. Raise StageConflict if a part no longer matches its
        receipt, or is named twice."""
        parts: list[Part] = []
        for receipt in receipts:
            part = self.parts.get(receipt.part)
            if part is None or part.receipt() != receipt:
                holds = "nothing" if part is None else f"{len(part.calls)} calls"
                raise StageConflict(
                    f"part {receipt.part} of stage {self.key} holds {holds}, not what the "
                    f"receipt over {receipt.calls} says"
                )
            parts.append(part)
        if len(set(parts)) < len(parts):
            raise StageConflict(f"a part of stage {self.key} is named twice")
        return parts

    def receipts(self) -> tuple[Receipt, ...]:
        return tuple(part.receipt() for part in self.parts.values() if part.calls)

    def description(self) -> StageDescription:
        return StageDescription(
            self.key, self.receipts(), self.batches, self.size, self.touched_ms, self.turn
        )


def _told(turn: Turn | None) -> str:
    return "of no series" if turn is None else f"turn {turn.number} of the series {turn.series}"


def contents_of(receipts: Sequence[Receipt]) -> str:
    """Return a digest of the receipts that does not depend on their order."""
    rows = sorted(json.dumps(receipt) for receipt in receipts)
    return hashlib.blake2b("\n".join(rows).encode(), digest_size=16).hexdigest()


def state_key(key: str) -> str:
    return STATE_PREFIX + key


def key_of(state: str) -> str:
    return state.removeprefix(STATE_PREFIX)


def encode_committed(committed: CommittedStage) -> bytes:
    fields = {
        "contents": committed.contents,
        "records": committed.records,
        "committed_ms": committed.committed_ms,
    }
    return json.dumps(fields, ensure_ascii=False).encode()


def decode_committed(value: bytes) -> CommittedStage:
    """Decode the value of `encode_committed`. Raise DamagedStore for any other value."""
    try:
        fields = json.loads(value)
    except ValueError as error:
        raise DamagedStore(f"a committed stage in the store is not JSON: {error}") from None
    match fields:
        case {"contents": str(contents), "records": int(records), "committed_ms": int(when_ms)}:
            return CommittedStage(contents, records, when_ms)
    raise DamagedStore(f"cannot decode a committed stage in the store: {str(fields)[:200]}")
