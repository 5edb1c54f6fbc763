"""What only kcat is tried with: its command line, as people type it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quackmq.model.topic import PartitionKey
from tests.interop.clients.kcat import kcat
from tests.interop.running import DEADLINE_SECONDS, TESTER, RunningBroker

pytestmark = pytest.mark.needs("kcat")


def lines(count: int) -> str:
    return "".join(f"{number} {'quack ' * 20}\n" for number in range(count))


def test_the_cluster_and_its_topics_are_listed(broker: RunningBroker) -> None:
    broker.call(broker.broker.create_topic(TESTER, "news", partitions=2))
    listed = kcat(broker.address, "-L")
    assert f"broker 1 at {broker.address} (controller)" in listed
    assert 'topic "news" with 2 partitions' in listed


@pytest.mark.proves("kcat", "from a time")
def test_messages_are_read_from_an_offset_from_the_end_and_from_a_time(
    broker: RunningBroker,
) -> None:
    kcat(broker.address, "-P", "-t", "news", stdin="a\nb\nc\n")
    (batch, *_) = broker.batches("news")
    for start, expected in (
        ("1", "b\nc\n"),
        ("-1", "c\n"),
        ("end", ""),
        (f"s@{batch.base_timestamp}", "a\nb\nc\n"),
    ):
        read = kcat(broker.address, "-C", "-t", "news", "-o", start, "-e", "-q")
        assert read == expected, start


def test_offsets_are_asked_for_by_time(broker: RunningBroker) -> None:
    kcat(broker.address, "-P", "-t", "news", stdin="a\nb\nc\n")
    for at, offset in (("0", 0), ("-1", 3), ("-2", 0)):
        told = kcat(broker.address, "-Q", "-t", f"news:0:{at}")
        assert told.strip() == f"news [0] offset {offset}"


@pytest.mark.proves("kcat", "headers and keys")
def test_keys_headers_and_nulls_come_back(broker: RunningBroker) -> None:
    arguments = ("-t", "news", "-K", ":", "-H", "kind=duck")
    kcat(broker.address, "-P", *arguments, "-Z", stdin="pond:quack\nlake:\n")
    shown = kcat(
        broker.address, "-C", "-t", "news", "-o", "beginning", "-e", "-q", "-f", "%k|%s|%S|%h|%o\n"
    )
    assert shown == "pond|quack|5|kind=duck|0\nlake||-1|kind=duck|1\n"


def test_an_idempotent_producer_works(broker: RunningBroker) -> None:
    kcat(broker.address, "-P", "-t", "news", "-X", "enable.idempotence=true", stdin=lines(100))
    assert {batch.producer_id for batch in broker.batches("news")} != {-1}
    assert kcat(broker.address, "-C", "-t", "news", "-o", "beginning", "-e", "-q") == lines(100)


@pytest.mark.proves("kcat", "transactions", "commit and abort")
def test_all_input_is_one_transaction_which_is_seen_when_it_is_committed(
    broker: RunningBroker,
) -> None:
    kcat(broker.address, "-P", "-t", "news", stdin="plain\n")
    writing = ("-P", "-t", "news", "-X", "transactional.id=tx")
    read = ("-C", "-t", "news", "-o", "beginning", "-e", "-q")
    kcat(broker.address, *writing, stdin="a\nb\n")
    with writer(broker, *writing) as process:
        assert process.stdin is not None
        process.stdin.write("c\n" + lines(100))  # it takes its input in large pieces
        process.stdin.flush()
        wait_for_end(broker, "news", 5)  # behind three records and a marker
        assert kcat(broker.address, *read) == "plain\na\nb\n"
        everything = kcat(broker.address, *read, "-X", "isolation.level=read_uncommitted")
        assert everything.startswith("plain\na\nb\nc\n")
    # It was killed. Who comes next under its name aborts what it left open.
    kcat(broker.address, *writing, stdin="the end\n")
    assert kcat(broker.address, *read) == "plain\na\nb\nthe end\n"


@contextmanager
def writer(broker: RunningBroker, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """kcat with an input that stays open."""
    command = ["kcat", "-b", broker.address, *arguments]
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_end(broker: RunningBroker, topic: str, offset: int) -> None:
    key = PartitionKey(broker.broker.topic(topic).id, 0)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while broker.call(broker.broker.offsets(TESTER, key)).next < offset:
        assert time.monotonic() < deadline, f"{topic} does not come to offset {offset}"
        time.sleep(0.005)
