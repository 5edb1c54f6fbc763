"""One peer of any ZeroMQ socket type: decode its bytes, and decide when to read more.

Subclasses handle the messages: `rep_connection` for requests, `proxy.xsub` and `proxy.xpub` for the
proxy. They share this code: the handshake, heartbeats, back-pressure, reserved memory for large
messages, and the end of peers that are silent or slow for too long.

Call it only from the event loop.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Protocol

from quackmq.broker import Broker
from quackmq.errors import ProtocolError
from quackmq.protocols.zmq import limits
from quackmq.protocols.zmq.budgets import Budgets
from quackmq.protocols.zmq.codec import zmtp
from quackmq.serving.connection import Admission, ConnectionBounds, ServedConnection
from quackmq.serving.first_bytes import MistakenPeers, WireProtocol, recognize_protocol
from quackmq.serving.waiting_line import is_too_slow


class ServerContext(Admission, Protocol):
    """The part of the server that its peers use."""

    broker: Broker
    #: The shared receive buffer; every peer copies its bytes out before it returns.
    scratch: memoryview
    budgets: Budgets
    mistaken_peers: MistakenPeers

    def has_room(self) -> bool:
        """Return whether another request may begin."""

    def begin_request(self, large_bytes: int) -> None:
        """Count an unfinished request, which uses `large_bytes` of the receive budget."""

    def end_request(self, large_bytes: int) -> None:
        """Stop counting a request that is finished."""


class Peer(ServedConnection, asyncio.BufferedProtocol):
    """The connection of one peer. Subclasses handle its messages."""

    #: Decoded events that are handled in one turn of the loop; then other connections run. Requests
    #: that finish immediately are never unfinished, so their number alone would bound nothing.
    events_per_turn = limits.ZMQ_REQUESTS_IN_FLIGHT
    #: Whether the peer stays connected however long it reads nothing.
    may_be_slow = False

    _server: ServerContext

    def __init__(self, server: ServerContext, decoder: zmtp.FrameDecoder) -> None:
        super().__init__(server, server.budgets.send)
        self._broker = server.broker
        self._budgets = server.budgets
        self._decoder = decoder
        #: The part of the receive budget that the incomplete message uses.
        self._reserved_bytes = 0
        #: Set while the peer reads what is sent to it.
        self._writable = asyncio.Event()
        self._writable.set()
        self._is_pumping = False
        self._is_ready = False
        self._opened_at = self._time()
        #: When the incomplete message began to arrive.
        self._message_began_at: float | None = self._opened_at
        #: The longest silence that the peer announces (TTL), and when its last bytes arrived.
        self._ttl_ms = 0
        self._last_received_at = 0.0

    # --- implemented by subclasses ----------------------------------------------------------

    @abstractmethod
    def _ready_command(self) -> bytes:
        """Return the READY command to send when the peer has sent its own."""

    @abstractmethod
    def _may_accept_message(self) -> bool:
        """Return whether another message of the peer may be handled now."""

    @abstractmethod
    def _on_message(self, event: zmtp.Event) -> None:
        """Handle a message, a refused message or a subscription."""

    @abstractmethod
    def _is_idle(self) -> bool:
        """Return whether all accepted messages of the peer are finished."""

    def _on_disconnected(self) -> None:
        """Release the resources of the subclass, because the peer has disconnected."""

    # --- called by the transport ------------------------------------------------------------

    @property
    def bounds(self) -> ConnectionBounds:
        return ConnectionBounds(
            limits.ZMQ_WRITE_BUFFER_BYTES,
            None if self.may_be_slow else limits.ZMQ_SEND_WAIT_MS,
            limits.ZMQ_LINGER_MS,
        )

    def _on_opened(self) -> None:
        self._transport.write(zmtp.GREETING)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._server.scratch

    def buffer_updated(self, nbytes: int) -> None:
        """Decode received bytes, and handle the messages in them."""
        if self._has_ended:
            return
        self._decoder.receive(bytes(self._server.scratch[:nbytes]))
        if self._ttl_ms:
            self._last_received_at = self._time()
        self.pump()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writable.clear()

    def _on_writable(self) -> None:
        self._writable.set()
        self.pump()

    def _on_lost(self) -> None:
        # Wake tasks that wait to send: they notice that the peer has disconnected.
        self._writable.set()
        self._on_disconnected()
        self._release_reserved()

    # --- called by the server ---------------------------------------------------------------

    def pump(self) -> None:
        """Handle received messages as far as that is allowed now; read more if all were
        handled.
        """
        # Handling a message may send a reply, which calls `pump` again.
        if self._transport is None or self._has_ended or self._is_pumping:
            return
        self._is_pumping = True
        try:
            needs_bytes = self._handle_some()
        except ProtocolError as error:
            self._expel(str(error))
            return
        finally:
            self._is_pumping = False
        self._update_reading(needs_bytes)

    def drain(self) -> None:
        """Accept nothing more, finish accepted messages, then close."""
        self._is_draining = True
        self._end_if_done()

    def disconnect(self, reason: str) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._log_disconnect(reason)
            self._close()

    def _expel(self, reason: str) -> None:
        """Disconnect a peer that sent invalid bytes, and log why. If it uses the wrong listener,
        log which one serves it."""
        mistaken_peers = self._server.mistaken_peers
        address, now = self._caller.address, self._loop.time()
        protocol = recognize_protocol(self._decoder.opening)
        if protocol is not None and protocol is not WireProtocol.ZMTP:
            # It speaks another protocol, and would not understand an error of ZMTP.
            mistaken_peers.report(address, protocol, now)
            self._close()
        elif socket_type := self._decoder.refused_socket:
            # A ZeroMQ socket of a type that another listener serves.
            reason = mistaken_peers.report_socket(address, reason, socket_type, now)
            self._transport.write(zmtp.error(reason))
            self._close()
        else:
            if not self._is_ready:  # ZMTP has errors only in the handshake
                self._transport.write(zmtp.error(reason))
            self.disconnect(reason)

    def _close(self) -> None:
        """Close the connection; bytes already written are sent if the peer reads them."""
        if self._transport is not None and not self._transport.is_closing():
            self._has_ended = True
            # If the peer is not slow, only a greeting or an error is still unsent.
            if self._slow_since is None:
                self._transport.close()
                self._loop.call_later(limits.ZMQ_LINGER_MS / 1000, self.abort)
            else:
                self._transport.abort()

    def _sweep(self, now: float) -> None:
        """Disconnect a peer that has been silent for too long."""
        if not self._is_ready and _elapsed_ms(self._opened_at, now) > limits.ZMQ_HANDSHAKE_MS:
            self.disconnect(f"its handshake was not complete after {limits.ZMQ_HANDSHAKE_MS} ms")
        elif _elapsed_ms(self._message_began_at, now) > limits.ZMQ_REQUEST_WAIT_MS:
            self.disconnect(f"a message was incomplete after {limits.ZMQ_REQUEST_WAIT_MS} ms")
        elif (
            self._ttl_ms
            and self._is_reading
            and _elapsed_ms(self._last_received_at, now) > self._ttl_ms
        ):
            self.disconnect(f"no heartbeat within its announced TTL of {self._ttl_ms} ms")

    def is_behind(self, now: float) -> bool:
        """Return whether a message arrives too slowly to be complete before its deadline."""
        announced_bytes = self._decoder.announced_bytes
        if not announced_bytes or self._has_ended:
            return False
        received_share = self._decoder.received_bytes / announced_bytes
        elapsed_ms = _elapsed_ms(self._message_began_at, now)
        return is_too_slow(
            received_share, elapsed_ms, limits.ZMQ_PACE_MS, limits.ZMQ_REQUEST_WAIT_MS
        )

    # --- internal ---------------------------------------------------------------------------

    def _handle_some(self) -> bool:
        """Handle a bounded number of events; return whether the next one needs more bytes."""
        for _ in range(self.events_per_turn):
            if not self._may_accept_message():
                return False
            event = self._decoder.next_event()
            if event is None:
                return True
            self._message_began_at = None
            self._on_event(event)
        # More events may be ready. The next turn of the loop handles them.
        self._loop.call_soon(self.pump)
        return False

    def _on_event(self, event: zmtp.Event) -> None:
        """Carry out a command of ZMTP, or pass a message to the subclass."""
        if isinstance(event, zmtp.Ping):
            self._ttl_ms = event.ttl_ms
            self._last_received_at = self._time()
            # A slow peer needs no PONG: the unsent bytes already show that we are alive.
            if self._slow_since is None:
                self._transport.write(zmtp.pong(event.context))
        elif isinstance(event, zmtp.Ready):
            self._is_ready = True
            self._transport.write(self._ready_command())
        else:
            self._on_message(event)

    def _release_reserved(self) -> None:
        """Release the reservation of a large message, which is complete. The server counts it as
        an unfinished request from now on.
        """
        if self._reserved_bytes:
            self._budgets.receive.release(self._reserved_bytes)
            self._reserved_bytes = 0

    def _update_reading(self, needs_bytes: bool) -> None:
        """Read if the decoder needs bytes and there is memory for them; otherwise stop reading.
        The event that removes the obstacle calls `pump` again.
        """
        if needs_bytes and self._is_reading and not self._decoder.has_partial_message:
            self._message_began_at = None  # the usual case: all messages were handled
            return
        may_read = needs_bytes and self._reserve_announced()
        if not may_read and (needs_bytes or not self._server.has_room()):
            self._budgets.waiting.add(self)
        self._set_reading(may_read)
        if not may_read or not self._decoder.has_partial_message:
            self._message_began_at = None
        elif self._message_began_at is None:
            self._message_began_at = self._time()

    def _reserve_announced(self) -> bool:
        """Reserve memory for the incomplete message; return False if there is not enough."""
        announced_bytes = large_bytes(self._decoder.announced_bytes)
        missing_bytes = announced_bytes - self._reserved_bytes
        if missing_bytes <= 0:
            return True
        if not self._budgets.receive.reserve(missing_bytes):
            return False
        self._reserved_bytes = announced_bytes
        return True

    def _set_reading(self, enabled: bool) -> None:
        # While reading is stopped no heartbeat is received, so the TTL begins again.
        if enabled and not self._is_reading:
            self._last_received_at = self._time()
        super()._set_reading(enabled)

    def _end_if_done(self) -> None:
        """If the server drains and all messages are finished, half-close; let the peer close."""
        if (
            not self._is_draining
            or not self._is_idle()
            or self._has_ended
            or self._transport is None
        ):
            return
        # Before the handshake no reply can be lost, so no half-close is needed.
        if self._is_ready:
            self._finish()
        else:
            self._has_ended = True
            self._transport.close()


def large_bytes(size: int) -> int:
    """Return the bytes of a message that need reserved memory."""
    return size if size > limits.ZMQ_UNRESERVED_BYTES else 0


def _elapsed_ms(since: float | None, now: float) -> float:
    return 0.0 if since is None else (now - since) * 1000
