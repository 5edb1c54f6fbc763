"""One peer, whatever its socket is: bytes in, what they mean, and when to read on.

What is done with what a peer says is the business of those below: `connection` for requests,
`proxy.publishers` and `proxy.subscribers` for the proxy. Here is what they share: the handshake,
heartbeats, reading no more than can be taken, memory set aside for what is large, and the end of
those that are silent or slow for too long.

Who may call: the loop.
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
    """What a peer needs of its door."""

    broker: Broker
    #: Into which every peer receives, and takes out what came before it returns.
    scratch: memoryview
    budgets: Budgets
    mistaken: MistakenPeers

    def has_room(self) -> bool:
        """Whether another request may begin."""

    def begun(self, large_bytes: int) -> None:
        """A request, with so many bytes beyond those that are free."""

    def done(self, large_bytes: int) -> None: ...


class Peer(ServedConnection, asyncio.BufferedProtocol):
    #: What is done at once does not count as under way, so the number of events that are taken in
    #: one turn of the loop is bounded too: others are to have theirs.
    events_at_once = limits.ZMQ_REQUESTS_IN_FLIGHT
    #: Whether it stays however long it takes nothing.
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
        #: When what is coming began to come.
        self._begun_at: float | None = self._opened_at
        #: How long the peer says that it is silent at the most, and when it was heard last.
        self._ttl_ms = 0
        self._heard_at = 0.0

    # --- what those below say ---------------------------------------------------------------

    @abstractmethod
    def _introduction(self) -> bytes:
        """What is said to a peer that has introduced itself."""

    @abstractmethod
    def _may_begin(self) -> bool:
        """Whether something more may be taken from it now."""

    @abstractmethod
    def _on_message(self, event: zmtp.Event) -> None: ...

    @abstractmethod
    def _is_done(self) -> bool:
        """Whether all that was taken from it is done."""

    def _on_gone(self) -> None:
        """It is gone."""

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
        """Begin as much of what has come as may begin now, and read on if all did."""
        # What is begun here may be answered here, which would pump again.
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
        """Take nothing more, finish with what was taken, then close."""
        self._draining = True
        self._end_if_done()

    def disconnect(self, reason: str) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._log_disconnect(reason)
            self._close()

    def _expel(self, reason: str) -> None:
        """Disconnect a peer that made no sense, and say where it would be served."""
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
        """Close the connection; what was written before is sent if the peer takes it."""
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
        """Return whether a message comes too slowly to be whole in time."""
        claimed = self._decoder.claimed_bytes
        if not claimed or self._has_ended:
            return False
        share, passed_ms = self._decoder.received_bytes / claimed, _passed_ms(self._begun_at, now)
        return is_too_slow(share, passed_ms, limits.ZMQ_PACE_MS, limits.ZMQ_REQUEST_WAIT_MS)

    # --- inside -----------------------------------------------------------------------------

    def _begin_some(self) -> bool:
        """Whether that was all there is."""
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
            # Who takes nothing needs none: what lies here for it already shows that we are there.
            if self._slow_since is None:
                self._transport.write(zmtp.pong(event.context))
        elif isinstance(event, zmtp.Ready):
            self._is_ready = True
            self._transport.write(self._introduction())
        else:
            self._on_message(event)

    def _release_reserved(self) -> None:
        """What was large has come whole, and counts as begun."""
        if self._reserved_bytes:
            self._budgets.receive.release(self._reserved_bytes)
            self._reserved_bytes = 0

    def _regulate(self, may_go_on: bool) -> None:
        """Read on, unless something is held up, or comes for which there is no memory; whoever
        changes that pumps again."""
        if may_go_on and self._reads and not self._decoder.is_amid:
            self._begun_at = None  # as mostly: all that came was taken
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
        """Once everything is answered: say that this is the end, and let the peer hang up."""
        if not self._draining or not self._is_done() or self._has_ended or self._transport is None:
            return
        if self._is_ready:
            self._finish()
        else:
            self._has_ended = True
            self._transport.close()


def large_bytes(size: int) -> int:
    """What of a message counts as memory to be set aside."""
    return size if size > limits.ZMQ_UNRESERVED_BYTES else 0


def _passed_ms(since: float | None, now: float) -> float:
    return 0.0 if since is None else (now - since) * 1000
