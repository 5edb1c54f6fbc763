"""Which HTTP stack should the listener stand on? Requests a second of one small POST answered with
JSON.

    python -m benchmarks.http_stacks            # needs wrk; about two minutes
    python -m benchmarks.http_stacks --seconds 2 --rounds 2

Each candidate runs alone, in a process of its own, on uvloop as the broker does, and does the same:
reads the body's JSON, answers a JSON object. wrk asks with 1 and with 64 connections; the
candidates take turns, and the best of the rounds counts. Beside the requests a second, and their
ratio to the fastest's, stands what a request takes of the server's processor time: on a machine
that is busy with other things that says more.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import httptools
import orjson
import uvloop

from quackmq.broker import Broker
from quackmq.protocols.http.router import Route
from quackmq.protocols.http.server import HttpServer
from quackmq.protocols.http.types import Request, Response, json_response
from quackmq.stores.memory import MemoryStore

HOST: Final = "127.0.0.1"
PATH: Final = "/producer/produce"
BODY: Final = '{"topic": "news", "producer_id": "producer-1", "message": "quack"}'
CONNECTIONS: Final = (1, 64)
WRK_SCRIPT: Final = f"""
wrk.method = "POST"
wrk.path = "{PATH}"
wrk.headers["Content-Type"] = "application/json"
wrk.body = '{BODY}'
"""

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


def answer_to(body: bytes) -> bytes:
    """The work that all of them do."""
    asked = orjson.loads(body)
    return orjson.dumps({"status": "success", "message_id": asked["message"]})


# --- the candidates --------------------------------------------------------------------------


async def raw_asgi(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """An ASGI application with nothing between it and the server."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        event = await receive()
        body += event.get("body", b"")
        if not event.get("more_body", False):
            break
    answer = answer_to(body)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(answer)).encode()),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


def starlette_asgi() -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request as StarletteRequest
    from starlette.responses import Response as StarletteResponse
    from starlette.routing import Route as StarletteRoute

    async def produce(request: StarletteRequest) -> StarletteResponse:
        answer = answer_to(await request.body())
        return StarletteResponse(answer, media_type="application/json")

    return Starlette(routes=[StarletteRoute(PATH, produce, methods=["POST"])])


async def uvicorn_with(application: Any, port: int, **settings: Any) -> None:
    import uvicorn

    config = uvicorn.Config(
        application, HOST, port, log_level="error", access_log=False, lifespan="off", **settings
    )
    await uvicorn.Server(config).serve()


async def uvicorn_httptools(port: int) -> None:
    await uvicorn_with(raw_asgi, port, http="httptools")


async def uvicorn_h11(port: int) -> None:
    await uvicorn_with(raw_asgi, port, http="h11")


async def uvicorn_starlette(port: int) -> None:
    await uvicorn_with(starlette_asgi(), port, http="httptools")


async def hypercorn_raw(port: int) -> None:
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    config = Config()
    config.bind = [f"{HOST}:{port}"]
    config.loglevel = "ERROR"
    await serve(cast(Any, raw_asgi), config)


async def granian_embedded(port: int) -> None:
    from granian.constants import Interfaces
    from granian.server.embed import Server

    server = Server(
        raw_asgi, address=HOST, port=port, interface=Interfaces.ASGINL, log_enabled=False
    )
    await server.serve()


class BareProtocol(asyncio.Protocol):
    """The least that can be called a server over httptools: no bound holds, nothing is checked."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        asyncio.get_running_loop().create_task(self._answer(self._body))

    async def _answer(self, body: bytes) -> None:
        answer = answer_to(body)
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(answer), answer)
        )


async def bare_httptools(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(BareProtocol, HOST, port)
    await server.serve_forever()


async def the_listener(port: int) -> None:
    """What was built in the end, with all its bounds."""

    async def produce(request: Request) -> Response:
        asked = cast(dict[str, Any], orjson.loads(request.body))
        return json_response(200, {"status": "success", "message_id": asked["message"]})

    broker = Broker(MemoryStore())
    await broker.open()
    listener = HttpServer(broker, HOST, port, routes=[Route("POST", PATH, produce)])
    await listener.start()
    await asyncio.Event().wait()


CANDIDATES: Final[dict[str, Callable[[int], Awaitable[None]]]] = {
    "asyncio protocol over httptools, bare": bare_httptools,
    "the listener (the same, with every bound)": the_listener,
    "granian, embedded, raw ASGI": granian_embedded,
    "uvicorn (httptools), raw ASGI": uvicorn_httptools,
    "uvicorn (httptools), Starlette": uvicorn_starlette,
    "uvicorn (h11), raw ASGI": uvicorn_h11,
    "hypercorn, raw ASGI": hypercorn_raw,
}
PACKAGES: Final = ("httptools", "h11", "uvicorn", "starlette", "hypercorn", "granian", "uvloop")


# --- measuring -------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=3, help="of each load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="a part of the name of the candidates to run")
    parser.add_argument("--serve", nargs=2, metavar=("NAME", "PORT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        name, port = arguments.serve
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(cast(Any, CANDIDATES[name](int(port))))
        return
    names = [name for name in CANDIDATES if (arguments.only or "") in name]
    rates: dict[tuple[str, int], float] = {}
    cpu_us: dict[tuple[str, int], float] = {}
    for _ in range(arguments.rounds):
        for name in names:
            for connections, load in measure(name, arguments.seconds).items():
                key = name, connections
                rates[key] = max(load.rate, rates.get(key, 0))
                cpu_us[key] = min(load.cpu_us, cpu_us.get(key, load.cpu_us))
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES))
    print("| stack | 1 connection | CPU | 64 connections | CPU |\n|---|---:|---:|---:|---:|")
    fastest = {each: max(rates[name, each] for name in names) for each in CONNECTIONS}
    for name in names:
        cells = [
            f"{rates[name, each]:,.0f}/s ({rates[name, each] / fastest[each]:.2f}) "
            f"| {cpu_us[name, each]:.0f} µs"
            for each in CONNECTIONS
        ]
        print(f"| {name} | {' | '.join(cells)} |")


class Load(NamedTuple):
    """Requests a second, and what each took of the server's processor time."""

    rate: float
    cpu_us: float


def measure(name: str, seconds: int) -> dict[int, Load]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.http_stacks", "--serve", name, str(port)]
    process = subprocess.Popen(command)
    try:
        wait_until_open(port, process)
        return {each: wrk(port, each, seconds, process.pid) for each in CONNECTIONS}
    finally:
        process.kill()
        process.wait()


def wrk(port: int, connections: int, seconds: int, server: int) -> Load:
    before_us = cpu_us_of(server)
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory, "post.lua")
        script.write_text(WRK_SCRIPT)
        command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(script)]
        done = subprocess.run(
            [*command, f"http://{HOST}:{port}"], capture_output=True, text=True, check=True
        )
    if "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise RuntimeError(f"not all went well:\n{done.stdout}")
    rate = re.search(r"Requests/sec:\s*([\d.]+)", done.stdout)
    count = re.search(r"(\d+) requests in", done.stdout)
    assert rate is not None and count is not None, done.stdout
    return Load(float(rate[1]), (cpu_us_of(server) - before_us) / int(count[1]))


def cpu_us_of(pid: int) -> float:
    """Of all threads of a process, the system's part included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1e6 / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def wait_until_open(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with socket.socket() as probe:
            probe.settimeout(0.2)
            if probe.connect_ex((HOST, port)) == 0:
                return
    raise RuntimeError("the candidate ended before it listened")


if __name__ == "__main__":
    main()
