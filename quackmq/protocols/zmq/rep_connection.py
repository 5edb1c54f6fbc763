"""One peer of a REP socket: requests in, answers out.

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
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from quackmq.broker import Broker, Caller
from quackmq.errors import BrokerClosing, QuackError
from quackmq.model.topic import AppendResult
from quackmq.protocols.zmq import limits
from quackmq.protocols.zmq.codec import zmtp
from quackmq.protocols.zmq.connection import Door, Peer, large_bytes
from quackmq.protocols.zmq.queue_handlers import Answer, Asker, Begun, put_answer, refusal

#: A frame; or, of one that was not worth keeping, the error to be answered in its turn.
_Request = bytes | QuackError
#: Begins with what a frame asks for, in the language of a door.
Begin = Callable[[Broker, Asker, bytes], Begun | Answer]


class Connection(Peer):
    def __init__(self, door: Door, begin: Begin) -> None:
        super().__init__(door, zmtp.Decoder())
        self._begin_request = begin
        #: By envelope: what waits behind the request that is under way; mostly there is nothing.
        self._lines: dict[zmtp.Envelope | None, deque[_Request] | None] = {}
        self._requests = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waits: set[asyncio.Task[Any]] = set()

    # --- what the door calls ----------------------------------------------------------------

    def drain(self) -> None:
        """Take no more requests, answer those that were taken, then close."""
        self._draining = True
        for task in self._waits:
            task.cancel()
        self._end_if_done()

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

    # --- what it is made of -----------------------------------------------------------------

    def _introduction(self) -> bytes:
        return zmtp.ready()

    def _may_begin(self) -> bool:
        return (
            self._requests < limits.ZMQ_REQUESTS_IN_FLIGHT
            and self._slow_since is None
            and not self._draining
            and (not self._requests or self._door.has_room())
        )

    def _on_message(self, event: zmtp.Event) -> None:
        if isinstance(event, zmtp.Message):
            self._begin(event.envelope, event.content)
        elif isinstance(event, zmtp.Refused):
            self._begin(event.envelope, event.error)

    def _is_done(self) -> bool:
        return not self._requests

    def _on_gone(self) -> None:
        for line in self._lines.values():
            while line:
                self._forget_request(line.popleft())
        for task in self._waits:
            task.cancel()

    # --- requests ---------------------------------------------------------------------------

    def _begin(self, envelope: zmtp.Envelope | None, request: _Request) -> None:
        self._requests += 1
        self._door.begun(_size_bytes(request))
        self._release_reserved()
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
        begun = self._begin_request(self._broker, self, request)
        if isinstance(begun, asyncio.Future):
            if isinstance(begun, asyncio.Task):
                self._keep(begun)  # the loop alone would let go of it
            begun.add_done_callback(partial(self._on_put, envelope, request))
        elif isinstance(begun, tuple):
            self._answer(envelope, request, begun)
        else:
            self._work_on(self._serve(envelope, request, begun))

    def _on_put(
        self, envelope: zmtp.Envelope | None, frame: bytes, put: asyncio.Future[AppendResult]
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
            await (self._takes_answers if is_slow else self._budgets.sendable).wait()
        self._answer(envelope, request, answered)

    def _may_send(self, answered: Answer) -> bool:
        if self._transport is None:
            return True  # it goes nowhere
        is_large = len(answered[1]) > limits.ZMQ_WRITE_BUFFER_BYTES
        return self._slow_since is None and (not is_large or self._budgets.sendable.is_set())

    def _write(self, envelope: zmtp.Envelope | None, answered: Answer) -> None:
        if self._transport is None or self._has_ended:
            return
        words, content = answered
        head = zmtp.answer_head(envelope, len(words) + len(content)) + words
        if len(content) <= limits.ZMQ_JOINED_BYTES:
            self._transport.write(head + content)
        else:
            self._transport.writelines((head, content))


def _size_bytes(request: _Request) -> int:
    return large_bytes(len(request)) if isinstance(request, bytes) else 0
