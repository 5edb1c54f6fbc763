"""The endpoints of the distributed queue (D1), by a peer that speaks HTTP and nothing else."""

from __future__ import annotations

import asyncio
import base64

import pytest

from quackmq.broker import BrokerSettings
from quackmq.model.policy import Policy, WhenFull
from quackmq.records.batch import NO_TIMESTAMP, Record
from tests.kit.tables import each
from tests.protocols.http.peers import TESTER, Peer, Served, served

FORM = "application/x-www-form-urlencoded"


async def registered(peer: Peer, topic: str = "ducks") -> tuple[str, str]:
    """A producer and a consumer of a topic."""
    producer = (await peer.post(f"/producer/register?topic={topic}")).succeeded()["producer_id"]
    consumer = (await peer.post(f"/consumer/register?topic={topic}")).succeeded()["consumer_id"]
    return producer, consumer


async def produce(peer: Peer, producer_id: str, *messages: str, topic: str = "ducks") -> list[str]:
    ids = []
    for message in messages:
        fields = {"topic": topic, "producer_id": producer_id, "message": message}
        ids.append((await peer.post("/producer/produce", fields)).succeeded()["message_id"])
    return ids


def consume(consumer_id: str, topic: str = "ducks") -> str:
    return f"/consumer/consume?topic={topic}&consumer_id={consumer_id}"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/json; charset=utf-8", b'{"topic_name": "grey ducks"}'),
        ("", b'{"topic_name": "grey ducks"}'),
        ("application/x-www-form-urlencoded", b' {"topic_name": "grey ducks"}'),
        ("application/x-www-form-urlencoded", b"topic_name=grey+ducks"),
        ("Application/X-WWW-Form-Urlencoded; charset=utf-8", b"topic_name=grey%20ducks"),
    ],
)
async def test_d1_parameters_come_as_json_or_as_a_form(kind: str, body: bytes) -> None:
    """As curl, browsers and libraries send them by default."""
    async with served() as running:
        peer = await running.peer()
        answer = await peer.post("/topics", body, content_type=kind)
        assert "'grey ducks'" in answer.failed(400, "illegal_topic_name")


async def test_d1_a_message_goes_from_its_producer_to_its_consumer() -> None:
    async with served() as running:
        peer = await running.peer()
        assert (await peer.post("/topics", {"topic_name": "ducks"})).succeeded()
        assert (await peer.get("/topics")).succeeded() == {"topics": ["ducks"]}
        producer, consumer = await registered(peer)
        assert (producer, consumer) == ("producer-1", "consumer-1")
        (message_id,) = await produce(peer, producer, "quack")
        size = f"/size?topic=ducks&consumer_id={consumer}"
        assert (await peer.get(size)).succeeded() == {"size": 1}
        answer = (await peer.get(consume(consumer))).succeeded()
        assert answer == {"message": "quack", "message_id": message_id}
        assert (await peer.get(size)).succeeded() == {"size": 0}


async def test_d1_parameters_come_in_the_query_or_in_the_body() -> None:
    async with served() as running:
        peer = await running.peer()
        await peer.post("/topics?topic_name=ducks")
        assert (await peer.post("/topics", {"topic_name": "geese"})).succeeded()
        assert (await peer.get("/topics")).succeeded() == {"topics": ["ducks", "geese"]}
        producer, consumer = await registered(peer)
        query = "topic=ducks&message=gr%C3%BC%C3%9Fe+%26+mehr"
        answer = await peer.post(f"/producer/produce?{query}", {"producer_id": producer})
        assert answer.succeeded()
        fields = {"topic": "ducks", "consumer_id": consumer}
        answer = await peer.ask("GET", "/consumer/consume", fields)
        assert answer.succeeded()["message"] == "grüße & mehr"


async def test_d1_registering_a_producer_creates_its_topic() -> None:
    async with served() as running:
        peer = await running.peer()
        assert (await peer.post("/producer/register?topic=ducks")).succeeded()
        assert (await peer.get("/topics")).succeeded() == {"topics": ["ducks"]}


async def test_d1_consuming_from_an_empty_queue_is_a_failure() -> None:
    async with served() as running:
        peer = await running.peer()
        _, consumer = await registered(peer)
        (await peer.get(consume(consumer))).failed(404, "empty")


async def test_d3_each_consumer_has_its_own_position() -> None:
    async with served() as running:
        peer = await running.peer()
        producer, first = await registered(peer)
        await produce(peer, producer, "1", "2")
        second = (await peer.post("/consumer/register?topic=ducks")).succeeded()["consumer_id"]
        await produce(peer, producer, "3")
        for consumer, expected in ((first, ["1", "2", "3"]), (second, ["3"])):
            got = [(await peer.get(consume(consumer))).succeeded()["message"] for _ in expected]
            assert got == expected
            (await peer.get(consume(consumer))).failed(404, "empty")


async def test_with_the_last_id_a_message_is_repeated_until_it_is_named() -> None:
    async with served() as running:
        peer = await running.peer()
        producer, consumer = await registered(peer)
        first_id, second_id = await produce(peer, producer, "1", "2")
        for _ in range(2):
            answer = (await peer.get(f"{consume(consumer)}&last_id=")).succeeded()
            assert answer == {"message": "1", "message_id": first_id}
        for _ in range(2):
            answer = (await peer.get(f"{consume(consumer)}&last_id={first_id}")).succeeded()
            assert answer == {"message": "2", "message_id": second_id}
        (await peer.get(f"{consume(consumer)}&last_id={second_id}")).failed(404, "empty")


async def test_a_sequence_makes_a_repeated_produce_harmless() -> None:
    async with served() as running:
        peer = await running.peer()
        producer, consumer = await registered(peer)
        fields = {"topic": "ducks", "producer_id": producer, "message": "1", "sequence": 7}
        first = (await peer.post("/producer/produce", fields)).succeeded()
        again = (await peer.post("/producer/produce", fields)).succeeded()
        assert (first["repeated"], again["repeated"]) == (False, True)
        query = f"topic=ducks&producer_id={producer}&message=2&sequence=8"
        assert not (await peer.post(f"/producer/produce?{query}")).succeeded()["repeated"]
        assert [(await peer.get(consume(consumer))).succeeded()["message"] for _ in "12"] == [
            "1",
            "2",
        ]
        (await peer.get(consume(consumer))).failed(404, "empty")


async def test_consuming_takes_from_every_partition_in_turn() -> None:
    async with served() as running:
        peer = await running.peer()
        await running.broker.create_topic(TESTER, "ducks", partitions=3)
        producer, consumer = await registered(peer)
        await produce(peer, producer, *"123456")
        got = [(await peer.get(consume(consumer))).succeeded()["message"] for _ in range(6)]
        assert sorted(got[:3]) == ["1", "2", "3"]
        assert sorted(got[3:]) == ["4", "5", "6"]


async def test_a_consumer_that_asks_many_times_at_once_gets_each_message_once() -> None:
    async with served() as running:
        peer = await running.peer()
        producer, consumer = await registered(peer)
        expected = [str(number) for number in range(20)]
        await produce(peer, producer, *expected)
        peers = [await running.peer() for _ in range(10)]
        answers = await asyncio.gather(*(one.get(consume(consumer)) for one in peers))
        answers += await asyncio.gather(*(one.get(consume(consumer)) for one in peers))
        got = [answer.succeeded()["message"] for answer in answers]
        assert sorted(got, key=int) == expected


async def test_what_is_no_text_comes_as_base64_and_what_is_nothing_as_null() -> None:
    """Other listeners publish bytes; a queue that held a consumer up at them would be of no use."""
    async with served() as running:
        peer = await running.peer()
        _, consumer = await registered(peer)
        for value in (b"\xff\x00", None):
            record = Record(0, NO_TIMESTAMP, None, value)
            await running.broker.messages.put(TESTER, "ducks", [record])
        answer = (await peer.get(consume(consumer))).succeeded()
        assert answer["encoding"] == "base64"
        assert base64.b64decode(answer["message"]) == b"\xff\x00"
        answer = (await peer.get(consume(consumer))).succeeded()
        assert answer["message"] is None
        assert "encoding" not in answer


async def test_a_name_that_subscribed_elsewhere_is_a_consumer() -> None:
    async with served() as running:
        peer = await running.peer()
        producer, _ = await registered(peer)
        await running.broker.subscribe(TESTER, "billing", "ducks")
        await produce(peer, producer, "quack")
        assert (await peer.get(consume("billing"))).succeeded()["message"] == "quack"


# --- the document's error rules ---------------------------------------------------------------


async def stage(running: Served) -> Peer:
    """Topics ducks and geese; producer-1 of ducks, producer-2 of geese; consumer-1 of ducks,
    consumer-2 of geese."""
    peer = await running.peer()
    for topic in ("ducks", "geese"):
        await registered(peer, topic)
    return peer


async def test_d2_add_topic_1_the_topic_exists_already() -> None:
    async with served() as running:
        peer = await stage(running)
        (await peer.post("/topics?topic_name=ducks")).failed(409, "topic_exists")


async def test_d2_publish_message_1_the_topic_does_not_exist() -> None:
    async with served() as running:
        peer = await stage(running)
        fields = {"topic": "swans", "producer_id": "producer-1", "message": "…"}
        (await peer.post("/producer/produce", fields)).failed(404, "unknown_topic")
        assert (await peer.get("/topics")).succeeded() == {"topics": ["ducks", "geese"]}


async def test_d2_publish_message_2_the_producer_does_not_exist() -> None:
    async with served() as running:
        peer = await stage(running)
        fields = {"topic": "ducks", "producer_id": "producer-9", "message": "…"}
        (await peer.post("/producer/produce", fields)).failed(404, "unknown_producer_id")


async def test_d2_publish_message_3_the_producer_is_of_another_topic_or_of_none() -> None:
    async with served() as running:
        peer = await stage(running)
        fields = {"topic": "ducks", "producer_id": "producer-2", "message": "…"}
        (await peer.post("/producer/produce", fields)).failed(403, "not_registered")
        await running.broker.delete_topic(TESTER, "geese")
        (await peer.post("/producer/produce", fields)).failed(403, "not_registered")
        assert (await peer.get("/size?topic=ducks&consumer_id=consumer-1")).json["size"] == 0


async def test_d2_subscribe_to_topic_1_the_topic_does_not_exist() -> None:
    async with served() as running:
        peer = await stage(running)
        (await peer.post("/consumer/register?topic=swans")).failed(404, "unknown_topic")
        query = "topic=swans&consumer_id=consumer-1"
        (await peer.post(f"/consumer/register?{query}")).failed(404, "unknown_topic")


async def test_d2_subscribe_to_topic_2_the_consumer_does_not_exist() -> None:
    async with served() as running:
        peer = await stage(running)
        query = "topic=ducks&consumer_id=consumer-9"
        (await peer.post(f"/consumer/register?{query}")).failed(404, "unknown_consumer_id")


async def test_d2_subscribe_to_topic_3_the_consumer_is_subscribed_already() -> None:
    async with served() as running:
        peer = await stage(running)
        query = "topic=ducks&consumer_id=consumer-1"
        (await peer.post(f"/consumer/register?{query}")).failed(409, "already_subscribed")
        query = "topic=geese&consumer_id=consumer-1"
        answer = (await peer.post(f"/consumer/register?{query}")).succeeded()
        assert answer == {"consumer_id": "consumer-1"}, "one topic more is fine"


async def test_d2_add_producer_to_topic_1_the_topic_does_not_exist() -> None:
    async with served() as running:
        peer = await stage(running)
        query = "topic=swans&producer_id=producer-1"
        (await peer.post(f"/producer/register?{query}")).failed(404, "unknown_topic")


async def test_d2_add_producer_to_topic_2_the_producer_does_not_exist() -> None:
    async with served() as running:
        peer = await stage(running)
        query = "topic=ducks&producer_id=producer-9"
        (await peer.post(f"/producer/register?{query}")).failed(404, "unknown_producer_id")


async def test_d2_add_producer_to_topic_3_the_producer_is_of_another_topic() -> None:
    async with served() as running:
        peer = await stage(running)
        query = "topic=ducks&producer_id=producer-2"
        (await peer.post(f"/producer/register?{query}")).failed(409, "already_registered")


async def test_d2_add_producer_to_topic_4_the_producer_is_of_this_topic() -> None:
    async with served() as running:
        peer = await stage(running)
        query = "topic=ducks&producer_id=producer-1"
        (await peer.post(f"/producer/register?{query}")).failed(409, "already_registered")


@pytest.mark.parametrize("path", ["/consumer/consume", "/size"])
async def test_d2_consume_message_and_log_size_1_the_topic_does_not_exist(path: str) -> None:
    async with served() as running:
        peer = await stage(running)
        query = "topic=swans&consumer_id=consumer-1"
        (await peer.get(f"{path}?{query}")).failed(404, "unknown_topic")


@pytest.mark.parametrize("path", ["/consumer/consume", "/size"])
async def test_d2_consume_message_and_log_size_2_the_consumer_does_not_exist(path: str) -> None:
    async with served() as running:
        peer = await stage(running)
        query = "topic=ducks&consumer_id=consumer-9"
        (await peer.get(f"{path}?{query}")).failed(404, "unknown_consumer_id")


@pytest.mark.parametrize("path", ["/consumer/consume", "/size"])
async def test_d2_consume_message_and_log_size_3_the_consumer_is_no_subscriber(path: str) -> None:
    async with served() as running:
        peer = await stage(running)
        query = "topic=ducks&consumer_id=consumer-2"
        (await peer.get(f"{path}?{query}")).failed(404, "unknown_subscription")


async def test_d2_a_rule_that_comes_first_is_the_one_that_is_told() -> None:
    async with served() as running:
        peer = await stage(running)
        fields = {"topic": "swans", "producer_id": "nobody", "message": "…"}
        (await peer.post("/producer/produce", fields)).failed(404, "unknown_topic")
        query = "topic=swans&consumer_id=nobody"
        (await peer.get(f"/size?{query}")).failed(404, "unknown_topic")


# --- settings of topics, and unknown parameters ---------------------------------------------------


async def test_d3_d4_a_topic_is_created_with_settings_in_any_form() -> None:
    async with served() as running:
        peer = await running.peer()
        query = "needs_subscriber=true&keep_until_consumed=true&live_entries=7&when_full=refuse"
        policy = Policy(
            needs_subscriber=True,
            keep_until_consumed=True,
            live_entries=7,
            when_full=WhenFull.REFUSE,
        )
        body: dict[str, object] = {"needs_subscriber": True, "keep_until_consumed": True}
        body |= {"live_entries": 7, "when_full": "refuse", "keep_bytes": None}
        (await peer.post(f"/topics?topic_name=a&{query}")).succeeded()
        (await peer.post("/topics", {"topic_name": "b", **body})).succeeded()
        (await peer.post(f"/producer/register?topic=c&{query}")).succeeded()
        (await peer.post("/producer/register", {"topic": "d", **body})).succeeded()
        data = f"topic_name=e&{query}&keep_bytes=-1".encode()
        (await peer.post("/topics", data, content_type=FORM)).succeeded()
        for name in "abcde":
            assert running.broker.topic(name).policy == policy, name
        fields = {"topic": "c", "producer_id": "producer-1", "message": "quack"}
        (await peer.post("/producer/produce", fields)).failed(409, "no_subscriber")


async def test_a_registration_with_other_settings_than_the_topic_has_is_refused() -> None:
    async with served() as running:
        peer = await running.peer()
        path = "/producer/register?topic=ducks"
        (await peer.post(f"{path}&keep_until_consumed=true")).succeeded()
        (await peer.post(f"{path}&keep_until_consumed=true")).succeeded()
        (await peer.post(path)).succeeded()
        refusal = (await peer.post(f"{path}&needs_subscriber=true")).failed(409, "topic_exists")
        assert "exists with needs_subscriber = false, not true" in refusal


async def test_all_topics_of_a_queue_can_refuse_and_delete_d3_d4() -> None:
    async with served() as running:
        peer = await running.peer()
        policy = {"needs_subscriber": True, "keep_until_consumed": True}
        await peer.ask("PUT", "/v1/topic-defaults/*", {"policy": policy})
        producer = (await peer.post("/producer/register?topic=ducks")).succeeded()["producer_id"]
        fields = {"topic": "ducks", "producer_id": producer, "message": "quack"}
        (await peer.post("/producer/produce", fields)).failed(409, "no_subscriber")
        consumers = [
            (await peer.post("/consumer/register?topic=ducks")).succeeded()["consumer_id"]
            for _ in range(2)
        ]
        await produce(peer, producer, "quack")
        left = [(await peer.get(consume(each))).succeeded()["subscribers"] for each in consumers]
        assert left == [1, 0]


async def test_an_ephemeral_topic_is_created_by_its_first_consumer_r4() -> None:
    settings = BrokerSettings(topic_defaults={"d*": {"ephemeral": True}})
    async with served(settings=settings) as running:
        peer = await running.peer()
        (await peer.post("/producer/register?topic=ducks")).failed(404, "unknown_topic")
        (await peer.post("/consumer/register?topic=geese")).failed(404, "unknown_topic")
        answer = await peer.post("/consumer/register?topic=ducks")
        consumer = answer.succeeded()["consumer_id"]
        (await peer.post("/producer/register?topic=ducks")).succeeded()
        await running.broker.unsubscribe(TESTER, consumer, "ducks")
        assert (await peer.get("/topics")).succeeded() == {"topics": []}
        again = f"/consumer/register?topic=ducks&consumer_id={consumer}"
        assert (await peer.post(again)).succeeded() == {"consumer_id": consumer}


@each(
    ("method", "path", "hint"),
    [
        ("GET", "/topics?x=1", "unknown parameter 'x': the parameters are none"),
        ("POST", "/topics?topic=a", "did you mean 'topic_name'?"),
        ("POST", "/topics?topic_name=a&need_subscriber=true", "did you mean 'needs_subscriber'?"),
        ("POST", "/producer/register?topic=ducks&producer=1", "did you mean 'producer_id'?"),
        ("POST", "/consumer/register?topic=ducks&needs_subscriber=true", "unknown parameter"),
        ("POST", "/producer/produce?topic=ducks&massage=a", "did you mean 'message'?"),
        ("GET", "/consumer/consume?topic=ducks&consumer_id=consumer-1&last=a", "mean 'last_id'?"),
        ("GET", "/size?topic=ducks&consumer_id=consumer-1&zzz=1", "consumer_id, last_id, topic"),
    ],
)
async def test_unknown_parameters_are_refused_wherever_they_are(
    method: str, path: str, hint: str
) -> None:
    async with served() as running:
        peer = await running.peer()
        await registered(peer)
        assert hint in (await peer.ask(method, path)).failed(400, "invalid_request")
        path, _, query = path.partition("?")
        fields = dict(pair.split("=") for pair in query.split("&"))
        refusal = (await peer.ask(method, path, fields)).failed(400, "invalid_request")
        assert "unknown field" in refusal
        form = await peer.ask(method, path, query.encode(), content_type=FORM)
        assert hint in form.failed(400, "invalid_request")
        assert (await peer.get("/topics")).succeeded() == {"topics": ["ducks"]}


@each(
    ("setting", "why"),
    [
        ({"needs_subscriber": "yes"}, "use true or false"),
        ({"live_entries": "many"}, "use a whole number, or -1 for no bound"),
        ({"live_entries": 0}, "whole number from 1"),
        ({"live_entries": 1.5}, "use a whole number"),
        ({"when_full": "explode"}, "use one of archive, wait, wait_until_consumed, refuse"),
        ({"needs_subscriber": None}, "use true or false"),
    ],
)
async def test_a_setting_that_cannot_be_is_refused(setting: dict[str, object], why: str) -> None:
    async with served() as running:
        peer = await running.peer()
        answer = await peer.post("/topics", {"topic_name": "ducks", **setting})
        assert why in answer.failed(400, "invalid_policy")
        assert not running.broker.topics()
