"""The whole story in one run: publish, transform, kill everybody in the middle, read back, count.

A broker runs as a process of its own on an empty directory. An idempotent producer of
confluent-kafka publishes to several topics while the broker is killed with SIGKILL again and again
and started anew on the same directory. Then two workers of one consumer group (copier.py) copy all
of it to another topic, in transactions; one of them is killed, and so is the broker. Then all of it
goes to the archive, with one more kill on the way, and is counted in its Parquet files by a reader
that knows nothing of brokers. Afterwards everything is read back through the broker, where it now
comes from the archive, and compared with what was acknowledged: each record is there, once, at its
place in the order of its partition, and so is the image of each.

The last line is `in N, out N, lost 0, doubled 0`, and the exit code is 0 only if it is so.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pyarrow.parquet as pq
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, Producer
from confluent_kafka import TopicPartition as Partition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)
from copier import image

PARTITIONS = 2
COPIES = "copies"
WORKERS = 2
COPIER = Path(__file__).with_name("copier.py")
#: Small enough that a kill meets a queue which is neither empty nor everything.
QUEUED_RECORDS = 4_000
#: Nothing here takes long: a wait that does is a failure to be told, not to be sat out.
DEADLINE_S = 180

Key = tuple[str, int]
Values = dict[Key, list[bytes]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--topics", type=int, default=3)
    parser.add_argument("--records", type=int, default=60_000, help="over all topics")
    parser.add_argument("--kills", type=int, default=3)
    arguments = parser.parse_args()

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(DEADLINE_S)
    with tempfile.TemporaryDirectory(prefix="quackmq-demo-") as directory:
        broker = Broker(Path(directory) / "data")
        try:
            return tell(broker, arguments.topics, arguments.records, arguments.kills)
        finally:
            broker.end(signal.SIGKILL)


def tell(broker: Broker, topic_count: int, records: int, kills: int) -> int:
    topics = [f"news-{number}" for number in range(topic_count)]
    broker.start()
    say(f"a broker listens on {broker.address}; its directory is empty")
    create_topics(broker.address, topics)
    say(f"{topic_count} topics of {PARTITIONS} partitions; publishing {records:,} records to them")

    publisher = Publisher(broker, topics)
    publisher.publish(records, kills)
    published = publisher.acknowledged
    say(f"{count(published):,} records acknowledged, {publisher.failed:,} not")

    copied = copy_all(broker, topics, published)
    archived = archive_all(broker, topics, published)

    exit_code = broker.end(signal.SIGTERM)
    say(f"the broker was told to stop: exit code {exit_code}")
    broker.start()
    say("it was started once more; reading everything back, as any consumer does")
    found = read_back(broker.address, topics)
    broker.end(signal.SIGTERM)
    is_sound = verify(broker.data, "log") and verify(broker.data, "archive")

    lost, doubled, in_order = compare(published, found)
    say(f"each partition is {'in order' if in_order else 'NOT IN ORDER'}")
    print(f"in {count(published)}, out {count(found)}, lost {lost}, doubled {doubled}", flush=True)
    proved = published == found and count(found) == records and exit_code == 0 and is_sound
    return 0 if proved and copied and archived else 1


def copy_all(broker: Broker, topics: list[str], published: Values) -> bool:
    """Let workers copy everything, kill one of them and the broker; whether the copy is exact."""
    create_topics(broker.address, [COPIES])
    say(f"{WORKERS} workers of one group copy them to another topic, in transactions")
    wanted = Counter(image(value) for values in published.values() for value in values)
    with Workers(broker.address, topics) as workers:
        wait_for_copies(broker.address, wanted.total() // 4, workers)
        workers.kill_one()
        say("a worker was killed, and started again")
        wait_for_copies(broker.address, wanted.total() // 2, workers)
        broker.end(signal.SIGKILL)
        broker.start()
        say("the broker was killed under them, and is ready again")
        wait_for_copies(broker.address, wanted.total(), workers)
    copies = Counter(
        value for values in read_back(broker.address, [COPIES]).values() for value in values
    )
    lost, doubled = (wanted - copies).total(), (copies - wanted).total()
    say(f"copied {copies.total():,} of {wanted.total():,}: lost {lost}, doubled {doubled}")
    return copies == wanted


def wait_for_copies(address: str, wanted: int, workers: Workers) -> None:
    """Until the target holds so many records that are committed, with workers that do not rest."""
    while workers.start_again() or count(read_back(address, [COPIES])) < wanted:
        time.sleep(0.1)


def archive_all(broker: Broker, topics: list[str], published: Values) -> bool:
    """Let everything go to the archive, kill the broker meanwhile; whether all of it is there."""
    archive_at_once(broker.address, topics)
    say("now everything goes to the archive, as soon as it can")
    wait_for_archive(broker.data, topics, 1)
    broker.end(signal.SIGKILL)
    broker.start()
    say("the broker was killed at it, and is ready again")
    wait_for_archive(broker.data, topics, count(published))
    found: Values = {}
    files = size = 0
    for partition in archive_of(broker.data, topics):
        paths = [broker.data / partition["directory"] / file["name"] for file in partition["files"]]
        rows = [pq.read_table(path, columns=["value"]) for path in paths]
        values = [value for table in rows for value in table.column("value").to_pylist()]
        found[partition["topic"], partition["partition"]] = values
        files += len(paths)
        size += partition["bytes"]
    lost, doubled, _ = compare(published, found)
    say(f"archived {count(found):,} of {count(published):,}: {files} Parquet files, {size:,} bytes")
    say(f"read by pyarrow, without a broker: lost {lost}, doubled {doubled}")
    return published == found


def archive_of(data: Path, topics: list[str]) -> list[Any]:
    """What is archived of these topics, by partition, as the tool for directories tells it."""
    command = [sys.executable, "-m", "quackmq", "archive", "ls", str(data), "--json"]
    told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return [each for each in told["partitions"] if each["topic"] in topics]


def wait_for_archive(data: Path, topics: list[str], wanted: int) -> None:
    while sum(each["records"] for each in archive_of(data, topics)) < wanted:
        time.sleep(0.1)


def verify(data: Path, what: str) -> bool:
    """What the tool for directories says of this one: every byte in it is checked."""
    command = [sys.executable, "-m", "quackmq", what, "verify", str(data)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    say(f"quackmq {what} verify: {result.stdout.strip().splitlines()[-1]}")
    return result.returncode == 0


def compare(published: Values, found: Values) -> tuple[int, int, bool]:
    """How many records are lost, how many are there too often, and whether all are in order."""
    lost = doubled = 0
    in_order = True
    for key in published.keys() | found.keys():
        sent, received = published.get(key, []), found.get(key, [])
        lost += (Counter(sent) - Counter(received)).total()
        doubled += (Counter(received) - Counter(sent)).total()
        in_order &= received == sorted(received)
    return lost, doubled, in_order


# --- clients ----------------------------------------------------------------------------------


def create_topics(address: str, topics: list[str]) -> None:
    admin = AdminClient({"bootstrap.servers": address})
    for created in admin.create_topics([NewTopic(topic, PARTITIONS) for topic in topics]).values():
        created.result(timeout=10)


def archive_at_once(address: str, topics: list[str]) -> None:
    """Without it, what is an hour old goes to the archive, or a gigabyte at a time."""
    change = ConfigEntry(
        "quackmq.archive_after_ms", "0", incremental_operation=AlterConfigOpType.SET
    )
    resources = [
        ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[change]) for topic in topics
    ]
    admin = AdminClient({"bootstrap.servers": address})
    for changed in admin.incremental_alter_configs(resources).values():
        changed.result(timeout=10)


@dataclass
class Publisher:
    """An idempotent producer that goes on through every kill, and remembers what was answered."""

    broker: Broker
    topics: list[str]
    acknowledged: Values = field(default_factory=lambda: defaultdict(list))
    answered: int = 0
    failed: int = 0

    def publish(self, records: int, kills: int) -> None:
        producer = Producer(
            {
                "bootstrap.servers": self.broker.address,
                "enable.idempotence": True,
                "linger.ms": 1,
                "batch.num.messages": 200,
                "queue.buffering.max.messages": QUEUED_RECORDS,
                "reconnect.backoff.ms": 20,
                "reconnect.backoff.max.ms": 200,
                "log_level": 2,  # that the broker is away is the point, not news
            }
        )
        instants = [records * (kill + 1) // (kills + 1) for kill in range(kills)]
        for number in range(records):
            topic = self.topics[number % len(self.topics)]
            partition = number // len(self.topics) % PARTITIONS
            while len(producer) >= QUEUED_RECORDS - 1:
                producer.poll(0.01)
            producer.produce(topic, b"%012d" % number, partition=partition, on_delivery=self._note)
            producer.poll(0)
            # A kill that meets nothing on its way would prove little.
            on_their_way = len(producer)
            if instants and self.answered >= instants[0] and on_their_way >= QUEUED_RECORDS // 4:
                instants.pop(0)
                self._kill(on_their_way)
        producer.flush()
        if instants:
            raise SystemExit(f"{records} records are too few for {kills} kills on the way")

    def _note(self, error: KafkaError | None, message: Message) -> None:
        self.answered += 1
        if error is not None:
            self.failed += 1
            return
        self.acknowledged[place(message)].append(message.value() or b"")

    def _kill(self, on_their_way: int) -> None:
        self.broker.end(signal.SIGKILL)
        say(f"killed with {self.answered:,} acknowledged and {on_their_way:,} on their way", end="")
        began = time.monotonic()
        self.broker.start()
        say(f"; ready again after {(time.monotonic() - began) * 1000:.0f} ms", begin="")


def read_back(address: str, topics: list[str]) -> Values:
    """All that the topics hold, from their beginning to their end."""
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "demo",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
    )
    keys = {(topic, partition) for topic in topics for partition in range(PARTITIONS)}
    consumer.assign([Partition(topic, partition, OFFSET_BEGINNING) for topic, partition in keys])
    found: Values = defaultdict(list)
    while keys:
        for message in consumer.consume(1_000, timeout=0.1):
            error = message.error()
            if error is None:
                found[place(message)].append(message.value() or b"")
            elif error.code() == KafkaError._PARTITION_EOF:
                keys.discard(place(message))
            else:
                raise SystemExit(f"cannot read back: {error}")
    consumer.close()
    return found


def place(message: Message) -> Key:
    topic, partition = message.topic(), message.partition()
    assert topic is not None and partition is not None
    return topic, partition


def count(values: Values) -> int:
    return sum(map(len, values.values()))


# --- the broker, as a process -----------------------------------------------------------------


@dataclass
class Broker:
    """`quackmq serve` on one directory. The first start picks a free port, later ones keep it."""

    data: Path
    address: str = "127.0.0.1:0"
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "quackmq", "serve", "--data", str(self.data)]
        command += ["--kafka", self.address, "--log-level", "warning"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("kafka listening on "):
                self.address = line.split()[-1]
            if line.strip() == "ready":
                return
        raise SystemExit(f"the broker did not start: exit code {self.end(signal.SIGKILL)}")

    def end(self, number: signal.Signals) -> int | None:
        """Send a signal that ends it, and wait for that; the answer is its exit code."""
        if self.process is None:
            return None
        self.process.send_signal(number)
        with self.process:
            exit_code = self.process.wait()
        self.process = None
        return exit_code


@dataclass
class Workers:
    """Processes of copier.py, each started again whenever it ends."""

    address: str
    sources: list[str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> Workers:
        self.start_again()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def start_again(self) -> bool:
        """Start those that are not there; whether there was any."""
        names = [f"worker-{number}" for number in range(WORKERS)]
        gone = [name for name in names if self._has_ended(name)]
        for name in gone:
            command = [sys.executable, str(COPIER), self.address, name, COPIES, *self.sources]
            # That it ends when the broker goes is the point, not news.
            self.processes[name] = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        return bool(gone)

    def kill_one(self) -> None:
        process = next(iter(self.processes.values()))
        process.kill()
        process.wait()

    def _has_ended(self, name: str) -> bool:
        return name not in self.processes or self.processes[name].poll() is not None


def give_up(*_: object) -> NoReturn:
    raise SystemExit(f"not done after {DEADLINE_S} s")


BEGAN = time.monotonic()


def say(what: str, begin: str | None = None, end: str = "\n") -> None:
    begin = f"{time.monotonic() - BEGAN:6.2f} s  " if begin is None else begin
    print(begin + what, end=end, flush=True)


if __name__ == "__main__":
    sys.exit(main())
