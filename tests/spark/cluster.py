"""A standalone cluster of Spark's own on this machine: a master and two workers, from PySpark.

The workers listen on two addresses of the loopback network, 127.0.0.1 and 127.0.0.2: Spark starts a
speculative attempt only on another host than that of the first.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark

from tests.spark import classes

HOSTS = ("127.0.0.1", "127.0.0.2")
DEADLINE_S = 120
PAUSE_S = 0.1
_JAVA_OPTIONS = classes.options() or classes.SHORT_LIVED
ROOT = Path(__file__).parents[2]
#: For sessions on it.
CONFIGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.executor.memory": "512m",
    # Executors are to find `tests`, too.
    "spark.executorEnv.PYTHONPATH": str(ROOT),
    "spark.executor.extraJavaOptions": _JAVA_OPTIONS,
}


@contextmanager
def standalone(directory: Path) -> Iterator[str]:
    """Its URL, when both workers have registered. All processes go when the block is left; the
    executors go with their workers."""
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as processes:
        log = directory / "master.log"
        arguments = ["--host", HOSTS[0], "--port", "0", "--webui-port", "0"]
        processes.enter_context(_running("master.Master", arguments, log))
        (url,) = _said(log, r"Starting Spark master at (spark://\S+)", 1)
        for number, host in enumerate(HOSTS):
            work = str(directory / f"work-{number}")
            size = ["--cores", "1", "--memory", "1g", "--work-dir", work]
            place = ["--host", host, "--port", "0", "--webui-port", "0"]
            processes.enter_context(
                _running("worker.Worker", [*place, *size, url], directory / f"worker-{number}.log")
            )
        _said(log, r"Registering worker (\S+)", len(HOSTS))
        yield url


@contextmanager
def _running(kind: str, arguments: list[str], log: Path) -> Iterator[None]:
    home = os.environ.get("SPARK_HOME") or str(Path(pyspark.__file__).parent)
    program = os.path.join(home, "bin", "spark-class")
    environment = {
        **os.environ,
        "SPARK_HOME": home,
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": _JAVA_OPTIONS,
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, f"org.apache.spark.deploy.{kind}", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _said(log: Path, pattern: str, times: int) -> list[str]:
    """Wait until a log has so many lines like that; what they said."""
    deadline = time.monotonic() + DEADLINE_S
    while len(found := re.findall(pattern, log.read_text(errors="replace"))) < times:
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-3_000:]
        time.sleep(PAUSE_S)
    return found
