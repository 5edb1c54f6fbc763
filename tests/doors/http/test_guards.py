"""What a browser must not be made to ask for, by pages of other sites."""

from __future__ import annotations

import pytest

from quackmq.doors.http.guards import (
    host_name,
    is_foreign_host,
    is_foreign_origin,
    is_foreign_site,
    is_loopback,
)
from tests.doors.http.peers import served


@pytest.mark.parametrize(
    ("host", "foreign"),
    [
        (b"localhost", False),
        (b"localhost:8002", False),
        (b"LOCALHOST:8002", False),
        (b"app.localhost:8002", False),
        (b"127.0.0.1:8002", False),
        (b"[::1]:8002", False),
        (b"broker", False),
        (b"queue.example", False),  # what the door was told to listen on
        (b"queue.example.:8002", False),
        (b"evil.example", True),
        (b"evil.example:8002", True),
        (b"127.0.0.1.evil.example", True),
        (b"localhost.evil.example", True),
        (b"evil.example.", True),
        (b"1.2.3.4.5", True),
    ],
)
def test_a_name_of_somebodys_domain_is_foreign(host: bytes, foreign: bool) -> None:
    assert is_foreign_host(host, "queue.example") is foreign


@pytest.mark.parametrize(
    ("origin", "foreign"),
    [
        (b"http://localhost:8002", False),
        (b"https://LOCALHOST:8002", False),
        (b"http://localhost", True),
        (b"http://localhost:3000", True),
        (b"http://evil.example", True),
        (b"null", True),
        (b"", True),
    ],
)
def test_an_origin_is_ours_if_it_is_the_host_that_was_asked(origin: bytes, foreign: bool) -> None:
    assert is_foreign_origin(origin, b"localhost:8002") is foreign


def test_a_site_is_ours_or_the_users_own() -> None:
    assert [is_foreign_site(site) for site in (b"same-origin", b"none")] == [False, False]
    assert [is_foreign_site(site) for site in (b"cross-site", b"same-site", b"")] == [True] * 3


def test_a_host_is_told_from_its_port() -> None:
    assert host_name(b"a.b:80") == "a.b"
    assert host_name(b"[::1]:80") == "::1"
    assert host_name(b"::1") == ":"  # not a host by the rules, and nobody's domain


def test_loopback_is_known_by_its_address() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("::1")
    assert not is_loopback("10.0.0.1") and not is_loopback("")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "127.0.0.1:8002"}, 200),
        ({"origin": "http://localhost"}, 200),
        ({"sec_fetch_site": "same-origin"}, 200),
        ({"sec_fetch_site": "none"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"host": "evil.example:8002"}, 421),
        ({"host": "evil.example", "origin": "http://evil.example"}, 421),
    ],
)
@pytest.mark.asyncio
async def test_a_page_of_another_site_can_neither_publish_nor_consume(
    headers: dict[str, str], status: int
) -> None:
    async with served() as running:
        peer = await running.peer()
        for path in ("/producer/register?topic=ducks", "/consumer/register?topic=ducks"):
            await peer.post(path)
        produce = "/producer/produce?topic=ducks&producer_id=producer-1&message=quack"
        answer = await (await running.peer()).post(produce, **headers)
        assert answer.status == status
        assert not [name for name in answer.headers if name.startswith("access-control")]
        consume = "/consumer/consume?topic=ducks&consumer_id=consumer-1"
        published = status == 200
        size = (await peer.get("/size?topic=ducks&consumer_id=consumer-1")).succeeded()["size"]
        assert size == int(published)
        await peer.post(produce)
        await (await running.peer()).get(consume, **headers)
        size = (await peer.get("/size?topic=ducks&consumer_id=consumer-1")).succeeded()["size"]
        assert size == 1, "published twice and consumed once, or published once alone"
