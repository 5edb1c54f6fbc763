"""Peers that do not behave: wrong protocols, halves of requests, bytes that nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from tests.protocols.codecs.zmtp_frames import HELLO, command, greeting, message, ready, request
from tests.protocols.kafka.client import FETCH, PRODUCE, Client, fetch_fields, news, produce_fields
from tests.simulation.listeners import Listeners
from tests.simulation.network import NetworkLoop, end_of
from tests.simulation.protocol_clients import LOST

_MOST_SECONDS: Final = 200.0

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
#: Called with a connection and what a peer of some protocol begins with.
_Stranger = Callable[[_Connection, bytes, NetworkLoop], Awaitable[None]]


async def misbehave(servers: Listeners, loop: NetworkLoop) -> None:
    """Connect to some listener a few times, and do there what nobody should."""
    for _ in range(loop.source.randint(1, 4)):
        await asyncio.sleep(loop.source.random() * 2)
        server = loop.source.choice([*servers.ports, *servers.paths])
        stranger = loop.source.choice(_STRANGERS)
        try:
            connection = await servers.connect(server)
        except ConnectionError:
            continue
        loop.counts[f"peers that misbehave: {stranger.__name__}"] += 1
        openings = _openings(connection, servers.ports)
        other = loop.source.choice(list(openings))
        name = server if loop.source.random() < 0.6 else other
        try:
            async with asyncio.timeout(_MOST_SECONDS):
                await stranger(connection, loop.source.choice(openings[name]), loop)
        except LOST:
            loop.counts["peers that misbehave and were disconnected or not answered"] += 1
        finally:
            if loop.source.random() < 0.5:
                connection[1].transport.abort()
            else:
                connection[1].close()


async def ask_once(connection: _Connection, opening: bytes, loop: NetworkLoop) -> None:
    """Send a request of some protocol to whatever listens, and read the answer."""
    reader, writer = connection
    writer.write(opening)
    await asyncio.wait_for(reader.read(1_000), 30)


async def send_noise(connection: _Connection, opening: bytes, loop: NetworkLoop) -> None:
    reader, writer = connection
    writer.write(loop.source.randbytes(loop.source.choice((1, 10, 5_000))))
    if loop.source.random() < 0.5:
        writer.write_eof()
    await asyncio.wait_for(reader.read(1_000), 30)


async def send_half(connection: _Connection, opening: bytes, loop: NetworkLoop) -> None:
    """Send a part of a request and nothing more."""
    _, writer = connection
    writer.write(opening[: loop.source.randint(1, len(opening) - 1)])
    if loop.source.random() < 0.3:
        writer.write_eof()
    await asyncio.sleep(loop.source.choice((0.0, 1.0, 100.0)))


async def never_read(connection: _Connection, opening: bytes, loop: NetworkLoop) -> None:
    """Ask much and read nothing."""
    _, writer = connection
    end_of(writer).pause_reading()
    for _ in range(loop.source.choice((1, 20, 200))):
        writer.write(opening)
    await asyncio.sleep(loop.source.choice((1.0, 100.0)))


async def say_nothing(connection: _Connection, opening: bytes, loop: NetworkLoop) -> None:
    await asyncio.sleep(loop.source.choice((0.0, 1.0, 150.0)))


_STRANGERS: Final[tuple[_Stranger, ...]] = (
    ask_once,
    send_noise,
    send_half,
    never_read,
    say_nothing,
)


def _openings(connection: _Connection, ports: Mapping[str, int]) -> dict[str, list[bytes]]:
    """Return the first bytes of peers of each protocol, by the name of its server. None of them
    publishes to the topics whose numbers are checked."""
    openings = _openings_of_four(connection)
    return openings | _PROXY_OPENINGS if "xpub" in ports else openings


def _openings_of_four(connection: _Connection) -> dict[str, list[bytes]]:
    client = Client(*connection)
    fetch = fetch_fields(0, topic="by-kafka", wait_ms=100) | {
        "session_id": 0,
        "session_epoch": -1,
        "rack_id": "",
    }
    put = produce_fields(news(b"x" * 300), topic="nowhere")
    return {
        "kafka": [
            client.frame(FETCH, 11, **fetch),
            client.frame(PRODUCE, 9, transactional_id=None, **put),
        ],
        "http": [
            b"GET /v1/topics HTTP/1.1\r\nhost: localhost\r\n\r\n",
            b"POST /topics HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999\r\n\r\n" + bytes(999),
        ],
        "zmq": [
            HELLO + request(b"GET nobody by-kafka -1"),
            HELLO + request(b"PUT nobody strange " + b"x" * 300),
        ],
        "line": [
            b"sub nobody connect\nend\nsub nobody topic by-kafka\nend\n",
            b"pub nobody connect\nend\npub nobody topic strange\nend\ntopic strange [entry]\n",
        ],
    }


_PUB_HELLO: Final = greeting() + ready(b"PUB")
_SUB_HELLO: Final = greeting() + ready(b"SUB")
_PROXY_OPENINGS: Final = {
    "xsub": [
        _PUB_HELLO + message(b"strange", b"x" * 300),
        _PUB_HELLO + message(b"no topic", b"x") + message(b"strange"),
        _PUB_HELLO + message(b"strange", b"one", b"two"),
        _SUB_HELLO,
    ],
    "xpub": [
        _SUB_HELLO + command(b"SUBSCRIBE", b"") + command(b"CANCEL", b""),
        _SUB_HELLO + message(b"\x01by-") + command(b"PING", b"\x00\x0aalive"),
        # One connection says that it is two clients.
        _SUB_HELLO
        + b"".join(
            command(b"SUBSCRIBE", name)
            for name in (b"client nobody", b"client subscriber-1", b"ids by-publish")
        ),
        _SUB_HELLO + command(b"SUBSCRIBE", b"ids no topic"),
    ],
    "proxy": [
        HELLO + request(b"hello nobody by-publish *:1"),
        HELLO + request(b"hello nobody by-publish tcp://10.0.0.1:1"),
        HELLO + request(b"ack_received nobody by-publish 0"),
        HELLO + request(b"goodbye nobody by-publish") + request(b"GET nobody by-publish -1"),
        HELLO + request(b"publish nobody strange 1 " + b"x" * 300),
        HELLO + request(b"last_published nobody nowhere"),
    ],
}
