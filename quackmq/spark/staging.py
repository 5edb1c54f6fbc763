"""What a task of a sink does at the broker, and what the driver does: stage, and commit once.

Each attempt at a task stages under a name of its own, which nobody else has, so that an attempt
that died, was killed or ran twice leaves nothing behind but a part that no commit names. The driver
commits the parts whose receipts reached it:

    attempt 0 of task 0 --- stage --> part 6f0c…  ╲
    attempt 0 of task 1 --- stage --> part 91ab…   ✗ (it died: no receipt)    commit (series, turn)
    attempt 1 of task 1 --- stage --> part c3d2…  ╱       ---->  all of it is visible, once

Promised: a call and a commit whose answers were lost are made again as they were, and count once;
for a turn, or a key, that was committed before, nothing is staged and nothing is added.

Who may call: one thread; a `Target` and a `Staged` are values, and travel.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quackmq import limits
from quackmq.errors import StageCommitted, StageConflict, UnknownStage
from quackmq.spark.connection import Http, path_of
from quackmq.spark.encoding import Encoded

_BYTES: Final = "application/octet-stream"
_PARTITION: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Target:
    """What is committed as one: a key and, for a stream, which turn of which series."""

    key: str
    series: str | None = None
    turn: int | None = None

    def turn_fields(self) -> dict[str, Any]:
        if self.series is None:
            return {}
        return {"series": self.series, "turn": self.turn}


@dataclass(frozen=True, slots=True)
class Staged:
    """What one attempt staged. `receipt` is None where there was nothing to stage, or the target
    had been committed before."""

    target: Target
    receipt: dict[str, Any] | None
    records: int


class Part:
    """One attempt's part of a stage in the making."""

    def __init__(self, http: Http, target: Target) -> None:
        self._http = http
        self._target = target
        self._path = path_of("stages", target.key, "parts", uuid.uuid4().hex)
        self._calls = 0
        self._receipt: dict[str, Any] | None = None
        #: The target was committed before: there is nothing to do.
        self.is_committed = False

    def add(self, topic: str, batches: Iterable[Encoded]) -> None:
        """Stage batches for partitions of a topic, in as few calls as may be."""
        pieces: list[bytes] = []
        size = 0
        for partition, batch in batches:
            if pieces and (
                size + len(batch) > limits.STAGE_CALL_BYTES - limits.MIB
                or len(pieces) >= 2 * limits.STAGE_CALL_BATCHES
            ):
                self._call(topic, pieces)
                pieces, size = [], 0
            pieces += (_PARTITION.pack(partition), batch)
            size += len(batch) + _PARTITION.size
        if pieces:
            self._call(topic, pieces)

    def staged(self, records: int) -> Staged:
        receipt = None if self.is_committed else self._receipt
        return Staged(self._target, receipt, records)

    def _call(self, topic: str, pieces: Sequence[bytes]) -> None:
        if self.is_committed:
            return
        query: dict[str, str | int] = {"topic": topic, **self._target.turn_fields()}
        path = f"{self._path}/{self._calls}"
        body = b"".join(pieces)
        try:
            answer = self._http.ask("PUT", path, query=query, body=body, content_type=_BYTES)
        except StageCommitted:
            self.is_committed = True
            return
        self._receipt = answer.json
        self._calls += 1


def commit(http: Http, target: Target, staged: Sequence[Staged]) -> None:
    """Make what these attempts staged visible, unless the target was committed before."""
    receipts = [each.receipt for each in staged if each.receipt is not None]
    if not receipts:
        return
    # That of one key everything is the same, whoever staged it, is what naming it means.
    contents = "" if target.series is not None else target.key
    http.ask(
        "POST",
        path_of("stages", target.key, "commit"),
        {"receipts": receipts, "contents": contents, **target.turn_fields()},
        waits=limits.SPARK_COMMIT_WAITS,
    )


def abort(http: Http, target: Target) -> None:
    """Let go of what was staged, if anything was, and was not committed."""
    try:
        http.ask("DELETE", path_of("stages", target.key))
    except (UnknownStage, StageConflict):
        return
