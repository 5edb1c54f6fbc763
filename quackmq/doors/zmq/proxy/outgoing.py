"""A connection that the proxy makes: as a REQ socket, to the REP socket of a client.

One request at a time, and its answer. The connection is made by the first request, kept for the
next ones, and closed when it was not needed for a while, or when an answer did not come in time: a
late one must not be taken for that of another request.

Promised: nothing takes longer than its time, and an address where nobody is costs a descriptor for
that time. Unreachable tells of whatever goes wrong.

Who may call: the loop.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple, cast

from quackmq import limits
from quackmq.errors import ProtocolError, Unreachable
from quackmq.wire import zmtp


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
        self._exchange: _Exchange | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def reach(self) -> None:
        """Connect, unless that was done. Unreachable."""
        async with self._lock:
            await self._connected()

    async def ask(self, words: bytes, content: bytes) -> bytes:
        """The answer to a request, which is both together. Unreachable."""
        async with self._lock:
            exchange = await self._connected()
            try:
                async with asyncio.timeout(limits.PROXY_ANSWER_MS / 1000):
                    return await exchange.ask(words, content)
            except TimeoutError:
                self._hang_up()
                raise Unreachable(
                    f"{self.target} did not answer in {limits.PROXY_ANSWER_MS} ms"
                ) from None
            except BaseException:
                self._hang_up()
                raise

    def close(self) -> None:
        self._is_closed = True
        self._hang_up()

    async def _connected(self) -> _Exchange:
        if self._is_closed:
            raise Unreachable(f"the connection to {self.target} is closed")
        if self._exchange is None or self._exchange.is_lost:
            self._exchange = await self._connect()
        self._rest()
        return self._exchange

    async def _connect(self) -> _Exchange:
        loop = asyncio.get_running_loop()
        exchange: _Exchange | None = None
        try:
            async with asyncio.timeout(limits.PROXY_CONNECT_MS / 1000):
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
                    f"nobody at {self.target} in {limits.PROXY_CONNECT_MS} ms"
                ) from None
            if isinstance(error, OSError):
                raise Unreachable(f"nobody at {self.target}: {error.strerror or error}") from None
            raise

    def _rest(self) -> None:
        """Close it, if it is not needed again soon."""
        if self._idle is not None:
            self._idle.cancel()
        loop = asyncio.get_running_loop()
        self._idle = loop.call_later(limits.PROXY_IDLE_MS / 1000, self._hang_up)

    def _hang_up(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
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

    async def ask(self, words: bytes, content: bytes) -> bytes:
        if self._transport is None:
            raise Unreachable("the connection was lost")
        self._answer = asyncio.get_running_loop().create_future()
        head = zmtp.answer_head((), len(words) + len(content)) + words
        if len(content) <= limits.ZMQ_JOINED_BYTES:
            self._transport.write(head + content)
        else:
            self._transport.writelines((head, content))
        return await self._answer

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

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._fail(Unreachable("the connection was lost"))

    def _on_event(self, event: zmtp.Event) -> None:
        assert self._transport is not None
        if isinstance(event, zmtp.Ready):
            if not self.ready.done():
                self.ready.set_result(None)
        elif isinstance(event, zmtp.Ping):
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
