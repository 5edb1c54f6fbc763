"""`quackmq serve` as a process: what it prints, how it ends, and that it really serves."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import sys
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.kit.server import DEADLINE_S, Server

pytestmark = pytest.mark.processes

ANY_PORT = ("--kafka", "127.0.0.1:0")


def publish(address: str, topic: str, *values: bytes) -> None:
    producer = Producer({"bootstrap.servers": address})
    problems: list[object] = []
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _: problems.append(error))
    assert producer.flush(DEADLINE_S) == 0
    assert problems == [None] * len(values)


def read(address: str, topic: str, count: int) -> list[bytes | None]:
    """The first `count` values of the topic's first partition."""
    consumer = Consumer(
        {"bootstrap.servers": address, "group.id": "test", "enable.auto.commit": False}
    )
    try:
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        messages = consumer.consume(count, timeout=DEADLINE_S)
        assert [message.error() for message in messages] == [None] * count
        return [message.value() for message in messages]
    finally:
        consumer.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_listens_serves_and_ends_well(
    number: signal.Signals, tmp_path: Path
) -> None:
    with Server("serve", "--data", tmp_path / "data", *ANY_PORT) as server:
        assert server.line().startswith("kafka listening on 127.0.0.1:")
        assert server.line() == "ready\n"
        server.send(number)
        assert server.exit_code() == 0
        assert server.line() == "", "nothing else goes to stdout"
        assert (
            "only kafka will open, because of the option --kafka; closed: http" in server.errors()
        )


def test_the_http_listener_opens_where_it_is_told_and_drains(tmp_path: Path) -> None:
    with Server("serve", "--data", tmp_path / "data", "--http", "127.0.0.1:0") as server:
        listeners = server.listeners()
        assert list(listeners) == ["http"], "just those that are named"
        connection = http.client.HTTPConnection(listeners["http"], timeout=DEADLINE_S)
        connection.request("POST", "/topics?topic_name=ducks")
        assert connection.getresponse().read()
        connection.request("GET", "/topics")
        assert json.load(connection.getresponse()) == {"status": "success", "topics": ["ducks"]}
        server.send(signal.SIGTERM)  # with a connection that is open and idle
        assert server.exit_code() == 0
        assert connection.sock is not None and connection.sock.recv(1) == b""
        connection.close()


def test_what_was_published_is_there_after_a_restart(tmp_path: Path) -> None:
    """M11"""
    arguments = ("serve", "--data", tmp_path / "data", *ANY_PORT)
    with Server(*arguments) as server:
        publish(server.ready(), "ducks", b"quack", b"waddle")
        server.send(signal.SIGTERM)
        assert server.exit_code() == 0
    with Server(*arguments) as server:
        assert read(server.ready(), "ducks", 2) == [b"quack", b"waddle"]


def test_what_was_acknowledged_is_there_after_a_kill(tmp_path: Path) -> None:
    arguments = ("serve", "--data", tmp_path / "data", *ANY_PORT)
    with Server(*arguments) as server:
        publish(server.ready(), "ducks", b"quack")
        server.send(signal.SIGKILL)
        server.exit_code()
    with Server(*arguments) as server:
        assert read(server.ready(), "ducks", 1) == [b"quack"]


def test_the_memory_store_serves_and_forgets() -> None:
    with Server("serve", "--store", "memory:", *ANY_PORT) as server:
        address = server.ready()
        publish(address, "ducks", b"quack")
        assert read(address, "ducks", 1) == [b"quack"]
        server.send(signal.SIGTERM)
        assert server.exit_code() == 0


def test_a_client_that_waits_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with Server("serve", "--data", tmp_path / "data", *ANY_PORT) as server:
        address = server.ready()
        publish(address, "ducks", b"quack")
        consumer = Consumer(
            {
                "bootstrap.servers": address,
                "group.id": "test",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 60_000,
                "socket.timeout.ms": 120_000,
                "log_level": 0,
            }
        )
        consumer.assign([TopicPartition("ducks", 0, OFFSET_BEGINNING)])
        assert consumer.poll(DEADLINE_S) is not None
        server.send(signal.SIGTERM)
        assert server.exit_code() == 0
        consumer.close()


def test_settings_reach_the_broker_from_the_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "quackmq.toml"
    file.write_text(f'data = "{tmp_path / "data"}"\nkafka = "127.0.0.1:0"\ndefault_partitions = 3')
    environment = {"QUACKMQ_CONFIG": str(file), "QUACKMQ_ADVERTISE": "broker.example:4711"}
    with Server("serve", environment=environment) as server:
        admin = AdminClient({"bootstrap.servers": server.ready(), "log_level": 0})
        metadata = admin.list_topics(timeout=DEADLINE_S)
    (node,) = metadata.brokers.values()
    assert (str(node.host), node.port) == ("broker.example", 4711)


def test_the_default_number_of_partitions_is_that_of_new_topics(tmp_path: Path) -> None:
    with Server(
        "serve", "--data", tmp_path / "data", *ANY_PORT, "--default-partitions", "3"
    ) as server:
        address = server.ready()
        publish(address, "ducks", b"quack")
        topics = AdminClient({"bootstrap.servers": address}).list_topics(timeout=DEADLINE_S).topics
    assert len(topics["ducks"].partitions) == 3


def test_a_port_in_use_is_one_sentence_and_exit_code_1(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        data = tmp_path / "data"
        with Server("serve", "--data", data, "--kafka", f"127.0.0.1:{port}") as server:
            assert server.exit_code() == 1
            assert not data.exists(), "a failed start leaves no new directory behind"
            assert server.line() == ""
            assert server.errors().splitlines()[-1] == (
                f"quackmq: cannot open the kafka listener on 127.0.0.1:{port}: address already in "
                "use. "
                "Is another broker running? --kafka 127.0.0.1:0 picks a free port"
            )


def test_a_socket_file_in_use_is_one_sentence_and_exit_code_1(tmp_path: Path) -> None:
    where = f"unix:{tmp_path / 'quack'}"
    with Server("serve", "--store", "memory:", "--line", where) as first:
        assert first.line() == f"line listening on {where}\n"
        with Server("serve", "--store", "memory:", "--line", where) as server:
            assert server.exit_code() == 1
            complaint = f"quackmq: cannot open the line listener on {where}: address already"
            last = server.errors().splitlines()[-1]
            assert last.startswith(complaint) and last.endswith("Is another broker running?")


def test_a_data_directory_that_is_a_file_is_one_sentence_and_exit_code_1(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_text("not a directory")
    with Server("serve", "--data", file, *ANY_PORT, "--log-level", "error") as server:
        assert server.exit_code() == 1
        complaint = server.errors()
    assert complaint.startswith("quackmq: ") and complaint.count("\n") == 1
    assert str(file) in complaint
    assert file.read_text() == "not a directory"


def test_two_brokers_never_share_a_directory(tmp_path: Path) -> None:
    arguments = ("serve", "--data", tmp_path / "data", *ANY_PORT, "--log-level", "error")
    with Server(*arguments) as first:
        address = first.ready()
        with Server(*arguments) as second:
            assert second.exit_code() == 1
            complaint = second.errors()
        assert complaint.startswith("quackmq: ") and complaint.count("\n") == 1
        publish(address, "ducks", b"quack")


def test_a_directory_of_a_newer_format_is_one_sentence_and_exit_code_1(tmp_path: Path) -> None:
    data = tmp_path / "data"
    arguments = ("serve", "--data", data, *ANY_PORT, "--log-level", "error")
    with Server(*arguments) as server:
        server.ready()
        server.send(signal.SIGTERM)
        assert server.exit_code() == 0
    (data / "quackmq.json").write_text('{"format": 1000}')
    with Server(*arguments) as server:
        assert server.exit_code() == 1
        complaint = server.errors()
    assert complaint.startswith("quackmq: ") and complaint.count("\n") == 1
    assert "format 1000" in complaint


def test_the_log_can_be_read_by_programs(tmp_path: Path) -> None:
    arguments = ("--sync", "os", "--log-format", "json")
    with Server("serve", "--data", tmp_path / "data", *ANY_PORT, *arguments) as server:
        server.ready()
        server.send(signal.SIGTERM)
        assert server.exit_code() == 0
        entries = [json.loads(line) for line in server.errors().splitlines()]
    assert any("power failure" in entry["message"] for entry in entries)


# --- the end, when it takes too long ----------------------------------------------------------

STUCK_LISTENER = """
import asyncio, sys
from quackmq.cli import limits as cli_limits
from quackmq.cli import main
from quackmq.cli.broker import runner

class StuckListener:
    async def start(self):
        return "127.0.0.1", 1

    async def close(self):
        print("closing", flush=True)
        await asyncio.Event().wait()

cli_limits.DRAIN_MS = int(sys.argv[1])
runner.LISTENER_MAKERS = {"kafka": lambda *_: StuckListener()}
sys.exit(main.main(["serve", "--store", "memory:", "--kafka", "127.0.0.1:1"]))
"""


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupt_while_it_closes_ends_it_at_once(first: signal.Signals) -> None:
    with Server("600000", command=[sys.executable, "-c", STUCK_LISTENER]) as server:
        server.ready()
        server.send(first)
        assert server.line() == "closing\n"
        server.send(signal.SIGTERM)  # says nothing new
        server.send(signal.SIGINT)
        assert server.exit_code() == 130


def test_closing_has_an_end() -> None:
    with Server("1", command=[sys.executable, "-c", STUCK_LISTENER]) as server:
        server.ready()
        server.send(signal.SIGTERM)
        assert server.exit_code() == 1
        assert "the next start will recover" in server.errors()
