"""A broker that is killed, again and again, while entries are published and delivered."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
from itertools import groupby
from pathlib import Path

import pytest

from tests.kit.server import DEADLINE_S, Server
from tests.protocols.line.peers import Peer

pytestmark = pytest.mark.processes

ENTRIES = 240
KILLS = 3


class Killed:
    """A broker on one directory, killed and started anew."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "quack"
        self._arguments = [
            *("serve", "--data", directory / "data", "--line", f"unix:{self.socket}"),
            *("--http", "127.0.0.1:0", "--line-reading", "every", "--line-durable-acks", "true"),
            *("--log-level", "error"),
        ]
        self._server = Server(*self._arguments)
        self._http = ""

    def __enter__(self) -> Killed:
        self._wait_until_ready()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.__exit__(None, None, None)

    def kill(self) -> None:
        self._server.send(signal.SIGKILL)
        self._server.exit_code()
        self._server.__exit__(None, None, None)
        self._server = Server(*self._arguments)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        try:
            self._http = self._server.listeners()["http"]
        except BaseException:
            self._server.__exit__(None, None, None)
            raise

    def getentry(self, last: int) -> int:
        """The number that `getentry` answers over HTTP."""
        connection = http.client.HTTPConnection(self._http, timeout=DEADLINE_S)
        connection.request("GET", f"/v1/topics/1/partitions/0/entry?last={last}")
        number = json.load(connection.getresponse())["number"]
        connection.close()
        return int(number)

    def log(self) -> list[tuple[int, int]]:
        """Number and content of every entry of the topic."""
        connection = http.client.HTTPConnection(self._http, timeout=DEADLINE_S)
        found: list[tuple[int, int]] = []
        while True:
            connection.request(
                "GET", f"/v1/topics/1/partitions/0/messages?offset={len(found)}&limit=1000"
            )
            messages = json.load(connection.getresponse())["messages"]
            if not messages:
                connection.close()
                return found
            found += [(each["offset"] + 1, int(each["value"])) for each in messages]


async def connected(killed: Killed, role: str, name: str) -> Peer:
    """Once the broker is back: the protocol up to where entries go."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                peer = Peer(*await asyncio.open_unix_connection(str(killed.socket)))
                try:
                    for line in (f"{role} {name} connect", "end", f"{role} {name} topic 1", "end"):
                        if await peer.ask(line) != "accept":
                            raise ConnectionError
                    return peer
                except BaseException:
                    await peer.close()
                    raise
            except (ConnectionError, FileNotFoundError):
                await asyncio.sleep(0.01)


async def publish(killed: Killed, published: list[int]) -> None:
    """Each number until it is answered `successful`."""
    peer = await connected(killed, "pub", "donald")
    while len(published) < ENTRIES:
        try:
            answer = await peer.ask(f"topic 1 [{len(published)}]")
        except ConnectionError:
            answer = ""
        if answer == "successful":
            published.append(len(published))
        else:
            assert answer == "", answer
            await peer.close()
            peer = await connected(killed, "pub", "donald")
    await peer.close()


async def subscribe(killed: Killed, received: list[int], subscribed: asyncio.Event) -> None:
    peer = await connected(killed, "sub", "daisy")
    subscribed.set()
    while not received or max(received) < ENTRIES - 1 or len(set(received)) < ENTRIES:
        try:
            line = await peer.hears()
        except ConnectionError:
            line = ""
        if line:
            received.append(int(line.removeprefix("topic 1 [").removesuffix("]")))
            peer.say("successful")
        else:
            await peer.close()
            peer = await connected(killed, "sub", "daisy")
    await peer.close()


async def kill_again_and_again(killed: Killed, published: list[int]) -> None:
    for turn in range(1, KILLS + 1):
        while len(published) < turn * ENTRIES // (KILLS + 1):
            await asyncio.sleep(0.001)
        await asyncio.to_thread(killed.kill)


def test_q5_killed_in_the_middle_each_number_is_there_once_and_delivered(tmp_path: Path) -> None:
    """Entries that were answered `successful` are there, in order; one whose answer the kill took
    is sent again, and has two numbers if it was kept. All are delivered in order. A kill repeats
    at most the entry in flight, because answers are durable before the next entry comes."""
    published: list[int] = []
    received: list[int] = []

    async def run(killed: Killed) -> None:
        subscribed = asyncio.Event()
        async with asyncio.timeout(4 * DEADLINE_S), asyncio.TaskGroup() as group:
            group.create_task(subscribe(killed, received, subscribed))
            await subscribed.wait()
            group.create_task(publish(killed, published))
            group.create_task(kill_again_and_again(killed, published))

    with Killed(tmp_path) as killed:
        asyncio.run(run(killed))
        log = killed.log()
        assert [killed.getentry(last) for last in (0, 1, len(log))] == [1, 2, -len(log)]
    assert [number for number, _ in log] == list(range(1, len(log) + 1)), "from 1, without gaps"
    contents = [content for _, content in log]
    assert [content for content, _ in groupby(contents)] == list(range(ENTRIES))
    assert len(log) <= ENTRIES + KILLS
    assert received == sorted(received), "in order, also after a kill"
    assert set(received) == set(range(ENTRIES))
    assert len(received) <= len(log) + KILLS
