"""How the proxy reaches clients: over slow links, and where nobody answers."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from unittest.mock import Mock

import pytest

from quackmq import limits
from quackmq.errors import Unreachable
from quackmq.protocols.http import limits as http_limits
from quackmq.protocols.http.server import HttpServer
from quackmq.protocols.zmq import limits as zmq_limits
from quackmq.protocols.zmq.proxy import callback_connection as outgoing
from quackmq.protocols.zmq.proxy.host_limiter import PerHostLimiter
from tests.kit.support import listening
from tests.kit.waiting import soon, until
from tests.protocols.codecs.zmtp_frames import command, greeting, ready, request
from tests.protocols.http.v1.serving import Client as HttpClient
from tests.protocols.zmq.peers import DEADLINE_S, TESTER
from tests.protocols.zmq.proxied import HOST, SHORT_LEASE, Proxied, ask, proxied, receive

LARGE = bytes(range(256)) * 16_384  # 4 MiB
PIECE_BYTES = 256 * 1024


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines can be busy: nobody is given up for it, but where that is the point."""
    monkeypatch.setattr(zmq_limits, "PROXY_ANSWER_MS", 60_000)
    monkeypatch.setattr(limits, "PROXY_CONNECT_MS", 60_000)


class SlowClient:
    """A client called donald whose REP socket is made of bytes, taken when the test says so; the
    kernel takes few of them beforehand."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.listening = socket.socket()
        self.listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE_BYTES // 2)
        self.listening.bind((HOST, 0))
        self.listening.listen()
        self.listening.setblocking(False)
        self.port = self.listening.getsockname()[1]
        self.connections: list[socket.socket] = []
        self._received = b""

    async def accept(self) -> None:
        """The next connection, introduced."""
        connection, _ = await soon(self.loop.sock_accept(self.listening))
        self.connections.append(connection)
        await self.loop.sock_sendall(connection, greeting() + ready(b"REP"))
        self._received = b""
        introduced = len(greeting() + ready(b"REQ"))
        while len(self._received) < introduced:
            await self.take(introduced - len(self._received))
        self._received = b""

    async def take(self, most_bytes: int) -> None:
        data = await soon(self.loop.sock_recv(self.connections[-1], most_bytes))
        assert data, "the connection is there"
        self._received += data

    async def take_piece(self) -> None:
        end = len(self._received) + PIECE_BYTES
        while len(self._received) < end:
            await self.take(end - len(self._received))

    async def take_all(self, content: bytes) -> None:
        """The rest of a message, and acknowledge it."""
        while not self._received.endswith(content):
            await self.take(PIECE_BYTES)
        head = self._received[: -len(content)]
        token = head.split(b" ")[-2]
        answer = request(b"ack_received donald ducks " + token)
        await self.loop.sock_sendall(self.connections[-1], answer)

    def close(self) -> None:
        for connection in (self.listening, *self.connections):
            connection.close()


@asynccontextmanager
async def introduced() -> AsyncIterator[tuple[Proxied, SlowClient]]:
    """A client that has said hello, and is connected to."""
    client = SlowClient()
    try:
        async with proxied() as running:
            hello = b"hello donald ducks tcp://127.0.0.1:%d" % client.port
            answered = asyncio.create_task(ask(running.client(), hello))
            await client.accept()
            assert (await answered).startswith(b"ack_welcome")
            yield running, client
    finally:
        client.close()


def on_look(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    """Have something done whenever the proxy has looked what is left to be sent."""
    unsent_bytes = outgoing._Exchange.unsent_bytes

    def watched(exchange: outgoing._Exchange) -> int:
        unsent = unsent_bytes(exchange)
        then()
        return unsent

    monkeypatch.setattr(outgoing._Exchange, "unsent_bytes", watched)


async def acknowledged(running: Proxied) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await running.broker.lag(TESTER, "donald", "ducks"):
            await asyncio.sleep(0.002)


# --- slow links -------------------------------------------------------------------------------


async def test_x3_a_large_message_arrives_however_long_it_takes_if_bytes_keep_leaving(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that takes a piece of it each time that the proxy looks: for twice as many looks as
    there are in the time for an answer."""
    caplog.set_level(logging.WARNING)
    looks = asyncio.Semaphore(0)
    on_look(monkeypatch, looks.release)
    async with introduced() as (running, client):
        monkeypatch.setattr(zmq_limits, "PROXY_ANSWER_MS", 800)
        monkeypatch.setattr(zmq_limits, "PROXY_IDLE_MS", 100)
        await running.put("ducks", LARGE)
        for _ in range(2 * outgoing._CHECKS):
            await soon(looks.acquire())
            await client.take_piece()
        monkeypatch.setattr(zmq_limits, "PROXY_ANSWER_MS", 60_000)
        await client.take_all(LARGE)
        await acknowledged(running)
        assert len(client.connections) == 1, "it was not begun anew"
    assert "does not get what it has missed" not in caplog.text


async def test_x3_a_client_that_takes_nothing_of_a_large_message_is_given_up_for_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with introduced() as (running, client):
        monkeypatch.setattr(zmq_limits, "PROXY_ANSWER_MS", 20)
        await running.put("ducks", LARGE)
        await until(lambda: "did not answer in 20 ms, and read none of " in caplog.text)
        monkeypatch.setattr(zmq_limits, "PROXY_ANSWER_MS", 60_000)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    await client.accept()
                    await client.take_all(LARGE)
                    break
                except (AssertionError, ConnectionError):
                    continue  # one that was given up before there was patience
        await acknowledged(running)


async def test_x3_a_client_that_takes_its_bytes_far_too_slowly_is_given_up_for_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    looks = asyncio.Semaphore(0)
    on_look(monkeypatch, looks.release)
    async with introduced() as (running, client):
        monkeypatch.setattr(zmq_limits, "PROXY_ANSWER_MS", 800)
        monkeypatch.setattr(zmq_limits, "PROXY_SLOWEST_BYTES", 2**50)
        await running.put("ducks", LARGE)
        try:
            for _ in range(2 * outgoing._CHECKS - 1):
                await soon(looks.acquire())
                await client.take_piece()
        except (AssertionError, ConnectionError):
            assert "is too slow" in caplog.text, "it was given up before it had taken all of these"
        await until(lambda: "does not get what it has missed" in caplog.text)
        assert "is too slow" in caplog.text


async def test_a_slow_client_with_many_large_messages_leaves_turns_for_others() -> None:
    """It is sent one at a time: the next ones do not keep others from theirs meanwhile."""
    turns = asyncio.Semaphore(2)
    slow, other = SlowClient(), SlowClient()
    ways = [outgoing.CallbackConnection(outgoing.Target(HOST, each.port)) for each in (slow, other)]
    asking = [asyncio.create_task(ways[0].request_large(b"data ", LARGE, turns)) for _ in range(3)]
    try:
        await slow.accept()
        await until(lambda: not turns.locked() and turns._value == 1)
        asking.append(asyncio.create_task(ways[1].request_large(b"data ", LARGE, turns)))
        await other.accept()
        await other.take_piece()
    finally:
        for way in ways:
            way.close()
        ends = await soon(asyncio.gather(*asking, return_exceptions=True))
        slow.close()
        other.close()
    assert [type(end) for end in ends] == [Unreachable] * 4
    assert turns._value == 2


async def test_who_asks_for_signs_of_life_and_takes_none_has_none_kept_for_it() -> None:
    exchange, transport = outgoing._Exchange(), Mock()
    ping, pong = command(b"PING", b"\0\0here"), command(b"PONG", b"here")
    exchange.connection_made(transport)
    exchange.data_received(greeting() + ready(b"REP") + ping)
    transport.write.assert_called_with(pong)
    exchange.pause_writing()
    transport.reset_mock()
    exchange.data_received(ping * 100)
    transport.write.assert_not_called()
    exchange.resume_writing()
    exchange.data_received(ping)
    transport.write.assert_called_once_with(pong)
    exchange.connection_lost(None)


# --- addresses where nobody answers -----------------------------------------------------------


async def test_hello_with_an_address_that_takes_no_connection_is_answered_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "PROXY_CONNECT_MS", 100)
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind((HOST, 0))
        full.listen(0)
        first.connect(full.getsockname())  # and is not accepted, so there is no room for others
        second.setblocking(False)
        second.connect_ex(full.getsockname())
        async with proxied() as running:
            hello = b"hello donald ducks tcp://127.0.0.1:%d" % full.getsockname()[1]
            answer = await ask(running.client(), hello)
            assert answer.startswith(b"ERR unreachable nobody at"), answer
            assert dict(await running.broker.notes.all("proxy")) == {}


async def test_looking_up_a_name_counts_among_the_time_for_hello(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    async with proxied() as running:
        monkeypatch.setattr(limits, "PROXY_CONNECT_MS", 50)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", never)
        answer = await ask(running.client(), b"hello donald ducks tcp://nobody-knows:5561")
        assert answer.startswith(b"ERR unreachable nobody at tcp://nobody-knows:5561"), answer


async def test_no_more_addresses_are_tried_at_once_than_there_is_a_bound_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_limits, "PROXY_HELLOS_OF_HOST", 2)
    is_open = 0
    most = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal is_open, most
        is_open += 1
        most = max(most, is_open)
        await reader.read(1)
        # Others have all the time that they need to come, if they may.
        for _ in range(100):
            await asyncio.sleep(0)
        is_open -= 1
        writer.close()

    server = await asyncio.start_server(refuse, HOST, 0)
    try:
        async with proxied() as running:
            port = server.sockets[0].getsockname()[1]
            answers = await asyncio.gather(
                *(
                    ask(running.client(), b"hello %d ducks tcp://127.0.0.1:%d" % (number, port))
                    for number in range(10)
                )
            )
            assert all(answer.startswith(b"ERR unreachable") for answer in answers), answers
        assert 1 <= most <= 2
    finally:
        server.close()
        await server.wait_closed()


async def test_who_waits_for_a_turn_to_be_tried_is_answered_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_limits, "PROXY_HELLOS", 1)
    monkeypatch.setattr(limits, "PROXY_CONNECT_MS", 100)
    with socket.socket() as silent:
        silent.bind((HOST, 0))
        silent.listen()
        async with proxied() as running:
            address = b"tcp://127.0.0.1:%d" % silent.getsockname()[1]
            hellos = [b"hello one ducks " + address, b"hello two ducks " + address]
            answers = await asyncio.gather(*(ask(running.client(), hello) for hello in hellos))
            for answer in answers:
                assert answer.startswith(b"ERR unreachable nobody at " + address), answer
            client = running.client()
            rep, port = running.rep()
            monkeypatch.setattr(limits, "PROXY_CONNECT_MS", 60_000)
            hello = b"hello three ducks tcp://127.0.0.1:%d" % port
            assert (await ask(client, hello)).startswith(b"ack_welcome"), "their turns are over"
            assert not rep.closed


async def test_a_host_that_has_all_its_turns_leaves_some_for_others() -> None:
    turns = PerHostLimiter(most_slots=3, most_slots_per_host=2)
    holding: list[str] = []
    done = asyncio.Event()

    async def hold(host: str) -> None:
        async with turns.slot(host):
            holding.append(host)
            await done.wait()

    tasks = [asyncio.create_task(hold("one")) for _ in range(5)]
    await until(lambda: len(holding) == 2)
    tasks += [asyncio.create_task(hold("other")) for _ in range(2)]
    await until(lambda: len(holding) == 3)
    for _ in range(10):
        await asyncio.sleep(0)
    assert holding == ["one", "one", "other"]
    tasks[4].cancel()  # one that waits
    done.set()
    await soon(asyncio.wait(tasks))
    assert sorted(holding) == ["one"] * 4 + ["other"] * 2
    assert not turns._hosts, "nothing is kept of those that are gone"


# --- whom health names ------------------------------------------------------------------------


@asynccontextmanager
async def health(running: Proxied) -> AsyncIterator[Callable[[], asyncio.Future[list[str]]]]:
    """Asks, over HTTP, who cannot be reached."""
    listener = HttpServer(running.broker, HOST, 0)
    client = HttpClient(*await listening(listener))

    def ask_health() -> asyncio.Future[list[str]]:
        return asyncio.ensure_future(
            asyncio.to_thread(lambda: client.get("/v1/health").json["not_reached"])
        )

    try:
        yield ask_health
    finally:
        client.close()
        await soon(listener.close())


async def until_named(ask_health: Callable[[], asyncio.Future[list[str]]], *names: str) -> None:
    """Until health names exactly these."""
    async with asyncio.timeout(DEADLINE_S):
        while [line.partition(": ")[0] for line in await ask_health()] != list(names):
            await asyncio.sleep(0.002)


async def test_health_names_a_client_that_cannot_be_reached_until_it_is_back() -> None:
    async with proxied() as running, health(running) as ask_health:
        rep, port = running.rep()
        asking = running.client()
        await ask(asking, b"hello donald ducks tcp://127.0.0.1:%d" % port)
        assert await ask_health() == []
        rep.close()
        await running.put("ducks", b"quack")
        await until_named(ask_health, "donald, topic ducks")
        rep, port = running.rep()
        await ask(asking, b"hello donald ducks tcp://127.0.0.1:%d" % port)
        _, _, _, token, _ = (await soon(rep.recv())).split(b" ", 4)
        await rep.send(b"ack_received donald ducks " + token)
        await acknowledged(running)
        assert await ask_health() == []


@pytest.mark.parametrize("way", ["goodbye", "elsewhere", "topic"])
async def test_health_forgets_a_client_that_is_gone(way: str) -> None:
    async with proxied() as running, health(running) as ask_health:
        rep, port = running.rep()
        asking = running.client()
        await ask(asking, b"hello donald ducks tcp://127.0.0.1:%d" % port)
        rep.close()
        await running.put("ducks", b"quack")
        await until_named(ask_health, "donald, topic ducks")
        if way == "goodbye":
            await ask(asking, b"goodbye donald ducks")
        elif way == "elsewhere":
            await running.broker.unsubscribe(TESTER, "donald", "ducks")
        else:
            await running.broker.delete_topic(TESTER, "ducks")
        await until_named(ask_health)


async def test_health_forgets_a_client_that_got_by_other_ways_what_could_not_be_sent() -> None:
    """Its address is wrong, but it hears what is sent to all, and acknowledges it late."""
    async with proxied(SHORT_LEASE) as running, health(running) as ask_health:
        rep, port = running.rep()
        asking = running.client()
        await ask(asking, b"hello donald ducks tcp://127.0.0.1:%d" % port)
        subscriber = await running.subscriber(b"client donald", b"ids ducks")
        rep.close()
        await running.put("ducks", b"quack")
        _, _, token = await receive(subscriber)
        await until_named(ask_health, "donald, topic ducks")
        await ask(asking, b"ack_received donald ducks " + token)
        await until_named(ask_health)


async def test_health_names_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "UNREACHED_CLIENTS_LISTED", 2)
    async with proxied() as running, health(running) as ask_health:
        for number in range(5):
            running.broker.pushing.unreached[f"client{number}", "ducks"] = "nobody there"
        assert await ask_health() == [
            "client0, topic ducks: nobody there",
            "client1, topic ducks: nobody there",
        ]
