"""Requests that cannot be: a clear answer with the right status, and nobody else notices."""

from __future__ import annotations

import pytest

from quackmq import limits
from quackmq.protocols.http import limits as http_limits
from tests.broker.flock import Member
from tests.kit.tables import each
from tests.kit.waiting import until
from tests.protocols.http.handlers import Handlers
from tests.protocols.http.peers import TESTER, request, served, served_meanwhile
from tests.protocols.kafka.client import on_both_loops

# --- routes, methods, parameters ---------------------------------------------------------------


async def test_unknown_routes_are_not_found() -> None:
    async with served_meanwhile() as running:
        peer = await running.peer()
        for path in ("/", "/topic", "/topics/", "//topics", "/Topics", "/topics/../size", "/..%2F"):
            said = (await peer.get(path)).failed(404, "unknown_route")
            assert said == f"there is no resource at {path}; /v1/docs lists all of them"
        assert (await peer.get("/v1/nowhere")).json["code"] == "unknown_route"
        answer = await peer.post("/nowhere", b"x" * 100_000)
        answer.failed(404, "unknown_route")
        assert (await peer.get("/topics")).status == 200, "the body was not taken for a request"


@each("method", ["GET", "PUT", "DELETE", "PATCH", "TRACE", "MKCOL"])
async def test_wrong_methods_are_told_the_right_ones(method: str) -> None:
    async with served_meanwhile() as running:
        peer = await running.peer()
        answer = await peer.ask(method, "/producer/produce")
        answer.failed(405, "unknown_method")
        assert answer.headers["allow"] == "OPTIONS, POST"


async def test_a_tunnel_is_refused_and_ends() -> None:
    async with served_meanwhile() as running:
        peer = await running.peer()
        answer = await peer.ask("CONNECT", "localhost:80")
        answer.failed(404, "unknown_route")
        assert await peer.is_closed()


@each(
    ("method", "target", "missing"),
    [
        ("POST", "/topics", "topic_name"),
        ("POST", "/producer/register", "topic"),
        ("POST", "/consumer/register", "topic"),
        ("POST", "/producer/produce?topic=t&producer_id=p", "message"),
        ("POST", "/producer/produce?topic=t&message=m", "producer_id"),
        ("POST", "/producer/produce?producer_id=p&message=m", "topic"),
        ("GET", "/consumer/consume?topic=t", "consumer_id"),
        ("GET", "/consumer/consume?consumer_id=c", "topic"),
        ("GET", "/size?topic=t", "consumer_id"),
        ("GET", "/size?consumer_id=c", "topic"),
    ],
)
async def test_a_missing_parameter_is_named(method: str, target: str, missing: str) -> None:
    async with served() as running:
        peer = await running.peer()
        answer = await peer.ask(method, target)
        assert f" {missing} " in answer.failed(400, "invalid_request")


@pytest.mark.parametrize("value", [1, 1.5, True, ["x"], {"x": 1}])
async def test_a_parameter_that_is_no_string_is_refused(value: object) -> None:
    async with served() as running:
        peer = await running.peer()
        await peer.post("/producer/register?topic=ducks")
        sound = {"topic": "ducks", "producer_id": "producer-1", "message": "quack"}
        for name in sound:
            answer = await peer.post("/producer/produce", sound | {name: value})
            assert name in answer.failed(400, "invalid_request")
        (await peer.post("/topics", {"topic_name": value})).failed(400, "invalid_request")
        (await peer.post("/producer/produce", sound | {"message": None})).failed(
            400, "invalid_request"
        )


@each("value", ["", "x", "-1", "1.0", "٣", "9" * 19, "9" * 100, " 1", 1.0, True])
async def test_a_sequence_that_is_none_is_refused(value: object) -> None:
    async with served() as running:
        peer = await running.peer()
        await peer.post("/producer/register?topic=ducks")
        fields = {"topic": "ducks", "producer_id": "producer-1", "message": "…", "sequence": value}
        (await peer.post("/producer/produce", fields)).failed(400, "invalid_request")
        (await peer.post("/producer/produce", fields | {"sequence": 2**70})).failed(
            400, "invalid_request"
        )


@each("name", ["", "a b", "x" * 250, "ü", "..", "a/b", "x" * 20_000])
async def test_empty_and_enormous_names_are_refused(name: str) -> None:
    async with served_meanwhile() as running:
        peer = await running.peer()
        (await peer.post("/topics", {"topic_name": name})).failed(400, "illegal_topic_name")
        (await peer.post("/producer/register", {"topic": name})).failed(400, "illegal_topic_name")
        fields = {"topic": name, "consumer_id": "consumer-1"}
        (await peer.ask("GET", "/size", fields)).failed(404, "unknown_topic")
        fields = {"topic": "ponds", "consumer_id": name}
        (await peer.ask("GET", "/size", fields)).failed(404, "unknown_consumer_id")
        fields = {"topic": "ponds", "producer_id": name, "message": "…"}
        (await peer.post("/producer/produce", fields)).failed(404, "unknown_producer_id")
        assert (await peer.get("/topics")).succeeded() == {"topics": ["ponds"]}


async def test_ids_that_are_not_ours_or_of_a_topic_made_anew_send_the_head_again_r2() -> None:
    async with served() as running:
        peer = await running.peer()
        await peer.post("/producer/register?topic=ducks")
        await peer.post("/consumer/register?topic=ducks")
        consume = "/consumer/consume?topic=ducks&consumer_id=consumer-1&last_id="
        size = consume.replace("/consumer/consume", "/size")
        fields = {"topic": "ducks", "producer_id": "producer-1", "message": "quack"}
        message_id = (await peer.post("/producer/produce", fields)).succeeded()["message_id"]
        for foreign in ("x", "-1", "A" * 39, "A" * 10_000, "%00"):
            assert (await peer.get(consume + foreign)).succeeded()["message_id"] == message_id
            assert (await peer.get(size + foreign)).succeeded() == {"size": 1}
        for path in ("/topics?topic_name=geese", "/consumer/register?topic=geese"):
            await peer.post(path)
        other = consume.replace("ducks", "geese").replace("consumer-1", "consumer-2")
        (await peer.get(other + message_id)).failed(404, "empty")
        await running.broker.delete_topic(TESTER, "ducks")
        await peer.post("/topics?topic_name=ducks")
        await peer.post("/consumer/register?topic=ducks&consumer_id=consumer-1")
        (await peer.get(consume + message_id)).failed(404, "empty")
        assert (await peer.get(size + message_id)).succeeded() == {"size": 0}


async def test_a_name_that_a_group_uses_is_refused_and_its_messages_stay() -> None:
    async with served() as running:
        peer = await running.peer()
        await peer.post("/producer/register?topic=ducks")
        await peer.post("/consumer/register?topic=ducks")
        fields = {"topic": "ducks", "producer_id": "producer-1", "message": "quack"}
        await peer.post("/producer/produce", fields)
        member = Member(running.broker, "consumer-1")
        await member.enter()
        consume = "/consumer/consume?topic=ducks&consumer_id=consumer-1"
        for path in (consume, f"{consume}&last_id="):
            (await peer.get(path)).failed(409, "name_in_other_mode")
        answer = await peer.post("/v1/subscriptions/consumer-1/topics/ducks/get", {})
        assert (answer.status, answer.json["code"]) == (409, "name_in_other_mode")
        await member.leave()
        assert (await peer.get(consume)).succeeded()["message"] == "quack"


# --- bodies ------------------------------------------------------------------------------------


@each(
    "body",
    [
        b"{",
        b"quack",
        b'{"topic_name": "ducks"',
        b"\xff\xfe",
        b'{"topic_name": "\xff"}',
        b'{"topic_name": "\\ud800"}',
        b"[" * 100_000,
        b'{"topic_name": NaN}',
        b"\x00",
        b"[]",
        b'"ducks"',
        b"null",
    ],
)
async def test_what_is_no_object_of_json_is_refused(body: bytes) -> None:
    async with served_meanwhile() as running:
        peer = await running.peer()
        (await peer.post("/topics", body)).failed(400, "invalid_request")
        assert (await peer.get("/topics")).succeeded() == {"topics": ["ponds"]}


@pytest.mark.parametrize("query", ["topic_name=%ff", "%ff=x", "topic_name=a&topic_name=b"])
async def test_a_query_that_is_not_utf_8_or_says_a_thing_twice_is_refused(query: str) -> None:
    async with served() as running:
        peer = await running.peer()
        (await peer.post(f"/topics?{query}")).failed(400, "invalid_request")
        answer = await peer.post("/topics?topic_name=a", {"topic_name": "a"})
        assert "in the query and in the body" in answer.failed(400, "invalid_request")
        many = "&".join(f"p{number}=" for number in range(http_limits.HTTP_QUERY_PARAMETERS + 1))
        (await peer.post(f"/topics?{many}")).failed(400, "invalid_request")


async def test_a_path_that_is_not_utf_8_is_refused() -> None:
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        (await peer.get("/large/%ff")).failed(400, "invalid_request")


@on_both_loops
async def test_a_body_over_the_limit_is_refused_before_it_comes() -> None:
    async with served_meanwhile() as running:
        peer = await running.peer()
        size = http_limits.HTTP_QUEUE_BODY_BYTES + 1
        peer.send(request("POST", "/producer/produce", content_length=str(size)))
        (await peer.receive()).failed(413, "record_too_large")
        assert await peer.is_closed()


@on_both_loops
async def test_a_body_over_the_limit_in_chunks_is_refused_where_it_gets_too_large() -> None:
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        peer.send(request("POST", "/small", transfer_encoding="chunked"))
        for _ in range(3):
            peer.send(b"190\r\n" + b"x" * 400 + b"\r\n")
            await peer.writer.drain()
        (await peer.receive()).failed(413, "record_too_large")
        assert await peer.is_closed()


@on_both_loops
async def test_who_goes_on_sending_after_a_refusal_still_reads_it() -> None:
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        peer.send(request("POST", "/small", bytes(8 * limits.MIB)))
        (await peer.receive()).failed(413, "record_too_large")


@on_both_loops
async def test_a_message_of_the_largest_size_is_taken_and_a_larger_one_refused() -> None:
    async with served_meanwhile() as running:
        peer = await running.peer()
        await peer.post("/producer/register?topic=ducks")
        await peer.post("/consumer/register?topic=ducks")
        fields = {"topic": "ducks", "producer_id": "producer-2"}
        text = "x" * (limits.BATCH_BYTES - 1_000)
        (await peer.post("/producer/produce", fields | {"message": text})).succeeded()
        got = await peer.get("/consumer/consume?topic=ducks&consumer_id=consumer-2")
        assert got.succeeded()["message"] == text
        text = "x" * (limits.BATCH_BYTES + 1)
        answer = await peer.post("/producer/produce", fields | {"message": text})
        answer.failed(413, "record_too_large")


# --- heads -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"quack\r\n\r\n", 501),
        (b"GET\r\n\r\n", 501),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 501),  # TLS
        (b"GET / HTTP/2.0\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nbad name: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nx: a\x00b\r\n\r\n", 400),
        (b"POST /topics HTTP/1.1\r\nhost: localhost\r\ncontent-length: x\r\n\r\n", 400),
        (b"POST /topics HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n", 400),
        (
            b"POST /topics HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999999999999\r\n"
            b"\r\n",
            400,
        ),
        (
            b"POST /topics HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n"
            b"content-length: 6\r\n\r\n",
            400,
        ),
        (
            b"POST /topics HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n"
            b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (
            b"POST /topics HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nxyz",
            400,
        ),
        (
            b"POST /topics HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip\r\n\r\n",
            400,
        ),
    ],
)
@on_both_loops
async def test_what_is_no_http_is_answered_once_and_ends(sent: bytes, status: int) -> None:
    async with served_meanwhile() as running:
        peer = await running.peer()
        peer.send(sent)
        assert (await peer.receive()).status == status
        assert await peer.is_closed()


@on_both_loops
async def test_nonsense_behind_good_requests_comes_after_their_answers() -> None:
    handlers = Handlers()
    async with served(handlers.routes()) as running:
        peer = await running.peer()
        peer.send(request("GET", "/wait?number=1") + request("GET", "/echo") + b"nonsense\r\n")
        await until(lambda: handlers.begun)
        handlers.gate.set()
        assert [(await peer.receive()).status for _ in range(3)] == [200, 200, 501]
        assert await peer.is_closed()


@pytest.mark.parametrize(
    "part",
    [
        b"GET /topics?"
        + b"x" * http_limits.HTTP_HEAD_BYTES
        + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /topics?" + b"x" * 10 * http_limits.HTTP_HEAD_BYTES,
        b"GET /topics HTTP/1.1\r\nx: " + b"x" * 10 * http_limits.HTTP_HEAD_BYTES,
        b"GET /topics HTTP/1.1\r\n" + b"x: y\r\n" * http_limits.HTTP_HEAD_BYTES,
        b"GET /topics HTTP/1.1\r\n" + b"x" * 10 * http_limits.HTTP_HEAD_BYTES,
        b"POST /topics HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        b"0\r\nx: " + b"x" * 10 * http_limits.HTTP_HEAD_BYTES,
        b"POST /topics HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        b"1;" + b"x" * 10 * http_limits.HTTP_HEAD_BYTES,
    ],
    ids=["target", "no end", "header", "headers", "name", "trailer", "extension"],
)
@on_both_loops
async def test_a_head_over_the_limit_is_refused(part: bytes) -> None:
    async with served_meanwhile() as running:
        peer = await running.peer()
        for at in range(0, len(part), 10_000):
            peer.send(part[at : at + 10_000])
            await peer.writer.drain()
        assert (await peer.receive()).status == 431
        assert await peer.is_closed()


@on_both_loops
async def test_many_small_chunks_are_fine() -> None:
    async with served(Handlers().routes()) as running:
        peer = await running.peer()
        count = http_limits.HTTP_HEAD_BYTES
        peer.send(request("POST", "/echo", transfer_encoding="chunked"))
        for _ in range(8):
            peer.send(b"1\r\nx\r\n" * (count // 8))
            await peer.writer.drain()
        peer.send(b"0\r\n\r\n")
        assert (await peer.receive()).json["body"] == "x" * count
