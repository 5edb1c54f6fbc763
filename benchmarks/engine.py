"""The engine against the bare machine: every figure is a ratio of two things measured in one run.

    python -m benchmarks.engine [--scale 1.0] [--directory DIR] [--only NAME …]

Each row says what was measured, against what, the ratio and the figure to reach. The bare loops do
the least that the same work needs: a checksum and a write, a sync, a read. A scale below 1 shrinks
the amounts for a quick look; figures in README.md are made with 1. Best of three, alternating.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from statistics import median

import uvloop
from crc32c import crc32c

from benchmarks.support import HEADING, Row, drop_page_cache, line, resident_bytes
from quackmq.cli.broker import process
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, PartitionKey, Read
from quackmq.records.batch import Batch, Record
from quackmq.records.codec import encode
from quackmq.stores.local import LocalOptions, LocalStore
from quackmq.stores.local.options import SyncMode

MIB = 1024 * 1024
ROUNDS = 3
IN_FLIGHT = 16
ROUNDS_TO_FILL_THE_TAIL = 12


def large_batch() -> Batch:
    value = os.urandom(1000)
    records = [Record(0, 1_700_000_000_000, None, value, ()) for _ in range(1030)]
    return Batch.parse(encode(records))


def small_batch() -> Batch:
    return Batch.parse(encode([Record(0, 1_700_000_000_000, None, b"x" * 100, ())]))


async def best(
    ours: Callable[[], Awaitable[float]], bare: Callable[[], Awaitable[float]]
) -> tuple[float, float]:
    """The best of each, measured alternately, so that a slow moment hits both."""
    measured: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        measured.append((await ours(), await bare()))
    return max(each[0] for each in measured), max(each[1] for each in measured)


# --- appending and reading large batches -----------------------------------------------------


async def append_large(root: Path, scale: float, sync: SyncMode) -> Row:
    batch = large_batch()
    count = max(20, int((2000 if sync == "os" else 300) * scale))

    async def ours() -> float:
        directory = Path(tempfile.mkdtemp(dir=root))
        store = await LocalStore.open(directory, LocalOptions(sync=sync))
        topic = await store.create_topic("news", 1, Policy())
        key = PartitionKey(topic.id, 0)
        seconds = 0.0
        for received in _received(batch, count):
            started = time.perf_counter()
            await _in_flight(
                len(received),
                lambda: store.append([Append(key, Batch.parse(received.pop()), owned=True)]),  # noqa: B023
                IN_FLIGHT,
            )
            seconds += time.perf_counter() - started
        await store.close()
        shutil.rmtree(directory)
        return count * batch.size / seconds / MIB

    async def bare() -> float:
        descriptor, path = tempfile.mkstemp(dir=root)
        seconds = 0.0
        for received in _received(batch, count):
            started = time.perf_counter()
            while received:
                data = received.pop()
                crc32c(data)
                os.write(descriptor, data)
                if sync == "always":
                    os.fdatasync(descriptor)
            seconds += time.perf_counter() - started
        os.close(descriptor)
        os.unlink(path)
        return count * batch.size / seconds / MIB

    what = "crc32c + write" + (" + fdatasync" if sync == "always" else "")
    fast, limit = await best(ours, bare)
    return Row(
        f"append 1 MB batches, sync={sync} / {what}",
        fast,
        limit,
        "MiB/s",
        "≥ 0.8",
        fast / limit >= 0.8,
    )


def _received(batch: Batch, count: int) -> Iterator[list[bytearray]]:
    """So many buffers with a batch in each, as a listener has received them; some at a time."""
    while count:
        step = min(count, 250)
        yield [bytearray(batch.view) for _ in range(step)]
        count -= step


async def _in_flight(count: int, call: Callable[[], Awaitable[object]], width: int) -> None:
    """Like requests that come in one after the other, `width` of them unanswered at the most."""
    waiting: deque[Awaitable[object]] = deque()
    for _ in range(count):
        waiting.append(call())
        await asyncio.sleep(0)  # as between two requests: the loop has other things to do
        if len(waiting) >= width:
            await waiting.popleft()
    for each in waiting:
        await each


async def read_sequentially(root: Path, scale: float) -> list[Row]:
    batch = large_batch()
    count = max(50, int(1500 * scale))
    directory = Path(tempfile.mkdtemp(dir=root))
    options = LocalOptions(sync="os", tail_bytes=1)
    store = await LocalStore.open(directory, options)
    topic = await store.create_topic("news", 1, Policy())
    key = PartitionKey(topic.id, 0)
    await _in_flight(count, lambda: store.append([Append(key, batch)]), IN_FLIGHT)
    files = sorted(directory.glob("log/*/*.log"))

    async def ours() -> float:
        offset = size = 0
        started = time.perf_counter()
        while True:
            (part,) = await store.read([Read(key, offset, MIB)], max_bytes=MIB)
            if not part.size:
                break
            size += part.size
            offset = Batch.peek(part.chunks[-1]).next_offset
        assert size == count * batch.size
        return size / (time.perf_counter() - started) / MIB

    async def bare(check: bool) -> float:
        size = 0
        started = time.perf_counter()
        for path in files:
            descriptor = os.open(path, os.O_RDONLY)
            position = 0
            while data := os.pread(descriptor, MIB, position):
                position += len(data)
                if check:
                    crc32c(data)
            size += position
            os.close(descriptor)
        return size / (time.perf_counter() - started) / MIB

    fast, limit = await best(ours, lambda: bare(False))
    again, checked = await best(ours, lambda: bare(True))
    await store.close()
    shutil.rmtree(directory)
    name = "sequential read of 1 MB"
    return [
        Row(f"{name} / pread", fast, limit, "MiB/s", "≥ 0.8", fast / limit >= 0.8),
        Row(f"{name} / pread + crc32c", again, checked, "MiB/s", "", True),
    ]


# --- one publisher of single messages --------------------------------------------------------


async def one_alone(root: Path, scale: float) -> Row:
    """Measured in turns, since both depend on what else the disk does at the moment."""
    batch = small_batch()
    count = max(200, int(3000 * scale))
    directory = Path(tempfile.mkdtemp(dir=root))
    store = await LocalStore.open(directory, LocalOptions())
    topic = await store.create_topic("news", 1, Policy())
    appends = [Append(PartitionKey(topic.id, 0), batch)]
    descriptor, path = tempfile.mkstemp(dir=root)
    frame = bytes(512)
    os.pwrite(descriptor, bytes(count * len(frame)), 0)
    os.fsync(descriptor)
    ours: list[float] = []
    bare: list[float] = []
    for number in range(count):
        started = time.perf_counter()
        os.pwrite(descriptor, frame, number * len(frame))
        os.fdatasync(descriptor)
        between = time.perf_counter()
        await store.append(appends)
        bare.append(between - started)
        ours.append(time.perf_counter() - between)
    os.close(descriptor)
    os.unlink(path)
    await store.close()
    shutil.rmtree(directory)
    return Row(
        "one 100 B append alone, sync=always, p50 / write over + fdatasync (time)",
        1e6 * median(ours),
        1e6 * median(bare),
        "µs",
        "",
        True,
    )


# --- many publishers of single messages ------------------------------------------------------


async def publishers(root: Path, scale: float) -> list[Row]:
    batch = small_batch()
    seconds = max(0.5, 2 * scale)

    async def rate(number: int, topics: int) -> float:
        directory = Path(tempfile.mkdtemp(dir=root))
        store = await LocalStore.open(directory, LocalOptions())
        keys = [
            PartitionKey((await store.create_topic(f"news{n}", 1, Policy())).id, 0)
            for n in range(topics)
        ]
        done = 0
        until = time.perf_counter() + seconds

        async def publisher(key: PartitionKey) -> None:
            nonlocal done
            appends = [Append(key, batch)]
            while time.perf_counter() < until:
                await store.append(appends)
                done += 1

        started = time.perf_counter()
        await asyncio.gather(*(publisher(keys[n % topics]) for n in range(number)))
        result = done / (time.perf_counter() - started)
        await store.close()
        shutil.rmtree(directory)
        return result

    many, one = await best(lambda: rate(64, 1), lambda: rate(1, 1))
    spread, together = await best(lambda: rate(64, 64), lambda: rate(64, 1))
    return [
        Row(
            "64 publishers / one, 100 B, sync=always", many, one, "msg/s", "≥ 20", many / one >= 20
        ),
        Row(
            "64 publishers on 64 topics / on one",
            spread,
            together,
            "msg/s",
            "≥ 0.5",
            spread / together >= 0.5,
        ),
    ]


# --- opening ---------------------------------------------------------------------------------


async def opening(root: Path, scale: float) -> list[Row]:
    batch = large_batch()
    partitions = 200
    total = int(4096 * MIB * scale)
    directory = Path(tempfile.mkdtemp(dir=root))
    store = await LocalStore.open(directory, LocalOptions(sync="os"))
    topic = await store.create_topic("news", partitions, Policy())
    keys = [PartitionKey(topic.id, n) for n in range(partitions)]
    written = 0

    def append() -> Awaitable[object]:
        nonlocal written
        key = keys[(written // batch.size) % partitions]
        written += batch.size
        return store.append([Append(key, batch)])

    await _in_flight(total // batch.size, append, IN_FLIGHT)
    await store.close()

    async def open_seconds() -> float:
        drop_page_cache()
        started = time.perf_counter()
        opened = await LocalStore.open(directory, LocalOptions(sync="os"))
        seconds = time.perf_counter() - started
        await opened.close()
        return 1 / seconds

    async def read_seconds() -> float:
        drop_page_cache()
        started = time.perf_counter()
        for path in directory.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    while file.read(MIB):
                        continue
        return 1 / (time.perf_counter() - started)

    ours, bare = await best(open_seconds, read_seconds)
    shutil.rmtree(directory)
    row = Row(
        f"opening {total // MIB} MiB, {partitions} partitions / reading them (time)",
        1 / ours,
        1 / bare,
        "s",
        "< 0.1",
        bare / ours < 0.1,
    )
    return [row]


# --- memory ----------------------------------------------------------------------------------


async def memory_through(root: Path, scale: float) -> Row:
    _forget_the_other_rows()
    batch = large_batch()
    total = int(10240 * MIB * scale)
    directory = Path(tempfile.mkdtemp(dir=root))
    store = await LocalStore.open(directory, LocalOptions(sync="os"))
    topic = await store.create_topic("news", 1, Policy(keep_bytes=MIB))
    key = PartitionKey(topic.id, 0)
    count = total // batch.size
    warm = max(200, count // 10)
    await _in_flight(warm, lambda: store.append([Append(key, batch)]), IN_FLIGHT)
    gc.collect()
    before = resident_bytes()
    done = warm
    while done < count:  # the disk need not hold it all
        step = min(256, count - done)
        await _in_flight(step, lambda: store.append([Append(key, batch)]), IN_FLIGHT)
        done += step
        await store.trim(key, (await store.offsets(key)).next)
    gc.collect()
    after = resident_bytes()
    await store.close()
    shutil.rmtree(directory)
    return Row(
        f"memory after {total // MIB} MiB through one partition / after a tenth",
        after / MIB,
        before / MIB,
        "MiB",
        "≤ 1.2",
        after <= 1.2 * before,
    )


async def memory_partitions(root: Path, scale: float) -> Row:
    _forget_the_other_rows()
    batch = small_batch()
    partitions = max(1000, int(10_000 * scale))
    directory = Path(tempfile.mkdtemp(dir=root))
    store = await LocalStore.open(directory, LocalOptions(sync="os"))
    topic = await store.create_topic("news", partitions, Policy())
    keys = [PartitionKey(topic.id, n) for n in range(partitions)]

    async def round_of_appends() -> None:
        for start in range(0, partitions, 500):
            await asyncio.gather(
                *(_await(store.append([Append(key, batch)])) for key in keys[start : start + 500])
            )

    for _ in range(ROUNDS_TO_FILL_THE_TAIL):
        await round_of_appends()
    gc.collect()
    before = resident_bytes()
    for _ in range(ROUNDS_TO_FILL_THE_TAIL):
        await round_of_appends()
    gc.collect()
    after = resident_bytes()
    await store.close()
    shutil.rmtree(directory)
    return Row(
        f"memory with {partitions} partitions after 24 rounds / after 12",
        after / MIB,
        before / MIB,
        "MiB",
        "≤ 1.2",
        after <= 1.2 * before,
    )


def _forget_the_other_rows() -> None:
    """What they used and the allocator still holds would hide what these rows are about."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


async def _await(awaitable: Awaitable[object]) -> None:
    await awaitable


# --- the table -------------------------------------------------------------------------------


async def measure(root: Path, scale: float, only: list[str]) -> list[Row]:
    parts: dict[str, Callable[[], Awaitable[Row | list[Row]]]] = {
        "append-os": lambda: append_large(root, scale, "os"),
        "append-always": lambda: append_large(root, scale, "always"),
        "read": lambda: read_sequentially(root, scale),
        "one": lambda: one_alone(root, scale),
        "publishers": lambda: publishers(root, scale),
        "opening": lambda: opening(root, scale),
        "memory-through": lambda: memory_through(root, scale),
        "memory-partitions": lambda: memory_partitions(root, scale),
    }
    rows: list[Row] = []
    for name, part in parts.items():
        if only and name not in only:
            continue
        result = await part()
        for row in result if isinstance(result, list) else [result]:
            rows.append(row)
            print(line(row), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    process.prepare()  # as the broker's own process is
    root = Path(tempfile.mkdtemp(prefix="quackmq-bench-", dir=arguments.directory))
    print(HEADING)
    try:
        rows = uvloop.run(measure(root, arguments.scale, arguments.only))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return 0 if all(row.reached for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
