"""HTTP/1.1 as peers speak it: pipelined, chunked, expecting, of old; answers whole or in pieces."""

from __future__ import annotations

import asyncio
import gc
import http.client
import logging
import weakref
from unittest import mock

import pytest

from quackmq import limits
from quackmq.errors import TopicFull
from quackmq.protocols.http import limits as http_limits
from quackmq.protocols.http.router import Route
from tests.kit.support import let_others_run
from tests.kit.waiting import soon, until
from tests.protocols.http.handlers import Handlers
from tests.protocols.http.peers import request, served
from tests.protocols.kafka.client import on_both_loops


@on_both_loops
async def test_requests_that_are_sent_ahead_are_answered_in_their_order() -> None:
    handlers = Handlers()
    async with served(handlers.routes()) as running:
        peer = await running.peer()
        count = 3 * http_limits.HTTP_REQUESTS_AHEAD
        peer.send(request("GET", "/wait?number=first"))
        for number in range(count):
            peer.send(request("POST", "/echo", str(number).encode()))
        peer.send(request("GET", "/nowhere"))
        peer.send(request("GET", "/echo?last"))
        await until(lambda: handlers.begun)
        handlers.gate.set()
        assert (await peer.receive()).json == "first"
        bodies = [(await peer.receive()).json["body"] for _ in range(count)]
        assert bodies == [str(number) for number in range(count)]
        assert (await peer.receive()).status == 404
        assert (await peer.receive()).json["query"] == {"last": ""}


@on_both_loops
async def test_a_request_may_come_byte_by_byte() -> None:
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        whole = request("POST", "/echo?a=b", b"quack") * 2
        for at in range(len(whole)):
            peer.send(whole[at : at + 1])
            await peer.writer.drain()
            await asyncio.sleep(0)
        for _ in range(2):
            answer = (await peer.receive()).json
            assert (answer["query"], answer["body"]) == ({"a": "b"}, "quack")


@on_both_loops
async def test_a_body_may_come_in_chunks_with_a_trailer() -> None:
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        peer.send(
            request("POST", "/echo", transfer_encoding="chunked")
            + b"3\r\nqua\r\n2;extension=1\r\nck\r\n0\r\nx-trailer: 1\r\n\r\n"
            + request("GET", "/echo")
        )
        answer = (await peer.receive()).json
        assert answer["body"] == "quack"
        assert "x-trailer" not in answer["headers"]
        assert (await peer.receive()).status == 200


@on_both_loops
async def test_who_expects_to_be_told_before_the_body_is_told() -> None:
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        head = request("POST", "/echo", content_length="5", expect="100-continue")
        for _ in range(2):
            peer.send(head)
            assert (await peer.receive()).status == 100
            peer.send(b"quack")
            assert (await peer.receive()).json["body"] == "quack"
        peer.send(head + b"quack")
        assert (await peer.receive()).json["body"] == "quack", "who does not wait is not told"
        peer.send(request("POST", "/small", content_length="1001", expect="100-continue"))
        assert (await peer.receive()).status == 413, "instead of being told to send it"


@on_both_loops
async def test_an_expectation_behind_other_requests_waits_for_their_answers() -> None:
    handlers = Handlers()
    async with served(handlers.routes()) as running:
        peer = await running.peer()
        peer.send(
            request("GET", "/wait?number=1")
            + request("POST", "/echo", content_length="5", expect="100-continue")
        )
        await until(lambda: handlers.begun)
        handlers.gate.set()
        assert (await peer.receive()).json == "1"
        assert (await peer.receive()).status == 100
        peer.send(b"quack")
        assert (await peer.receive()).json["body"] == "quack"


@on_both_loops
async def test_another_expectation_is_refused() -> None:
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        assert (await peer.post("/echo", b"x", expect="miracles")).status == 417


@on_both_loops
async def test_the_connection_ends_when_the_peer_wants_it() -> None:
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        answer = await peer.get("/echo", connection="close")
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await peer.is_closed()


@on_both_loops
async def test_http_1_0_ends_with_the_answer_unless_it_is_kept_alive() -> None:
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        for _ in range(2):
            peer.send(request("GET", "/echo", version="1.0", host="", connection="keep-alive"))
            answer = await peer.receive()
            assert (answer.status, answer.headers["connection"]) == (200, "keep-alive")
        peer.send(request("GET", "/echo", version="1.0"))
        assert (await peer.receive()).headers["connection"] == "close"
        assert await peer.is_closed()


@on_both_loops
async def test_head_is_get_without_the_body() -> None:
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        with_body = await peer.get("/large/1000")
        without = await peer.ask("HEAD", "/large/1000")
        assert without.headers["content-length"] == "1000"
        assert {**with_body.headers, "date": ""} == {**without.headers, "date": ""}
        assert (await peer.ask("HEAD", "/count/5")).status == 200
        assert (await peer.ask("HEAD", "/nowhere")).status == 404
        assert (await peer.get("/echo")).status == 200, "nothing of a body was left behind"


@on_both_loops
async def test_head_does_not_consume() -> None:
    async with served() as running:
        peer = await running.peer()
        answer = await peer.ask("HEAD", "/consumer/consume?topic=ducks&consumer_id=consumer-1")
        assert (answer.status, answer.headers["allow"]) == (405, "GET, OPTIONS")


@on_both_loops
async def test_options_says_which_methods_there_are_and_nothing_for_other_sites() -> None:
    async with served() as running:
        peer = await running.peer()
        answer = await peer.ask("OPTIONS", "/topics")
        assert (answer.status, answer.headers["allow"]) == (204, "GET, HEAD, OPTIONS, POST")
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert (await peer.ask("OPTIONS", "*")).status == 204
        assert (await peer.ask("OPTIONS", "/nowhere")).status == 404


@on_both_loops
async def test_another_protocol_is_not_taken_up_and_the_request_answered() -> None:
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        upgrade = {"connection": "upgrade, http2-settings", "upgrade": "h2c"}
        peer.send(request("GET", "/echo?1", **upgrade) + request("GET", "/echo?2"))
        assert (await peer.receive()).json["query"] == {"1": ""}
        assert (await peer.receive()).json["query"] == {"2": ""}
        answer = await peer.get("/echo", connection="upgrade", upgrade="websocket")
        assert answer.status == 200


@on_both_loops
async def test_a_target_may_name_the_host_as_proxies_have_it() -> None:
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        assert (await peer.get("http://localhost/echo?a=b")).json["query"] == {"a": "b"}


@on_both_loops
async def test_an_answer_has_a_date_and_a_length() -> None:
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        answer = await peer.get("/echo")
        assert answer.headers["date"].endswith(" GMT")
        assert answer.headers["content-length"] == str(len(answer.body))
        assert answer.headers["content-type"] == "application/json"


@on_both_loops
async def test_an_answer_of_json_ends_its_line_and_nothing_else_does() -> None:
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        for path in ("/echo", "/nowhere", "/v1/nowhere"):
            answer = await peer.get(path)
            assert answer.body.startswith(b"{") and answer.body.endswith(b"}\n")
        head = await peer.ask("HEAD", "/v1/nowhere")
        assert head.headers["content-length"] == answer.headers["content-length"]
        assert (await peer.get("/large/5")).body == bytes(5)


@on_both_loops
async def test_nobody_adds_a_header_by_what_a_message_holds() -> None:
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        headers = (await peer.get("/inject")).headers
        assert not {"set-cookie", "x-more"} & headers.keys()


@on_both_loops
async def test_a_bug_of_ours_is_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        answer = await peer.get("/bug")
        assert "ZeroDivisionError" not in answer.failed(500, "error")
        assert "a bug of ours" in caplog.text
        assert (await peer.get("/echo")).status == 200


# --- changes that need no task ---------------------------------------------------------------


@on_both_loops
async def test_a_change_that_is_begun_is_answered_when_it_is_done() -> None:
    handlers = Handlers()
    async with served(handlers.routes()) as running:
        peer = await running.peer()
        peer.send(request("GET", "/change") * 2 + request("GET", "/echo"))
        await until(lambda: len(handlers.changes) == 1)
        handlers.changes[0].set_result(3)
        assert (await peer.receive()).json == 2
        await until(lambda: len(handlers.changes) == 2)
        handlers.changes[1].set_exception(TopicFull("no room"))
        (await peer.receive()).failed(409, "topic_full")
        assert (await peer.receive()).status == 200


@on_both_loops
async def test_an_answer_that_cannot_be_made_of_a_change_is_a_bug_that_is_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handlers = Handlers()
    async with served(handlers.routes()) as running:
        peer = await running.peer()
        peer.send(request("GET", "/change"))
        await until(lambda: len(handlers.changes) == 1)
        handlers.changes[0].set_result(0)
        (await peer.receive()).failed(500, "error")
        assert "ZeroDivisionError" in caplog.text


@on_both_loops
async def test_who_hangs_up_does_not_hear_of_a_change() -> None:
    handlers = Handlers()
    async with served(handlers.routes()) as running:
        for end in ("cancelled", "done"):
            peer = await running.peer()
            peer.send(request("GET", "/change"))
            await until(lambda: bool(handlers.changes))
            change = handlers.changes.pop()
            await peer.close()
            if end == "done":
                change.set_exception(TopicFull("no room"))
            await until(change.done)
            await until(lambda: running.listener.connection_count == 0)


@on_both_loops
async def test_a_listener_that_cannot_wait_for_a_change_says_that_it_closes() -> None:
    handlers = Handlers()
    with mock.patch.object(http_limits, "HTTP_DRAIN_MS", 20):
        async with served(handlers.routes()) as running:
            peer = await running.peer()
            peer.send(request("GET", "/change"))
            await until(lambda: len(handlers.changes) == 1)
            closing = asyncio.ensure_future(running.listener.close())
            (await peer.receive()).failed(503, "closing")
            await soon(closing)


# --- streams ---------------------------------------------------------------------------------


@on_both_loops
async def test_a_stream_comes_in_chunks_and_the_connection_goes_on() -> None:
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        for _ in range(2):
            answer = await peer.get("/count/3")
            assert (answer.body, answer.headers["transfer-encoding"]) == (b"0\n1\n2\n", "chunked")


@on_both_loops
async def test_a_stream_to_http_1_0_ends_with_the_connection() -> None:
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        peer.send(request("GET", "/count/3", version="1.0", connection="keep-alive"))
        answer = await peer.receive()
        assert (answer.body, answer.headers["connection"]) == (b"0\n1\n2\n", "close")


@on_both_loops
async def test_a_stream_ends_when_its_peer_hangs_up() -> None:
    handlers = Handlers()
    async with served(handlers.routes()) as running:
        peer = await running.peer()
        peer.send(request("GET", "/ticks"))
        await peer.receive_head()
        await peer.close()
        await until(lambda: handlers.closed_streams == 1)
        await until(lambda: running.listener.stream_count == 0)


@on_both_loops
async def test_a_stream_does_not_get_ahead_of_its_peer() -> None:
    handlers = Handlers()
    async with served(handlers.routes()) as running:
        peer = await running.peer()
        peer.send(request("GET", "/ticks"))
        await peer.receive_head()
        await until(
            lambda: running.listener.send_budget.unsent_bytes > http_limits.HTTP_WRITE_BUFFER_BYTES
        )
        await let_others_run(1_000)
        begun = handlers.begun
        assert begun * 50_000 < 32 * limits.MIB, "what sockets hold, and not much more"
        await soon(peer.reader.readexactly(begun * 50_000))
        await until(lambda: handlers.begun > begun)


@on_both_loops
async def test_a_stream_that_breaks_off_does_not_look_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        peer.send(request("GET", "/broken"))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await peer.receive()
        assert "a bug of ours" in caplog.text


# --- ends ------------------------------------------------------------------------------------


@on_both_loops
async def test_who_hangs_up_has_the_handler_cancelled() -> None:
    handlers = Handlers()
    async with served(handlers.routes()) as running:
        peer = await running.peer()
        peer.send(request("GET", "/wait"))
        await until(lambda: handlers.begun == 1)
        await peer.close()
        await until(lambda: handlers.cancelled == 1)
        await until(lambda: running.listener.connection_count == 0)


@on_both_loops
async def test_a_listener_that_closes_answers_what_was_asked_and_hangs_up_on_the_idle() -> None:
    handlers = Handlers()
    async with served(handlers.routes()) as running:
        busy, idle = await running.peer(), await running.peer()
        assert (await idle.get("/echo")).status == 200
        busy.send(request("GET", "/wait?number=1") + request("GET", "/echo"))
        await until(lambda: handlers.begun == 1)
        closing = asyncio.ensure_future(running.listener.close())
        assert await idle.is_closed()
        with pytest.raises(OSError):
            await running.peer()
        handlers.gate.set()
        assert (await busy.receive()).json == "1"
        answer = await busy.receive()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await busy.is_closed()
        await soon(closing)


@on_both_loops
async def test_a_listener_that_closes_ends_waits_and_streams() -> None:
    handlers = Handlers()
    async with served(handlers.routes()) as running:
        waiter, streamer = await running.peer(), await running.peer()
        waiter.send(request("GET", "/poll"))
        await until(lambda: handlers.begun == 1)
        streamer.send(request("GET", "/ticks"))
        await streamer.receive_head()
        closing = asyncio.ensure_future(running.listener.close())
        (await waiter.receive()).failed(503, "closing")
        assert await waiter.is_closed()
        assert [chunk async for chunk in streamer.chunks()], "the stream has an end"
        await soon(closing)
        assert handlers.closed_streams == 1


@on_both_loops
async def test_a_listener_that_closes_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_limits, "HTTP_DRAIN_MS", 100)
    handlers = Handlers()
    async with served(handlers.routes()) as running:
        peer, slow = await running.peer(), await running.peer()
        peer.send(request("GET", "/wait"))
        slow.send(request("GET", f"/large/{64 * limits.MIB}"))
        await until(lambda: handlers.begun == 1 and running.listener.send_budget.unsent_bytes > 0)
        await soon(running.listener.close())
        (await peer.receive()).failed(503, "closing")
        assert "did not finish in time" in caplog.text
        assert running.listener.send_budget.unsent_bytes == 0


def test_pythons_own_client_is_served() -> None:
    """One that nobody here wrote."""

    async def ask() -> None:
        async with served(Handlers().routes()) as running:
            await asyncio.to_thread(by_http_client, *running.address)

    def by_http_client(host: str, port: int) -> None:
        connection = http.client.HTTPConnection(host, port, timeout=20)
        try:
            for _ in range(2):
                connection.request("POST", "/echo", iter([b"qua", b"ck"]), encode_chunked=True)
                answer = connection.getresponse()
                assert b"quack" in answer.read()
                connection.request("GET", "/count/3")
                assert connection.getresponse().read() == b"0\n1\n2\n"
        finally:
            connection.close()

    asyncio.run(ask())


def test_the_listener_leaves_logging_alone() -> None:
    async def serve() -> None:
        async with served((Route("GET", "/", Handlers().echo),)):
            pass

    before = logging.getLogger().handlers[:]
    asyncio.run(serve())
    assert logging.getLogger().handlers == before


@on_both_loops
async def test_a_closed_connection_is_freed_without_the_garbage_collector() -> None:
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        await peer.post("/echo", "quack")
        await peer.get("/nowhere")
        (connection,) = map(weakref.ref, running.listener.connections)
        gc.collect()
        gc.disable()
        try:
            await peer.close()
            await until(lambda: connection() is None)
        finally:
            gc.enable()
