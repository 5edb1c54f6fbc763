"""The whole story in one run: publish by every protocol, kill everybody in the middle, and count.

A broker runs as a process of its own on an empty directory. Publishers of all its protocols publish
while it is killed with SIGKILL again and again and started anew on the same directory. Two workers
of one consumer group (copier.py) copy all of it to another topic, in transactions; one of them is
killed, and so is the broker. All of it goes to the archive meanwhile, and is counted in its Parquet
files by a reader that knows nothing of brokers. Then Spark: `compact` makes few files of many,
`trending` tells what was talked about, and `audit` proves from the data that nothing is missing. At
last everything is read back through the broker, where it now comes from the archive, and compared
with what was acknowledged: each record is there, once, at its place in the order of its partition,
and so is the image of each.

The last line is `in N, out N, lost 0, doubled 0`, and the exit code is 0 only if it is so. Without
Java the part with Spark is left out, and said to be.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NoReturn

import pyarrow.parquet as pq
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError
from confluent_kafka import TopicPartition as Partition
from confluent_kafka.admin import AdminClient, NewTopic
from copier import GROUP, image
from demo_cast import (
    PARTITIONS,
    Broker,
    HttpPublisher,
    KafkaPublisher,
    LinePublisher,
    Publisher,
    Values,
    Workers,
    ZmqPublisher,
    count,
    pipeline,
    place,
)
from http_client import Api

from quackmq.spark.java import HINT, use_java

COPIES = "copies"
#: Without it, what is an hour old goes to the archive, or a gigabyte at a time.
AT_ONCE = {"quackmq.archive_after_ms": "0"}
#: The longest time of one step. On a busy machine each of Spark's steps takes minutes.
DEADLINE_S = 600
#: Rows of a report.
SHOWN = 12


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--topics", type=int, default=3, help="of the Kafka publisher")
    parser.add_argument("--records", type=int, default=60_000, help="over all of these")
    parser.add_argument("--messages", type=int, default=1_000, help="of each other publisher")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--no-spark", action="store_true", help="leave out what needs Java")
    arguments = parser.parse_args()

    signal.signal(signal.SIGALRM, give_up)
    with tempfile.TemporaryDirectory(prefix="quackmq-demo-") as directory:
        broker = Broker(Path(directory) / "data")
        try:
            return tell(broker, arguments)
        finally:
            broker.end(signal.SIGKILL)


def tell(broker: Broker, arguments: argparse.Namespace) -> int:
    say("starting a broker on an empty directory")
    broker.start()
    for name, address in broker.addresses.items():
        say(f"{name} listens on {address}")
    say("the broker is ready")

    published = publish_all(broker, arguments)
    topics = sorted({topic for topic, _ in published})
    copied = copy_all(broker, topics, published)
    archived = archive_all(broker, topics, published)
    audited = on_spark(broker, topics, count(published), arguments.no_spark)

    exit_code = broker.end(signal.SIGTERM)
    say(f"the broker was told to stop: exit code {exit_code}")
    broker.start()
    say("it was started once more; reading everything back, as any consumer does")
    found = read_back(broker.address, list(published))
    broker.end(signal.SIGTERM)
    is_sound = verify(broker.data, "log") and verify(broker.data, "archive")

    lost, doubled, in_order = compare(published, found)
    say(f"each partition is {'in order' if in_order else 'NOT IN ORDER'}")
    print(f"in {count(published)}, out {count(found)}, lost {lost}, doubled {doubled}", flush=True)
    proved = published == found and exit_code == 0 and is_sound
    return 0 if proved and copied and archived and audited else 1


# --- publish ----------------------------------------------------------------------------------


def publish_all(broker: Broker, arguments: argparse.Namespace) -> Values:
    """By every protocol at once, while the broker is killed; what was acknowledged."""
    topics = [f"news-{number}" for number in range(arguments.topics)]
    create_topics(broker.address, dict.fromkeys(topics, PARTITIONS))
    kafka = KafkaPublisher(broker, topics, arguments.records, arguments.kills, say)
    others: list[Publisher] = [
        HttpPublisher(broker.addresses["http"], "by-http", arguments.messages),
        ZmqPublisher(broker.addresses["zmq"], "by-zmq", arguments.messages),
    ]
    create_topics(broker.address, {f"by-{each.protocol}": 1 for each in others})
    say(f"publishing {arguments.records:,} records over Kafka's protocol, to {len(topics)} topics,")
    say(f"and {arguments.messages:,} each over {' and '.join(each.protocol for each in others)}")
    threads = [threading.Thread(target=each.publish, daemon=True) for each in others]
    for thread in threads:
        thread.start()
    kafka.publish()
    for thread in threads:
        thread.join()
    publishers: list[Publisher] = [kafka, *others]
    # The line protocol has no numbers to tell a repeat by: not while somebody is killed.
    line = LinePublisher(broker.addresses["line"], "by-line", arguments.messages)
    create_topics(broker.address, {line.topic: 1})
    say(f"publishing {arguments.messages:,} over the line protocol, while nobody is killed")
    line.publish()
    publishers.append(line)
    for each in publishers:
        if count(each.acknowledged) != each.messages:  # it has told why
            raise SystemExit(f"the {each.protocol} publisher did not come to its end")
    told = ", ".join(f"{each.protocol} {count(each.acknowledged):,}" for each in publishers)
    say(f"all of it is acknowledged: {told}")
    return {key: values for each in publishers for key, values in each.acknowledged.items()}


# --- copy -------------------------------------------------------------------------------------


def copy_all(broker: Broker, topics: list[str], published: Values) -> bool:
    """Let workers copy everything, kill one of them and the broker; whether the copy is exact."""
    create_topics(broker.address, {COPIES: PARTITIONS})
    leave_receipts(broker.addresses["http"], topics)
    say("2 subscribers of one group copy all of it to another topic, in transactions")
    wanted = Counter(image(value) for values in published.values() for value in values)
    with Workers(broker.address, topics, COPIES) as workers:
        wait_for_copies(broker.address, wanted.total() // 4, workers)
        workers.kill_one()
        say("a subscriber was killed, and started again")
        wait_for_copies(broker.address, wanted.total() // 2, workers)
        broker.end(signal.SIGKILL)
        broker.start()
        say("the broker was killed under them, and is ready again")
        wait_for_copies(broker.address, wanted.total(), workers)
    copies = Counter(value for values in read_copies(broker.address).values() for value in values)
    lost, doubled = (wanted - copies).total(), (copies - wanted).total()
    say(f"copied {copies.total():,} of {wanted.total():,}: lost {lost}, doubled {doubled}")
    return copies == wanted


def leave_receipts(address: str, topics: list[str]) -> None:
    """Whatever the group takes is noted with its cursor, in one step: an audit goes by that."""
    api = Api(address)
    try:
        for topic in topics:
            path = f"/v1/subscriptions/{GROUP}/topics/{topic}"
            api.ask("PUT", path, {"start": "beginning", "receipts": True})
    finally:
        api.close()


def wait_for_copies(address: str, wanted: int, workers: Workers) -> None:
    """Until the target holds so many records that are committed, with workers that do not rest."""
    while workers.start_again() or count(read_copies(address)) < wanted:
        time.sleep(0.1)


def read_copies(address: str) -> Values:
    return read_back(address, [(COPIES, partition) for partition in range(PARTITIONS)])


# --- archive ----------------------------------------------------------------------------------


def archive_all(broker: Broker, topics: list[str], published: Values) -> bool:
    """Wait until everything is in the archive, and kill the broker meanwhile; whether it is."""
    say("meanwhile everything goes to the archive, as soon as it can")
    wait_for_archive(broker.data, topics, 1)
    broker.end(signal.SIGKILL)
    broker.start()
    say("the broker was killed once more, and is ready again")
    wait_for_archive(broker.data, topics, count(published))
    found, files, size = read_archive(broker.data, topics)
    lost, doubled, _ = compare(published, found)
    say(f"archived {count(found):,} of {count(published):,}: {files} Parquet files, {size:,} bytes")
    say(f"read by pyarrow, without a broker: lost {lost}, doubled {doubled}")
    return published == found


def read_archive(data: Path, topics: list[str]) -> tuple[Values, int, int]:
    """What is in the files; how many they are, and their bytes. The broker goes on merging: who
    misses a file looks again, where it has become a part of another."""
    while True:
        found: Values = {}
        files = size = 0
        try:
            for partition in archive_of(data, topics):
                directory = data / partition["directory"]
                paths = [directory / file["name"] for file in partition["files"]]
                rows = [pq.read_table(path, columns=["value"]) for path in paths]
                values = [value for table in rows for value in table.column("value").to_pylist()]
                found[partition["topic"], partition["partition"]] = values
                files += len(paths)
                size += partition["bytes"]
        except FileNotFoundError:
            continue
        return found, files, size


def archive_of(data: Path, topics: list[str]) -> list[Any]:
    """What is archived of these topics, by partition, as the tool for directories tells it."""
    command = [sys.executable, "-m", "quackmq", "archive", "ls", str(data), "--json"]
    told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return [each for each in told["partitions"] if each["topic"] in topics]


def wait_for_archive(data: Path, topics: list[str], wanted: int) -> None:
    while sum(each["records"] for each in archive_of(data, topics)) < wanted:
        time.sleep(0.1)


# --- Spark ------------------------------------------------------------------------------------


def on_spark(broker: Broker, topics: list[str], records: int, is_left_out: bool) -> bool:
    """Let pipelines look at all of it; whether they find what there should be."""
    if is_left_out or not use_java():
        say("as was asked for" if is_left_out else HINT)
        say("LEFT OUT for that reason: compact, trending and audit on Spark")
        return True
    named = ("--topics", ",".join(topics))
    say("the rest runs on Spark; each of its three commands takes up to half a minute to start")
    run_pipeline(broker, "compact", *named)
    # Seconds were enough for all of it: windows of one, which close when the next has begun.
    windows = ("--window", "1s", "--watermark", "500ms", "--top", "3")
    run_pipeline(broker, "trending", *named, *windows, "--once")
    report = run_pipeline(broker, "audit", *named)
    found = sum(row["records"] for row in report["rows"] if row["subscription"] is None)
    is_good = bool(report["is_good"]) and found == records
    verdict = "good" if is_good else "NOT GOOD"
    say(f"audited by Spark, from the data alone: {found:,} of {records:,} records, {verdict}")
    return is_good


def run_pipeline(broker: Broker, name: str, *options: str) -> Any:
    """Announce the pipeline, run it, print its report as a table, and return the report."""
    say(" ".join(["quackmq", "pipeline", "run", name, *options]))
    report = pipeline(broker, name, *options)
    show(report)
    return report


def show(report: Any) -> None:
    """Print the first rows of a report as a table, without columns that are empty."""
    rows = report["rows"][:SHOWN]
    told = [name for name in rows[0] if any(row[name] is not None for row in rows)] if rows else []
    cells = [told] + [[_cell(row[name]) for name in told] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = [text.ljust(width) for text, width in zip(line, widths, strict=True)]
        print("          " + "  ".join(padded).rstrip())
    if left := len(report["rows"]) - len(rows):
        print(f"          … and {left} more rows")
    print("          " + "; ".join(f"{name}: {_cell(of)}" for name, of in report["facts"].items()))


def _cell(value: Any) -> str:
    match value:
        case None | []:
            return "-"
        case float():
            return f"{value:,.2f}"
        case int():
            return f"{value:,}"
    return str(value)


# --- look and compare -------------------------------------------------------------------------


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


def read_back(address: str, keys: list[tuple[str, int]]) -> Values:
    """All that these partitions hold, from their beginning to their end."""
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "demo",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
    )
    consumer.assign([Partition(topic, partition, OFFSET_BEGINNING) for topic, partition in keys])
    found: Values = defaultdict(list)
    left = set(keys)
    while left:
        for message in consumer.consume(1_000, timeout=0.1):
            error = message.error()
            if error is None:
                found[place(message)].append(message.value() or b"")
            elif error.code() == KafkaError._PARTITION_EOF:
                left.discard(place(message))
            else:
                raise SystemExit(f"cannot read back: {error}")
    consumer.close()
    return found


def create_topics(address: str, partitions: dict[str, int]) -> None:
    admin = admin_of(address)
    wanted = [NewTopic(topic, each, config=AT_ONCE) for topic, each in partitions.items()]
    for created in admin.create_topics(wanted).values():
        created.result(timeout=10)


def admin_of(address: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": address, "log_level": 4})


def give_up(*_: object) -> NoReturn:
    raise SystemExit(
        f"gave up: the last step was not done after {DEADLINE_S} s. If the machine is busy, "
        "try again later, or leave out Spark: .venv/bin/python examples/demo.py --no-spark"
    )


BEGAN = time.monotonic()


def say(what: str) -> None:
    """Print a line, and give the next step its time."""
    signal.alarm(DEADLINE_S)
    print(f"{time.monotonic() - BEGAN:6.2f} s  {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
