"""X2 to X4: hello, goodbye, data and their acknowledgements; what is tracked, and what survives."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest
import zmq.asyncio

from quackmq import limits
from quackmq.broker import Caller, RecordPosition, message_id
from quackmq.protocols.zmq import limits as zmq_limits
from quackmq.protocols.zmq.proxy.clients import ProxySettings
from quackmq.stores.memory import MemoryStore
from tests.kit.waiting import soon, until
from tests.protocols.zmq.peers import DEADLINE_S, TESTER
from tests.protocols.zmq.proxied import LONG_LEASE, SHORT_LEASE, Proxied, ask, proxied, receive


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines can be busy: nobody is given up for it, but where that is the point."""
    monkeypatch.setattr(zmq_limits, "PROXY_ANSWER_MS", 60_000)
    monkeypatch.setattr(limits, "PROXY_CONNECT_MS", 60_000)


class Client:
    """A client of the proxy, written as one would be in any language: three sockets."""

    def __init__(self, running: Proxied, name: str = "donald", topic: str = "ducks") -> None:
        self.running = running
        self.name = name
        self.topic = topic
        self.asking = running.client()
        self.rep, self.port = running.rep()

    async def hello(self, address: str | None = None) -> str:
        address = address or f"tcp://127.0.0.1:{self.port}"
        answer = await ask(self.asking, f"hello {self.name} {self.topic} {address}".encode())
        return answer.decode()

    async def subscribe(self) -> zmq.asyncio.Socket:
        """To what is sent to all."""
        return await self.running.subscriber(
            b"client " + self.name.encode(), b"ids " + self.topic.encode()
        )

    async def missed(self) -> tuple[str, bytes]:
        """The id and the content of what is sent to this client alone; to be answered."""
        data: bytes = await soon(self.rep.recv())
        verb, name, topic, token, content = data.split(b" ", 4)
        assert (verb, name, topic) == (b"data", self.name.encode(), self.topic.encode())
        return token.decode(), content

    async def answer(self, verb: str, token: str) -> None:
        await self.rep.send(f"{verb} {self.name} {self.topic} {token}".encode())

    async def take(self) -> bytes:
        token, content = await self.missed()
        await self.answer("ack_received", token)
        return content

    async def acknowledge(self, *tokens: str) -> bytes:
        return await ask(
            self.asking, " ".join(("ack_received", self.name, self.topic, *tokens)).encode()
        )

    async def lag(self) -> int:
        return await self.running.broker.lag(TESTER, self.name, self.topic)

    async def is_done(self) -> None:
        """Until nothing is left to be acknowledged."""
        async with asyncio.timeout(DEADLINE_S):
            while await self.lag():
                await asyncio.sleep(0.002)


async def test_x2_hello_is_welcomed_and_goodbye_ends_it() -> None:
    async with proxied() as running:
        client = Client(running)
        xpub = running.broker.listener_addresses["xpub"][1]
        assert await client.hello() == f"ack_welcome donald ducks new {xpub}"
        assert await client.hello() == f"ack_welcome donald ducks known {xpub}"
        (kept,) = await running.broker.subscriptions(TESTER)
        assert (kept.name, kept.topic_name) == ("donald", "ducks")
        assert await ask(client.asking, b"goodbye donald ducks") == b"ack_goodbye donald ducks"
        assert await running.broker.subscriptions(TESTER) == []
        again = await ask(client.asking, b"goodbye donald ducks")
        assert again.startswith(b"ERR unknown_subscription")
        assert dict(await running.broker.notes.all("proxy")) == {}


async def test_x2_what_a_client_was_not_subscribed_for_is_sent_to_it_alone() -> None:
    async with proxied() as running:
        client = Client(running)
        await client.hello()
        await running.put("ducks", b"one", b"two \xff\0")
        assert await client.take() == b"one"
        assert await client.take() == b"two \xff\0"
        await client.is_done()


async def test_x2_what_is_sent_to_all_comes_with_its_id_and_is_acknowledged_by_it() -> None:
    async with proxied() as running:
        client = Client(running)
        await client.hello()
        subscriber = await client.subscribe()
        await running.put("ducks", b"one", b"two")
        tokens = []
        for body in (b"one", b"two"):
            first, content, token = await receive(subscriber)
            assert (first, content) == (b"ids ducks", body)
            tokens.append(token.decode())
        noted = await client.acknowledge(*tokens)
        assert noted.startswith(b"ack_noted donald ducks ")
        await client.is_done()
        assert not await client.rep.poll(20), "nothing is sent again"


async def test_x3_what_is_not_acknowledged_in_time_is_sent_to_the_clients_address() -> None:
    async with proxied(SHORT_LEASE) as running:
        client = Client(running)
        await client.hello()
        subscriber = await client.subscribe()
        await running.put("ducks", b"quack")
        assert (await receive(subscriber))[1] == b"quack"
        assert await client.take() == b"quack"
        await client.is_done()


async def test_x3_it_is_sent_until_it_is_acknowledged_and_the_others_are_not_held_up() -> None:
    async with proxied(SHORT_LEASE) as running:
        client = Client(running)
        await client.hello()
        await running.put("ducks", b"busy")
        for _ in range(3):
            token, content = await client.missed()
            assert content == b"busy"
            await client.answer("not_yet", token)
        await running.put("ducks", b"next")
        contents: dict[bytes, str] = {}
        while len(contents) < 2:
            token, content = await client.missed()
            contents[content] = token
            await client.answer("ack_received" if content == b"next" else "not_yet", token)
        assert set(contents) == {b"busy", b"next"}
        await client.acknowledge(contents[b"busy"])
        await client.is_done()


async def test_x3_each_client_is_tracked_by_itself_and_what_all_have_is_forgotten() -> None:
    async with proxied() as running:
        one, other = Client(running, "one"), Client(running, "other")
        for client in (one, other):
            await client.hello()
        await running.put("ducks", b"quack")
        assert await one.take() == b"quack"
        await one.is_done()
        assert await other.lag() == 1
        assert await other.take() == b"quack"
        await other.is_done()


async def test_x3_a_client_has_several_topics_at_one_address() -> None:
    async with proxied() as running:
        client = Client(running)
        await client.hello()
        await ask(client.asking, b"hello donald geese tcp://127.0.0.1:%d" % client.port)
        await running.put("ducks", b"quack")
        await running.put("geese", b"honk")
        got = set()
        for _ in range(2):
            _, _, topic, token, content = (await soon(client.rep.recv())).split(b" ", 4)
            got.add((topic, content))
            await client.rep.send(b"ack_received donald %b %b" % (topic, token))
        assert got == {(b"ducks", b"quack"), (b"geese", b"honk")}


async def test_x3_an_acknowledgement_that_comes_before_its_lease_counts() -> None:
    """XPUB does not wait for leases: here none can be given, for one is outstanding already."""
    async with proxied() as running:
        client = Client(running)
        await client.hello()
        await running.put("ducks", b"first")
        token, _ = await client.missed()  # and no answer: nothing else is sent meanwhile
        subscriber = await client.subscribe()
        await running.put("ducks", b"second")
        _, content, early = await receive(subscriber)
        assert content == b"second"
        await client.acknowledge(early.decode())
        await client.answer("ack_received", token)
        await client.is_done()
        assert not await client.rep.poll(20), "it was not sent again"


async def test_x4_address_and_what_is_not_acknowledged_survive_the_broker() -> None:
    store = MemoryStore()
    rep = zmq.asyncio.Context()
    missed = rep.socket(zmq.REP)
    port = missed.bind_to_random_port("tcp://127.0.0.1")
    try:
        async with proxied(store=store) as running:
            client = running.client()
            await ask(client, b"hello donald ducks tcp://127.0.0.1:%d" % port)
            subscriber = await running.subscriber(b"client donald", b"ids ducks")
            await running.put("ducks", b"one", b"two")
            tokens = [(await receive(subscriber))[2] for _ in range(2)]
            await ask(client, b"ack_received donald ducks " + tokens[0])
        async with proxied(store=store) as running:
            data = await soon(missed.recv())
            assert data == b"data donald ducks " + tokens[1] + b" two"
            await missed.send(b"ack_received donald ducks " + tokens[1])
            await running.put("ducks", b"three")
            assert (await soon(missed.recv())).endswith(b" three")
    finally:
        rep.destroy(linger=0)
        await store.close()


async def test_x4_the_last_address_of_a_client_counts_for_all_its_topics_after_a_restart() -> None:
    store = MemoryStore()
    context = zmq.asyncio.Context()
    former, present = context.socket(zmq.REP), context.socket(zmq.REP)
    ports = [each.bind_to_random_port("tcp://127.0.0.1") for each in (former, present)]
    try:
        async with proxied(store=store) as running:
            client = running.client()
            for topic, port in (("ducks", ports[0]), ("geese", ports[0]), ("geese", ports[1])):
                await ask(client, f"hello donald {topic} tcp://127.0.0.1:{port}".encode())
        async with proxied(store=store) as running:
            await running.put("ducks", b"quack")
            assert (await soon(present.recv())).endswith(b" quack")
    finally:
        context.destroy(linger=0)
        await store.close()


async def test_x4_who_says_hello_before_all_is_taken_up_again_is_served_once() -> None:
    store = MemoryStore()
    async with proxied(store=store) as running:
        client = Client(running)
        await client.hello()
        # As if it had come while the notes of the last life were being read.
        await running.proxy.clients.load()
        await running.put("ducks", b"quack")
        assert await client.take() == b"quack"
        await client.is_done()
        assert not await client.rep.poll(20), "by one, not by two"
        assert await ask(client.asking, b"goodbye donald ducks") == b"ack_goodbye donald ducks"
    await store.close()


async def test_a_client_that_comes_back_is_asked_at_its_new_address() -> None:
    async with proxied() as running:
        former = Client(running)
        await former.hello()
        former.rep.close()
        await running.put("ducks", b"while away")
        later = Client(running)
        assert (await later.hello()).startswith("ack_welcome donald ducks known")
        assert await later.take() == b"while away"


async def test_an_unreachable_client_is_tried_again_and_harms_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with proxied() as running:
        gone, well = Client(running, "gone"), Client(running, "well")
        await gone.hello()
        await well.hello()
        gone.rep.close()
        await running.put("ducks", *(b"%d" % number for number in range(20)))
        assert [await well.take() for _ in range(20)] == [b"%d" % number for number in range(20)]
        await until(lambda: "gone does not get what it has missed of ducks" in caplog.text)
        assert await gone.lag() == 20


async def test_a_client_that_never_answers_is_given_up_for_a_while_and_harms_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(zmq_limits, "PROXY_ANSWER_MS", 20)
    caplog.set_level(logging.WARNING)
    async with proxied() as running:
        silent, well = Client(running, "silent"), Client(running, "well")
        await silent.hello()
        await well.hello()
        await running.put("ducks", b"one")
        assert await well.take() == b"one"
        await until(lambda: "did not answer in 20 ms" in caplog.text)
        monkeypatch.setattr(zmq_limits, "PROXY_ANSWER_MS", 60_000)
        # It is asked again, over a new connection, and may then answer.
        async with asyncio.timeout(DEADLINE_S):
            while await silent.lag():
                if await silent.rep.poll(10):
                    await silent.take()


@pytest.mark.parametrize(
    "answer", [b"nonsense", b"ack_received donald ducks other", b"ERR error no", b""]
)
async def test_a_client_that_answers_something_else_is_asked_again(answer: bytes) -> None:
    async with proxied() as running:
        client = Client(running)
        await client.hello()
        await running.put("ducks", b"quack")
        await client.missed()
        await client.rep.send(answer)
        assert await client.take() == b"quack"


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("tcp://127.0.0.2:{port}", "not_allowed"),
        ("tcp://[::1]:{port}", "not_allowed"),
        ("192.0.2.1:5561", "not_allowed"),
        ("tcp://127.0.0.1:{closed}", "unreachable"),
        ("tcp://127.0.0.1:{xpub}", "unreachable"),
        # No name at all, which is found out without asking any name server.
        (f"tcp://{'x' * 64}:{{port}}", "unreachable"),
        ("tcp://127.0.0.1:0", "invalid_request"),
        ("tcp://127.0.0.1:70000", "invalid_request"),
        ("tcp://127.0.0.1", "invalid_request"),
        ("inproc://here", "invalid_request"),
        ("ipc:///somewhere:1", "invalid_request"),
    ],
)
async def test_hello_with_an_address_that_is_not_the_clients_own_is_refused(
    address: str, code: str
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and nobody listens
        async with proxied() as running:
            client = Client(running)
            ports = {
                "port": client.port,
                "closed": held.getsockname()[1],
                "xpub": running.broker.listener_addresses["xpub"][1],
            }
            answer = await client.hello(address.format(**ports))
            assert answer.startswith(f"ERR {code} "), answer
            assert dict(await running.broker.notes.all("proxy")) == {}
            assert await running.broker.subscriptions(TESTER) == []


async def test_hello_with_a_name_that_nobody_knows_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async with proxied() as running:
        client = Client(running)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
        answer = await client.hello(f"tcp://no-such-host:{client.port}")
        assert answer.startswith("ERR unreachable there is no host no-such-host: "), answer


@pytest.mark.parametrize(
    "address", ["127.0.0.1:{port}", "tcp://*:{port}", "tcp://localhost:{port}"]
)
async def test_hello_may_spell_the_clients_own_address_in_several_ways(address: str) -> None:
    async with proxied() as running:
        client = Client(running)
        answer = await client.hello(address.format(port=client.port))
        assert answer.startswith("ack_welcome"), answer
        await running.put("ducks", b"quack")
        assert await client.take() == b"quack"


async def test_a_setting_allows_addresses_of_other_hosts() -> None:
    settings = ProxySettings(lease_ms=LONG_LEASE.lease_ms, any_address=True)
    async with proxied(settings) as running:
        client = Client(running)
        # Nobody listens there, but nobody says that it may not be.
        answer = await client.hello(f"tcp://127.0.0.2:{client.port}")
        assert answer.startswith("ERR unreachable")


async def test_a_peer_that_is_no_rep_socket_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PROXY_CONNECT_MS", 200)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    try:
        async with proxied() as running:
            port = server.sockets[0].getsockname()[1]
            answer = await Client(running).hello(f"tcp://127.0.0.1:{port}")
            assert answer.startswith("ERR unreachable nobody at")
    finally:
        server.close()
        await server.wait_closed()


async def test_a_name_in_another_mode_is_refused_and_nothing_is_noted() -> None:
    async with proxied() as running:
        await running.broker.subscribe(Caller("s"), "donald", "ducks")
        client = Client(running)
        assert (await client.hello()).startswith("ERR name_in_other_mode")
        assert dict(await running.broker.notes.all("proxy")) == {}


async def test_with_its_topic_a_client_goes_and_its_note() -> None:
    async with proxied() as running:
        client = Client(running)
        await client.hello()
        await running.broker.delete_topic(TESTER, "ducks")
        async with asyncio.timeout(DEADLINE_S):
            while await running.broker.notes.all("proxy"):
                await asyncio.sleep(0.002)
        assert (await client.hello()).startswith("ack_welcome donald ducks new")


async def test_a_subscription_that_another_listener_ends_is_ended_here_too() -> None:
    async with proxied() as running:
        client = Client(running)
        await client.hello()
        await running.broker.unsubscribe(TESTER, "donald", "ducks")
        async with asyncio.timeout(DEADLINE_S):
            while await running.broker.notes.all("proxy"):
                await asyncio.sleep(0.002)
        await running.put("ducks", b"unheard")
        assert (await client.hello()).startswith("ack_welcome donald ducks new")
        await running.put("ducks", b"heard")
        assert await client.take() == b"heard"


async def test_x4_who_says_hello_at_once_when_its_topic_is_made_anew_misses_nothing_of_it() -> None:
    """What served the former one has not noticed yet that it is gone."""
    store = MemoryStore()
    async with proxied(store=store) as running:
        client = Client(running)
        await client.hello()
        await running.put("ducks", b"former")
        assert await client.take() == b"former"
        await client.is_done()
        for number in range(5):
            await running.broker.delete_topic(TESTER, "ducks")
            await client.hello()
            await running.put("ducks", b"%d" % number)
            assert await client.take() == b"%d" % number
            await client.is_done()
        assert list(await running.broker.notes.all("proxy")) == ["ducks/donald"]
    await store.close()


async def test_x4_an_early_acknowledgement_is_forgotten_with_its_topic() -> None:
    """The offset means another entry in a topic that is made anew, which was never sent."""
    async with proxied() as running:
        client = Client(running)
        await client.hello()
        await running.put("ducks", b"former")
        await client.missed()  # and no answer: nothing else is lent meanwhile
        second = message_id(running.broker.topic("ducks").id, RecordPosition(0, 1))
        await client.acknowledge(second)
        await running.broker.delete_topic(TESTER, "ducks")
        again = Client(running)
        await again.hello()
        await running.put("ducks", b"a", b"b")
        assert [await again.take() for _ in range(2)] == [b"a", b"b"]
        await again.is_done()


async def test_large_messages_are_sent_again_whole() -> None:
    async with proxied() as running:
        client = Client(running)
        await client.hello()
        body = bytes(range(256)) * 4_000
        await running.put("ducks", body, b"small")
        assert await client.take() == body
        assert await client.take() == b"small"


async def test_too_many_clients_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_limits, "PROXY_CLIENTS", 1)
    async with proxied() as running:
        assert (await Client(running, "one").hello()).startswith("ack_welcome")
        assert (await Client(running, "two").hello()).startswith("ERR limit_reached")
        assert (await Client(running, "one").hello()).startswith("ack_welcome")


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"ack_received donald ducks nonsense", b"invalid_message_id"),
        (b"ack_received donald nowhere x", b"unknown_topic"),
        (b"ack_received nobody ducks ID", b"unknown_subscription"),
        (b"goodbye nobody ducks", b"unknown_subscription"),
        (b"goodbye donald nowhere", b"unknown_topic"),
        (b"publish daisy no/topic 1 x", b"illegal_topic_name"),
        (b"PUT daisy ducks 1", b"protocol_error"),
        (b"", b"protocol_error"),
    ],
)
async def test_what_cannot_be_is_answered_by_its_code(frame: bytes, code: bytes) -> None:
    async with proxied() as running:
        client = Client(running)
        await client.hello()
        await running.put("ducks", b"quack")
        token, _ = await client.missed()
        answer = await ask(running.client(), frame.replace(b"ID", token.encode()))
        assert answer.startswith(b"ERR " + code + b" "), answer


async def test_an_id_of_another_topic_acknowledges_nothing() -> None:
    async with proxied() as running:
        client = Client(running)
        await client.hello()
        await running.put("ducks", b"quack")
        token, _ = await client.missed()
        await running.put("geese", b"honk")
        answer = await ask(running.client(), b"ack_received donald geese " + token.encode())
        assert answer.startswith(b"ERR invalid_message_id")
        assert await client.lag() == 1
