"""Shares one turn of the event loop between all connections that publish many batches.

Each turn has a budget of `limits.KAFKA_BATCHES_AT_ONCE` batches. A connection that needs more waits
in line, and continues in a later turn. Connections are served in the order in which they began to
wait, so that none of them waits for ever.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from quackmq.protocols.kafka import limits


class PublishTurns:
    def __init__(self) -> None:
        #: The batches that may still be published in this turn.
        self.batches_left = limits.KAFKA_BATCHES_AT_ONCE
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_turn_scheduled = False

    def spend(self, batch_count: int) -> None:
        """Count batches that were published in this turn."""
        self.batches_left -= batch_count
        self._schedule_turn()

    def wait(self, continue_publishing: Callable[[], None]) -> None:
        """Call `continue_publishing` in a later turn, after all that began to wait earlier."""
        self._waiting.append(continue_publishing)
        self._schedule_turn()

    def _schedule_turn(self) -> None:
        if not self._is_turn_scheduled:
            self._is_turn_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        """Renew the budget, and let waiting connections publish until it is used up."""
        self._is_turn_scheduled = False
        self.batches_left = limits.KAFKA_BATCHES_AT_ONCE
        # A connection that needs more than is left waits again, behind those counted here.
        for _ in range(len(self._waiting)):
            if self.batches_left <= 0:
                break
            self._waiting.popleft()()
        if self._waiting:
            self._schedule_turn()
