"""One peer's connection: the part that does not depend on the protocol.

The connections of all protocols share this code:

- the peer's identity;
- pausing and resuming reads;
- counting the bytes that the peer has not read yet;
- disconnecting a peer that reads nothing for too long;
- ending a connection: half-close it, then wait for the peer to close.

A protocol adds the meaning of the bytes. Call it only from the event loop.
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
    """The bounds of one connection. The limits are read again on every use."""

    #: Unsent bytes above which the peer counts as slow.
    write_buffer_bytes: int
    #: Disconnect a peer that reads nothing for this long; None means no bound.
    send_wait_ms: float | None
    #: How long the peer may take to close the connection after the last response.
    linger_ms: float


class Admission(Protocol):
    """The part of the server that its connections use."""

    def opened(self, connection: Any) -> bool:
        """Register a connection; return whether it is admitted."""

    def closed(self, connection: Any) -> None: ...


class ServedConnection(asyncio.BaseProtocol, ABC):
    def __init__(
        self, server: Admission, send_budget: SendBudget | None = None, channel: str = ""
    ) -> None:
        """Count the peer's unsent bytes in `send_budget`. `channel` names a peer that has no
        network address.
        """
        self._loop = asyncio.get_running_loop()
        #: Pauses of the loop do not count: during a pause the peer may have sent its next bytes.
        self._time = loop_clock().time
        self._server = server
        self._send_budget = send_budget
        self._channel = channel
        self._caller = Caller(address=channel)
        #: An asyncio transport, or a pair of pipes.
        self._transport: Any = None
        self._is_reading = True
        self._is_draining = False
        self._has_ended = False
        #: When the peer became slow; None while it keeps up.
        self._slow_since: float | None = None
        #: The unsent bytes of this connection that are counted in the budget.
        self._unsent_bytes = 0
        #: The unsent bytes at the last sweep, and when a sweep first found this number.
        self._stuck_bytes = 0
        self._stuck_since = 0.0

    # --- implemented by a protocol ------------------------------------------------------------

    @property
    @abstractmethod
    def bounds(self) -> ConnectionBounds: ...

    @abstractmethod
    def _on_opened(self) -> None:
        """Start serving the peer, which was admitted."""

    def _on_refused(self) -> None:
        """Turn the peer away: there are too many connections, or the server is closing."""
        self.disconnect("there are too many connections, or the server is closing")

    def _on_writable(self) -> None:
        """Continue after a slow peer has read everything that was written."""

    def _on_lost(self) -> None:
        """Release what the protocol holds for this connection, which is closed."""

    def _sweep(self, now: float) -> None:
        """End operations that have exceeded their deadline, except unsent responses."""

    def _on_not_reading(self, wait_ms: float) -> None:
        """Disconnect a peer that read nothing for `wait_ms`."""
        self.disconnect(f"it read no responses for {wait_ms} ms")

    # --- called by the transport --------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up the connection. Ask the server to admit it; then call `_on_opened`, or
        `_on_refused`."""
        self._transport = transport
        if not self._channel:
            host, port, *_ = transport.get_extra_info("peername") or ("?", 0)
            self._caller = Caller(address=self._address_of(host, port))
        peer_socket = transport.get_extra_info("socket")
        if peer_socket is not None:
            # Let TCP detect a peer that disappeared without closing the connection.
            peer_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # With `low=0`, `resume_writing` means that the peer has read everything. So no bytes stay
        # counted in the budget.
        self._transport.set_write_buffer_limits(high=self.bounds.write_buffer_bytes, low=0)
        if self._server.opened(self):
            self._on_opened()
        else:
            self._on_refused()

    def pause_writing(self) -> None:
        self._slow_since = self._time()
        self._count_unsent()

    def resume_writing(self) -> None:
        self._slow_since = None
        self._count_unsent()
        self._on_writable()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._slow_since = None
        self._count_unsent()
        self._on_lost()
        self._server.closed(self)

    # --- called by the server -----------------------------------------------------------------

    @abstractmethod
    def drain(self) -> None:
        """Accept no more requests, finish those that were accepted, then close."""

    def cancel(self) -> None:
        """Cancel operations that are still running, because the drain deadline has passed."""

    def abort(self) -> None:
        """Close at once and discard unsent bytes."""
        if self._transport is not None:
            self._transport.abort()

    def disconnect(self, reason: str) -> None:
        """Log the reason and close the connection."""
        if self._transport is not None and not self._transport.is_closing():
            self._log_disconnect(reason)
            self.abort()

    def sweep(self, now: float) -> None:
        """End operations that have exceeded their deadline. `now` is the loop clock's time. The
        server calls this regularly.
        """
        if self._transport is None:
            return
        if self._slow_since is not None:
            self._count_unsent()
        if self._disconnect_if_not_reading(now):
            return
        if not self._has_ended:
            self._sweep(now)

    @property
    def is_reading(self) -> bool:
        """Whether the connection currently reads from the peer."""
        return self._is_reading

    # --- used by a protocol -------------------------------------------------------------------

    def _set_reading(self, enabled: bool) -> None:
        """Start or stop reading. While reading is stopped, TCP applies back-pressure to the
        peer."""
        if enabled == self._is_reading or self._transport is None or self._transport.is_closing():
            return
        self._is_reading = enabled
        if enabled:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _finish(self) -> None:
        """Half-close the connection, and wait up to `linger_ms` for the peer to close it.

        Closing at once, with unread bytes from the peer, would reset the connection and lose the
        last responses. Bytes already written are still sent while the peer reads them.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._has_ended = True
        if not transport.can_write_eof():  # TLS cannot half-close
            transport.close()
            return
        try:
            transport.write_eof()
        except OSError:  # the peer has already closed
            transport.abort()
            return
        self._set_reading(True)
        self._loop.call_later(self.bounds.linger_ms / 1000, self._close_after_linger)

    def _log_disconnect(self, reason: str) -> None:
        log = logging.getLogger(type(self).__module__)
        log.warning("%s disconnected: %s", self._caller.address, reason)

    def _count_unsent(self) -> None:
        """Update the budget with the bytes that the peer has not read yet."""
        unsent_bytes = 0 if self._transport is None else self._transport.get_write_buffer_size()
        change_bytes = unsent_bytes - self._unsent_bytes
        if change_bytes and self._send_budget is not None:
            self._unsent_bytes = unsent_bytes
            self._send_budget.add(change_bytes)

    # --- internal -----------------------------------------------------------------------------

    def _address_of(self, host: str, port: int) -> str:
        return f"{host}:{port}"

    def _close_after_linger(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _disconnect_if_not_reading(self, now: float) -> bool:
        """Disconnect the peer if it has read nothing for `send_wait_ms`. Return whether it was
        disconnected.

        A peer that reads at least one byte between two sweeps may be slow without limit.
        """
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
            self._on_not_reading(wait_ms)
        return True
