"""A connection that the proxy makes: as a REQ socket, to the REP socket of a client.

One request at a time, and its answer. The connection is made by the first request, kept for the
next ones, and closed when it was not needed for a while, or when an answer did not come in time: a
late one must not be taken for that of another request.

The time for an answer counts from when the client has the request: a large one may take long over a
slow link, and begun anew it would never arrive. What counts is that bytes leave for the client, not
that they have left this program, since the kernel takes some megabytes at once.

Promised: nothing takes longer than its time, and an address where nobody is costs a descriptor for
that time. Unreachable tells of whatever goes wrong.

Who may call: the loop.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from typing import Final, NamedTuple, cast

from quackmq import limits as shared_limits
from quackmq.errors import ProtocolError, Unreachable
from quackmq.loop_clock import loop_clock
from quackmq.protocols.zmq import limits
from quackmq.protocols.zmq.codec import zmtp

#: How often it is looked, within the time for an answer, whether bytes still leave.
_LOOKS: Final = 4


class Target(NamedTuple):
    """Where a client listens. The host is an address, not a name."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


class Outgoing:
    def __init__(self, target: Target) -> None:
        self.target = target
        self._lock = asyncio.Lock()
        self._large = asyncio.Lock()
        self._exchange: _Exchange | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def reach(self) -> None:
        """Connect, unless that was done. Unreachable."""
        async with self._lock:
            await self._connected()
            self._rest()

    async def ask(self, words: bytes, content: bytes) -> bytes:
        """The answer to a request, which is both together. Unreachable."""
        async with self._lock:
            exchange = await self._connected()
            self._rest_no_more()
            try:
                answer = await self._answered(exchange, words, content)
            except BaseException:
                self._hang_up()
                raise
            self._rest()
            return answer

    async def ask_large(self, words: bytes, content: bytes, turns: asyncio.Semaphore) -> bytes:
        """The same with one of the turns that all clients share: one at a time, so that a client
        that is slow, and has many, leaves the others for others."""
        async with self._large, turns:
            return await self.ask(words, content)

    def close(self) -> None:
        self._is_closed = True
        self._hang_up()

    async def _connected(self) -> _Exchange:
        if self._is_closed:
            raise Unreachable(f"the connection to {self.target} is closed")
        if self._exchange is None or self._exchange.is_lost:
            self._exchange = await self._connect()
        return self._exchange

    async def _connect(self) -> _Exchange:
        loop = asyncio.get_running_loop()
        exchange: _Exchange | None = None
        try:
            async with loop_clock().timeout(shared_limits.PROXY_CONNECT_MS / 1000):
                _, exchange = await loop.create_connection(_Exchange, *self.target)
                await exchange.ready
                if self._is_closed:
                    raise Unreachable(f"the connection to {self.target} was closed meanwhile")
                return exchange
        except BaseException as error:
            if exchange is not None:
                exchange.abort()
            if isinstance(error, TimeoutError):
                raise Unreachable(
                    f"nobody at {self.target} in {shared_limits.PROXY_CONNECT_MS} ms"
                ) from None
            if isinstance(error, OSError):
                raise Unreachable(f"nobody at {self.target}: {error.strerror or error}") from None
            raise

    async def _answered(self, exchange: _Exchange, words: bytes, content: bytes) -> bytes:
        """Looks are counted, not time: if this process stood still, nobody is given up for it."""
        size = left = len(words) + len(content)
        answer_ms = limits.PROXY_ANSWER_MS
        most_ms = answer_ms + size * 1000 // limits.PROXY_SLOWEST_BYTES
        look_ms = answer_ms / _LOOKS
        answer = exchange.ask(words, content)
        quiet = 0
        for _ in range(round(most_ms / look_ms) + _LOOKS):
            await asyncio.wait((answer,), timeout=look_ms / 1000)
            if answer.done():
                return answer.result()
            before, left = left, exchange.unsent_bytes()
            quiet = 0 if left < before else quiet + 1
            if quiet == _LOOKS:
                break
        else:
            raise Unreachable(f"{self.target} is too slow: {size - left} of {size} bytes are there")
        untaken = f", nor take any of {left} bytes" if left else ""
        raise Unreachable(f"{self.target} did not answer in {answer_ms} ms{untaken}")

    def _rest(self) -> None:
        """Close it, if it is not needed again soon."""
        self._rest_no_more()
        if self._is_closed:
            return  # the moment that the answer came
        loop = asyncio.get_running_loop()
        self._idle = loop.call_later(limits.PROXY_IDLE_MS / 1000, self._hang_up)

    def _rest_no_more(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _hang_up(self) -> None:
        self._rest_no_more()
        if self._exchange is not None:
            self._exchange.abort()
            self._exchange = None


class _Exchange(asyncio.Protocol):
    def __init__(self) -> None:
        self._decoder = zmtp.Decoder(zmtp.ANSWERING)
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[bytes] | None = None
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_lost = False
        self._is_slow = False

    def ask(self, words: bytes, content: bytes) -> asyncio.Future[bytes]:
        if self._transport is None:
            raise Unreachable("the connection was lost")
        self._answer = asyncio.get_running_loop().create_future()
        head = zmtp.answer_head((), len(words) + len(content)) + words
        if len(content) <= limits.ZMQ_JOINED_BYTES:
            self._transport.write(head + content)
        else:
            self._transport.writelines((head, content))
        return self._answer

    def unsent_bytes(self) -> int:
        """What the client does not have yet: here, in the kernel, or on the way."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return 0
        unsent = transport.get_write_buffer_size()
        sock = transport.get_extra_info("socket")
        try:
            (queued,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))
        except OSError:  # a system that does not tell
            queued = 0
        return unsent + cast(int, queued)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- what the transport calls -----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Without waiting for theirs: a peer may want to know who asks before it says who it is.
        self._transport.write(zmtp.GREETING + zmtp.ready("REQ"))

    def data_received(self, data: bytes) -> None:
        self._decoder.receive(data)
        try:
            while (event := self._decoder.next_event()) is not None:
                self._on_event(event)
            if self._decoder.claimed_bytes > limits.PROXY_ANSWER_BYTES:
                raise ProtocolError(f"an answer of {self._decoder.claimed_bytes} bytes")
        except ProtocolError as error:
            self._fail(Unreachable(f"it does not speak as a REP socket does: {error}"))
            self.abort()

    def pause_writing(self) -> None:
        self._is_slow = True

    def resume_writing(self) -> None:
        self._is_slow = False

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._fail(Unreachable("the connection was lost"))

    def _on_event(self, event: zmtp.Event) -> None:
        assert self._transport is not None
        if isinstance(event, zmtp.Ready):
            if not self.ready.done():
                self.ready.set_result(None)
        elif isinstance(event, zmtp.Ping):
            # Who takes nothing needs none, and must not be able to have them pile up here.
            if not self._is_slow:
                self._transport.write(zmtp.pong(event.context))
        elif isinstance(event, zmtp.Refused):
            raise ProtocolError(str(event.error))
        elif isinstance(event, zmtp.Message):
            if self._answer is None or self._answer.done():
                raise ProtocolError("it answers what nobody asked")
            self._answer.set_result(event.content)

    def _fail(self, error: Unreachable) -> None:
        self.is_lost = True
        for waiting in (self.ready, self._answer):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # nobody may be left to hear of it
