"""X1: ZeroMQ's plain PUB and SUB sockets publish and subscribe through the broker."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import struct
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from quackmq.broker import BrokerSettings, Caller, Page
from quackmq.errors import DamagedData, OffsetOutOfRange
from quackmq.model.policy import Policy, WhenFull
from quackmq.protocols.zmq import limits as zmq_limits
from quackmq.protocols.zmq.proxy.xsub import Publisher
from tests.kit.waiting import soon, until
from tests.protocols.codecs import zmtp_frames
from tests.protocols.codecs.zmtp_frames import command, frame
from tests.protocols.zmq.peers import TESTER, SlowStore
from tests.protocols.zmq.proxied import ask, proxied, receive


async def test_x1_what_a_pub_socket_sends_a_sub_socket_gets_in_two_frames() -> None:
    async with proxied() as running:
        subscriber = await running.subscriber(b"ducks")
        publisher = running.plain_publisher()
        # A PUB socket drops what it sends before it is connected: so it is with any other.
        while not await subscriber.poll(20):
            await publisher.send_multipart([b"ducks", b"quack"])
        assert await receive(subscriber) == [b"ducks", b"quack"]


async def test_x1_what_other_listeners_publish_comes_too_in_the_order_of_the_log() -> None:
    async with proxied() as running:
        await running.put("ducks", b"before")
        subscriber = await running.subscriber(b"ducks")
        publisher = await running.publisher()
        await running.put("ducks", b"one")
        await publisher.send_multipart([b"ducks", b"two"])
        await running.published("ducks", b"before", b"one", b"two")
        await running.put("ducks", b"three")
        bodies = [(await receive(subscriber))[1] for _ in range(3)]
        assert bodies == [b"one", b"two", b"three"]


async def test_x1_subscriptions_are_prefixes_and_end_when_they_are_cancelled() -> None:
    async with proxied() as running:
        subscriber = await running.subscriber(b"du", b"swans")
        for topic in ("ducks", "geese", "swans", "dunes"):
            await running.put(topic, topic.encode())
        got = [(await receive(subscriber))[0] for _ in range(3)]
        assert sorted(got) == [b"ducks", b"dunes", b"swans"]
        subscriber.unsubscribe(b"du")
        await until(lambda: set(running.xpub.following()) == {"swans"})
        await running.put("ducks", b"unheard")
        await running.put("swans", b"last")
        assert await receive(subscriber) == [b"swans", b"last"]


async def test_x1_who_wants_everything_gets_topics_that_come_later_from_their_beginning() -> None:
    async with proxied() as running:
        subscriber = await running.subscriber(b"")
        await running.put("new", b"first")
        assert await receive(subscriber) == [b"new", b"first"]
        await running.broker.delete_topic(TESTER, "new")
        await running.put("new", b"first of another")
        assert await receive(subscriber) == [b"new", b"first of another"]


async def test_x1_all_partitions_are_followed_those_that_come_later_too() -> None:
    async with proxied() as running:
        await running.broker.create_topic(TESTER, "ducks", partitions=2)
        subscriber = await running.subscriber(b"ducks")
        await running.broker.alter_topic(TESTER, "ducks", partitions=3)
        for number in range(6):
            await running.put("ducks", b"%d" % number)
        bodies = {(await receive(subscriber))[1] for _ in range(6)}
        assert bodies == {b"0", b"1", b"2", b"3", b"4", b"5"}


async def test_a_publishers_messages_keep_their_order_also_while_their_topic_comes_to_life() -> (
    None
):
    async with proxied() as running:
        publisher = await running.publisher()
        bodies = [b"%d" % number for number in range(3_000)]
        for body in bodies:
            await publisher.send_multipart([b"ducks", body])
        await running.published("ducks", *bodies)


async def test_many_subscribers_get_the_same() -> None:
    async with proxied() as running:
        subscribers = [await running.subscriber(b"ducks") for _ in range(20)]
        await running.put("ducks", *(b"%d" % number for number in range(50)))
        for subscriber in subscribers:
            got = [(await receive(subscriber))[1] for _ in range(50)]
            assert got == [b"%d" % number for number in range(50)]


async def test_what_cannot_be_published_is_counted_and_the_rest_is_published(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with proxied() as running:
        publisher = await running.publisher()
        for frames in (
            [b"no topic", b"x"],
            [b"\xff\xfe", b"x"],
            [b"", b"x"],
            [b"alone"],
            [b"three", b"frames", b"here"],
            [b"n" * 300, b"x"],
            [b"ducks", b"quack"],
        ):
            await publisher.send_multipart(frames)
        await running.published("ducks", b"quack")
        assert running.xsub.refused.count == 6
        assert list(running.broker.topics()) == ["ducks"]
    told = [record for record in caplog.records if "were not published" in record.getMessage()]
    assert len(told) == 1, "again and again is told once in a while"


async def test_messages_that_an_unexpected_failure_loses_are_counted_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with proxied() as running:
        publisher = await running.publisher()
        with monkeypatch.context() as planted:
            planted.setattr(
                running.broker.messages, "put", AsyncMock(side_effect=ValueError("planted"))
            )
            for _ in range(3):
                await publisher.send_multipart([b"ducks", b"lost"])
            await until(lambda: running.xsub.refused.count == 3)
        assert "ValueError: planted" in caplog.text
        assert "were not published, the last: the broker failed" in caplog.text
        await publisher.send_multipart([b"ducks", b"quack"])
        await running.published("ducks", b"quack")


async def test_a_topic_that_is_full_takes_what_fits_of_many_messages() -> None:
    settings = BrokerSettings(
        default_policy=Policy(live_entries=3, when_full=WhenFull.REFUSE),
    )
    async with proxied(broker_settings=settings) as running:
        await running.broker.subscribe(Caller("s"), "reader", "ducks")
        publisher = await running.publisher()
        for number in range(10):
            await publisher.send_multipart([b"ducks", b"%d" % number])
        await until(lambda: running.xsub.refused.count == 7)
        assert await running.bodies("ducks") == [b"0", b"1", b"2"]


async def test_an_xpub_and_an_xsub_socket_are_peers_too_and_heartbeats_are_answered() -> None:
    async with proxied() as running:
        raw = await running.raw("xpub", b"XSUB")
        raw.writer.write(frame(b"\x01ducks") + command(b"PING", b"\0\0here"))
        await running.subscribed([], b"ducks")
        await running.put("ducks", b"quack")
        heard = await soon(raw.reader.readuntil(b"quack"))
        assert command(b"PONG", b"here") in heard
        assert heard.endswith(zmtp_frames.message(b"ducks", b"quack"))


async def test_a_version_before_commands_is_asked_for_everything_by_a_message() -> None:
    async with proxied() as running:
        raw = await running.raw("xsub", b"PUB")
        modern = await soon(raw.reader.readuntil(b"SUBSCRIBE"))
        assert modern.endswith(b"\x04\x0a\x09SUBSCRIBE")
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", running.broker.listener_addresses["xsub"][1]
        )
        writer.write(zmtp_frames.greeting(minor=0) + zmtp_frames.ready(b"PUB"))
        assert (await soon(reader.readuntil(b"\0\x01\x01"))).startswith(b"\xff")
        writer.close()
        await writer.wait_closed()


async def test_a_subscriber_that_never_reads_misses_messages_and_harms_nobody() -> None:
    async with proxied() as running:
        silent = await running.raw("xpub", b"SUB")
        silent.writer.write(frame(b"\x01"))
        await running.subscribed([], b"")
        well = await running.subscriber(b"ducks")
        body = b"x" * 100_000
        sent = 0
        while not running.xpub.dropped.count:
            await running.put("ducks", body)
            sent += 1
            assert (await receive(well))[1] == body
        await running.put("ducks", b"last")
        assert (await receive(well))[1] == b"last"
        held = [each.unsent_bytes for each in running.subscribers()]
        assert max(held) <= zmq_limits.PROXY_UNSENT_BYTES
        assert sent * len(body) > zmq_limits.PROXY_UNSENT_BYTES, "a slow one has some room"


class Deaf(asyncio.Transport):
    """The way to a peer that takes nothing: what is written stays here."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "socket": Mock()})
        self.written = b""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        return

    def get_write_buffer_size(self) -> int:
        return len(self.written)

    def is_closing(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        self.written += data


@pytest.mark.parametrize(("listener", "kind"), [("xpub", b"SUB"), ("xsub", b"PUB")])
async def test_who_asks_for_signs_of_life_and_takes_none_has_none_kept_for_it(
    listener: str, kind: bytes
) -> None:
    async with proxied() as running:
        server = running.xpub if listener == "xpub" else running.xsub
        peer, transport = server.make_connection(), Deaf()

        def hear(data: bytes) -> None:
            server.scratch[: len(data)] = data
            peer.buffer_updated(len(data))

        ping, pong = command(b"PING", b"\0\0here"), command(b"PONG", b"here")
        peer.connection_made(transport)
        hear(zmtp_frames.greeting() + zmtp_frames.ready(kind) + ping)
        assert transport.written.endswith(pong)
        peer.pause_writing()
        before = transport.written
        hear(ping * 100)
        assert transport.written == before
        peer.resume_writing()
        hear(ping)
        assert transport.written == before + pong
        peer.connection_lost(None)


async def test_who_hangs_up_as_the_listener_closes_keeps_it_from_nothing() -> None:
    async with proxied() as running:
        with socket.create_connection(
            ("127.0.0.1", running.broker.listener_addresses["xpub"][1])
        ) as hasty:
            hello = zmtp_frames.greeting() + zmtp_frames.ready(b"SUB") + frame(b"\x01ducks")
            hasty.sendall(hello)
            await running.subscribed([], b"ducks")
            # So that closing resets the connection; the listener has not heard of it when it
            # closes.
            hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await soon(running.xpub.close())


async def test_a_broker_that_closes_does_not_wait_for_a_full_topic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_limits, "ZMQ_DRAIN_MS", 50)
    settings = BrokerSettings(
        default_policy=Policy(live_entries=1, when_full=WhenFull.WAIT),
        full_topic_wait_ms=600_000,
    )
    async with proxied(broker_settings=settings) as running:
        await running.put("ducks", b"first")
        publisher = await running.publisher()
        (peer,) = running.xsub.connections
        assert isinstance(peer, Publisher)
        await publisher.send_multipart([b"ducks", b"second"])
        await until(lambda: peer.unpublished)
        await soon(running.xsub.close())


async def test_a_publisher_is_not_read_from_while_too_much_waits() -> None:
    store = SlowStore()
    async with proxied(store=store) as running:
        store.released.set()
        await running.broker.create_topic(TESTER, "ducks")
        store.released.clear()
        publisher = await running.publisher()
        for number in range(zmq_limits.PROXY_PUBLISHER_MESSAGES * 2):
            await publisher.send_multipart([b"ducks", b"%d" % number])
        (peer,) = running.xsub.connections
        assert isinstance(peer, Publisher)
        await until(lambda: peer.unpublished == zmq_limits.PROXY_PUBLISHER_MESSAGES)
        assert not peer.is_reading
        store.released.set()
        await until(lambda: not peer.unpublished)
        await running.published(
            "ducks", *(b"%d" % number for number in range(zmq_limits.PROXY_PUBLISHER_MESSAGES * 2))
        )
    await store.close()


@pytest.mark.parametrize(
    ("listener", "kind", "says"),
    [
        ("xsub", b"SUB", b"where PUB and XPUB are served"),
        ("xpub", b"PUB", b"where SUB and XSUB are served"),
        ("proxy", b"SUB", b"where REQ and DEALER are served"),
    ],
)
async def test_a_socket_at_the_wrong_listener_is_told_so(
    listener: str, kind: bytes, says: bytes
) -> None:
    async with proxied() as running:
        raw = await running.raw(listener, kind)
        assert says in await soon(raw.reader.read(-1))


async def test_too_many_subscriptions_end_a_subscriber_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_limits, "PROXY_SUBSCRIPTIONS", 3)
    async with proxied() as running:
        well = await running.subscriber(b"ducks")
        greedy = await running.raw("xpub", b"SUB")
        greedy.writer.write(b"".join(frame(b"\x01%d" % number) for number in range(4)))
        assert await greedy.is_disconnected()
        await running.put("ducks", b"quack")
        assert await receive(well) == [b"ducks", b"quack"]


@pytest.mark.parametrize("error", [OffsetOutOfRange("trimmed"), DamagedData("damaged"), OSError()])
async def test_a_topic_that_could_not_be_read_is_read_on(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_limits, "PROXY_RETRY_MS", 1)
    async with proxied() as running:
        await running.put("ducks", b"before")
        read = running.broker.messages.read
        failures = [error, error]

        async def failing(*arguments: Any, **more: Any) -> Page:
            if failures:
                raise failures.pop()
            return await read(*arguments, **more)

        monkeypatch.setattr(running.broker.messages, "read", failing)
        subscriber = await running.subscriber(b"ducks")
        await running.put("ducks", b"quack")
        assert await receive(subscriber) == [b"ducks", b"quack"]


@pytest.mark.parametrize("seed", range(3))
async def test_any_bytes_end_their_own_connection_at_the_most(seed: int) -> None:
    chance = random.Random(seed)
    async with proxied() as running:
        well = await running.subscriber(b"ducks")
        publisher = await running.publisher()
        for listener, kind in (("xsub", b"PUB"), ("xpub", b"SUB"), ("proxy", b"REQ")):
            for _ in range(5):
                raw = await running.raw(listener, kind)
                flags = chance.choice((0, 1, 2, 4, 6, 0xFF))
                raw.writer.write(bytes([flags]) + chance.randbytes(chance.randrange(500)))
        await publisher.send_multipart([b"ducks", b"quack"])
        assert await receive(well) == [b"ducks", b"quack"]
        assert (
            await ask(running.client(), b"publish daisy ducks 0 x")
            == b"ack_published daisy ducks 0"
        )


async def test_who_goes_is_forgotten_with_the_feeds_that_only_it_wanted() -> None:
    async with proxied() as running:
        await running.put("ducks", b"before")
        subscriber = await running.subscriber(b"ducks", b"ids ducks", b"client donald")
        assert set(running.xpub.following()) == {"ducks"}
        assert running.xpub.covers("donald", "ducks", 0, 1)
        assert not running.xpub.covers("donald", "ducks", 0, 0), "that was before"
        subscriber.close()
        await until(lambda: not running.xpub.connections)
        assert not running.xpub.following()
        assert not running.xpub.covers("donald", "ducks", 0, 1)


async def test_x6_a_published_message_is_acknowledged_and_its_repeat_dropped() -> None:
    async with proxied() as running:
        client = running.client()
        assert await ask(client, b"last_published daisy ducks") == b"ack_last daisy ducks -1"
        for _ in range(2):
            answer = await ask(client, b"publish daisy ducks 4 quack \xff\0 quack")
            assert answer == b"ack_published daisy ducks 4"
        assert await ask(client, b"last_published daisy ducks") == b"ack_last daisy ducks 4"
        assert await running.bodies("ducks") == [b"quack \xff\0 quack"]


async def test_x6_a_message_is_acknowledged_when_it_is_durable_and_not_before() -> None:
    store = SlowStore()
    async with proxied(store=store) as running:
        store.released.set()
        await running.put("ducks", b"first")
        store.released.clear()
        client = running.client()
        await client.send(b"publish daisy ducks 1 quack")
        begun = store.appends
        await until(lambda: store.appends > begun)
        assert not await client.poll(20)
        store.released.set()
        assert await soon(client.recv()) == b"ack_published daisy ducks 1"
    await store.close()
