"""Series of stages: what a stream writes turn by turn, each turn once.

A key that was committed is remembered by itself, for a while. A stream commits one after the other
without an end, and may come back to its last turn after weeks: of a *series* only the last turn is
remembered. So a series costs one small state, however long it runs, and
`limits.STAGE_SERIES_REMEMBERED_MS` begins anew with each turn.

A stream that repeats its last turn lost the answer. A stream that comes with an earlier turn has
gone back, and what it brings now need not be what that turn held. `check_takes` tells the two
apart.

Promised: `put` goes with what makes a turn visible, in one append. Turns may be left out.

Who may call: `Staging`, which holds the lock of a series while it commits.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from quackmq.broker import limits
from quackmq.errors import DamagedStore, LimitReached, StageCommitted, TurnOutdated
from quackmq.model.topic import StatePut
from quackmq.stores.contract import Store

#: Keys of what is kept of series in the store's small state begin so.
_STATE_PREFIX: Final = "stage-series/"


class Turn(NamedTuple):
    """Which of a series of commits one is; later ones have greater numbers."""

    series: str
    number: int


class CommittedTurn(NamedTuple):
    """The last turn of a series that was committed. `topics` are the names of the topics that it
    was written to; None where an older version wrote it, which did not note them."""

    number: int
    contents: str
    records: int
    committed_ms: int
    topics: tuple[str, ...] | None = None


class SeriesBook:
    def __init__(self, store: Store) -> None:
        self._store = store
        #: The last turn of each series, and the version of its state.
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
        """Whether a turn, or a later one, is committed."""
        last = self.last(turn.series)
        return last is not None and turn.number <= last.number

    def check_takes(self, turn: Turn) -> None:
        """StageCommitted if the turn was the last one to be committed, TurnOutdated if a later one
        was; LimitReached."""
        self.check_current(turn)
        if self.holds(turn):
            raise StageCommitted(f"turn {turn.number} of the series {turn.series} was committed")
        if turn.series not in self._last and len(self._last) >= limits.STAGE_SERIES:
            raise LimitReached(f"there are {limits.STAGE_SERIES} series: delete some")

    def check_current(self, turn: Turn) -> None:
        """TurnOutdated if a later turn of the series was committed."""
        last = self.last(turn.series)
        if last is not None and turn.number < last.number:
            raise TurnOutdated(
                f"turn {turn.number} of the series {turn.series} is outdated: turn {last.number} "
                f"was committed. Nothing was added. To write earlier turns again, delete the series"
            )

    def put(self, turn: Turn, committed: CommittedTurn) -> StatePut:
        """What makes a turn the last one, once it is in the store; `committed` is told then."""
        _, version = self._last.get(turn.series, (None, 0))
        return StatePut(_STATE_PREFIX + turn.series, _encode(committed), version)

    def committed(self, turn: Turn, committed: CommittedTurn) -> None:
        _, version = self._last.get(turn.series, (None, 0))
        self._last[turn.series] = (committed, version + 1)

    def left(self, since_ms: int) -> list[str]:
        """Series whose last turn was committed no later than this."""
        return [name for name, (last, _) in self._last.items() if last.committed_ms <= since_ms]

    async def forget(self, series: str) -> bool:
        """Whether there was one."""
        known = self._last.get(series)
        if known is None:
            return False
        await self._store.put_state(_STATE_PREFIX + series, None, known[1])
        del self._last[series]
        return True


def _encode(turn: CommittedTurn) -> bytes:
    return json.dumps(turn._asdict(), ensure_ascii=False).encode()


def _decode(value: bytes) -> CommittedTurn:
    """DamagedStore for what `_encode` did not make."""
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
    raise DamagedStore(f"a series of stages in the store makes no sense: {str(fields)[:200]}")


def _topics(fields: dict[str, object]) -> tuple[str, ...] | None:
    names = fields.get("topics")
    return tuple(map(str, names)) if isinstance(names, list) else None
