"""The settings of the line server."""

from __future__ import annotations

from dataclasses import dataclass

from quackmq import limits as shared_limits
from quackmq.broker import Reading, Terms
from quackmq.errors import InvalidSetting
from quackmq.protocols.line import limits


@dataclass(frozen=True, slots=True)
class LineSettings:
    """`entry_bytes` is the specification's QUACKSIZE. A subscriber that does not answer an entry
    within `answer_ms` is disconnected. `reading` says which entries subscriptions get, and in which
    order: live entries in order, every entry in order, or live entries with the newest first.
    With `durable_acks`, a subscriber gets its next entry when its last answer is durable.
    """

    entry_bytes: int = shared_limits.LINE_ENTRY_BYTES
    answer_ms: int = shared_limits.LINE_ANSWER_MS
    reading: Reading = "live"
    durable_acks: bool = False

    def __post_init__(self) -> None:
        """Raise InvalidSetting if a number is out of bounds."""
        if not 1 <= self.entry_bytes <= shared_limits.LINE_LONGEST_ENTRY_BYTES:
            raise InvalidSetting(
                f"an entry has 1 to {shared_limits.LINE_LONGEST_ENTRY_BYTES} bytes, "
                f"not {self.entry_bytes}"
            )
        if not 1 <= self.answer_ms <= shared_limits.LINE_LONGEST_ANSWER_MS:
            raise InvalidSetting(
                f"a subscriber has 1 to {shared_limits.LINE_LONGEST_ANSWER_MS} "
                "milliseconds to answer, "
                f"not {self.answer_ms}"
            )

    @property
    def terms(self) -> Terms:
        return Terms(self.reading, lease_ms=self.answer_ms + limits.LINE_LEASE_MARGIN_MS)

    @property
    def sweep_ms(self) -> int:
        """The interval between sweeps. It is short enough that a silent subscriber is found well
        before twice its `answer_ms`.
        """
        return max(1, min(limits.LINE_SWEEP_MS, self.answer_ms // 4))
