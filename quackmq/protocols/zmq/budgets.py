"""The memory budgets that all ZeroMQ sockets of a broker share.

The queue's REP socket and the proxy's three sockets use one `Budgets` object. So a bound over all
peers holds for all sockets together.

Call it only from the event loop.
"""

from __future__ import annotations

import asyncio

from quackmq.protocols.zmq import limits
from quackmq.serving.budgets import ReceiveBudget, SendBudget
from quackmq.serving.waiting_line import WaitingLine


class Budgets:
    """The bounds on received and unsent bytes, and the connections that wait for room."""

    def __init__(self) -> None:
        #: Connections that wait for memory, or for the end of another peer's request.
        self.waiting = WaitingLine(limits.ZMQ_SWEEP_MS)
        self.receive = ReceiveBudget(limits.ZMQ_RECEIVE_BYTES, self.waiting.wake_soon)
        self.send = SendBudget(limits.ZMQ_SEND_BYTES, self._on_send_room)
        #: Set while large replies may be sent.
        self.sendable = asyncio.Event()
        self.sendable.set()

    def _on_send_room(self, has_room: bool) -> None:
        if has_room:
            self.sendable.set()
        else:
            self.sendable.clear()
