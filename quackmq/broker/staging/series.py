"""Series of stages: a stream writes one turn after the other, and each turn takes effect once.

A committed key without a series is remembered on its own, for a limited time. A stream commits
without end, and may repeat its last turn weeks later. Therefore only the last turn of a *series* is
remembered. A series costs one small state, however long it runs, and each turn restarts
`limits.STAGE_SERIES_REMEMBERED_MS`.

A stream that repeats its last turn did not get the response. A stream that sends an earlier turn
was reset, and its records may differ from those that were committed for that turn. `check_writable`
tells the two cases apart.

Promised: the state from `make_put` is stored in the same append that makes the turn visible. Turn
numbers may be skipped.

Only `Staging` calls this. It holds the lock of a series while it commits.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from quackmq.broker import limits
from quackmq.errors import LimitReached, StageCommitted, TurnOutdated
from quackmq.model.stored_json import decode_stored_object
from quackmq.model.topic import StatePut
from quackmq.stores.contract import Store

#: Prefix of the state keys of series.
_STATE_PREFIX: Final = "stage-series/"


class Turn(NamedTuple):
    """The number of a commit within a series; later commits have greater numbers."""

    series: str
    number: int


class CommittedTurn(NamedTuple):
    """The last committed turn of a series. `contents` is a digest of the committed data. `topics`
    are the names of the topics that it was written to; None if an older version, which did not
    store them, wrote the turn."""

    number: int
    contents: str
    records: int
    committed_ms: int
    topics: tuple[str, ...] | None = None


class SeriesRegistry:
    """The last committed turn of each series."""

    def __init__(self, store: Store) -> None:
        self._store = store
        #: The last turn of each series, and the version of its stored state.
        self._last_by_series: dict[str, tuple[CommittedTurn, int]] = {}

    async def load(self) -> None:
        """Load all series from the store. Raise DamagedStore."""
        for key, state in (await self._store.states(_STATE_PREFIX)).items():
            if state.value is not None:
                name = key.removeprefix(_STATE_PREFIX)
                self._last_by_series[name] = (_decode(state.value), state.version)

    def all(self) -> dict[str, CommittedTurn]:
        return {name: turn for name, (turn, _) in self._last_by_series.items()}

    def last(self, series: str) -> CommittedTurn | None:
        last = self._last_by_series.get(series)
        return None if last is None else last[0]

    def has_committed(self, turn: Turn) -> bool:
        """Return whether this turn or a later one is committed."""
        last = self.last(turn.series)
        return last is not None and turn.number <= last.number

    def check_writable(self, turn: Turn) -> None:
        """Check that `turn` may be written. Raise StageCommitted if it is the last committed turn,
        TurnOutdated if a later turn was committed, LimitReached for too many series."""
        self.check_not_outdated(turn)
        if self.has_committed(turn):
            raise StageCommitted(f"turn {turn.number} of the series {turn.series} was committed")
        is_new = turn.series not in self._last_by_series
        if is_new and len(self._last_by_series) >= limits.STAGE_SERIES:
            raise LimitReached(f"there are {limits.STAGE_SERIES} series: delete some")

    def check_not_outdated(self, turn: Turn) -> None:
        """Raise TurnOutdated if a later turn of the series was committed."""
        last = self.last(turn.series)
        if last is not None and turn.number < last.number:
            raise TurnOutdated(
                f"turn {turn.number} of the series {turn.series} is outdated: turn {last.number} "
                f"was committed. Nothing was added. To write earlier turns again, delete the series"
            )

    def make_put(self, turn: Turn, committed: CommittedTurn) -> StatePut:
        """Return the state change that makes `turn` the last one. Call `set_last` after it is
        stored."""
        _, version = self._last_by_series.get(turn.series, (None, 0))
        return StatePut(_STATE_PREFIX + turn.series, _encode(committed), version)

    def set_last(self, turn: Turn, committed: CommittedTurn) -> None:
        """Make `turn` the last one in memory, after its state was stored."""
        _, version = self._last_by_series.get(turn.series, (None, 0))
        self._last_by_series[turn.series] = (committed, version + 1)

    def idle_since(self, since_ms: int) -> list[str]:
        """Return the series whose last turn was committed at `since_ms` or before."""
        return [
            name
            for name, (last, _) in self._last_by_series.items()
            if last.committed_ms <= since_ms
        ]

    async def forget(self, series: str) -> bool:
        """Delete the state of a series; return whether the series existed."""
        if series not in self._last_by_series:
            return False
        _, version = self._last_by_series[series]
        await self._store.put_state(_STATE_PREFIX + series, None, version)
        del self._last_by_series[series]
        return True


def _encode(turn: CommittedTurn) -> bytes:
    return json.dumps(turn._asdict(), ensure_ascii=False).encode()


def _decode(value: bytes) -> CommittedTurn:
    """Decode the value of `_encode`. Raise DamagedStore for any other value. Older versions did not
    store the topics."""
    return decode_stored_object(value, CommittedTurn, "a series of stages", optional=("topics",))
