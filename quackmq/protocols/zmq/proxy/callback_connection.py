"""A connection that the proxy makes, as a REQ socket, to the REP socket of a client.

It carries one request and its reply at a time. The first request connects; further requests reuse
the connection. It is closed when it was idle for some time. It is also closed when a reply did not
come in time, because a late reply must not be taken for the reply to the next request.

The deadline for a reply begins when the client has received the request. A large request may take
long over a slow link, and if it were restarted it would never arrive. Bytes in the kernel's send
buffer count as not yet received, because the kernel accepts some megabytes at once.

Promises: no operation exceeds its deadline. An unreachable address costs one file descriptor until
the deadline. Every failure raises Unreachable.

Call it only from the event loop.
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

#: Number of checks, within the deadline for a reply, whether bytes are still being sent.
_CHECKS: Final = 4


class Target(NamedTuple):
    """The address on which a client listens. `host` is an IP address, not a name."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


class CallbackConnection:
    """The address of one client, and the connection to it while there is one."""

    def __init__(self, target: Target) -> None:
        self.target = target
        #: Held during a request: one at a time.
        self._request_lock = asyncio.Lock()
        #: Held by the large request that is running or waits for a slot.
        self._large_request_lock = asyncio.Lock()
        self._exchange: _Exchange | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def reach(self) -> None:
        """Connect if there is no connection. Raise Unreachable if that fails."""
        async with self._request_lock:
            await self._ensure_connected()
            self._start_idle_timer()

    async def request(self, words: bytes, content: bytes) -> bytes:
        """Send a request of `words` and `content`; return the reply. Raise Unreachable."""
        async with self._request_lock:
            exchange = await self._ensure_connected()
            self._stop_idle_timer()
            try:
                reply = await self._exchange_request(exchange, words, content)
            except BaseException:
                # Also after a cancellation: the late reply must not be taken for the next one.
                self._disconnect()
                raise
            self._start_idle_timer()
            return reply

    async def request_large(
        self, words: bytes, content: bytes, large_slots: asyncio.Semaphore
    ) -> bytes:
        """Send a large request like `request`, holding one of the `large_slots` of all clients.

        A client uses at most one slot, so a slow client with many messages leaves the other slots
        free.
        """
        async with self._large_request_lock, large_slots:
            return await self.request(words, content)

    def close(self) -> None:
        self._is_closed = True
        self._disconnect()

    async def _ensure_connected(self) -> _Exchange:
        """Return the connection; connect if there is none or it is lost. Raise Unreachable."""
        if self._is_closed:
            raise Unreachable(f"the connection to {self.target} is closed")
        if self._exchange is None or self._exchange.is_lost:
            self._exchange = await self._connect()
        return self._exchange

    async def _connect(self) -> _Exchange:
        """Connect, and wait for the client's READY. Raise Unreachable if that fails or takes too
        long.
        """
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
            # Also after a cancellation: no open connection may be left behind.
            if exchange is not None:
                exchange.abort()
            if isinstance(error, TimeoutError):
                raise Unreachable(
                    f"nobody at {self.target} in {shared_limits.PROXY_CONNECT_MS} ms"
                ) from None
            if isinstance(error, OSError):
                raise Unreachable(f"nobody at {self.target}: {error.strerror or error}") from None
            raise

    async def _exchange_request(self, exchange: _Exchange, words: bytes, content: bytes) -> bytes:
        """Send a request and wait for its reply, as long as the client receives bytes.

        The wait is a number of checks, not a time. So a pause of this process does not make the
        client look silent.
        """
        size_bytes = unsent_bytes = len(words) + len(content)
        reply_ms = limits.PROXY_ANSWER_MS
        most_ms = reply_ms + size_bytes * 1000 // limits.PROXY_SLOWEST_BYTES
        check_ms = reply_ms / _CHECKS
        reply = exchange.send(words, content)
        idle_checks = 0
        # The additional checks are for the reply, after the last bytes were received.
        for _ in range(round(most_ms / check_ms) + _CHECKS):
            await asyncio.wait((reply,), timeout=check_ms / 1000)
            if reply.done():
                return reply.result()
            unsent_before, unsent_bytes = unsent_bytes, exchange.unsent_bytes()
            idle_checks = 0 if unsent_bytes < unsent_before else idle_checks + 1
            if idle_checks == _CHECKS:
                break
        else:
            sent_bytes = size_bytes - unsent_bytes
            raise Unreachable(
                f"{self.target} is too slow: it has received {sent_bytes} of {size_bytes} bytes"
            )
        unread = f", and read none of {unsent_bytes} bytes" if unsent_bytes else ""
        raise Unreachable(f"{self.target} did not answer in {reply_ms} ms{unread}")

    def _start_idle_timer(self) -> None:
        """Close the connection after some time, unless another request comes before."""
        self._stop_idle_timer()
        if self._is_closed:
            return  # it was closed at the moment when the reply came
        loop = asyncio.get_running_loop()
        self._idle_timer = loop.call_later(limits.PROXY_IDLE_MS / 1000, self._disconnect)

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _disconnect(self) -> None:
        self._stop_idle_timer()
        if self._exchange is not None:
            self._exchange.abort()
            self._exchange = None


class _Exchange(asyncio.Protocol):
    """The asyncio protocol of one TCP connection to a client."""

    def __init__(self) -> None:
        self._decoder = zmtp.EnvelopeDecoder(zmtp.REPLYING_SOCKETS)
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[bytes] | None = None
        #: Done when the client has sent its READY command.
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_lost = False
        self._is_slow = False

    def send(self, words: bytes, content: bytes) -> asyncio.Future[bytes]:
        """Send a request; return the future of its reply. Raise Unreachable if disconnected."""
        if self._transport is None:
            raise Unreachable("the connection was lost")
        self._reply = asyncio.get_running_loop().create_future()
        head = zmtp.reply_head((), len(words) + len(content)) + words
        if len(content) <= limits.ZMQ_JOINED_BYTES:
            self._transport.write(head + content)
        else:
            self._transport.writelines((head, content))
        return self._reply

    def unsent_bytes(self) -> int:
        """Return the bytes that the client has not received: in this process, in the kernel, or in
        the network.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return 0
        buffered = transport.get_write_buffer_size()
        sock = transport.get_extra_info("socket")
        try:
            (queued,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))
        except OSError:  # the operating system does not report it
            queued = 0
        return buffered + cast(int, queued)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- called by the transport ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # READY is sent immediately: some peers wait for our READY before they send their own.
        self._transport.write(zmtp.GREETING + zmtp.ready("REQ"))

    def data_received(self, data: bytes) -> None:
        """Decode received bytes. Close the connection if the peer is no REP socket."""
        self._decoder.receive(data)
        try:
            while (event := self._decoder.next_event()) is not None:
                self._on_event(event)
            if self._decoder.announced_bytes > limits.PROXY_ANSWER_BYTES:
                raise ProtocolError(f"a reply of {self._decoder.announced_bytes} bytes")
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
        """Handle READY, a heartbeat or a reply. Raise ProtocolError for anything unexpected."""
        assert self._transport is not None
        if isinstance(event, zmtp.Ready):
            if not self.ready.done():
                self.ready.set_result(None)
        elif isinstance(event, zmtp.Ping):
            # A peer that reads nothing gets no PONG: otherwise PONGs would fill our memory.
            if not self._is_slow:
                self._transport.write(zmtp.pong(event.context))
        elif isinstance(event, zmtp.Refused):
            raise ProtocolError(str(event.error))
        elif isinstance(event, zmtp.Message):
            if self._reply is None or self._reply.done():
                raise ProtocolError("a reply came without a request")
            self._reply.set_result(event.content)

    def _fail(self, error: Unreachable) -> None:
        """Mark the connection as lost. Tasks that wait for it get `error`."""
        self.is_lost = True
        for future in (self.ready, self._reply):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # mark it as retrieved: perhaps no task waits for it
