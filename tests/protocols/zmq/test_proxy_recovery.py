"""Limits of the proxy's sockets after they were reached: the peer that reached one goes, or wants
less, and the next one is served."""

from __future__ import annotations

import asyncio

import pytest

from quackmq.broker import RecordPosition, message_id
from quackmq.protocols.zmq import limits as zmq_limits
from quackmq.protocols.zmq.codec.proxy_language import ids_subscription
from quackmq.protocols.zmq.proxy.xsub import Publisher
from tests.kit.waiting import until
from tests.protocols.codecs.zmtp_frames import frame
from tests.protocols.zmq.peers import TESTER, SlowStore
from tests.protocols.zmq.proxied import SHORT_LEASE, ask, proxied, receive
from tests.protocols.zmq.test_proxy_clients import Client


async def test_partitions_that_nobody_follows_any_more_leave_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_limits, "PROXY_FEEDS", 2)
    async with proxied() as running:
        for topic in ("ducks", "geese", "swans"):
            await running.broker.create_topic(TESTER, topic)
        for _ in range(3):
            greedy = await running.raw("xpub", b"SUB")
            greedy.writer.write(frame(b"\x01"))
            assert await greedy.is_disconnected(), "of three topics"
            await until(lambda: not running.xpub.following())
            well = await running.raw("xpub", b"SUB")
            well.writer.write(frame(b"\x01ducks") + frame(b"\x01geese"))
            await until(lambda: len(running.xpub.following()) == 2)
            well.writer.write(frame(b"\x00ducks") + frame(b"\x01swans"))
            await until(lambda: set(running.xpub.following()) == {"geese", "swans"})
            await well.close()
            await until(lambda: not running.xpub.following())
        subscriber = await running.subscriber(b"swans")
        await running.put("swans", b"honk")
        assert await receive(subscriber) == [b"swans", b"honk"]


async def test_added_partitions_beyond_the_bound_disconnect_the_subscribers_of_their_topic(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(zmq_limits, "PROXY_FEEDS", 3)
    async with proxied() as running:
        for topic in ("ducks", "geese"):
            await running.broker.create_topic(TESTER, topic)
        bystander = await running.subscriber(b"geese")
        plain = await running.raw("xpub", b"SUB")
        plain.writer.write(frame(b"\x01ducks"))
        with_ids = await running.raw("xpub", b"SUB")
        with_ids.writer.write(frame(b"\x01" + ids_subscription("ducks")))
        await until(lambda: sum(bool(each.subscriptions) for each in running.subscribers()) == 3)

        await running.broker.alter_topic(TESTER, "ducks", partitions=2)
        assert set(running.xpub.following()) == {"ducks", "geese"}, "three partitions are allowed"

        await running.broker.alter_topic(TESTER, "ducks", partitions=3)
        assert await plain.is_disconnected()
        assert await with_ids.is_disconnected()
        reason = "more than 3 partitions would be followed: subscribe to fewer topics"
        assert caplog.text.count(reason) == 2
        assert set(running.xpub.following()) == {"geese"}
        await running.put("geese", b"honk")
        assert await receive(bystander) == [b"geese", b"honk"]
        # The partitions of the topic count no more: others are followed in their place.
        await running.broker.create_topic(TESTER, "swans", partitions=2)
        subscriber = await running.subscriber(b"swans")
        assert set(running.xpub.following()) == {"geese", "swans"}
        await running.put("swans", b"hiss")
        assert await receive(subscriber) == [b"swans", b"hiss"]


async def test_who_cancels_a_subscription_may_have_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_limits, "PROXY_SUBSCRIPTIONS", 2)
    async with proxied() as running:
        raw = await running.raw("xpub", b"SUB")
        raw.writer.write(frame(b"\x01a") + frame(b"\x01b"))
        for number in range(5):
            raw.writer.write(frame(b"\x00b" if not number else b"\x00%d" % (number - 1)))
            raw.writer.write(frame(b"\x01%d" % number))
        await until(
            lambda: [each.subscriptions for each in running.subscribers()] == [{b"a", b"4"}]
        )


async def test_a_subscriber_that_has_named_several_clients_leaves_none_of_them_behind() -> None:
    async with proxied() as running:
        subscriber = await running.raw("xpub", b"SUB")
        for number in range(3):
            subscriber.writer.write(frame(b"\x01client donald-%d" % number))
        await until(lambda: "donald-2" in running.xpub._subscriber_by_client)
        assert list(running.xpub._subscriber_by_client) == ["donald-2"]
        await subscriber.close()
        await until(lambda: not running.xpub._subscriber_by_client)


async def test_who_says_goodbye_makes_room_for_another_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_limits, "PROXY_CLIENTS", 1)
    async with proxied() as running:
        for number in range(3):
            client = Client(running, f"client{number}")
            assert (await client.hello()).startswith("ack_welcome")
            refused = await Client(running, "another").hello()
            assert refused.startswith("ERR limit_reached")
            goodbye = f"goodbye {client.name} {client.topic}".encode()
            assert (await ask(client.asking, goodbye)).startswith(b"ack_goodbye")


async def test_clients_that_say_hello_at_the_same_time_do_not_exceed_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_limits, "PROXY_CLIENTS", 2)
    async with proxied() as running:
        clients = [Client(running, f"client{number}") for number in range(5)]
        answers = sorted(await asyncio.gather(*(client.hello() for client in clients)))
        assert [answer.split()[0] for answer in answers] == ["ERR"] * 3 + ["ack_welcome"] * 2
        assert all(answer.startswith("ERR limit_reached") for answer in answers[:3])
        assert len(await running.broker.subscriptions(TESTER)) == 2
        # A hello that fails leaves its place to others.
        welcomed = {answer.split()[1] for answer in answers[3:]}
        for client in clients:
            if client.name in welcomed:
                await ask(client.asking, f"goodbye {client.name} ducks".encode())
        for client in clients[:3]:
            assert (await client.hello("tcp://10.1.2.3:1")).startswith("ERR not_allowed")
        for client in clients[:2]:
            assert (await client.hello()).startswith("ack_welcome")


async def test_a_publisher_is_read_from_again_when_its_bytes_are_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its bytes: they reach their bound before its messages do."""
    monkeypatch.setattr(zmq_limits, "ZMQ_REQUESTS", 20)
    store = SlowStore()
    async with proxied(store=store) as running:
        store.released.set()
        await running.broker.create_topic(TESTER, "ducks")
        body = b"x" * (zmq_limits.PROXY_PUBLISHER_BYTES // 4)
        publisher = await running.publisher()
        (peer,) = running.xsub.connections
        assert isinstance(peer, Publisher)
        for round_number in range(1, 4):
            store.released.clear()
            for _ in range(10):
                await publisher.send_multipart([b"ducks", body])
            await until(lambda: not peer.is_reading)
            assert peer.unpublished < 10
            store.released.set()
            await running.published("ducks", *[body] * 10 * round_number)
            await until(lambda: peer.is_reading and not peer.unpublished)
        assert running.xsub.has_room(), "none of the 30 counts any more"
    await store.close()


async def test_early_acknowledgements_beyond_the_bound_cost_a_repeat_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oldest is forgotten, and its message sent again."""
    monkeypatch.setattr(zmq_limits, "PROXY_EARLY", 1)
    async with proxied(SHORT_LEASE) as running:
        client = Client(running)
        await client.hello()
        await running.put("ducks", b"in hand")
        token, _ = await client.missed()  # and no answer: nothing else is lent meanwhile
        topic = running.broker.topic("ducks")
        early = [message_id(topic.id, RecordPosition(0, offset)) for offset in (1, 2)]
        await client.acknowledge(*early)
        await running.put("ducks", b"forgotten", b"known")
        await client.answer("ack_received", token)
        assert await client.take() == b"forgotten"
        await client.is_done()
        assert running.broker.pushing.unreached == {}
