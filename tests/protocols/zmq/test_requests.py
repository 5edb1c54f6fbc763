"""R1 to R4 and R7 over libzmq's own sockets: what a user of the document's protocol sees."""

from __future__ import annotations

import asyncio

import pytest
import zmq

from quackmq.broker import Broker, BrokerSettings
from quackmq.broker.publish.service import PublishService
from quackmq.model.policy import Policy
from quackmq.protocols.zmq import limits as zmq_limits
from quackmq.records.batch import Record
from tests.broker.flock import Member
from tests.kit.tables import each
from tests.kit.waiting import soon, until
from tests.protocols.codecs.zmtp_frames import command
from tests.protocols.zmq.peers import TESTER, SlowStore, Socket, WatchedBroker, broker_of, served


def id_in(answer: bytes) -> bytes:
    verb, _, _, message_id, _ = answer.split(b" ", 4)
    assert verb == b"GET"
    return message_id


async def get_all(socket: Socket, client: str, topic: str, count: int) -> list[bytes]:
    last = b"-1"
    contents = []
    for _ in range(count):
        answer = await socket.ask(f"GET {client} {topic} ".encode() + last)
        last = id_in(answer)
        contents.append(answer.split(b" ", 4)[4])
    return contents


# --- R1: requests and answers ----------------------------------------------------------------


async def test_r1_put_get_sub_and_unsub_are_answered_as_the_document_says() -> None:
    async with served() as running:
        socket = running.socket()
        assert await socket.ask(b"SUB donald ducks") == b"SUB donald ducks"
        assert await socket.ask(b"SUB donald ducks") == b"RESUB donald ducks"
        assert await socket.ask(b"PUT daisy ducks quack  quack\n") == (
            b"PUT daisy ducks quack  quack\n"
        )
        answer = await socket.ask(b"GET donald ducks -1")
        assert answer == b"GET donald ducks " + id_in(answer) + b" quack  quack\n"
        assert await socket.ask(b"UNSUB donald ducks") == b"UNSUB donald ducks"


async def test_an_empty_content_is_a_message_like_others() -> None:
    async with served() as running:
        socket = running.socket()
        await socket.ask(b"SUB donald ducks")
        assert await socket.ask(b"PUT daisy ducks") == b"PUT daisy ducks"
        assert await socket.ask(b"PUT daisy ducks ") == b"PUT daisy ducks "
        assert await get_all(socket, "donald", "ducks", 2) == [b"", b""]


async def test_bytes_that_another_listener_put_come_as_they_are() -> None:
    async with served() as running:
        socket = running.socket()
        await socket.ask(b"SUB donald ducks")
        for value in (b"\xff\x00\xfe", None):
            record = Record(0, -1, b"a key", value)
            await running.broker.messages.put(TESTER, "ducks", [record])
        assert await get_all(socket, "donald", "ducks", 2) == [b"\xff\x00\xfe", b""]


@pytest.mark.parametrize("size", [255, 256, 70_000, 5_000_000])
async def test_contents_of_any_size_go_through(size: int) -> None:
    async with served() as running:
        socket = running.socket()
        await socket.ask(b"SUB donald ducks")
        put = b"PUT daisy ducks " + b"q" * size
        assert await socket.ask(put) == put
        assert await get_all(socket, "donald", "ducks", 1) == [b"q" * size]


@each(
    ("frame", "code"),
    [
        (b"", "protocol_error"),
        (b"FOO donald ducks", "protocol_error"),
        (b"PUT donald", "protocol_error"),
        (b"PUT donald ducks \xff", "protocol_error"),
        (b"PUT donald d/cks quack", "illegal_topic_name"),
        (b"PUT donald " + b"d" * 300 + b" quack", "illegal_topic_name"),
        (b"SUB " + b"d" * 300 + b" ducks", "invalid_request"),
        (b"GET donald nowhere -1", "unknown_topic"),
        (b"GET nobody ducks -1", "unknown_subscription"),
        (b"UNSUB nobody ducks", "unknown_subscription"),
        (b"UNSUB donald nowhere", "unknown_topic"),
        (b"PUTN donald ducks 99999999999999999999 x", "invalid_request"),
    ],
)
async def test_errors_are_answered_with_their_code_and_the_next_request_is_served(
    frame: bytes, code: str
) -> None:
    async with served() as running:
        socket = running.socket()
        await socket.ask(b"SUB donald ducks")
        assert (await socket.ask(frame)).startswith(f"ERR {code} ".encode())
        assert await socket.ask(b"PUT donald ducks quack") == b"PUT donald ducks quack"


async def test_get_with_an_invalid_id_sends_the_head_again_r2() -> None:
    async with served() as running:
        socket = running.socket()
        await socket.ask(b"SUB donald ducks")
        await socket.ask(b"PUT donald ducks one")
        await socket.ask(b"PUT donald ducks two")
        head = await socket.ask(b"GET donald ducks -1")
        for last_id in (b"nonsense", b"A" * 39, b"0", b"\xc3\xbc"):
            assert await socket.ask(b"GET donald ducks " + last_id) == head, last_id
        assert (await socket.ask(b"GET donald ducks " + id_in(head))).endswith(b" two")


async def test_an_id_of_a_topic_that_was_made_anew_acknowledges_nothing() -> None:
    async with served() as running:
        socket = running.socket()
        await socket.ask(b"SUB donald ducks")
        await socket.ask(b"PUT donald ducks quack")
        old = id_in(await socket.ask(b"GET donald ducks -1"))
        await running.broker.delete_topic(TESTER, "ducks")
        await socket.ask(b"SUB donald ducks")
        await socket.ask(b"PUT donald ducks new")
        assert (await socket.ask(b"GET donald ducks " + old)).endswith(b" new")


async def test_a_name_that_a_group_uses_is_refused_and_its_messages_stay() -> None:
    async with served() as running:
        socket = running.socket()
        await socket.ask(b"SUB donald ducks")
        await socket.ask(b"PUT daisy ducks quack")
        member = Member(running.broker, "donald")
        await member.enter()
        answer = await socket.ask(b"GET donald ducks -1")
        assert answer.startswith(b"ERR name_in_other_mode ")
        await member.leave()
        assert await get_all(socket, "donald", "ducks", 1) == [b"quack"]


# --- R2: exactly once ------------------------------------------------------------------------


async def test_r2_the_head_is_sent_again_until_its_id_is_named() -> None:
    async with served() as running:
        socket = running.socket()
        await socket.ask(b"SUB donald ducks")
        for content in (b"one", b"two"):
            await socket.ask(b"PUT daisy ducks " + content)
        first = await socket.ask(b"GET donald ducks -1")
        assert first.endswith(b" one")
        assert await socket.ask(b"GET donald ducks -1") == first
        second = await socket.ask(b"GET donald ducks " + id_in(first))
        assert second.endswith(b" two")
        assert await socket.ask(b"GET donald ducks " + id_in(first)) == second


async def test_r2_every_subscriber_gets_every_message_in_order() -> None:
    async with served() as running:
        socket = running.socket()
        clients = ["donald", "daisy", "dewey"]
        for client in clients:
            await socket.ask(f"SUB {client} ducks".encode())
        contents = [b"%d" % number for number in range(20)]
        for content in contents:
            await socket.ask(b"PUT gus ducks " + content)
        for client in clients:
            assert await get_all(socket, client, "ducks", 20) == contents


async def test_numbered_puts_are_there_once_however_often_they_are_sent() -> None:
    async with served() as running:
        socket = running.socket()
        await socket.ask(b"SUB donald ducks")
        assert await socket.ask(b"LAST daisy ducks") == b"LAST daisy ducks -1"
        for _ in range(3):
            assert await socket.ask(b"PUTN daisy ducks 0 one") == b"PUTN daisy ducks 0"
        assert await socket.ask(b"PUTN daisy ducks 5 two") == b"PUTN daisy ducks 5"
        assert await socket.ask(b"PUTN daisy ducks 4 late") == b"PUTN daisy ducks 4"
        assert await socket.ask(b"LAST daisy ducks") == b"LAST daisy ducks 5"
        assert await socket.ask(b"LAST donald ducks") == b"LAST donald ducks -1"
        assert await socket.ask(b"LAST daisy nowhere") == b"LAST daisy nowhere -1"
        assert await get_all(socket, "donald", "ducks", 2) == [b"one", b"two"]
        assert await running.broker.lag(TESTER, "donald", "ducks") == 1, "the second, un-named"


# --- R3, R4: subscriptions and topics --------------------------------------------------------


async def test_r3_a_subscription_outlives_its_clients_connection() -> None:
    async with served() as running:
        first = running.socket()
        await first.ask(b"SUB donald ducks")
        first.close()
        second = running.socket()
        await second.ask(b"PUT daisy ducks quack")
        assert await get_all(second, "donald", "ducks", 1) == [b"quack"]
        assert await second.ask(b"SUB donald ducks") == b"RESUB donald ducks"


async def test_r4_a_topic_comes_with_the_first_subscription_and_goes_with_the_last() -> None:
    settings = BrokerSettings(default_policy=Policy(ephemeral=True, needs_subscriber=True))
    async with served(settings=settings) as running:
        socket = running.socket()
        assert "ducks" not in running.broker.topics()
        await socket.ask(b"SUB donald ducks")
        await socket.ask(b"SUB daisy ducks")
        await socket.ask(b"UNSUB donald ducks")
        assert "ducks" in running.broker.topics()
        await socket.ask(b"UNSUB daisy ducks")
        assert "ducks" not in running.broker.topics()


async def test_r4_a_topic_of_a_pattern_comes_and_goes_more_than_once() -> None:
    settings = BrokerSettings(topic_defaults={"d*": {"ephemeral": True, "needs_subscriber": True}})
    async with served(settings=settings) as running:
        socket = running.socket()
        for _ in range(3):
            refusal = await socket.ask(b"PUT daisy ducks quack")
            assert refusal.startswith(b"ERR unknown_topic ")
            assert await socket.ask(b"SUB donald ducks") == b"SUB donald ducks"
            assert await socket.ask(b"PUT daisy ducks quack") == b"PUT daisy ducks quack"
            assert await get_all(socket, "donald", "ducks", 1) == [b"quack"]
            assert await socket.ask(b"UNSUB donald ducks") == b"UNSUB donald ducks"
            assert "ducks" not in running.broker.topics()


async def test_a_put_creates_its_topic_unless_the_settings_say_no() -> None:
    async with served() as running:
        assert await running.socket().ask(b"PUT donald ducks x") == b"PUT donald ducks x"
        assert "ducks" in running.broker.topics()
    async with served(settings=BrokerSettings(auto_create_topics=False)) as running:
        answer = await running.socket().ask(b"PUT donald ducks x")
        assert answer.startswith(b"ERR unknown_topic ")


async def test_puts_take_turns_on_the_partitions_and_all_of_them_are_got() -> None:
    async with served(settings=BrokerSettings(default_partitions=3)) as running:
        socket = running.socket()
        await socket.ask(b"SUB donald ducks")
        contents = {b"%d" % number for number in range(9)}
        for content in contents:
            await socket.ask(b"PUT daisy ducks " + content)
        assert set(await get_all(socket, "donald", "ducks", 9)) == contents


async def test_a_policy_that_refuses_is_told() -> None:
    async with served() as running:
        await running.broker.create_topic(TESTER, "ducks", policy=Policy(needs_subscriber=True))
        answer = await running.socket().ask(b"PUT donald ducks x")
        assert answer.startswith(b"ERR no_subscriber ")


# --- R7: many at once, waits -----------------------------------------------------------------


async def test_r7_no_client_waits_for_anothers_disk() -> None:
    store = SlowStore()
    async with served(store=store) as running:
        await running.broker.create_topic(TESTER, "ducks")
        sockets = [running.socket() for _ in range(10)]
        puts = [
            asyncio.ensure_future(socket.ask(b"PUT c%d ducks quack" % number))
            for number, socket in enumerate(sockets)
        ]
        await until(lambda: store.appends == 10)
        # All are with the disk at once, and somebody else is served meanwhile.
        assert (await running.socket().ask(b"SUB donald ducks")) == b"SUB donald ducks"
        assert not any(put.done() for put in puts)
        store.released.set()
        assert await soon(asyncio.gather(*puts)) == [b"PUT c%d ducks quack" % n for n in range(10)]


async def test_a_get_waits_for_a_message_to_come() -> None:
    async with served(WatchedBroker) as running:
        await running.socket().ask(b"SUB donald ducks")
        waiting = asyncio.ensure_future(running.socket().ask(b"GET donald ducks -1"))
        await until(lambda: broker_of(running).waiting == 1)
        await running.socket().ask(b"PUT daisy ducks quack")
        assert (await soon(waiting)).endswith(b" quack")


async def test_a_get_that_waits_for_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_limits, "ZMQ_GET_WAIT_MS", 1)
    async with served() as running:
        socket = running.socket()
        await socket.ask(b"SUB donald ducks")
        assert (await socket.ask(b"GET donald ducks -1")).startswith(b"ERR empty ")


async def test_an_error_that_is_not_ours_is_told_without_its_secrets(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(PublishService, "publish", fail)
    async with served(Broker) as running:
        socket = running.socket()
        await running.broker.create_topic(TESTER, "ducks")
        answer = await socket.ask(b"PUT donald ducks quack")
        assert answer == b"ERR error the broker failed to do this; its log says why"
        assert "a secret" in caplog.text
        assert await socket.ask(b"SUB donald ducks") == b"SUB donald ducks"


# --- other sockets ---------------------------------------------------------------------------


async def test_a_req_socket_that_numbers_its_requests_is_answered() -> None:
    async with served() as running:
        socket = running.socket()
        socket.socket.setsockopt(zmq.REQ_CORRELATE, 1)
        socket.socket.setsockopt(zmq.REQ_RELAXED, 1)
        assert await socket.ask(b"PUT donald ducks quack") == b"PUT donald ducks quack"


async def test_answers_to_a_dealer_come_in_the_order_of_its_requests() -> None:
    async with served() as running:
        dealer = running.socket(zmq.DEALER).socket
        requests = [b"SUB donald ducks"]
        for number in range(300):
            requests += [b"PUT daisy ducks %d" % number, b"nonsense %d" % number]
        for request in requests:
            await dealer.send_multipart([b"", request])
        answers = [(await soon(dealer.recv_multipart()))[1] for _ in requests]
        expected = [b"ERR protocol_error" if r.startswith(b"non") else r for r in requests]
        assert [answer[: len(want)] for answer, want in zip(answers, expected, strict=True)] == (
            expected
        )
        contents = await get_all(running.socket(), "donald", "ducks", 300)
        assert contents == [b"%d" % number for number in range(300)]


async def test_clients_behind_a_proxy_do_not_wait_for_each_other() -> None:
    """A proxy's clients share one connection; their envelopes tell them apart."""
    async with served(WatchedBroker) as running:
        proxy = running.socket(zmq.DEALER).socket
        await running.socket().ask(b"SUB donald ducks")
        await proxy.send_multipart([b"client 1", b"", b"GET donald ducks -1"])
        await until(lambda: broker_of(running).waiting == 1)
        await proxy.send_multipart([b"client 2", b"", b"PUT daisy ducks quack"])
        answers = dict([(await soon(proxy.recv_multipart()))[::2] for _ in range(2)])
        assert answers[b"client 2"] == b"PUT daisy ducks quack"
        assert answers[b"client 1"].endswith(b" quack")


async def test_heartbeats_are_answered() -> None:
    async with served() as running:
        raw = await (await running.raw()).hello()
        raw.writer.write(command(b"PING", b"\0\0context"))
        assert await soon(raw.reader.readexactly(14)) == command(b"PONG", b"context")
        socket = running.socket(heartbeat_ms=1)
        assert await socket.ask(b"SUB donald ducks") == b"SUB donald ducks"


async def test_it_listens_on_ipv6_too() -> None:
    async with served(host="::1") as running:
        assert running.address[0] == "::1"
        assert await running.socket().ask(b"SUB donald ducks") == b"SUB donald ducks"
