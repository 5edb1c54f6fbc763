"""Requests with bytes changed, lost, added or doubled: clean answers or a closed connection.

What is sent is made from sound requests. While it comes, somebody publishes and consumes. Whatever
is left to chance comes from a seed, which is printed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator

import pytest

from tests.kit.waiting import soon, until
from tests.protocols.http.peers import Answer, Peer, Served, request, served_meanwhile
from tests.protocols.kafka.client import on_both_loops

ROUNDS = 400
STRANGERS = 32
SOUND = (
    request("GET", "/topics"),
    request("POST", "/topics", {"topic_name": "ducks"}),
    request("POST", "/producer/produce?topic=frogs&producer_id=producer-2", {"message": "x"}),
    request("GET", "/consumer/consume?topic=frogs&consumer_id=consumer-2&last_id="),
    request("GET", "/v1/topics?limit=1", connection="keep-alive"),
    request("POST", "/topics", transfer_encoding="chunked") + b"2\r\n{}\r\n0\r\na: b\r\n\r\n",
    request("POST", "/topics", b"{}", expect="100-continue"),
    request("GET", "/topics", connection="upgrade", upgrade="h2c"),
    request("GET", "/size?topic=%C3%BC", version="1.0"),
    request("OPTIONS", "*"),
)
PIECES = (b"\r\n", b"\r\n\r\n", b"\0", b" ", b":", b"%", b"\xff", b"HTTP/1.1", b"0", b"99999999999")


def spoilt(chance: random.Random) -> bytes:
    """A few sound requests behind each other, with some damage."""
    data = bytearray(b"".join(chance.choices(SOUND, k=chance.randint(1, 4))))
    for _ in range(chance.randint(0, 6)):
        at = chance.randrange(len(data) + 1)
        kind = chance.randrange(5)
        if kind == 0:
            data[at : at + 1] = bytes([chance.randrange(256)])
        elif kind == 1:
            del data[at : at + chance.randint(1, 20)]
        elif kind == 2:
            data[at:at] = chance.choice(PIECES)
        elif kind == 3:
            data[at:at] = data[at : at + chance.randint(1, 100)]
        else:
            data[at:at] = chance.randbytes(chance.randint(1, 50))
    return bytes(data)


def pieces(data: bytes, chance: random.Random) -> Iterator[bytes]:
    while data:
        size = chance.choice((1, 10, 100, len(data)))
        yield data[:size]
        data = data[size:]


async def answers(peer: Peer) -> list[Answer]:
    """Everything that is answered until the listener hangs up: each answer whole."""
    got: list[Answer] = []
    while True:
        try:
            got.append(await peer.receive())
        except asyncio.IncompleteReadError as end:
            assert end.partial == b"", "an answer that breaks off"
            return got
        except ConnectionError:
            return got


async def stranger(running: Served, chance: random.Random) -> None:
    for _ in range(ROUNDS // STRANGERS):
        peer = await running.peer()
        try:
            for piece in pieces(spoilt(chance), chance):
                peer.send(piece)
                await peer.writer.drain()
            if peer.writer.can_write_eof():
                peer.writer.write_eof()
        except ConnectionError:
            pass
        for answer in await soon(answers(peer)):
            assert answer.status < 500 or answer.status in (501, 505), answer
        await peer.close()


@on_both_loops
async def test_spoilt_requests_are_answered_or_end_the_connection_and_nobody_else_notices(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    caplog.set_level(logging.WARNING)
    async with served_meanwhile() as running:
        peer = await running.peer()
        for path in ("/producer/register", "/consumer/register"):
            (await peer.post(f"{path}?topic=frogs")).succeeded()
        await peer.close()
        await asyncio.gather(
            *(stranger(running, random.Random(seed + number)) for number in range(STRANGERS))
        )
        await until(lambda: running.listener.connection_count == 1)
        assert (
            running.listener.receive_budget.used_bytes,
            running.listener.send_budget.unsent_bytes,
        ) == (
            0,
            0,
        )
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@on_both_loops
async def test_bytes_at_random_are_answered_or_end_the_connection() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with served_meanwhile() as running:
        for _ in range(100):
            peer = await running.peer()
            peer.send(chance.randbytes(chance.randint(1, 300)))
            peer.writer.write_eof()
            assert all(answer.status in (400, 501) for answer in await soon(answers(peer)))
            await peer.close()
