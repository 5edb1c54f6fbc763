"""One peer of a REP socket: receive requests, send replies.

Requests with the same envelope are handled one after the other, in the order in which they came.
For example, all requests of a DEALER, or of one client behind a proxy, have the same envelope.
Requests with different envelopes are handled concurrently.

Back-pressure: the connection stops reading while the peer has too many unfinished requests, and
while it does not read its replies. Each peer may have one unfinished request, however many the
others have.

If the peer disconnects, waiting requests are cancelled. Requests that have begun are completed.

Call it only from the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from quackmq.broker import Caller
from quackmq.errors import BrokerClosing, QuackError
from quackmq.model.topic import AppendResult
from quackmq.protocols.zmq import limits
from quackmq.protocols.zmq.codec import zmtp
from quackmq.protocols.zmq.connection import Peer, ServerContext, large_bytes
from quackmq.protocols.zmq.queue_handlers import (
    PendingReply,
    Reply,
    Requester,
    error_reply,
    put_reply,
)
from quackmq.tasks import TaskSet

#: A request's frame, or the error with which the decoder refused the request.
_Request = bytes | QuackError
#: Starts to handle a request's frame, in the language of a REP socket.
RequestHandler = Callable[[Requester, bytes], PendingReply | Reply]


class Connection(Peer):
    """A peer of a REP socket, with its unfinished requests."""

    def __init__(self, server: ServerContext, handle_request: RequestHandler) -> None:
        super().__init__(server, zmtp.EnvelopeDecoder())
        self._handle_request = handle_request
        #: An envelope with a running request has an entry here: the requests that wait for the
        #: running one. The entry is None until the first request has to wait.
        self._waiting_requests: dict[zmtp.Envelope | None, deque[_Request] | None] = {}
        self._unfinished_requests = 0
        self._tasks = TaskSet()
        #: Tasks that only wait for a message, and may be cancelled.
        self._waiting_tasks: dict[asyncio.Task[Any], None] = {}

    # --- called by the server ---------------------------------------------------------------

    def drain(self) -> None:
        """Accept no more requests, reply to the accepted ones, then close."""
        self._is_draining = True
        for task in self._waiting_tasks:
            task.cancel()
        self._end_if_done()

    # --- called by request handlers ---------------------------------------------------------

    def caller(self, client: str) -> Caller:
        if client != self._caller.client:
            self._caller = Caller(address=self._caller.address, client=client)
        return self._caller

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Allow the server to cancel the current task. Raise BrokerClosing if it does."""
        closing = BrokerClosing("the broker is closing: ask again when it is back")
        task = asyncio.current_task()
        assert task is not None, "requests are tasks"
        if self._is_draining:
            raise closing
        self._waiting_tasks[task] = None
        try:
            yield
        except asyncio.CancelledError:
            if self._transport is not None and not self._is_draining:
                raise
            # This connection has cancelled the task. The task goes on, to send an error reply.
            task.uncancel()
            raise closing from None
        finally:
            self._waiting_tasks.pop(task, None)

    # --- called by Peer ---------------------------------------------------------------------

    def _ready_command(self) -> bytes:
        return zmtp.ready()

    def _may_accept_message(self) -> bool:
        """Return whether another request may begin. The first unfinished request of a peer needs no
        room in the server, so every peer makes progress.
        """
        return (
            self._unfinished_requests < limits.ZMQ_REQUESTS_IN_FLIGHT
            and self._slow_since is None
            and not self._is_draining
            and (not self._unfinished_requests or self._server.has_room())
        )

    def _on_message(self, event: zmtp.Event) -> None:
        if isinstance(event, zmtp.Message):
            self._accept(event.envelope, event.content)
        elif isinstance(event, zmtp.Refused):
            self._accept(event.envelope, event.error)

    def _is_idle(self) -> bool:
        return not self._unfinished_requests

    def _on_disconnected(self) -> None:
        """Drop requests that have not begun, and cancel tasks that only wait for a message."""
        for waiting in self._waiting_requests.values():
            while waiting:
                self._finish_request(waiting.popleft())
        for task in self._waiting_tasks:
            task.cancel()

    # --- requests ---------------------------------------------------------------------------

    def _accept(self, envelope: zmtp.Envelope | None, request: _Request) -> None:
        """Count a request. Start it, or queue it behind the earlier ones with its envelope."""
        self._unfinished_requests += 1
        self._server.begin_request(_reserved_bytes_of(request))
        self._release_reserved()
        if envelope not in self._waiting_requests:
            self._waiting_requests[envelope] = None
            self._start(envelope, request)
        elif (waiting := self._waiting_requests[envelope]) is None:
            self._waiting_requests[envelope] = deque((request,))
        else:
            waiting.append(request)

    def _start(self, envelope: zmtp.Envelope | None, request: _Request) -> None:
        """Start a request, and reply when it is done. No other request with its envelope is
        running."""
        if isinstance(request, QuackError):  # the decoder has refused it
            self._send_reply(envelope, request, error_reply(request))
            return
        result = self._handle_request(self, request)
        if isinstance(result, asyncio.Future):  # of the append of a put
            if isinstance(result, asyncio.Task):
                self._tasks.hold(result)  # the event loop keeps only a weak reference to a task
            result.add_done_callback(partial(self._on_put_done, envelope, request))
        elif isinstance(result, tuple):  # a reply
            self._send_reply(envelope, request, result)
        else:  # a coroutine that returns the reply
            self._tasks.start(self._reply_when_done(envelope, request, result))

    def _on_put_done(
        self, envelope: zmtp.Envelope | None, frame: bytes, put: asyncio.Future[AppendResult]
    ) -> None:
        self._send_reply(envelope, frame, put_reply(frame, put))

    async def _reply_when_done(
        self, envelope: zmtp.Envelope | None, frame: bytes, pending: Coroutine[Any, Any, Reply]
    ) -> None:
        self._send_reply(envelope, frame, await pending)

    def _finish_request(self, request: _Request) -> None:
        """Stop counting a request, and read on if reading was stopped."""
        was_stopped = not self._is_reading
        self._unfinished_requests -= 1
        self._server.end_request(_reserved_bytes_of(request))
        if was_stopped:
            self.pump()

    # --- replies ----------------------------------------------------------------------------

    def _send_reply(self, envelope: zmtp.Envelope | None, request: _Request, reply: Reply) -> None:
        """Send a reply, then start the next request with the same envelope. If the peer does not
        read at present, do both later.
        """
        if not self._may_send(reply):
            self._tasks.start(self._send_reply_later(envelope, request, reply))
            return
        self._write(envelope, reply)
        waiting = self._waiting_requests[envelope]
        if waiting:
            # Start it from the loop: it may finish immediately, and many may wait, so a direct call
            # could recurse deeply.
            self._loop.call_soon(self._start, envelope, waiting.popleft())
        else:
            del self._waiting_requests[envelope]
        self._finish_request(request)
        self._end_if_done()

    async def _send_reply_later(
        self, envelope: zmtp.Envelope | None, request: _Request, reply: Reply
    ) -> None:
        """Wait until the reply may be sent, then send it."""
        while not self._may_send(reply):
            is_slow = self._slow_since is not None
            await (self._writable if is_slow else self._budgets.sendable).wait()
        self._send_reply(envelope, request, reply)

    def _may_send(self, reply: Reply) -> bool:
        """Return whether a reply may be written now: the peer reads its replies, and a large one
        finds room in the budget."""
        if self._transport is None:
            return True  # the peer has disconnected, so the reply is discarded
        _, content = reply
        is_large = len(content) > limits.ZMQ_WRITE_BUFFER_BYTES
        return self._slow_since is None and (not is_large or self._budgets.sendable.is_set())

    def _write(self, envelope: zmtp.Envelope | None, reply: Reply) -> None:
        """Write a reply. Discard it if the connection has ended."""
        if self._transport is None or self._has_ended:
            return
        words, content = reply
        head = zmtp.reply_head(envelope, len(words) + len(content)) + words
        if len(content) <= limits.ZMQ_JOINED_BYTES:
            self._transport.write(head + content)
        else:
            self._transport.writelines((head, content))


def _reserved_bytes_of(request: _Request) -> int:
    """Return the memory that a request reserves: none for a small or refused one."""
    return large_bytes(len(request)) if isinstance(request, bytes) else 0
