"""One peer: read its requests and respond to them in order, one at a time.

Each request goes to its route's handler. The response is one write, or a stream of chunks.
Pipelined requests wait until earlier ones are finished. Reading stops while too many requests wait,
and while the peer does not read its responses. If the peer disconnects, its handler is cancelled;
writes that the broker has begun still complete. Not thread-safe: call it from the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from quackmq.errors import BrokerClosing, QuackError
from quackmq.protocols.http import limits
from quackmq.protocols.http.browser_guards import is_loopback
from quackmq.protocols.http.errors import HttpFailure, failure_response, response_for_error
from quackmq.protocols.http.parser import PendingRequest, Receiver, ServerContext
from quackmq.protocols.http.response_writer import (
    CONTINUE,
    LAST_CHUNK,
    Date,
    render_chunk,
    render_response,
    render_stream_head,
)
from quackmq.protocols.http.types import DeferredResponse, Response, Stream
from quackmq.serving.budgets import SendBudget
from quackmq.serving.connection import Admission, ConnectionBounds, ServedConnection

log = logging.getLogger(__name__)

_NOTHING: Final = memoryview(b"")
_TOO_MANY_REQUESTS: Final = "too many requests are waiting: try again later"
_TOO_MANY_RESPONSES: Final = "too many responses are unsent: try again later"


class ConnectionServer(ServerContext, Admission, Protocol):
    """The part of the server that its connections use."""

    date: Date
    send_budget: SendBudget

    def count_stream(self, change: int) -> None:
        """Change the number of streams that are being sent by `change`, 1 or -1."""


class Connection(ServedConnection, asyncio.Protocol):
    """An HTTP connection: at most one request runs, and the others wait in order."""

    _server: ConnectionServer

    def __init__(self, server: ConnectionServer) -> None:
        super().__init__(server, server.send_budget)
        self._receiver: Receiver | None = None
        #: Pipelined requests behind the current one.
        self._waiting: deque[PendingRequest] = deque()
        #: Received bytes that are not parsed because too many requests wait, and their reservation.
        self._unparsed = _NOTHING
        self._reserved_bytes = 0
        self._current: PendingRequest | None = None
        #: The task or pending write of the current request.
        self._running: asyncio.Future[Any] | None = None
        self._is_streaming = False
        #: Resolved when a slow peer has read everything; a stream waits for it.
        self._writable: asyncio.Future[None] | None = None
        #: Loop clock times: when the incomplete request began to arrive, and when the last request
        #: finished. None if there is no incomplete request, or if a request is running.
        self._arriving_since: float | None = None
        self._idle_since: float | None = self._time()

    # --- called by the transport -------------------------------------------------------------

    @property
    def bounds(self) -> ConnectionBounds:
        return ConnectionBounds(
            limits.HTTP_WRITE_BUFFER_BYTES, limits.HTTP_SEND_WAIT_MS, limits.HTTP_LINGER_MS
        )

    def _on_opened(self) -> None:
        self._receiver = self._make_receiver()

    def _on_refused(self) -> None:
        self._receiver = self._make_receiver()
        self._receiver.refuse(503, "limit_reached", "too many connections: try again later")

    def _make_receiver(self) -> Receiver:
        own_host, *_ = self._transport.get_extra_info("sockname") or ("",)
        return Receiver(self._server, self._caller, is_loopback(own_host), self._accept)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes. A large piece is parsed in steps; the bytes that wait for this
        are counted in the budget, and refused if there is no room."""
        assert self._receiver is not None
        if not self._receiver.accepts_requests:
            return
        if len(data) <= limits.HTTP_PARSED_BYTES:
            self._receiver.feed(data)
        else:
            self._unparsed = memoryview(data)
            self._parse_more()
            if self._unparsed and not self._server.receive_budget.reserve(len(self._unparsed)):
                self._unparsed = _NOTHING
                self._receiver.refuse(503, "limit_reached", _TOO_MANY_REQUESTS)
            self._reserved_bytes = len(self._unparsed)
        self._note_arrival()
        self._update_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update_reading()

    def _on_writable(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._start_next()

    def _on_lost(self) -> None:
        """Cancel the running request and discard all others; return their memory to the budget."""
        assert self._receiver is not None
        if self._running is not None:
            self._running.cancel()
        for pending in (*self._waiting, self._current):
            self._receiver.release(pending)
        self._receiver.close()
        self._drop_unparsed()
        self._waiting.clear()

    # --- called by the server ----------------------------------------------------------------

    def drain(self) -> None:
        """Accept no more requests, answer those that were accepted, then close. Cancel a stream,
        and a handler that waits for new data.
        """
        if self._receiver is not None:
            self._receiver.accepts_requests = False
        self._is_draining = True
        route = None if self._current is None else self._current.route
        if self._is_streaming or (route is not None and route.may_wait):
            self.cancel()
        self._start_next()

    def cancel(self) -> None:
        """Cancel the current operation; its response says that the broker is closing."""
        if self._running is not None:
            self._running.cancel()

    def _sweep(self, now: float) -> None:
        """Refuse a request that takes too long to arrive; close a connection that is idle for
        too long."""
        assert self._receiver is not None
        # The bytes of peers that are not slow count too.
        self._count_unsent()
        if self._unsent_bytes:
            return
        if self._arriving_since is not None:
            if now - self._arriving_since > limits.HTTP_REQUEST_WAIT_MS / 1000 and self._is_reading:
                wait_ms = limits.HTTP_REQUEST_WAIT_MS
                self._receiver.refuse(
                    408, "timeout", f"the request was not complete after {wait_ms} ms"
                )
        elif self._idle_since is not None:
            if now - self._idle_since > limits.HTTP_IDLE_MS / 1000:
                self._transport.close()

    # --- handling requests -------------------------------------------------------------------

    def _accept(self, pending: PendingRequest) -> None:
        """Start a complete request, or queue it behind earlier ones."""
        if self._current is None and not self._waiting and self._slow_since is None:
            self._start_request(pending)
            return
        self._waiting.append(pending)
        assert self._receiver is not None
        request = pending.request
        if request is not None and not self._receiver.reserve(pending, len(request.body)):
            request.body = b""
            pending.refusal = failure_response(
                503, "limit_reached", _TOO_MANY_REQUESTS, pending.path
            )

    def _start_request(self, pending: PendingRequest) -> None:
        """Call the request's handler, and respond when its task or its write has finished."""
        self._current = pending
        self._idle_since = None
        if pending.refusal is None and not self._server.send_budget.has_room:
            pending.refusal = failure_response(
                503, "limit_reached", _TOO_MANY_RESPONSES, pending.path
            )
        if pending.refusal is not None:
            self._send_response(pending, pending.refusal)
            return
        assert pending.request is not None and pending.route is not None
        try:
            started = pending.route.handler(pending.request)
        except Exception as error:
            self._send_response(pending, self._error_response(pending, error))
            return
        render: Callable[[Any], Response | Stream]
        if isinstance(started, DeferredResponse):
            self._running, render = started
        else:
            self._running, render = asyncio.ensure_future(started), _unchanged
        self._running.add_done_callback(partial(self._on_handled, pending, render))

    def _on_handled(
        self,
        pending: PendingRequest,
        render: Callable[[Any], Response | Stream],
        finished: asyncio.Future[Any],
    ) -> None:
        """Send the response or the stream that a finished handler or write results in."""
        try:
            response = render(finished.result())
        except asyncio.CancelledError:
            response = self._error_response(pending, _closing_error())
        except Exception as error:
            response = self._error_response(pending, error)
        if isinstance(response, Stream):
            self._running = self._loop.create_task(self._send_stream(pending, response))
        elif self._transport is not None:
            self._send_response(pending, response)

    def _error_response(self, pending: PendingRequest, error: Exception) -> Response:
        if isinstance(error, QuackError | HttpFailure):
            return response_for_error(error, pending.path)
        log.error("a request for %s failed", pending.path, exc_info=error)
        return failure_response(500, "error", "internal error: see the broker's log", pending.path)

    def _send_response(self, pending: PendingRequest, response: Response) -> None:
        """Write a response, unless the connection is lost; then finish the request. While the
        server drains, the last response closes the connection."""
        if self._transport is not None:
            if self._is_draining and not self._waiting:
                pending.closes_connection = True
            date = self._server.date.line()
            self._transport.write(
                render_response(
                    response, date, pending.closes_connection, pending.is_http_1_0, pending.is_head
                )
            )
        self._finish_request(pending)

    def _finish_request(self, pending: PendingRequest) -> None:
        """Release the request's memory, then close the connection or start the next request."""
        assert self._receiver is not None
        if pending.reserved_bytes:
            self._receiver.release(pending)
        self._current = None
        self._running = None
        self._idle_since = self._time()
        if pending.closes_connection:
            self._close_after_last()
        elif (
            self._waiting
            or self._is_draining
            or not self._is_reading
            or self._receiver.wants_continue
        ):
            # A direct call would make the stack grow: a peer may have pipelined many requests.
            self._loop.call_soon(self._start_next)

    def _start_next(self) -> None:
        """Start the next waiting request, unless another one runs or the peer is slow."""
        if self._transport is None or self._current is not None or self._slow_since is not None:
            return
        if self._waiting:
            self._start_request(self._waiting.popleft())
        if self._unparsed:
            self._parse_more()
            self._note_arrival()
        if self._is_draining and self._has_no_requests():
            self._close_after_last()
        self._update_reading()

    def _has_no_requests(self) -> bool:
        return self._current is None and not self._waiting

    # --- received bytes ----------------------------------------------------------------------

    def _parse_more(self) -> None:
        """Parse the bytes of one read in small pieces: one read may hold thousands of requests."""
        receiver = self._receiver
        assert receiver is not None
        while len(self._waiting) < limits.HTTP_REQUESTS_AHEAD and receiver.accepts_requests:
            if not self._unparsed:
                break
            piece = self._unparsed[: limits.HTTP_PARSED_BYTES]
            self._unparsed = self._unparsed[limits.HTTP_PARSED_BYTES :]
            receiver.feed(piece)
        if not self._unparsed or not receiver.accepts_requests:
            self._drop_unparsed()

    def _drop_unparsed(self) -> None:
        self._unparsed = _NOTHING
        if self._reserved_bytes:
            self._server.receive_budget.release(self._reserved_bytes)
            self._reserved_bytes = 0

    def _note_arrival(self) -> None:
        """Note when the request that is still incomplete began to arrive."""
        assert self._receiver is not None
        if not self._receiver.is_arriving:
            self._arriving_since = None
        elif self._arriving_since is None:
            self._arriving_since = self._time()

    # --- streams ----------------------------------------------------------------------------

    async def _send_stream(self, pending: PendingRequest, stream: Stream) -> None:
        """Send the chunks as they are produced, no faster than the peer reads them. A failure after
        the head cannot be reported by a status, so it aborts the connection.
        """
        is_chunked = not pending.is_http_1_0 and stream.length is None
        pending.closes_connection = (
            pending.closes_connection or pending.is_http_1_0 or self._is_draining
        )
        is_whole = pending.is_head
        self._is_streaming = True
        self._server.count_stream(1)
        try:
            self._write(
                render_stream_head(
                    stream, self._server.date.line(), pending.closes_connection, is_chunked
                )
            )
            if not pending.is_head and not self._is_draining and self._transport is not None:
                await self._send_chunks(stream, is_chunked)
                is_whole = True
        except asyncio.CancelledError:
            # Either the peer has gone, or `drain` cancelled the stream, whose response ends below.
            if self._transport is None:
                raise
        except BrokerClosing:
            log.debug("a stream to %s ends: the broker is closing", self._caller.address)
        except Exception:
            log.exception("a stream to %s failed", self._caller.address)
            self.abort()
        finally:
            self._is_streaming = False
            self._server.count_stream(-1)
            aclose = getattr(stream.chunks, "aclose", None)
            if aclose is not None:
                await aclose()
        # A stream that ends because the broker closes ends properly, too: only endless streams are
        # chunked. After `abort` this writes nothing.
        if is_chunked and not pending.is_head:
            self._write(LAST_CHUNK)
        # If a length was declared, only closing the connection shows that the body is incomplete.
        pending.closes_connection = (
            pending.closes_connection or self._is_draining or not (is_chunked or is_whole)
        )
        self._finish_request(pending)

    async def _send_chunks(self, stream: Stream, is_chunked: bool) -> None:
        """Write each piece of a stream as it is produced. Wait while the peer reads too slowly."""
        async for data in stream.chunks:
            if data:
                self._write(render_chunk(data) if is_chunked else data)
            if self._slow_since is not None:
                self._writable = self._loop.create_future()
                await self._writable

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    # --- the connection ---------------------------------------------------------------------

    def _update_reading(self) -> None:
        """Read, unless the peer does not read its responses or too many of its requests wait. Send
        `100 Continue` if the peer waits for it and no earlier request is unfinished.
        """
        transport, receiver = self._transport, self._receiver
        if transport is None or receiver is None or transport.is_closing():
            return
        if receiver.wants_continue and self._current is None and not self._waiting:
            receiver.wants_continue = False
            transport.write(CONTINUE)
        should_read = self._slow_since is None and not self._unparsed
        should_read = should_read and len(self._waiting) < limits.HTTP_REQUESTS_AHEAD
        # Bytes after the last request are read and discarded, so that the peer's close is seen.
        should_read = should_read or not receiver.accepts_requests
        if should_read == self._is_reading:
            return
        if should_read and self._arriving_since is not None:
            self._arriving_since = self._time()
        self._set_reading(should_read)

    def _close_after_last(self) -> None:
        """Close after the last response. If a request is still arriving, let the peer close first,
        because closing now would reset the connection.
        """
        transport, receiver = self._transport, self._receiver
        if transport is None or receiver is None or self._has_ended or transport.is_closing():
            return
        receiver.accepts_requests = False
        for pending in self._waiting:
            receiver.release(pending)
        self._waiting.clear()
        if receiver.is_arriving:
            self._finish()
        else:
            self._has_ended = True
            transport.close()


def _unchanged(response: Response | Stream) -> Response | Stream:
    return response


def _closing_error() -> BrokerClosing:
    return BrokerClosing("the broker is closing: try again after its restart")
