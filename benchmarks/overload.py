"""Overload: what becomes of puts, health checks and group members when clients want too much.

    python -m benchmarks.overload [--scale 1.0] [--directory DIR]

The broker is `quackmq serve --sync os` in a process of its own. Publishers are connections that put
one small message after another over HTTP, each when the one before is answered; they are in another
process (`--publish`). First so few run that a core can serve them, then a hundred times as many.
Meanwhile members of a consumer group (librdkafka, sessions of 6 s) beat, and health is asked for 20
times a second. Each figure under overload is set in relation to the same with few publishers.

What has to hold: as many puts a second as before, every acknowledged put is in the topic, and no
member is lost. How long a client waits for its answer grows with the number of clients; that is the
arithmetic of a queue, and printed to be seen.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final, NamedTuple

from confluent_kafka import Consumer, TopicPartition

from benchmarks.broker import ask
from benchmarks.push import Bench
from benchmarks.support import Row, measure

FEW: Final = 8
MANY: Final = 800
SECONDS: Final = 8.0
MEMBERS: Final = 10
SESSION_MS: Final = 6_000
TOPIC: Final = "overload"
MEMBERS_TOPIC: Final = "members"
_HEALTH_EVERY_S: Final = 0.05
_DEADLINE_S: Final = 60.0
_BODY: Final = json.dumps({"value": "x" * 100}).encode()
_ROOT: Final = str(Path(__file__).parent.parent)


class Load(NamedTuple):
    """What was measured in one stretch of time."""

    puts_per_s: float
    put_ms: float
    health_ms: float
    worst_health_ms: float
    lost_members: int
    missing: int


def overload(bench: Bench) -> list[Row]:
    seconds = max(1.0, SECONDS * bench.scale)
    many = max(FEW, round(MANY * bench.scale))
    with bench.broker() as listeners:
        http = f"http://{listeners['http']}"
        for topic, partitions in ((TOPIC, 1), (MEMBERS_TOPIC, MEMBERS)):
            ask(f"{http}/v1/topics", {"name": topic, "partitions": partitions})
        with Members(listeners["kafka"]) as members:
            few_load = run(http, listeners["http"], FEW, seconds, members)
            many_load = run(http, listeners["http"], many, seconds, members)
        pause = ask(f"{http}/v1/health")["longest_pause"]
    print(f"the longest pause of the loop: {pause}", file=sys.stderr)
    return rows(few_load, many_load, many)


def rows(few: Load, many: Load, publishers: int) -> list[Row]:
    against = f"{publishers} publishers / {FEW}"
    rate = many.puts_per_s / few.puts_per_s
    return [
        Row(f"acknowledged puts: {against}", *rates(many, few), "put/s", "≥ 0.7", rate >= 0.7),
        Row(f"a put, p50: {against} (time)", many.put_ms, few.put_ms, "ms", "", True),
        Row(f"health, p50: {against} (time)", many.health_ms, few.health_ms, "ms", "", True),
        Row(
            f"health, the slowest: {against} (time)",
            *(many.worst_health_ms, few.worst_health_ms, "ms", "", True),
        ),
        Row(
            "acknowledged puts that are not in the topic, and members that were lost / members",
            many.missing + few.missing + many.lost_members + few.lost_members,
            *(MEMBERS, "", "0"),
            many.missing + few.missing + many.lost_members + few.lost_members == 0,
        ),
    ]


def rates(many: Load, few: Load) -> tuple[float, float]:
    return many.puts_per_s, few.puts_per_s


def run(http: str, address: str, publishers: int, seconds: float, members: Members) -> Load:
    before, lost_before = stored(http), members.lost
    words = [sys.executable, "-m", "benchmarks.overload", "--publish", address]
    publishing = subprocess.Popen(
        [*words, str(publishers), str(seconds)], stdout=subprocess.PIPE, cwd=_ROOT
    )
    health: list[float] = []
    try:
        while publishing.poll() is None:
            began = time.perf_counter()
            ask(f"{http}/v1/health")
            health.append((time.perf_counter() - began) * 1000)
            time.sleep(_HEALTH_EVERY_S)
        assert publishing.stdout is not None
        said = json.loads(publishing.stdout.read())
    finally:
        publishing.kill()
        publishing.wait()
    members.check()
    health.sort()
    return Load(
        said["acknowledged"] / said["seconds"],
        said["put_ms"],
        health[len(health) // 2],
        health[-1],
        members.lost - lost_before,
        max(0, said["acknowledged"] - (stored(http) - before)),
    )


def stored(http: str) -> int:
    (partition,) = ask(f"{http}/v1/topics/{TOPIC}")["partitions"]
    return int(partition["next_offset"])


class Members:
    """Consumers of one group, each with its partition. `lost` counts partitions that were taken
    from a member because the broker held it for dead."""

    def __init__(self, address: str) -> None:
        self.lost = 0
        self._is_over = threading.Event()
        self._consumers = [
            Consumer(
                {
                    "bootstrap.servers": address,
                    "group.id": "overload",
                    "session.timeout.ms": SESSION_MS,
                    "heartbeat.interval.ms": SESSION_MS // 3,
                    "partition.assignment.strategy": "cooperative-sticky",
                }
            )
            for _ in range(MEMBERS)
        ]
        self._thread = threading.Thread(target=self._poll)

    def __enter__(self) -> Members:
        for consumer in self._consumers:
            consumer.subscribe([MEMBERS_TOPIC], on_lost=self._on_lost, on_revoke=self._on_revoke)
        self._thread.start()
        self._wait_until_shared()
        self.lost = 0
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        for consumer in self._consumers:
            consumer.close()

    def check(self) -> None:
        """Count members that have lost their partition meanwhile."""
        self.lost += sum(len(consumer.assignment()) != 1 for consumer in self._consumers)

    def _poll(self) -> None:
        while not self._is_over.wait(0.01):
            for consumer in self._consumers:
                consumer.poll(0)

    def _wait_until_shared(self) -> None:
        end = time.monotonic() + _DEADLINE_S
        while any(len(consumer.assignment()) != 1 for consumer in self._consumers):
            if time.monotonic() > end:
                raise TimeoutError("the members do not agree on who reads what")
            time.sleep(0.05)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.lost += len(partitions)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.lost += 0 if self._is_over.is_set() else len(partitions)


# --- publishers, in a process of their own --------------------------------------------------------


class Publisher(asyncio.Protocol):
    """Puts one message after another; counts the answers, and how long each took."""

    def __init__(self, request: bytes, took: list[float]) -> None:
        self._request = request
        self._took = took
        self._began = 0.0
        self._heard = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._put()

    def data_received(self, data: bytes) -> None:
        self._heard += data
        head, separator, body = self._heard.partition(b"\r\n\r\n")
        if not separator:
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(body) < length:
            return
        if not head.startswith(b"HTTP/1.1 20"):
            raise AssertionError(f"a put was refused: {self._heard!r}")
        self._took.append(time.perf_counter() - self._began)
        self._heard = b""
        self._put()

    def _put(self) -> None:
        self._began = time.perf_counter()
        self._transport.write(self._request)


async def publish(address: str, publishers: int, seconds: float) -> None:
    host, _, port = address.partition(":")
    head = (
        f"POST /v1/topics/{TOPIC}/messages HTTP/1.1\r\nHost: {address}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(_BODY)}\r\n\r\n"
    )
    took: list[float] = []
    loop = asyncio.get_running_loop()
    transports = [
        (
            await loop.create_connection(
                lambda: Publisher(head.encode() + _BODY, took), host, int(port)
            )
        )[0]
        for _ in range(publishers)
    ]
    took.clear()
    began = time.perf_counter()
    await asyncio.sleep(seconds)
    passed, count = time.perf_counter() - began, len(took)
    for transport in transports:
        transport.abort()
    middle = sorted(took)[count // 2] * 1000
    print(json.dumps({"acknowledged": count, "seconds": passed, "put_ms": middle}))


def main() -> int:
    if sys.argv[1:2] == ["--publish"]:
        address, publishers, seconds = sys.argv[2:]
        asyncio.run(publish(address, int(publishers), float(seconds)))
        return 0
    return measure(__doc__, {"overload": overload}, Bench)


if __name__ == "__main__":
    sys.exit(main())
