"""Lets all Java machines of the tests share Spark's classes, which each would load for itself.

Half of what a small Spark program costs is loading classes: about 15,000, which Java reads from 300
files, checks and links anew in every process. Java can keep the result in a file, which later
processes map into memory ("class data sharing"). `make test` makes that file once:

    python -m tests.spark.classes

`tests/conftest.py` tells all Java machines of Spark about it, by variables of the environment that
Spark reads; what a test runs as its users do stays as it is. Java refuses a file that was made by
another version or from other files, and then loads as usual. It compares their paths, too, so
Spark's home is here always the same directory; see `quackmq.spark.python_home`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TARGET = Path(__file__).with_name("target")
HOME = TARGET / "home"
SHARED = TARGET / "classes.jsa"
#: What the file was made from. It is written also where this Java cannot make one.
MADE_FROM = TARGET / ".made-from"

#: For Java machines that live for seconds: what they would gain by compiling more, they never earn
#: back.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
#: For a Java machine on a busy machine, from its start until it has written the file.
DEADLINE_S = 600


def options() -> str:
    """For any Java machine of Spark's; without a word where Java refuses the file."""
    return f"{SHORT_LIVED} -XX:SharedArchiveFile={SHARED} -Xlog:disable" if SHARED.exists() else ""


def share() -> None:
    """From now on, in this process and those that it starts."""
    if SHARED.exists() and not os.environ.get("SPARK_HOME"):
        os.environ["SPARK_HOME"] = str(HOME)
        os.environ["SPARK_SUBMIT_OPTS"] = options()
        os.environ["SPARK_LAUNCHER_OPTS"] = SHORT_LIVED


# --- making it -----------------------------------------------------------------------------------


def make() -> None:
    """Unless it is there, and made from what is installed now."""
    made_from = _made_from()
    if MADE_FROM.exists() and MADE_FROM.read_text() == made_from:
        return
    shutil.rmtree(TARGET, ignore_errors=True)
    _make_home()
    os.environ["SPARK_HOME"] = str(HOME)
    unfinished = SHARED.with_suffix(".unfinished")
    _run(f"{SHORT_LIVED} -XX:ArchiveClassesAtExit={unfinished} -Xlog:disable")
    if unfinished.exists():
        unfinished.rename(SHARED)
    MADE_FROM.write_text(made_from)


def _made_from() -> str:
    import pyspark

    java = os.path.join(os.environ.get("JAVA_HOME", ""), "bin", "java")
    program = java if os.environ.get("JAVA_HOME") else "java"
    version = subprocess.run([program, "-version"], capture_output=True, check=True, text=True)
    return f"{pyspark.__file__} {pyspark.__version__}\n{version.stderr}"


def _make_home() -> None:
    """As `quackmq.spark.python_home` makes one, which has another name every time."""
    from quackmq.spark.python_home import use_compiled_pyspark

    os.environ.pop("SPARK_HOME", None)
    use_compiled_pyspark()
    HOME.mkdir(parents=True)
    for each in Path(os.environ["SPARK_HOME"]).iterdir():
        (HOME / each.name).symlink_to(each.readlink())


def _run(java_options: str) -> None:
    """A program that does a little of everything, so that its classes are those of most tests."""
    from tests.spark.serving import serving
    from tests.spark.session import patiently, session

    directory = Path(tempfile.mkdtemp(prefix="quackmq-classes-"))
    configs = {
        "spark.driver.extraJavaOptions": java_options,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": str(directory),
        # Nothing that is being fetched meanwhile.
        "spark.jars": "",
    }
    try:
        with serving() as broker, session("local[2]", **configs) as spark:
            gateway: Any = spark.sparkContext._gateway
            broker.create("in")
            broker.create("out")
            broker.publish("in", ["a", "b"])
            batch = spark.read.format("quackmq").options(**broker.options("in")).load()
            counted = batch.groupBy("partition").count()
            counted.write.parquet(str(directory / "table"))
            assert spark.read.parquet(str(directory / "table")).collect()[0]["count"] == 2
            stream = (
                spark.readStream.format("quackmq")
                .options(**broker.options("in", startingOffsets="earliest"))
                .load()
                .withWatermark("timestamp", "1 second")
                .dropDuplicatesWithinWatermark(["offset"])
                .select("key", "value")
                .writeStream.format("quackmq")
                .options(**broker.options())
                .option("topic", "out")
                .option("checkpointLocation", str(directory / "checkpoint"))
                .trigger(availableNow=True)
            )
            patiently(lambda: stream.start().awaitTermination())
            assert len(broker.consumed("out")) == 2
        # It writes the file when it ends, which it does with its input.
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(DEADLINE_S)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    os.chdir(ROOT)
    try:
        make()
    except Exception as error:
        # As where there is no Java. It only saves time: tests take longer without, and do as well.
        print(f"Spark's classes are not shared: {error}", file=sys.stderr)
