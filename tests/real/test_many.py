"""SIGKILL while thousands of partitions are written to: nothing acknowledged is lost or doubled."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from quackmq import limits
from quackmq.model.topic import PartitionKey
from quackmq.stores import limits as stores_limits
from quackmq.stores.local import LocalStore
from tests.real.many import TOPIC
from tests.stores.calls import read_all

pytestmark = pytest.mark.processes

PARTITIONS = 5_000
KILLS = 3
#: A process of Python with the store's modules, and 3 kB a partition.
OTHER_MEMORY_BYTES = 100 * limits.MIB + PARTITIONS * 3 * limits.KIB


async def test_5000_partitions_of_a_store_killed_again_and_again_keep_what_was_acknowledged(
    tmp_path: Path,
) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    source = random.Random(seed)
    acknowledged: dict[int, int] = {}
    for _ in range(KILLS):
        killed_after(tmp_path / "data", source.randint(2_000, 12_000), acknowledged)
    assert len(acknowledged) > 1_000
    store = await LocalStore.open(tmp_path / "data")
    topic = (await store.topics())[TOPIC]
    for number in range(PARTITIONS):
        key = PartitionKey(topic.id, number)
        records = await read_all(store, key)
        assert records == [(offset, b"%d" % offset) for offset in range(len(records))]
        assert len(records) > acknowledged.get(number, -1)
    await store.close()
    own_files = list((tmp_path / "data/log").rglob("*.log"))
    assert own_files == [], "small partitions lie in packs"


def killed_after(directory: Path, count: int, acknowledged: dict[int, int]) -> None:
    """Run the program until so much was acknowledged, kill it, and note all that it told."""
    command = [sys.executable, "-m", "tests.real.many", str(directory), str(PARTITIONS)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        for _ in range(count):
            note(process.stdout.readline(), acknowledged)
        memory = peak_bytes(process.pid)
        process.kill()
        for line in process.stdout:
            if line.endswith(b"\n"):
                note(line, acknowledged)
    if memory is not None:
        assert memory < stores_limits.HELD_BYTES + OTHER_MEMORY_BYTES


def note(line: bytes, acknowledged: dict[int, int]) -> None:
    number, offset = map(int, line.split())
    assert offset > acknowledged.get(number, -1), "an offset was given twice"
    acknowledged[number] = offset


def peak_bytes(pid: int) -> int | None:
    """The most memory that a process had; None where the system does not tell."""
    if not os.path.exists(f"/proc/{pid}/status"):
        return None
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * limits.KIB
