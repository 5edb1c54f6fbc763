"""One peer's connection, as far as it does not depend on the protocol.

Here is what the connections of all protocols share: who the peer is, when it is read from, what it
has not taken of what was written, its end if it takes nothing for too long, and the end of a
conversation: half-close, and let the peer hang up. A protocol adds what bytes mean.

Call it only from the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol

from quackmq.broker import Caller
from quackmq.loop_clock import loop_clock
from quackmq.serving.budgets import SendBudget


class ConnectionBounds(NamedTuple):
    """The bounds of one connection. Limits are read each time that they are needed."""

    #: Written and not yet taken by the peer; above it the peer is slow.
    write_buffer_bytes: int
    #: A peer that takes nothing for so long is disconnected; None for as long as it likes.
    send_wait_ms: float | None
    #: After the last answer the peer has so long to hang up.
    linger_ms: float


class Admission(Protocol):
    """The server, as its connections see it."""

    def opened(self, connection: Any) -> bool:
        """Count a connection; return whether it may stay."""

    def closed(self, connection: Any) -> None: ...


class ServedConnection(asyncio.BaseProtocol, ABC):
    def __init__(
        self, server: Admission, send_budget: SendBudget | None = None, channel: str = ""
    ) -> None:
        """What the peer does not take is counted in `send_budget`. `channel` is the name of a peer
        without a network address."""
        self._loop = asyncio.get_running_loop()
        #: Pauses of the loop do not count: a peer may have sent its next word meanwhile.
        self._time = loop_clock().time
        self._server = server
        self._send_budget = send_budget
        self._channel = channel
        self._caller = Caller(address=channel)
        #: An asyncio transport, or a pair of pipes.
        self._transport: Any = None
        self._reads = True
        self._draining = False
        self._has_ended = False
        #: When the peer stopped taking what is written; None while it takes it.
        self._slow_since: float | None = None
        #: What is counted in the budget.
        self._unsent_bytes = 0
        #: What the last sweep found unsent, and when a sweep first found it so.
        self._stuck_bytes = 0
        self._stuck_since = 0.0

    # --- what a protocol says -----------------------------------------------------------------

    @property
    @abstractmethod
    def bounds(self) -> ConnectionBounds: ...

    @abstractmethod
    def _on_opened(self) -> None:
        """The peer is connected and may stay."""

    def _on_refused(self) -> None:
        """The peer is connected and may not stay: there are too many, or the server closes."""
        self.disconnect("no more connections are taken")

    def _on_writable(self) -> None:
        """The peer, which was slow, has taken everything."""

    def _on_lost(self) -> None:
        """The connection is gone."""

    def _sweep(self, now: float) -> None:
        """End what has lasted too long, other than a peer that takes nothing."""

    def _on_deaf(self, wait_ms: float) -> None:
        """The peer took nothing for so long."""
        self.disconnect(f"it took no answers for {wait_ms} ms")

    # --- what the transport calls -------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if not self._channel:
            host, port, *_ = transport.get_extra_info("peername") or ("?", 0)
            self._caller = Caller(address=self._address_of(host, port))
        own = transport.get_extra_info("socket")
        if own is not None:
            # TCP finds out that a peer is gone without a word, in its own time.
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # With `low=0` a peer that can be written to again has taken everything, so that none of
        # its bytes stay counted.
        self._transport.set_write_buffer_limits(high=self.bounds.write_buffer_bytes, low=0)
        if self._server.opened(self):
            self._on_opened()
        else:
            self._on_refused()

    def pause_writing(self) -> None:
        self._slow_since = self._time()
        self._note_unsent()

    def resume_writing(self) -> None:
        self._slow_since = None
        self._note_unsent()
        self._on_writable()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._slow_since = None
        self._note_unsent()
        self._on_lost()
        self._server.closed(self)

    # --- what the server calls ----------------------------------------------------------------

    @abstractmethod
    def drain(self) -> None:
        """Take nothing more, finish what was taken, then close."""

    def cancel(self) -> None:
        """Give up what is still under way: the deadline for draining has passed."""

    def abort(self) -> None:
        """Close at once, even if the peer takes nothing."""
        if self._transport is not None:
            self._transport.abort()

    def disconnect(self, reason: str) -> None:
        """Log the reason and close the connection."""
        if self._transport is not None and not self._transport.is_closing():
            self._log_disconnect(reason)
            self.abort()

    def sweep(self, now: float) -> None:
        """End what has lasted too long; called regularly. `now` is of the loop's clock."""
        if self._transport is None:
            return
        if self._slow_since is not None:
            self._note_unsent()
        if self._is_deaf(now):
            return
        if not self._has_ended:
            self._sweep(now)

    @property
    def reads(self) -> bool:
        """Whether more is read from the peer now."""
        return self._reads

    # --- what a protocol uses -----------------------------------------------------------------

    def _read(self, reads: bool) -> None:
        """Read on, or stop reading: TCP then holds the peer up."""
        if reads == self._reads or self._transport is None or self._transport.is_closing():
            return
        self._reads = reads
        if reads:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _finish(self) -> None:
        """Say that no more comes, and let the peer hang up, for a while. Who closes with something
        of the peer's unread resets the connection, and the last answers are lost. What was written
        is still sent then, as long as the peer takes it."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._has_ended = True
        if not transport.can_write_eof():  # as over TLS
            transport.close()
            return
        try:
            transport.write_eof()
        except OSError:  # the peer was faster
            transport.abort()
            return
        self._read(True)
        self._loop.call_later(self.bounds.linger_ms / 1000, self._hang_up)

    def _log_disconnect(self, reason: str) -> None:
        log = logging.getLogger(type(self).__module__)
        log.warning("%s disconnected: %s", self._caller.address, reason)

    def _note_unsent(self) -> None:
        """Count in the budget what the peer has not taken."""
        unsent_bytes = 0 if self._transport is None else self._transport.get_write_buffer_size()
        change_bytes = unsent_bytes - self._unsent_bytes
        if change_bytes and self._send_budget is not None:
            self._unsent_bytes = unsent_bytes
            self._send_budget.add(change_bytes)

    # --- inside -------------------------------------------------------------------------------

    def _address_of(self, host: str, port: int) -> str:
        return f"{host}:{port}"

    def _hang_up(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _is_deaf(self, now: float) -> bool:
        """End the connection of a peer that takes nothing; return whether it is such a peer. One
        that takes a little between sweeps may be as slow as it likes."""
        unsent_bytes = self._transport.get_write_buffer_size()
        if unsent_bytes != self._stuck_bytes or not unsent_bytes:
            self._stuck_bytes, self._stuck_since = unsent_bytes, now
            return False
        wait_ms = self.bounds.send_wait_ms
        if wait_ms is None or (now - self._stuck_since) * 1000 <= wait_ms:
            return False
        if self._has_ended:
            self.abort()
        else:
            self._on_deaf(wait_ms)
        return True
