"""What a browser must not be made to ask for, by pages of other sites."""

from __future__ import annotations

import socket

import pytest

from quackmq.protocols.http import connection
from quackmq.protocols.http.browser_guards import (
    OwnNames,
    host_name,
    is_browser,
    is_foreign_site,
    is_loopback,
    machine_names,
    may_come_from_another_page,
)
from tests.kit.tables import each
from tests.protocols.http.peers import Served, served

NAMES = OwnNames(
    ["Queue.Example", "*.pond.example"], ["listener.example", *machine_names("box.corp.example")]
)
FIREFOX = {"user_agent": "Mozilla/5.0 (X11; rv:140.0) Gecko/20100101", "accept_language": "en"}


@each(
    ("host", "by_loopback", "elsewhere"),
    [
        (b"localhost", True, True),
        (b"localhost:8002", True, True),
        (b"LOCALHOST:8002", True, True),
        (b"app.localhost:8002", True, True),
        (b"127.0.0.1:8002", True, True),
        (b"192.168.7.9:8002", True, True),
        (b"[::1]:8002", True, True),
        (b"[fe80::1%eth0]:8002", True, True),
        (b"queue.example", True, True),
        (b"queue.example.:8002", True, True),
        (b"a.pond.example", True, True),
        (b"a.b.pond.example:80", True, True),
        (b"listener.example:8002", True, True),
        (b"box.corp.example", True, True),
        (b"box", True, True),
        (b"box.local:8002", True, True),
        (b"", True, True),
        (b"broker", False, True),
        (b"broker:8002", False, True),
        (b"pond.example", False, False),
        (b"evilpond.example", False, False),
        (b"corp.example", False, False),
        (b"box.evil.example", False, False),
        (b"evil.example", False, False),
        (b"evil.example:8002", False, False),
        (b"127.0.0.1.evil.example", False, False),
        (b"localhost.evil.example", False, False),
        (b"evil.example.", False, False),
        (b"1.2.3.4.5", False, False),
        (b"\xff.example", False, False),
    ],
)
def test_a_name_of_somebodys_domain_is_not_ours(
    host: bytes, by_loopback: bool, elsewhere: bool
) -> None:
    assert NAMES.allows_host(host, is_loopback=True) is by_loopback
    assert NAMES.allows_host(host, is_loopback=False) is elsewhere


def test_a_star_takes_any_name_and_no_origin() -> None:
    any_name = OwnNames(["*"])
    assert any_name.allows_host(b"evil.example", is_loopback=True)
    assert not any_name.is_own_origin(b"http://evil.example", b"queue.example")


@each(
    ("origin", "own"),
    [
        (b"http://localhost:8002", True),
        (b"https://LOCALHOST:8002", True),
        (b"https://queue.example", True),  # a proxy in front, which sends a Host of its own
        (b"http://a.pond.example", True),
        (b"http://queue.example:3000", False),
        (b"http://localhost", False),
        (b"http://localhost:3000", False),
        (b"http://listener.example", False),
        (b"http://evil.example", False),
        (b"ftp://queue.example", False),
        (b"null", False),
        (b"", False),
    ],
)
def test_an_origin_is_ours_if_it_is_the_host_that_was_asked_or_a_configured_name(
    origin: bytes, own: bool
) -> None:
    assert NAMES.is_own_origin(origin, b"localhost:8002") is own


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


def test_a_machine_has_its_name_its_first_label_and_that_in_multicast_dns() -> None:
    assert machine_names("box.corp.example") == ("box.corp.example", "box", "box.local")
    assert machine_names("box") == ("box", "box", "box.local")
    assert machine_names("") == ()


@each(
    ("headers", "another"),
    [
        ({}, False),
        ({b"user-agent": b"curl/8"}, False),
        ({b"user-agent": b"Mozilla/5.0 WindowsPowerShell/5.1"}, False),
        ({b"user-agent": b"Mozilla/5.0", b"accept-language": b"en"}, True),
        ({b"user-agent": b"Mozilla/5.0", b"accept-language": b"en", b"referer": b"http://a/x"}, 0),
        ({b"user-agent": b"Mozilla/5.0", b"accept-language": b"en", b"origin": b"http://a"}, False),
        ({b"user-agent": b"Mozilla/5.0", b"accept-language": b"", b"sec-fetch-site": b"none"}, 0),
        ({b"referer": b"http://a/page?x"}, False),
        ({b"referer": b"http://a"}, False),
        ({b"referer": b"http://a:3000/"}, True),
        ({b"referer": b"http://evil.example/http://a/"}, True),
        ({b"referer": b""}, True),
        ({b"sec-fetch-site": b"none", b"sec-purpose": b"prefetch;prerender"}, True),
    ],
)
def test_a_browser_shows_that_the_user_or_a_page_of_ours_asks(
    headers: dict[bytes, bytes], another: bool
) -> None:
    assert may_come_from_another_page([*headers.items()], b"a", OwnNames()) == another


def test_a_browser_names_itself_and_its_users_languages() -> None:
    assert is_browser({b"user-agent": b"Mozilla/5.0", b"accept-language": b"de"})
    assert not is_browser({b"user-agent": b"node", b"accept-language": b"*"})


#: What pages of other sites can make browsers send, to localhost or within a network.
FOREIGN = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"sec_fetch_site": "cross-site"},
    {"sec_fetch_site": "same-site"},
]
OWN = [
    {},
    {"host": "127.0.0.1:8002"},
    {"origin": "http://localhost"},
    {"sec_fetch_site": "same-origin"},
    {"sec_fetch_site": "none"},
    {**FIREFOX, "referer": "http://localhost/v1/docs"},
    {**FIREFOX, "origin": "http://localhost"},
]
REBOUND = [
    {"host": "evil.example:8002"},
    {"host": "evil.example", "origin": "http://evil.example"},
    {"host": "evil.example", "sec_fetch_site": "same-origin"},
    {"host": "evil"},
]
#: Without a sign but these, as where a browser does not trust the address.
UNSAID = [FIREFOX, {"referer": "http://evil.example/"}, {**FIREFOX, "referer": "http://a/"}]


async def size(running: Served) -> int:
    asked = "/size?topic=ducks&consumer_id=consumer-1"
    found = (await (await running.peer()).get(asked)).succeeded()["size"]
    assert isinstance(found, int)
    return found


@each(
    ("headers", "status"),
    [
        *((each, 200) for each in OWN),
        *((each, 403) for each in [*FOREIGN, *UNSAID]),
        *((each, 421) for each in REBOUND),
    ],
)
async def test_a_page_of_another_site_can_neither_publish_nor_consume(
    headers: dict[str, str], status: int
) -> None:
    async with served() as running:
        peer = await running.peer()
        for path in ("/producer/register?topic=ducks", "/consumer/register?topic=ducks"):
            await peer.post(path)
        produce = "/producer/produce?topic=ducks&producer_id=producer-1&message=quack"
        consume = "/consumer/consume?topic=ducks&consumer_id=consumer-1"
        answer = await (await running.peer()).post(produce, **headers)
        assert answer.status == status
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert await size(running) == int(status == 200)
        await peer.post(produce)
        before = await size(running)
        assert (await (await running.peer()).get(consume, **headers)).status == status
        assert await size(running) == before - int(status == 200)


@each("headers", [*FOREIGN, *UNSAID, *REBOUND])
async def test_asking_for_the_size_with_a_last_id_is_refused_to_other_pages_too(
    headers: dict[str, str],
) -> None:
    async with served() as running:
        peer = await running.peer()
        for path in ("/producer/register?topic=ducks", "/consumer/register?topic=ducks"):
            await peer.post(path)
        produce = "/producer/produce?topic=ducks&producer_id=producer-1&message=quack"
        last_id = (await peer.post(produce)).succeeded()["message_id"]
        asked = f"/size?topic=ducks&consumer_id=consumer-1&last_id={last_id}"
        assert (await (await running.peer()).get(asked, **headers)).status in (403, 421)
        assert await size(running) == 1


@each("headers", [*FOREIGN, *REBOUND])
async def test_events_and_preflights_are_refused_to_other_pages(headers: dict[str, str]) -> None:
    async with served() as running:
        await (await running.peer()).post("/topics?topic_name=ducks")
        for method, path in [
            ("GET", "/v1/topics/ducks/events"),
            ("GET", "/v1/topics"),
            ("OPTIONS", "/producer/produce"),
            ("OPTIONS", "/v1/topics/ducks/messages"),
        ]:
            answer = await (await running.peer()).ask(method, path, **headers)
            assert answer.status in (403, 421), (method, path)
            assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_a_program_may_ask_everything_that_a_browser_has_to_show_something_for() -> None:
    async with served() as running:
        peer = await running.peer()
        answer = await peer.post("/topics?topic_name=ducks", user_agent="python-requests/2")
        assert answer.status == 200
        answer = await peer.ask("DELETE", "/v1/topics/ducks", accept_language="en")
        assert answer.status == 204


async def test_a_name_is_refused_at_every_address_unless_it_is_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As though it had come to an address of the network, where the tests have none."""
    monkeypatch.setattr(connection, "is_loopback", lambda address: False)
    async with served(names=["Queue.Example"], advertised_host="adv.example") as running:
        for host, status in [
            ("evil.example", 421),
            ("queue.example:8002", 200),
            ("adv.example", 200),
            ("10.1.2.3:8002", 200),
            ("quackmq", 200),  # as containers call each other
            (socket.gethostname(), 200),
        ]:
            answer = await (await running.peer()).post(f"/topics?topic_name={host[:5]}", host=host)
            assert answer.status == status, host
        assert "evil." not in running.broker.topics()


async def test_a_refused_name_is_told_the_setting_to_change() -> None:
    async with served() as running:
        answer = await (await running.peer()).get("/topics", host="duck.example:8002")
        said = answer.failed(421, "not_allowed")
        assert "Host duck.example is not allowed:" in said
        assert "http_names (--http-names duck.example, or QUACKMQ_HTTP_NAMES)" in said
        answer = await (await running.peer()).get("/topics", origin="https://duck.example")
        said = answer.failed(403, "not_allowed")
        assert "Origin is https://duck.example" in said and "http_names" in said


async def test_a_proxy_that_sends_a_host_of_its_own_needs_the_name_of_its_pages() -> None:
    headers = {"host": "127.0.0.1:8002", "origin": "https://queue.example"}
    async with served() as running:
        peer = await running.peer()
        assert (await peer.post("/topics?topic_name=ducks", **headers)).status == 403
    async with served(names=["queue.example"]) as running:
        peer = await running.peer()
        assert (await peer.post("/topics?topic_name=ducks", **headers)).status == 200
