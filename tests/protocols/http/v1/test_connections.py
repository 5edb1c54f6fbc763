"""Q2: the line listener's connection records, listed over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from quackmq.protocols.http import limits as http_limits
from quackmq.protocols.http.server import HttpServer
from tests.kit.support import listening
from tests.kit.waiting import soon, until
from tests.protocols.http.v1.serving import Answered, Client
from tests.protocols.line.peers import DEADLINE_S, Served, served


class Listing:
    def __init__(self, running: Served, client: Client) -> None:
        self.running = running
        self._client = client

    async def get(self, query: str = "") -> Answered:
        return await asyncio.to_thread(self._client.get, f"/v1/connections{query}")

    async def page(self, query: str = "") -> dict[str, Any]:
        answer = await self.get(query)
        assert answer.status == 200, answer
        page: dict[str, Any] = answer.json
        return page

    async def ids(self) -> list[str]:
        return [each["id"] for each in (await self.page())["connections"]]

    async def until_ids(self, *ids: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while await self.ids() != list(ids):
                await asyncio.sleep(0.002)


@asynccontextmanager
async def listing(where: tuple[str, int] | str = ("127.0.0.1", 0)) -> AsyncIterator[Listing]:
    async with served(where=where) as running:
        listener = HttpServer(running.broker, "127.0.0.1", 0)
        client = Client(*await listening(listener))
        try:
            yield Listing(running, client)
        finally:
            client.close()
            await soon(listener.close())


async def test_q2_who_is_connected_is_listed_with_its_record() -> None:
    async with listing() as listed:
        assert await listed.page() == {"connections": [], "next": None}
        daisy = await listed.running.subscriber("daisy", "1", "2")
        donald = await listed.running.publisher("donald", "1")
        silent = await listed.running.peer()  # and has not said who it is
        names = [peer.writer.get_extra_info("sockname") for peer in (donald, daisy)]
        places = [f"{host}:{port}" for host, port in names]
        assert await listed.page() == {
            "connections": [
                {
                    "door": "line",
                    "role": "pub",
                    "id": "donald",
                    "channel": places[0],
                    "topics": ["1"],
                    "topic_count": 1,
                },
                {
                    "door": "line",
                    "role": "sub",
                    "id": "daisy",
                    "channel": places[1],
                    "topics": ["1", "2"],
                    "topic_count": 2,
                },
            ],
            "next": None,
        }
        await silent.close()


async def test_q11_who_has_terminated_is_listed_no_more() -> None:
    async with listing() as listed:
        donald = await listed.running.publisher("donald", "1")
        await listed.running.publisher("huey", "1")
        assert await listed.ids() == ["donald", "huey"]
        assert await donald.ask("terminate") == "terminate"
        await listed.until_ids("huey")


async def test_a_listener_that_is_closed_lists_nobody() -> None:
    async with listing() as listed:
        await listed.running.publisher("donald", "1")
        closing = asyncio.create_task(listed.running.listener.close())
        await until(lambda: listed.running.listener.is_closing)
        await listed.until_ids()
        await soon(closing)


async def test_connections_come_in_pages(tmp_path: Path) -> None:
    """Also such as differ in nothing but their channel, which may have a space in its name."""
    async with listing(f"{tmp_path}/a pond") as listed:
        for _ in range(5):
            await listed.running.publisher("donald", "1")
        await listed.running.subscriber("daisy", "1")
        channels, query = [], "?limit=2"
        while True:
            page = await listed.page(query)
            channels += [each["channel"] for each in page["connections"]]
            assert len(page["connections"]) <= 2
            if page["next"] is None:
                break
            query = f"?limit=2&after={quote(page['next'])}"
        assert len(channels) == len(set(channels)) == 6
        whole = await listed.page()
        assert [each["channel"] for each in whole["connections"]] == channels
        assert all(channel.startswith(f"unix:{tmp_path}/a pond#") for channel in channels)


async def test_of_many_topics_some_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "CONNECTION_TOPICS_LISTED", 2)
    async with listing() as listed:
        await listed.running.publisher("donald", "1", "2", "3")
        (only,) = (await listed.page())["connections"]
        assert (only["topics"], only["topic_count"]) == (["1", "2"], 3)


@pytest.mark.parametrize("after", ["", "line", "line pub", "line pub donald"])
async def test_a_place_that_is_none_is_refused(after: str) -> None:
    async with listing() as listed:
        answer = await listed.get(f"?after={quote(after)}")
        answer.problem(400, "invalid_request")
