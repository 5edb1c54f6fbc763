"""kcat, an old librdkafka from Debian, against the Kafka door."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from quackmq.record import COMPRESSIONS
from tests.interop.running import DEADLINE_SECONDS, TESTER, RunningBroker

pytestmark = pytest.mark.needs("kcat")


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    with RunningBroker() as running:
        yield running


def kcat(broker: RunningBroker, *arguments: str, stdin: str = "") -> str:
    done = subprocess.run(
        ["kcat", "-b", broker.address, "-X", "fetch.wait.max.ms=10", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def lines(count: int) -> str:
    return "".join(f"{number} {'quack ' * 20}\n" for number in range(count))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_batches_are_stored_in_the_compression_in_which_they_were_sent(
    broker: RunningBroker, compression: str
) -> None:
    kcat(broker, "-P", "-t", "news", "-z", compression, stdin=lines(500))
    assert {batch.compression for batch in broker.batches("news")} == {compression}
    assert kcat(broker, "-C", "-t", "news", "-o", "beginning", "-e", "-q") == lines(500)


def test_the_cluster_and_its_topics_are_listed(broker: RunningBroker) -> None:
    broker.call(broker.broker.create_topic(TESTER, "news", partitions=2))
    listed = kcat(broker, "-L")
    assert f"broker 1 at {broker.address} (controller)" in listed
    assert 'topic "news" with 2 partitions' in listed


def test_messages_are_read_from_an_offset_from_the_end_and_from_a_time(
    broker: RunningBroker,
) -> None:
    kcat(broker, "-P", "-t", "news", stdin="a\nb\nc\n")
    (batch, *_) = broker.batches("news")
    for start, expected in (
        ("1", "b\nc\n"),
        ("-1", "c\n"),
        ("end", ""),
        (f"s@{batch.base_timestamp}", "a\nb\nc\n"),
    ):
        read = kcat(broker, "-C", "-t", "news", "-o", start, "-e", "-q")
        assert read == expected, start


def test_offsets_are_asked_for_by_time(broker: RunningBroker) -> None:
    kcat(broker, "-P", "-t", "news", stdin="a\nb\nc\n")
    for time, offset in (("0", 0), ("-1", 3), ("-2", 0)):
        assert kcat(broker, "-Q", "-t", f"news:0:{time}").strip() == f"news [0] offset {offset}"


def test_keys_headers_and_nulls_come_back(broker: RunningBroker) -> None:
    arguments = ("-t", "news", "-K", ":", "-H", "kind=duck")
    kcat(broker, "-P", *arguments, "-Z", stdin="pond:quack\nlake:\n")
    shown = kcat(
        broker, "-C", "-t", "news", "-o", "beginning", "-e", "-q", "-f", "%k|%s|%S|%h|%o\n"
    )
    assert shown == "pond|quack|5|kind=duck|0\nlake||-1|kind=duck|1\n"


def test_an_idempotent_producer_works(broker: RunningBroker) -> None:
    kcat(broker, "-P", "-t", "news", "-X", "enable.idempotence=true", stdin=lines(100))
    assert {batch.producer_id for batch in broker.batches("news")} != {-1}
    assert kcat(broker, "-C", "-t", "news", "-o", "beginning", "-e", "-q") == lines(100)
