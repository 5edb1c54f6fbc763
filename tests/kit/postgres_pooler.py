"""A proxy that pools transactions, as PgBouncer does with `pool_mode = transaction`.

A client gets a session of the server with each request, and gives it back when the server is ready
for the next one outside of a transaction. The session that was given back last is lent first.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

#: How the protocol's version 3.0 begins, and how a client asks for encryption.
_VERSION = 196608
_SSL_REQUEST = 80877103
_LENGTH = struct.Struct("!I")
_READY_FOR_QUERY, _IDLE = b"Z", b"I"

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Pooler:
    """A proxy before one server. Not thread-safe: call from the event loop."""

    def __init__(self, server_port: int, max_sessions: int) -> None:
        self._server_port = server_port
        #: How many more sessions may be opened.
        self._left = max_sessions
        self._idle: asyncio.LifoQueue[Streams] = asyncio.LifoQueue()
        self._greeting = b""
        self._opened: list[asyncio.StreamWriter] = []

    async def serve(self, client: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client until it leaves."""
        self._opened.append(writer)
        try:
            startup = await _read_startup(client, writer)
            if self._left > 0:
                await self._open(startup)
            # The greeting of a session is passed on, so that it need not be made up.
            writer.write(self._greeting)
            while True:
                await self._serve_request(client, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    def close(self) -> None:
        for writer in self._opened:
            writer.close()

    async def _serve_request(
        self, client: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Lend a session for one transaction; wait until there is one."""
        message = await _read_message(client)
        session = await self._idle.get()
        session[1].write(message)
        requests = asyncio.create_task(_copy(client, session[1]))
        try:
            while True:
                answer = await _read_message(session[0])
                writer.write(answer)
                if answer[:1] == _READY_FOR_QUERY and answer[-1:] == _IDLE:
                    self._idle.put_nowait(session)
                    return
        finally:
            requests.cancel()
            await asyncio.wait([requests])

    async def _open(self, startup: bytes) -> None:
        """Open one more session of the server."""
        self._left -= 1
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        self._opened.append(writer)
        writer.write(startup)
        greeting = message = await _read_message(reader)
        while message[:1] != _READY_FOR_QUERY:
            message = await _read_message(reader)
            greeting += message
        self._greeting = greeting
        self._idle.put_nowait((reader, writer))


@asynccontextmanager
async def pooled(server_port: int, max_sessions: int) -> AsyncIterator[int]:
    """Run a proxy before a server, with a pool of so many sessions; return its port."""
    pooler = Pooler(server_port, max_sessions)
    server = await asyncio.start_server(pooler.serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        pooler.close()


async def _read_startup(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Return the first message of a client; refuse encryption before it."""
    while True:
        head = await reader.readexactly(8)
        length, code = struct.unpack("!II", head)
        if code != _SSL_REQUEST:
            assert code == _VERSION
            return head + await reader.readexactly(length - len(head))
        writer.write(b"N")


async def _read_message(reader: asyncio.StreamReader) -> bytes:
    """Return a whole message: its type, its length and its content."""
    head = await reader.readexactly(5)
    return head + await reader.readexactly(_LENGTH.unpack_from(head, 1)[0] - 4)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on whole messages; a cancellation loses none, since it comes between two."""
    while True:
        writer.write(await _read_message(reader))
