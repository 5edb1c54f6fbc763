"""One peer and its bounds: bad bytes, too much at once, too slow, gone; and the end of the
listener."""

from __future__ import annotations

import asyncio
import random

import pytest
import zmq

from quackmq.errors import RecordTooLarge
from quackmq.protocols.zmq import limits as zmq_limits
from tests.kit.support import let_others_run, transport_of
from tests.kit.waiting import soon, until
from tests.protocols.codecs.zmtp_frames import (
    HELLO,
    MORE,
    command,
    frame,
    greeting,
    message,
    ready,
    request,
)
from tests.protocols.kafka.client import on_both_loops
from tests.protocols.zmq.peers import TESTER, Served, SlowStore, WatchedBroker, broker_of, served

SUB = b"SUB donald ducks"


async def assert_others_are_served(running: Served) -> None:
    socket = running.socket()
    assert (await socket.ask(SUB)).endswith(SUB)
    socket.close()


async def subscribed(running: Served, content: bytes = b"") -> None:
    """A subscription of donald to ducks, with a message if there is a content."""
    await running.broker.subscribe(TESTER, "donald", "ducks")
    if content:
        put = running.broker.messages.begin_put(TESTER, "ducks", content)
        assert put is not None
        await put.appended


# --- bad bytes -------------------------------------------------------------------------------


@on_both_loops
async def test_garbage_is_disconnected_and_harms_nobody() -> None:
    async with served() as running:
        chance = random.Random(5)
        honest = running.socket()
        await honest.ask(SUB)
        for number in range(60):
            raw = await running.raw()
            data = chance.randbytes(chance.randrange(1, 500))
            start = (b"", greeting(), HELLO, HELLO + request(b"SUB x y"))[number % 4]
            raw.writer.write(start + data)
            raw.writer.write_eof()
            assert await raw.is_disconnected()
            assert await honest.ask(SUB) == b"RE" + SUB


@on_both_loops
async def test_another_protocol_is_disconnected_at_once() -> None:
    async with served() as running:
        raw = await running.raw()
        raw.writer.write(b"GET / HTTP/1.1\r\nHost: ducks\r\n\r\n")
        assert await raw.is_disconnected()
        await assert_others_are_served(running)


@on_both_loops
async def test_a_socket_that_does_not_ask_is_told_why_it_is_not_served() -> None:
    async with served() as running:
        raw = await running.raw()
        raw.writer.write(greeting() + ready(b"SUB"))
        await soon(raw.reader.readexactly(64))
        said = await soon(raw.reader.read(1_000))
        assert b"ERROR" in said and b"REQ and DEALER are served" in said
        assert await raw.is_disconnected()


@on_both_loops
async def test_messages_that_are_no_requests_are_answered_with_errors_in_their_turn() -> None:
    async with served() as running:
        raw = await (await running.raw()).hello()
        raw.writer.write(
            request(SUB)
            + message(b"", b"SUB donald ducks", b"and more")
            + message(b"no delimiter")
            + message(b"me", b"", SUB)
        )
        # The one without an envelope stands in a line of its own; the others' order is theirs.
        answers = [await raw.receive() for _ in range(4)]
        own = [answer for answer in answers if answer[0] == b"" and len(answer) == 2]
        assert own[0] == [b"", SUB]
        assert own[1][1].startswith(b"ERR protocol_error a request is one frame")
        (alone,) = [answer for answer in answers if len(answer) == 1]
        assert alone[0].startswith(b"ERR protocol_error a request begins with an empty frame")
        assert [b"me", b"", b"RE" + SUB] in answers


@on_both_loops
async def test_a_request_over_the_limit_is_refused_and_the_next_one_served() -> None:
    async with served() as running:
        raw = await (await running.raw()).hello()
        raw.writer.write(request(b"PUT d ducks " + bytes(zmq_limits.ZMQ_REQUEST_BYTES)))
        assert (await raw.receive())[1].startswith(f"ERR {RecordTooLarge.code} ".encode())
        assert await raw.ask(SUB) == SUB


@on_both_loops
async def test_a_content_that_is_too_much_for_a_batch_is_refused() -> None:
    async with served() as running:
        raw = await (await running.raw()).hello()
        largest = zmq_limits.ZMQ_REQUEST_BYTES - len(b"PUT d ducks ")
        answer = await raw.ask(b"PUT d ducks " + b"x" * largest)
        assert answer.startswith(f"ERR {RecordTooLarge.code} ".encode())


@on_both_loops
async def test_a_request_may_come_byte_by_byte() -> None:
    async with served() as running:
        raw = await running.raw()
        for byte in HELLO + request(SUB):
            raw.writer.write(bytes([byte]))
            await raw.writer.drain()
        await soon(raw.reader.readexactly(64))
        assert SUB in await soon(raw.reader.readuntil(SUB))


# --- too much at once ------------------------------------------------------------------------


@on_both_loops
async def test_a_peer_that_does_not_await_answers_is_held_up_and_loses_nothing() -> None:
    store = SlowStore()
    async with served(store=store) as running:
        await running.broker.create_topic(TESTER, "ducks")
        raw = await (await running.raw()).hello()
        count = zmq_limits.ZMQ_REQUESTS_IN_FLIGHT * 4
        for number in range(count):
            raw.writer.write(message(b"%d" % number, b"", b"PUT d ducks x"))
        await until(lambda: store.appends == zmq_limits.ZMQ_REQUESTS_IN_FLIGHT)
        await let_others_run(50)
        assert store.appends == zmq_limits.ZMQ_REQUESTS_IN_FLIGHT
        store.released.set()
        answers = {(await raw.receive())[0] for _ in range(count)}
        assert answers == {b"%d" % number for number in range(count)}


@on_both_loops
async def test_very_many_bad_frames_at_once_are_all_answered_in_order() -> None:
    async with served() as running:
        raw = await (await running.raw()).hello()
        raw.writer.write(request(b"") * 5_000 + command(b"PING", b"\0\0") * 5_000 + request(SUB))
        for _ in range(5_000):
            assert (await raw.receive())[1].startswith(b"ERR protocol_error ")
        pong = command(b"PONG")
        assert await soon(raw.reader.readexactly(len(pong) * 5_000)) == pong * 5_000
        assert (await raw.receive())[1] == SUB


@on_both_loops
async def test_each_peer_has_a_request_whatever_the_others_have() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq_limits, "ZMQ_REQUESTS", 10)
        store = SlowStore()
        async with served(store=store) as running:
            await running.broker.create_topic(TESTER, "ducks")
            greedy = await (await running.raw()).hello()
            for number in range(50):
                greedy.writer.write(message(b"%d" % number, b"", b"PUT d ducks x"))
            await until(lambda: store.appends == 10)
            await assert_others_are_served(running)
            store.released.set()
            for _ in range(50):
                await greedy.receive()


@on_both_loops
async def test_connections_beyond_the_limit_are_refused_until_one_goes() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq_limits, "ZMQ_CONNECTIONS", 2)
        async with served() as running:
            first = await (await running.raw()).hello()
            second = await (await running.raw()).hello()
            third = await running.raw()
            assert await third.is_disconnected()
            assert await second.ask(SUB) == SUB
            await first.close()
            await assert_others_are_served(running)


@on_both_loops
async def test_large_requests_wait_for_memory_and_small_ones_do_not() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq_limits, "ZMQ_RECEIVE_BYTES", 1_000_000)
        async with served() as running:
            content = b"PUT d ducks " + b"x" * 700_000
            first, second = [await (await running.raw()).hello() for _ in range(2)]
            data = request(content)
            first.writer.write(data[:400_000])
            await first.writer.drain()
            second.writer.write(data)
            await assert_others_are_served(running)
            first.writer.write(data[400_000:])
            assert (await first.receive())[1] == content
            assert (await second.receive())[1] == content


@on_both_loops
async def test_who_holds_memory_and_sends_nothing_makes_way_for_others() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq_limits, "ZMQ_RECEIVE_BYTES", 1_000_000)
        patch.setattr(zmq_limits, "ZMQ_PACE_MS", 0)
        patch.setattr(zmq_limits, "ZMQ_REQUEST_WAIT_MS", 1_000)
        patch.setattr(zmq_limits, "ZMQ_SWEEP_MS", 5)
        async with served() as running:
            content = b"PUT d ducks " + b"x" * 700_000
            idle = await (await running.raw()).hello()
            idle.writer.write(request(content)[:100])
            other = await (await running.raw()).hello()
            await other.writer.drain()
            assert await other.ask(content) == content
            assert await idle.is_disconnected()


# --- too slow --------------------------------------------------------------------------------


@on_both_loops
async def test_who_does_not_introduce_itself_is_disconnected() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq_limits, "ZMQ_HANDSHAKE_MS", 20)
        patch.setattr(zmq_limits, "ZMQ_SWEEP_MS", 5)
        async with served() as running:
            for said in (b"", greeting()[:20], greeting()):
                raw = await running.raw()
                raw.writer.write(said)
                assert await raw.is_disconnected()


@on_both_loops
async def test_a_request_that_never_becomes_whole_is_given_up_and_idle_peers_are_not() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq_limits, "ZMQ_SWEEP_MS", 5)
        async with served() as running:
            idle, *others = [await (await running.raw()).hello() for _ in range(4)]
            patch.setattr(zmq_limits, "ZMQ_REQUEST_WAIT_MS", 20)  # which a handshake may take
            halves = (request(SUB)[:-1], frame(b"", MORE), frame(b"", MORE) + frame(b"", MORE))
            for raw, begun in zip(others, halves, strict=True):
                raw.writer.write(begun)
                assert await raw.is_disconnected()
            assert (await idle.ask(SUB)).endswith(SUB)


@on_both_loops
async def test_who_does_not_take_its_answers_is_disconnected() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq_limits, "ZMQ_SEND_WAIT_MS", 20)
        patch.setattr(zmq_limits, "ZMQ_SWEEP_MS", 5)
        async with served(WatchedBroker) as running:
            await subscribed(running, b"x" * 15_000_000)
            raw = await running.raw()
            transport_of(raw.writer).pause_reading()
            raw.writer.write(HELLO)
            for number in range(10):
                raw.writer.write(message(b"%d" % number, b"", b"GET donald ducks -1"))
            await until(lambda: broker_of(running).gets >= 10)
            await assert_others_are_served(running)
            await until(lambda: running.connections == 0)


@on_both_loops
async def test_large_answers_wait_while_slow_peers_hold_too_much_and_small_ones_do_not() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq_limits, "ZMQ_SEND_BYTES", 1)
        async with served(WatchedBroker) as running:
            await subscribed(running, b"x" * 15_000_000)
            slow, other = [await (await running.raw()).hello() for _ in range(2)]
            transport_of(slow.writer).pause_reading()
            slow.writer.write(request(b"GET donald ducks -1"))
            await until(lambda: broker_of(running).gets == 1)
            other.writer.write(request(b"GET donald ducks -1"))
            await until(lambda: broker_of(running).gets == 2)
            await assert_others_are_served(running)
            transport_of(slow.writer).resume_reading()
            for each in (slow, other):
                assert len((await each.receive())[1]) > 15_000_000


@on_both_loops
async def test_a_peer_that_says_when_it_will_be_heard_is_held_to_it() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq_limits, "ZMQ_SWEEP_MS", 5)
        async with served() as running:
            raw = await (await running.raw()).hello()
            raw.writer.write(command(b"PING", b"\0\x01"))
            assert await raw.is_disconnected()


# --- gone ------------------------------------------------------------------------------------


@on_both_loops
async def test_a_client_that_dies_while_it_waits_leaves_nothing_behind() -> None:
    async with served(WatchedBroker) as running:
        await subscribed(running)
        raw = await (await running.raw()).hello()
        raw.writer.write(request(b"GET donald ducks -1"))
        await until(lambda: broker_of(running).waiting == 1)
        raw.writer.transport.abort()
        await until(lambda: broker_of(running).waiting == 0)
        # Nothing was sent to it, and the next message is the next one's.
        socket = running.socket()
        await socket.ask(b"PUT daisy ducks quack")
        assert (await socket.ask(b"GET donald ducks -1")).endswith(b" quack")


@on_both_loops
async def test_what_a_client_asked_for_before_it_died_is_done() -> None:
    store = SlowStore()
    async with served(store=store) as running:
        await subscribed(running)
        raw = await (await running.raw()).hello()
        raw.writer.write(request(b"PUT daisy ducks quack"))
        await until(lambda: store.appends == 1)
        await raw.close()
        await until(lambda: running.connections == 0)
        store.released.set()
        assert (await running.socket().ask(b"GET donald ducks -1")).endswith(b" quack")


# --- the end of the listener ---------------------------------------------------------------------


@on_both_loops
async def test_closing_answers_what_was_asked_and_ends_waits() -> None:
    store = SlowStore()
    async with served(WatchedBroker, store=store) as running:
        await subscribed(running)
        await running.broker.subscribe(TESTER, "donald", "geese")
        putting, waiting, idle = [await (await running.raw()).hello() for _ in range(3)]
        putting.writer.write(request(b"PUT daisy ducks quack"))
        waiting.writer.write(request(b"GET donald geese -1"))
        await until(lambda: store.appends == 1 and broker_of(running).waiting == 1)
        closing = asyncio.ensure_future(running.listener.close())
        assert (await waiting.receive())[1].startswith(b"ERR closing ")
        assert await waiting.is_disconnected()
        assert await idle.is_disconnected()
        assert not closing.done()
        store.released.set()
        assert (await putting.receive())[1] == b"PUT daisy ducks quack"
        for raw in (putting, waiting, idle):
            await raw.close()
        await soon(closing)
        with pytest.raises(ConnectionError):
            await asyncio.open_connection(*running.address)


@on_both_loops
async def test_closing_does_not_wait_for_ever_for_a_peer_that_takes_nothing() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq_limits, "ZMQ_DRAIN_MS", 50)
        async with served(WatchedBroker) as running:
            await subscribed(running, b"x" * 15_000_000)
            raw = await (await running.raw()).hello()
            transport_of(raw.writer).pause_reading()
            raw.writer.write(request(b"GET donald ducks -1"))
            await until(lambda: broker_of(running).gets == 1)
            await soon(running.listener.close())
            assert running.connections == 0


@on_both_loops
async def test_libzmq_sockets_outlive_the_listener_and_find_the_next_one() -> None:
    async with served() as running:
        socket = running.socket()
        assert await socket.ask(SUB) == SUB
        await soon(running.listener.close())
        await running.reopen()
        assert await socket.ask(SUB) == b"RE" + SUB


def test_raw_frames_are_what_libzmq_sends() -> None:
    """The bytes that these tests send are those that libzmq sends."""
    context = zmq.Context()
    stream, req = context.socket(zmq.STREAM), context.socket(zmq.REQ)
    try:
        port = stream.bind_to_random_port("tcp://127.0.0.1")
        req.connect(f"tcp://127.0.0.1:{port}")
        req.send(SUB)
        received, identity = b"", b""
        answers = {0: b"", 10: greeting(), 64: ready(b"ROUTER", Identity=b"")}
        expected = len(greeting() + ready(b"REQ", Identity=b"") + request(SUB))
        while len(received) < expected:
            assert stream.poll(20_000)
            identity, data = stream.recv_multipart()
            received += data
            for at in [at for at in answers if at <= len(received)]:
                if answer := answers.pop(at):
                    stream.send_multipart([identity, answer])
        assert received[10:11] == b"\x03"
        assert received[64:] == ready(b"REQ", Identity=b"") + request(SUB)
    finally:
        context.destroy(linger=0)
