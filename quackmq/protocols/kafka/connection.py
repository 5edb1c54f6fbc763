"""One peer: read requests and send responses in the order of the requests.

Requests with a `submit` function (Produce) start when they arrive. The others start one after
another, each when all earlier responses have been sent. So a client sees the effects of one
connection in order, while its batches in flight become durable together. A queued fetch blocks
only its own connection.

Reading stops in four cases:

- the peer does not read its responses;
- too many of its requests are unanswered;
- the broker has no room for the batches of the next request;
- there is no memory to receive a large request.

All connections together publish a bounded number of batches in one turn of the loop
(publish_turns.py). The rest follows in the next turns.

When the cause ends, `pump` is called again. A heartbeat that waits behind other requests keeps its
member alive from its arrival: the broker is slow then, not the member.

A peer that sends invalid bytes is disconnected with a log line, as in Kafka. A peer whose request
hits a bug of the broker is disconnected with a logged traceback. Not thread-safe: call it from the
event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from quackmq import limits as shared_limits
from quackmq.broker import Broker
from quackmq.errors import ProtocolError
from quackmq.protocols.kafka import limits
from quackmq.protocols.kafka.api import (
    Api,
    Call,
    LastResponse,
    Node,
    PublishedInPortions,
    Watch,
)
from quackmq.protocols.kafka.codec.framing import (
    Frames,
    ReceiveMemory,
    RequestHeader,
    read_header,
    request_body,
    response_head,
)
from quackmq.protocols.kafka.handlers.cluster import API_VERSIONS, unsupported_api_versions
from quackmq.protocols.kafka.handlers.encoded_topics import EncodedTopics
from quackmq.protocols.kafka.publish_turns import PublishTurns
from quackmq.protocols.kafka.registry import API_VERSIONS_API, APIS
from quackmq.records.batch import Buffer
from quackmq.serving.budgets import SendBudget
from quackmq.serving.connection import Admission, ConnectionBounds, ServedConnection
from quackmq.serving.first_bytes import MistakenPeers, WireProtocol, recognize_protocol
from quackmq.serving.waiting_line import WaitingLine, is_too_slow

log = logging.getLogger(__name__)


class ServerContext(Admission, Protocol):
    """The part of the server that its connections use."""

    broker: Broker
    memory: ReceiveMemory
    #: Connections that wait until large requests release their memory.
    waiting_for_memory: WaitingLine
    send_budget: SendBudget
    mistaken_peers: MistakenPeers
    encoded_topics: EncodedTopics
    last_response: LastResponse
    publish_turns: PublishTurns

    @property
    def response_bytes(self) -> int:
        """The size that a response may have at the moment."""

    def node_for(self, host: str, port: int) -> Node:
        """Return this broker's node as advertised to a peer that connected to this address."""

    def wait_for_room(self, connection: Connection) -> None:
        """Call the connection's `pump` when the broker has room."""


class PendingResponse:
    """The slot of one response in its connection's order; see `api.ResponseSlot`."""

    __slots__ = ("_connection", "_correlation_id", "_flexible", "buffers", "done")

    def __init__(self, connection: Connection, correlation_id: int, is_flexible: bool) -> None:
        self._connection = connection
        self._correlation_id = correlation_id
        self._flexible = is_flexible
        self.buffers: list[Buffer] = []
        self.done = False

    def send(self, body: Sequence[Buffer]) -> None:
        size = len(body[0]) if len(body) == 1 else sum(map(len, body))
        self.buffers = [response_head(size, self._correlation_id, self._flexible), *body]
        self._finish()

    def skip(self) -> None:
        self._finish()

    def handle(self, request: Any) -> None:
        self._connection.resume(request)

    def disconnect(self, reason: str) -> None:
        self._connection.disconnect(reason)

    def _finish(self) -> None:
        """Mark the slot as done, so that its turn can come."""
        assert not self.done, "a request has one body"
        self.done = True
        self._connection.on_response_ready()


class QueuedRequest(NamedTuple):
    """A request that starts when its response is the next to be sent."""

    api: Api
    header: RequestHeader
    request: Any
    response: PendingResponse


class Connection(ServedConnection, asyncio.BufferedProtocol):
    """The connection of one Kafka client; see the module. It is the `Peer` of the calls that
    handlers get."""

    _server: ServerContext

    def __init__(self, server: ServerContext) -> None:
        super().__init__(server, server.send_budget)
        self._broker = server.broker
        self._frames = Frames(server.memory)
        self._responses: deque[PendingResponse] = deque()
        self._queue: deque[QueuedRequest] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._current: QueuedRequest | None = None
        #: The last request that waited without a task, and its wait.
        self._parked: tuple[QueuedRequest, Watch] | None = None
        self._client_id: bytes | None = None
        # Cached by version, because every request needs one.
        self._calls: dict[int, Call] = {}
        self._node = Node(0, "", 0)
        self._is_pumping = False
        #: Whether `pump` continues in a later turn of the loop (publish_turns.py).
        self._is_continuation_scheduled = False
        #: The request whose batches are being published in portions.
        self._publishing: PublishedInPortions | None = None
        self._is_flush_scheduled = False
        #: Loop clock time at which the incomplete request began to arrive.
        self.request_began_at: float | None = None

    # --- called by the transport -------------------------------------------------------------

    @property
    def bounds(self) -> ConnectionBounds:
        return ConnectionBounds(
            limits.KAFKA_WRITE_BUFFER_BYTES, limits.KAFKA_SEND_WAIT_MS, limits.KAFKA_LINGER_MS
        )

    def _on_opened(self) -> None:
        """Set the node that responses name: without an advertised address, it has the address that
        the client connected to."""
        own_host, own_port, *_ = self._transport.get_extra_info("sockname") or ("?", 0)
        self._node = self._server.node_for(own_host, own_port)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._frames.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if not self._has_ended and self._frames.received(nbytes):
            self.pump()

    def _on_writable(self) -> None:
        self.flush_soon()
        self.pump()

    def _on_lost(self) -> None:
        """Drop all requests and responses of a closed connection, cancel its waits, release its
        memory."""
        self._responses.clear()
        self._queue.clear()
        # Breaks a reference cycle: the connection is freed without the garbage collector.
        self._calls.clear()
        if self._worker is not None:
            self._worker.cancel()
        if self._parked is not None:
            _, watch = self._parked
            watch.cancel()
            self._parked = None
        self._frames.close()

    # --- called by the server and the handlers -----------------------------------------------

    def pump(self, *, has_room: bool = False) -> None:
        """Start as many received requests as may start now. With `has_room`, start at least one,
        even if the broker's count of pending bytes is too high.
        """
        # A request may be answered here, and its response calls `pump` again.
        if self._is_pumping or self._is_continuation_scheduled:
            return
        if self._transport is None and self._publishing is None:
            return
        self._is_pumping = True
        is_blocked = False
        frames = self._frames
        turns = self._server.publish_turns
        batches_left = budget = turns.batches_left
        try:
            while self._publishing is not None or (frames.has_bytes and frames.find_frame()):
                if batches_left <= 0:
                    is_blocked = self._is_continuation_scheduled = True
                    turns.wait(self._continue)
                    break
                if self._publishing is None:
                    is_blocked = not self._may_begin(has_room or not frames.is_produce)
                    if is_blocked:
                        break
                    self.request_began_at = None
                    has_room = False
                    self._begin_request(frames.next_frame())
                if self._publishing is None:
                    batches_left -= 1
                else:
                    batches_left -= self._publish_portion(self._publishing, batches_left)
        except ProtocolError as error:
            self._expel(str(error))
        except Exception:
            log.exception("a request of %s failed", self._caller.address)
            self.abort()
        finally:
            self._is_pumping = False
        if budget - batches_left > limits.KAFKA_FEW_BATCHES:
            turns.spend(budget - batches_left)
        frames.compact()
        if is_blocked or frames.has_bytes or not self._is_reading:
            self._update_reading(is_blocked)
        else:
            self.request_began_at = None  # the usual case: all requests were started

    def _continue(self) -> None:
        self._is_continuation_scheduled = False
        self.pump()

    def _publish_portion(self, request: PublishedInPortions, most: int) -> int:
        """Publish up to `most` batches of the request that was begun last; return their number."""
        self._publishing = None  # it does not continue after an error
        count = request.publish(most)
        if not request.is_finished:
            self._publishing = request
        return count

    def drain(self) -> None:
        """Accept no more requests, answer those that were accepted, then close."""
        self._is_draining = True
        if self._current is not None and self._current.api.may_wait and self._worker is not None:
            self._worker.cancel()
        if self._parked is not None:
            queued, watch = self._parked
            if not queued.response.done:
                watch.cancel()
                self.resume(queued.request)
        self.flush_soon()

    def resume(self, request: Any) -> None:
        """Let a task handle the request that has been waiting without one."""
        assert self._parked is not None
        queued, _ = self._parked
        self._queue.appendleft(queued._replace(request=request))
        self._parked = None
        self._start_worker()

    def _expel(self, reason: str) -> None:
        """Disconnect a peer that sent invalid bytes; log which port serves its protocol."""
        protocol = recognize_protocol(self._frames.opening)
        if protocol is None or protocol is WireProtocol.KAFKA:
            self.disconnect(reason)
            return
        self._server.mistaken_peers.report(self._caller.address, protocol, self._loop.time())
        self.abort()

    def _sweep(self, now: float) -> None:
        """Disconnect a peer whose request is still incomplete after the deadline."""
        wait_ms = limits.KAFKA_REQUEST_WAIT_MS
        if self.request_began_at is not None and (now - self.request_began_at) * 1000 > wait_ms:
            self.disconnect(f"a request was incomplete after {wait_ms} ms")

    def is_behind(self, now: float) -> bool:
        """Return whether memory is held for a request that arrives too slowly."""
        share = self._frames.received_share
        if self.request_began_at is None or share is None:
            return False
        elapsed_ms = (now - self.request_began_at) * 1000
        return is_too_slow(share, elapsed_ms, limits.KAFKA_PACE_MS, limits.KAFKA_REQUEST_WAIT_MS)

    @property
    def may_wait(self) -> bool:
        return not self._is_draining

    @property
    def response_bytes(self) -> int:
        return self._server.response_bytes

    @property
    def encoded_topics(self) -> EncodedTopics:
        return self._server.encoded_topics

    @property
    def last_response(self) -> LastResponse:
        return self._server.last_response

    # --- requests ---------------------------------------------------------------------------

    def _may_begin(self, has_room: bool = False) -> bool:
        """Return whether the next request may start. `has_room` skips the check of the pending
        bytes."""
        return (
            self._slow_since is None
            and not self._is_draining
            and len(self._responses) < limits.KAFKA_REQUESTS_IN_FLIGHT
            and (has_room or self._broker.pending_bytes <= shared_limits.PENDING_BYTES)
            and self._transport is not None
            and not self._transport.is_closing()
        )

    def _update_reading(self, is_blocked: bool) -> None:
        """Read, unless the next request may not start or has no memory. The event that removes the
        cause calls `pump` again.
        """
        transport = self._transport
        if transport is None or transport.is_closing() or self._has_ended:
            return
        if is_blocked and self._broker.pending_bytes > shared_limits.PENDING_BYTES:
            self._server.wait_for_room(self)
        if not is_blocked and not self._frames.reserve_memory():
            self._server.waiting_for_memory.add(self)
            is_blocked = True
        self._set_reading(not is_blocked)
        if is_blocked or not self._frames.has_bytes:
            self.request_began_at = None
        elif self.request_began_at is None:
            self.request_began_at = self._time()

    def _begin_request(self, frame: memoryview) -> None:
        """Decode a request, reserve the slot of its response, and start or queue it. Raise
        ProtocolError if its bytes are invalid or its version is not supported."""
        header = read_header(frame)
        api = APIS.get(header.api_key)
        if api is None or not api.first_version <= header.version <= api.last_version:
            self._refuse_version(header)
            return
        is_flexible = header.version >= api.flexible_from
        request = api.read(header.version, request_body(frame, header, is_flexible))
        response = PendingResponse(
            self, header.correlation_id, is_flexible and api.has_flexible_response
        )
        self._responses.append(response)
        if api.submit is not None:
            self._publishing = api.submit(
                self._call(header), request, response, self._frames.owns_last_frame
            )
            return
        if api.try_immediately is not None and len(self._responses) == 1 and self._worker is None:
            started = api.try_immediately(self._call(header), request, response)
            if isinstance(started, list):
                response.send(started)
                return
            if started is not None:
                self._parked = QueuedRequest(api, header, request, response), started
                return
        self._queue.append(QueuedRequest(api, header, request, response))
        self._start_worker()
        starts_now = self._worker is not None and self._current is None and len(self._queue) == 1
        if api.on_arrival is not None and not starts_now:
            api.on_arrival(self._call(header), request)

    def _refuse_version(self, header: RequestHeader) -> None:
        """Answer an unsupported version of ApiVersions with the versions that are supported, so
        that the client can ask again. Raise ProtocolError for any other API."""
        if header.api_key != API_VERSIONS:
            raise ProtocolError(
                f"version {header.version} of API {header.api_key} is not supported"
            )
        response = PendingResponse(self, header.correlation_id, is_flexible=False)
        self._responses.append(response)
        response.send([unsupported_api_versions(API_VERSIONS_API)])

    def _call(self, header: RequestHeader) -> Call:
        """Return the context in which a handler runs. It changes when the client sends another
        client id."""
        if header.client_id != self._client_id:
            self._client_id = header.client_id
            self._caller = replace(self._caller, client=header.client_id.decode(errors="replace"))
            self._calls.clear()
        call = self._calls.get(header.version)
        if call is None:
            call = Call(self._broker, self._caller, self._node, header.version, self)
            self._calls[header.version] = call
        return call

    # --- responses ---------------------------------------------------------------------------

    def on_response_ready(self) -> None:
        """Send finished responses: at once if only one is pending, otherwise in the next turn."""
        if len(self._responses) == 1 and not self._is_pumping:
            self._flush()
        else:
            self.flush_soon()

    def flush_soon(self) -> None:
        """Send in the loop's next turn, so that responses that are ready together share one
        write."""
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send the responses that are ready, up to the first that is not."""
        self._is_flush_scheduled = False
        if self._transport is None or self._transport.is_closing():
            return
        responses = self._responses
        buffers: list[Buffer] = []
        while responses and responses[0].done:
            buffers += responses.popleft().buffers
        if buffers:
            self._write(buffers)
        if self._is_draining and not responses and self._slow_since is None:
            self._end()
            return
        if self._queue:
            self._start_worker()
        if not self._is_reading:
            self.pump()

    def _end(self) -> None:
        """End the connection after the last response; let the peer close it."""
        if self._transport is not None and not self._has_ended:
            self._frames.close()
            self._finish()

    def _write(self, buffers: list[Buffer]) -> None:
        """Write small responses as one buffer; pass large ones on without a copy."""
        if sum(map(len, buffers)) <= limits.KAFKA_JOINED_BYTES:
            self._transport.write(b"".join(buffers))
        else:
            self._transport.writelines(buffers)

    def _start_worker(self) -> None:
        if self._worker is None and self._next_may_begin():
            self._worker = self._loop.create_task(self._run_worker())

    def _next_may_begin(self) -> bool:
        """Return whether the first queued request may start: all earlier responses are sent, and
        the peer reads them."""
        return (
            bool(self._queue)
            and self._responses[0] is self._queue[0].response
            and self._slow_since is None
            and self._transport is not None
        )

    async def _run_worker(self) -> None:
        """Handle the queued requests one after another, as long as the next may start."""
        try:
            while self._next_may_begin():
                self._current = self._queue.popleft()
                body = await self._handle(self._current)
                self._current.response.send(body)
        except Exception:
            log.exception("a request of %s failed", self._caller.address)
            self.abort()
        finally:
            self._current = None
            self._worker = None

    async def _handle(self, queued: QueuedRequest) -> Sequence[Buffer]:
        """Return the body of a response. A handler that waits is interrupted when the server
        closes, and called again: it then answers without waiting."""
        assert queued.api.handle is not None
        try:
            return await queued.api.handle(self._call(queued.header), queued.request)
        except asyncio.CancelledError:
            if not self._is_draining or self._transport is None or self._worker is None:
                raise
            self._worker.uncancel()
        # Interrupted because the server closes: handle it again, now without waiting.
        return await queued.api.handle(self._call(queued.header), queued.request)
