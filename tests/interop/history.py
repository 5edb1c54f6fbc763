"""A history that is put, archived and read back: by every listener, with clients of their own
kinds.

Each reader is a function of where the listeners listen, a topic of one partition, where to begin
(None: the beginning; else a time), and how many records to wait for. What it gives is what its
listener tells of a record; `Told` has None for what a listener does not tell.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiokafka
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

import quackmq
from quackmq.archive.manifest import Manifest
from quackmq.cli.inspect.archive_directory import ArchiveDirectory, ArchivedPartition
from quackmq.client.kafka.types import StartLike
from quackmq.client.zmq import ZmqClient

DEADLINE_S: Final = 60
#: Files are made by a process that others go before: on a busy machine it gets a thirtieth of a
#: processor, and has to start first.
ARCHIVED_S: Final = 240
Listeners = Mapping[str, str]
Headers = tuple[tuple[str, bytes | None], ...]
#: As a producer of confluent-kafka takes them.
HeaderList = list[tuple[str, str | bytes | None]]


class Told(NamedTuple):
    """A record, as far as a listener tells it."""

    value: bytes
    offset: int | None = None
    timestamp_ms: int | None = None
    key: bytes | None = None
    headers: Headers | None = None

    def agrees_with(self, whole: Told) -> bool:
        return all(mine is None or mine == its for mine, its in zip(self, whole, strict=True))


Reader = Callable[[Listeners, str, int | None, int], Sequence[Told]]


# --- putting --------------------------------------------------------------------------------------


def record(number: int, start_ms: int) -> tuple[bytes, bytes, int, HeaderList]:
    """Key, value, time and headers of a record that is like no other."""
    headers: HeaderList = [("number", b"%d" % number)] if number % 3 == 0 else []
    return b"key %d" % (number % 11), b"record %06d" % number, start_ms + number * 1000, headers


def put(
    listeners: Listeners,
    topic: str,
    numbers: Iterable[int],
    start_ms: int,
    *,
    transaction: str = "",
) -> list[Told]:
    """Records of these numbers, acknowledged; in a transaction, every second one of fifty is
    aborted first, so that offsets have holes."""
    settings: dict[str, Any] = {"bootstrap.servers": listeners["kafka"], "linger.ms": 2}
    if transaction:
        settings["transactional.id"] = transaction
    producer = Producer({**settings, "enable.idempotence": True, "batch.num.messages": 100})
    found: list[Told] = []

    def note(error: Any, message: Any) -> None:
        assert error is None, error
        # A report does not tell the headers again.
        *_, headers = record(int(message.value().split()[1]), start_ms)
        kept: Any = tuple(headers)
        told = (message.offset(), message.timestamp()[1], message.key(), kept)
        found.append(Told(message.value(), *told))

    def send(chosen: Sequence[int], listener: Any) -> None:
        for number in chosen:
            key, value, timestamp_ms, headers = record(number, start_ms)
            producer.produce(
                topic,
                value,
                key,
                partition=0,
                timestamp=timestamp_ms,
                headers=headers,
                on_delivery=listener,
            )
        assert producer.flush(DEADLINE_S) == 0

    everything = list(numbers)
    if not transaction:
        send(everything, note)
        return found
    producer.init_transactions(DEADLINE_S)
    for start in range(0, len(everything), 50):
        for is_for_good in (False, True):
            producer.begin_transaction()
            send(everything[start : start + 50], note if is_for_good else None)
            if is_for_good:
                producer.commit_transaction(DEADLINE_S)
            else:
                producer.abort_transaction(DEADLINE_S)
    return found


def ask(listeners: Listeners, method: str, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(
        f"http://{listeners['http']}{path}", data, headers, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            content = answer.read()
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{method} {path}: {error.read().decode()}") from error
    return json.loads(content) if content else None


def wait_for_archive(directory: Path, topic: str, next_offset: int) -> Manifest:
    """Until so much of partition 0 is in the archive, as its manifest on disk says."""
    deadline = time.monotonic() + ARCHIVED_S
    while True:
        with ArchiveDirectory(directory) as archived:
            manifest = archived.manifest(ArchivedPartition(topic, 0))
        if manifest is not None and manifest.next_offset >= next_offset:
            return manifest
        assert time.monotonic() < deadline, f"archived up to {manifest and manifest.next_offset}"
        time.sleep(0.05)


# --- reading --------------------------------------------------------------------------------------


def by_confluent(listeners: Listeners, topic: str, since_ms: int | None, count: int) -> list[Told]:
    settings = {
        "bootstrap.servers": listeners["kafka"],
        "group.id": "confluent",
        "enable.auto.commit": False,
        "isolation.level": "read_committed",
        "auto.offset.reset": "error",
    }
    found: list[Told] = []
    with Consumer(settings) as consumer:
        start = TopicPartition(topic, 0, OFFSET_BEGINNING)
        if since_ms is not None:
            (start,) = consumer.offsets_for_times([TopicPartition(topic, 0, since_ms)], DEADLINE_S)
        consumer.assign([start])
        while len(found) < count:
            messages = consumer.consume(count - len(found), DEADLINE_S)
            assert messages, f"{len(found)} of {count}"
            for message in messages:
                assert message.error() is None, message.error()
                told = (message.offset(), message.timestamp()[1], message.key())
                headers: Any = message.headers()
                found.append(Told(message.value() or b"", *told, tuple(headers or ())))
    return found


def by_kcat(listeners: Listeners, topic: str, since_ms: int | None, count: int) -> list[Told]:
    start = "beginning" if since_ms is None else f"s@{since_ms}"
    command = ["kcat", "-b", listeners["kafka"], "-C", "-t", topic, "-p", "0", "-o", start, "-q"]
    command += ["-c", str(count), "-f", "%o %T %k|%s\\n", "-X", "isolation.level=read_committed"]
    done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=True)
    found = []
    for line in done.stdout.splitlines():
        head, _, value = line.partition(b"|")
        offset, timestamp_ms, key = head.split(b" ", 2)
        found.append(Told(value, int(offset), int(timestamp_ms), key))
    return found


def by_aiokafka(listeners: Listeners, topic: str, since_ms: int | None, count: int) -> list[Told]:
    async def read() -> list[Told]:
        consumer = aiokafka.AIOKafkaConsumer(
            bootstrap_servers=listeners["kafka"],
            enable_auto_commit=False,
            isolation_level="read_committed",
            auto_offset_reset="none",
        )
        partition = aiokafka.TopicPartition(topic, 0)
        await consumer.start()
        try:
            consumer.assign([partition])
            if since_ms is None:
                await consumer.seek_to_beginning(partition)
            else:
                times = await consumer.offsets_for_times({partition: since_ms})
                consumer.seek(partition, times[partition].offset)
            found: list[Told] = []
            while len(found) < count:
                one = await asyncio.wait_for(consumer.getone(), DEADLINE_S)
                found.append(Told(one.value, one.offset, one.timestamp, one.key, one.headers))
            return found
        finally:
            await consumer.stop()

    return asyncio.run(read())


def by_http(listeners: Listeners, topic: str, since_ms: int | None, count: int) -> list[Told]:
    """By offset, page by page; a time is looked up by a subscription that begins there."""
    offset = ask(listeners, "GET", f"/v1/topics/{topic}")["partitions"][0]["first_offset"]
    if since_ms is not None:
        path = f"/v1/subscriptions/http/topics/{topic}"
        begun = ask(listeners, "PUT", path, {"start": {"timestamp_ms": since_ms}})
        (offset,) = begun["next_offsets"]
        ask(listeners, "DELETE", path)
    found: list[Told] = []
    while len(found) < count:
        path = f"/v1/topics/{topic}/partitions/0/messages?offset={offset}&limit=500&wait_ms=1000"
        page = ask(listeners, "GET", path)
        for one in page["messages"]:
            assert one["lost"] == 0, one
            headers = tuple((each["name"], each["value"].encode()) for each in one["headers"])
            told = (one["offset"], one["timestamp_ms"], one["key"].encode(), headers)
            found.append(Told(one["value"].encode(), *told))
        offset = page["next_offset"]
    return found[:count]


def by_zmq(listeners: Listeners, topic: str, since_ms: int | None, count: int) -> list[Told]:
    """One by one; a subscription that another listener has begun."""
    start = "beginning" if since_ms is None else {"timestamp_ms": since_ms}
    ask(listeners, "PUT", f"/v1/subscriptions/zeromq/topics/{topic}", {"start": start})
    with ZmqClient(listeners["zmq"], "zeromq", timeout=DEADLINE_S) as client:
        found = [Told(client.get(topic).content) for _ in range(count)]
        client.unsubscribe(topic)
    return found


def by_python_client(
    listeners: Listeners, topic: str, since_ms: int | None, count: int
) -> list[Told]:
    start: StartLike = "beginning"
    if since_ms is not None:
        start = datetime.fromtimestamp(since_ms / 1000, UTC)
    found: list[Told] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        quackmq.Client(
            listeners["kafka"], "python", directory=directory, timeout=DEADLINE_S
        ) as client,
    ):
        client.subscribe(topic, start=start)
        for message in client.listen(topic, timeout=DEADLINE_S):
            found.append(Told(message.value, message.offset, key=message.key))
            if len(found) == count:
                break
        client.unsubscribe(topic)
    return found


READERS: Final[Mapping[str, Reader]] = {
    "confluent-kafka": by_confluent,
    "kcat": by_kcat,
    "aiokafka": by_aiokafka,
    "http": by_http,
    "zmq": by_zmq,
    "python": by_python_client,
}
