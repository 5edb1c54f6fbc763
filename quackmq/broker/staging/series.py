"""Series of stages: a stream writes one turn after the other, and each turn takes effect once.

A committed key without a series is remembered on its own, for a limited time. A stream commits
without end, and may repeat its last turn weeks later. Therefore only the last turn of a *series* is
remembered. A series costs one small state, however long it runs, and each turn restarts
`limits.STAGE_SERIES_REMEMBERED_MS`.

A stream that repeats its last turn did not get the answer. A stream that sends an earlier turn was
reset, and its records may differ from those that were committed for that turn. `check_takes` tells
the two cases apart.

Promised: the state from `put` is stored in the same append that makes the turn visible. Turn
numbers may be skipped.

Only `Staging` calls this. It holds the lock of a series while it commits.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from quackmq.broker import limits
from quackmq.errors import DamagedStore, LimitReached, StageCommitted, TurnOutdated
from quackmq.model.topic import StatePut
from quackmq.stores.contract import Store

#: Prefix of the state keys of series.
_STATE_PREFIX: Final = "stage-series/"


class Turn(NamedTuple):
    """The number of a commit within a series; later commits have greater numbers."""

    series: str
    number: int


class CommittedTurn(NamedTuple):
    """The last committed turn of a series. `topics` are the names of the topics that it was written
    to; None if an older version, which did not store them, wrote the turn."""

    number: int
    contents: str
    records: int
    committed_ms: int
    topics: tuple[str, ...] | None = None


class SeriesBook:
    def __init__(self, store: Store) -> None:
        self._store = store
        #: The last turn of each series, and the version of its stored state.
        self._last: dict[str, tuple[CommittedTurn, int]] = {}

    async def load(self) -> None:
        for key, state in (await self._store.states(_STATE_PREFIX)).items():
            if state.value is not None:
                name = key.removeprefix(_STATE_PREFIX)
                self._last[name] = (_decode(state.value), state.version)

    def all(self) -> dict[str, CommittedTurn]:
        return {name: turn for name, (turn, _) in self._last.items()}

    def last(self, series: str) -> CommittedTurn | None:
        known = self._last.get(series)
        return None if known is None else known[0]

    def holds(self, turn: Turn) -> bool:
        """Return whether this turn or a later one is committed."""
        last = self.last(turn.series)
        return last is not None and turn.number <= last.number

    def check_takes(self, turn: Turn) -> None:
        """Check that `turn` may be written. Raise StageCommitted if it is the last committed turn,
        TurnOutdated if a later turn was committed, LimitReached for too many series."""
        self.check_current(turn)
        if self.holds(turn):
            raise StageCommitted(f"turn {turn.number} of the series {turn.series} was committed")
        if turn.series not in self._last and len(self._last) >= limits.STAGE_SERIES:
            raise LimitReached(f"there are {limits.STAGE_SERIES} series: delete some")

    def check_current(self, turn: Turn) -> None:
        """Raise TurnOutdated if a later turn of the series was committed."""
        last = self.last(turn.series)
        if last is not None and turn.number < last.number:
            raise TurnOutdated(
                f"turn {turn.number} of the series {turn.series} is outdated: turn {last.number} "
                f"was committed. Nothing was added. To write earlier turns again, delete the series"
            )

    def put(self, turn: Turn, committed: CommittedTurn) -> StatePut:
        """Return the state change that makes `turn` the last one. Call `committed` after it is
        stored."""
        _, version = self._last.get(turn.series, (None, 0))
        return StatePut(_STATE_PREFIX + turn.series, _encode(committed), version)

    def committed(self, turn: Turn, committed: CommittedTurn) -> None:
        _, version = self._last.get(turn.series, (None, 0))
        self._last[turn.series] = (committed, version + 1)

    def left(self, since_ms: int) -> list[str]:
        """Return the series whose last turn was committed at `since_ms` or before."""
        return [name for name, (last, _) in self._last.items() if last.committed_ms <= since_ms]

    async def forget(self, series: str) -> bool:
        """Delete the state of a series; return whether the series existed."""
        known = self._last.get(series)
        if known is None:
            return False
        await self._store.put_state(_STATE_PREFIX + series, None, known[1])
        del self._last[series]
        return True


def _encode(turn: CommittedTurn) -> bytes:
    return json.dumps(turn._asdict(), ensure_ascii=False).encode()


def _decode(value: bytes) -> CommittedTurn:
    """Decode the value of `_encode`. Raise DamagedStore for any other value."""
    try:
        fields = json.loads(value)
    except ValueError as error:
        raise DamagedStore(f"a series of stages in the store is not JSON: {error}") from None
    match fields:
        case {
            "number": int(number),
            "contents": str(contents),
            "records": int(records),
            "committed_ms": int(committed_ms),
        }:
            return CommittedTurn(number, contents, records, committed_ms, _topics(fields))
    raise DamagedStore(f"cannot decode a series of stages in the store: {str(fields)[:200]}")


def _topics(fields: dict[str, object]) -> tuple[str, ...] | None:
    names = fields.get("topics")
    return tuple(map(str, names)) if isinstance(names, list) else None
