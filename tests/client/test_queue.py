"""The queue's producer and consumer libraries (D6), against a broker in a process of its own."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from itertools import count, repeat
from pathlib import Path
from typing import Any

import pytest

from quackmq.client import queue
from quackmq.client.queue import (
    Consumer,
    ConsumerError,
    Producer,
    ProducerError,
    myConsumerError,
    myProducerError,
)
from quackmq.errors import QuackError
from tests.kit.server import DEADLINE_S
from tests.pubsub.network import UnreliableProxy, Weather, everything

#: Short, where it is the point that nothing comes.
IMPATIENT_S = 0.3
#: Enough for an answer, and not long to wait for.
PATIENT_S = 2.0

_numbers = count()


@pytest.fixture
def address(queue_address: str) -> str:
    return queue_address


@pytest.fixture
def consumer(address: str) -> Iterator[Consumer]:
    with Consumer(address) as consumer:
        yield consumer


class Once(Weather):
    """One fault, when it is asked for: at the next request or answer, or at all that come."""

    def __init__(self) -> None:
        super().__init__(0)
        self._next = ""
        self._is_lasting = False

    def next(self, fault: str) -> None:
        self._next, self._is_lasting = fault, False

    def always(self, fault: str) -> None:
        self._next, self._is_lasting = fault, True

    def draw(self, faults: Mapping[str, float]) -> str:
        fault = self._next
        if fault not in faults:
            return ""
        if not self._is_lasting:
            self._next = ""
        self.faults[fault] += 1
        return fault


@pytest.fixture
def weather() -> Once:
    return Once()


@pytest.fixture
def bad_address(address: str, weather: Once) -> Iterator[str]:
    """The same broker, behind a network that can lose an answer."""
    with UnreliableProxy(address, weather, everything) as proxy:
        yield proxy.address


# --- D6 -------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_d6_a_message_goes_from_its_producer_to_its_consumer(
    producer: Producer, consumer: Consumer, topic: str
) -> None:
    me = producer.register_producer(topic)
    consumer.register_consumer(topic)
    assert producer.enqueue(me, topic, "quack, grüße & mehr") == 0
    assert consumer.size(topic) == 1
    assert consumer.dequeue(topic) == "quack, grüße & mehr"
    assert consumer.size(topic) == 0


def test_d6_the_names_of_the_document_are_there(address: str, topic: str) -> None:
    producer, consumer = Producer(address), Consumer(address)
    assert producer.CreateTopic(topic) == 0
    me = producer.RegisterProducer(topic)
    consumer.RegisterConsumer(topic)
    assert producer.Enqueue(me, topic, "quack") == 0
    assert topic in producer.ListTopics() and topic in consumer.ListTopics()
    assert consumer.Size(topic) == 1
    assert consumer.Dequeue(topic) == "quack"
    producer.close()
    consumer.close()


def test_d6_each_library_has_one_error_type() -> None:
    assert issubclass(ProducerError, QuackError) and issubclass(ConsumerError, QuackError)
    assert myProducerError is ProducerError and myConsumerError is ConsumerError


def test_d6_a_topic_is_created_once(producer: Producer, topic: str) -> None:
    assert producer.create_topic(topic) == 0
    with pytest.raises(ProducerError, match="exists") as raised:
        producer.create_topic(topic)
    assert raised.value.reason == "topic_exists"


def test_d6_what_a_producer_may_not_do_is_a_producer_error(producer: Producer, topic: str) -> None:
    me = producer.register_producer(topic)
    other = producer.register_producer(f"{topic}-other")
    refusals = {
        "unknown_topic": (me, "no-such-topic"),
        "unknown_producer_id": ("producer-999999999", topic),
        "not_registered": (other, topic),
    }
    for reason, (producer_id, where) in refusals.items():
        with pytest.raises(ProducerError) as raised:
            producer.enqueue(producer_id, where, "quack", sequence=0)
        assert raised.value.reason == reason


def test_d6_what_a_consumer_may_not_do_is_a_consumer_error(
    producer: Producer, consumer: Consumer, topic: str
) -> None:
    with pytest.raises(ConsumerError, match="register_consumer first"):
        consumer.dequeue(topic)
    with pytest.raises(ConsumerError) as raised:
        consumer.register_consumer(topic)
    assert raised.value.reason == "unknown_topic"
    producer.create_topic(topic)
    producer.create_topic(f"{topic}-other")
    consumer.register_consumer(topic)
    for ask in (consumer.dequeue, consumer.size):
        with pytest.raises(ConsumerError) as raised:
            ask(f"{topic}-other")
        assert raised.value.reason == "unknown_subscription"
    with pytest.raises(ConsumerError) as raised:
        consumer.dequeue(topic)
    assert raised.value.reason == "empty"


def test_d6_one_consumer_has_one_id_for_many_topics_and_a_place_in_each(
    producer: Producer, consumer: Consumer, topic: str
) -> None:
    topics = [f"{topic}-{number}" for number in range(3)]
    producers = {name: producer.register_producer(name) for name in topics}
    assert len(set(producers.values())) == 3
    assert len({consumer.register_consumer(name) for name in topics}) == 1
    assert consumer.topics == topics
    for number in range(3):
        for name, me in producers.items():
            producer.enqueue(me, name, f"{name}: {number}")
    for name in topics:
        for number in range(3):
            assert consumer.size(name) == 3 - number
            assert consumer.dequeue(name) == f"{name}: {number}"


@pytest.mark.processes
def test_every_consumer_gets_every_message(address: str, producer: Producer, topic: str) -> None:
    me = producer.register_producer(topic)
    with Consumer(address) as one, Consumer(address) as two:
        assert one.register_consumer(topic) != two.register_consumer(topic)
        producer.enqueue(me, topic, "quack")
        assert (one.dequeue(topic), two.dequeue(topic)) == ("quack", "quack")


def test_a_consumer_that_has_read_all_gets_what_comes_later(
    producer: Producer, consumer: Consumer, topic: str
) -> None:
    me = producer.register_producer(topic)
    consumer.register_consumer(topic)
    for text in ("one", "two"):
        producer.enqueue(me, topic, text)
        assert consumer.dequeue(topic) == text
        with pytest.raises(ConsumerError):
            consumer.dequeue(topic)


def test_bytes_that_are_no_text_come_as_themselves(
    address: str, producer: Producer, consumer: Consumer, topic: str
) -> None:
    producer.create_topic(topic)
    consumer.register_consumer(topic)
    odd = b"\xffquack"
    host, port = address.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    body = json.dumps({"value_base64": base64.b64encode(odd).decode()})
    headers = {"Content-Type": "application/json"}
    connection.request("POST", f"/v1/topics/{topic}/messages", body, headers)
    assert connection.getresponse().status == 201
    connection.close()
    assert consumer.dequeue(topic).encode(errors="surrogateescape") == odd


# --- lost answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["answers lost", "answers torn", "requests cut off"])
def test_a_message_whose_answer_is_lost_is_there_once(
    bad_address: str, weather: Once, consumer: Consumer, topic: str, fault: str
) -> None:
    with Producer(bad_address) as producer:
        me = producer.register_producer(topic)
        consumer.register_consumer(topic)
        weather.next(fault)
        assert producer.enqueue(me, topic, "one") == 0
        assert producer.enqueue(me, topic, "two") == 0
    assert weather.faults[fault] == 1
    assert [consumer.dequeue(topic) for _ in range(consumer.size(topic))] == ["one", "two"]


@pytest.mark.parametrize("fault", ["answers lost", "answers torn", "requests cut off"])
def test_a_message_that_was_lost_on_its_way_is_dequeued_again(
    bad_address: str, weather: Once, producer: Producer, topic: str, fault: str
) -> None:
    me = producer.register_producer(topic)
    texts = ["one", "two", "three"]
    with Consumer(bad_address) as consumer:
        consumer.register_consumer(topic)
        for text in texts:
            producer.enqueue(me, topic, text)
        dequeued = []
        for _ in texts:
            weather.next(fault)
            dequeued.append(consumer.dequeue(topic))
        assert dequeued == texts
        assert weather.faults[fault] == 3
        assert consumer.size(topic) == 0


def test_a_topic_that_was_created_before_the_answer_was_lost_is_created(
    bad_address: str, weather: Once, topic: str
) -> None:
    with Producer(bad_address) as producer:
        weather.next("answers lost")
        assert producer.create_topic(topic) == 0
        with pytest.raises(ProducerError, match="exists"):
            producer.create_topic(topic)


def test_a_further_topic_is_registered_once_also_if_the_answer_is_lost(
    bad_address: str, weather: Once, topic: str
) -> None:
    with Producer(bad_address) as producer, Consumer(bad_address) as consumer:
        producer.create_topic(topic)
        producer.create_topic(f"{topic}-other")
        me = consumer.register_consumer(topic)
        weather.next("answers lost")
        assert consumer.register_consumer(f"{topic}-other") == me


def test_a_registration_is_not_repeated_behind_ones_back(
    bad_address: str, weather: Once, topic: str
) -> None:
    with Producer(bad_address) as producer, Consumer(bad_address) as consumer:
        weather.next("answers lost")
        with pytest.raises(ProducerError, match="its outcome is unknown") as raised:
            producer.register_producer(topic)
        assert raised.value.reason == queue.NO_ANSWER
        weather.next("answers lost")
        with pytest.raises(ConsumerError, match="its outcome is unknown"):
            consumer.register_consumer(topic)
        assert consumer.id is None


# --- time -----------------------------------------------------------------------------------------


def test_a_broker_that_is_away_is_told_of_and_nothing_is_in_doubt(topic: str) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{nobody.getsockname()[1]}"
        with (
            Producer(where, timeout=IMPATIENT_S) as producer,
            pytest.raises(ProducerError, match="cannot be reached") as raised,
        ):
            producer.create_topic(topic)
    assert raised.value.reason == queue.UNREACHABLE


def test_a_broker_that_never_answers_is_not_waited_for(topic: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            Consumer(where, timeout=IMPATIENT_S) as consumer,
            pytest.raises(ConsumerError, match="was not answered") as raised,
        ):
            consumer.list_topics()
    assert raised.value.reason == queue.NO_ANSWER


def test_a_message_in_doubt_that_is_enqueued_again_is_there_once(
    address: str, bad_address: str, weather: Once, consumer: Consumer, topic: str
) -> None:
    """Also by who knows nothing of sequences, and just tries again."""
    with Producer(address, timeout=DEADLINE_S) as registering:
        me = registering.register_producer(topic)
    with Producer(bad_address, timeout=PATIENT_S) as producer:
        consumer.register_consumer(topic)
        weather.always("answers lost")
        with pytest.raises(ProducerError) as raised:
            producer.enqueue(me, topic, "one")
        assert raised.value.reason == queue.NO_ANSWER
        weather.next("")
        producer.enqueue(me, topic, "one")
        producer.enqueue(me, topic, "two")
    assert [consumer.dequeue(topic) for _ in range(consumer.size(topic))] == ["one", "two"]


def test_a_message_stays_in_doubt_while_the_broker_is_away(topic: str) -> None:
    """No answer first, then nobody there, then a broker again: the number stays the same."""
    with _Stub() as stub:
        where = stub.address
        producer = Producer(where, timeout=IMPATIENT_S)
        with pytest.raises(ProducerError) as raised:
            producer.enqueue("producer-1", topic, "one", sequence=7)
        assert raised.value.reason == queue.NO_ANSWER
    with pytest.raises(ProducerError) as raised:
        producer.enqueue("producer-1", topic, "one")
    assert raised.value.reason == queue.UNREACHABLE
    with _Stub(where) as stub:
        with pytest.raises(ProducerError):
            producer.enqueue("producer-1", topic, "one")
        producer.close()
    assert stub.heard and all(b'"sequence": 7' in request for request in stub.heard)


def test_a_message_that_the_broker_failed_at_keeps_its_number(topic: str) -> None:
    """What it had begun may have become durable all the same: a closing broker says 503."""
    answers = iter(
        [
            _failure(503, "broker_closing"),
            _failure(404, "unknown_topic"),  # which by itself would leave no doubt
            _success(repeated=True),
        ]
    )
    with _Stub(answers=answers) as stub, Producer(stub.address, timeout=DEADLINE_S) as producer:
        with pytest.raises(ProducerError) as raised:
            producer.enqueue("producer-1", topic, "one", sequence=7)
        assert raised.value.reason == "unknown_topic"
        assert producer.enqueue("producer-1", topic, "one") == 0
    assert len(stub.heard) == 3 and all(b'"sequence": 7' in request for request in stub.heard)


def test_a_message_that_the_broker_failed_at_first_is_no_clash_when_it_is_there(
    topic: str,
) -> None:
    answers = iter([_failure(503, "broker_closing"), _success(repeated=True)])
    with _Stub(answers=answers) as stub, Producer(stub.address, timeout=DEADLINE_S) as producer:
        producer._next["producer-1", topic] = 7
        assert producer.enqueue("producer-1", topic, "one") == 0


def test_a_message_that_the_broker_refused_is_in_no_doubt(topic: str) -> None:
    answers = iter([_failure(404, "unknown_topic"), _success(repeated=False)])
    with _Stub(answers=answers) as stub, Producer(stub.address, timeout=DEADLINE_S) as producer:
        with pytest.raises(ProducerError):
            producer.enqueue("producer-1", topic, "one", sequence=7)
        producer.enqueue("producer-1", topic, "one")
    assert b'"sequence": 8' in stub.heard[-1]


class _Stub:
    """A broker that hears each request, says what it was told to, and hangs up."""

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        *,
        answer: bytes = b"",
        answers: Iterator[bytes] | None = None,
    ) -> None:
        self._answers = repeat(answer) if answers is None else answers
        host, port = address.split(":")
        self._listener = socket.create_server((host, int(port)))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.heard: list[bytes] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Stub:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client:
                request = b""
                while not request.endswith(b"}") and (data := client.recv(10_000)):
                    request += data
                self.heard.append(request)
                client.sendall(next(self._answers))


def _failure(status: int, code: str) -> bytes:
    return _answer(status, {"status": "failure", "message": "quack", "code": code})


def _success(**fields: object) -> bytes:
    return _answer(200, {"status": "success", **fields})


def _answer(status: int, fields: Mapping[str, object]) -> bytes:
    body = json.dumps(fields).encode()
    head = f"HTTP/1.1 {status} .\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


# --- ids and numbers ------------------------------------------------------------------------------


def test_another_program_goes_on_with_a_producers_numbers(
    address: str, consumer: Consumer, topic: str
) -> None:
    with Producer(address) as first:
        me = first.register_producer(topic)
        consumer.register_consumer(topic)
        assert first.last_sequence(me, topic) is None
        first.enqueue(me, topic, "one")
        first.enqueue(me, topic, "two")
    with Producer(address) as second:
        assert second.last_sequence(me, topic) == 1
        second.enqueue(me, topic, "two", sequence=1)
        second.enqueue(me, topic, "three")
    assert [consumer.dequeue(topic) for _ in range(consumer.size(topic))] == ["one", "two", "three"]


def test_two_programs_with_one_producer_id_are_told(
    address: str, producer: Producer, consumer: Consumer, topic: str
) -> None:
    me = producer.register_producer(topic)
    consumer.register_consumer(topic)
    producer.enqueue(me, topic, "one")
    with Producer(address) as other:
        other.enqueue(me, topic, "two")
        with pytest.raises(ProducerError, match="another program also uses") as raised:
            producer.enqueue(me, topic, "three")
        assert raised.value.reason == queue.CLASH
        producer.enqueue(me, topic, "three")
    assert [consumer.dequeue(topic) for _ in range(consumer.size(topic))] == ["one", "two", "three"]


def test_threads_may_share_a_producer(producer: Producer, consumer: Consumer, topic: str) -> None:
    me = producer.register_producer(topic)
    consumer.register_consumer(topic)
    texts = [[f"{thread}.{number}" for number in range(20)] for thread in range(4)]
    threads = [
        threading.Thread(target=lambda own=own: [producer.enqueue(me, topic, each) for each in own])
        for own in texts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = [consumer.dequeue(topic) for _ in range(80)]
    for own in texts:
        assert [each for each in got if each in own] == own


# --- the example ----------------------------------------------------------------------------------


@pytest.mark.processes
def test_the_example_reads_what_it_logs(address: str) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "queue_client.py"
    ran = subprocess.run(
        [sys.executable, str(example), address],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[2:] == [
        "fast: web: GET /pond 200",
        "fast: database: 3 ducks found",
        "fast: web: GET /fox 404",
        "slow has 3 to read, the first: web: GET /pond 200",
    ]


# --- settings ---


@pytest.mark.parametrize("where", ["", "https://127.0.0.1:1", "127.0.0.1:1/path", "127.0.0.1:x"])
def test_an_address_that_cannot_be_is_told_of_at_once(where: str) -> None:
    with pytest.raises(ProducerError, match="is not the HOST:PORT"):
        Producer(where)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "5", True])
def test_a_timeout_that_is_none_is_refused(timeout: Any) -> None:
    with pytest.raises(ProducerError, match="a timeout is a number of seconds") as raised:
        Producer(timeout=timeout)
    assert raised.value.reason == "invalid_setting"


def test_a_call_may_wait_for_ever(address: str) -> None:
    with Producer(address, timeout=float("inf")) as producer:
        assert isinstance(producer.list_topics(), list)


@pytest.mark.parametrize("sequence", [-1, 2**63, 2**70])
def test_a_number_that_cannot_be_is_refused_and_does_not_end_the_producer(
    producer: Producer, topic: str, sequence: int
) -> None:
    me = producer.register_producer(topic)
    with pytest.raises(ProducerError, match="invalid sequence") as raised:
        producer.enqueue(me, topic, "x", sequence=sequence)
    assert raised.value.reason == "invalid_request"
    assert producer.enqueue(me, topic, "y") == 0
    assert producer.last_sequence(me, topic) == 0
