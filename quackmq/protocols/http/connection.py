"""One peer: read requests and answer them in order, one at a time.

Each request goes to its route's handler. The response is one write, or a stream of chunks.
Pipelined requests wait for their turn. Reading stops while too many requests wait, and while the
peer does not read its responses. If the peer disconnects, its handler is cancelled; writes that the
broker has begun still complete. Not thread-safe: call it from the event loop.
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
from quackmq.protocols.http.errors import HttpFailure, failure, failure_of
from quackmq.protocols.http.parser import PendingRequest, Receiver, ServerContext
from quackmq.protocols.http.response_writer import (
    CONTINUE,
    LAST_CHUNK,
    Date,
    chunk,
    response_bytes,
    stream_head,
)
from quackmq.protocols.http.types import DeferredResponse, Response, Stream
from quackmq.serving.budgets import SendBudget
from quackmq.serving.connection import Admission, ConnectionBounds, ServedConnection

log = logging.getLogger(__name__)

_NOTHING: Final = memoryview(b"")


class Door(ServerContext, Admission, Protocol):
    """The part of the server that its connections use."""

    date: Date
    send_budget: SendBudget

    def streaming(self, change: int) -> None:
        """Change the number of streams that are being sent by `change`, 1 or -1."""


class Connection(ServedConnection, asyncio.Protocol):
    def __init__(self, door: Door) -> None:
        super().__init__(door, door.send_budget)
        self._door = door
        self._receiver: Receiver | None = None
        #: Pipelined requests behind the current one.
        self._waiting: deque[PendingRequest] = deque()
        #: Received bytes that are not parsed because too many requests wait, and their reservation.
        self._unparsed = _NOTHING
        self._reserved_bytes = 0
        self._current: PendingRequest | None = None
        #: The task or pending write of the current request.
        self._under_way: asyncio.Future[Any] | None = None
        self._is_streaming = False
        #: Resolved when a slow peer has read everything; a stream waits for it.
        self._writable: asyncio.Future[None] | None = None
        # Loop clock times: when the incomplete request began to arrive, and since when the
        # connection is idle.
        self._begun_at: float | None = None
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
        self._receiver.refuse(503, "limit_reached", "there are too many connections")

    def _make_receiver(self) -> Receiver:
        own_host, *_ = self._transport.get_extra_info("sockname") or ("",)
        return Receiver(self._door, self._caller, is_loopback(own_host), self._ask)

    def data_received(self, data: bytes) -> None:
        assert self._receiver is not None
        if not self._receiver.takes_requests:
            return
        if len(data) <= limits.HTTP_PARSED_BYTES:
            self._receiver.feed(data)
        else:
            self._unparsed = memoryview(data)
            self._parse_on()
            if self._unparsed and not self._door.receive_budget.reserve(len(self._unparsed)):
                self._unparsed = _NOTHING
                self._receiver.refuse(503, "limit_reached", "too many requests wait")
            self._reserved_bytes = len(self._unparsed)
        self._note_begun()
        self._regulate()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._regulate()

    def _on_writable(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._go_on()

    def _on_lost(self) -> None:
        assert self._receiver is not None
        if self._under_way is not None:
            self._under_way.cancel()
        for asked in (*self._waiting, self._current):
            self._receiver.release(asked)
        self._receiver.close()
        self._drop_unparsed()
        self._waiting.clear()

    # --- called by the server ----------------------------------------------------------------

    def drain(self) -> None:
        """Accept no more requests, answer those that were accepted, then close. Cancel a stream,
        and a handler that waits for new data.
        """
        if self._receiver is not None:
            self._receiver.takes_requests = False
        self._draining = True
        route = None if self._current is None else self._current.route
        if self._is_streaming or (route is not None and route.waits):
            self.cancel()
        self._go_on()

    def cancel(self) -> None:
        """Cancel the current operation; its response says that the broker is closing."""
        if self._under_way is not None:
            self._under_way.cancel()

    def _sweep(self, now: float) -> None:
        assert self._receiver is not None
        # Count unsent bytes of peers that are not slow too.
        self._note_unsent()
        if self._unsent_bytes:
            return
        if self._begun_at is not None:
            if now - self._begun_at > limits.HTTP_REQUEST_WAIT_MS / 1000 and self._reads:
                wait_ms = limits.HTTP_REQUEST_WAIT_MS
                self._receiver.refuse(
                    408, "timeout", f"the request was not whole after {wait_ms} ms"
                )
        elif self._idle_since is not None:
            if now - self._idle_since > limits.HTTP_IDLE_MS / 1000:
                self._transport.close()

    # --- answering requests ------------------------------------------------------------------

    def _ask(self, asked: PendingRequest) -> None:
        """Answer a complete request, or queue it behind earlier ones."""
        if self._current is None and not self._waiting and self._slow_since is None:
            self._begin(asked)
            return
        self._waiting.append(asked)
        assert self._receiver is not None
        if asked.request is not None and not self._receiver.reserve(asked, len(asked.request.body)):
            asked.request.body = b""
            asked.refusal = failure(503, "limit_reached", "too many requests wait", asked.path)

    def _begin(self, asked: PendingRequest) -> None:
        self._current = asked
        self._idle_since = None
        if asked.refusal is None and not self._door.send_budget.has_room:
            asked.refusal = failure(503, "limit_reached", "too many answers wait", asked.path)
        if asked.refusal is not None:
            self._answer(asked, asked.refusal)
            return
        assert asked.request is not None and asked.route is not None
        try:
            begun = asked.route.handler(asked.request)
        except Exception as error:
            self._answer(asked, self._failure(asked, error))
            return
        answer: Callable[[Any], Response | Stream]
        if isinstance(begun, DeferredResponse):
            self._under_way, answer = begun
        else:
            self._under_way, answer = asyncio.ensure_future(begun), _as_it_is
        self._under_way.add_done_callback(partial(self._on_done, asked, answer))

    def _on_done(
        self,
        asked: PendingRequest,
        answer: Callable[[Any], Response | Stream],
        done: asyncio.Future[Any],
    ) -> None:
        try:
            answered = answer(done.result())
        except asyncio.CancelledError:
            answered = self._failure(asked, _closing())
        except Exception as error:
            answered = self._failure(asked, error)
        if isinstance(answered, Stream):
            self._under_way = self._loop.create_task(self._send_stream(asked, answered))
        elif self._transport is not None:
            self._answer(asked, answered)

    def _failure(self, asked: PendingRequest, error: Exception) -> Response:
        if isinstance(error, QuackError | HttpFailure):
            return failure_of(error, asked.path)
        log.error("a request for %s failed", asked.path, exc_info=error)
        return failure(500, "error", "the broker has failed at this: see its log", asked.path)

    def _answer(self, asked: PendingRequest, response: Response) -> None:
        if self._transport is not None:
            if self._draining and not self._waiting:
                asked.closes = True
            date = self._door.date.line()
            self._transport.write(
                response_bytes(response, date, asked.closes, asked.is_old, asked.is_head)
            )
        self._done(asked)

    def _done(self, asked: PendingRequest) -> None:
        assert self._receiver is not None
        if asked.reserved_bytes:
            self._receiver.release(asked)
        self._current = None
        self._under_way = None
        self._idle_since = self._time()
        if asked.closes:
            self._end()
        elif self._waiting or self._draining or not self._reads or self._receiver.wants_continue:
            # Not by a direct call: a peer may have pipelined many requests, and the stack would
            # grow.
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Begin the next waiting request, if nothing prevents it."""
        if self._transport is None or self._current is not None or self._slow_since is not None:
            return
        if self._waiting:
            self._begin(self._waiting.popleft())
        if self._unparsed:
            self._parse_on()
            self._note_begun()
        if self._draining and self._is_done():
            self._end()
        self._regulate()

    def _is_done(self) -> bool:
        return self._current is None and not self._waiting

    # --- received bytes ----------------------------------------------------------------------

    def _parse_on(self) -> None:
        """Parse the bytes of one read in small pieces: one read may hold thousands of requests."""
        receiver = self._receiver
        assert receiver is not None
        while len(self._waiting) < limits.HTTP_REQUESTS_AHEAD and receiver.takes_requests:
            if not self._unparsed:
                break
            piece = self._unparsed[: limits.HTTP_PARSED_BYTES]
            self._unparsed = self._unparsed[limits.HTTP_PARSED_BYTES :]
            receiver.feed(piece)
        if not self._unparsed or not receiver.takes_requests:
            self._drop_unparsed()

    def _drop_unparsed(self) -> None:
        self._unparsed = _NOTHING
        if self._reserved_bytes:
            self._door.receive_budget.release(self._reserved_bytes)
            self._reserved_bytes = 0

    def _note_begun(self) -> None:
        assert self._receiver is not None
        if not self._receiver.is_coming:
            self._begun_at = None
        elif self._begun_at is None:
            self._begun_at = self._time()

    # --- streams ----------------------------------------------------------------------------

    async def _send_stream(self, asked: PendingRequest, stream: Stream) -> None:
        """Send the chunks as they are produced, no faster than the peer reads them. After the head
        is sent, a status cannot report a failure. So on a failure the connection is aborted.
        """
        chunked = not asked.is_old and stream.length is None
        asked.closes = asked.closes or asked.is_old or self._draining
        is_whole = asked.is_head
        self._is_streaming = True
        self._door.streaming(1)
        try:
            self._write(stream_head(stream, self._door.date.line(), asked.closes, chunked))
            if not asked.is_head and not self._draining and self._transport is not None:
                await self._send_chunks(stream, chunked)
                is_whole = True
        except asyncio.CancelledError:
            if self._transport is None:
                raise
        except BrokerClosing:
            log.debug("a stream to %s ends: the broker closes", self._caller.address)
        except Exception:
            log.exception("a stream to %s broke off", self._caller.address)
            self.abort()
        finally:
            self._is_streaming = False
            self._door.streaming(-1)
            aclose = getattr(stream.chunks, "aclose", None)
            if aclose is not None:
                await aclose()
        if chunked and not asked.is_head:
            self._write(LAST_CHUNK)
        # If a length was declared, only closing the connection shows that the body is incomplete.
        asked.closes = asked.closes or self._draining or not (chunked or is_whole)
        self._done(asked)

    async def _send_chunks(self, stream: Stream, chunked: bool) -> None:
        async for data in stream.chunks:
            if data:
                self._write(chunk(data) if chunked else data)
            if self._slow_since is not None:
                self._writable = self._loop.create_future()
                await self._writable

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    # --- the connection ---------------------------------------------------------------------

    def _regulate(self) -> None:
        """Read, unless the peer does not read its responses or too many of its requests wait."""
        transport, receiver = self._transport, self._receiver
        if transport is None or receiver is None or transport.is_closing():
            return
        if receiver.wants_continue and self._current is None and not self._waiting:
            receiver.wants_continue = False
            transport.write(CONTINUE)
        reads = self._slow_since is None and not self._unparsed
        reads = reads and len(self._waiting) < limits.HTTP_REQUESTS_AHEAD
        # Bytes after the last request are read and discarded, so that the peer's close is seen.
        reads = reads or not receiver.takes_requests
        if reads == self._reads:
            return
        if reads and self._begun_at is not None:
            self._begun_at = self._time()
        self._read(reads)

    def _end(self) -> None:
        """Close after the last response. If a request is still arriving, let the peer close
        first."""
        transport, receiver = self._transport, self._receiver
        if transport is None or receiver is None or self._has_ended or transport.is_closing():
            return
        receiver.takes_requests = False
        for asked in self._waiting:
            receiver.release(asked)
        self._waiting.clear()
        if receiver.is_coming:
            self._finish()
        else:
            self._has_ended = True
            transport.close()


def _as_it_is(answer: Response | Stream) -> Response | Stream:
    return answer


def _closing() -> BrokerClosing:
    return BrokerClosing("the broker is closing: try again when it is back")
