"""What docs/pipelines.md tells its readers to type is run, and what it says of it is so.

Of several lines with one pipeline the last is run, in its place, and the others are read as the
command reads them. Its broker, directories and amounts are others here, and a stream takes what
there is.
"""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from quackmq.cli import pipeline as command
from quackmq.cli.main import main
from quackmq.spark.pipelines import pipeline, summaries
from quackmq.spark.pipelines.job import Job
from quackmq.spark.pipelines.options import options_of
from tests.kit.readme import INDENTED, ROOT, blocks, commands
from tests.protocols.http.v1.serving import DEADLINE_S
from tests.spark.pipelines.parquet_files import fetched
from tests.spark.serving import Broker, serving
from tests.spark.session import STARVED, patiently

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.needs("java"), pytest.mark.timeout(1200)]

#: Of JSON that is shown there is nothing to run.
TEXT = (ROOT / "docs" / "pipelines.md").read_text().replace("```json", "```text")
RUN = "quackmq pipeline run "
#: What takes long, and shows no more by it.
SMALLER = {
    "--processes 8 --operations 5000": "--processes 1 --operations 5",
    "--requests 200 --workers 4 --kills 2": "--requests 3 --workers 1 --kills 0 --customers 10",
}
STREAMS = {"trending"}
#: In the hour that the document replays.
BEGIN_MS = round(datetime(2026, 11, 16, 8, 30, tzinfo=UTC).timestamp() * 1000)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """In the place of the one without an archive."""
    with serving(directory=tmp_path_factory.mktemp("pond")) as running:
        yield running


def lines() -> list[str]:
    """Each as it stands, without what is said about it."""
    typed = [
        line for block in blocks(TEXT) if block.kind == INDENTED for line in commands(block.text)
    ]
    return [shlex.join(shlex.split(line, comments=True)) for line in typed if line.startswith(RUN)]


def name_of(line: str) -> str:
    return line.removeprefix(RUN).split()[0]


def test_every_line_is_one_that_the_command_understands() -> None:
    """And each pipeline has its line."""
    assert {name_of(line) for line in lines()} == set(summaries())
    for line in lines():
        name, *arguments = shlex.split(line.removeprefix(RUN))
        chosen = pipeline(name)
        options_of(command._parse_options(name, chosen, arguments), chosen.Options)


def test_what_the_document_runs_does_what_it_says(
    broker: Broker, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(broker)
    monkeypatch.chdir(tmp_path)
    reports = {}
    for name, line in {name_of(line): line for line in lines()}.items():
        for long, short in SMALLER.items():
            line = line.replace(long, short)
        line = line.replace("/var/lib", str(tmp_path)) + " --once" * (name in STREAMS)
        words = shlex.split(line.removeprefix("quackmq "))
        reports[name] = run(spark, [*words, "--broker", broker.address, "--json"], monkeypatch)
    assert [row["files after"] for row in reports["compact"]["rows"] if row["files before"]] == [1]
    table = f"SELECT sum(entries) FROM '{tmp_path}/trends/table/*/*.parquet'"
    told = [json.loads(value or b"")["entries"] for _, _, value in broker.consumed("trends")]
    # The last window is open.
    assert fetched(table) == [(sum(told),)] == [(3,)]
    assert reports["audit"]["is_good"]  # and nothing to draw: there are no receipts
    again = [value for _, _, value in broker.consumed("orders-again")]
    assert again == [b"bread paid", b"milk paid"]
    assert (tmp_path / "stress.png").stat().st_size
    assert reports["metrics"]["facts"] == {"measurements missing": 0}
    assert reports["simulate"]["is_good"]


def run(spark: SparkSession, words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The report of a command that ends well; once more, where Spark was not patient enough."""
    while True:
        output, errors = io.StringIO(), io.StringIO()
        with monkeypatch.context() as patch:
            patch.setattr(command, "Job", partial(Job, spark=spark, output=errors))
            patch.setattr(sys, "stdout", output)
            patch.setattr(sys, "stderr", errors)
            code = main(words)
        if STARVED not in errors.getvalue():
            assert code == 0, (words, errors.getvalue())
            return json.loads(output.getvalue())


def test_its_programs_run_on_a_session_that_is_there(broker: Broker, spark: SparkSession) -> None:
    fill(broker)
    text = TEXT.replace("localhost:9092", broker.address)
    names: dict[str, Any] = {"spark": spark}
    spark.conf.set("spark.quackmq.bootstrap.servers", broker.address)
    try:
        programs = [block.text for block in blocks(text) if block.kind == "python"]
        for program in programs:
            patiently(partial(exec, program, names))
        assert {row.name for row in names["windows"].collect()} == {"news"}
        assert names["report"].facts["entries read"] == 4
        assert names["done"].topic == "news"
    finally:
        spark.conf.unset("spark.quackmq.bootstrap.servers")


def fill(broker: Broker) -> None:
    """What the document takes for granted; once."""
    if broker.client().get("/v1/topics/news").status == 200:
        return
    for topic in ("news", "alerts", "orders", "trends", "orders-again"):
        broker.create(topic)
    for at in range(4):
        publish(broker, "news", f"duck {at}", BEGIN_MS + at * 120_000)
        broker.archive("news")
    for value in ("bread paid", "bread sent", "milk paid"):
        publish(broker, "orders", value, BEGIN_MS)


def publish(broker: Broker, topic: str, value: str, time_ms: int) -> None:
    producer = Producer({"bootstrap.servers": broker.address})
    producer.produce(topic, value, partition=0, timestamp=time_ms)
    assert producer.flush(DEADLINE_S) == 0
