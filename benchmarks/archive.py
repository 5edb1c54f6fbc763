"""The archive against a bare pyarrow program, against the log, and beside publishing: ratios.

    python -m benchmarks.archive [--scale 1.0] [--directory DIR] [--only NAME …]

The broker is `quackmq serve --sync always`, its directory filled before it starts; the bare program
is a loop in this process. Both sides of a row are measured alternately, the best of three each. A
scale below 1 shrinks the amounts for a quick look; figures in README.md are made with 1, which
takes some minutes and 4 GB of disk.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.broker import Broker
from benchmarks.driver import Driver
from benchmarks.support import Row, measure
from quackmq import limits
from quackmq.archive import limits as archive_limits
from quackmq.archive.archiving.archiver import Archiver
from quackmq.archive.parquet.reader import ArchiveReader
from quackmq.archive.tiered_store import TieredStore
from quackmq.cli.inspect.archive_directory import ArchiveDirectory, ArchivedPartition
from quackmq.clock import Clock
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, PartitionKey
from quackmq.records.batch import Batch, Record
from quackmq.records.codec import encode
from quackmq.records.columns import to_arrow
from quackmq.stores.local import LocalOptions, LocalStore

ROUNDS: Final = 3
RECORDS: Final = 1_000_000
#: What a producer sends at a time by default, about a megabyte.
BATCH_RECORDS: Final = 4_000
VALUE_BYTES: Final = 200
PRODUCED: Final = 2_000_000
DELIVERED: Final = 2_000
LOOKED_UP: Final = 10_000_000
LOOKUPS: Final = 50
MANY_TOPICS: Final = 1_000
START_MS: Final = 1_700_000_000_000
#: How the archive writes its columns, said once more.
PARQUET: Final[dict[str, Any]] = {
    "compression": "zstd",
    "use_dictionary": ["timestampType", "key", "producer_id", "producer_epoch"],
    "column_encoding": {
        "offset": "DELTA_BINARY_PACKED",
        "timestamp": "DELTA_BINARY_PACKED",
        "sequence": "DELTA_BINARY_PACKED",
        "value": "DELTA_LENGTH_BYTE_ARRAY",
    },
    "write_statistics": ["offset", "timestamp", "producer_id"],
    "write_page_index": True,
    "write_page_checksum": True,
}
#: Nothing is due by itself before a benchmark is over.
LATER: Final = Policy(archive_after_ms=10**12, archive_bytes=10**15)
AT_ONCE: Final = Policy(archive_after_ms=0)


class Bench(NamedTuple):
    driver: Driver
    root: Path
    scale: float

    def many(self, count: int, least: int = 1_000) -> int:
        return max(least, int(count * self.scale))

    @contextmanager
    def filled(self, topics: dict[str, Policy], batches: Sequence[bytes]) -> Iterator[Path]:
        """A directory in which each of these topics has these batches."""
        directory = Path(tempfile.mkdtemp(dir=self.root))
        asyncio.run(fill(directory / "data", topics, batches))
        yield directory
        shutil.rmtree(directory)


# --- what is put ------------------------------------------------------------------------------


def json_like(number: int, chance: random.Random) -> bytes:
    """What services write: fields that repeat, some that are drawn from few, and an id."""
    text = (
        f'{{"id": "{chance.getrandbits(64):016x}", "number": {number}, '
        f'"user": "user-{chance.randrange(50_000)}", '
        f'"event": "{chance.choice(("view", "click", "order", "leave"))}", '
        f'"path": "/ponds/{chance.randrange(900)}/ducks", "took_ms": {chance.randrange(3_000)}, '
        f'"text": "'
    )
    words = ("quack", "pond", "feather", "bread", "swan", "rain", "south", "reed")
    while len(text) < VALUE_BYTES - 2:
        text += chance.choice(words) + " "
    return (text[: VALUE_BYTES - 2] + '"}').encode()


def batches_of(count: int, value: Callable[[int], bytes]) -> list[bytes]:
    found = []
    for start in range(0, count, BATCH_RECORDS):
        numbers = range(start, min(count, start + BATCH_RECORDS))
        records = [
            Record(0, START_MS + number, b"%d" % (number % 1000), value(number))
            for number in numbers
        ]
        found.append(encode(records))
    return found


def json_batches(count: int) -> list[bytes]:
    chance = random.Random(7)
    return batches_of(count, lambda number: json_like(number, chance))


async def fill(directory: Path, topics: dict[str, Policy], batches: Sequence[bytes]) -> None:
    directory.mkdir()
    store = await LocalStore.open(directory, LocalOptions(sync="os"))
    for name, policy in topics.items():
        key = PartitionKey((await store.create_topic(name, 1, policy)).id, 0)
        for data in batches:
            await store.append([Append(key, Batch.parse(bytearray(data)))])
    await store.close()


def ask(broker: Broker, path: str) -> Any:
    request = urllib.request.Request(f"http://{broker.http}{path}", method="POST")
    with urllib.request.urlopen(request, timeout=900) as answer:
        return json.load(answer)


def archive_now(broker: Broker, topic: str) -> tuple[dict[str, int], float]:
    """What was archived, and how long that took."""
    began = time.perf_counter()
    done = ask(broker, f"/v1/topics/{topic}/archive/now")
    return done, time.perf_counter() - began


# --- archiving --------------------------------------------------------------------------------


def archiving(bench: Bench) -> list[Row]:
    """Also how large it becomes, since it is there."""
    batches = json_batches(bench.many(RECORDS))
    topics = [f"round-{number}" for number in range(ROUNDS + 1)]
    ours: list[float] = []
    bare: list[float] = []
    sizes: dict[str, int] = {}
    with (
        bench.filled(dict.fromkeys(topics, LATER), batches) as directory,
        Broker.started(directory, "always") as broker,
    ):
        archive_now(broker, topics.pop())  # the process that makes files has started
        for topic in topics:
            sizes, seconds = archive_now(broker, topic)
            ours.append(sizes["records"] / seconds)
            bare.append(bare_program(batches, directory / "bare.parquet"))
    ratio = max(ours) / max(bare)
    share = sizes["file_bytes"] / sizes["log_bytes"]
    log_mib, file_mib = (sizes[name] / limits.MIB for name in ("log_bytes", "file_bytes"))
    return [
        Row(
            "archiving JSON of 200 B / decode and write Parquet",
            max(ours),
            max(bare),
            "records/s",
            "≥ 0.7",
            ratio >= 0.7,
        ),
        Row("archive of it / log", file_mib, log_mib, "MiB", "≤ 0.6", share <= 0.6),
    ]


def bare_program(batches: Sequence[bytes], path: Path) -> float:
    """The same batches decoded, the same columns written in row groups of the same size, and
    synced; records a second."""
    records = 0
    began = time.perf_counter()
    with path.open("wb") as file:
        writer: pq.ParquetWriter | None = None
        waiting: list[pa.RecordBatch] = []
        rows = 0
        for index, data in enumerate(batches):
            waiting.append(to_arrow([Batch.parse(data)]))
            rows += waiting[-1].num_rows
            if rows < archive_limits.ARCHIVE_ROW_GROUP_ROWS and index + 1 < len(batches):
                continue
            table = pa.Table.from_batches(waiting)
            if writer is None:
                writer = pq.ParquetWriter(file, table.schema, **PARQUET)
            writer.write_table(table, row_group_size=rows)
            records += rows
            waiting, rows = [], 0
        assert writer is not None
        writer.close()
        file.flush()
        os.fsync(file.fileno())
    return records / (time.perf_counter() - began)


# --- beside publishing and delivery -----------------------------------------------------------


def beside(bench: Bench) -> list[Row]:
    batches = json_batches(bench.many(RECORDS))
    topics = [f"backlog-{number}" for number in range(2 * ROUNDS + 1)]
    rates: dict[bool, list[float]] = {False: [], True: []}
    waits: dict[bool, list[float]] = {False: [], True: []}
    short = 0
    with (
        bench.filled(dict.fromkeys(topics, LATER), batches) as directory,
        Broker.started(directory, "always") as broker,
    ):
        archive_now(broker, topics.pop())

        def produce() -> float:
            count = bench.many(PRODUCED)
            figures = bench.driver.run("produce", broker.kafka, "live", count, 100)
            return figures["messages_per_second"]

        def deliver() -> float:
            count = bench.many(DELIVERED, 200)
            return bench.driver.run("endtoend", broker.kafka, "news", count, 100)["p99_us"]

        for _ in range(ROUNDS):
            for load, found in ((produce, rates), (deliver, waits)):
                found[False].append(load())
                figure, whole = while_archiving(broker, topics.pop(), load)
                found[True].append(figure)
                short += not whole
    if short:
        print(f"{short} of {2 * ROUNDS} loads were longer than the archiving beside them")
    rate = max(rates[True]), max(rates[False])
    wait = min(waits[True]), min(waits[False])
    return [
        Row(
            "produce 100 B while archiving / alone",
            *rate,
            "msg/s",
            "≥ 0.85",
            rate[0] / rate[1] >= 0.85,
        ),
        Row(
            "produce to consume, p99, while archiving / alone",
            *wait,
            "µs",
            "≤ 2",
            wait[0] / wait[1] <= 2,
        ),
    ]


def while_archiving(broker: Broker, topic: str, load: Callable[[], float]) -> tuple[float, bool]:
    """A load's figure, and whether archiving went on all the while."""
    archiver = threading.Thread(target=archive_now, args=(broker, topic))
    archiver.start()
    figure = load()
    whole = archiver.is_alive()
    archiver.join()
    return figure, whole


# --- reading ----------------------------------------------------------------------------------


def fetch(bench: Bench) -> list[Row]:
    """The whole history by Kafka's Fetch. More is there than is asked for, as clients fetch
    ahead."""
    count = bench.many(RECORDS)
    topics = {"log": LATER, "archived": LATER}
    rates: dict[str, list[float]] = {name: [] for name in topics}
    with (
        bench.filled(topics, json_batches(count * 5 // 4)) as directory,
        Broker.started(directory, "always") as broker,
    ):
        archive_now(broker, "archived")
        for _ in range(ROUNDS):
            for name, found in rates.items():
                figures = bench.driver.run("consume", broker.kafka, name, count)
                found.append(figures["messages_per_second"])
    ours, bare = max(rates["archived"]), max(rates["log"])
    return [
        Row(
            "fetch from the archive / from the log",
            ours,
            bare,
            "msg/s",
            "≥ 0.3",
            ours / bare >= 0.3,
        )
    ]


def lookup(bench: Bench) -> list[Row]:
    """Row groups that one lookup by time reads, in an archive that nobody has read before."""
    count = bench.many(LOOKED_UP, 200_000)
    batches = batches_of(count, lambda number: b"%d" % number)
    with bench.filled({"history": LATER}, batches) as directory:
        most, mean_ms = asyncio.run(look_up(directory / "data", count))
    name = f"row groups read for a time in {count:,} archived records, at the most / one"
    return [
        Row(name, most, 1, "row groups", "≤ 1", most <= 1),
        Row("one such lookup, mean / 50 ms", mean_ms, 50, "ms", "", True),
    ]


async def look_up(directory: Path, count: int) -> tuple[int, float]:
    store = await LocalStore.open(directory, LocalOptions())
    tiered = await TieredStore.open(store, store.disk)
    (topic,) = (await tiered.topics()).values()
    archiver = Archiver(tiered, lambda: {topic.name: topic}, Clock(), lambda _: None)
    await archiver.archive()
    await archiver.close()
    manifest = tiered.registry.manifest(PartitionKey(topic.id, 0))
    assert manifest is not None and manifest.records == count
    chance = random.Random(7)
    reads: list[int] = []
    seconds = 0.0
    for _ in range(LOOKUPS):
        number = chance.randrange(count)
        reader = CountingReader(store.disk)
        began = time.perf_counter()
        found = reader.offset_at(manifest, START_MS + number)
        seconds += time.perf_counter() - began
        assert found is not None and found.offset == number
        reads.append(reader.row_groups)
    await tiered.close()
    return max(reads), seconds / LOOKUPS * 1000


class CountingReader(ArchiveReader):
    row_groups = 0

    def _load_row_group(self, *arguments: Any) -> pa.RecordBatch:
        self.row_groups += 1
        return super()._load_row_group(*arguments)


# --- memory -----------------------------------------------------------------------------------


def memory(bench: Bench) -> list[Row]:
    """What a broker and its worker take for archiving many topics beyond what they take for one
    that is small, against the bounds that limits.py names."""
    batches = json_batches(BATCH_RECORDS)
    topics = bench.many(MANY_TOPICS, 50)
    names = [f"topic-{number}" for number in range(topics)]
    little = most_memory(bench, ["topic"], json_batches(100))
    much = most_memory(bench, names, batches)
    pool = (
        archive_limits.ARCHIVE_BUFFERS * archive_limits.ARCHIVE_BUFFER_BYTES
        + archive_limits.ARCHIVE_NEW_FILE_BYTES
        + 2 * archive_limits.ARCHIVE_ROW_GROUP_BYTES
        + archive_limits.ARCHIVE_GROUP_BYTES
    )
    name = f"memory for archiving {topics:,} topics beyond one / its named bounds"
    ours, bound = (much - little) / limits.MIB, pool / limits.MIB
    return [Row(name, ours, bound, "MiB", "≤ 1", ours <= bound)]


def most_memory(bench: Bench, topics: Sequence[str], batches: Sequence[bytes]) -> int:
    policies = dict.fromkeys(topics, AT_ONCE)
    with bench.filled(policies, batches) as directory:
        with Broker.started(directory, "always") as broker:
            wait_for_archive(directory / "data", topics)
            return broker.server.most_resident_bytes


def wait_for_archive(directory: Path, topics: Sequence[str]) -> None:
    waiting = set(topics)
    while waiting:
        time.sleep(0.2)
        with ArchiveDirectory(directory) as archived:
            waiting -= {
                topic for topic in waiting if archived.manifest(ArchivedPartition(topic, 0))
            }


# --- the table --------------------------------------------------------------------------------

SECTIONS: Final[dict[str, Callable[[Bench], list[Row]]]] = {
    "archiving": archiving,
    "beside": beside,
    "fetch": fetch,
    "lookup": lookup,
    "memory": memory,
}

if __name__ == "__main__":
    sys.exit(measure(__doc__, SECTIONS, lambda root, scale: Bench(Driver(root), root, scale)))
