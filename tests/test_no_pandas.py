"""Short processes and brokers load neither pandas nor, where they need none, pyarrow."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.processes

PROGRAM = """
import sys
{before}
import pyarrow
assert pyarrow.array([1]).to_pylist() == [1]
print("pandas" in sys.modules)
"""


@pytest.mark.parametrize(
    ("before", "loaded"),
    [("", "True"), ("from quackmq.no_pandas import hide_pandas; hide_pandas()", "False")],
)
def test_pandas_is_loaded_unless_a_process_does_without(before: str, loaded: str) -> None:
    assert find_spec("pandas") is not None, "there is something to do without"
    program = PROGRAM.format(before=before)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == loaded


BROKER = """
import asyncio, sys, tempfile
from pathlib import Path
from quackmq.archive.tiered_store import TieredStore
from quackmq.archive.archiving.worker_process import WorkerProcess
from quackmq.broker import Broker
import quackmq.cli.broker.runner
from quackmq.stores.local import LocalOptions, LocalStore

async def main():
    with tempfile.TemporaryDirectory() as directory:
        log = await LocalStore.open(Path(directory), LocalOptions())
        store = await TieredStore.open(log, log.disk)
        broker = Broker(store, archive=store, file_builder=WorkerProcess())
        await broker.open()
        await broker.close()
        await store.close()

asyncio.run(main())
print("pyarrow" in sys.modules)
"""


def test_a_broker_that_reads_no_archive_does_not_load_pyarrow() -> None:
    """It is a half of a small broker's memory, and of the time that it takes to start."""
    done = subprocess.run(
        [sys.executable, "-c", BROKER], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


SPARK = """
import sys
import quackmq.spark.source.task, quackmq.spark.sink.sink
import quackmq.spark.source.source, quackmq.spark.sink.encode
from quackmq.records.columns import constant
assert constant(-7, __import__("pyarrow").int32()).as_py() == -7
print("pyarrow" in sys.modules, "pandas" in sys.modules)
"""


def test_a_process_that_plans_a_read_or_commits_a_write_for_spark_does_not_load_pandas() -> None:
    """Spark starts several for each query, which do no more than that."""
    done = subprocess.run([sys.executable, "-c", SPARK], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True False"
