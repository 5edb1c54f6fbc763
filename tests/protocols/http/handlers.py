"""Routes for tests of the listener alone: one that echoes, one that waits, streams of all kinds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from quackmq.protocols.http.router import Route
from quackmq.protocols.http.types import DeferredResponse, Request, Response, Stream, json_response


class Handlers:
    """What the handlers of one listener did, and what they wait for."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.changes: list[asyncio.Future[int]] = []
        self.begun = 0
        self.cancelled = 0
        self.closed_streams = 0

    def routes(self) -> tuple[Route, ...]:
        return (
            Route("POST", "/echo", self.echo),
            Route("GET", "/echo", self.echo),
            Route("POST", "/small", self.echo, 1_000),
            Route("GET", "/wait", self.wait),
            Route("GET", "/change", self.change),
            Route("GET", "/poll", self.wait, may_wait=True),
            Route("GET", "/bug", self.bug),
            Route("GET", "/large/{bytes}", self.large),
            Route("GET", "/count/{to}", self.count),
            Route("GET", "/ticks", self.ticks),
            Route("GET", "/broken", self.broken),
            Route("GET", "/inject", self.inject),
        )

    async def echo(self, request: Request) -> Response:
        return json_response(
            200,
            {
                "method": request.method,
                "query": dict(request.query),
                "headers": dict(request.headers),
                "body": request.body.decode("latin-1"),
            },
        )

    async def wait(self, request: Request) -> Response:
        self.begun += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return json_response(200, request.query.get("number"))

    def change(self, request: Request) -> DeferredResponse:
        self.changes.append(asyncio.get_running_loop().create_future())
        return DeferredResponse(self.changes[-1], lambda came_to: json_response(200, 6 // came_to))

    async def bug(self, request: Request) -> Response:
        raise ZeroDivisionError("a bug of ours")

    async def large(self, request: Request) -> Response:
        return Response(
            200, bytes(int(request.path_parameters["bytes"])), "application/octet-stream"
        )

    async def count(self, request: Request) -> Stream:
        return Stream("text/plain", self._count(int(request.path_parameters["to"])))

    async def ticks(self, request: Request) -> Stream:
        return Stream("text/plain", self._ticks())

    async def broken(self, request: Request) -> Stream:
        return Stream("text/plain", self._broken())

    async def inject(self, request: Request) -> Response:
        evil = "text/plain\r\nset-cookie: a=b"
        return Response(200, b"", evil, (("x-evil", "a\r\nx-more: b"),))

    async def _count(self, to: int) -> AsyncIterator[bytes]:
        for number in range(to):
            yield b"%d\n" % number

    async def _ticks(self) -> AsyncIterator[bytes]:
        try:
            while True:
                self.begun += 1
                yield b"tick\n" * 10_000
                await asyncio.sleep(0)
        finally:
            self.closed_streams += 1

    async def _broken(self) -> AsyncIterator[bytes]:
        yield b"so far so good"
        raise ZeroDivisionError("a bug of ours")
