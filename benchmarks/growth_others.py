"""Rows of the growth benchmark over everything but topics."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import resource
import select
import socket
import time
from contextlib import closing
from functools import cached_property, partial
from statistics import median
from typing import Any, Final

from benchmarks import archive
from benchmarks.broker import ask
from benchmarks.growth_curves import grows_at_most_by_step, stays_below
from benchmarks.growth_rows import Measured, Row, Stage, heaviest_turn, median_ms
from benchmarks.growth_systems import (
    LARGE,
    SMALL,
    create,
    put,
    round_robin,
    send_all,
    write_when_ready,
)
from benchmarks.requests import (
    kafka_fetch,
    kafka_lookup,
    kafka_put,
    kafka_puts,
)
from benchmarks.streams import WAIT_SECONDS, answer, connect, receive_frame
from quackmq.records.batch import Record
from quackmq.records.codec import encode

TOPIC: Final = "grown"
START_MS: Final = 1_700_000_000_000
REPETITIONS: Final = 40


# --- subscriptions --------------------------------------------------------------------------------


class Subscriptions(Stage):
    """A topic that keeps messages until so many subscriptions have consumed them."""

    dimension = "subscriptions"
    sizes = quick_sizes = (100, 1_000, 10_000)

    def open(self) -> None:
        self.system.start()
        policy = {"keep_until_consumed": True}
        ask(f"{self.system.http}/v1/topics", {"name": TOPIC, "partitions": 1, "policy": policy})
        address = self.system.http.removeprefix("http://")
        self.connection = self.opened.enter_context(
            closing(http.client.HTTPConnection(address, timeout=WAIT_SECONDS))
        )
        for number in range(self.size):
            self.request("PUT", f"/v1/subscriptions/name-{number}/topics/{TOPIC}", {})
        self.request("POST", f"/v1/topics/{TOPIC}/messages", {"value": SMALL.decode()})

    def request(self, method: str, path: str, body: object) -> None:
        headers = {"Content-Type": "application/json"}
        self.connection.request(method, path, json.dumps(body), headers)
        answer = self.connection.getresponse()
        text = answer.read()
        assert answer.status < 300, f"{method} {path}: {answer.status} {text!r}"


def get_until_consumed(stage: Subscriptions) -> float:
    path = "/v1/subscriptions/name-{}/topics/{}/get"
    return median_ms(
        partial(stage.request, "POST", path.format(number, TOPIC), {})
        for number in range(REPETITIONS)
    )


# --- stored bytes ---------------------------------------------------------------------------------


class StoredMegabytes(Stage):
    """A partition in which so many megabytes lie, in batches of ten records, a second apart."""

    dimension = "stored MB"
    sizes = (100, 1_000, 5_000)
    quick_sizes = (20, 200, 1_000)
    kafka_most = 5_000

    def open(self) -> None:
        self.system.start()
        if self.system.is_ours:  # it would archive from 1 GiB on
            policy = {"archive_bytes": 10**15, "archive_after_ms": 10**12}
            ask(f"{self.system.http}/v1/topics", {"name": TOPIC, "partitions": 1, "policy": policy})
        else:
            with connect(self.system.address) as stream:
                create(stream, [TOPIC])
            write_when_ready(self.system.address, [kafka_put(TOPIC, SMALL)])
        value = LARGE[:99_000]
        send_all(
            self.system.address,
            (
                kafka_puts({TOPIC: bytes(encode([self._record(number, value)] * 10))})
                for number in range(self.size)
            ),
        )

    @staticmethod
    def _record(number: int, value: bytes) -> Record:
        return Record(0, START_MS + 1_000 * number, None, value, ())


def lookup_by_time(stage: StoredMegabytes) -> float:
    chance = random.Random(7)
    times = [chance.randrange(1_000 * (stage.size - 1)) for _ in range(REPETITIONS)]
    with connect(stage.system.address) as stream:
        return median_ms(
            [partial(answer, stream, kafka_lookup(TOPIC, START_MS + each)) for each in times]
        )


# --- archived partitions --------------------------------------------------------------------------


class ArchivedPartitions(Stage):
    """So many partitions, the records of which are in the archive; the broker has just started."""

    dimension = "archived partitions"
    sizes = (10, 100, 1_000)
    quick_sizes = (10, 100, 300)

    def open(self) -> None:
        self.topics = [f"archived-{number}" for number in range(self.size)]
        policies = dict.fromkeys(self.topics, archive.AT_ONCE)
        data = self.system.data
        asyncio.run(archive.fill(data, policies, archive.json_batches(100)))
        self.system.start()
        archive.wait_for_archive(data, self.topics)
        self.system.stop()
        self.system.start()

    @cached_property
    def first_fetch(self) -> float:
        return self.fetch(self.topics[:1])

    def fetch(self, topics: list[str]) -> float:
        """Return the seconds that one fetch takes; every topic must be in the answer."""
        request = kafka_fetch(dict.fromkeys(topics, 0), 1_000_000)
        with connect(self.system.address) as stream:
            began = time.perf_counter()
            fetched = answer(stream, request)
            took = time.perf_counter() - began
        assert len(fetched) > 1_000, "nothing was fetched"
        return took


def first_archive_fetch(stage: ArchivedPartitions) -> float:
    return stage.first_fetch * 1_000


def fetch_of_archived(stage: ArchivedPartitions) -> float:
    assert stage.first_fetch
    return stage.fetch(stage.topics)


# --- producers ------------------------------------------------------------------------------------


class Producers(Stage):
    """So many idempotent producers, each of which wrote one record to one of a hundred topics."""

    dimension = "producer ids"
    sizes = quick_sizes = (1_000, 10_000, 100_000)
    TOPICS = 100

    def open(self) -> None:
        self.system.start()
        topics = [f"{TOPIC}-{number}" for number in range(self.TOPICS)]
        with connect(self.system.address) as stream:
            create(stream, [TOPIC, *topics])
        send_all(
            self.system.address,
            (
                kafka_puts({topic: self._batch(start + i) for i, topic in enumerate(topics)})
                for start in range(0, self.size, self.TOPICS)
            ),
        )

    @staticmethod
    def _batch(producer_id: int) -> bytes:
        record = Record(0, START_MS, None, SMALL, ())
        return bytes(encode([record], producer_id=producer_id, producer_epoch=0, base_sequence=0))


def pause_of_producers(stage: Producers) -> Measured:
    """Large batches follow, so that checkpoints are made."""
    send_all(stage.system.address, round_robin([kafka_put(TOPIC, LARGE)], stage.large_batches))
    return heaviest_turn(stage)


# --- consumers that wait --------------------------------------------------------------------------


class WaitingConsumers(Stage):
    """So many consumers that long-poll one topic."""

    dimension = "long-polling consumers"
    sizes = quick_sizes = (10, 100, 1_000)
    kafka_most = 1_000
    WAIT_MS = 120_000
    ROUNDS = 7

    def open(self) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self.system.start()
        self.publisher = self.opened.enter_context(connect(self.system.address))
        create(self.publisher, [TOPIC])
        self.request = kafka_put(TOPIC, SMALL)
        write_when_ready(self.system.address, [self.request])
        self.written = 1
        self.alone = [self._publish() for _ in range(4 * self.ROUNDS)]
        self.streams = [
            self.opened.enter_context(closing(connect(self.system.address)))
            for _ in range(self.size)
        ]

    def _publish(self) -> tuple[float, float]:
        """Publish one message; return how long it took, and the broker's CPU for it."""
        cpu, began = self.system.cpu_seconds, time.perf_counter()
        assert not any(put(self.publisher, self.request))
        took = time.perf_counter() - began
        self.written += 1
        return took, self.system.cpu_seconds - cpu

    @cached_property
    def rounds(self) -> list[tuple[float, float]]:
        """For some messages: how long the acknowledgement took, and the broker's CPU until the last
        consumer had the message."""
        found = []
        for _ in range(self.ROUNDS):
            fetch = kafka_fetch({TOPIC: self.written}, 1_000_000, wait_ms=self.WAIT_MS)
            for stream in self.streams:
                stream.sendall(fetch)
            self._wait_until_they_wait()
            cpu = self.system.cpu_seconds
            took, _ = self._publish()
            self._receive_all()
            found.append((took, self.system.cpu_seconds - cpu))
        return found

    def _wait_until_they_wait(self) -> None:
        """Return when the broker uses hardly any CPU: then it has read all requests."""
        before = self.system.cpu_seconds
        while True:
            time.sleep(0.2)
            now = self.system.cpu_seconds
            if now - before < 0.01:
                return
            before = now

    def _receive_all(self) -> None:
        waiting = {stream.fileno(): stream for stream in self.streams}
        poll = select.epoll()
        with closing(poll):
            for descriptor in waiting:
                poll.register(descriptor, select.EPOLLIN)
            while waiting:
                for descriptor, _ in poll.poll(WAIT_SECONDS):
                    self._take(waiting.pop(descriptor))
                    poll.unregister(descriptor)

    @staticmethod
    def _take(stream: socket.socket) -> None:
        assert len(receive_frame(stream)) > len(SMALL), "a consumer was woken for nothing"


def acknowledgement(stage: WaitingConsumers) -> Measured:
    alone = median(took for took, _ in stage.alone) * 1_000
    return Measured(
        median(took for took, _ in stage.rounds) * 1_000, f"without consumers {alone:.3g} ms"
    )


def acknowledgement_ratio(stage: WaitingConsumers) -> float:
    return median(took for took, _ in stage.rounds) / median(took for took, _ in stage.alone)


def cpu_of_a_wake_up(stage: WaitingConsumers) -> float:
    """Beyond the CPU of the same produce without consumers."""
    alone = median(cpu for _, cpu in stage.alone)
    return (median(cpu for _, cpu in stage.rounds) - alone) / stage.size * 1e6


OTHER_ROWS: Final[tuple[Row[Any], ...]] = (
    Row(
        "get",
        "A get under keep_until_consumed",
        "ms",
        Subscriptions,
        get_until_consumed,
        (grows_at_most_by_step(2),),
    ),
    Row(
        "lookup",
        "Lookup by time",
        "ms",
        StoredMegabytes,
        lookup_by_time,
        (grows_at_most_by_step(2),),
        with_kafka=True,
    ),
    Row(
        "archive-first",
        "First fetch of an archived partition after a start",
        "ms",
        ArchivedPartitions,
        first_archive_fetch,
    ),
    Row(
        "archive-fetch",
        "One fetch of all archived partitions",
        "s",
        ArchivedPartitions,
        fetch_of_archived,
        (grows_at_most_by_step(2),),
    ),
    Row(
        "archive-pause",
        "CPU of the heaviest turn of the event loop during these",
        "ms",
        ArchivedPartitions,
        heaviest_turn,
        (stays_below(20, "ms"),),
    ),
    Row(
        "producer-pause",
        "CPU of the heaviest turn of the event loop with many producer ids",
        "ms",
        Producers,
        pause_of_producers,
        (stays_below(20, "ms"),),
    ),
    Row(
        "wake-acknowledgement",
        "Acknowledgement of a message that wakes all consumers",
        "ms",
        WaitingConsumers,
        acknowledgement,
        with_kafka=True,
    ),
    Row(
        "wake-ratio",
        "The same / without consumers",
        "ratio",
        WaitingConsumers,
        acknowledgement_ratio,
        (stays_below(1.5, ""),),
        with_kafka=True,
    ),
    Row(
        "wake-cpu",
        "CPU of the broker for each consumer that it wakes",
        "µs",
        WaitingConsumers,
        cpu_of_a_wake_up,
        (stays_below(40, "µs"),),
        with_kafka=True,
    ),
)
