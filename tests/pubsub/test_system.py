"""The two system tests of the distributed queue (D7), over HTTP, with real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from quackmq.client.queue import Consumer, Producer
from tests.kit.server import DEADLINE_S
from tests.kit.waiting import wait_until
from tests.pubsub.queue_program import REGISTERED
from tests.real.broker import SMALL_QUACKMQ, Broker

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parent.parent.parent
LINES = 60
#: Who is registered with which topic, as the document has it.
PRODUCERS = {
    "P1": ["T1", "T2", "T3"],
    "P2": ["T1", "T3"],
    "P3": ["T1"],
    "P4": ["T2"],
    "P5": ["T2"],
}
CONSUMERS = {"C1": ["T1", "T2", "T3"], "C2": ["T1", "T3"], "C3": ["T1", "T3"]}
MESSAGES = LINES * sum(map(len, PRODUCERS.values()))


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "data", command=SMALL_QUACKMQ, listeners=["http"]) as broker:
        broker.start()
        yield broker


def test_d7_systemtest1_nothing_is_lost_or_doubled_when_the_server_crashes(
    broker: Broker, tmp_path: Path
) -> None:
    with programs() as start:
        producers, consumers = [], []
        for name, topics in PRODUCERS.items():
            path = log_file(tmp_path, name)
            path.write_text("".join(f"{line}\n" for line in log_lines(name)))
            producers.append(start("produce", broker.addresses["http"], path, *topics))
        wait_until_registered(producers)
        for name, topics in CONSUMERS.items():
            path = received_file(tmp_path, name)
            consumers.append(start("consume", broker.addresses["http"], path, *topics))
        wait_until_registered(consumers)
        for program in (*consumers, *producers):
            tell(program, "go\n")
        # What C1 has received, all producers together have at least logged.
        for share in (0.2, 0.6):
            wait_until(partial(has_received, tmp_path, "C1", share * MESSAGES))
            broker.kill()
            broker.start()
        for program in producers:
            assert program.wait(DEADLINE_S) == 0
        for program in consumers:
            assert program.stdin is not None
            program.stdin.close()
            assert program.wait(DEADLINE_S) == 0
    check_received(tmp_path)


def check_received(directory: Path) -> None:
    orders: dict[str, list[list[str]]] = {}
    for name, topics in CONSUMERS.items():
        messages = received(directory, name)
        for topic in topics:
            got = [text for where, text in messages if where == topic]
            orders.setdefault(topic, []).append(got)
            registered = [producer for producer, own in PRODUCERS.items() if topic in own]
            for producer in registered:
                assert [text for text in got if text.startswith(producer)] == log_lines(producer)
            assert len(got) == LINES * len(registered)
    for seen in orders.values():
        assert all(order == seen[0] for order in seen), "consumers of one topic disagree"


def test_d7_systemtest2_a_message_is_retrieved_as_it_was_logged(broker: Broker) -> None:
    address = broker.addresses["http"]
    with Producer(address) as producer, Consumer(address) as consumer:
        producer_id = producer.RegisterProducer("DS")
        consumer.RegisterConsumer("DS")
        message = "2022-01-17 10:04:11 ERROR: disk “/dev/sda” is full, 100 % — retry?"
        assert producer.Enqueue(producer_id, "DS", message) == 0
        assert consumer.Size("DS") == 1
        assert consumer.Dequeue("DS") == message


# --- helpers --------------------------------------------------------------------------------------

Program = subprocess.Popen[str]


@contextmanager
def programs() -> Iterator[Callable[..., Program]]:
    """Starts queue programs, and ends them whatever happens."""
    started: list[Program] = []

    def start(*arguments: object) -> Program:
        command = [sys.executable, "-m", "tests.pubsub.queue_program", *map(str, arguments)]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT))
        return started[-1]

    try:
        yield start
    finally:
        for program in started:
            program.kill()
            for end in (program.stdin, program.stdout):
                assert end is not None
                end.close()
            program.wait()


def wait_until_registered(started: list[Program]) -> None:
    for program in started:
        assert program.stdout is not None
        assert program.stdout.readline().strip() == REGISTERED


def tell(program: Program, line: str) -> None:
    assert program.stdin is not None
    program.stdin.write(line)
    program.stdin.flush()


def log_lines(producer: str) -> list[str]:
    return [f"{producer} logs line {number}" for number in range(LINES)]


def log_file(directory: Path, producer: str) -> Path:
    return directory / f"producer_{producer.removeprefix('P')}.txt"


def received_file(directory: Path, consumer: str) -> Path:
    return directory / f"consumer_{consumer.removeprefix('C')}.txt"


def has_received(directory: Path, consumer: str, count: float) -> bool:
    return len(received(directory, consumer)) >= count


def received(directory: Path, consumer: str) -> list[tuple[str, str]]:
    path = received_file(directory, consumer)
    lines = path.read_text().splitlines() if path.exists() else []
    return [(topic, text) for topic, _, text in (line.partition(" ") for line in lines)]
