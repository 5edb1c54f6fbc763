"""From one address to all that is needed, and through a broker that goes away and comes back."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from quackmq.broker import BrokerSettings
from quackmq.errors import InvalidRequest, QuackTimeout, UnknownTopic
from quackmq.protocols.kafka.api import Node
from quackmq.protocols.kafka.handlers.config_catalog import broker_configs
from quackmq.spark import limits as spark_limits
from quackmq.spark.broker.http import Http, OtherFailure, find_broker
from tests.kit.server import DEADLINE_S, Server
from tests.spark.addresses import reserved
from tests.spark.serving import Broker, batch_reader, rows_of


def http_address(host: str) -> str | None:
    configs = broker_configs(Node(1, "pond.example", 9092), BrokerSettings(), (host, 8002))
    return next((each.value for each in configs if each.name == "quackmq.http.address"), None)


def test_a_listener_that_listens_everywhere_is_found_where_the_kafka_listener_is() -> None:
    assert http_address("127.0.0.1") == "127.0.0.1:8002"
    assert http_address("0.0.0.0") == http_address("::") == "pond.example:8002"
    assert http_address("fe80::1") == "[fe80::1]:8002"
    without = broker_configs(Node(1, "pond.example", 9092), BrokerSettings())
    assert all(each.name != "quackmq.http.address" for each in without)


def test_the_address_of_the_http_listener_is_learnt_from_the_kafka_listener(broker: Broker) -> None:
    access = find_broker(broker.address)
    assert access.http == f"{broker.host}:{broker.port}"
    with access.connect() as http:
        assert http.get("/v1/topics").json["topics"] == []


@pytest.mark.processes
def test_a_broker_without_an_http_listener_is_named_with_what_to_do() -> None:
    with Server("serve", "--store", "memory:", "--kafka", "127.0.0.1:0") as server:
        with pytest.raises(
            InvalidRequest, match=r"does not report the address of its HTTP listener.*--http"
        ):
            find_broker(server.ready())


def test_a_setting_that_librdkafka_does_not_know_is_quoted(broker: Broker) -> None:
    with pytest.raises(InvalidRequest, match="kafka.*no.such.setting"):
        find_broker(broker.address, {"no.such.setting": "1"})


def test_the_brokers_errors_come_back_as_they_were_raised(broker: Broker) -> None:
    with Http(f"{broker.host}:{broker.port}") as http:
        with pytest.raises(UnknownTopic, match="nothing"):
            http.get("/v1/topics/nothing")
        with pytest.raises(OtherFailure) as refused:
            http.get("/v1/nowhere")
        assert refused.value.reason == "unknown_route"


def test_a_connection_that_the_broker_has_closed_is_made_again(broker: Broker) -> None:
    with Http(f"{broker.host}:{broker.port}") as http:
        http.get("/v1/topics")
        assert http._connection is not None and http._connection.sock is not None
        http._connection.sock.shutdown(socket.SHUT_RDWR)
        assert http.get("/v1/topics").status == 200


def test_a_broker_that_stays_away_is_given_up_after_its_time() -> None:
    with Http("127.0.0.1:1", retry_ms=200) as http:
        with pytest.raises(QuackTimeout, match="waited 0.2 s for GET /v1/topics of the broker at"):
            http.get("/v1/topics")


def test_an_answer_that_takes_its_time_is_asked_for_again_as_often_as_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A commit of much: the broker has taken it, and is at work for longer than it may be away."""
    monkeypatch.setattr(spark_limits, "SPARK_RESPONSE_MS", 400)
    for max_timeouts in (1, 10):
        with socket.create_server(("127.0.0.1", 0)) as busy, ExitStack() as taken:
            answering = threading.Thread(target=_answer_the_second, args=(busy, taken))
            answering.start()
            try:
                with Http(f"127.0.0.1:{busy.getsockname()[1]}", retry_ms=200) as http:
                    if max_timeouts == 1:
                        with pytest.raises(QuackTimeout, match="timed out"):
                            http.post("/v1/stages/s/commit")
                    else:
                        assert (
                            http.request(
                                "POST", "/v1/stages/s/commit", max_timeouts=max_timeouts
                            ).status
                            == 204
                        )
            finally:
                busy.shutdown(socket.SHUT_RDWR)
                answering.join()


def _answer_the_second(server: socket.socket, taken: ExitStack) -> None:
    """And all that follow, until nobody is listened to: whoever was too slow is asked again."""
    with suppress(OSError):
        taken.enter_context(server.accept()[0])
        while True:
            connection = taken.enter_context(server.accept()[0])
            with suppress(ConnectionError):
                if connection.recv(65_536):
                    connection.sendall(b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.processes
def test_a_task_goes_on_when_its_broker_is_killed_and_comes_back(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    with reserved() as kafka, reserved() as http:
        command = ("serve", "--data", tmp_path, "--kafka", kafka, "--http", http)
        with Server(*command) as server:
            server.ready()
            producer = Producer({"bootstrap.servers": kafka, "batch.size": 5_000})
            for number in range(2_000):
                producer.produce("ducks", f"{number}")
            assert producer.flush(DEADLINE_S) == 0
            reader: Any = batch_reader({"kafka.bootstrap.servers": kafka, "subscribe": "ducks"})
            tasks = reader.partitions()
            server.process.kill()
        reading = threading.Thread(target=lambda: rows.extend(rows_of(reader, tasks)))
        reading.start()
        with Server(*command) as server:
            server.ready()
            reading.join(DEADLINE_S)
    assert [row["value"] for row in rows] == [f"{number}".encode() for number in range(2_000)]
