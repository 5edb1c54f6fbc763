"""kcat, an old librdkafka from Debian, against the Kafka door."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from quackmq.model.topic import PartitionKey
from tests.interop import scenarios
from tests.interop.deliveries import Event
from tests.interop.programs import Client
from tests.interop.python.telling import BURST, PAUSE_S
from tests.interop.running import DEADLINE_SECONDS, TESTER, RunningBroker
from tests.interop.table import each_compression

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


@pytest.mark.proves("kcat", "produce")
@pytest.mark.proves("kcat", "consume from start")
@pytest.mark.parametrize("compression", each_compression("kcat"))
def test_batches_are_stored_in_the_compression_in_which_they_were_sent(
    broker: RunningBroker, compression: str
) -> None:
    kcat(broker, "-P", "-t", "news", "-z", compression, stdin=lines(500))
    assert {batch.compression for batch in broker.batches("news")} == {compression}
    assert broker.values("news") == lines(500).encode().splitlines()
    assert kcat(broker, "-C", "-t", "news", "-o", "beginning", "-e", "-q") == lines(500)


def test_the_cluster_and_its_topics_are_listed(broker: RunningBroker) -> None:
    broker.call(broker.broker.create_topic(TESTER, "news", partitions=2))
    listed = kcat(broker, "-L")
    assert f"broker 1 at {broker.address} (controller)" in listed
    assert 'topic "news" with 2 partitions' in listed


@pytest.mark.proves("kcat", "from end")
@pytest.mark.proves("kcat", "from a time")
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
    for at, offset in (("0", 0), ("-1", 3), ("-2", 0)):
        assert kcat(broker, "-Q", "-t", f"news:0:{at}").strip() == f"news [0] offset {offset}"


@pytest.mark.proves("kcat", "headers and keys")
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


@pytest.mark.proves("kcat", "transactions", "commit and abort")
def test_all_input_is_one_transaction_which_is_seen_when_it_is_committed(
    broker: RunningBroker,
) -> None:
    kcat(broker, "-P", "-t", "news", stdin="plain\n")
    writing = ("-P", "-t", "news", "-X", "transactional.id=tx")
    read = ("-C", "-t", "news", "-o", "beginning", "-e", "-q")
    kcat(broker, *writing, stdin="a\nb\n")
    with writer(broker, *writing) as process:
        assert process.stdin is not None
        process.stdin.write("c\n" + lines(100))  # it takes its input in large pieces
        process.stdin.flush()
        wait_for_end(broker, "news", 5)  # behind three records and a marker
        assert kcat(broker, *read) == "plain\na\nb\n"
        everything = kcat(broker, *read, "-X", "isolation.level=read_uncommitted")
        assert everything.startswith("plain\na\nb\nc\n")
    # It was killed. Who comes next under its name aborts what it left open.
    kcat(broker, *writing, stdin="the end\n")
    assert kcat(broker, *read) == "plain\na\nb\nthe end\n"


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


# --- groups, and brokers that die ----------------------------------------------------------------


class Member(Client):
    """kcat as it is: understood by what it prints, ended by a signal.

    It commits by itself, and does not say so; what it had printed when it left is committed.
    """

    # It takes one more record from librdkafka after the signal, and does not print it.
    drops_when_it_leaves = True

    RECORD: Final = re.compile(r"record (\d+) (\d+) (.*)")
    #: What comes or goes stands before the last colon, in words that depend on the protocol.
    REBALANCED: Final = re.compile(r"% Group \S+ rebalanced\b(.*): (\S+ \[\d+\].*)")
    PARTITION: Final = re.compile(r"\[(\d+)\]")

    def command(self, settings: dict[str, Any]) -> list[str]:
        options = {
            "session.timeout.ms": settings["session_ms"],
            "heartbeat.interval.ms": settings["heartbeat_ms"],
            "partition.assignment.strategy": (
                "cooperative-sticky" if settings["cooperative"] else "range"
            ),
            "auto.offset.reset": "earliest",
            "auto.commit.interval.ms": 100,
        }
        if settings["instance"]:
            options["group.instance.id"] = settings["instance"]
        # All in one stream, so that what it says keeps its order.
        merged = ["sh", "-c", 'exec "$@" 2>&1', "sh"]
        format_ = ["-u", "-f", "record %p %o %s\n"]
        joining = ["-G", settings["group"], settings["topic"]]
        return [*merged, *base_command(settings, options), *format_, *joining]

    def understand(self, line: str) -> list[Event]:
        now_ms = time.time() * 1000
        if record := self.RECORD.match(line):
            return [Event("record", now_ms, (int(record[1]),), int(record[2]), record[3])]
        if rebalanced := self.REBALANCED.match(line):
            kind = "assigned" if "assign" in rebalanced[1].split(",")[0] else "revoked"
            numbers = self.PARTITION.findall(rebalanced[2])
            return [Event(kind, now_ms, tuple(int(number) for number in numbers))]
        return []

    def end(self, process: subprocess.Popen[str]) -> None:
        process.terminate()

    def afterword(self, events: Sequence[Event]) -> list[Event]:
        last = {event.partitions: event for event in events if event.kind == "record"}
        return [
            event._replace(kind="committed", offset=event.offset + 1) for event in last.values()
        ]


class Producer(Client):
    """kcat that sends what it reads, which is written here. One process at a time."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._written = 0

    def command(self, settings: dict[str, Any]) -> list[str]:
        options = {"enable.idempotence": "true", "linger.ms": 2}
        return [*base_command(settings, options), "-P", "-t", settings["topic"], "-p", "0"]

    def begun(self, process: subprocess.Popen[str]) -> None:
        self._writer = threading.Thread(target=self._write, args=(process,))
        self._writer.start()

    def end(self, process: subprocess.Popen[str]) -> None:
        self._over.set()
        self._writer.join()

    def afterword(self, events: Sequence[Event]) -> list[Event]:
        return [Event("sent", 0, total=self._written)]

    def _write(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        with process.stdin as lines:
            while process.poll() is None and not self._over.wait(PAUSE_S):
                numbers = range(self._written, self._written + BURST)
                lines.write("".join(f"{number}\n" for number in numbers))
                lines.flush()
                self._written += BURST


def base_command(settings: dict[str, Any], options: dict[str, Any]) -> list[str]:
    options = {"reconnect.backoff.max.ms": 200, "log_level": 0, **options}
    given = [f"-X{name}={value}" for name, value in options.items()]
    # -E: that a broker is away is no reason to end.
    return ["kcat", "-E", "-b", settings["address"], *given]


@pytest.mark.proves("kcat", "groups")
def test_members_come_and_go() -> None:
    scenarios.members_come_and_go(Member())


@pytest.mark.proves("kcat", "cooperative rebalance")
def test_a_rebalance_leaves_alone_what_stays() -> None:
    scenarios.a_rebalance_leaves_alone_what_stays(Member())


@pytest.mark.proves("kcat", "static members")
def test_a_static_member_comes_back() -> None:
    scenarios.a_static_member_comes_back(Member())


@pytest.mark.proves("kcat", "commit and resume across a restart")
def test_a_group_goes_on_after_the_broker_died(tmp_path: Path) -> None:
    scenarios.a_group_goes_on_after_the_broker_died(Member(), tmp_path / "data")


@pytest.mark.proves("kcat", "idempotent produce across kill -9")
def test_a_producer_lives_through_kills_of_the_broker(tmp_path: Path) -> None:
    scenarios.a_producer_lives_through_kills(Producer(), tmp_path / "data")
