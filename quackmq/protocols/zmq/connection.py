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
from quackmq.serving.first_bytes import MistakenPeers, WireProtocol, protocol_of
from quackmq.serving.waiting_line import is_too_slow


class Door(Admission, Protocol):
    """The part of the server that its peers use."""

    broker: Broker
    #: The shared receive buffer; every peer copies its bytes out before it returns.
    scratch: memoryview
    budgets: Budgets
    mistaken: MistakenPeers

    def has_room(self) -> bool:
        """Return whether another request may begin."""

    def begun(self, large_bytes: int) -> None:
        """Count a request, with `large_bytes` of reserved memory."""

    def done(self, large_bytes: int) -> None: ...


class Peer(ServedConnection, asyncio.BufferedProtocol):
    #: What is done at once does not count as under way, so the number of events that are taken in
    #: one turn of the loop is bounded too: others are to have theirs.
    events_at_once = limits.ZMQ_REQUESTS_IN_FLIGHT
    #: Whether the peer stays connected however long it reads nothing.
    may_be_slow = False

    def __init__(self, door: Door, decoder: zmtp.FrameDecoder) -> None:
        super().__init__(door, door.budgets.send)
        self._door = door
        self._broker = door.broker
        self._budgets = door.budgets
        self._decoder = decoder
        self._reserved_bytes = 0
        self._takes_answers = asyncio.Event()
        self._takes_answers.set()
        self._pumping = False
        self._is_ready = False
        self._opened_at = self._time()
        #: When the incomplete message began to arrive.
        self._begun_at: float | None = self._opened_at
        #: The longest silence that the peer announces (TTL), and when its last bytes arrived.
        self._ttl_ms = 0
        self._heard_at = 0.0

    # --- what those below say ---------------------------------------------------------------

    @abstractmethod
    def _introduction(self) -> bytes:
        """Return the bytes that answer the READY command of the peer."""

    @abstractmethod
    def _may_begin(self) -> bool:
        """Return whether another message may be taken from the peer now."""

    @abstractmethod
    def _on_message(self, event: zmtp.Event) -> None: ...

    @abstractmethod
    def _is_done(self) -> bool:
        """Return whether all messages taken from the peer are done."""

    def _on_gone(self) -> None:
        """Release what the subclass holds for the peer, which is gone."""

    # --- what the transport calls -----------------------------------------------------------

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
        return self._door.scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._has_ended:
            return
        self._decoder.receive(bytes(self._door.scratch[:nbytes]))
        if self._ttl_ms:
            self._heard_at = self._time()
        self.pump()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._takes_answers.clear()

    def _on_writable(self) -> None:
        self._takes_answers.set()
        self.pump()

    def _on_lost(self) -> None:
        self._takes_answers.set()
        self._on_gone()
        self._release_reserved()

    # --- what the door calls ----------------------------------------------------------------

    def pump(self) -> None:
        """Begin as many received messages as may begin now; read on if all did."""
        # A message may be answered here, and its answer would call pump again.
        if self._transport is None or self._has_ended or self._pumping:
            return
        self._pumping = True
        try:
            may_go_on = self._begin_some()
        except ProtocolError as error:
            self._expel(str(error))
            return
        finally:
            self._pumping = False
        self._regulate(may_go_on)

    def drain(self) -> None:
        """Accept nothing more, finish accepted messages, then close."""
        self._draining = True
        self._end_if_done()

    def disconnect(self, reason: str) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._log_disconnect(reason)
            self._close()

    def _expel(self, reason: str) -> None:
        """Disconnect a peer that sent invalid bytes; log which port serves its protocol."""
        mistaken, address, now = self._door.mistaken, self._caller.address, self._loop.time()
        protocol = protocol_of(self._decoder.opening)
        if protocol is not None and protocol is not WireProtocol.ZMTP:
            mistaken.report(address, protocol, now)
            self._close()
        elif socket_type := self._decoder.refused_socket:
            reason = mistaken.report_socket(address, reason, socket_type, now)
            self._transport.write(zmtp.error(reason))
            self._close()
        else:
            if not self._is_ready:
                self._transport.write(zmtp.error(reason))
            self.disconnect(reason)

    def _close(self) -> None:
        """Close the connection; bytes already written are sent if the peer reads them."""
        if self._transport is not None and not self._transport.is_closing():
            self._has_ended = True
            # What is still to be sent is a greeting or an error at the most, if the peer is well.
            if self._slow_since is None:
                self._transport.close()
                self._loop.call_later(limits.ZMQ_LINGER_MS / 1000, self.abort)
            else:
                self._transport.abort()

    def _sweep(self, now: float) -> None:
        """Disconnect a peer that has been silent for too long."""
        if not self._is_ready and _passed_ms(self._opened_at, now) > limits.ZMQ_HANDSHAKE_MS:
            self.disconnect(f"it had not introduced itself after {limits.ZMQ_HANDSHAKE_MS} ms")
        elif _passed_ms(self._begun_at, now) > limits.ZMQ_REQUEST_WAIT_MS:
            self.disconnect(f"a message was not whole after {limits.ZMQ_REQUEST_WAIT_MS} ms")
        elif self._ttl_ms and self._reads and _passed_ms(self._heard_at, now) > self._ttl_ms:
            self.disconnect(f"it was not heard for {self._ttl_ms} ms, as it had said it would be")

    def is_behind(self, now: float) -> bool:
        """Return whether a message arrives too slowly to be complete before its deadline."""
        claimed = self._decoder.claimed_bytes
        if not claimed or self._has_ended:
            return False
        share, passed_ms = self._decoder.received_bytes / claimed, _passed_ms(self._begun_at, now)
        return is_too_slow(share, passed_ms, limits.ZMQ_PACE_MS, limits.ZMQ_REQUEST_WAIT_MS)

    # --- inside -----------------------------------------------------------------------------

    def _begin_some(self) -> bool:
        """Begin a bounded number of messages; return whether no more can be decoded."""
        for _ in range(self.events_at_once):
            if not self._may_begin():
                return False
            event = self._decoder.next_event()
            if event is None:
                return True
            self._begun_at = None
            self._on_event(event)
        self._loop.call_soon(self.pump)
        return False

    def _on_event(self, event: zmtp.Event) -> None:
        if isinstance(event, zmtp.Ping):
            self._ttl_ms = event.ttl_ms
            self._heard_at = self._time()
            # A slow peer needs no PONG: the unsent bytes already show that we are alive.
            if self._slow_since is None:
                self._transport.write(zmtp.pong(event.context))
        elif isinstance(event, zmtp.Ready):
            self._is_ready = True
            self._transport.write(self._introduction())
        else:
            self._on_message(event)

    def _release_reserved(self) -> None:
        """Release the reservation of a large message, which is complete and counts as begun."""
        if self._reserved_bytes:
            self._budgets.receive.release(self._reserved_bytes)
            self._reserved_bytes = 0

    def _regulate(self, may_go_on: bool) -> None:
        """Read, unless a message may not begin or has no memory. The event that removes the cause
        calls `pump` again.
        """
        if may_go_on and self._reads and not self._decoder.is_amid:
            self._begun_at = None  # the usual case: all messages were taken
            return
        if may_go_on:
            claimed = large_bytes(self._decoder.claimed_bytes)
            if claimed > self._reserved_bytes:
                may_go_on = self._budgets.receive.reserve(claimed - self._reserved_bytes)
                if may_go_on:
                    self._reserved_bytes = claimed
            if not may_go_on:
                self._budgets.waiting.add(self)
        elif not self._door.has_room():
            self._budgets.waiting.add(self)
        self._read(may_go_on)
        if not may_go_on or not self._decoder.is_amid:
            self._begun_at = None
        elif self._begun_at is None:
            self._begun_at = self._time()

    def _read(self, reads: bool) -> None:
        if reads and not self._reads:
            self._heard_at = self._time()
        super()._read(reads)

    def _end_if_done(self) -> None:
        """If the server drains and everything is answered, half-close; let the peer close."""
        if not self._draining or not self._is_done() or self._has_ended or self._transport is None:
            return
        if self._is_ready:
            self._finish()
        else:
            self._has_ended = True
            self._transport.close()


def large_bytes(size: int) -> int:
    """Return the bytes of a message that need reserved memory."""
    return size if size > limits.ZMQ_UNRESERVED_BYTES else 0


def _passed_ms(since: float | None, now: float) -> float:
    return 0.0 if since is None else (now - since) * 1000
