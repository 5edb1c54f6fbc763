"""One stage in memory: its parts, their contents, and whether it still accepts calls.

Only `Staging` calls this. Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from uuid import UUID

from quackmq import limits
from quackmq.broker.staging.series import Turn
from quackmq.broker.staging.stage_log import Header, extend_digest
from quackmq.errors import LimitReached, StageConflict
from quackmq.model.stored_json import decode_stored_object
from quackmq.model.topic import PartitionKey

#: Prefix of the state keys of committed stages.
STATE_PREFIX: Final = "staging/"


class PartSummary(NamedTuple):
    """The contents of a part: the number of its calls and the digest of their batches. Staging
    returns it, and a commit names its parts by their summaries."""

    part: str
    calls: int
    digest: str


class StageDescription(NamedTuple):
    key: str
    parts: tuple[PartSummary, ...]
    batches: int
    size: int
    touched_ms: int
    turn: Turn | None = None


class CommittedStage(NamedTuple):
    """A committed stage. `contents` is a digest of the committed data, which distinguishes one
    commit of a key from another. `repeated` is true in the response to a commit that was made
    before."""

    contents: str
    records: int
    committed_ms: int
    repeated: bool = False


class Call(NamedTuple):
    """One staging call: its header, and the offset of its first batch in the stage's log."""

    header: Header
    offset: int


@dataclass(slots=True, eq=False)
class Part:
    """The calls of one writer of a stage."""

    name: str
    #: Serialises the calls of one writer.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    calls: list[Call] = field(default_factory=list)
    digest: str = ""

    def add(self, call: Call) -> None:
        """Add a call that was appended to the stage's log."""
        self.calls.append(call)
        self.digest = extend_digest(self.digest, call.header.entries)

    def summary(self) -> PartSummary:
        return PartSummary(self.name, len(self.calls), self.digest)

    def is_repeat(self, header: Header) -> bool:
        """Return whether a call repeats an earlier one. Raise StageConflict if its number is too
        high, or if the earlier call had other batches."""
        if header.number == len(self.calls):
            return False
        if header.number > len(self.calls):
            raise StageConflict(
                f"call {header.number} of part {self.name} is out of order: call "
                f"{len(self.calls)} is next"
            )
        if self.calls[header.number].header.entries != header.entries:
            raise StageConflict(
                f"call {header.number} of part {self.name} was made before, with other batches"
            )
        return True


@dataclass(slots=True, eq=False)
class Stage:
    """The parts of one stage, and whether it still accepts calls."""

    key: str
    topic_id: UUID
    touched_ms: int
    #: The turn of a series that this stage writes; None without a series.
    turn: Turn | None = None
    parts: dict[str, Part] = field(default_factory=dict)
    #: These two include calls that are still being appended.
    batches: int = 0
    size: int = 0
    #: The stage is being committed, or has ended.
    is_ending: bool = False
    #: The stage was committed or aborted, and is not in memory any more.
    is_removed: bool = False

    @property
    def source(self) -> PartitionKey:
        """The partition of the hidden topic that holds the staged batches."""
        return PartitionKey(self.topic_id, 0)

    def part(self, name: str) -> Part:
        """Return a part; create it if it does not exist. Raise LimitReached."""
        part = self.parts.get(name)
        if part is None:
            if len(self.parts) >= limits.STAGE_PARTS:
                raise LimitReached(f"stage {self.key} has {limits.STAGE_PARTS} parts, the limit")
            part = self.parts[name] = Part(name)
        return part

    def check_accepts_calls(self) -> None:
        """Raise StageConflict if the stage is being committed, or has ended."""
        if self.is_ending:
            raise StageConflict(
                f"stage {self.key} accepts no more batches: it is being committed, or has ended"
            )

    def check_turn(self, turn: Turn | None) -> None:
        """Raise StageConflict if the stage does not write this turn."""
        if turn != self.turn:
            own, requested = _describe_turn(self.turn), _describe_turn(turn)
            raise StageConflict(f"stage {self.key} is {own}, not {requested}")

    def find_parts(self, summaries: Iterable[PartSummary]) -> list[Part]:
        """Return the parts that summaries name. Raise StageConflict if a part no longer matches its
        summary, or is named twice."""
        parts: list[Part] = []
        for summary in summaries:
            part = self.parts.get(summary.part)
            if part is None or part.summary() != summary:
                count = 0 if part is None else len(part.calls)
                raise StageConflict(
                    f"part {summary.part} of stage {self.key} has {count} calls and does not match "
                    f"its summary in the commit, which has {summary.calls}"
                )
            parts.append(part)
        if len(set(parts)) < len(parts):
            raise StageConflict(f"a part of stage {self.key} is named twice")
        return parts

    def part_summaries(self) -> tuple[PartSummary, ...]:
        """Return the summaries of all parts that have calls."""
        return tuple(part.summary() for part in self.parts.values() if part.calls)

    def description(self) -> StageDescription:
        return StageDescription(
            self.key, self.part_summaries(), self.batches, self.size, self.touched_ms, self.turn
        )


def _describe_turn(turn: Turn | None) -> str:
    return "of no series" if turn is None else f"turn {turn.number} of the series {turn.series}"


def digest_summaries(summaries: Sequence[PartSummary]) -> str:
    """Return a digest of part summaries that does not depend on their order."""
    rows = sorted(json.dumps(summary) for summary in summaries)
    return hashlib.blake2b("\n".join(rows).encode(), digest_size=16).hexdigest()


def state_key(key: str) -> str:
    return STATE_PREFIX + key


def stage_key_in(state: str) -> str:
    return state.removeprefix(STATE_PREFIX)


def encode_committed(committed: CommittedStage) -> bytes:
    """Encode a committed stage for the store. A response's `repeated` is not stored."""
    fields = {
        "contents": committed.contents,
        "records": committed.records,
        "committed_ms": committed.committed_ms,
    }
    return json.dumps(fields, ensure_ascii=False).encode()


def decode_committed(value: bytes) -> CommittedStage:
    """Decode the value of `encode_committed`. Raise DamagedStore for any other value."""
    # `repeated` belongs to one response and is not stored.
    return decode_stored_object(value, CommittedStage, "a committed stage", optional=("repeated",))
