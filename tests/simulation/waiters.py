"""Peers that wait for something when the broker closes, on undisturbed connections.

Nobody publishes to their topic. So a waiting request is answered when its own time is over, and
when the broker closes: soon then, and properly. A stream ends by its last chunk, and a subscriber
of the line protocol is told to terminate. A stream that is idle gets its heartbeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import closing
from typing import Any, Final

from quackmq.protocols.http import limits as http_limits
from tests.protocols.http.peers import Peer as HttpPeer
from tests.protocols.kafka.client import FETCH, Client, fetch_fields
from tests.protocols.line.peers import Peer as LinePeer
from tests.simulation.event_streams import EventStream, StreamEnded
from tests.simulation.model import Violation
from tests.simulation.network import NetworkLoop
from tests.simulation.protocol_clients import LOST, Servers, fetch_without_session

#: The topic that nobody publishes to.
QUIET_TOPIC: Final = "quiet"
#: How long a request may wait at the broker: shorter than the peers' own patience.
_WAIT_MS: Final = 25_000
#: Virtual seconds within which a closing broker ends a wait; also how long before the closing a
#: request must have been sent to be certainly accepted.
_SOON_SECONDS: Final = 1.0

#: Waits until the broker closes; raises Violation if the wait does not end as it should.
Waiter = Callable[[Servers, NetworkLoop], Coroutine[Any, Any, None]]


async def fetch_one(servers: Servers, loop: NetworkLoop) -> None:
    """Fetch from one partition. The broker keeps no task for this wait."""
    await _fetch(servers, loop, topics=1)


async def fetch_two(servers: Servers, loop: NetworkLoop) -> None:
    await _fetch(servers, loop, topics=2)


async def _fetch(servers: Servers, loop: NetworkLoop, topics: int) -> None:
    client = Client(*await servers.connect("kafka"))
    fields = fetch_without_session(fetch_fields(0, topic=QUIET_TOPIC, wait_ms=_WAIT_MS))
    fields["topics"] *= topics

    async def ask() -> None:
        answer = await client.ask(FETCH, 11, **fields)
        if len(answer.responses) != topics:
            raise Violation(f"a fetch from {topics} partitions was answered by {answer}")

    with closing(client.writer):
        await _ask_until_closed(ask, "a Kafka fetch", servers, loop)


async def poll_http(servers: Servers, loop: NetworkLoop) -> None:
    """Read by offset, and wait for messages that do not exist yet."""
    peer = HttpPeer(*await servers.connect("http"))

    async def ask() -> None:
        target = f"/v1/topics/{QUIET_TOPIC}/partitions/0/messages?offset=0&wait_ms={_WAIT_MS}"
        answer = await peer.get(target)
        if answer.status not in (200, 503):
            raise Violation(f"a poll over HTTP got {answer}")

    with closing(peer.writer):
        await _ask_until_closed(ask, "a poll over HTTP", servers, loop)


async def follow_http(servers: Servers, loop: NetworkLoop) -> None:
    """Follow the topic as events."""
    stream = EventStream(*await servers.connect("http"))
    with closing(stream.writer):
        if await stream.begin(f"/v1/topics/{QUIET_TOPIC}/events") != 200:
            return  # there are too many streams
        await _read_to_end(stream, loop)
        _check_end_time("an event stream", servers, loop)
    loop.counts["idle event streams that ended with the broker"] += 1


async def _read_to_end(stream: EventStream, loop: NetworkLoop) -> None:
    """Read heartbeats until the stream ends properly."""
    while True:
        heard_at = loop.time()
        try:
            async with asyncio.timeout(http_limits.HTTP_HEARTBEAT_MS / 1_000 + _SOON_SECONDS):
                await stream.read_some()
        except StreamEnded:
            return
        except LOST as error:
            silence_s = loop.time() - heard_at
            message = f"an event stream was lost, or silent for {silence_s:.1f} s"
            raise Violation(message) from error


async def listen_on_line(servers: Servers, loop: NetworkLoop) -> None:
    """Wait for an entry as a subscriber of the line protocol."""
    peer = LinePeer(*await servers.connect("line"))
    with closing(peer.writer):
        for line in ("sub waiter connect", "end", f"sub waiter topic {QUIET_TOPIC}", "end"):
            if await peer.ask(line) != "accept":
                return  # the disk has failed, or the broker closes
        try:
            heard = await peer.reader.readline()
        except LOST as error:
            raise Violation("a silent subscriber was disconnected") from error
        if heard != b"terminate\n":
            raise Violation(f"a subscriber of a topic without entries got {heard!r}")
        _check_end_time("a subscriber of the line protocol", servers, loop)
    loop.counts["waiting subscribers that were told to terminate"] += 1


WAITERS: Final[tuple[Waiter, ...]] = (fetch_one, fetch_two, poll_http, follow_http, listen_on_line)


async def _ask_until_closed(
    ask: Callable[[], Awaitable[None]], what: str, servers: Servers, loop: NetworkLoop
) -> None:
    """Send a request that waits, again and again, until the broker closes and answers the last."""
    while not servers.is_closing():
        asked_at = loop.time()
        try:
            await ask()
        except LOST as error:
            closing_at = servers.closing_at
            if closing_at is None or closing_at > asked_at + _SOON_SECONDS:
                raise Violation(f"{what} waited and was not answered") from error
            return
        waited_s = loop.time() - asked_at
        if not servers.is_closing() and waited_s < _WAIT_MS / 1_000:
            raise Violation(f"{what} was answered after {waited_s:.1f} s, with nothing")
    _check_end_time(what, servers, loop)
    loop.counts["waiting requests that the closing broker answered"] += 1


def _check_end_time(what: str, servers: Servers, loop: NetworkLoop) -> None:
    """Raise Violation unless the broker has begun to close, just now."""
    if servers.closing_at is None:
        raise Violation(f"{what} ended although the broker was not closing")
    late_s = loop.time() - servers.closing_at
    if late_s > _SOON_SECONDS:
        raise Violation(f"{what} ended {late_s:.1f} s after the broker began to close")
