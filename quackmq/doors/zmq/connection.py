"""One peer: requests in, answers out.

Requests with the same envelope (all those of a DEALER, say, or of one client behind a proxy) are
done one after the other, in the order in which they came; those with different envelopes side by
side. Beyond a number of requests nothing more is read from the peer, and nothing is begun while it
does not take its answers: TCP then holds it up. Each peer may have one request under way, whatever
the others have.

A peer that goes takes with it what it waits for. What it has asked for and has begun is done.

Who may call: the loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, cast

from quackmq import limits
from quackmq.broker import Broker, Caller
from quackmq.doors.zmq.requests import Answer, begin, put_answer, refusal
from quackmq.errors import BrokerClosing, ProtocolError, QuackError
from quackmq.topic import Appended
from quackmq.wire import zmtp

log = logging.getLogger(__name__)

#: A frame; or, of one that was not worth keeping, the error to be answered in its turn.
_Request = bytes | QuackError


class Door(Protocol):
    """What a connection needs of its door."""

    broker: Broker
    #: Into which every connection receives, and takes out what came before it returns.
    scratch: memoryview
    #: Set while large answers may be sent.
    sendable: asyncio.Event

    def opened(self, connection: Connection) -> bool:
        """Whether it may stay."""

    def closed(self, connection: Connection) -> None: ...

    def has_room(self) -> bool:
        """Whether another request may begin."""

    def begun(self, large_bytes: int) -> None:
        """A request, with so many bytes beyond those that are free."""

    def done(self, large_bytes: int) -> None: ...

    def reserve(self, large_bytes: int) -> bool:
        """Memory for a request that has begun to come; False if there is none now."""

    def release(self, large_bytes: int) -> None: ...

    def wants_room(self, connection: Connection) -> None:
        """To be pumped when there is room, or memory."""

    def unsent(self, change_bytes: int) -> None:
        """So many more, or fewer, bytes lie here that peers have not taken."""


class Connection(asyncio.BufferedProtocol):
    def __init__(self, door: Door) -> None:
        self._loop = asyncio.get_running_loop()
        self._door = door
        self._broker = door.broker
        self._decoder = zmtp.Decoder()
        self._transport: asyncio.Transport | None = None
        self._caller = Caller()
        #: By envelope: what waits behind the request that is under way; mostly there is nothing.
        self._lines: dict[zmtp.Envelope | None, deque[_Request] | None] = {}
        self._requests = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waits: set[asyncio.Task[Any]] = set()
        self._reserved_bytes = 0
        self._unsent_bytes = 0
        self._takes_answers = asyncio.Event()
        self._takes_answers.set()
        self._reads = True
        self._pumping = False
        self._is_ready = False
        self._draining = False
        self._has_ended = False
        self._opened_at = self._loop.time()
        #: When what is coming began to come; when the peer stopped taking answers.
        self._begun_at: float | None = self._opened_at
        self._slow_since: float | None = None
        #: How long the peer says that it is silent at the most, and when it was heard last.
        self._ttl_ms = 0
        self._heard_at = 0.0

    # --- what the transport calls -----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        host, port, *_ = transport.get_extra_info("peername") or ("?", 0)
        self._caller = Caller(address=f"{host}:{port}")
        # A peer that is gone without a word is found out by TCP, in its own time.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        transport.set_write_buffer_limits(high=limits.ZMQ_WRITE_BUFFER_BYTES, low=0)
        if self._door.opened(self):
            transport.write(zmtp.GREETING)
        else:
            self.disconnect("no more connections are taken")

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._door.scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._has_ended:
            return
        self._decoder.receive(bytes(self._door.scratch[:nbytes]))
        if self._ttl_ms:
            self._heard_at = self._loop.time()
        self.pump()

    def pause_writing(self) -> None:
        assert self._transport is not None
        self._takes_answers.clear()
        self._slow_since = self._loop.time()
        self._unsent_bytes = self._transport.get_write_buffer_size()
        self._door.unsent(self._unsent_bytes)

    def resume_writing(self) -> None:
        self._forget_unsent()
        self.pump()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._forget_unsent()
        for line in self._lines.values():
            while line:
                self._forget_request(line.popleft())
        for task in self._waits:
            task.cancel()
        self._door.release(self._reserved_bytes)
        self._reserved_bytes = 0
        self._door.closed(self)

    def _forget_unsent(self) -> None:
        self._takes_answers.set()
        self._slow_since = None
        self._door.unsent(-self._unsent_bytes)
        self._unsent_bytes = 0

    # --- what the door calls ----------------------------------------------------------------

    def pump(self) -> None:
        """Begin as many of the requests that have come as may begin now, and read on if all did."""
        # What is begun here may be answered here, which would pump again.
        if self._transport is None or self._has_ended or self._pumping:
            return
        self._pumping = True
        try:
            may_go_on = self._begin_some()
        except ProtocolError as error:
            if not self._is_ready:
                self._transport.write(zmtp.error(str(error)))
            self.disconnect(str(error))
            return
        finally:
            self._pumping = False
        self._regulate(may_go_on)

    def drain(self) -> None:
        """Take no more requests, answer those that were taken, then close."""
        self._draining = True
        for task in self._waits:
            task.cancel()
        self._end_if_done()

    def disconnect(self, reason: str) -> None:
        if self._transport is not None and not self._transport.is_closing():
            log.warning("%s disconnected: %s", self._caller.address, reason)
            self._has_ended = True
            # What is still to be sent is a greeting or an error at the most, if the peer is well.
            if self._slow_since is None:
                self._transport.close()
                self._loop.call_later(limits.ZMQ_LINGER_MS / 1000, self.abort)
            else:
                self._transport.abort()

    def abort(self) -> None:
        """Without another word, also where the peer takes nothing."""
        if self._transport is not None:
            self._transport.abort()

    def look(self, now: float, memory_is_scarce: bool) -> None:
        """Disconnect a peer that has been silent, or slow, for too long."""
        if self._has_ended:
            return
        if not self._is_ready and _passed_ms(self._opened_at, now) > limits.ZMQ_HANDSHAKE_MS:
            self.disconnect(f"it had not introduced itself after {limits.ZMQ_HANDSHAKE_MS} ms")
        elif _passed_ms(self._begun_at, now) > limits.ZMQ_REQUEST_WAIT_MS:
            self.disconnect(f"a request was not whole after {limits.ZMQ_REQUEST_WAIT_MS} ms")
        elif memory_is_scarce and self._is_behind(now):
            self.disconnect("a large request comes too slowly, others wait for memory")
        elif _passed_ms(self._slow_since, now) > limits.ZMQ_SEND_WAIT_MS:
            self.disconnect(f"it took no answers for {limits.ZMQ_SEND_WAIT_MS} ms")
        elif self._ttl_ms and self._reads and _passed_ms(self._heard_at, now) > self._ttl_ms:
            self.disconnect(f"it was not heard for {self._ttl_ms} ms, as it had said it would be")

    # --- what requests call -----------------------------------------------------------------

    def caller(self, client: str) -> Caller:
        if client != self._caller.client:
            self._caller = Caller(address=self._caller.address, client=client)
        return self._caller

    @contextmanager
    def waiting(self) -> Iterator[None]:
        closing = BrokerClosing("the broker is closing: ask again when it is back")
        task = asyncio.current_task()
        assert task is not None, "requests are tasks"
        if self._draining:
            raise closing
        self._waits.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._transport is not None and not self._draining:
                raise
            task.uncancel()
            raise closing from None
        finally:
            self._waits.discard(task)

    # --- requests ---------------------------------------------------------------------------

    def _may_begin(self) -> bool:
        return (
            self._requests < limits.ZMQ_REQUESTS_IN_FLIGHT
            and self._slow_since is None
            and not self._draining
            and (not self._requests or self._door.has_room())
        )

    def _begin_some(self) -> bool:
        """Whether that was all there is. What is answered at once does not count as under way, so
        the number is bounded here too: others are to have their turn."""
        for _ in range(limits.ZMQ_REQUESTS_IN_FLIGHT):
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
        assert self._transport is not None
        if isinstance(event, zmtp.Message):
            self._begin(event.envelope, event.content)
        elif isinstance(event, zmtp.Refused):
            self._begin(event.envelope, event.error)
        elif isinstance(event, zmtp.Ping):
            self._ttl_ms = event.ttl_ms
            self._heard_at = self._loop.time()
            self._transport.write(zmtp.pong(event.context))
        else:
            self._is_ready = True
            self._transport.write(zmtp.ready())

    def _begin(self, envelope: zmtp.Envelope | None, request: _Request) -> None:
        self._requests += 1
        self._door.begun(_size_bytes(request))
        if self._reserved_bytes:
            self._door.release(self._reserved_bytes)
            self._reserved_bytes = 0
        if envelope not in self._lines:
            self._lines[envelope] = None
            self._start(envelope, request)
        elif (line := self._lines[envelope]) is None:
            self._lines[envelope] = deque((request,))
        else:
            line.append(request)

    def _start(self, envelope: zmtp.Envelope | None, request: _Request) -> None:
        """The request whose turn it is among those with its envelope."""
        if isinstance(request, QuackError):
            self._answer(envelope, request, refusal(request))
            return
        begun = begin(self._broker, self, request)
        if isinstance(begun, asyncio.Future):
            if isinstance(begun, asyncio.Task):
                self._keep(begun)  # the loop alone would let go of it
            begun.add_done_callback(partial(self._on_put, envelope, request))
        elif isinstance(begun, tuple):
            self._answer(envelope, request, begun)
        else:
            self._work_on(self._serve(envelope, request, begun))

    def _on_put(
        self, envelope: zmtp.Envelope | None, frame: bytes, put: asyncio.Future[Appended]
    ) -> None:
        self._answer(envelope, frame, put_answer(frame, put))

    async def _serve(
        self, envelope: zmtp.Envelope | None, frame: bytes, begun: Coroutine[Any, Any, Answer]
    ) -> None:
        self._answer(envelope, frame, await begun)

    def _work_on(self, work: Coroutine[Any, Any, None]) -> None:
        self._keep(self._loop.create_task(work))

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _forget_request(self, request: _Request) -> None:
        was_held_up = not self._reads
        self._requests -= 1
        self._door.done(_size_bytes(request))
        if was_held_up:
            self.pump()

    def _regulate(self, may_go_on: bool) -> None:
        """Read on, unless a request is held up, or one comes for which there is no memory; whoever
        changes that pumps again."""
        if may_go_on and self._reads and not self._decoder.is_amid:
            self._begun_at = None  # as mostly: all that came was taken
            return
        if may_go_on:
            claimed = _large_bytes(self._decoder.claimed_bytes)
            if claimed > self._reserved_bytes:
                may_go_on = self._door.reserve(claimed)
                self._reserved_bytes = claimed if may_go_on else 0
            if not may_go_on:
                self._door.wants_room(self)
        elif not self._door.has_room():
            self._door.wants_room(self)
        self._read(may_go_on)
        if not may_go_on or not self._decoder.is_amid:
            self._begun_at = None
        elif self._begun_at is None:
            self._begun_at = self._loop.time()

    def _read(self, reads: bool) -> None:
        if self._transport is None or reads == self._reads or self._transport.is_closing():
            return
        self._reads = reads
        if reads:
            self._heard_at = self._loop.time()
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _is_behind(self, now: float) -> bool:
        claimed = self._decoder.claimed_bytes
        passed_ms = _passed_ms(self._begun_at, now)
        if not claimed or passed_ms < limits.ZMQ_PACE_MS:
            return False
        return self._decoder.received_bytes / claimed < passed_ms / limits.ZMQ_REQUEST_WAIT_MS

    # --- answers ----------------------------------------------------------------------------

    def _answer(self, envelope: zmtp.Envelope | None, request: _Request, answered: Answer) -> None:
        """Send an answer, or see to it that it is sent when the peer takes it; then the next of the
        same envelope has its turn."""
        if not self._may_send(answered):
            self._work_on(self._answer_later(envelope, request, answered))
            return
        self._write(envelope, answered)
        line = self._lines[envelope]
        if line:
            # In the loop's next turn, for there may be many, and what is begun may be done at once.
            self._loop.call_soon(self._start, envelope, line.popleft())
        else:
            del self._lines[envelope]
        self._forget_request(request)
        self._end_if_done()

    async def _answer_later(
        self, envelope: zmtp.Envelope | None, request: _Request, answered: Answer
    ) -> None:
        while not self._may_send(answered):
            is_slow = self._slow_since is not None
            await (self._takes_answers if is_slow else self._door.sendable).wait()
        self._answer(envelope, request, answered)

    def _may_send(self, answered: Answer) -> bool:
        if self._transport is None:
            return True  # it goes nowhere
        is_large = len(answered[1]) > limits.ZMQ_WRITE_BUFFER_BYTES
        return self._slow_since is None and (not is_large or self._door.sendable.is_set())

    def _write(self, envelope: zmtp.Envelope | None, answered: Answer) -> None:
        if self._transport is None or self._has_ended:
            return
        words, content = answered
        head = zmtp.answer_head(envelope, len(words) + len(content)) + words
        if len(content) <= limits.ZMQ_JOINED_BYTES:
            self._transport.write(head + content)
        else:
            self._transport.writelines((head, content))

    def _end_if_done(self) -> None:
        """Once everything is answered: say that this is the end, and let the peer hang up, for who
        closes before having read everything takes back what was sent."""
        if not self._draining or self._requests or self._has_ended or self._transport is None:
            return
        self._has_ended = True
        transport = self._transport
        if not self._is_ready or transport.is_closing():
            transport.close()
            return
        transport.write_eof()
        self._read(True)
        self._loop.call_later(limits.ZMQ_LINGER_MS / 1000, transport.close)


def _size_bytes(request: _Request) -> int:
    return _large_bytes(len(request)) if isinstance(request, bytes) else 0


def _large_bytes(size: int) -> int:
    """What of a request counts as memory to be set aside."""
    return size if size > limits.ZMQ_UNRESERVED_BYTES else 0


def _passed_ms(since: float | None, now: float) -> float:
    return 0.0 if since is None else (now - since) * 1000
