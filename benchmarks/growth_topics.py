"""Rows of the growth benchmark over the number of topics, each with one partition.

One broker goes through all of them: it gets its topics, is put under load, rests, is stopped, is
started again, is killed and is started once more.
"""

from __future__ import annotations

import time
from functools import cached_property
from typing import Final

from benchmarks.growth_curves import (
    grows_at_most,
    is_not_above_kafka,
    stays_below,
)
from benchmarks.growth_rows import (
    Measured,
    Row,
    Stage,
    heaviest_turn,
    longest_pause,
    median_ms,
)
from benchmarks.growth_systems import (
    LARGE,
    SMALL,
    UNRELATED,
    Stopped,
    create,
    in_background,
    put,
    requests_for,
    round_robin,
    send_all,
    write_when_ready,
)
from benchmarks.requests import kafka_metadata, kafka_put
from benchmarks.streams import answer, connect

FLOODED: Final = "flooded"
PROBE_EVERY_SECONDS: Final = 0.02
METADATA_REQUESTS: Final = 5
#: An idle broker may have work left from before; it is at rest when it uses less of a core.
AT_REST_SHARE: Final = 0.05
AT_REST_SECONDS: Final = 120.0


class Topics(Stage):
    """A broker with so many topics, each with one small record. Two of them are for the loads: the
    largest size is the most topics that a broker takes."""

    dimension = "topics"
    sizes = (10, 100, 1_000, 10_000, 50_000)
    quick_sizes = (10, 100, 1_000, 10_000)
    #: Kafka needs some 30 MB of files and maps for 1,000 topics, and minutes to create 50,000.
    kafka_most = 10_000

    #: Requests of a flood, each with a record for 100 topics: more than a broker keeps in memory.
    FULL_FLOOD = 6_000
    QUICK_FLOOD = 2_000

    def open(self) -> None:
        self.system.start()
        self.memory_before = self.system.server.resident_bytes
        self.topics = [f"topic-{number}" for number in range(self.size - len((UNRELATED, FLOODED)))]
        self.requests = requests_for(self.topics)
        with connect(self.system.address) as stream:
            create(stream, [FLOODED, *self.topics])
        write_when_ready(self.system.address, [*self.requests, kafka_put(FLOODED, SMALL)])
        self.wait_until_at_rest()

    def write_all(self) -> None:
        """Write one small record to each topic."""
        send_all(self.system.address, self.requests)

    def wait_until_at_rest(self) -> None:
        end = time.monotonic() + AT_REST_SECONDS
        while self.cpu_share(1.0) > AT_REST_SHARE and time.monotonic() < end:
            continue

    def cpu_share(self, seconds: float) -> float:
        before, began = self.system.cpu_seconds, time.perf_counter()
        time.sleep(seconds)
        return (self.system.cpu_seconds - before) / (time.perf_counter() - began)

    @cached_property
    def stopped(self) -> Stopped:
        self.write_all()
        return self.system.stop()

    @cached_property
    def clean_start(self) -> float:
        assert self.stopped
        return self.system.start()

    @cached_property
    def killed_start(self) -> float:
        assert self.clean_start
        self.write_all()
        self.system.kill()
        return self.system.start()


def memory_of_a_topic(stage: Topics) -> float:
    grown = stage.system.server.resident_bytes - stage.memory_before
    return grown / stage.size / 1_000


def peak_memory(stage: Topics) -> float:
    stage.system.forget_peak_memory()
    send_all(stage.system.address, round_robin([kafka_put(FLOODED, LARGE)], stage.large_batches))
    return stage.system.server.most_resident_bytes / 1e6


def slowest_produce(stage: Topics) -> float:
    """Probe an unrelated topic while small records go round-robin to all others."""
    slowest = 0.0
    requests = stage.QUICK_FLOOD if stage.is_quick else stage.FULL_FLOOD
    request = kafka_put(UNRELATED, SMALL)

    def flood() -> None:
        send_all(stage.system.address, round_robin(stage.requests, requests))

    with connect(stage.system.address) as stream, in_background(flood) as flooding:
        stream.settimeout(None)
        while flooding.is_alive():
            began = time.perf_counter()
            assert not any(put(stream, request))
            slowest = max(slowest, time.perf_counter() - began)
            time.sleep(PROBE_EVERY_SECONDS)
    return slowest


def metadata(stage: Topics) -> float:
    request = kafka_metadata()
    with connect(stage.system.address) as stream:
        return median_ms([lambda: answer(stream, request)] * METADATA_REQUESTS)


def idle_cpu(stage: Topics) -> float:
    stage.wait_until_at_rest()
    return 100 * stage.cpu_share(stage.seconds)


def stop(stage: Topics) -> Measured:
    return Measured(stage.stopped.seconds, f"exit code {stage.stopped.exit_code}")


def exit_code(stage: Topics) -> float:
    return abs(stage.stopped.exit_code)


def start_after_stop(stage: Topics) -> float:
    return stage.clean_start


def start_after_kill(stage: Topics) -> float:
    return stage.killed_start


def start_ratio(stage: Topics) -> float:
    return stage.killed_start / stage.clean_start


def pause_after_start(stage: Topics) -> Measured:
    assert stage.killed_start
    stage.wait_until_at_rest()
    return heaviest_turn(stage)


TOPIC_ROWS: Final[tuple[Row[Topics], ...]] = (
    Row(
        "topic-memory",
        "Memory that a topic with one record costs",
        "kB",
        Topics,
        memory_of_a_topic,
        (stays_below(3, "kB", 10_000), stays_below(3, "kB", 50_000)),
    ),
    Row(
        "peak-memory",
        "Peak memory while 1 MB batches go to one more topic",
        "MB",
        Topics,
        peak_memory,
        (stays_below(400, "MB", 10_000),),
        with_kafka=True,
    ),
    Row(
        "slowest-produce",
        "Slowest produce to an unrelated topic while all topics receive small records",
        "s",
        Topics,
        slowest_produce,
        (grows_at_most(3, 100, 10_000), is_not_above_kafka(10_000)),
        with_kafka=True,
    ),
    Row("metadata", "Metadata of all topics", "ms", Topics, metadata, with_kafka=True),
    Row(
        "idle-cpu",
        "CPU of an idle broker",
        "% of a core",
        Topics,
        idle_cpu,
        (stays_below(0.5, "%", 10_000),),
        with_kafka=True,
    ),
    Row(
        "pause",
        "Longest pause of the event loop under the loads above",
        "ms",
        Topics,
        longest_pause,
        (stays_below(20, "ms"),),
    ),
    Row(
        "pause-cpu",
        "CPU of the heaviest turn of the event loop under the loads above",
        "ms",
        Topics,
        heaviest_turn,
        (stays_below(20, "ms"),),
    ),
    Row("stop", "SIGTERM to exit, all topics just written", "s", Topics, stop, with_kafka=True),
    Row(
        "exit-code",
        "Exit code of that stop",
        "",
        Topics,
        exit_code,
        (stays_below(0, ""),),
    ),
    Row(
        "start-clean",
        "Start after a clean stop",
        "s",
        Topics,
        start_after_stop,
        with_kafka=True,
    ),
    Row(
        "start-killed",
        "Start after kill -9, all topics just written",
        "s",
        Topics,
        start_after_kill,
        (stays_below(5, "s", 10_000),),
        with_kafka=True,
    ),
    Row(
        "start-ratio",
        "Start after kill -9 / after a clean stop",
        "ratio",
        Topics,
        start_ratio,
        (stays_below(2, ""),),
        with_kafka=True,
    ),
    Row(
        "start-pause",
        "CPU of the heaviest turn of the event loop from that start on",
        "ms",
        Topics,
        pause_after_start,
        (stays_below(20, "ms"),),
    ),
)
