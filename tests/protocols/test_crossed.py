"""Every protocol sent to every listener that does not speak it: the connection is closed or
refused, nothing is published, the listener's other connections notice nothing, and one line of the
log says which protocol came and which port serves it."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import pytest

from quackmq.broker import Broker, BrokerSettings
from quackmq.protocols.http.server import HttpServer
from quackmq.protocols.kafka.server import KafkaServer
from quackmq.protocols.line.server import LineServer
from quackmq.protocols.zmq.proxy.proxy_server import ProxyServer
from quackmq.protocols.zmq.proxy.xpub import XpubServer
from quackmq.protocols.zmq.proxy.xsub import XsubServer
from quackmq.protocols.zmq.server import ZmqServer
from quackmq.serving.server import Server
from quackmq.stores.memory import MemoryStore
from tests.kit.support import listening
from tests.kit.tables import each
from tests.kit.waiting import soon, until
from tests.protocols.codecs.zmtp_frames import HELLO, command, greeting, message, ready, request
from tests.protocols.kafka.client import API_VERSIONS, CREATE_TOPICS
from tests.protocols.kafka.client import Client as KafkaPeer

HOST: Final = "127.0.0.1"

#: What a publisher of the line protocol sends.
LINES: Final = (
    b"pub evil connect\nend\npub evil topic crossed\nend\ntopic crossed [quack]\nterminate\n"
)


def http_post(body: bytes = LINES) -> bytes:
    """What a web page of any site can make a browser send: its body is a publisher's lines."""
    head = (
        b"POST /topics?topic_name=crossed HTTP/1.1\r\nHost: localhost:5550\r\n"
        b"Content-Type: text/plain\r\nContent-Length: %d\r\n\r\n"
    )
    return head % len(body) + body


def tls_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=HOST)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def kafka_create() -> bytes:
    topic = {"name": "crossed", "num_partitions": 1, "replication_factor": 1}
    topics = [topic | {"assignments": [], "configs": []}]
    peer = KafkaPeer(None, None)  # type: ignore[arg-type]  # it only writes the frame
    return peer.frame(CREATE_TOPICS, 5, topics=topics, timeout=1000)


#: By name: what is sent, the listeners that serve it, and what the log calls it elsewhere.
PROTOCOLS: Final[dict[str, tuple[Callable[[], bytes], tuple[str, ...], str]]] = {
    "kafka": (kafka_create, ("kafka",), "the Kafka protocol"),
    "http": (http_post, ("http",), "HTTP"),
    "line": (lambda: LINES, ("line",), "the line protocol"),
    "tls": (tls_hello, (), "TLS"),
    "REQ": (lambda: HELLO + request(b"PUT evil crossed quack"), ("zmq", "proxy"), "ZMTP"),
    "PUB": (lambda: greeting() + ready(b"PUB") + message(b"crossed", b"x"), ("xsub",), "ZMTP"),
    "SUB": (lambda: greeting() + ready(b"SUB") + message(b"\x01crossed"), ("xpub",), "ZMTP"),
}
#: A REQ socket of the reliable proxy is the same to any other listener.
PROXY_REQUEST: Final = HELLO + request(b"publish evil crossed 1 quack")
ZMTP_SOCKETS: Final = {"zmq": b"REQ", "proxy": b"REQ", "xsub": b"PUB", "xpub": b"SUB"}
LISTENERS: Final = ("kafka", "http", "zmq", "xsub", "xpub", "proxy", "line")
CROSSINGS: Final = [
    (listener, protocol)
    for listener in LISTENERS
    for protocol, (_, served_by, _) in PROTOCOLS.items()
    if listener not in served_by
]


class Opened:
    """A broker with every listener open."""

    def __init__(self, broker: Broker, listeners: Mapping[str, Server[Any]]) -> None:
        self.broker = broker
        self.listeners = listeners
        self._stack = AsyncExitStack()

    async def connect(self, listener: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await soon(
            asyncio.open_connection(*self.broker.listener_addresses[listener])
        )
        self._stack.callback(writer.close)
        return reader, writer

    async def well(self, listener: str) -> Callable[[], Awaitable[None]]:
        """A peer that speaks the listener's protocol; the answer asks it whether it is served."""
        reader, writer = await self.connect(listener)
        if listener == "kafka":
            client = KafkaPeer(reader, writer)

            async def ask() -> None:
                assert (await client.ask(API_VERSIONS, 0)).error_code.value == 0

        elif listener == "http":

            async def ask() -> None:
                writer.write(b"GET /topics HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert (await soon(reader.readline())).startswith(b"HTTP/1.1 200")
                await soon(reader.readuntil(b"}\n"))

        elif listener == "line":

            async def ask() -> None:
                writer.write(b"quack\n")
                assert (await soon(reader.readline())).startswith(b"reject protocol_error: ")

            writer.write(b"sub well connect\n")
            assert await soon(reader.readline()) == b"accept\n"
        else:

            async def ask() -> None:
                writer.write(command(b"PING", b"\x00\x00well"))
                await soon(reader.readuntil(b"\x04PONGwell"))

            writer.write(greeting() + ready(ZMTP_SOCKETS[listener]))
        await ask()
        return ask

    async def send(self, listener: str, data: bytes, piece_bytes: int = 1 << 20) -> bytes:
        """Send this to a listener in pieces; return what it says until it closes the connection."""
        reader, writer = await self.connect(listener)
        for at in range(0, len(data), piece_bytes):
            writer.write(data[at : at + piece_bytes])
            await asyncio.sleep(0)
            if writer.is_closing() or reader.at_eof():
                break
        said = b""
        try:
            while more := await soon(reader.read(65_536)):
                said += more
        except ConnectionError:
            return said
        return said

    def close_peers(self) -> Awaitable[Any]:
        return self._stack.aclose()


@asynccontextmanager
async def opened() -> AsyncIterator[Opened]:
    async with AsyncExitStack() as stack:
        store = MemoryStore()
        stack.push_async_callback(store.close)
        broker = Broker(store, BrokerSettings())
        await broker.open()
        stack.push_async_callback(broker.close)
        xpub = XpubServer(broker, HOST, 0)
        listeners: dict[str, Server[Any]] = {
            "kafka": KafkaServer(broker, HOST, 0),
            "http": HttpServer(broker, HOST, 0),
            "zmq": ZmqServer(broker, HOST, 0),
            "xsub": XsubServer(broker, HOST, 0),
            "xpub": xpub,
            "proxy": ProxyServer(broker, HOST, 0, xpub),
            "line": LineServer(broker, (HOST, 0)),
        }
        for name, listener in listeners.items():
            broker.listener_addresses[name] = await listening(listener)
            stack.push_async_callback(listener.close)
        running = Opened(broker, listeners)
        stack.push_async_callback(running.close_peers)
        yield running


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize(("listener", "protocol"), CROSSINGS)
async def test_a_protocol_at_the_wrong_listener_is_let_go_of_and_told_where_to_go(
    listener: str, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    data, served_by, called = PROTOCOLS[protocol]
    async with opened() as running:
        is_served = await running.well(listener)
        caplog.clear()
        said = await running.send(listener, data())
        assert running.broker.topics() == {} and b"accept" not in said
        (line,) = warnings(caplog)
        assert f"disconnected from the {listener} listener" in line
        if listener in ZMTP_SOCKETS and called == "ZMTP":
            assert f"{ZMTP_SOCKETS[listener].decode()}" in line and f"'{protocol}' socket" in line
            assert line.rpartition("; ")[2].encode() in said, "libzmq's own monitor shows it"
        else:
            assert f"it speaks {called}" in line
        for name in served_by:
            assert f"{running.broker.listener_addresses[name][1]} ({name})" in line
        await is_served()

        for _ in range(3):
            await running.send(listener, data())
        assert warnings(caplog) == [line], "one line a minute, however often it comes"
        await is_served()


@each("protocol", [name for name, (_, listeners, _) in PROTOCOLS.items() if listeners])
async def test_the_same_bytes_do_something_at_their_own_listener(protocol: str) -> None:
    """Else the test above would prove nothing."""
    data, served_by, _ = PROTOCOLS[protocol]
    async with opened() as running:
        reader, writer = await running.connect(served_by[0])
        writer.write(http_post(b"") if protocol == "http" else data())
        if protocol == "SUB":
            await soon(reader.readuntil(b"XPUB"))
            await until(lambda: [*running.broker.topics()] == [])
        else:
            await until(lambda: [*running.broker.topics()] == ["crossed"])


@pytest.mark.parametrize(
    ("listener", "data", "said"),
    [
        ("proxy", HELLO + request(b"PUT evil crossed quack"), b"send PUT to the zmq port"),
        ("zmq", PROXY_REQUEST, b"send publish to the proxy port"),
    ],
)
async def test_a_request_to_the_other_rep_socket_is_answered_with_the_port_to_ask(
    listener: str, data: bytes, said: bytes
) -> None:
    async with opened() as running:
        reader, writer = await running.connect(listener)
        writer.write(data)
        assert await soon(reader.readuntil(said))
        assert running.broker.topics() == {}


@each("listener", LISTENERS)
async def test_byte_by_byte_a_foreign_protocol_is_let_go_of_all_the_same(listener: str) -> None:
    async with opened() as running:
        is_served = await running.well(listener)
        for data, served_by, _ in PROTOCOLS.values():
            if listener not in served_by:
                await running.send(listener, data(), piece_bytes=1)
        assert running.broker.topics() == {}
        await is_served()
