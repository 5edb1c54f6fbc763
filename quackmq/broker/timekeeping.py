"""The broker's clock across restarts: the stored time, and warnings for operators.

The store saves the time every CLOCK_KEEP_MS, and whenever the state of the clock changes. When the
broker opens, the clock continues from the saved time (see `quackmq.clock`). Every change is logged:
the wall clock jumped, the clock is paused, the clock is in order again.

Promised: a confirmation is durable when its call returns. Not promised: the exact time of a crash.
It is between the last saved time and CLOCK_KEEP_MS later.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Final

from quackmq import limits
from quackmq.broker.lifecycle import Lifecycle, NamedLocks
from quackmq.broker.settings import Caller
from quackmq.clock import Clock, ClockStatus, StoredTime
from quackmq.errors import StorageError
from quackmq.model.stored_json import decode_stored_object
from quackmq.stores.contract import Store

log = logging.getLogger(__name__)

STATE_KEY: Final = "clock"

_DAY_MS: Final = 24 * 3_600_000
#: Times below this are in years that `datetime` can show.
_SHOWN_MS: Final = 250_000_000_000_000


class Timekeeping:
    """Saves the broker's clock, and logs its changes."""

    def __init__(self, store: Store, clock: Clock, lifecycle: Lifecycle) -> None:
        self._store = store
        self._clock = clock
        self._version = 0
        self._saved_time: StoredTime | None = None
        self._logged_status = "steady"
        self._locks = NamedLocks()
        self._lifecycle = lifecycle

    async def load(self) -> None:
        """Let the clock continue from the stored time. Raise DamagedStore."""
        state = await self._store.state(STATE_KEY)
        self._version = state.version
        if state.value is not None:
            self._saved_time = _decode(state.value)
        self._clock.resume(self._saved_time, await self._latest_stamp_ms())
        self._log_change(self._clock.status())
        if self._clock.is_paused:
            # Save this before anything is stamped: records from now on are not as old as the
            # outage.
            await self.clean()

    async def _latest_stamp_ms(self) -> int:
        """Return the latest time that the store knows. A broker that was killed before its first
        housekeeping has saved no time. If it appended nothing either, committed offsets have the
        time."""
        latest_ms = self._store.latest_append_ms
        if self._saved_time is not None or latest_ms:
            return latest_ms
        cursors = (await self._store.cursors()).values()
        return max((cursor.updated_ms for cursor in cursors), default=0)

    async def clean(self) -> None:
        """Save the time in the store if that is due; log a change of the clock's state."""
        status = self._clock.status()
        self._log_change(status)
        saved, present = self._saved_time, self._clock.snapshot()
        if (
            saved is None
            or present.boot != saved.boot
            or present.time_ms - saved.time_ms >= limits.CLOCK_KEEP_MS
            or (present.paused_since_ms, present.gaps) != (saved.paused_since_ms, saved.gaps)
        ):
            try:
                await self._lifecycle.run_shielded(self._save())
            except StorageError as error:
                log.warning("cannot save the clock in the store: %s", error)

    def status(self, caller: Caller) -> ClockStatus:
        return self._clock.status()

    async def confirm(self, caller: Caller, passed: bool | None = None) -> bool:
        """Accept the wall clock as right, as `Clock.confirm` does. Return whether there was
        anything to confirm. Raise StorageError if the confirmation cannot be stored: then the clock
        is unchanged, but after a restart it may be confirmed."""
        return await self._lifecycle.run_shielded(self._confirm(caller, passed))

    async def _confirm(self, caller: Caller, passed: bool | None) -> bool:
        """Store the correction of the clock, then apply it. Return whether there was one."""
        async with self._locks.hold(STATE_KEY):
            correction = self._clock.find_correction(passed)
            if correction is None:
                return False
            # Store this first: no append may have a time that a start after a crash cannot explain.
            await self._store_time(self._clock.snapshot_after(correction))
            self._clock.apply_correction(correction)
        log.warning("the wall clock was confirmed by %s", caller.address or caller.principal)
        self._log_change(self._clock.status())
        return True

    async def _save(self) -> None:
        async with self._locks.hold(STATE_KEY):
            await self._store_time(self._clock.snapshot())

    async def _store_time(self, saved: StoredTime) -> None:
        state = await self._store.put_state(STATE_KEY, _encode(saved), self._version)
        self._version, self._saved_time = state.version, saved

    def _log_change(self, status: ClockStatus) -> None:
        """Log the status if it differs from the one that was logged last."""
        if status.status == self._logged_status:
            return
        self._logged_status = status.status
        if status.status == "steady":
            log.info("the wall clock and the broker's clock agree again")
        elif status.status == "adjusting":
            log.warning("%s: the broker's clock approaches it slowly", _describe_gap(status))
        elif status.status == "jumped":
            log.warning(
                "%s, by more than the time that passed: set the wall clock, or run "
                "`quackmq clock confirm` if it is right",
                _describe_gap(status),
            )
        else:
            log.error(
                "%s: the wall clock is wrong, or the broker was off for long. Nothing is deleted "
                "or expired by age until the wall clock is set right, or `quackmq clock confirm` "
                "says that it is right",
                _describe_gap(status),
            )


def _describe_gap(status: ClockStatus) -> str:
    """Say how far the clocks are apart, in words."""
    gap_ms = abs(status.ahead_ms)
    gap = f"{gap_ms / 1000:.0f} s" if gap_ms < _DAY_MS else f"{gap_ms / _DAY_MS:.1f} days"
    direction = "ahead of" if status.ahead_ms > 0 else "behind"
    return (
        f"the wall clock says {_format_time(status.wall_ms)}, {gap} {direction} the "
        f"broker's clock, which says {_format_time(status.time_ms)}"
    )


def _format_time(time_ms: int) -> str:
    if not 0 <= time_ms < _SHOWN_MS:
        return f"{time_ms} ms"
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _encode(saved: StoredTime) -> bytes:
    return json.dumps(saved._asdict()).encode()


def _decode(value: bytes) -> StoredTime:
    """Decode the value of `_encode`. Raise DamagedStore for any other value."""
    return decode_stored_object(value, StoredTime, "the time")
